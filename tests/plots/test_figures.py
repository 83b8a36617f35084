"""Which figures there are, and that the same input gives the same bytes."""

import importlib
import inspect
import pkgutil
import re

import pandas as pd
import pytest

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


@pytest.mark.parametrize(
    ("widths", "grid", "names"),
    [([64], (-9, -8), ["transfer"]), ([32, 64, 128], (-7,), ["best_loss"])],
)
def test_a_table_of_one_width_or_one_value_has_the_figures_that_it_has_data_for(widths, grid, names):
    rows = [
        {"width": w, "lr": 2.0**x, "loss": 2 + 1 / w, "params_non_embedding": w**2, "tokens": 9}
        for w in widths
        for x in grid
    ]
    figures = plots.transfer_figures(analyze(check_table(pd.DataFrame(rows))))
    assert list(figures) == names
    figures[names[0]].draw_without_rendering()


def test_axes_of_a_metric_have_its_name(tmp_path):
    rows = [
        {"width": w, "lr": 2.0**x, "accuracy": 0.8 - 0.01 * (x + 7) ** 2 + w / 1e4}
        for w in (64, 128, 256)
        for x in range(-10, -4)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
    table = load_table(tmp_path / "runs.csv", Reading(unit=LossUnit(maximize=True)))
    analysis = analyze(table, epsilon=0.01)
    assert plots.transfer_figure(analysis).axes[0].get_ylabel() == "−accuracy"
    assert plots.regret_figure(analysis).axes[-1].get_ylabel().startswith("regret (accuracy)")
