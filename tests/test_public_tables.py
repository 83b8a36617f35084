"""Other people's sweeps: stored numbers are those of today's analysis, and pooling is its source's."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("public_tables", ROOT / "scripts" / "public_tables.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_stored_verdicts_are_those_of_the_stored_rows(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    stored = pd.read_csv("results/public/sweeps.csv").set_index(["sweep", "rule"])
    for name, source in script.SOURCES.items():
        for row in script._of_source(name, source):
            kept = stored.loc[(name, row["rule"])]
            assert row["verdict"] == kept["verdict"]
            for column in ("alpha", "low", "high"):
                assert row[column] == pytest.approx(kept[column], rel=2e-3, abs=1e-3)


def test_the_page_follows_from_the_stored_numbers(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweeps = pd.read_csv("results/public/sweeps.csv")
    pooled = script.pool(sweeps)
    assert script.page(sweeps, pooled) == Path("results/public/README.md").read_text(encoding="utf-8")


def test_random_effects_are_dersimonian_and_lairds(script):
    """With equal errors: the plain mean, and the variance beyond the errors'."""
    values, errors = np.array([-0.4, 0.0, 0.1, 0.7]), np.full(4, 0.1)
    mean, error, between = script._pooled(values, errors)
    assert mean == pytest.approx(values.mean())
    assert between == pytest.approx(np.sqrt(values.var(ddof=1) - 0.01))
    assert error == pytest.approx(values.std(ddof=1) / 2)
    mean, error, between = script._pooled(np.array([0.1, 0.1]), np.array([0.1, 0.2]))
    assert between == 0 and error == pytest.approx((100 + 25) ** -0.5)
