"""Which faults do the tests catch? Draw mutations of the package, and run the tests that reach each.

python benchmarks/mutations.py --seed 1 --count 60 > drawn.tsv        draw and run
python benchmarks/mutations.py --again drawn.tsv                      run the same mutations again

A mutation changes an operator, a comparison or a constant, or removes a line. The package is copied first, so
that the working tree stays as it is. Each is tried on the tests of its module first, without slow ones. For
those that pass, all tests run once, and note which of them reach each line that is to change, also in
processes that they start; the shortest of these within `--seconds` try it. Each line of the output has the
outcome, the place, the line before and after, the number of tests that reach it, and the one that failed.
Outcomes are `caught`, `survived`, `slow` (the tests took four times as long as without the mutation),
`unreached`, and `moved` (the package no longer has the line, or has it more than once).
"""

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401
import pandas  # noqa: F401
import pyarrow  # noqa: F401
import pytest
import scipy.optimize  # noqa: F401
import torch  # noqa: F401

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

# Module of the copied package that notes the tests which reach a line
REACHED = """
import os
known = set()
def at(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in known:
        known.add((number, test))
        try:
            file = os.open(os.path.join(os.path.dirname(__file__), "reached.txt"), 1089, 0o600)
            os.write(file, f"{number}\\t{test}\\n".encode())
            os.close(file)
        except OSError:
            pass
"""


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


def marked(source: str, numbers: dict[int, int]) -> str:
    """Return a module that notes when a test reaches lines, each by the number of its mutation.

    A line that runs as the module is imported counts as reached by whatever enters a function of the module.
    """
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for line, number in numbers.items():
        mark = ast.parse(f"__import__('mup_tpu.reached', fromlist=['at']).at({number})").body[0]
        is_inside = any(f.body[0].lineno <= line + 1 <= (f.end_lineno or 0) for f in functions)
        if not is_inside:
            for function in functions:
                function.body.insert(1 if ast.get_docstring(function) else 0, mark)
            continue
        blocks = [
            (block, at)
            for node in ast.walk(tree)
            for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
            if isinstance(block, list)
            for at, statement in enumerate(block)
            if hasattr(statement, "end_lineno") and statement.lineno <= line + 1 <= statement.end_lineno
        ]
        block, at = blocks[-1]  # ast.walk goes from the outside to the inside
        block.insert(at, mark)
    return ast.unparse(ast.fix_missing_locations(tree))


def found_again(mutation: tuple[str, str, str]) -> tuple[str, str, str]:
    """Return a mutation where its line is now: in its module, or in the only one that has it."""
    module, before, after = mutation
    sources = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").split("\n")
        for path in sorted((ROOT / "mup_tpu").rglob("*.py"))
    }
    now = [module] if before in sources.get(module, []) else [m for m in sources if before in sources[m]]
    return (now[0] if len(now) == 1 and sources[now[0]].count(before) == 1 else "", before, after)


def run_tests(copy: Path, seconds: float, *words: str) -> tuple[int | None, str]:
    """Return pytest's exit code and output; the code is None if the time ended.

    A fork saves the imports of the packages that a test needs, which take longer than most tests.
    """
    command = ["-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow and not nightly", *words]
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            os.setsid()
            os.chdir(copy)
            os.dup2(output.fileno(), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
            code = int(pytest.main(command))
            sys.stdout.flush()
            os._exit(code)
        end = time.monotonic() + seconds
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a test left, too
        if not ended[0]:
            os.waitpid(pid, 0)
            return None, ""
        output.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), output.read()


def reaching(
    copy: Path, drawn: list[tuple[str, str, str]], processes: int, tests: list[str]
) -> list[dict[str, float]]:
    """Return the tests that reach each mutation's line, and their seconds.

    Tests that fail in the copy anyway are left out.
    """
    sources = {module: (copy / module).read_text(encoding="utf-8") for module, _, _ in drawn}
    for module, source in sources.items():
        lines = source.split("\n")
        numbers = {lines.index(b): i for i, (m, b, _) in enumerate(drawn) if m == module and b in lines}
        (copy / module).write_text(marked(source, numbers), encoding="utf-8")
    notes = copy / "mup_tpu" / "reached.txt"
    notes.with_suffix(".py").write_text(REACHED)
    # Groups are part of a test's name under pytest-xdist.
    distribution = ("-n", str(processes), "--dist", "loadgroup")
    _, output = run_tests(copy, 7200.0, *distribution, "--durations=0", *tests)
    failing = {*re.findall(r"^(?:FAILED|ERROR) (.+?)@", output, re.MULTILINE)}
    seconds = dict[str, float]()
    for took, name in re.findall(r"^([\d.]+)s (?:setup|call) +(\S.*)@", output, re.MULTILINE):
        seconds[name] = seconds.get(name, 0.0) + float(took)
    by_line: dict[tuple[str, str], set[str]] = {}
    for note in notes.read_text().splitlines():
        number, _, test = note.partition("\t")
        module, before, _ = drawn[int(number)]
        by_line.setdefault((module, before), set()).add(test.rpartition("@")[0])
    for module, source in sources.items():
        (copy / module).write_text(source, encoding="utf-8")
    return [
        # Pytest omits durations below 5 ms.
        {test: seconds.get(test, 0.005) for test in by_line.get((module, before), set()) - failing - {""}}
        for module, before, _ in drawn
    ]


def nearest(module: str) -> str:
    """Return the file of a module's tests, or the folder of its room's."""
    mirror = Path("tests", *Path(module).parts[1:]).with_name(f"test_{Path(module).name}")
    return str(mirror if (ROOT / mirror).exists() else mirror.parent)


def outcome(
    copy: Path, mutation: tuple[str, str, str], reaching: dict[str, float], seconds: float
) -> tuple[str, str]:
    """Return the outcome of a mutation, and the test that caught it."""
    module, before, after = mutation
    path = copy / module
    source = path.read_text(encoding="utf-8")
    tests = sorted(reaching, key=lambda test: (reaching[test], test))
    left = [test for i, test in enumerate(tests) if sum(map(reaching.get, tests[: i + 1])) <= seconds]
    while left:
        path.write_text(source.replace(before, after, 1), encoding="utf-8")
        failed, has_ended = failing(copy, left, 4 * seconds)
        path.write_text(source, encoding="utf-8")
        if not has_ended:
            return "slow", ""
        if not failed:
            break
        if not failing(copy, failed, 4 * seconds)[0]:
            return "caught", failed[0]
        if not {*failed} & {*left}:
            return "undecided", ""  # a test of the module's file fails in the copy anyway
        left = [test for test in left if test not in failed]
    return "survived" if tests else "unreached", ""


def failing(copy: Path, tests: list[str], seconds: float) -> tuple[list[str], bool]:
    """Return the first of these tests that fails (all if none can start), and whether they ended in time."""
    listed = copy / "listed.txt"
    listed.write_text("\n".join(tests))
    code, output = run_tests(copy, seconds, "-n", "0", "-x", f"@{listed}")
    names = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    return (names[:1] or tests if code else []), code is not None


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw mutations and run the tests that reach them.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--rooms", nargs="*", default=[], help="folders of mup_tpu; by default all")
    parser.add_argument("--seconds", type=float, default=90.0, help="time of a mutation's tests")
    parser.add_argument("--processes", type=int, default=2, help="processes of the run that finds the tests")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="tests that may reach a line")
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
        passed = []
        for was in drawn:
            mutation = found_again(was)
            tests = {nearest(mutation[0]): 0.0}
            result, test = outcome(copy, mutation, tests, given.seconds) if mutation[0] else ("moved", "")
            if result in ("caught", "moved"):
                print(result, mutation[0] or was[0], *mutation[1:], 1, test, sep="\t", flush=True)
            else:
                passed.append(mutation)
        for mutation, tests in zip(passed, reaching(copy, passed, given.processes, given.tests), strict=True):
            result, test = outcome(copy, mutation, tests, given.seconds)
            print(result, *mutation, len(tests), test, sep="\t", flush=True)


if __name__ == "__main__":
    main()
