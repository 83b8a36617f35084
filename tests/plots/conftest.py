"""What several of these files draw."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mup_tpu.analysis import Columns, analyze, load_table
from mup_tpu.analysis.drift import Drift
from mup_tpu.analysis.optimum import Noise, Optimum
from mup_tpu.analysis.referee import Ruling
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.verdict import Regret, Verdict

REFERENCE = Path(__file__).parents[1] / "reference_runs" / "nanogpt_mup_shakespeare_digitised.csv"


@pytest.fixture(autouse=True)
def _painted(painted):
    """Tests of figures paint them."""


@pytest.fixture(scope="session")
def analysis():
    """A published sweep in SP and in μP."""
    return analyze(load_table(REFERENCE))


@pytest.fixture(scope="session")
def quickstart(stored):
    """A stored sweep: its table and its analysis."""
    return stored("quickstart").table, stored("quickstart")


@pytest.fixture(scope="session")
def ruling():
    """Make a verdict of one sweep on one rule."""

    def make(rule="mup", drift=(0.0, -0.1, 0.1), cost=None, decision="TRANSFERS", **changes) -> Ruling:
        ends = changes.pop("ends", (64, 256))
        regret = [Regret(*ends, *cost, cost[0], "estimated", 0.1)] if cost else []
        optima = tuple(Optimum(scale, "bracketed", loss=2.0) for scale in ends)
        result = TransferResult(
            rule, Noise(0.0, 1, "seeds"), optima, (None, None), Drift(*drift, 0.0, 0.0, ends, drift),
            Verdict(decision), tuple(regret),
        )  # fmt: skip
        made = {"architecture": "gpt2", "update_rule": "adamw", "columns": Columns(), "sweep": "a"}
        return Ruling(result=result, **(made | changes))

    return make


@pytest.fixture(scope="session")
def faults():
    """Function that lists what cannot be read in a figure as it is drawn."""

    def faults(figure):
        FigureCanvasAgg(figure).draw()
        renderer, page = figure.canvas.get_renderer(), figure.bbox
        found, texts = [], []
        for key in filter(None, (*figure.legends, *(ax.get_legend() for ax in figure.axes))):
            box = key.get_window_extent(renderer).shrunk(0.98, 0.98)
            found += ["a key lies on a panel" for ax in figure.axes if box.overlaps(ax.bbox)]
            texts += [key.get_title(), *key.get_texts()]
        for ax in figure.axes:
            texts += [ax.title, *ax.texts]
            for axis in (ax.xaxis, ax.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                shown = [text for tick in ticks for text in (tick.label1, tick.label2) if text.get_visible()]
                if axis.get_offset_text().get_text() or 0 < len({t.get_text() for t in shown}) < min(
                    2, len(shown)
                ):
                    found.append("ticks do not say their values")
                texts += [*shown, axis.label]
        texts = [text for text in texts if text.get_text().strip()]
        boxes = np.array([text.get_window_extent(renderer).extents for text in texts])
        is_cut = (boxes[:, :2] < page.min - 1).any(1) | (boxes[:, 2:] > page.max + 1).any(1)
        found += [f"cut: {texts[i].get_text()}" for i in np.flatnonzero(is_cut)]
        (x0, y0, x1, y1) = (boxes + [1, 1, -1, -1]).T
        over = (x0[:, None] < x1) & (x1[:, None] > x0) & (y0[:, None] < y1) & (y1[:, None] > y0)
        pairs = np.argwhere(np.triu(over, 1))
        return found + [f"{texts[i].get_text()!r} lies on {texts[j].get_text()!r}" for i, j in pairs]

    return faults
