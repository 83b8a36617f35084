"""Panels for a browser draw the numbers of the analysis, and say whose they are."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, analyze, check_table, coord_check
from mup_tpu.analysis.ranking import ranked, varied
from mup_tpu.plots import interactive
from mup_tpu.store import load_runs

RESULTS = Path(__file__).parents[2] / "results"


def told(panels, index):
    """What the points of a panel say, by where they are; a grid point's comes before an optimum's."""
    data, found = panels.targets[index].data_source.data, {}
    places = data[panels.targets[index].glyph.x]
    for entry, x, y, text in zip(data["curve"], places, data["y"], data["about"], strict=True):
        found.setdefault((entry, round(float(x), 9)), (float(y), text.replace("<br>", "\n")))
    return found


def swept(**of):
    """A run a line: parabolas of two widths."""
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
    panels = interactive.transfer_panels(analysis, table.runs)
    assert [title.partition(":")[0] for title in panels.titles] == ["μP", "SP"]
    for index, name in enumerate(("mup", "sp")):
        (result,) = (r for r in analysis.results if r.parametrization == name)
        points, (low, high) = (
            told(panels, index),
            (panels.figures[index].y_range.start, panels.figures[index].y_range.end),
        )
        for curve in result.curves:
            errors = result.noise.errors_G(curve)
            for x, mean, error in zip(curve.x_G, curve.mean_G, errors, strict=True):
                y, text = points[f"width {curve.scale:g}", round(float(x), 9)]
                assert low <= y <= high and (y == mean or y > mean - 1e-12)
                assert f"loss {mean:.6g} ± {error:.2g}" in text
                own = table.runs.query(f"compared == {name!r} and scale == {curve.scale} and x == {x}")
                for run in own.itertuples():
                    assert f"seed {run.seed}: loss {run.loss:.6g}, trial {run.trial_id}" in text


def test_a_table_without_trials_names_seeds_alone_and_many_runs_are_counted():
    table = swept(seeds=9)
    panels = interactive.transfer_panels(analyze(table), table.runs)
    _, text = told(panels, 0)["width 64", -7.0]
    assert "seed 0: loss 2.625" in text and "trial" not in text and text.endswith("and 3 more")


def test_runs_without_a_place_lie_on_the_rail_and_say_what_became_of_them():
    fates = {-5: "diverged", -9: "stopped"}
    table = swept(status=lambda w, x: fates.get(x, "finished"), grid=[-np.inf, *range(-9, -4)])
    panels = interactive.transfer_panels(analyze(table), table.runs)
    points = told(panels, 0)
    heights = {points["width 64", x][0] for x in (-5.0, -9.0)}
    assert len(heights) == 1 and heights.pop() > max(points["width 64", x][0] for x in (-6.0, -7.0, -8.0))
    assert "seed 1: diverged" in points["width 64", -5.0][1]
    assert "seed 1: stopped early" in points["width 64", -9.0][1]
    assert {"diverged", "stopped early", "at 0"} <= set(panels.entries)
    assert any(", learning rate 0</b>" in text for _, text in points.values())


def test_an_entry_of_the_key_holds_its_curve_in_every_panel(quickstart):
    table, analysis = quickstart
    panels = interactive.learning_curve_panels(analysis, table.runs)
    for entry in panels.entries.values():
        owners = [
            index for index, f in enumerate(panels.figures) for r in entry.renderers if r in f.renderers
        ]
        assert owners == [0, 1]


@pytest.mark.parametrize("least, fall, is_log", [(3.0, 4.0, False), (0.0, 90.0, True)])
def test_learning_curves_say_each_step_on_an_axis_that_holds_them(least, fall, is_log):
    cells = itertools.product((64, 128), range(-9, -4), (0, 1), (1, 10, 100, 200))
    rows = [
        (w, 2.0**x, seed, step, least + fall / step**0.3 + 0.05 * (x + 7) ** 2 + seed / 100)
        for w, x, seed, step in cells
    ]
    table = check_table(pd.DataFrame(rows, columns=["width", "lr", "seed", "step", "loss"]), Columns())
    panels = interactive.learning_curve_panels(analyze(table), table.runs)
    (figure,) = panels.figures
    assert (type(figure.yaxis[0]).__name__ == "LogAxis") == is_log
    points = told(panels, 0)
    y, text = points["width 64", 100.0]
    assert y == pytest.approx(least + fall / 100**0.3 + 0.005) and f"step 100: loss {y:.6g}" in text
    assert "seed 0; seed 1" in text
    assert all(figure.y_range.start < y < figure.y_range.end for y, _ in points.values())


def test_a_search_has_its_trials_in_every_panel_and_its_best_marked():
    runs = load_runs(RESULTS / "tune_small")
    panels = interactive.search_panels(ranked(runs), varied(runs))
    assert list(panels.entries) == ["finished (14)", "stopped early, loss at its last step (34)", "best"]
    sources = {target.data_source.id for target in panels.targets}
    assert len(panels.figures) == 6 and len(sources) == 1, "what is chosen in one panel is chosen in all"
    best = runs[runs["status"] == "finished"].sort_values("loss").iloc[0]
    stars = panels.entries["best"].renderers
    assert [r.data_source.data["y"].tolist() for r in stars] == [[best["loss"]]] * 6
    about = next(t for t in panels.targets[0].data_source.data["about"] if best["trial_id"] in t)
    for text in (
        f"loss {best['loss']:.6g}, seed 0",
        "finished after 500 steps",
        f"init σ {best['init_std']:.4g}",
    ):
        assert text in about


def test_lines_of_a_coordinate_check_go_through_the_means_over_seeds():
    measured = pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")
    part = coord_check.by_setting(measured)["sgd_untied"]
    panels = interactive.coordinate_check_panels(part)
    assert panels.titles == [
        "μP: activation size",
        "SP: activation size",
        "μP: update size",
        "SP: update size",
    ]
    assert {len(entry.renderers) for entry in panels.entries.values()} == {8}, (
        "a line and its points, four times"
    )
    last = part[part["step"] == part["step"].max()]
    own = last.query(
        "parametrization == 'sp' and quantity == 'update' and layer == 'logits' and width == 512"
    )
    y, text = told(panels, 3)["logits", 9.0]
    assert y == pytest.approx(np.log2(own["rms"].mean())) and len(own) == 3
    slope = coord_check.slopes(part).query(
        "parametrization == 'sp' and quantity == 'update' and layer == 'logits'"
    )
    assert f"grows as width<sup>{slope['slope'].item():.2f}</sup>" in text
    for run in own.itertuples():
        assert f"seed {run.seed}: {run.rms:.4g}" in text
