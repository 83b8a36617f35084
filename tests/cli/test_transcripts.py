"""What commands print about stored results, word for word, frozen in transcripts.txt.

A change of words or numbers that is meant freezes them again, and the diff shows each line that changed:

    MUP_TPU_GOLDEN=write scripts/test -n 0 tests/cli/test_transcripts.py
"""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("transcripts.txt")
PROMPT = "$ mup-tpu "
NUMBER = re.compile(r"\d+(?:\.\d+)?")
SPACE = re.compile(r"[ ─]+")
COMMANDS = [
    "analyze results/quickstart",
    "analyze results/quickstart --next",
    "analyze results/batch_transfer",
    "analyze results/decay_transfer",
    "analyze results/quickstart --runs",
    "analyze results/tune_small",
    "analyze results/coord_check",
    "predict results/nanogpt_mup --at width=4096",
    "predict results/ladder_mup --at flops=1e16",
    "predict results/batch_transfer --at batch_size=256",
    "plan --at params=1.3B --budget 200h --on 8xA100 --out PLAN",
]


@pytest.fixture(scope="module")
def transcripts():
    """Frozen output by command."""
    text = FROZEN.read_text() if FROZEN.exists() else ""
    frozen = {}
    for part in text.split(PROMPT)[1:]:
        command, _, output = part.partition("\n")
        frozen[command] = output
    yield frozen
    if os.environ.get("MUP_TPU_GOLDEN") == "write":
        FROZEN.write_text("".join(f"{PROMPT}{command}\n{frozen[command]}" for command in COMMANDS))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_the_frozen_words_and_numbers(command, transcripts, outcome, monkeypatch, tmp_path):
    """Numbers may differ by one of their last digit or 0.5 %, which other processors' arithmetic changes."""
    monkeypatch.chdir(ROOT)
    plan = str(tmp_path / "plan.toml")
    code, out, error = outcome(*command.replace("PLAN", plan).split())
    assert code == 0, error
    out = SPACE.sub(" ", out.replace(plan, "PLAN"))
    if os.environ.get("MUP_TPU_GOLDEN") == "write":
        transcripts[command] = out
    for line, frozen in zip(out.splitlines(), transcripts[command].splitlines(), strict=True):
        assert NUMBER.sub("0", line) == NUMBER.sub("0", frozen)
        for number, wanted in zip(NUMBER.findall(line), NUMBER.findall(frozen), strict=True):
            digit = 10.0 ** -len(wanted.partition(".")[2])
            assert float(number) == pytest.approx(float(wanted), rel=0.005, abs=1.01 * digit), line
