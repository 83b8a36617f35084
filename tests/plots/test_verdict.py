"""Figures of what a verdict rests on show its numbers and its thresholds."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis import analyze, check_table


def test_regret_figure_writes_the_regrets(analysis):
    figure = plots.regret_figure(analysis)
    for ax, result in zip(figure.axes, analysis.results, strict=False):
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
    for ax in plots.regret_figure(analyze(check_table(rows))).axes[:2]:
        assert ax.images[0].get_array().shape == (3, 3)


def test_a_sequence_is_drawn_look_by_look():
    generator = np.random.default_rng(0)
    rows = [
        {"width": w, "lr": 2.0**x, "seed": s, "purchase": s + 1,
         "loss": 2.5 + 0.04 * (x + 8) ** 2 + 0.01 * generator.standard_normal()}
        for w in (64, 128, 256) for x in range(-11, -4) for s in range(2)
    ]  # fmt: skip
    table = replace(check_table(pd.DataFrame(rows)), planned=(64.0, 128.0, 256.0))
    analysis = analyze(table, delta=0.3)
    figure = plots.transfer_figures(analysis)["sequence"]
    (ax,) = figure.axes
    assert "|α| < 0.3" in [text.get_text() for text in figure.legends[0].get_texts()]
    (result,) = analysis.results
    drawn = [(bars[0].get_xdata()[0], bars[0].get_ydata()[0]) for bars in ax.containers]
    looks = result.sequence.looks
    assert drawn == [
        (spent, look.evidence.drift.alpha) for look, spent in zip(looks, result.sequence.spent, strict=True)
    ]
    assert [text.get_text() for text in ax.texts] == ["1", "2"]
    once = pd.DataFrame(rows).drop(columns="purchase")
    assert "sequence" not in plots.transfer_figures(analyze(check_table(once)))


def test_colours_of_regret_are_the_same_in_every_figure_and_change_hue_at_the_threshold(analysis):
    def color_of(of, value):
        (image,) = plots.regret_figure(of).axes[0].images
        return image.cmap(image.norm(value))

    alone = replace(analysis, results=analysis.results[:1])
    for value in (0.0, 0.003, 0.02, 0.3):
        assert color_of(analysis, value) == color_of(alone, value)
    for value, is_blue in ((0.0099, True), (0.0101, False)):
        red, _, blue, _ = color_of(analysis, value)
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


def test_cells_of_a_map_of_regrets_carry_intervals_or_say_where_they_are(analysis):
    figure = plots.regret_figure(analysis)
    written = {text.get_text() for ax in figure.axes for text in ax.texts}
    intervals = {
        f"{r.low:.3f}–{r.high:.3f}" for result in analysis.results for r in result.regrets
        if r.status == "estimated" and np.isfinite(r.high)
    }  # fmt: skip
    assert intervals and intervals <= written
    assert "small: 95 % interval" in [text.get_text() for text in figure.legends[0].get_texts()]
    rows = [
        {"width": 64 * k, "lr": 2.0**x, "loss": 2.5 + 1 / k + 0.1 * (x + 7.1) ** 2}
        for k in range(1, 9)
        for x in range(-10, -3)
    ]
    many = plots.regret_figure(analyze(check_table(pd.DataFrame(rows))))
    assert not any("–" in text.get_text() for ax in many.axes for text in ax.texts)
    assert "95 % intervals: table of the report" in [t.get_text() for t in many.legends[0].get_texts()]


def test_sweeps_beside_each_other_have_their_baseline_on_top_and_names():
    known = {"low": -0.1, "high": 0.1, "regret": 0.04, "regret_low": 0.01, "regret_high": 0.08}
    table = pd.DataFrame(
        {"name": name, "alpha": 0.0, "verdict": "TRANSFERS", **known}
        for name in ("lost_multipliers", "sp", "warmup_0.9", "mup")
    )
    table.loc[2, ["alpha", "low", "high"]] = (1.09, -15.74, 17.92)
    figure = plots.ablations_figure(table)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["μP", "SP", "lost multipliers", "warmup 0.9"]
    assert [(text.get_text(), text.xy[1]) for text in figure.axes[0].texts] == [("not known", 0)]


def test_what_has_no_number_or_no_bound_says_so_beside_other_sweeps():
    known = {"alpha": 0.0, "low": -0.1, "high": 0.1, "verdict": "DRIFTS"}
    table = pd.DataFrame(
        {"name": name, "regret": regret, "regret_low": 0.01, "regret_high": high, **known}
        for name, regret, high in (
            ("a", np.inf, np.inf),
            ("b", np.nan, np.nan),
            ("c", 0.04, np.inf),
            ("d", 0.05, 0.07),
        )
    )
    ax = plots.ablations_figure(table).axes[1]
    assert {(text.get_text(), text.xy[1]) for text in ax.texts} == {
        ("∞", 3),
        ("not known", 2),
        ("0.040, no bound", 1),
    }
    (bar,) = [c for c in ax.containers if len(c[0].get_xdata())]
    assert bar[0].get_xdata().tolist() == [0.05] and bar[0].get_color() == "#d55e00"
