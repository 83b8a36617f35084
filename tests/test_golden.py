"""Ids, rows, predictions and figures' data of stored results, frozen in golden.json.

Analyses are frozen in each sweep's figures/analysis.json (test_results.py).

A refactoring leaves all of them as they are. Where a change is meant, freeze again and say why in the commit
(`golden` in conftest.py).
"""

import hashlib
import runpy
from pathlib import Path

import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis.diagnosis import by_setting
from mup_tpu.analysis.prediction import predict_analysis, read_targets
from mup_tpu.analysis.run_table import ranked
from mup_tpu.store import is_search, load_curves, load_runs
from mup_tpu.words.predictions import predictions_to_dict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

STORES = [path.parent for path in sorted(RESULTS.rglob("store.json"))]
EXPERIMENTS = [p for p in sorted((ROOT / "experiments").glob("*.py")) if "\nSWEEP =" in p.read_text()]
PREDICTED = {"quickstart": "width=4096", "horizon_transfer": "tokens=1e9"}
"""Sweeps by folder, with a scale to predict at; cli/test_transcripts.py has others."""


def digest(table: pd.DataFrame) -> str:
    """Return a hash of a table that depends on neither the order of rows nor that of columns."""
    columns = sorted(table.columns)
    rows = sorted(
        table[columns].astype(object).where(table[columns].notna(), None).itertuples(index=False), key=repr
    )
    return hashlib.sha256(repr((columns, rows)).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(p, id=p.name, marks=() if k % 4 == 0 else pytest.mark.nightly)
        for k, p in enumerate(STORES)
    ],
)
def test_rows_and_curves_are_the_frozen_ones(folder, golden):
    # Old rows read a new column's default: a new column is a reason to freeze again.
    golden(
        f"rows {folder.relative_to(RESULTS)}",
        [digest(load_runs(folder)), digest(load_curves(folder))],
    )


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda p: p.stem)
def test_trials_of_an_experiment_have_the_frozen_ids(file, golden):
    trials = runpy.run_path(str(file))["SWEEP"].trials()
    ids = sorted(trial.trial_id("fingerprint") for trial in trials)
    golden(f"ids {file.stem}", [len(ids), hashlib.sha256("".join(ids).encode()).hexdigest()[:16]])


@pytest.mark.parametrize("folder", PREDICTED)
def test_predictions_are_the_frozen_ones(folder, golden, stored):
    targets = read_targets(stored(folder).table, [PREDICTED[folder]])
    golden(f"prediction {folder}", predictions_to_dict(predict_analysis(stored(folder), targets)))


def test_rankings_of_searches_are_the_frozen_ones(golden):
    for folder in filter(is_search, STORES):
        golden(f"ranking {folder.name}", ranked(load_runs(folder)).head(10)["loss"].tolist())


@pytest.mark.parametrize("folder", ["quickstart", "ladder_mup"])
def test_figures_show_the_frozen_data(folder, golden, drawn, stored):
    for name, draw in plots.drawings(stored(folder)).items():
        golden(f"figure {folder} {name}", drawn(draw(stored(folder))))


def test_figures_of_coordinate_checks_show_the_frozen_data(golden, drawn):
    name, part = next(
        iter(by_setting(pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")).items())
    )
    golden(f"figure coord_check {name}", drawn(plots.coordinate_check_figure(part)))
