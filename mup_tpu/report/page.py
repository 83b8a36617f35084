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

# Columns of a page on a desk and on a phone of 390 pixels, inches of 96 CSS pixels.
_WIDE, _NARROW = 1024 / 96, 358 / 96


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
    """A figure in two forms; on a narrow screen its panels are below each other."""

    kind: ClassVar[str] = "picture"
    title: str
    caption: str
    wide: str
    narrow: str
    """SVG elements."""

    @classmethod
    def of(cls, name: str, draw: Callable[[], Figure], number: int = 0) -> Picture:
        """Draw a figure of `plots.FIGURES` for either screen; `number` tells figures of one name apart."""
        forms = []
        for form, inches in (("wide", _WIDE), ("narrow", _NARROW)):
            with plots.beside(inches):
                forms.append(plots.svg(draw(), f"{name}-{number}-{form}"))
        return cls(plots.FIGURES[name].title, plots.FIGURES[name].caption, *forms)


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
    lead: Sequence[Block]
    """Blocks at the top."""
    sections: Sequence[Section]
    foot: str
    """Guide to the page."""


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
