"""Style of all figures: colours, panels, keys, texts and ticks, and SVG with tooltips for a page.

matplotlib's constrained layout places everything. In a page, transparent circles with a `<title>` lie over
the points that `describe` has given tooltips.
"""

from __future__ import annotations

import functools
import html
import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, Formatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.optimum import Optimum, Status
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import columns
from mup_tpu.config.values import visible
from mup_tpu.errors import ConfigError, raised_as
from mup_tpu.words.names import heading, point, rule_name

P = ParamSpec("P")

# matplotlib's settings, under which every figure is drawn and saved
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 10.5,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "mup_tpu",
    "svg.fonttype": "path",
}
INK = "#333333"
BAR = 1.0  # inches of a colour bar with its numbers
_ACROSS = 3  # largest number of panels in a row
_LETTERS = 11  # letters per inch of text
# An interval that reaches further from its optimum (octaves) ends in an arrow.
_LONGEST = 1.5


@dataclass(frozen=True)
class FigureType:
    """A kind of figure: its texts on a page, its function, and when an analysis has data for it."""

    title: str
    caption: str
    draw: Callable[..., Figure]
    has_data: Callable[[TransferAnalysis], bool] | None = None
    """None for figures of anything other than a `TransferAnalysis`."""


FIGURES: dict[str, FigureType] = {}  # all figures by name; `figure_type` adds one


def figure_type(
    title: str, caption: str, has_data: Callable[[TransferAnalysis], bool] | None = None
) -> Callable[[Callable[P, Figure]], Callable[P, Figure]]:
    """Register a function NAME_figure as the figure NAME, and draw it under this module's style.

    Titles and names of axes are wrapped to the size of their panel.
    Control characters become escapes, because no SVG may hold them.
    """

    def register(draw: Callable[P, Figure]) -> Callable[P, Figure]:
        @functools.wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
            without_fonts = "figures cannot be drawn; install a font, such as DejaVu Sans"
            with matplotlib.rc_context(STYLE):
                with raised_as(ConfigError, without_fonts, (ValueError,)):
                    findfont(FontProperties())
                figure = draw(*args, **kwargs)
                for text in figure.findobj(Text):
                    text.set_text(visible(text.get_text()))
                for ax in figure.axes:
                    if (spec := ax.get_subplotspec()) is not None:
                        rows, across, *_ = spec.get_geometry()
                        width, height = figure.get_size_inches() / (across, rows)
                        for text, inches in (
                            (ax.title, width),
                            (ax.xaxis.label, width),
                            (ax.yaxis.label, height),
                        ):
                            text.set_text(wrapped(text.get_text(), inches - 0.6))
                return figure

        FIGURES[draw.__name__.removesuffix("_figure")] = FigureType(title, caption, drawn, has_data)
        return drawn

    return register


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write name.png and name.svg, the same bytes for the same figure."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    file, drawn = io.BytesIO(), io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, dpi=150, metadata={"Software": None})
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    paths[1].write_text(_rounded(drawn.getvalue()), encoding="utf-8")
    # 256 colours look the same and take a third of the bytes.
    Image.open(file).convert("RGB").quantize(256).save(paths[0], optimize=True)
    return paths


def _rounded(svg: str) -> str:
    """Round to hundredths of a point: later digits depend on the processor that fitted the data."""
    return re.sub(r"(?<!scale\(0)(\.\d\d)\d+", r"\1", svg)


def in_unit(quantity: str, columns: Columns) -> str:
    """Return the label of an axis of losses or their differences, in the table's unit."""
    name = plain(columns.loss_name if quantity == "loss" else quantity)
    # The axis has the negative of a metric that is maximized.
    sign = "−" if columns.maximized and quantity == "loss" else ""
    unit = "nat per token" if columns.unit == "nat" and columns.is_per_token else plain(columns.unit)
    return sign + heading(name, unit)


def sequential(scales: Sequence[float], scale: float) -> tuple[float, ...]:
    position = list(scales).index(scale) / max(1, len(scales) - 1)
    # The yellow end of viridis is too light on white.
    return matplotlib.colormaps["viridis"](0.88 * (1 - position))


def categorical(index: int) -> str:
    # Okabe and Ito's colours, which colour-blind readers tell apart, then two darker ones and ink.
    colors = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d1f", "#7a3b9a", INK)
    return colors[index % len(colors)]


def marker(index: int) -> str:
    return "osD^v<>Ph"[index % 9]


# Marker and colour of each verdict, the same in all figures that mark them.
VERDICTS = {
    "TRANSFERS": ("o", categorical(0)),
    "DRIFTS": ("s", categorical(1)),
    "MOVES AT NO COST": ("^", categorical(2)),
    "OPEN": ("D", "#7f7f7f"),
}


_NOTEBOOK_DPI = 96


class ShownFigure(Figure):
    """Figure that a notebook shows without matplotlib's own mode for notebooks."""

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as content:
            self.savefig(content, format="png", dpi=_NOTEBOOK_DPI)
            return content.getvalue()


def panels(count: int, width: float, height: float, share_x: bool = True, share_y: bool = True) -> list[Axes]:
    """Return panels of a new figure, each of a width and height in inches."""
    across = min(count, 2 if count == 4 else _ACROSS)
    rows = -(-count // across)
    figure = ShownFigure(figsize=(width * across, height * rows), layout="constrained")
    axes = figure.subplots(rows, across, sharex=share_x, sharey=share_y, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    for panel in axes[:count]:
        panel.tick_params(labelbottom=True)
        if not share_y:
            panel.tick_params(labelleft=True)
    return axes[:count]


def label_rows(axes: Sequence[Axes], text: str, each: bool = False) -> None:
    """Label the vertical axis of the first panel in each row, or with `each` of all panels."""
    for ax in axes:
        spec = ax.get_subplotspec()
        if each or (spec is not None and spec.colspan.start == 0):
            ax.set_ylabel(text)


def figure_of(axes: Sequence[Axes]) -> Figure:
    figure = axes[0].get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def with_key(axes: Sequence[Axes], handles: Sequence[Artist], title: str | None = None) -> Figure:
    """Add a key below the panels, in as many columns as fit; return the figure, which grows by its height."""
    figure = figure_of(axes)
    if not handles:
        return figure
    for handle in handles:
        handle.set_label(wrapped(str(handle.get_label()), figure.get_figwidth() - 1))
    lines = [line for handle in handles for line in str(handle.get_label()).split("\n")]
    entry = max(map(len, lines)) / (1.2 * _LETTERS) + 0.7  # width of an entry with its mark, inches
    ncols = max(1, min(len(handles), 7, int(figure.get_figwidth() / entry)))
    figure.set_figheight(figure.get_figheight() + 0.17 * (-(-len(lines) // ncols) + (title is not None)))
    figure.legend(handles=handles, loc="outside lower center", title=title, ncols=ncols, fontsize=9)
    return figure


def mark(marker: str, text: str, **look: Any) -> Line2D:
    """Return an entry of a key for a marker, or with "" for a line."""
    defaults = {"color": INK, "ls": "" if marker else "-", "ms": 6}
    return Line2D([], [], marker=marker or "none", label=text, **{**defaults, **look})


def shade(text: str) -> Patch:
    return Patch(color=INK, alpha=0.12, lw=0, label=text)


def draw_interval(
    ax: Axes, at: float, value: float, ends: tuple[float, float], limits: tuple[float, float], **look: Any
) -> None:
    """Draw a value with its interval between limits; an arrow ends a side that goes on beyond them."""
    low, middle, high = np.clip([ends[0], value, ends[1]], *limits)
    ax.errorbar(at, middle, [[middle - low], [high - middle]], **look)
    for end, shown, arrow in ((ends[0], low, "v"), (ends[1], high, "^")):
        if end != shown:
            ax.plot(at, shown, arrow, color=look["color"], ms=5)


def draw_optima(ax: Axes, optima: Sequence[Optimum], shift: float = 1.0, **look: Any) -> None:
    """Draw optima against scale, with their intervals; those at the edge of their grid are arrows."""
    for o in optima:
        if o.is_bracketed:
            limits = o.x - _LONGEST, o.x + _LONGEST
            draw_interval(ax, o.scale * shift, o.x, (o.low, o.high), limits, capsize=3, **look)
        elif math.isfinite(o.best_x):
            arrow = "v" if o.status == Status.LOWER else "^"
            ax.plot(o.scale * shift, o.best_x, arrow, mfc="none", color=look["color"], ms=9)


def wrapped(text: str, inches: float) -> str:
    return textwrap.fill(text, max(8, int(inches * _LETTERS)), break_on_hyphens=False)


def label(compared: str, column: str = "parametrization") -> str:
    return raised(rule_name(compared, column))


def raised(text: str) -> str:
    """Raise the exponents of a text: tokens^−0.32."""
    return re.sub(r"\^(−?\d+(?:\.\d+)?)", r"$^{\1}$", plain(text))


def plain(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib reads text between two $ as a formula


def title(column: str) -> str:
    return plain(columns.title(column))


def column_label(column: str) -> str:
    return plain(columns.label(column))


def at(scale: str, value: float) -> str:
    return plain(point(scale, value))


def power(x: float) -> str:
    return f"$2^{{{x:g}}}$"


class PlainTicks(Formatter):
    """Ticks with as many digits as keep them apart, and no offset: 2.32581, or 1.04e−6."""

    def __call__(self, value: float, position: int | None = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Write all ticks of an axis."""
        gaps = np.diff(np.unique(values))
        step = float(gaps.min()) if len(gaps) else max(map(abs, values), default=1.0)
        largest = max(map(abs, values), default=0.0)
        kind = "f" if largest == 0 or 1e-3 <= largest < 1e5 else "e"
        written: list[str] = []
        for digits in range(12):
            written = [f"{value:.{digits}{kind}}" for value in values]
            if all(abs(float(w) - v) <= 0.02 * step for w, v in zip(written, values, strict=True)):
                break
        return [_tidied(text) if value else "0" for text, value in zip(written, values, strict=True)]


def _tidied(number: str) -> str:
    # 1.04e−6 for 1.04e-06
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", number).replace("-", "−")


def loss_axis(ax: Axes, losses: Iterable[float]) -> None:
    """Format the vertical axis of losses: logarithmic where they differ by more than a factor of 3."""
    known = np.array([value for value in losses if np.isfinite(value)])
    if len(known) and known.min() > 0 and known.max() > 3 * known.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        ax.yaxis.set_major_formatter(lambda value, _: _tidied(f"{value:g}"))
        ax.minorticks_off()
    else:
        ax.yaxis.set_major_formatter(PlainTicks())


def size_axis(axis: Axis, is_compute: bool = False) -> None:
    """Format a logarithmic axis of parameters or tokens (50k, 2M, 1B), or of FLOP (2M, 1G)."""
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter(lambda value, _: write_size(value, is_compute))
    axis.set_minor_locator(NullLocator())


def write_size(value: float, is_compute: bool = False) -> str:
    # A billion parameters are 1B, and 10⁹ FLOP are 1G.
    written = EngFormatter(sep="", useOffset=False)(value)
    return written if is_compute else written.replace("G", "B")


def scale_axis(ax: Axes, scale: str, scales: Sequence[float], width: float) -> None:
    """Format a logarithmic axis with a tick at each point of a scale; its panel has `width` inches."""
    log_ticks(ax, scales, [columns.write_scale(scale, s) for s in scales], width)
    ax.set_xlabel(title(scale))


def log_ticks(ax: Axes, points: Sequence[float], texts: Sequence[str], width: float) -> None:
    """Make the horizontal axis logarithmic, with a tick at each of ascending points."""
    ax.set_xscale("log", base=2)
    log2 = np.log2(points)
    texts, angle = apart(texts, ((width - 1) / (np.ptp(log2) or 1.0) * log2).tolist())
    ax.set_xticks(points, texts, **angle)
    ax.minorticks_off()


def apart(texts: Sequence[str], places: Sequence[float]) -> tuple[list[str], dict[str, Any]]:
    """Return texts of ticks at places in inches: turned, and some left out, where they would touch."""
    pairs = zip(itertools.pairwise(texts), itertools.pairwise(places), strict=True)
    if all((len(a) + len(b) + 1) / 24 < right - left for (a, b), (left, right) in pairs):
        return [*texts], {}
    shown, last = list[str](), -math.inf
    for text, place in zip(texts, places, strict=True):
        is_free = place - last > 0.16  # height of a text
        shown.append(text if is_free else "")
        last = place if is_free else last
    return shown, {"rotation": 90}


def log2_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.xaxis.set_major_formatter(lambda x, _: power(x))


_MOST_RUNS = 6  # largest number of runs that a tooltip lists


def describe(line: Line2D, tooltips: Sequence[str]) -> None:
    """Give each point of a line a tooltip; "" is none."""
    line.tooltips = tooltips  # type: ignore[attr-defined]


def loss_text(loss: float, error: float | None = None) -> str:
    """Write a loss with its standard error, to the six digits that float32 carries."""
    return f"loss {loss:.6g}" + ("" if error is None else f" ± {error:.2g}")


def run_lines(runs: pd.DataFrame | None) -> list[str]:
    """Write a line per run: seed, loss, and trial where known."""
    lines = []
    runs = pd.DataFrame() if runs is None else runs
    for run in runs.sort_values("seed").head(_MOST_RUNS).to_dict("records") if len(runs) else []:
        fate = "refused" if run.get("refused") else "stopped early" if run.get("stopped") else "diverged"
        seed = run["seed"] if isinstance(run["seed"], str) else f"{run['seed']:g}"
        trial = f", trial {run['trial_id']}" if pd.notna(run.get("trial_id")) and run["trial_id"] else ""
        lines.append(f"seed {seed}: {loss_text(run['loss']) if np.isfinite(run['loss']) else fate}{trial}")
    return [*lines, f"and {len(runs) - _MOST_RUNS} more"] if len(runs) > _MOST_RUNS else lines


def svg(figure: Figure, prefix: str) -> str:
    """Return a figure as an `<svg>` element with tooltips; all ids in it begin with a prefix."""
    with matplotlib.rc_context(STYLE):
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)
        figure.set_layout_engine(None)  # a second layout would move the points away from those in the file
        file = io.StringIO()
        left_out = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", dpi=72, metadata=left_out)
    text = _rounded(file.getvalue())
    text = text[text.index("<svg") :].rstrip().removesuffix("</svg>")
    # Comments, ids of groups and indents take half of the bytes.
    text = re.sub(r"\s+", " ", re.sub(r'<!--.*?-->|(?<=<g) id="[^"]*"', "", text))
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    circles, scale = [], 72 / figure.dpi
    lines: list[Any] = figure.findobj(lambda artist: hasattr(artist, "tooltips"))
    for line in lines:
        places = line.get_transform().transform(line.get_xydata())
        for (x, y), tooltip in zip(places, line.tooltips, strict=True):
            if tooltip and line.axes.bbox.contains(x, y):
                at = f'cx="{x * scale:.1f}" cy="{(figure.bbox.height - y) * scale:.1f}" r="4"'
                title = f"<title>{html.escape(visible(tooltip))}</title>"
                circles.append(f'<circle class="point" {at}>{title}</circle>')
    return "\n".join([text, *circles, "</svg>"])
