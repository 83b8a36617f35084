"""How the code reads: names that the glossary of CONTRIBUTING.md refuses."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mup_tpu"
REFUSED = {"found", "there", "said", "told", "asked", "held", "own", "its", "usual"}


def refused_names(source: str) -> list[tuple[int, str]]:
    """Variables and arguments with a refused name, each with its line."""
    names = []
    for node in ast.walk(ast.parse(source)):
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else ""
        if name.strip("_") in REFUSED:
            names.append((node.lineno, name))
    return sorted(names)


ALLOWED: dict[str, int] = {"analysis": 1}
"""Refused names that a room keeps: `held` is a key of stored analyses."""


def test_names_are_terms_of_the_field():
    rooms = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        for line, name in refused_names(path.read_text(encoding="utf-8")):
            rooms.setdefault(place.parts[0], []).append(f"{place}:{line} {name}")
    for room, names in rooms.items():
        assert len(names) <= ALLOWED.get(room, 0), "\n".join(names)


def test_refused_names_are_recognised():
    source = "def f(own):\n    found = own\n    for said in found: pass\n    held_out = its()\n"
    assert refused_names(source) == [(1, "own"), (2, "found"), (3, "said")]
