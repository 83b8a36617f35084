"""Losses at the optima and on the way, with the laws through them."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis import Columns, Reading, analyze, check_table, loss_laws, predict
from mup_tpu.plots.style import write_size


def test_scaling_law_is_drawn_over_the_parameters_that_it_is_a_function_of():
    rows = [
        {
            "width": w, "lr": 2.0**x, "loss": 2.0 + 20 * (12 * w**2) ** -0.3 + 0.05 * (x + 7) ** 2,
            "params_non_embedding": 12 * w**2, "tokens": 1000,
        }
        for w in (32, 64, 128, 256, 512)
        for x in range(-10, -3)
    ]  # fmt: skip
    result = (analysis := analyze(check_table(pd.DataFrame(rows)))).results[0]
    assert result.law.law.exponent == pytest.approx(0.3, rel=0.01)
    ax = plots.best_loss_figure(analysis).axes[1]
    points, law = ax.get_lines()
    assert points.get_xdata().tolist() == [12 * w**2 for w in (32, 64, 128, 256, 512)]
    drawn = [result.law.law.loss(n) for n in law.get_xdata()]
    assert len(drawn) > 10 and law.get_ydata() == pytest.approx(drawn)
    ax.figure.draw_without_rendering()
    (compute,) = ax.child_axes
    assert np.array(compute.get_xlim()) == pytest.approx(6000 * np.array(ax.get_xlim()), rel=1e-3)
    assert "0.30" in law.get_label()


@pytest.mark.parametrize("sizes", [pytest.param(("N",), marks=pytest.mark.nightly), ("N", "D")])
def test_law_of_the_loss_is_drawn_with_its_largest_run_and_the_prediction_of_it(sizes, faults):
    runs = loss_runs(sizes)
    laws = loss_laws(runs)
    axes = (figure := plots.loss_law_figure(laws)).axes
    assert len(axes) == len(sizes) and faults(figure) == []
    points, line, predicted, *_, star = axes[0].get_lines()
    largest = {"N": 3e9, "D": 1e11}
    x = 6 * 3e20 if len(sizes) == 2 else 3e9
    assert points.get_xdata() == pytest.approx(laws.laws[0].compute_P)
    assert (star.get_xdata()[0], star.get_ydata()[0]) == pytest.approx((x, runs["loss"].iloc[-1]))
    assert predicted.get_ydata()[0] == pytest.approx(laws.laws[0].held_out.expected.loss)
    assert line.get_ydata()[0] == pytest.approx(laws.laws[0].frontier.loss(line.get_xdata()[0]))
    assert largest["N"] in laws.laws[0].held_out.sizes


def loss_runs(sizes):
    rows = [(n, d) for n in (1e7, 1e8, 1e9, 3e9) for d in (1e9, 1e10, 1e11)]
    runs = pd.DataFrame(rows, columns=["N", "D"])
    runs = runs if len(sizes) == 2 else runs[runs["D"] == 1e11].reset_index(drop=True)
    noise = 1 + 0.001 * np.random.default_rng(0).standard_normal(len(runs))
    runs["loss"] = (1.8 + 500 * runs["N"] ** -0.35 + 2000 * runs["D"] ** -0.37) * noise
    return runs if len(sizes) == 2 else pd.concat([runs, runs.assign(N=runs["N"] / 3)], ignore_index=True)


def law_of_two_scales():
    cells = [(n, d, x) for n in (1e8, 4e8, 16e8) for d in (1e9, 4e9, 16e9) for x in range(-14, -3)]
    rows = pd.DataFrame(cells, columns=["N", "D", "x"])
    away = rows["x"] + 8 + 0.5 * np.log2(rows["N"] / 1e8) - 0.3 * np.log2(rows["D"] / 1e9)
    runs = rows.assign(lr=2.0 ** rows["x"], loss=2 + 0.04 * away**2)
    return check_table(runs, Reading(Columns("N", scales_beside=("D",))))


def test_a_law_s_plane_holds_its_targets_and_the_bar_of_colours_has_all_that_it_shows():
    predictions = predict(law_of_two_scales(), "N=6.4e9,D=1e9")
    figure, x = plots.law_figure(predictions), predictions.of("all").x
    (law,) = (result.power_law for result in predictions.analysis.results)
    ax, bar = figure.axes
    star, measured = ax.collections[-2:]
    assert len(measured.get_offsets()) == 9
    assert star.get_offsets().tolist() == [[6.4e9, 1e9]]
    assert star.get_array().tolist() == [pytest.approx(x)]
    assert ax.texts[-1].get_text() == f"$2^{{{x:.4g}}}$"
    assert bar.get_ylabel() == "best learning rate"
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert left < 1e8 and right > 6.4e9 and bottom < 1e9 and top > 16e9
    corners = law.optima(np.array([(n, d) for n in (left, right) for d in (bottom, top)]))
    assert bar.get_ylim()[0] <= min(corners) and max(corners) <= bar.get_ylim()[1]
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert key == ["measured optimum", "predicted at a target"]
    figure.draw_without_rendering()
    assert {"1B", "100M"} <= {label.get_text() for label in ax.get_xticklabels()}


def test_a_law_without_targets_shows_the_measured_sizes_alone(golden, drawn):
    figure = plots.law_figure(analyze(law_of_two_scales()))
    assert figure.axes[0].get_xlim()[1] < 2e9
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["measured optimum"]
    golden("figure of a law", drawn(figure))


@pytest.mark.parametrize(
    ("value", "written", "as_compute"),
    [(5e4, "50k", "50k"), (2e6, "2M", "2M"), (1e9, "1B", "1G"), (3e12, "3T", "3T"), (512, "512", "512")],
)
def test_sizes_are_written_as_people_write_them(value, written, as_compute):
    assert write_size(value) == written and write_size(value, is_compute=True) == as_compute
