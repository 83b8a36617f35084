"""Loss curves and optima: the numbers of the analysis, with everything that has no place marked."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis import Columns, Reading, analyze, check_table
from mup_tpu.plots.style import run_lines
from mup_tpu.store import Condition


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
    assert figure.axes[0].get_ylabel() == "loss (nat per token)"
    of_images = replace(analysis.table, columns=replace(analysis.columns, is_per_token=False))
    figure = plots.transfer_figure(replace(analysis, table=of_images))
    assert figure.axes[0].get_ylabel() == "loss (nat)"


def test_stopped_refused_and_diverged_runs_are_on_the_rail_each_with_its_mark():
    rows = pd.DataFrame(
        [
            {"width": w, "lr": 2.0**x, "loss": 2.5 + 0.1 * abs(x + 7), "status": status, "x": x}
            for w in (64, 128, 256)
            for x in range(-10, -3)
            for status in ["stopped" if x == -10 else "diverged" if x == -4 else "finished"]
        ]
    )
    table = check_table(rows, Reading(only=[Condition.parse("x < -5")]))
    analysis = analyze(table)
    figure = plots.transfer_figure(analysis)
    ax = figure.axes[0]
    marked = {m: [line.get_xdata()[0] for line in ax.get_lines() if line.get_marker() == m] for m in "sxp"}
    assert all(np.allclose(marked[m], x, atol=0.1) for m, x in (("s", -10), ("x", -4), ("p", -5)))
    assert {"stopped early", "diverged", "refused by a condition"} <= {
        text.get_text() for text in figure.legends[0].get_texts()
    }
    curve = analysis.results[0].to_dict()["curves"][0]
    assert (curve["stopped"], curve["refused"]) == ([1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0])
    assert run_lines(table.runs[table.runs["x"] == -5])[0] == "seed 0: refused"


def key_of(figure):
    return [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]


def in_panel(figure):
    """What the first panel shows: its range, the points on its rail, and the entries of its key."""
    ax, key = figure.axes[0], key_of(figure)
    triangles = [line for line in ax.get_lines() if line.get_marker() == "^" and len(line.get_xdata())]
    return ax.get_ylim(), [line.get_xdata().tolist() for line in triangles], key


def valley(**far):
    """A valley 0.05 nat deep, with losses of some learning rates replaced."""
    rows = [
        {"width": w, "lr": 2.0**x, "loss": 2.5 + 0.003 * (x + 7) ** 2 + 1 / w}
        for w in (64, 128)
        for x in range(-11, -2)
    ]
    table = pd.DataFrame(rows)
    for x, loss in far.items():
        table.loc[(table["width"] == 64) & (table["lr"] == 2.0 ** -float(x[1:])), "loss"] = loss
    return analyze(check_table(table))


def test_one_far_run_leaves_the_axis_for_the_rail_and_the_valley_keeps_a_third_of_it():
    (low, high), beyond, key = in_panel(plots.transfer_figure(valley(x3=3.0)))
    assert beyond == [[pytest.approx(-3, abs=0.1)]] and "above the axis" in key
    assert high - low < 3.7 * 0.05, "the lower three quarters are 0.03 nat"
    (low, high), beyond, key = in_panel(plots.transfer_figure(valley()))
    assert beyond == [] and "above the axis" not in key and low < 2.508 and high > 2.56


def rows_of(compared: str, optima: dict, grid=range(-12, -2)) -> pd.DataFrame:
    """Parabolas of a rule for tokens; `optima` by scale."""
    return pd.DataFrame(
        {"token_rule": compared, "steps": scale, "lr": 2.0**x, "loss": 2.5 + 8 / scale + 0.1 * (x - at) ** 2}
        for scale, at in optima.items()
        for x in grid
    )


def analysis_of(*tables: pd.DataFrame, compares: str = "token_rule"):
    columns = Columns(scale="steps", parametrization=compares)
    return analyze(check_table(pd.concat(tables).rename(columns={"token_rule": compares}), Reading(columns)))


def test_panels_share_their_range_the_baseline_is_first_and_rules_have_names():
    steady = dict.fromkeys((100, 200, 400, 800), -7.2)
    analysis = analysis_of(rows_of("lr_0.32", steady), rows_of("none", steady, range(-9, -4)))
    axes = plots.transfer_figure(analysis).axes
    assert len({ax.get_xlim() for ax in axes}) == 1
    titles = [ax.get_title().partition(":")[0] for ax in axes]
    assert titles == ["no token rule", "lr × tokens$^{−0.32}$"]
    numeric = analysis_of(*(rows_of(size, steady) for size in ("16", "4")), compares="batch_size")
    titles = [ax.get_title().partition(":")[0] for ax in plots.transfer_figure(numeric).axes]
    assert titles == ["batch size 4", "batch size 16"], "numbers ascend"


def test_an_interval_lies_clear_of_its_star_and_the_line_at_the_top_is_explained(analysis):
    figure = plots.transfer_figure(analysis)
    figure.draw_without_rendering()
    for ax, result in zip(figure.axes, analysis.results, strict=True):
        bars = [line for line in ax.lines if line.get_marker() == "|"]
        assert len(bars) == len(result.optima)
        for bar, optimum in zip(bars, result.optima, strict=True):
            (x, y), *_ = bar.get_transform().transform(bar.get_xydata())
            star_y = ax.transData.transform((optimum.x, optimum.loss))[1]
            assert y - star_y > 6 * figure.dpi / 72, "beyond the star's half height"
            inside = (optimum.low, optimum.high)
            assert set(bar.get_xdata()) <= set(inside)
    said = key_of(figure)
    lost = [mark for mark in ("diverged", "stopped early", "above the axis") if mark in said]
    assert bool(lost) == ("off the axis, on this line" in said)
    steady = analysis_of(rows_of("none", dict.fromkeys((100, 200, 400), -7.2), range(-9, -5)))
    said = key_of(plots.transfer_figure(steady))
    assert "off the axis, on this line" not in said


def test_a_line_through_optima_that_bend_says_that_it_is_no_law_and_each_has_its_band():
    scales = (100, 200, 400, 800, 1600)
    hump = dict(zip(scales, (-8.0, -7.0, -6.5, -7.0, -8.0), strict=True))
    straight = {scale: -7.5 + 0.3 * i for i, scale in enumerate(scales)}
    analysis = analysis_of(rows_of("none", hump), rows_of("lr_0.5", straight))
    figure = plots.optimum_figure(analysis)
    said = key_of(figure)
    assert "bends: no power law" in said[0] and "bends" not in said[1]
    lines = [line.get_linestyle() for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    assert lines == ["--", "-"]
    bands = [c for c in figure.axes[0].collections if len(c.get_paths()) == 1 and c.get_alpha() == 0.12]
    drawn = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    for band, line in zip(bands, drawn, strict=True):  # from the start of its line on
        (x, y), reach = band.get_paths()[0].vertices.T, 0.2 * 4
        start = line.get_ydata()[0]
        assert (x.min(), x.max()) == (100, 1600)
        assert (y.min(), y.max()) == pytest.approx((start - reach, start + reach))


def test_the_exponent_of_a_flat_valley_is_not_known():
    steady = dict.fromkeys((100, 200, 400), -7.2)
    analysis = analysis_of(rows_of("none", steady))
    (result,) = analysis.results
    flat = replace(result, drift=replace(result.drift, alpha=1.09, low=-15.74, high=17.92))
    analysis = replace(analysis, results=(flat,))
    assert plots.transfer_figure(analysis).axes[0].get_title().endswith("α not known")
    optima = plots.optimum_figure(analysis)
    assert key_of(optima) == ["no token rule, α not known"]
    assert not [line for line in optima.axes[0].lines if len(line.get_xdata()) == 2]


def test_the_best_of_a_grid_at_its_edge_is_an_arrow_that_points_beyond_it():
    analysis = analysis_of(rows_of("none", {100: -13.0, 200: -7.2, 400: 0.0}, range(-12, -2)))
    ax = plots.transfer_figure(analysis).axes[0]
    marks = {line.get_marker(): line.get_xdata()[0] for line in ax.lines if line.get_marker() in {*"<>*"}}
    assert marks == {"<": -12, ">": -3, "*": pytest.approx(-7.2, abs=0.1)}
    figure = plots.optimum_figure(analysis)
    lines = figure.axes[0].lines
    marks = {line.get_marker(): line.get_ydata()[0] for line in lines if line.get_marker() in {*"v^"}}
    assert marks == {"v": -12, "^": -3}
    assert "best of the grid, at its edge" in key_of(figure)


def test_a_star_is_hollow_where_the_fit_misses_its_runs():
    analysis = analysis_of(rows_of("none", dict.fromkeys((100, 200), -7.2)))
    (result,) = analysis.results
    first, second = result.optima
    missed = replace(result, optima=(replace(first, missed_x=-5.0, missed_by=9.0), second))
    assert not missed.optima[0].is_fitted and missed.optima[1].is_fitted
    figure = plots.transfer_figure(replace(analysis, results=(missed,)))
    stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert [star.get_markerfacecolor() == "white" for star in stars] == [True, False]
    key = {*key_of(figure)}
    assert {"optimum, fit off its runs", "optimum, below its 95 % interval"} <= key
