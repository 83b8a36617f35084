"""Drift, regret and verdict: on tables made from known laws, and on published sweeps read off figures."""

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, analyze, check_table, load_table
from mup_tpu.analysis.drift import Drift, wider_is_better
from mup_tpu.analysis.optimum import Optimum, loss_curve
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.verdict import Regret, decide
from mup_tpu.errors import TableError

REFERENCE = Path(__file__).parents[1] / "reference_runs"
WIDTHS = (64, 128, 256, 512)


def swept(alpha, widths=WIDTHS, grid=range(-14, -3), sigma=0.003, seeds=3, curvature=0.04, seed=0):
    """Runs whose optimum is 2^-8 at width 64 and moves as width^alpha; wider is better by 0.05 a doubling."""
    cells = itertools.product(widths, grid, range(seeds))
    runs = pd.DataFrame(cells, columns=["width", "lr", "seed"]).astype({"lr": float})
    octaves, noise = np.log2(runs["width"] / 64), np.random.default_rng(seed).standard_normal(len(runs))
    loss = 2.5 - 0.05 * octaves + curvature * (runs["lr"] + 8 - alpha * octaves) ** 2 + sigma * noise
    return runs.assign(lr=2.0 ** runs["lr"], loss=loss)


def result_of(frame):
    return analyze(check_table(frame)).results[0]


def test_runs_in_memory_say_what_they_say_from_a_file(tmp_path):
    swept(0.0, WIDTHS[:3], seeds=1).to_csv(tmp_path / "runs.csv", index=False)
    frame = pd.read_csv(tmp_path / "runs.csv")
    assert repr(analyze(frame).to_dict()["results"]) == repr(
        analyze(tmp_path / "runs.csv").to_dict()["results"]
    )
    with pytest.raises(TableError, match="lr"):
        analyze(frame.drop(columns="lr"))


def test_a_table_and_its_analysis_print_as_their_content():
    table = load_table(Path(__file__).parents[2] / "results" / "quickstart")
    assert repr(table) == "quickstart: 80 runs of mup, sp at width 64, 128, 256, 384"
    analysis = analyze(table)
    assert "μP: OPEN" in repr(analysis) and "SP: DRIFTS" in repr(analysis)
    page = analysis._repr_html_()
    assert "SP: DRIFTS" in page and page.count("<tr") == 1 + 8


def test_a_moving_optimum_drifts_by_its_exponent_and_costs_what_the_parabola_says():
    result = result_of(swept(-1.0))
    assert result.verdict.decision == "DRIFTS"
    assert result.drift.alpha == pytest.approx(-1.0, abs=0.05)
    assert result.drift.low < -1.0 < result.drift.high
    # At width 512 the optimum lies 3 octaves lower: 0.04 * 3² nat.
    assert result.headline_regret.value == pytest.approx(0.36, abs=0.02)
    assert result.headline_regret.low < 0.36 < result.headline_regret.high
    # Width itself gains 0.05 a doubling.
    assert result.headline_regret.relative == pytest.approx(0.36 / 0.15, rel=0.1)


def test_an_optimum_at_the_edge_is_not_a_number():
    result = result_of(swept(-2.0, grid=range(-11, -4)))
    assert [o.status for o in result.optima] == ["bracketed", "bracketed", "at lower edge", "at lower edge"]
    assert result.verdict.decision == "OPEN"
    assert min(cell.x for cell in result.next_batch.cells) == -13
    statuses = {(r.source, r.target): r.status for r in result.regrets}
    assert statuses[64, 512] == "at least" and statuses[256, 512] == "not bracketed"
    assert result.headline_regret.low > 0.01 and result.headline_regret.high == np.inf


@pytest.mark.parametrize(("ended", "status"), [("diverged", "diverged"), ("stopped", "stopped early")])
def test_regret_at_a_learning_rate_that_is_lost_is_infinite_and_drifts(ended, status):
    frame = swept(-1.0, grid=np.arange(-13, -4))
    wide = (frame["width"] >= 256) & (frame["lr"] > 2.0**-9 * 256 / frame["width"])
    result = result_of(frame.assign(status=np.where(wide, ended, "finished")))
    assert {r.status for r in result.regrets if r.source == 64 and r.target >= 256} == {status}
    assert result.headline_regret.value == np.inf
    assert result.verdict.decision == "DRIFTS"


def test_drift_whose_regret_may_be_harmless_is_not_shown():
    """Noise biases a squared distance upwards: the point estimate exceeds ε, its lower bound does not."""
    result = result_of(swept(-0.3, sigma=0.01, curvature=0.02, seeds=3))
    assert result.drift.high < 0
    assert result.headline_regret.low < 0.01 < result.headline_regret.value
    assert result.verdict.decision == "OPEN"


def decision(alpha, reach, look=None, to_come=0, **regret):
    """The verdict of numbers as they might come out."""
    known = dict(value=0.004, low=0.0, high=0.009, expected=0.005, status="estimated", relative=0.1)
    moved = (alpha, alpha - reach, alpha + reach)
    drift = Drift(*moved, 0.0, -8.0, (64.0, 128.0, 256.0), moved)
    optima = [Optimum(scale, "bracketed", -8, -8.2, -7.8) for scale in (64, 128, 256)]
    found = Regret(64.0, 256.0, **(known | regret))
    return decide(optima, [drift], found, look=look, to_come=to_come).decision


@pytest.mark.parametrize("look", [None, 2])
def test_transfer_and_drift_both_have_to_be_shown(look):
    assert decision(0.02, 0.16, look) == "TRANSFERS"
    assert decision(0.02, 0.16, look, high=0.011) == "OPEN"
    assert decision(0.02, 0.19, look) == decision(-0.1, 0.15, look) == "OPEN"
    drifts = {"value": 0.03, "low": 0.012, "high": 0.05}
    assert decision(-0.4, 0.1, look, **drifts) == "DRIFTS"
    assert decision(-0.4, 0.1, look, **drifts | {"low": 0.009}) == "OPEN"
    assert decision(-0.4, 0.45, look, **drifts) == "OPEN"
    outside = {"status": "at least", "low": 0.004, "high": math.inf}
    assert decision(-0.4, 0.1, look, **drifts | outside) == "OPEN", "outside the grid is no proof"


def test_an_optimum_that_follows_no_power_drifts_where_its_regret_is_twice_what_matters():
    drifts = {"value": 0.04, "low": 0.021, "high": 0.07}
    assert decision(-0.2, 0.4, **drifts) == "DRIFTS"
    assert decision(-0.2, 0.4, **drifts | {"low": 0.019}) == "OPEN"


def test_an_optimum_that_moves_once_and_then_stays_drifts():
    frame = swept(0.0, sigma=0.004, seeds=3)
    frame.loc[frame["width"] > 64, "lr"] *= 2.0**1.5
    result = result_of(frame)
    assert result.verdict.decision == "DRIFTS"


def test_while_wider_ones_are_planned_only_drift_may_end_a_sequence():
    assert decision(0.02, 0.1, 1, to_come=1) == "OPEN"
    assert decision(-0.4, 0.1, 1, to_come=1, value=0.05, low=0.03, high=0.08) == "DRIFTS"


def test_runs_that_blow_up_beyond_every_optimum_do_not_hide_that_it_transfers():
    frame = swept(0.0, sigma=0.004)
    frame.loc[frame["lr"] >= 2.0**-6, "loss"] = 6.0
    result = result_of(frame)
    assert [o.x for o in result.optima] == pytest.approx([-8] * 4, abs=0.3)
    assert result.verdict.decision == "TRANSFERS"


def test_the_law_of_losses_at_the_optima_is_the_one_that_made_them():
    frame = swept(-0.3, widths=(32, *WIDTHS), sigma=0.0)
    n = 12.0 * frame["width"] ** 2
    frame["loss"] += 20 * n**-0.3 - 0.5 + 0.05 * np.log2(frame["width"] / 64)
    result = result_of(frame.assign(params_non_embedding=n))
    assert result.law.law.exponent == pytest.approx(0.3, rel=0.05)


def test_a_law_is_refused_with_a_reason():
    few = result_of(swept(0.0, widths=(64, 128, 256)).assign(params_non_embedding=lambda t: t["width"] ** 2))
    assert "needs more than 3 points" in few.law.why_not["error"]
    assert result_of(swept(0.0)).law.why_not.code == "parameters unknown"
    sizes = swept(0.0, widths=(64, 128, 256)).rename(columns={"width": "model_size"})
    assert result_of(sizes).law.params == (64, 128, 256), "a scale that counts parameters gives their number"


def test_wider_is_better_counts_final_losses_alone():
    """Steps of one run are no comparisons of their own; and of a larger batch every step is better."""
    frame = swept(0.0, sigma=0.0, seeds=1)
    steps = pd.concat([frame.assign(step=t, loss=frame["loss"] + 1 / t) for t in (10, 20, 30)])
    found = result_of(steps).wider_is_better
    assert (found.better, found.pairs) == (33, 33)
    assert (found.optima_held, found.optima) == (3, 3)
    curves = [loss_curve(group) for _, group in check_table(frame).runs.groupby("scale")]
    assert wider_is_better(curves[::-1]).better == 0


def test_any_hyperparameter_and_any_scale():
    frame = swept(-0.5).rename(columns={"width": "depth", "lr": "init_std"}).assign(width=64, lr=0.01)
    columns = Columns(scale="depth", hyperparameter="init_std")
    result = analyze(check_table(frame, Reading(columns))).results[0]
    assert result.drift.alpha == pytest.approx(-0.5, abs=0.05)


def test_regret_beside_divergence_is_that_of_every_optimum_before_it():
    """At width 64 runs are lost from 2^-7 on, an octave above the optimum: it lies between 2^-9 and 2^-7."""
    frame = swept(-0.6, (64, 256), range(-13, -4), sigma=0.001)
    frame.loc[(frame["width"] == 64) & (frame["lr"] >= 2.0**-7), "loss"] = np.nan
    (found,) = result_of(frame).regrets
    assert found.low < 0.04 * 1.2**2 < found.high < 0.04 * 2.2**2
    assert found.low <= found.value <= found.high


# Exponents with their tolerances: tests/reference_runs/README.md.
@pytest.mark.parametrize(
    ("table", "parametrization", "alpha", "tolerance", "stays"),
    [
        ("shakespeare", "mup", 0.01, 0.05, True),
        ("shakespeare", "sp", -1.67, 0.25, False),
        ("owt", "mup", 0.10, 0.25, True),
        ("owt", "sp", -0.74, 0.4, False),
    ],
)
def test_published_sweeps_give_the_published_drift(table, parametrization, alpha, tolerance, stays):
    analysis = analyze(load_table(REFERENCE / f"nanogpt_mup_{table}_digitised.csv"))
    result = next(r for r in analysis.results if r.parametrization == parametrization)
    assert result.drift.alpha == pytest.approx(alpha, abs=tolerance)
    assert (result.drift.moved[2] < 0) != stays


def test_published_sp_sweep_is_not_wider_is_better():
    analysis = analyze(load_table(REFERENCE / "nanogpt_mup_shakespeare_digitised.csv"))
    found = {r.parametrization: r.wider_is_better for r in analysis.results}
    assert found["mup"].share > 0.75
    assert found["sp"].share < 0.5


@pytest.mark.parametrize(
    ("columns", "column", "count"),
    [(Columns(), "lr", 12), (Columns("weight_decay"), "weight_decay", 33)],
)
def test_runs_at_0_are_left_out_with_a_note(columns, column, count):
    """Runs without weight decay beside those with it, tuned or as the scale: the others' numbers stay."""
    frame, at_zero = swept(0.0), swept(-0.5, widths=(128,), seed=1).assign(weight_decay=0.0)
    if column == "lr":
        at_zero = pd.DataFrame(
            {"width": w, "lr": 0.0, "seed": s, "loss": 2.0 + s / 100} for w in WIDTHS for s in range(3)
        )
    reading, frame = Reading(columns), frame.rename(columns={"width": columns.scale})
    (plain,) = analyze(check_table(frame, reading)).results
    analysis = analyze(check_table(pd.concat([frame, at_zero]), reading))
    (result,) = analysis.results
    assert Reason.of("runs at 0", count=count, column=column) in analysis.notes
    assert result.optima == plain.optima and result.verdict == plain.verdict
    assert (plain.verdict.decision, plain.next_batch) == ("TRANSFERS", None)
    with pytest.raises(TableError, match=f"{column} is 0 in every run"):
        check_table(at_zero, reading)
    with pytest.raises(TableError, match="width must be above 0, but row 0 has 0"):
        check_table(frame.rename(columns={columns.scale: "width"}).assign(width=0))


def test_a_regret_is_at_most_what_the_runs_beyond_lost():
    """Almost three octaves from the optimum the valley goes on rising; the runs do not."""
    frame = swept(-2.75, widths=(64, 128), grid=range(-13, -3), sigma=0.002, curvature=0.05)
    wide = frame["width"] == 128
    frame.loc[wide, "loss"] = frame.loc[wide, "loss"].clip(upper=2.55)
    (found,) = result_of(frame).regrets
    assert 0.09 < found.value <= found.high < 0.125
