"""A page of a report: its parts, and their rendering as one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import ClassVar

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from mup_tpu import plots
from mup_tpu.config.columns import Table
from mup_tpu.config.values import visible
from mup_tpu.words.names import powers_in_html


@dataclass(frozen=True)
class Box:
    """Main message, set apart."""

    kind: ClassVar[str] = "box"
    sentence: str
    details: Sequence[str] = ()
    commands: Sequence[str] = ()  # command lines at the ends of details, shown as they are
    decision: str = ""  # verdict that gives the box its colour; "" for none


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
    """A figure."""

    kind: ClassVar[str] = "picture"
    title: str
    caption: str
    svg: str  # SVG element

    @classmethod
    def of(cls, name: str, draw: Callable[[], Figure], number: int = 0) -> Picture:
        """Draw a figure of `plots.FIGURES`; `number` tells figures of one name apart."""
        kind = plots.FIGURES[name]
        return cls(kind.title, kind.caption, plots.svg(draw(), f"{name}-{number}"))


Block = Box | Text | Table | Values | Picture


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    lead: Sequence[Block]  # blocks at the top
    sections: Sequence[Section]
    foot: str  # guide to the page


def render(page: Page) -> str:
    """Return a page as HTML with everything in it: no link, no file beside it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mup_tpu.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["anchor"] = lambda title: re.sub(r"\W+", "-", title.lower()).strip("-")
    environment.filters["powers"] = lambda text: Markup(powers_in_html(text))
    return visible(environment.get_template("page.html.j2").render(page=page, version=version("mup_tpu")))
