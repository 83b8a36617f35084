"""Figures of what a verdict rests on show its numbers and its thresholds."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis import Columns, analyze, check_table


def test_a_sequence_is_drawn_look_by_look(faults):
    generator = np.random.default_rng(0)
    rows = [
        {"width": w, "lr": 2.0**x, "seed": s, "purchase": s + 1,
         "loss": 2.5 + 0.04 * (x + 8) ** 2 + 0.01 * generator.standard_normal()}
        for w in (64, 128, 256) for x in range(-11, -4) for s in range(2)
    ]  # fmt: skip
    table = replace(check_table(pd.DataFrame(rows)), planned=(64.0, 128.0, 256.0))
    analysis = analyze(table, delta=0.3)
    figure = plots.sequence_figure(analysis)
    (ax,) = figure.axes
    assert faults(figure) == []
    assert "|α| < 0.3" in [text.get_text() for text in figure.legends[0].get_texts()]
    (result,) = analysis.results
    drawn = [(bars[0].get_xdata()[0], bars[0].get_ydata()[0]) for bars in ax.containers]
    looks = result.sequence.looks
    assert drawn == [
        (spent, look.evidence.drift.alpha) for look, spent in zip(looks, result.sequence.spent, strict=True)
    ]
    assert [text.get_text() for text in ax.texts] == ["1", "2"]
    once = pd.DataFrame(rows).drop(columns="purchase")
    assert "sequence" in plots.drawings(analysis)
    assert "sequence" not in plots.drawings(analyze(check_table(once)))


def test_colours_of_regret_are_the_same_in_every_figure_and_change_hue_at_the_threshold(analysis):
    alone = replace(analysis, results=analysis.results[:1])
    both, one = (plots.regret_figure(of).axes[0].images[0] for of in (analysis, alone))
    for value in (0.0, 0.003, 0.02, 0.3):
        assert both.cmap(both.norm(value)) == one.cmap(one.norm(value))
    for value, is_blue in ((0.0099, True), (0.0101, False)):
        red, _, blue, _ = both.cmap(both.norm(value))
        assert (blue > red) == is_blue


def test_thresholds_of_the_verdict_are_drawn_where_exponents_and_regrets_are(analysis):
    figure = plots.optimum_figure(replace(analysis, delta=0.3))
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "slopes that do not matter, |α| < 0.3" in said
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    first, last = analysis.results[0].drift.scales[0], analysis.results[0].drift.scales[-1]
    assert np.ptp(band[band[:, 0] == last][:, 1]) == pytest.approx(2 * 0.3 * np.log2(last / first))
    bar = plots.regret_figure(replace(analysis, epsilon=0.02)).axes[-1]
    assert 0.02 in [line.get_ydata()[0] for line in bar.get_lines()]
    assert "below 0.02 it does not matter" in bar.get_ylabel()


def test_cells_of_a_map_of_regrets_carry_values_and_intervals_or_say_where_they_are(analysis):
    figure = plots.regret_figure(analysis)
    for ax, result in zip(figure.axes, analysis.results, strict=False):
        written = {text.get_text() for text in ax.texts}
        assert {f"{r.value:.3f}" for r in result.regrets if np.isfinite(r.value)} <= written
    written = {text.get_text() for ax in figure.axes for text in ax.texts}
    intervals = {
        f"{r.low:.3f}–{r.high:.3f}" for result in analysis.results for r in result.regrets
        if r.status == "estimated" and np.isfinite(r.high)
    }  # fmt: skip
    assert intervals and intervals <= written
    assert "small: 95 % interval" in [text.get_text() for text in figure.legends[0].get_texts()]
    rows = [
        {"width": 64 * k, "lr": 2.0**x, "loss": 2.5 + 1 / k + 0.1 * (x + 7.1) ** 2, "parametrization": rule}
        for rule, widths in (("mup", range(1, 9)), ("sp", (1, 2)))
        for k in widths
        for x in range(-10, -3)
    ]
    many = plots.regret_figure(analyze(check_table(pd.DataFrame(rows))))
    cells = [ax.images[0].get_array().shape for ax in many.axes[:2]]
    assert cells == [(8, 8)] * 2, "of scales that one rule lacks too"
    assert not any("–" in text.get_text() for ax in many.axes for text in ax.texts)
    assert "95 % intervals: table of the report" in [t.get_text() for t in many.legends[0].get_texts()]


UNKNOWN = (1.09, -15.74, 17.92)  # a flat valley has no exponent


def test_all_sweeps_stand_below_each_other_with_intervals_and_verdicts(ruling):
    deep = {"columns": Columns("depth"), "ends": (2, 8)}
    other = {"architecture": "llama", "update_rule": "muon"}
    rulings = [
        ruling("completep", (0.3, -0.2, 0.8), None, "OPEN", **deep),
        ruling(cost=(0.004, 0.001, 0.2)),
        ruling("sp", (-0.9, -4, -0.7), (np.inf, 0.03, np.inf), "DRIFTS", **other),
        ruling("of_$mine$", UNKNOWN, (0.04, 0.01, np.inf), "OPEN"),
    ]  # fmt: skip
    figure = plots.sweeps_figure(rulings)
    drift, cost = figure.axes
    names = [label.get_text().replace("\\$", "$") for label in drift.get_yticklabels()]
    assert names == [
        "depth", "CompleteP: 2 to 8, a", "width", "μP: 64 to 256, a", "SP (llama, muon): 64 to 256, a",
        "of_$mine$: 64 to 256, a",
    ]  # fmt: skip
    assert list(drift.get_yticks()) == [5, 4, 3, 2, 1, 0]
    assert [text.get_fontweight() for text in drift.get_yticklabels()][:3] == ["bold", "normal", "bold"]
    bars = [
        {line.get_ydata()[0]: list(line.get_xdata()) for line in ax.lines if line.get_lw() == 1.6}
        for ax in (drift, cost)
    ]
    assert bars == [{4: [-0.2, 0.8], 2: [-0.1, 0.1], 1: [-1.5, -0.7]}, {2: [0.001, 0.2], 0: [0.01, 0.3]}]
    cuts = [
        [(line.get_marker(), line.get_ydata()[0]) for line in ax.lines if line.get_marker() in "<>"]
        for ax in (drift, cost)
    ]
    assert cuts == [[("<", 1)], [(">", 0)]], "beyond the edge"
    marks = {line.get_ydata()[0]: line for line in drift.lines if line.get_marker() in ("o", "s", "D")}
    assert [marks[row].get_xdata()[0] for row in (4, 2, 1)] == [0.3, 0.0, -0.9]
    assert len({(marks[row].get_marker(), marks[row].get_color()) for row in (4, 2, 1)}) == 3
    words = [[(text.get_text(), text.xy[1]) for text in ax.texts] for ax in (drift, cost)]
    assert words == [[("not known", 0)], [("not known", 4), ("∞", 1)]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "TRANSFERS", "DRIFTS", "OPEN", "does not matter: |α| < 0.2, regret < 0.01 nat",
    ]  # fmt: skip


def test_a_group_has_each_rule_s_sweeps_together_and_its_baseline_first(ruling):
    columns = Columns("steps_planned", parametrization="token_rule")
    of_tokens = {"columns": columns, "ends": (250, 4000)}
    rulings = [ruling(rule, sweep=sweep, **of_tokens) for sweep in "ab" for rule in ("lr_0.32", "none")]
    lr = "lr × tokens$^{−0.32}$"
    names = ["step count", *(f"{rule}: 250 to 4000, {s}" for rule in ("no token rule", lr) for s in "ab")]
    assert [label.get_text() for label in plots.sweeps_figure(rulings).axes[0].get_yticklabels()] == names
