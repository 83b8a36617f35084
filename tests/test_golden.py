"""Ids, rows, predictions and figures' data of stored results, frozen in golden.json.

Analyses are frozen in each sweep's figures/analysis.json (test_results.py).

A refactoring leaves all of them as they are. Where a change is meant, freeze again and say why in the commit:

    MUP_TPU_GOLDEN=write scripts/test -n 0 tests/test_golden.py
"""

import hashlib
import json
import os
import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

from mup_tpu import plots
from mup_tpu.analysis import analyze, load_table
from mup_tpu.analysis.coord_check import by_setting
from mup_tpu.analysis.prediction import predict_analysis
from mup_tpu.analysis.rows import ranked
from mup_tpu.analysis.targets import read_targets
from mup_tpu.store import is_search, load_curves, load_runs
from mup_tpu.words.predictions import predictions_to_dict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FILE = Path(__file__).with_name("golden.json")
WRITE = os.environ.get("MUP_TPU_GOLDEN") == "write"

STORES = [path.parent for path in sorted(RESULTS.rglob("store.json"))]
EXPERIMENTS = [p for p in sorted((ROOT / "experiments").glob("*.py")) if "\nSWEEP =" in p.read_text()]
ANALYSED = {
    "quickstart": "width=4096",
    "horizon_transfer": "tokens=1e9",
    "ladder_mup": "flops=1e16",
    "batch_transfer": "batch_size=256",
}
"""Sweeps by folder, with a scale to predict at."""


@pytest.fixture(scope="module")
def golden():
    """Frozen values by name; values that a test adds are written at the end where MUP_TPU_GOLDEN=write."""
    frozen = json.loads(FILE.read_text()) if FILE.exists() else {}
    yield frozen
    if WRITE:
        FILE.write_text(json.dumps(frozen, indent=0, sort_keys=True) + "\n")


def check(golden, name, value):
    """Compare a value with the frozen one: numbers to 1 % and 0.01, the rest exactly."""
    value = without_sentences(json.loads(json.dumps(value), parse_constant=str))
    if WRITE:
        golden[name] = value
    assert_close(value, golden[name], name)


def without_sentences(value):
    """Drop what is said about numbers, so that wording may change."""
    if isinstance(value, dict):
        return {k: without_sentences(v) for k, v in value.items() if not (isinstance(v, str) and " " in v)}
    if isinstance(value, list):
        return [without_sentences(v) for v in value if not (isinstance(v, str) and " " in v)]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def assert_close(value, frozen, where):
    if isinstance(frozen, dict):
        assert value.keys() == frozen.keys(), where
        for key in frozen:
            assert_close(value[key], frozen[key], f"{where}.{key}")
    elif isinstance(frozen, list):
        assert len(value) == len(frozen), where
        for i, pair in enumerate(zip(value, frozen, strict=True)):
            assert_close(*pair, f"{where}[{i}]")
    elif isinstance(frozen, float):
        assert value == pytest.approx(frozen, rel=0.01, abs=0.01), where
    else:
        assert value == frozen, where


def digest(table: pd.DataFrame) -> str:
    """Return a hash of a table that depends on neither the order of rows nor that of columns."""
    columns = sorted(table.columns)
    rows = sorted(
        table[columns].astype(object).where(table[columns].notna(), None).itertuples(index=False), key=repr
    )
    return hashlib.sha256(repr((columns, rows)).encode()).hexdigest()[:16]


@cache
def analysed(folder: str):
    return analyze(load_table(RESULTS / folder))


def data_of(figure) -> list[dict]:
    """Return, for each axes of a figure, counts of artists and moments of their coordinates."""
    summaries = []
    for axes in figure.axes:
        lines = [np.column_stack([np.asarray(v, float) for v in line.get_data()]) for line in axes.lines]
        dots = [np.asarray(c.get_offsets(), float).reshape(-1, 2) for c in axes.collections]
        points = np.vstack([np.empty((0, 2)), *lines, *dots])
        points = points[np.isfinite(points).all(axis=1)]
        spread = [*points.mean(axis=0), *points.std(axis=0)] if len(points) else []
        summaries.append(
            {"lines": len(lines), "points": len(points), "moments": [float(f"{v:.4g}") for v in spread]}
        )
    pyplot.close(figure)
    return summaries


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(p, id=p.name, marks=() if k % 4 == 0 else pytest.mark.nightly)
        for k, p in enumerate(STORES)
    ],
)
def test_rows_and_curves_are_the_frozen_ones(folder, golden):
    # Old rows read a new column's default: a new column is a reason to freeze again.
    check(
        golden,
        f"rows {folder.relative_to(RESULTS)}",
        [digest(load_runs(folder)), digest(load_curves(folder))],
    )


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda p: p.stem)
def test_trials_of_an_experiment_have_the_frozen_ids(file, golden):
    trials = runpy.run_path(str(file))["SWEEP"].trials()
    ids = sorted(trial.trial_id("fingerprint") for trial in trials)
    check(golden, f"ids {file.stem}", [len(ids), hashlib.sha256("".join(ids).encode()).hexdigest()[:16]])


@pytest.mark.parametrize("folder", ANALYSED)
def test_predictions_are_the_frozen_ones(folder, golden):
    targets = read_targets(load_table(RESULTS / folder), [ANALYSED[folder]])
    check(golden, f"prediction {folder}", predictions_to_dict(predict_analysis(analysed(folder), targets)))


def test_rankings_of_searches_are_the_frozen_ones(golden):
    for folder in filter(is_search, STORES):
        check(golden, f"ranking {folder.name}", ranked(load_runs(folder)).head(10)["loss"].tolist())


@pytest.mark.parametrize("folder", ANALYSED)
def test_figures_show_the_frozen_data(folder, golden):
    for name, draw in plots.drawings(analysed(folder)).items():
        check(golden, f"figure {folder} {name}", data_of(draw(analysed(folder))))


def test_figures_of_coordinate_checks_show_the_frozen_data(golden):
    for name, part in by_setting(pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")).items():
        check(golden, f"figure coord_check {name}", data_of(plots.coordinate_check_figure(part)))
