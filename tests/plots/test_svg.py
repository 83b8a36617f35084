"""Figures for a page: points have tooltips where they are drawn, and the key names what it hides."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd

from mup_tpu import plots
from mup_tpu.analysis import Columns, analyze, check_table, coord_check
from mup_tpu.analysis.rows import ranked, varied
from mup_tpu.store import load_runs

RESULTS = Path(__file__).parents[2] / "results"
SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """An SVG: tooltips and places of its points, and its key."""

    def __init__(self, figure):
        self.text = plots.svg(figure, "x")
        root = ElementTree.fromstring(self.text)
        self.key = {
            box.find(f"{SVG}title").text.removeprefix("hide or show "): box.get("data-key")
            for box in root.iter(f"{SVG}rect")
            if box.get("data-key")
        }
        names = {entry: name for name, entry in self.key.items()}
        self.points = [
            (names[c.get("data-entry")], c.find(f"{SVG}title").text, float(c.get("cx")), float(c.get("cy")))
            for c in root.iter(f"{SVG}circle")
        ]
        uses = root.iter(f"{SVG}use")
        self.marks = {(round(float(u.get("x"))), round(float(u.get("y")))) for u in uses if u.get("x")}
        self.groups = {g.get("data-entry") for g in root.iter(f"{SVG}g")} - {None}

    def of(self, start: str) -> list[str]:
        """Return the tooltips that begin so."""
        return [text for _, text, *_ in self.points if text.startswith(start)]


def swept(**of):
    """Runs of a sweep: parabolas of two widths."""
    given = {"status": lambda w, x: "finished", "grid": range(-9, -4), "seeds": 2} | of
    rows = [
        {
            "width": w, "lr": 2.0**x, "seed": seed, "status": given["status"](w, x),
            "loss": 2.5 + 8 / w + 0.05 * (max(x, -12) + 7) ** 2 + 0.001 * seed,
        }
        for w in (64, 128)
        for x in given["grid"]
        for seed in range(given["seeds"])
    ]  # fmt: skip
    return check_table(pd.DataFrame(rows), Columns())


def test_every_point_of_a_loss_curve_says_its_mean_its_error_and_its_runs(quickstart):
    table, analysis = quickstart
    drawn = Drawn(plots.transfer_figure(analysis, runs=table.runs))
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
                assert "\n".join(lines) in drawn.of(lines[0])
        for o in result.optima:
            head = f"width {o.scale:g}, learning rate at its best: 2^{o.x:.4g}"
            interval = f"(95 %: 2^{o.low:.4g} to 2^{o.high:.4g})"
            assert f"{head} {interval}\nloss {o.loss:.6g}" in drawn.of(head)


def test_tooltips_lie_on_their_marks_and_ids_are_the_figure_s_own(quickstart):
    drawn = Drawn(plots.transfer_figure(quickstart[1]))
    near = {(x + i, y + j) for x, y in drawn.marks for i in (-1, 0, 1) for j in (-1, 0, 1)}
    assert len(drawn.points) > 50
    assert all((round(x), round(y)) in near for *_, x, y in drawn.points)
    assert set(re.findall(r'\bid="(..)', drawn.text)) == {"x-"}
    assert set(re.findall(r'(?:href="#|url\(#)(..)', drawn.text)) == {"x-"}


def test_the_key_hides_what_belongs_to_a_curve_in_every_panel(quickstart):
    drawn = Drawn(plots.transfer_figure(quickstart[1]))
    assert list(drawn.key) == ["width 64", "width 128", "width 256", "width 384"]
    assert set(drawn.key.values()) == drawn.groups
    for name in drawn.key:
        assert {text.startswith(f"{name}, ") for entry, text, *_ in drawn.points if entry == name} == {True}


def test_a_table_without_trials_names_seeds_alone_and_many_runs_are_counted():
    table = swept(seeds=9)
    drawn = Drawn(plots.transfer_figure(analyze(table), runs=table.runs))
    (text,) = drawn.of("width 64, learning rate 2^-7\n")
    assert "seed 0: loss 2.625" in text and "trial" not in text and text.endswith("and 3 more")


def test_runs_without_a_place_say_what_became_of_them():
    fates = {-5: "diverged", -9: "stopped"}
    table = swept(status=lambda w, x: fates.get(x, "finished"), grid=[-np.inf, *range(-9, -4)])
    drawn = Drawn(plots.transfer_figure(analyze(table), runs=table.runs))
    for x, fate in ((-5, "diverged"), (-9, "stopped early")):
        assert f"seed 1: {fate}" in drawn.of(f"width 64, learning rate 2^{x}\n")[0]
    (text,) = drawn.of("width 64, learning rate 0\n")
    assert text.startswith("width 64, learning rate 0\nloss 3.8755 ± 0.0") and text.endswith(", 2 runs")


def test_learning_curves_say_steps_and_seeds():
    cells = itertools.product((64, 128), range(-9, -4), (0, 1), range(1, 1001, 2))
    rows = [
        (w, 2.0**x, s, step, 3 + 4 / step**0.3 + 0.05 * (x + 7) ** 2 + s / 100) for w, x, s, step in cells
    ]
    table = check_table(pd.DataFrame(rows, columns=["width", "lr", "seed", "step", "loss"]), Columns())
    drawn = Drawn(plots.learning_curves_figure(analyze(table), runs=table.runs))
    (text,) = drawn.of("width 64, learning rate 2^-7\nstep 101:")
    assert f"loss {3 + 4 / 101**0.3 + 0.005:.6g}\nseed 0" in text and "\nseed 1" in text
    assert 200 <= len(drawn.points) <= 240, "not each of 1000 steps"


def test_a_search_has_its_trials_in_every_panel():
    runs = load_runs(RESULTS / "tune_small")
    drawn = Drawn(plots.search_figure(ranked(runs), varied(runs)))
    assert list(drawn.key) == ["best", "finished (14)", "stopped early, loss at its last step (34)"]
    best = runs[runs["status"] == "finished"].sort_values("loss").iloc[0]
    texts = drawn.of(f"trial {best['trial_id']}")
    assert len(texts) == 12 and len(set(texts)) == 1, "as a dot and as a star, in six panels"
    lines = f"loss {best['loss']:.6g}, seed 0", "finished after 500 steps", f"init σ {best['init_std']:.4g}"
    assert all(line in texts[0] for line in lines)


def test_layers_of_a_coordinate_check_say_their_means_and_slopes():
    measured = pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")
    part = coord_check.by_setting(measured)["sgd_untied"]
    drawn = Drawn(plots.coordinate_check_figure(part))
    assert set(drawn.key) == set(part["layer"])
    last = part[part["step"] == part["step"].max()]
    chosen = "parametrization == 'sp' and quantity == 'update' and layer == 'logits'"
    runs = last.query(f"{chosen} and width == 512").sort_values("seed")
    (fit,) = coord_check.slopes(part).query(chosen).to_dict("records")
    lines = ["logits, width 512", f"rms {runs['rms'].mean():.4g}"]
    lines += [f"grows as width^{fit['slope']:.2f} (95 %: {fit['low']:.2f} to {fit['high']:.2f})"]
    lines += [f"seed {r.seed}: {r.rms:.4g}" for r in runs.itertuples()]
    assert "\n".join(lines) in drawn.of("logits, width 512\n")


def test_names_that_are_markup_stay_text():
    rows = [
        {"width": w, "lr": 2.0**x, "loss": 2 + x**2 / 9 + 1 / w, "seed": "</title><b>$x$"}
        for w in (1, 2)
        for x in range(-2, 3)
    ]
    table = check_table(pd.DataFrame(rows), Columns())
    drawn = Drawn(plots.transfer_figure(analyze(table), runs=table.runs))
    assert "<b>" not in drawn.text and any("seed </title><b>$x$:" in text for _, text, *_ in drawn.points)
