"""Rows of earlier versions get the columns that came since from their configuration."""

import json
from pathlib import Path

import pandas as pd

from mup_tpu.config import Trial, columns
from mup_tpu.store import load_runs
from mup_tpu.store.old_rows import complete

RESULTS = Path(__file__).parents[2] / "results"


def test_rows_of_earlier_versions_are_completed_from_their_configuration():
    runs = load_runs(RESULTS / "nanogpt_mup")
    for name in columns.CONFIGURED:
        assert runs[name].notna().all(), name
    flat = [
        {k: v for part in json.loads(config).values() for k, v in part.items()} for config in runs["config"]
    ]
    for name in ("momentum", "final_lr_fraction", "eval_batches", "vocab_size"):
        assert runs[name].tolist() == [row[name] for row in flat]
    assert (runs["base_depth"] == 0).all(), "a field that came later has its default"
    assert (runs["tokens_planned"] == 122 * 8 * 256).all()


def test_new_rows_and_tables_of_others_stay_as_they_are():
    row = pd.DataFrame([columns.configured(Trial())])
    pd.testing.assert_frame_equal(complete(row), row)
    other = pd.DataFrame({"actual_head_size": [None], "config": [None], "lr": [0.1]})
    pd.testing.assert_frame_equal(complete(other), other)
