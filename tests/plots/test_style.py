"""No figure loses a text, a mark or a key, whatever the names, losses and scales of a table are."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import font_manager
from matplotlib.text import Text

from mup_tpu import plots
from mup_tpu.analysis import analyze, check_table, diagnosis
from mup_tpu.analysis.run_table import ranked, varied
from mup_tpu.errors import ConfigError
from mup_tpu.plots.style import PlainTicks, panels, scale_axis, sequential
from mup_tpu.store import load_runs

LONG = "completedp_of_ten_words_and_a_footnote_about_its_embeddings"


def swept(**of):
    """Runs of a sweep: parabolas in log2 of the learning rate, a learning curve each."""
    given = {
        "names": ("mup", "sp"), "scales": (64, 128, 256), "steps": (1, 100, 200),
        "optimum": lambda name, scale: -7 - (np.log2(scale / 64) if name == "sp" else 0),
        "status": lambda name, scale, x: "finished", "seeds": 1,
    } | of  # fmt: skip
    noise = np.random.default_rng(0)
    rows = []
    cells = itertools.product(given["names"], given["scales"], range(-11, -3), range(given["seeds"]))
    for name, scale, x, seed in cells:
        rise = (x - given["optimum"](name, scale)) ** 2 + 0.05 * noise.standard_normal()
        end, status = 2 + 8 / scale + 0.05 * rise, given["status"](name, scale, x)
        for step in given["steps"]:
            loss = 5 + (end - 5) * (step / given["steps"][-1]) ** 0.3
            rows.append(
                {
                    "parametrization": name, "width": scale, "lr": 2.0**x, "seed": seed, "status": status,
                    "loss": np.nan if status == "diverged" else loss, "step": step,
                    "params_non_embedding": int(12 * scale**2), "tokens": 100_000, "wall_time_s": scale / 8,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def fate(name, scale, x):
    """All of one scale diverged, some of another stopped."""
    if name == "sp" and scale == 256 or x == -4:
        return "diverged"
    return "stopped" if x == -11 else "finished"


TABLES = {
    "nine scales": dict(scales=[int(32 * 2 ** (k / 2)) for k in range(9)]),
    "diverged and stopped": dict(status=fate),
    "optima at the edge": dict(
        optimum=lambda name, scale: -12 if name == "sp" and scale > 64 else -3, steps=(1,)
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_everything_in_a_figure_of_transfer_can_be_read(name, faults):
    analysis = analyze(check_table(swept(**TABLES[name])))
    figures = {kind: draw(analysis) for kind, draw in plots.drawings(analysis).items()}
    assert {"transfer", "optimum", "regret", "best_loss"} <= set(figures)
    assert {kind: faults(figure) for kind, figure in figures.items()} == {kind: [] for kind in figures}


def test_everything_in_a_figure_of_several_sweeps_can_be_read(ruling, faults):
    fates = (("a", "TRANSFERS", 0.0), (LONG, "DRIFTS", np.inf), ("lost", "OPEN", np.nan))
    rulings = [
        ruling(name, (at, at - 0.1, at + 0.1), (at + 0.04, 0.01, 0.08), decision)
        for name, decision, at in fates
    ]
    assert faults(plots.sweeps_figure(rulings)) == []


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([1.4, 1.6, 1.8], ["1.4", "1.6", "1.8"]),
        ([2.32580, 2.32581], ["2.32580", "2.32581"]),
        ([0, 2e5, 4e5], ["0", "2e5", "4e5"]),
        ([1.04e-6, 1.06e-6], ["1.04e−6", "1.06e−6"]),
        ([-0.25, 0.0], ["−0.25", "0"]),
    ],
)
def test_ticks_have_as_many_digits_as_tell_them_apart(values, written):
    assert PlainTicks().format_ticks(values) == written


def test_scales_have_the_colours_of_viridis_from_light_to_dark():
    colours = [sequential((64, 128, 256), scale) for scale in (64, 128, 256)]
    assert colours == [matplotlib.colormaps["viridis"](0.88 * share) for share in (1, 0.5, 0)]
    assert sequential((64,), 64) == colours[0]


def test_control_characters_of_names_leave_an_svg_that_can_be_read():
    """XML allows none; a program that draws an SVG would refuse it."""
    analysis = analyze(check_table(swept(names=("\x1b[2J\x07red",), scales=(64, 128), steps=(200,))))
    for name in ("transfer", "optimum"):
        figure = plots.drawings(analysis)[name](analysis)
        ElementTree.fromstring(plots.svg(figure, "x"))
        assert any("\\x1b[2J\\x07red" in text.get_text().replace("\n", "") for text in figure.findobj(Text))


def test_without_fonts_a_figure_is_refused_in_one_sentence(analysis, monkeypatch):
    fonts = font_manager.fontManager
    monkeypatch.setattr(fonts, "ttflist", [])
    fonts._findfont_cached.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"^figures cannot be drawn; install a font.*: Failed to find font"
        ):
            plots.transfer_figure(analysis)
    finally:
        fonts._findfont_cached.cache_clear()


RESULTS = Path(__file__).parents[2] / "results"
SVG = "{http://www.w3.org/2000/svg}"


def tooltips(figure, start: str = "") -> list[tuple[str, float, float]]:
    """Return tooltips that begin so, each with its place in points."""
    circles = ElementTree.fromstring(plots.svg(figure, "x")).iter(f"{SVG}circle")
    read = [(c.find(f"{SVG}title").text, float(c.get("cx")), float(c.get("cy"))) for c in circles]
    return [one for one in read if one[0].startswith(start)]


def test_every_point_of_a_loss_curve_says_its_mean_its_error_and_its_runs(quickstart):
    table, analysis = quickstart
    texts = {text for text, *_ in tooltips(plots.transfer_figure(analysis, runs=table.runs))}
    for result in analysis.results:
        for curve in result.curves:
            errors = result.noise.errors_G(curve)
            for x, mean, error in zip(curve.x_G, curve.mean_G, errors, strict=True):
                runs = table.runs.query(
                    f"compared == {result.compared!r} and scale == {curve.scale} and x == {x}"
                )
                lines = [f"width {curve.scale:g}, learning rate 2^{x:g}", f"loss {mean:.6g} ± {error:.2g}"]
                lines += [
                    f"seed {r.seed}: loss {r.loss:.6g}, trial {r.trial_id}"
                    for r in runs.sort_values("seed").itertuples()
                ]
                assert "\n".join(lines) in texts
        for o in result.optima:
            head = f"width {o.scale:g}, learning rate at its best: 2^{o.x:.4g}"
            interval = f"(95 %: 2^{o.low:.4g} to 2^{o.high:.4g})"
            assert f"{head} {interval}\nloss {o.loss:.6g}" in texts


def test_tooltips_lie_on_their_marks_and_ids_are_the_figure_s_own(quickstart):
    figure = plots.transfer_figure(quickstart[1])
    points, text = tooltips(figure), plots.svg(figure, "x")
    marks = {
        (round(float(u.get("x"))), round(float(u.get("y"))))
        for u in ElementTree.fromstring(text).iter(f"{SVG}use")
        if u.get("x")
    }
    near = {(x + i, y + j) for x, y in marks for i in (-1, 0, 1) for j in (-1, 0, 1)}
    assert len(points) > 50
    assert all((round(x), round(y)) in near for _, x, y in points)
    assert set(re.findall(r'\bid="(..)', text)) == {"x-"}
    assert set(re.findall(r'(?:href="#|url\(#)(..)', text)) == {"x-"}


def texts_of(figure, start: str) -> list[str]:
    return [text for text, *_ in tooltips(figure, start)]


def test_tooltips_list_six_runs_with_what_became_of_them_and_names_as_text():
    fates = {-5: "diverged", -9: "stopped"}
    rows = [
        {"width": w, "lr": 2.0**x, "seed": f"</title><b>$x$ {seed}", "status": fates.get(x, "finished"),
         "loss": 2.5 + 8 / w + 0.05 * (x + 7) ** 2}
        for w in (64, 128) for x in range(-9, -4) for seed in range(9)
    ]  # fmt: skip
    table = check_table(pd.DataFrame(rows))
    figure = plots.transfer_figure(analyze(table), runs=table.runs)
    for x, fate in ((-7, "loss 2.625"), (-5, "diverged"), (-9, "stopped early")):
        (text,) = texts_of(figure, f"width 64, learning rate 2^{x}\n")
        assert f"seed </title><b>$x$ 1: {fate}" in text
        assert "trial" not in text and text.endswith("and 3 more")
    assert "<b>" not in plots.svg(figure, "x")


def test_learning_curves_say_steps_and_seeds():
    cells = itertools.product((64, 128), range(-9, -4), (0, 1), range(1, 1001, 2))
    rows = [
        (w, 2.0**x, s, step, 3 + 4 / step**0.3 + 0.05 * (x + 7) ** 2 + s / 100) for w, x, s, step in cells
    ]
    table = check_table(pd.DataFrame(rows, columns=["width", "lr", "seed", "step", "loss"]))
    figure = plots.learning_curves_figure(analyze(table), runs=table.runs)
    (text,) = texts_of(figure, "width 64, learning rate 2^-7\nstep 101:")
    assert f"loss {3 + 4 / 101**0.3 + 0.005:.6g}\nseed 0" in text and "\nseed 1" in text
    assert 200 <= len(texts_of(figure, "")) <= 240, "not each of 1000 steps"


def test_a_search_has_its_trials_in_every_panel():
    runs = load_runs(RESULTS / "tune_small")
    figure = plots.search_figure(ranked(runs), varied(runs))
    best = runs[runs["status"] == "finished"].sort_values("loss").iloc[0]
    texts = texts_of(figure, f"trial {best['trial_id']}")
    assert len(texts) == 12 and len(set(texts)) == 1, "as a dot and as a star, in six panels"
    lines = f"loss {best['loss']:.6g}, seed 0", "finished after 500 steps", f"init σ {best['init_std']:.4g}"
    assert all(line in texts[0] for line in lines)


def test_layers_of_a_coordinate_check_say_their_means_and_slopes():
    measured = pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")
    part = diagnosis.by_setting(measured)["sgd_untied"].query("layer in ('output', 'embedding')")
    last = part[part["step"] == part["step"].max()]
    chosen = "parametrization == 'sp' and quantity == 'update' and layer == 'output'"
    runs = last.query(f"{chosen} and width == 512").sort_values("seed")
    fit = diagnosis.layer_exponents(part)["sp", "update", "output"]
    lines = ["output, width 512", f"rms {runs['rms'].mean():.4g}"]
    lines += [f"grows as width^{fit.value:.2f} (95 %: {fit.low:.2f} to {fit.high:.2f})"]
    lines += [f"seed {r.seed}: {r.rms:.4g}" for r in runs.itertuples()]
    assert "\n".join(lines) in texts_of(plots.coordinate_check_figure(part), lines[0])


@pytest.mark.parametrize(
    ("points", "shown", "is_turned"),
    [
        ([64, 128, 256], ["64", "128", "256"], False),
        ([64, 8000, 8100], ["64", "8000", ""], True),
        ([4e13, 4e19], ["40 TFLOP", "40 EFLOP"], False),
    ],
)
def test_ticks_of_a_scale_do_not_touch(points, shown, is_turned):
    (ax,) = panels(1, 5.2, 3.8)
    scale_axis(ax, "flops" if points[0] > 1e9 else "width", points, 5.2)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == shown
    assert {tick.get_rotation() for tick in ax.get_xticklabels()} == {90.0 if is_turned else 0.0}
