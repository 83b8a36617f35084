"""Lines and tables on a terminal."""

import io

from mup_tpu.cli.console import Console


def test_on_a_terminal_lines_break_between_words_and_commands_stay_whole():
    console = Console()
    console._force_terminal, console.file = True, io.StringIO()
    console.width = 40
    verdict = (
        "sp: DRIFTS: the optimum of 64 costs 0.041 nat at 384, whatever-it-is-called-in-the-table-of-runs"
    )
    console.print(f"  {verdict}")
    lines = console.file.getvalue().splitlines()
    assert " ".join(line.strip() for line in lines) == verdict
    assert all(len(line) <= 40 or len(line.split()) == 1 for line in lines)
    assert lines[1].startswith("    ")
    console.file = io.StringIO()
    console.print("from width 64 on it may cost 0.041 nat (95 % 0.027 to 0.051), that it is 12 min")
    assert [line.strip() for line in console.file.getvalue().splitlines()] == [
        "from width 64 on it may cost 0.041 nat", "(95 % 0.027 to 0.051), that it is", "12 min",
    ]  # fmt: skip
    console.file = io.StringIO()
    console.print(verdict, wrap=False)
    assert console.file.getvalue() == f"{verdict}\n"
