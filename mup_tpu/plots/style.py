"""Style of all figures: colours, panels, keys, texts and ticks, and SVG with tooltips for a page.

For a page matplotlib draws the same figure as for a PNG file. Then everything that `describe` has named gets
an attribute for the page's script, and transparent shapes with a `<title>` lie over points and key.
"""

from __future__ import annotations

import functools
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, FixedLocator, Formatter, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.optimum import Optimum, Status
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import columns
from mup_tpu.config.values import visible
from mup_tpu.errors import ConfigError, raised_as
from mup_tpu.words.names import name, point

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
LOSS = "loss (nat per token)"
BAR = 1.0  # width of a bar of colours with its numbers, inches
_ACROSS = 3  # largest number of panels beside each other; further ones go below
_TALL_KEY = 0.85  # height from which a single panel's key goes to its right, inches: more than four lines
_WIDEST = 9.2  # most inches of a panel with its key at the right


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

    Titles and names of axes are broken into lines that fit their panel.
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
                _break_texts(figure)
                return figure

        FIGURES[draw.__name__.removesuffix("_figure")] = FigureType(title, caption, drawn, has_data)
        return drawn

    return register


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write name.png and name.svg, the same bytes for the same figure."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    canvas, dpi, file = figure.canvas, figure.dpi, io.BytesIO()
    figure.set_dpi(150)
    with matplotlib.rc_context(STYLE):
        # Figure.savefig would draw twice, the first time for the layout alone.
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})  # type: ignore[no-untyped-call]
        figure.set_canvas(canvas)
        figure.set_dpi(dpi)
        # The second file takes the first one's layout, which takes half of the time.
        figure.set_layout_engine(None)
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    # 256 colours look the same and take a third of the bytes.
    Image.open(file).convert("RGB").quantize(256).save(paths[0], optimize=True)
    return paths


def in_unit(quantity: str, columns: Columns) -> str:
    """Return the label of an axis of losses or their differences, in the table's unit."""
    if columns.unit == "nat":
        return f"{quantity} (nat per token)" if columns.is_per_token else f"{quantity} (nat)"
    # The axis has the negative of a metric that is maximized.
    sign = "−" if columns.maximized and quantity == "loss" else ""
    return f"{sign}{columns.unit}" if quantity == "loss" else f"{quantity} ({columns.unit})"


def sequential(scales: Sequence[float], scale: float) -> tuple[float, ...]:
    position = list(scales).index(scale) / max(1, len(scales) - 1)
    return matplotlib.colormaps["viridis"](0.88 * (1 - position))  # its yellow end is too light on white


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
    "INCONCLUSIVE": ("D", "#7f7f7f"),
}


def blank(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # measures texts, whichever canvas saves the figure
    return figure


def panels(count: int, width: float, height: float, share_x: bool = True, share_y: bool = True) -> list[Axes]:
    """Return panels of a new figure, each of a width and height in inches."""
    across = min(count, 2 if count == 4 else _ACROSS)
    rows = -(-count // across)
    figure = blank(width * across, height * rows)
    axes = figure.subplots(rows, across, sharex=share_x, sharey=share_y, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    for panel in axes[:count]:
        panel.tick_params(labelbottom=True)
        if not share_y:
            panel.tick_params(labelleft=True)
    return axes[:count]


def label_rows(axes: Sequence[Axes], text: str, each: bool = False) -> None:
    """Write a label of heights at each row's left; with `each`, at all panels."""
    for ax in axes:
        spec = ax.get_subplotspec()
        if each or (spec is not None and spec.colspan.start == 0):
            ax.set_ylabel(text)


def figure_of(axes: Sequence[Axes]) -> Figure:
    figure = axes[0].get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def with_key(axes: Sequence[Axes], handles: Sequence[Artist], title: str | None = None) -> Figure:
    """Add a key below the panels in as many columns as fit, or at the right of a single one.

    The figure, which is returned, grows by what the key takes.
    """
    figure = figure_of(axes)
    if not handles:
        return figure
    labels = [str(handle.get_label()) for handle in handles]

    def key(place: Any, ncols: int = 1) -> Legend:
        return figure.legend(handles=handles, loc=place, title=title, ncols=ncols, fontsize=9)

    legend = _fitted(functools.partial(key, "outside lower center"), labels, 0.96 * figure.get_figwidth())
    height = _inches(legend)[1]
    if len(axes) == 1 and height > _TALL_KEY:  # it would take a third of the figure
        beside = key("outside right upper")
        width = figure.get_figwidth() + _inches(beside)[0]
        if width <= _WIDEST:
            legend.remove()
            figure.set_figwidth(width)
            beside.labels, beside.is_beside = labels, True  # type: ignore[attr-defined]
            return figure
        beside.remove()
    figure.set_figheight(figure.get_figheight() + max(0.0, height - 0.3))
    return figure


def panel_key(ax: Axes, width: float, below: float, title: str) -> float:
    """Draw a key of at most this width below one panel; return its height. All lengths are inches.

    `below` leaves room for ticks and the axis' name.
    """
    figure = ax.figure
    shift = matplotlib.transforms.ScaledTranslation(0, -below, figure.dpi_scale_trans)
    labels = ax.get_legend_handles_labels()[1]
    legend = _fitted(
        lambda ncols: ax.legend(
            fontsize=7.5, title=title, title_fontsize=7.5, ncols=ncols, loc="upper center",
            bbox_to_anchor=(0.5, 0), bbox_transform=ax.transAxes + shift, borderaxespad=0, columnspacing=1.2,
        ),
        labels, width,
    )  # fmt: skip
    return _inches(legend)[1]


def _fitted(make: Callable[[int], Legend], labels: Sequence[str], width: float) -> Legend:
    """Return a legend with as many columns as fit the width; longer entries are broken into lines."""
    for ncols in range(min(7, len(labels)), 0, -1):
        legend = make(ncols)
        legend.labels, legend.is_beside = labels, False  # type: ignore[attr-defined]
        if _inches(legend)[0] <= width:
            return legend
        if ncols > 1:
            legend.remove()
    for text in (legend.get_title(), *legend.get_texts()):
        _break(text, width - 0.6)
    return legend


def _inches(artist: Any) -> tuple[float, float]:
    figure = artist.figure
    box = artist.get_window_extent(figure.canvas.get_renderer())
    return box.width / figure.dpi, box.height / figure.dpi


def mark(marker: str, text: str, **look: Any) -> Line2D:
    """Return an entry of a key for a marker, or with "" for a line."""
    defaults = {"color": INK, "ls": "" if marker else "-", "ms": 6}
    return Line2D([], [], marker=marker or "none", label=text, **{**defaults, **look})


def shade(text: str) -> Patch:
    return Patch(color=INK, alpha=0.12, lw=0, label=text)


def at_edge(ax: Axes, optimum: Optimum, at: float, **look: Any) -> None:
    if not optimum.is_bracketed and math.isfinite(optimum.best_x):
        arrow = "v" if optimum.status == Status.LOWER else "^"
        ax.plot(at, optimum.best_x, arrow, mfc="none", **look)


def _break_texts(figure: Figure) -> None:
    in_grid = [ax for ax in figure.axes if ax.get_subplotspec() is not None]
    bars = len(figure.axes) - len(in_grid)
    taken = BAR * bars + sum(_inches(key)[0] for key in figure.legends if getattr(key, "is_beside", False))
    for ax in in_grid:
        spec = ax.get_subplotspec()
        assert spec is not None
        width = (figure.get_figwidth() - taken) / spec.get_gridspec().ncols
        height = figure.get_figheight() / spec.get_gridspec().nrows
        for text, room in (
            (ax.title, width - (1.3 if bars else 0.5)),  # room for a bar's numbers at the right
            (ax.xaxis.label, width - 0.7),
            (ax.yaxis.label, height - 0.9),
        ):  # fmt: skip
            _break(text, max(room, 1.0))


def _break(text: Text, inches: float) -> None:
    written = text.get_text()
    rotated = text.get_rotation() == 90
    most = max(len(line) for line in written.split("\n"))
    while most > 6 and (size := _inches(text)[1 if rotated else 0]) > inches:
        most = max(6, min(most - 1, int(most * inches / size)))
        text.set_text("\n".join(part for line in written.split("\n") for part in broken(line, most)))


def broken(written: str, most: int) -> list[str]:
    """Split a text into lines of at most `most` letters; formulas stay whole."""
    lines, line = [], ""
    for piece in re.findall(r"(?:\\\$|\$[^$]*\$|[^ _\-$])+[ _\-]*|[ _\-]+", written):
        while len(piece) > most and "$" not in piece:
            room = most - len(line)
            lines.append(line + piece[:room])
            line, piece = "", piece[room:]
        if line and len(line) + len(piece.rstrip()) > most:
            lines.append(line.rstrip())
            line = ""
        line += piece
    return [*lines, line.rstrip()]


def label(compared: str, column: str = "parametrization") -> str:
    return raised(name(compared, column))


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
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(FixedLocator(log_ticks(low, high, least=5)))
        ax.yaxis.set_major_formatter(lambda value, _: _tidied(f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.minorticks_off()
    else:
        ax.yaxis.set_major_formatter(PlainTicks())


def log_ticks(low: float, high: float, least: int) -> list[float]:
    """Return round values on a logarithmic axis: at least `least`, or all."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= least:
            break
    return ticks


def size_axis(axis: Axis, low: float, high: float, is_compute: bool = False) -> None:
    """Format a logarithmic axis of parameters or tokens (50k, 2M, 1B), or of FLOP (2M, 1G)."""
    axis.set_major_locator(FixedLocator(log_ticks(low, high, least=3)))
    axis.set_major_formatter(lambda value, _: write_size(value, is_compute))
    axis.set_minor_locator(NullLocator())


def write_size(value: float, is_compute: bool = False) -> str:
    # A billion parameters are 1B, and 10⁹ FLOP are 1G.
    written = EngFormatter(sep="", useOffset=False)(value)
    return written if is_compute else written.replace("G", "B")


def scale_axis(ax: Axes, scale: str, scales: Sequence[float], width: float) -> None:
    """Format a logarithmic axis with a tick at each point of a scale; its panel has `width` inches."""
    ax.set_xscale("log", base=2)
    written = [columns.write_scale(scale, s) for s in scales]
    ax.set_xticks(scales, written, **turned(written, width))
    ax.minorticks_off()
    ax.set_xlabel(title(scale))


def turned(texts: Sequence[str], width: float) -> dict[str, Any]:
    """Return text properties of ticks: upright where they would touch each other."""
    is_crowded = max(map(len, texts), default=0) + 1 > 12 * (width - 1) / max(1, len(texts))
    return {"rotation": 90} if is_crowded else {}


def log2_axis(ax: Axes, zero_x: float | None = None) -> None:
    """Format an axis of log2 as powers of 2, with 0 at its edge where it is drawn."""

    def tick(x: float, _: object) -> str:
        return power(x) if zero_x is None or x > zero_x + 0.5 else ""

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.xaxis.set_major_formatter(tick)
    if zero_x is not None:
        ax.set_xticks([zero_x], ["0"], minor=True)
        ax.tick_params(axis="x", which="minor", length=3.5)


# Least and largest reach of a tooltip around its point, in points of type: a marker alone is hard to hit
_RADIUS = (2.0, 5.0)
_MOST_RUNS = 6  # most runs that a tooltip lists one by one


def describe(artist: Artist, entry: str, texts: Sequence[str] = ()) -> None:
    artist.entry, artist.texts = entry, texts  # type: ignore[attr-defined]


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
    """Return a figure as an `<svg>` element; `prefix` keeps its ids apart from those of other figures."""
    described = [artist for artist in figure.findobj() if hasattr(artist, "entry")]
    entries = {name: i for i, name in enumerate(dict.fromkeys(artist.entry for artist in described))}
    for artist in described:
        artist.set_gid(f"entry-{entries[artist.entry]}")
    with matplotlib.rc_context(STYLE):
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)
        figure.set_layout_engine(None)  # places of points stay those of the file
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :].rstrip().removesuffix("</svg>")
    text = re.sub(r'<g id="entry-(\d+)">', r'<g data-entry="\1">', text)
    # Hundredths of a point are enough; without comments, ids of groups and indents half of the bytes is left.
    text = re.sub(r"(?<!scale\(0)(\.\d\d)\d+", r"\1", text)
    text = re.sub(r"\s+", " ", re.sub(r'<!--.*?-->|(?<=<g) id="[^"]*"', "", text))
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    overlay = [*_tooltips(figure, described, entries), *_buttons(figure, described, entries)]
    return "\n".join([text, *overlay, "</svg>"]) if overlay else f"{text}</svg>"


def _tooltips(figure: Figure, described: Sequence[Any], entries: dict[str, int]) -> Iterator[str]:
    """Return a transparent circle a point that its panel shows."""
    points: list[tuple[float, float, int, str]] = []
    for artist in described:
        if len(artist.texts):
            places = artist.get_transform().transform(np.asarray(artist.get_xydata(), float))
            for place, text in zip(places, artist.texts, strict=True):
                if text and artist.axes.bbox.contains(*place):
                    points.append((*_on_page(figure, *place), entries[artist.entry], text))
    if not points:
        return
    from scipy.spatial import cKDTree  # pages alone need it, and it takes as long as a figure

    places = np.array([point[:2] for point in points])
    nearest = cKDTree(places).query(places, k=2)[0][:, 1]
    # Of close points the pointer finds the nearest, so their circles may not overlap.
    for (left, top, entry, text), radius in zip(points, np.clip(nearest / 2, *_RADIUS), strict=True):
        yield (
            f'<circle class="point" data-entry="{entry}" cx="{left:.1f}" cy="{top:.1f}" r="{radius:.1f}">'
            f"{_title(text)}</circle>"
        )


def _buttons(figure: Figure, described: Sequence[Any], entries: dict[str, int]) -> Iterator[str]:
    """Return a transparent button an entry of a key that hides something."""
    of_label = {name: name for name in entries} | {a.get_label(): a.entry for a in described}
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    # Keys made here: their `labels` are the entries before line breaks.
    legends: list[Any] = [*figure.legends, *(ax.get_legend() for ax in figure.axes)]
    for key in (legend for legend in legends if hasattr(legend, "labels")):
        for label, handle, text in zip(key.labels, key.legend_handles, key.get_texts(), strict=True):
            if label not in of_label:
                continue
            entry = of_label[label]
            plain = entry.replace(r"\$", "$")
            box = matplotlib.transforms.Bbox.union(
                [handle.get_window_extent(renderer), text.get_window_extent(renderer)]
            ).padded(3)
            (left, top), scale = _on_page(figure, box.x0, box.y1), 72 / figure.dpi
            yield (
                f'<rect class="button" data-key="{entries[entry]}" role="button" tabindex="0" '
                f'aria-pressed="true" x="{left:.1f}" y="{top:.1f}" width="{box.width * scale:.1f}" '
                f'height="{box.height * scale:.1f}">{_title(f"hide or show {plain}")}</rect>'
            )


def _on_page(figure: Figure, x: float, y: float) -> tuple[float, float]:
    return x * 72 / figure.dpi, (figure.bbox.height - y) * 72 / figure.dpi


def _title(text: str) -> str:
    return f"<title>{html.escape(visible(text))}</title>"
