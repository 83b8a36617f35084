"""Which figures there are, and that the same input gives the same bytes."""

import importlib
import inspect
import pkgutil
import re

import pandas as pd

from mup_tpu import plots
from mup_tpu.analysis import Reading, analyze, check_table, load_table
from mup_tpu.analysis.ingest.table_values import LossUnit


def test_every_figure_is_registered_with_title_and_caption():
    modules = [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(plots.__path__, "mup_tpu.plots.")
    ]
    draws = {
        name.removesuffix("_figure")
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_figure") and inspect.signature(value).return_annotation == "Figure"
    }
    assert draws == set(plots.FIGURES) and len(draws) >= 12
    titles = [kind.title for kind in plots.FIGURES.values()]
    assert len(set(titles)) == len(titles)
    for kind in plots.FIGURES.values():
        assert kind.title and kind.caption and not kind.caption.endswith(".")


def test_the_same_input_gives_the_same_bytes_in_both_files(quickstart, tmp_path):
    """Without digits that differ from processor to processor."""
    draw = plots.FIGURES["regret"].draw
    first, second = (plots.save_figure(draw(quickstart[1]), tmp_path / i, "regret") for i in "ab")
    assert [p.name for p in first] == ["regret.png", "regret.svg"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert first[0].stat().st_size > 10_000
    assert not re.search(r"(?<!scale\(0)\.\d{3}", first[1].read_text())


def test_figures_of_a_sweep_are_those_for_which_it_has_data(quickstart):
    kinds = "transfer", "optimum", "best_loss", "learning_curves", "regret", "sequence"
    assert set(plots.drawings(quickstart[1])) >= set(kinds)


def test_one_width_without_an_optimum_can_be_drawn(tmp_path):
    rows = [
        {"width": 64, "lr": 2.0**x, "loss": 2.5, "params_non_embedding": 1000, "tokens": 50} for x in (-9, -8)
    ]
    figures = plots.transfer_figures(analyze(check_table(pd.DataFrame(rows))))
    assert list(figures) == ["transfer"], "what moves with the width has no figure at one width"
    plots.save_figure(figures["transfer"], tmp_path, "transfer")


def test_a_table_of_one_value_is_drawn_against_scale_and_compute_alone():
    rows = [
        {"width": w, "lr": 0.01, "loss": 2 + 1 / w, "params_non_embedding": w**2, "tokens": 9}
        for w in (32, 64, 128, 256, 512)
    ]
    analysis = analyze(check_table(pd.DataFrame(rows)))
    assert {o.status for o in analysis.results[0].optima} == {"one value"}
    assert list(plots.transfer_figures(analysis)) == ["best_loss"]
    assert len(analysis.results[0].law.losses) == 5


def test_axes_of_a_metric_have_its_name(tmp_path):
    rows = [
        {"width": w, "lr": 2.0**x, "accuracy": 0.8 - 0.01 * (x + 7) ** 2 + w / 1e4}
        for w in (64, 128, 256)
        for x in range(-10, -4)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
    table = load_table(tmp_path / "runs.csv", Reading(unit=LossUnit(maximize=True)))
    analysis = analyze(table, epsilon=0.01)
    drawn = {name: draw(analysis).axes for name, draw in plots.drawings(analysis).items()}
    labels = {name: axes[0].get_ylabel() for name, axes in drawn.items()}
    assert labels["transfer"] == "−accuracy"
    assert drawn["regret"][-1].get_ylabel().startswith("regret (accuracy)")
