"""Loss curves, optima and collapse: the numbers of the analysis, with everything that has no place marked."""

import numpy as np
import pandas as pd

from mup_tpu import plots
from mup_tpu.analysis import Columns, analyze, check_table


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
    figure = plots.transfer_figure(analysis)
    ax = figure.axes[0]
    marked = {m: [line.get_xdata()[0] for line in ax.get_lines() if line.get_marker() == m] for m in "sx"}
    assert np.allclose(marked["s"], -10, atol=0.1) and np.allclose(marked["x"], -4, atol=0.1)
    assert {"stopped early", "diverged"} <= {text.get_text() for text in figure.legends[0].get_texts()}
    assert analysis.results[0].to_dict()["curves"][0]["stopped"] == [1, 0, 0, 0, 0, 0, 0]


def test_runs_at_zero_stand_at_the_edge_of_the_log_axis_and_are_marked():
    rows = [
        {"width": w, "weight_decay": v, "loss": 2.5 + 0.05 * (np.log2(v) + 4) ** 2 if v else 2.6}
        for w in (64, 128)
        for v in (0.0, *(2.0**x for x in range(-7, 0)))
    ]
    table = check_table(pd.DataFrame(rows), Columns(hyperparameter="weight_decay"))
    figure = plots.transfer_figure(analyze(table))
    (ax,) = figure.axes
    diamonds = [line for line in ax.lines if line.get_marker() == "D"]
    assert [line.get_ydata()[0] for line in diamonds] == [2.6, 2.6]
    assert all(line.get_xdata()[0] < -7.5 for line in diamonds)
    assert [label.get_text() for label in ax.get_xticklabels(minor=True)] == ["0"]
    assert "at 0" in [text.get_text() for text in figure.legends[0].get_texts()]
