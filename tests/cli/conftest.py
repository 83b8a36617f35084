"""Shared by the tests of commands."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

SWEEP_TOML = """
experiment = "small"
scale = {{width = [32]}}
tune = {{learning_rate = ["2^-7", 0.02]}}

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
def small() -> list[object]:
    """Options of a trial that trains in a second."""
    size = ["--width", 32, "--base-width", 32, "--head-size", 16]
    return [*size, "--sequence-length", 32, "--batch-size", 4, "--steps", 12]


@pytest.fixture
def sweep_toml(corpus: Path) -> str:
    """TOML of a sweep of four trials."""
    return SWEEP_TOML.format(corpus=str(corpus))


@pytest.fixture
def valleys(tmp_path: Path) -> Callable[..., Path]:
    """Writes a table, a parabola a scale; a column is a value, or a function of scale and x = log2(lr)."""

    def write(
        name="runs.csv", scales=(64, 128, 256), grid=range(-10, -4), scale="width", tuned="lr", **columns
    ):
        given = {"loss": lambda s, x: 2 + 0.05 * (x + 7) ** 2} | columns
        rows = [
            {scale: s, tuned: 2.0**x}
            | {k: v(s, x) if callable(v) else v for k, v in given.items() if v is not None}
            for s in scales
            for x in grid
        ]
        table = pd.DataFrame(rows)
        for column in [name for name, value in given.items() if isinstance(value, list)]:
            table = table.explode(column)  # a row for each value
        (table.to_parquet if name.endswith("parquet") else table.to_csv)(tmp_path / name, index=False)
        return tmp_path / name

    return write


@pytest.fixture
def printed(outcome) -> Callable[..., str]:
    """Standard output of a command that ends well."""

    def run(*arguments):
        code, out, error = outcome(*arguments)
        assert code == 0, error
        return out

    return run


@pytest.fixture
def refused(outcome) -> Callable[..., str]:
    """Sentence of a command that refuses its input."""

    def run(*arguments):
        code, out, error = outcome(*arguments)
        assert code == 2, out + error
        return error

    return run
