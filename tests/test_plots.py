"""Figures show the numbers of the analysis, and the same input gives the same bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis import Columns, analyze, check_table, load_table
from mup_tpu.analysis.scaling_law import fit_scaling_law
from mup_tpu.analysis.search import ranking
from mup_tpu.store import load_runs

REFERENCE = Path(__file__).parent / "reference_runs" / "nanogpt_mup_shakespeare_digitised.csv"
RESULTS = Path(__file__).parents[1] / "results"
FIGURES = ("transfer", "optimum", "regret", "best_loss", "collapse")


@pytest.fixture(scope="module")
def analysis():
    return analyze(load_table(REFERENCE))


@pytest.mark.parametrize("name", FIGURES)
def test_same_input_same_bytes(name, analysis, tmp_path):
    draw = getattr(plots, f"{name}_figure")
    first = plots.save_figure(draw(analysis), tmp_path / "a", name)
    second = plots.save_figure(draw(analysis), tmp_path / "b", name)
    assert [p.name for p in first] == [f"{name}.png", f"{name}.svg"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert first[0].stat().st_size > 10_000


def test_transfer_figure_draws_every_point_and_marks_every_optimum(analysis):
    figure = plots.transfer_figure(analysis)
    assert [ax.get_title().split(":")[0] for ax in figure.axes] == ["μP", "SP"]
    for ax, result in zip(figure.axes, analysis.results, strict=True):
        drawn = {line.get_label(): line for line in ax.get_lines()}
        for curve in result.curves:
            line = drawn[f"width {curve.scale:g}"]
            shown = np.isin(curve.x_G, line.get_xdata())
            assert line.get_ydata().tolist() == curve.mean_G[shown].tolist()
            assert shown.sum() >= 4
        stars = [line for line in ax.get_lines() if line.get_marker() == "*"]
        assert [s.get_xdata()[0] for s in stars] == [o.x for o in result.optima]


def test_diverged_runs_are_on_the_rail():
    rows = pd.DataFrame(
        [
            {"width": w, "lr": 2.0**x, "seed": 0, "loss": np.nan if x == -4 else 2.5 + 0.1 * abs(x + 7)}
            for w in (64, 128, 256)
            for x in range(-10, -3)
        ]
    )
    ax = plots.transfer_figure(analyze(check_table(rows))).axes[0]
    crosses = [line for line in ax.get_lines() if line.get_marker() == "x" and len(line.get_xdata())]
    assert len(crosses) == 3
    assert all(abs(c.get_xdata()[0] + 4) < 0.1 for c in crosses)


def test_stopped_runs_are_on_the_rail_apart_from_diverged_ones():
    rows = pd.DataFrame(
        [
            {"width": w, "lr": 2.0**x, "loss": 2.5 + 0.1 * abs(x + 7), "status": status}
            for w in (64, 128, 256)
            for x in range(-10, -3)
            for status in ["stopped" if x == -10 else "diverged" if x == -4 else "finished"]
        ]
    )
    analysis = analyze(check_table(rows))
    ax = plots.transfer_figure(analysis).axes[0]
    marked = {m: [line.get_xdata()[0] for line in ax.get_lines() if line.get_marker() == m] for m in "sx"}
    assert np.allclose(marked["s"], -10, atol=0.1) and np.allclose(marked["x"], -4, atol=0.1)
    assert any("stopped early" in text.get_text() for text in ax.texts)
    assert analysis.results[0].to_dict()["curves"][0]["stopped"] == [1, 0, 0, 0, 0, 0, 0]


def test_one_width_without_an_optimum_can_be_drawn(tmp_path):
    rows = [
        {"width": 64, "lr": 2.0**x, "loss": 2.5, "params_non_embedding": 1000, "tokens": 50} for x in (-9, -8)
    ]
    for name, figure in plots.transfer_figures(analyze(check_table(pd.DataFrame(rows)))).items():
        plots.save_figure(figure, tmp_path, name)


def test_scaling_law_is_drawn_against_compute_where_it_is_known():
    rows = pd.DataFrame(
        [
            {
                "width": w,
                "lr": 2.0**x,
                "loss": 2.0 + 20 * (12 * w**2) ** -0.3 + 0.05 * (x + 7) ** 2,
                "params_non_embedding": 12 * w**2,
                "tokens": 1000,
            }
            for w in (32, 64, 128, 256, 512)
            for x in range(-10, -3)
        ]
    )
    result = (analysis := analyze(check_table(rows))).results[0]
    assert result.law.law.exponents[0] == pytest.approx(0.3, rel=0.01)
    ax = plots.best_loss_figure(analysis).axes[1]
    points, law = ax.get_lines()
    assert points.get_xdata().tolist() == [6 * 12 * w**2 * 1000 for w in (32, 64, 128, 256, 512)]
    assert len(law.get_xdata()) > 10
    assert "0.30" in law.get_label()


def test_scaling_law_figure_marks_what_the_law_has_not_seen():
    sizes = 2.0 ** np.arange(14, 22)
    losses = 2.0 + 30 * sizes**-0.3
    law = fit_scaling_law(losses[:-1], sizes[:-1])
    lines = {
        line.get_label(): line for line in plots.scaling_law_figure(law, sizes, losses, 1).axes[0].get_lines()
    }
    assert lines["fitted"].get_xdata().tolist() == sizes[:-1].tolist()
    assert lines["held out"].get_ydata().tolist() == [losses[-1]]


def test_a_table_of_one_value_is_drawn_against_scale_and_compute_alone():
    rows = pd.DataFrame(
        [
            {"width": w, "lr": 0.01, "loss": 2 + 1 / w, "params_non_embedding": w**2, "tokens": 9}
            for w in (32, 64, 128, 256, 512)
        ]
    )
    analysis = analyze(check_table(rows))
    assert {o.status for o in analysis.results[0].optima} == {"one value"}
    assert list(plots.transfer_figures(analysis)) == ["best_loss"]
    assert len(analysis.results[0].law.losses) == 5


def test_regret_figure_writes_the_regrets(analysis):
    figure = plots.regret_figure(analysis)
    for ax, result in zip(figure.axes, analysis.results, strict=True):
        written = {text.get_text() for text in ax.texts}
        assert {f"{r.value:.3f}" for r in result.regrets if np.isfinite(r.value)} <= written


def test_regret_of_a_scale_that_one_parametrization_lacks_has_its_cell():
    rows = pd.DataFrame(
        [
            {"parametrization": p, "width": w, "lr": 2.0**x, "loss": 2.5 + 0.1 * (x + 7) ** 2}
            for p, widths in (("mup", (64, 128, 256)), ("sp", (64, 128)))
            for w in widths
            for x in range(-10, -3)
        ]
    )
    for ax in plots.regret_figure(analyze(check_table(rows))).axes:
        assert ax.images[0].get_array().shape == (3, 3)


def test_coordinate_check_figure_names_each_slope():
    table = pd.DataFrame(
        [
            {
                "parametrization": p,
                "width": w,
                "seed": 0,
                "step": 1,
                "layer": layer,
                "quantity": q,
                "rms": w**0.5,
            }
            for p in ("mup", "sp")
            for w in (64, 128, 256)
            for layer in ("embedding", "logits")
            for q in ("activation", "update")
        ]
    )
    figure = plots.coordinate_check_figure(table)
    labels = [text.get_text() for ax in figure.axes for text in ax.get_legend().get_texts()]
    assert labels == ["embedding: +0.50", "logits: +0.50"] * 4


def test_coordinate_check_figure_along_the_depth_has_a_row_for_linearization():
    table = pd.DataFrame(
        [
            {
                "parametrization": p, "depth": d, "seed": s, "step": 1, "layer": layer, "quantity": q,
                "rms": d**e,
            }
            for p in ("mup", "sp")
            for d in (2, 4, 8)
            for s in (0, 1)
            for layer, q, e in (
                ("block", "activation", -0.5), ("block", "update", 0.25), ("block", "linearization", -1.0)
            )
        ]
    )  # fmt: skip
    figure = plots.coordinate_check_figure(table)
    assert [ax.get_title() for ax in figure.axes[::2]] == [
        "SP: activation size", "SP: update size", "SP: distance from linearization"
    ]  # fmt: skip
    labels = [text.get_text() for ax in figure.axes[::2] for text in ax.get_legend().get_texts()]
    assert labels == ["block: -0.50", "block: +0.25", "block: -1.00"]
    assert figure.axes[-1].get_xlabel() == "depth (layers)"


def test_a_search_has_a_panel_for_each_hyperparameter_it_varied_and_marks_the_best():
    figure = plots.search_figure(ranking(load_runs(RESULTS / "tune_small")))
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels[:3] == ["learning rate", "warm-up (share of the steps, or steps)", "init σ"]
    assert len(labels) == 6
    finished = figure.axes[0].collections[1].get_offsets()
    best = figure.axes[0].collections[2].get_offsets()
    assert best[0][1] == finished[:, 1].min()


def test_runs_at_zero_stand_at_the_edge_of_the_log_axis_and_are_marked():
    rows = [
        {"width": w, "weight_decay": v, "loss": 2.5 + 0.05 * (np.log2(v) + 4) ** 2 if v else 2.6}
        for w in (64, 128)
        for v in (0.0, *(2.0**x for x in range(-7, 0)))
    ]
    table = check_table(pd.DataFrame(rows), Columns(hyperparameter="weight_decay"))
    (ax,) = plots.transfer_figure(analyze(table)).axes
    diamonds = [line for line in ax.lines if line.get_marker() == "D"]
    assert [line.get_ydata()[0] for line in diamonds] == [2.6, 2.6]
    assert all(line.get_xdata()[0] < -7.5 for line in diamonds)
    assert [label.get_text() for label in ax.get_xticklabels(minor=True)] == ["0"]
    assert any("◇ at 0" in text.get_text() for text in ax.texts)


def test_a_sequence_is_drawn_look_by_look():
    generator = np.random.default_rng(0)
    rows = [
        {"width": w, "lr": 2.0**x, "seed": s, "purchase": s + 1,
         "loss": 2.5 + 0.04 * (x + 8) ** 2 + 0.01 * generator.standard_normal()}
        for w in (64, 128, 256) for x in range(-11, -4) for s in range(2)
    ]  # fmt: skip
    table = replace(check_table(pd.DataFrame(rows)), planned=(64.0, 128.0, 256.0))
    analysis = analyze(table, delta=0.3)
    (ax,) = plots.transfer_figures(analysis)["sequence"].axes
    assert "|α| < 0.3" in ax.get_legend_handles_labels()[1]
    (result,) = analysis.results
    drawn = [(bars[0].get_xdata()[0], bars[0].get_ydata()[0]) for bars in ax.containers]
    looks = result.sequence.looks
    assert drawn == [
        (spent, look.evidence.drift.alpha) for look, spent in zip(looks, result.sequence.spent, strict=True)
    ]
    assert [text.get_text() for text in ax.texts] == ["1", "2"]
    assert "sequence" not in plots.transfer_figures(analyze(check_table(pd.DataFrame(rows))))
