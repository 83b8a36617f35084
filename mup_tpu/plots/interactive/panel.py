"""A panel for a browser: points have tooltips, and the key hides curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import (
    BooleanFilter,
    CDSView,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    InlineStyleSheet,
    PlainText,
    Range1d,
    TapTool,
)
from bokeh.models.annotations import Span
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from matplotlib.colors import to_hex

from mup_tpu.plots import style

HEIGHT = 330
"""Height of a panel, pixels; its width is the page's."""
_REACH = 14
"""Diameter in which the pointer finds a point, pixels."""
_AT_ONCE = 4
"""Most points in one tooltip."""
_DASHES = {"-": "", "--": "6 4", ":": "2 3"}
_SHAPES = {
    "circle": '<circle cx="14" cy="7" r="3.5"/>',
    "square": '<path d="M10.5 3.5h7v7h-7z"/>',
    "triangle": '<path d="M14 3l4 7h-8z"/>',
    "inverted_triangle": '<path d="M14 11l4-7h-8z"/>',
    "diamond": '<path d="M14 2.5l4.5 4.5-4.5 4.5-4.5-4.5z"/>',
    "star": '<path d="M14 0l2 5 5 .3-4 3.4 1.3 5.1L14 11l-4.3 2.8L11 8.7 7 5.3 12 5z"/>',
    "x": '<path d="M10.5 3.5l7 7m0-7l-7 7" fill="none"/>',
    "": "",
}
"""Marker -> its drawing in a key, 28 by 14 pixels."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MARKERS = ("circle", "square", "diamond", "triangle", "inverted_triangle")
"""Markers of unordered curves."""


class Mark(NamedTuple):
    """Form of points."""

    shape: str = ""
    """Bokeh's name of it; "" for none."""
    size: float = 6
    hollow: bool = False


_NO_MARK = Mark()


@dataclass
class Entry:
    """One entry of a key; a click on it hides its marks."""

    name: str
    color: str
    mark: Mark
    dash: str | None
    """"-", "--" or ":" where it has a line."""
    renderers: list[GlyphRenderer[Any]] = field(default_factory=list)
    """Marks of the entry in all panels; none for a mark that cannot be hidden."""

    @property
    def swatch(self) -> str:
        """Drawing, as SVG."""
        line = ""
        if self.dash is not None:
            line = f'<path d="M1 7h26" stroke-dasharray="{_DASHES[self.dash]}" fill="none"/>'
        fill = "none" if self.mark.hollow else self.color
        return (
            f'<svg width="28" height="14" aria-hidden="true" fill="{fill}" stroke="{self.color}" '
            f'stroke-width="1.6">{line}{_SHAPES[self.mark.shape]}</svg>'
        )


@dataclass
class Panels:
    """Panels beside each other under one key; on a narrow screen they stack."""

    titles: list[str] = field(default_factory=list)
    figures: list[figure] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    across: int = style.ACROSS
    """Largest number of panels beside each other."""
    targets: list[GlyphRenderer[Any]] = field(default_factory=list)
    """Points of each panel that the pointer finds; column `curve` of their source names their entry."""

    def entry(self, name: str, color: Any, mark: Mark = _NO_MARK, dash: str | None = None) -> Entry:
        """Entry of the key by its name, made if new."""
        return self.entries.setdefault(name, Entry(name, to_hex(color), mark, dash))


class Panel:
    """A panel that is being drawn."""

    def __init__(
        self,
        panels: Panels,
        title: str,
        x_label: str,
        y_label: str,
        y_range: tuple[float, float],
        log_y: bool = False,
        x_range: tuple[float, float] | None = None,
    ) -> None:
        self.panels = panels
        self._found: dict[str, list[Any]] = {"x": [], "y": [], "curve": [], "about": []}
        self.figure = figure(
            height=HEIGHT, sizing_mode="stretch_width", tools="box_zoom,reset", active_drag=None,
            toolbar_location="above", toolbar_inner=True, y_axis_type="log" if log_y else "linear",
            y_range=Range1d(start=y_range[0], end=y_range[1]), min_border_right=14,
        )  # fmt: skip
        if x_range is not None:
            self.figure.x_range = Range1d(start=x_range[0], end=x_range[1])
        # Plain text, since Bokeh would ask a server for a formula between two $$.
        self.figure.xaxis.axis_label = PlainText(text=x_label)
        self.figure.yaxis.axis_label = PlainText(text=y_label)
        _look(self.figure)
        panels.titles.append(title)
        panels.figures.append(self.figure)

    def line(self, entry: Entry, x: Any, y: Any, width: float = 1.6) -> None:
        """Draw a line that an entry of the key hides."""
        drawn = self.figure.line(
            np.asarray(x, float), np.asarray(y, float), color=entry.color, line_width=width,
            line_dash=[int(n) for n in _DASHES[entry.dash or "-"].split()],
        )  # fmt: skip
        entry.renderers.append(drawn)

    def band(self, entry: Entry, x: Any, low: Any, high: Any) -> None:
        """Draw a shade between two lines that an entry of the key hides."""
        drawn = self.figure.varea(
            *(np.asarray(v, float) for v in (x, low, high)), color=entry.color, alpha=0.16
        )
        entry.renderers.append(drawn)

    def marks(self, entry: Entry, x: Any, y: Any, mark: Mark | None = None) -> None:
        """Draw points that an entry of the key hides, by default with the entry's mark."""
        source = ColumnDataSource({"x": np.asarray(x, float), "y": np.asarray(y, float)})
        self.marks_of(source, entry, "x", CDSView(), mark or entry.mark)

    def marks_of(self, source: ColumnDataSource, entry: Entry, x: str, view: CDSView, mark: Mark) -> None:
        """Draw the points in a view of a source, at its columns x and "y"."""
        drawn = self.figure.scatter(
            x, "y", source=source, view=view, marker=mark.shape, size=mark.size,
            # A white edge sets a star off from curves.
            line_color="white" if mark.shape == "star" and not mark.hollow else entry.color,
            line_width=1.5 if mark.hollow or mark.shape == "x" else 0.5,
            fill_color=None if mark.hollow else entry.color,
            nonselection_alpha=0.25,
        )  # fmt: skip
        entry.renderers.append(drawn)

    def tell(self, entry: Entry, x: Iterable[float], y: Iterable[float], about: Iterable[str]) -> None:
        """Add tooltips (HTML) of points of a curve."""
        for column, values in (("x", x), ("y", y), ("about", about)):
            self._found[column] += list(values)
        self._found["curve"] += [entry.name] * (len(self._found["x"]) - len(self._found["curve"]))

    def upright(self, x: float, dash: str = "dotted") -> None:
        """Draw a line from top to bottom."""
        self.figure.add_layout(
            Span(location=float(x), dimension="height", line_dash=dash, line_color=style.INK, line_width=1.2)
        )

    def level(self, y: float) -> None:
        """Draw a thin line from side to side."""
        self.figure.add_layout(
            Span(location=float(y), dimension="width", line_color=style.INK, line_width=0.5, line_alpha=0.5)
        )

    def done(self, source: ColumnDataSource | None = None, x: str = "x") -> None:
        """Add one renderer of all points with tooltips, so that one tooltip has all points under the pointer.

        A click chooses them, and the page keeps their texts. `source` has columns `x`, y, curve (the name of
        an entry) and about (HTML); by default all points that were added.
        """
        source = source or ColumnDataSource({name: np.asarray(v) for name, v in self._found.items()})
        shown = BooleanFilter(booleans=[True] * len(source.data["curve"]))
        targets = self.figure.scatter(
            x, "y", source=source, view=CDSView(filter=shown), size=_REACH, alpha=0, nonselection_alpha=0
        )
        self.figure.add_tools(
            HoverTool(
                renderers=[targets],
                tooltips='<div class="about">@about{safe}</div>',
                limit=_AT_ONCE,
                point_policy="snap_to_data",
                visible=False,
            )  # fmt: skip
        )
        self.figure.add_tools(TapTool(renderers=[targets], visible=False))
        self.panels.targets.append(targets)


def power_ticks(
    axis: Any, low: float, high: float, others: Mapping[float, str] = MappingProxyType({})
) -> None:
    """Write whole numbers from low to high on an axis of log2 as powers of 2, and names at other places."""
    ticks = list(range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1))
    if not ticks:  # less than an octave is shown, between two powers
        ticks = [math.floor(low), math.ceil(high)]
    ticks = ticks[:: -(-len(ticks) // 8)]
    names = {float(t): "2" + str(t).translate(_RAISED) for t in ticks}
    named_ticks(axis, {**others, **names})


def named_ticks(axis: Any, names: Mapping[float, str]) -> None:
    """Set the ticks of an axis, by place and name."""
    axis.ticker = FixedTicker(ticks=list(names))
    axis.major_label_overrides = dict(names)


def _look(panel: figure) -> None:
    """Set fonts, lines and room as in figures on paper."""
    panel.toolbar.logo = None
    panel.toolbar.autohide = True
    panel.toolbar.stylesheets.append(InlineStyleSheet(css=":host { background: none !important; }"))
    panel.outline_line_color = None
    panel.background_fill_color = panel.border_fill_color = None
    panel.grid.grid_line_alpha = 0.5
    panel.stylesheets.append(InlineStyleSheet(css=":host { font-family: inherit; }"))
    for axis in panel.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = "#222222"
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui, sans-serif"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
        axis.minor_tick_line_color = None


def room_for(values: Iterable[float], is_log: bool = False) -> tuple[float, float]:
    """Range of an axis around all finite values, with some room."""
    known = np.array([v for v in values if np.isfinite(v)] or [1.0])
    if is_log:
        low, high = room_for(np.log2(known))
        return 2.0**low, 2.0**high
    least = 1e-3 * abs(known).max() or 1e-3
    room = max(0.06 * (known.max() - known.min()), least)
    return float(known.min() - room), float(known.max() + room)
