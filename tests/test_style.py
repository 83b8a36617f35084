"""How the code reads: names that the glossary of CONTRIBUTING.md refuses."""

import ast
from collections import defaultdict
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


def test_names_are_terms_of_the_field():
    places = [(path, refused_names(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")]
    assert not [f"{path}:{line} {name}" for path, names in places for line, name in names]


def test_each_class_has_one_name():
    places, aliases = defaultdict(list), []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                aliases += [f"{path}:{node.lineno} {a.name} as {a.asname}" for a in node.names if a.asname]
    assert not {name: paths for name, paths in places.items() if len(paths) > 1 and name[0] != "_"}
    assert not aliases
