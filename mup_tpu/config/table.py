"""Tables for people: one description, printed on a terminal and written into reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class Table:
    """A table; on a terminal of 80 columns cells are folded and never cut."""

    kind: ClassVar[str] = "table"
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: Collection[str] = ()
    """Headings of columns of text, which stand at the left; numbers stand at the right."""
    whole: Collection[str] = ()
    """Headings of columns whose cells stay on one line."""

    def between(self, first: int, last: int | None, title: str) -> Table:
        rows = [row[first:last] for row in self.rows]
        return replace(self, headings=self.headings[first:last], rows=rows, title=title)

    def __rich__(self) -> rich.table.Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as Shown

        made = Shown(
            title=self.title or None, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
            title_justify="left",
        )  # fmt: skip
        for heading in self.headings:
            justify = "left" if heading in self.left else "right"
            made.add_column(heading, justify=justify, overflow="fold", no_wrap=heading in self.whole)  # type: ignore[arg-type]
        for row in self.rows:
            made.add_row(*row)
        return made
