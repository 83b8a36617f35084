"""The console of commands: what is printed is text, never Rich's markup, whatever names and paths hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.status import Status


class _Console(Console):
    """Shows `[/b]`, `:smile:` and numbers as they are."""

    def __init__(self, stderr: bool) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def status(self, *arguments: Any, **options: Any) -> Status:
        """A live line on a terminal. Elsewhere none: on a full disk it would end the work."""
        if not self.is_terminal:
            return Console(quiet=True).status(*arguments, **options)
        return super().status(*arguments, **options)


def console(stderr: bool = False) -> Console:
    """The console that commands print on."""
    return _Console(stderr)
