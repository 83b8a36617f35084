"""Other people's sweeps: stored numbers are those of today's analysis, and pooling is its source's."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import public_tables as script
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
def test_stored_verdicts_are_those_of_the_stored_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    before = pd.read_csv("results/public/sweeps.csv")
    stored = before.set_index(["sweep", "rule"])
    for name, source in script.SOURCES.items():
        rows = list(script._of_source(name, source, None, before))
        assert len(rows) == (before["source"] == source.repository).sum() or source.sweeps is None
        for row in rows:
            kept = stored.loc[(row["sweep"], row["rule"])]
            assert row["verdict"] == kept["verdict"]
            for column in ("alpha", "low", "high"):
                assert row[column] == pytest.approx(kept[column], rel=2e-3, abs=1e-3, nan_ok=True)


def test_at_least_eight_sources_and_each_row_has_one():
    stored = pd.read_csv(ROOT / "results" / "public" / "sweeps.csv")
    repositories = {source.repository for source in script.SOURCES.values()}
    assert len(repositories) >= 8
    assert set(stored["source"]) == {*repositories, "ours"}


def valley(scale, exponent):
    """Runs whose best rate is 0.01 at scale 1 and ∝ scale^exponent."""
    return [(0.01 * 2.0**step, 3 + 0.05 * (step - exponent * np.log2(scale)) ** 2) for step in range(-4, 5)]


def test_cooldowns_are_read_from_their_logs_and_other_runs_are_left_out(tmp_path):
    logs = tmp_path / "lr-scheduling" / "data" / "more"
    logs.mkdir(parents=True)
    common = {"dataset": "slimpajama", "n_layer": 12, "n_embd": 768, "decay_type": "linear"}
    for steps in (1, 2, 4, 8):
        for number, (lr, loss) in enumerate(valley(steps, -0.5)):
            for scheduler, shift in (("wsd", 0.0), ("cos", 9.0)):
                config = {**common, "scheduler": scheduler, "wsd_fract_decay": 0.2}
                run = {"config": {**config, "iterations": 1000 * steps, "lr": lr},
                       "summary": {"final-val/loss": loss + shift}}  # fmt: skip
                (logs / f"{steps}_{number}_{scheduler}.json").write_text(json.dumps(run))
    (row,) = script._of_source("cooldown_steps", script.SOURCES["cooldown_steps"], tmp_path, pd.DataFrame())
    assert (row["sweep"], row["growing"], row["rule"], row["runs"]) == ("cooldown 0.2", "tokens", "SP", 36)
    assert row["low"] < -0.5 < row["high"]
    assert row["alpha"] == pytest.approx(-0.5, abs=0.02)


def test_one_step_s_table_is_a_sweep_for_each_state(tmp_path):
    folder = tmp_path / "batch-size-lr-scaling" / "outputs" / "mnist_optimal_batch_lr_dense"
    folder.mkdir(parents=True)
    rows = [(state, batch, lr, loss - 4, 0.001) for state in (100, 500) for batch in (4, 8, 16, 32)
            for lr, loss in valley(batch / 4, 1.0)]  # fmt: skip
    names = ["checkpoint_step", "batch_size", "epsilon", "mean_loss_change", "stderr_loss_change"]
    pd.DataFrame(rows, columns=names).to_csv(folder / "aggregate_results.csv", index=False)
    first, second = script._of_source("one_step", script.SOURCES["one_step"], tmp_path, pd.DataFrame())
    assert (first["sweep"], second["sweep"]) == ("after 100 steps", "after 500 steps")
    assert first["alpha"] == pytest.approx(1.0, abs=0.01)


def test_the_page_follows_from_the_stored_numbers(monkeypatch):
    monkeypatch.chdir(ROOT)
    sweeps = pd.read_csv("results/public/sweeps.csv")
    pooled = script.pool(sweeps)
    assert script.page(sweeps, pooled) == Path("results/public/README.md").read_text(encoding="utf-8")


def test_random_effects_are_dersimonian_and_lairds():
    """With equal errors: the plain mean, and the variance beyond the errors'."""
    values, errors = np.array([-0.4, 0.0, 0.1, 0.7]), np.full(4, 0.1)
    mean, error, between = script._pooled(values, errors)
    assert mean == pytest.approx(values.mean())
    assert between == pytest.approx(np.sqrt(values.var(ddof=1) - 0.01))
    assert error == pytest.approx(values.std(ddof=1) / 2)
    mean, error, between = script._pooled(np.array([0.1, 0.1]), np.array([0.1, 0.2]))
    assert between == 0 and error == pytest.approx((100 + 25) ** -0.5)
