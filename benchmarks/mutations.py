"""Which faults do the tests catch? Draw mutations of the package, and run the tests that mirror each module.

python benchmarks/mutations.py --seed 1 --count 60 > drawn.tsv        draw and run
python benchmarks/mutations.py --again drawn.tsv                      run the same mutations again

A mutation changes an operator, a comparison or a constant, or removes a line. The package is copied first, so
that the working tree stays as it is. Each line of the output has the outcome, the place, and the line before
and after: `caught`, `survived`, `slow` (the time ended), or `gone` (the line has changed since it was drawn).
"""

import argparse
import ast
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.Pow: ("**", "*"),
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip


def mutations(source: str) -> Iterator[tuple[str, int, str]]:
    """Yield the kind of each mutation of a module, its line's number from 0, and the line that it makes."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0) - 1
        if line < 0 or node.end_lineno != line + 1 or not lines[line].isascii():
            continue  # columns count bytes
        text, start, end = lines[line], node.col_offset, node.end_col_offset
        match node:
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                old, new = OPERATORS[type(op)]
                at = text.index(old, left.end_col_offset, right.col_offset)
                yield "operator", line, text[:at] + new + text[at + len(old) :]
            case ast.Compare(left, [op], [right]):
                old, new = COMPARISONS[type(op)]
                at = text.index(old, left.end_col_offset, right.col_offset)
                yield "comparison", line, text[:at] + new + text[at + len(old) :]
            case ast.Constant(bool() as value):
                yield "constant", line, text[:start] + str(not value) + text[end:]
            case ast.Constant(int() | float() as value):
                yield "constant", line, text[:start] + repr(value + 1) + text[end:]
            case ast.Assign() | ast.AugAssign() | ast.Return() | ast.Raise() | ast.Continue():
                yield "line", line, text[:start] + "pass" + text[end:]
            case ast.Expr(ast.Call()):
                yield "line", line, text[:start] + "pass" + text[end:]


def draw(seed: int, count: int, rooms: list[str]) -> list[tuple[str, str, str]]:
    """Draw as many mutations of each kind; each is a module with the line before and after."""
    sites: dict[str, list[tuple[str, str, str]]] = {}
    for room in rooms or [""]:
        for path in sorted((ROOT / "mup_tpu" / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            lines = source.split("\n")
            for kind, line, changed in mutations(source):
                site = (str(path.relative_to(ROOT)), lines[line], changed)
                if lines.count(lines[line]) == 1:  # found again by its text
                    sites.setdefault(kind, []).append(site)
    generator = random.Random(seed)
    kinds = sorted(sites)
    return [generator.choice(sites[kinds[i % len(kinds)]]) for i in range(count)]


def mirror(module: str, root: Path) -> str:
    """Return the tests of a module: the file of its name, or all files of its room."""
    path = Path(module).relative_to("mup_tpu")
    of_module = root / "tests" / path.with_name(f"test_{path.name}")
    return str(of_module if of_module.exists() else of_module.parent)


def run_tests(copy: Path, seconds: float, *words: str) -> tuple[int | None, str]:
    """Return pytest's exit code and output; the code is None if the time ended."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", "--tb=no", "-p", "no:cacheprovider"
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(copy)}
    with subprocess.Popen(
        [*command, *words], cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    ) as run:  # fmt: skip
        try:
            output, _ = run.communicate(timeout=seconds)
            return run.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return None, ""


@functools.cache
def failing(copy: Path, tests: str, seconds: float) -> tuple[str, ...]:
    """Return the tests that fail without a mutation, such as those that need the repository's history."""
    _, output = run_tests(copy, seconds, tests)
    return tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE))


def outcome(copy: Path, module: str, before: str, after: str, seconds: float) -> str:
    path, tests = copy / module, mirror(module, copy)
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    if source.split("\n").count(before) != 1:
        return "gone"
    left_out = [f"--deselect={test}" for test in failing(copy, tests, 3 * seconds)]
    path.write_text(source.replace(before, after, 1), encoding="utf-8")
    code, _ = run_tests(copy, seconds, "-x", *left_out, tests)
    path.write_text(source, encoding="utf-8")
    return "slow" if code is None else "caught" if code else "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw mutations and run the tests of their modules.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--rooms", nargs="*", default=[], help="folders of mup_tpu; by default all")
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit of a mutation's tests")
    parser.add_argument("--again", type=Path, help="an earlier output, whose mutations are run again")
    given = parser.parse_args()
    if given.again:
        rows = [line.split("\t") for line in given.again.read_text(encoding="utf-8").splitlines()]
        drawn = [(row[1], row[2], row[3]) for row in rows]
    else:
        drawn = draw(given.seed, given.count, given.rooms)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for module, before, after in drawn:
            found = outcome(copy, module, before, after, given.seconds)
            print(found, module, before, after, sep="\t", flush=True)


if __name__ == "__main__":
    main()
