"""The rule by which a GPU's packs are compiled; tests/devices/test_cuda.py has packs that follow it."""

from pathlib import Path

import pandas as pd
import pytest

from mup_tpu.config import Trial
from mup_tpu.models import declare
from mup_tpu.training import compilation

TABLE = Path(__file__).parents[2] / "benchmarks" / "gpu_peers.csv"
VOCAB, BATCH, LENGTH = 256, 16, 512


def declared(width):
    trial = Trial().replace(width=width, head_size=64, depth=2, batch_size=BATCH, sequence_length=LENGTH)
    return declare(trial.model, VOCAB, LENGTH)


def test_seconds_of_a_step_are_those_of_an_h100():
    table = pd.read_csv(TABLE)
    graphs = table[table["peer"] == "graph"]
    assert len(graphs) >= 4
    for row in graphs.itertuples():
        tokens = row.members * BATCH * LENGTH
        found = compilation.plain_step_s(declared(row.width), VOCAB, tokens)
        assert found == pytest.approx(tokens / row.tokens_per_s, rel=0.15)


def test_eight_trials_of_width_64_are_compiled_for_more_than_17_000_steps():
    """Of an H100's 4.6 ms a step."""
    tokens = 8 * BATCH * LENGTH
    worth = [compilation.pays(declared(64), VOCAB, tokens, steps) for steps in (17_000, 18_000)]
    assert worth == [False, True]
