"""Predicted optima, costs and losses, targets by other columns, and what is said."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mup_tpu import predict
from mup_tpu.analysis import Columns, Reading, check_table, load_table
from mup_tpu.analysis.prediction import Surroundings
from mup_tpu.analysis.trend import Mixture
from mup_tpu.analysis.valley import CURVATURE_SCATTER, PARABOLA, Valley
from mup_tpu.errors import TableError


def valley_runs(alpha=-0.5, widths=(64, 128, 256, 512), curvature=0.08, seeds=2, **more):
    """Runs whose optimum lies at 2^-6 at width 64, with loss 2 + 8·width^-0.5 there."""
    generator = np.random.default_rng(0)
    rows = []
    for width in widths:
        best = -6 + alpha * math.log2(width / 64)
        for x in np.arange(-12.0, -2.0):
            for seed in range(seeds):
                loss = 2 + 8 * width**-0.5 + curvature / 2 * (x - best) ** 2 + generator.normal(0, 0.002)
                sizes = {"params_non_embedding": 12 * width**2, "tokens": 2.0e6} | more
                rows.append({"width": width, "lr": 2.0**x, "seed": seed, "loss": loss} | sizes)
    return pd.DataFrame(rows)


def test_a_power_goes_on_to_the_target_with_its_cost_and_loss():
    found = predict(valley_runs(), "width=1024").of("all")
    truth = -6 - 0.5 * 4
    assert found.reach == 1 and found.bears
    assert found.interval[0] < truth < found.interval[1] and found.x == pytest.approx(truth, abs=0.15)
    assert found.half[0] < found.x < found.half[1]
    assert found.staying.expected == pytest.approx(0.04 * 4.0, rel=0.25)
    sd = (found.interval[1] - found.interval[0]) / 3.92
    assert found.following.expected == pytest.approx(0.04 * (0.25 + sd**2), rel=0.25)
    assert found.taking.expected < found.following.expected
    assert found.loss.holds(2 + 8 * 1024**-0.5)


def test_the_most_that_a_prediction_costs_is_no_less_than_the_expectation():
    """Slopes that break with a small chance cost so much that the mean exceeds 97.5 % of the draws."""
    broken = Mixture(np.zeros(2), np.array([0.05, 8.0]), np.array([0.985, 0.015]))
    parabola = Valley(np.zeros(8000), np.zeros(8000), np.full(8000, 0.03), np.full(8000, PARABOLA))
    cost = Surroundings(parabola).losses(broken, seed=0).cost(0.0)
    curvature = 0.06 * math.exp(CURVATURE_SCATTER**2 / 2)
    assert cost.high == cost.expected == pytest.approx(0.5 * curvature * broken.variance, rel=0.3)


@pytest.mark.parametrize("more", [0.6, 2.0, math.inf])
def test_a_jump_of_the_loss_above_the_optimum_is_a_wall_that_may_come_below_it(more):
    """The wall nears the optimum by 0.4 octaves an octave: at 16 times it lies 0.8 octaves below."""
    runs = valley_runs(alpha=0.0)
    away = np.log2(runs["lr"]) + 6 - (2.0 - 0.4 * np.log2(runs["width"] / 64))
    smooth = predict(runs, "width=8192").of("all")
    runs.loc[away > 0, "loss"] += more
    made = predict(runs, "width=8192").of("all")
    assert smooth.x == pytest.approx(-6, abs=0.2) and smooth.taking.high < 0.1
    assert made.x < -6.4 and made.taking.high > 0.2 and made.taking.expected < 0.5 * more


def test_lost_runs_above_an_optimum_cost_and_the_advice_keeps_away_from_them():
    parabola = Valley(np.zeros(8000), np.zeros(8000), np.full(8000, 0.03), np.full(8000, PARABOLA))
    optimum = Mixture(np.zeros(1), np.array([0.5]), np.ones(1))
    calm, walled = (Surroundings(parabola, 3.0, wall).losses(optimum, seed=0) for wall in (None, (0.7, 0.2)))
    assert abs(calm.safest(-1, 1)) < 0.05 and walled.safest(-1, 1) < -0.2
    assert walled.cost(0.0).expected > 5 * calm.cost(0.0).expected
    assert walled.cost(0.0).high == walled.cost(9.0).expected == 3.0, "no run costs more than guessing"


def test_a_table_says_how_far_it_bears():
    near, far = predict(valley_runs(), ["width=1024", "width=65536"]).predictions
    assert near.bears and not far.bears
    assert near.furthest == far.furthest and 1 < near.furthest < 7
    found = predict(valley_runs(), f"width={512 * 2 ** (near.furthest - 0.1)}").predictions[0]
    assert found.bears
    assert not predict(valley_runs(), f"width={512 * 2 ** (near.furthest + 0.2)}").predictions[0].bears


def test_targets_by_other_columns_are_found_by_what_the_rows_say():
    targets = ["width=4096", f"params={12 * 4096**2}", "params=201.326592M", "width=2^12", "width=4_096"]
    found = predict(valley_runs(), targets).predictions
    assert [p.scale for p in found] == pytest.approx([4096] * 5, rel=1e-6)
    (flops,) = predict(valley_runs(), f"flops={6 * 12 * 1024**2 * 2e6}").predictions
    assert flops.scale == pytest.approx(1024, rel=1e-6)
    (alias,) = predict(valley_runs(), "d_model=1024").predictions
    assert alias.scale == 1024
    both = predict(valley_runs(), f"width=1024, width=32, width={2**49}")
    assert [p.scale for p in both.predictions] == [1024, 32, 2**49], (
        "the last is the furthest that is predicted"
    )
    (field,) = predict("results/horizon_transfer", "steps=8000").predictions[:1]
    assert field.scale == 8000, "a field's name, where its column has another"


@pytest.mark.parametrize("at", [24.0, 40.0, 64.0])
def test_a_column_that_is_no_polynomial_is_a_power_between_its_points_and_beyond(at):
    runs = valley_runs()
    (found,) = predict(runs.assign(tokens=np.sqrt(runs["width"])), f"tokens={at}").predictions
    assert found.scale == pytest.approx(at**2, rel=1e-6)
    falling = runs.assign(tokens=np.where(runs["width"] == 128, 9, runs["width"]))
    with pytest.raises(TableError, match=r"tokens does not grow with width \(64, 9, 256, 512\)"):
        predict(falling, "tokens=8")


def test_flops_that_rows_lack_are_those_of_the_parameters_that_a_token_uses():
    table = load_table("results/moe_transfer")
    rows = table.stored.assign(flops=math.nan)
    (known,) = rows.loc[rows["width"] == 128, ["params_active", "tokens"]].drop_duplicates().to_numpy()
    found = predict(replace(table, stored=rows), f"flops={6 * known.prod()}")
    assert found.predictions[0].scale == pytest.approx(128, rel=1e-3)


@pytest.mark.parametrize(
    ("at", "sentence"),
    [
        ([], "a prediction needs a target, such as at='width=1024'"),
        ("4096", "at 4096 is not NAME=VALUE; write for example width=4096"),
        ("=3", "at =3 is not NAME=VALUE; write for example width=4096"),
        ("width=", "at width= is not allowed: its value must be a finite number above 0"),
        ("width=-2", "must be a finite number above 0"),
        ("width=nan", "must be a finite number above 0"),
        ("width=1e300", "octaves from the largest width, 512; at most 40 are predicted"),
        ("tokens=5e9", "all runs have tokens 2e+06, so the table says nothing of another; give width=VALUE"),
        ("depth=8", "the table does not say how depth follows width; give width=VALUE, params=VALUE"),
        ("width=1024,depth=8", "at 'depth': the table does not say how depth follows width"),
    ],
)
def test_targets_that_cannot_be_are_one_sentence(at, sentence):
    with pytest.raises(TableError) as error:
        predict(valley_runs(), at)
    assert sentence in str(error.value)


def test_a_table_whose_parameters_have_another_name_says_which_flag_names_them():
    runs = valley_runs().rename(columns={"params_non_embedding": "weights"})
    with pytest.raises(TableError, match=r"how params follows width \(params names the column"):
        predict(runs, "params=1.3e9")
    named = check_table(runs, Reading(Columns(params="weights")))
    assert predict(named, f"params={12 * 4096**2}").predictions[0].scale == pytest.approx(4096)


def test_a_rule_with_one_known_optimum_is_not_predicted():
    runs = valley_runs(widths=(64,))
    with pytest.raises(
        TableError, match="2 widths with an optimum inside the grid are needed, and the best rule has 1"
    ):
        predict(runs, "width=128")
    both = pd.concat([runs.assign(parametrization="sp"), valley_runs().assign(parametrization="mup")])
    found = predict(both, "width=1024")
    assert [p.compared for p in found.predictions] == ["mup"]
    assert (found.notes[0].code, found.notes[0]["compared"]) == ("no prediction", "sp")


def test_a_loss_that_cannot_be_told_has_its_reason():
    found = predict(valley_runs(widths=(64, 128)), "width=512").predictions[0]
    assert found.loss is None
    assert found.why_no_loss.code == "few optima"


def test_any_scale_of_a_table_may_be_predicted():
    runs = valley_runs().rename(columns={"width": "tokens_seen"}).drop(columns="tokens")
    table = check_table(runs, Reading(Columns(scale="tokens_seen")))
    assert predict(table, "tokens_seen=1024").predictions[0].reach == 1


def test_the_figure_has_a_panel_a_rule_and_marks_every_target(golden, drawn):
    from mup_tpu import plots

    both = pd.concat(
        [valley_runs(0).assign(parametrization="mup"), valley_runs().assign(parametrization="sp")]
    )
    figure = plots.prediction_figure(predict(both, ["width=1024", "width=65536"]))
    assert [ax.get_title() for ax in figure.axes] == ["μP", "SP"]
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "extrapolated too far" in key
    golden("figure of predictions", drawn(figure))


def test_a_column_of_parameters_is_told_by_its_name_and_a_target_with_a_separator_is_named_whole():
    runs = valley_runs().drop(columns="params_non_embedding", errors="ignore")
    runs = runs.assign(n_params=12 * runs["width"] ** 2 + 256 * runs["width"])
    found = predict(runs, f"params={12 * 2048**2 + 256 * 2048}").predictions[0]
    assert found.scale == pytest.approx(2048)
    with pytest.raises(TableError, match="at width=4,096 is not NAME=VALUE; write for example width=4096"):
        predict(runs, "width=4,096")
