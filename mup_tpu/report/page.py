"""A page of a report: its parts, and their rendering as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from mup_tpu import plots
from mup_tpu.analysis.ingest.trackers import package
from mup_tpu.config.table import Table
from mup_tpu.config.visible import visible
from mup_tpu.words.names import powers_in_html

if TYPE_CHECKING:
    from mup_tpu.plots.interactive import Panels


_COLUMN = 1024
"""Width of a page's column on a desk, CSS pixels."""
_NARROW = 358
"""Width of a page's column on a phone of 390 CSS pixels."""
_PER_INCH = 94
"""CSS pixels of an inch of a figure: its type of 10 points then has the 13 pixels of interactive panels."""


@dataclass(frozen=True)
class Box:
    """Main message, set apart."""

    kind: ClassVar[str] = "box"
    sentence: str
    details: Sequence[str] = ()
    commands: Sequence[str] = ()
    """Command lines at the ends of details, shown as they are."""
    decision: str = ""
    """Verdict that gives the box its colour; "" for none."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str
    is_note: bool = False


@dataclass(frozen=True)
class Values:
    """Names and values."""

    kind: ClassVar[str] = "values"
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Picture:
    """A static figure; on a narrow screen its panels are below each other."""

    kind: ClassVar[str] = "picture"
    title: str
    wide: str
    """PNG, base64."""
    narrow: str
    """PNG for narrow screens, base64."""
    width: int
    """Width of the wide form on the screen, CSS pixels, so that all figures have one size of type."""

    @classmethod
    def of(cls, title: str, draw: Callable[[], Figure]) -> Picture:
        """Draw a figure for either screen."""
        drawn = []
        for column in (_COLUMN, _NARROW):
            with plots.beside(column / _PER_INCH):
                drawn.append(draw())
        wide, narrow = (base64.b64encode(plots.png(figure, 130)).decode() for figure in drawn)
        return cls(title, wide, narrow, round(_PER_INCH * drawn[0].get_figwidth()))


@dataclass(frozen=True)
class Interactive:
    """Interactive panels."""

    kind: ClassVar[str] = "interactive"
    title: str
    panels: Panels


Block = Box | Text | Table | Values | Picture | Interactive


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    lead: Sequence[Block]
    """Blocks at the top."""
    sections: Sequence[Section]
    foot: str
    """Guide to the page."""


def render(page: Page) -> str:
    """HTML of a page, with everything in it: no link, no file beside it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mup_tpu.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["anchor"] = lambda title: re.sub(r"\W+", "-", title.lower()).strip("-")
    environment.filters["powers"] = lambda text: Markup(powers_in_html(text))
    blocks = [*page.lead, *(block for section in page.sections for block in section.blocks)]
    shown = [block.panels for block in blocks if isinstance(block, Interactive)]
    library, script, places = _embedded(shown) if shown else ("", "", {})
    written = environment.get_template("page.html.j2").render(
        page=page,
        library=Markup(library),
        script=Markup(script),
        place=lambda figure: Markup(places[figure.id]),
        version=version("mup_tpu"),
    )
    return visible(written)


def interactive() -> Any:
    """The module `mup_tpu.plots.interactive`.

    Raises:
        TableError: Bokeh is not installed.
    """
    return package("this report", "bokeh", "mup_tpu.plots.interactive", extra="report")


def _embedded(shown: Sequence[Panels]) -> tuple[str, str, dict[str, str]]:
    """Bokeh's library (only the used parts), the script that draws all panels, and elements by figure id."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    figures = [figure for panels in shown for figure in panels.figures]
    script, elements = components(figures, wrap_plot_info=True)
    library = Resources(mode="inline", components=["bokeh"], log_level="warn").render_js()
    return library, script, {f.id: element for f, element in zip(figures, elements, strict=True)}
