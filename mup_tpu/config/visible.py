"""Text from outside on a screen or in a log: control characters become escapes."""

from __future__ import annotations

import logging
import re

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of terminals, and halves of characters."""


def visible(text: str) -> str:
    r"""Text with control characters as escapes, such as `\x1b`; tabs and new lines stay."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class VisibleFormatter(logging.Formatter):
    """Log lines with control characters as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return visible(super().format(record))
