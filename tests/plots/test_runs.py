"""Figures of searches and coordinate checks."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis.run_table import ranked, varied
from mup_tpu.store import load_runs

RESULTS = Path(__file__).parents[2] / "results"


def key_of(figure):
    return [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]


def test_a_search_has_a_panel_for_each_hyperparameter_it_varied_and_marks_how_trials_ended(faults):
    runs = load_runs(RESULTS / "tune_small")
    figure = plots.search_figure(ranked(runs), varied(runs))
    labels = [ax.get_xlabel().replace("\n", " ") for ax in figure.axes]
    assert labels[:3] == ["learning rate", "warm-up (share of the steps, or steps)", "init σ"]
    assert len(labels) == 6 and faults(figure) == []
    trials = pd.DataFrame(
        {"status": ["finished", "finished", "stopped", "diverged"], "steps_done": [9, 9, 3, 1],
         "loss": [2.0, 2.5, 1.9, np.inf], "init_std": [0.1, 0.2, 0.3, 0.4]}
    )  # fmt: skip
    figure = plots.search_figure(trials, ["init_std"])
    (ax,) = figure.axes
    drawn = {line.get_marker(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert drawn["*"] == [[0.1, 2.0]] and drawn["s"] == [[0.3, 1.9]]
    colors = {line.get_marker(): line.get_color() for line in ax.get_lines()}
    assert colors["o"] != colors["s"] == colors["x"], "finished trials stand out"
    assert drawn["x"][0][0] == 0.4 and 2.5 < drawn["x"][0][1] < min(2.6, ax.get_ylim()[1])
    assert faults(figure) == []
    assert key_of(figure) == [
        "best", "finished (2)", "stopped early, loss at its last step (1)", "diverged (1)",
    ]  # fmt: skip


def test_a_panel_is_logarithmic_beyond_a_factor_of_five_and_never_with_a_zero():
    trials = pd.DataFrame(
        {"status": "finished", "steps_done": 9, "loss": [2.0, 2.5, 2.2], "weight_decay": [0.0, 0.01, 0.1],
         "init_std": [0.01, 0.02, 0.06], "warmup": [0.1, 0.2, 0.3]}
    )  # fmt: skip
    figure = plots.search_figure(trials, ["weight_decay", "init_std", "warmup"])
    assert [ax.get_xscale() for ax in figure.axes] == ["linear", "log", "linear"]


def measured(
    rules=("mup", "sp"), layers=("embedding", "logits"), scale="width", points=(64, 128), **exponents
):
    """Sizes that grow by an exponent, by quantity; 1 for activations and updates by default."""
    return pd.DataFrame(
        {
            "parametrization": rule, scale: point, "seed": seed, "step": 1, "layer": layer,
            "quantity": quantity, "rms": float(point) ** exponent,
        }
        for rule in rules
        for point in points
        for seed in (0, 1)
        for layer in layers
        for quantity, exponent in (exponents or {"activation": 1, "update": 1}).items()
    )  # fmt: skip


def test_lines_of_a_coordinate_check_are_all_different(faults):
    layers = [f"model.layers.{i % 3}.self_attn.part_{i}" for i in range(40)]
    figure = plots.coordinate_check_figure(measured(("mup",), layers))
    assert faults(figure) == []
    lines = figure.axes[0].get_lines()
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(lines) == len(looks) == 40


@pytest.mark.parametrize("rules", [("sp", "mup"), ("completep", "mup", "sp"), ("mup",)])
def test_panels_of_a_coordinate_check_name_slopes_and_have_one_range_a_quantity(rules):
    """μP comes first and SP second, whatever else is checked."""
    exponents = {"activation": -0.5, "update": 0.25, "linearization": -0.001}
    table = measured(rules, ["block"], "depth", (2, 4, 8), **exponents)
    table.loc[table["parametrization"] == "sp", "rms"] *= 16
    figure = plots.coordinate_check_figure(table)
    titles = [ax.get_title() for ax in figure.axes]
    sizes = ("activation size", "update size", "distance from linearization")
    assert titles == [f"{rule}: {of}" for of in sizes for rule in ("μP", "SP", "CompleteP")[: len(rules)]]
    for row, slope in enumerate(("-0.50", "+0.25", "+0.00")):
        panels = figure.axes[row * len(rules) : (row + 1) * len(rules)]
        assert {ax.get_legend().get_texts()[0].get_text() for ax in panels} == {f"block: {slope}"}
        assert len({ax.get_ylim() for ax in panels}) == 1 and panels[0].get_ylim()[1] > table["rms"].min()
        assert [bool(ax.get_ylabel()) for ax in panels] == [True] + [False] * (len(rules) - 1)
    assert "rms of activation after 1 steps" in figure.axes[0].get_ylabel().replace("\n", " ")
    assert {ax.get_xlabel() for ax in figure.axes} == {"", "depth (layers)"}
