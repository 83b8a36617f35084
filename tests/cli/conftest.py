"""Shared by the tests of commands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mup_tpu.cli import main

Outcome = Callable[..., tuple[int, str, str]]

SWEEP_TOML = """
experiment = "small"
widths = [32]
learning_rates = ["2^-7", 0.02]

[base.model]
base_width = 32
head_size = 16

[base.data]
corpus = {corpus!r}
sequence_length = 32
batch_size = 4

[base.train]
steps = 12
"""


@pytest.fixture
def outcome(capfd: pytest.CaptureFixture[str]) -> Outcome:
    """Runs `mup-tpu ARGUMENTS`; exit code, standard output and standard error on one line."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            main([str(a) for a in arguments])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return run


@pytest.fixture
def small() -> list[object]:
    """Options of a trial that trains in a second."""
    size = ["--width", 32, "--base-width", 32, "--head-size", 16]
    return [*size, "--sequence-length", 32, "--batch-size", 4, "--steps", 12]


@pytest.fixture
def sweep_toml(corpus: Path) -> str:
    """TOML of a sweep of four trials."""
    return SWEEP_TOML.format(corpus=str(corpus))
