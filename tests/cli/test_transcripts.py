"""What commands print and which files they make, frozen in transcripts.txt: answers and refusals.

The file lists the commands. Each runs in a folder of its own with `results`, tables of tests as `data`, and
what `$ cat > NAME` writes. A new command is a new line. A change of words or numbers that is meant freezes
them again, and the diff shows each line that changed:

    MUP_TPU_GOLDEN=write scripts/test -n 0 tests/cli/test_transcripts.py
"""

import os
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("transcripts.txt")
PARTS = [part.partition("\n")[::2] for part in re.split(r"^\$ ", FROZEN.read_text(), flags=re.M)[1:]]
COMMANDS = [command.removeprefix("mup-tpu ") for command, _ in PARTS if command.startswith("mup-tpu")]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
SPACE, MINUS_0 = re.compile(r"[ ─]+"), re.compile(r"-(?=0(?:\.0+)?(?![\d.]))")


@pytest.fixture(scope="module")
def transcripts():
    """Frozen output by command."""
    frozen = {command.removeprefix("mup-tpu "): output for command, output in PARTS}
    assert len(frozen) == len(PARTS), "a command stands there twice"
    yield frozen
    if os.environ.get("MUP_TPU_GOLDEN") == "write":
        lines = (f"$ {command}\n{frozen[command.removeprefix('mup-tpu ')]}" for command, _ in PARTS)
        FROZEN.write_text("".join(lines))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(ROOT / "tests" / "analysis" / "data")
    (tmp_path / "results").mkdir()  # so that a command makes new folders here
    for place in (ROOT / "results").iterdir():
        (tmp_path / "results" / place.name).symlink_to(place)
    for command, text in PARTS:
        if command.startswith("cat > "):
            (tmp_path / command.removeprefix("cat > ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def files() -> set[str]:
    """Files and folders here, of which only figures are listed one by one."""
    return {str(path) for pattern in ("*", "figures/*") for path in Path().glob(pattern)} - {"__pycache__"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_the_frozen_words_and_numbers(command, transcripts, outcome, folder):
    """Numbers may differ by one of their last digit or 1 %, which other processors' arithmetic changes.

    Those of several hyperparameters may differ by 5 %: quantiles of a few thousand draws differ by 3 %.
    """
    words, _, written = command.partition("; cat ")
    before, share = files(), 0.05 if "," in command.partition("--tune ")[2] else 0.01
    code, out, error = outcome(*shlex.split(words))
    shown = out + (Path(written).read_text() if written else "")
    if code:
        shown += f"{error}\n" * (code == 2) + f"exit code {code}\n"
    if made := files() - before:
        shown += f"made: {' '.join(sorted(made))}\n"
    shown = MINUS_0.sub("", SPACE.sub(" ", shown))
    if os.environ.get("MUP_TPU_GOLDEN") == "write":
        transcripts[command] = shown
    for line, frozen in zip(shown.splitlines(), transcripts[command].splitlines(), strict=True):
        assert NUMBER.sub("0", line) == NUMBER.sub("0", frozen)
        for number, wanted in zip(NUMBER.findall(line), NUMBER.findall(frozen), strict=True):
            digit = 10.0 ** -len(wanted.partition(".")[2])
            assert float(number) == pytest.approx(float(wanted), rel=share, abs=1.01 * digit), line
