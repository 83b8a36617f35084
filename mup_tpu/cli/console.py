"""The console of commands: what is printed is text, never Rich's markup, whatever names and paths hold."""

from __future__ import annotations

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A console that shows `[/b]`, `:smile:` and numbers as they are."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
