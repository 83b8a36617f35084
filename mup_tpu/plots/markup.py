"""Texts of this package as HTML."""

from __future__ import annotations

import html
import math
import re


def powers(text: str) -> str:
    """HTML of a text: markup is escaped, exponents are raised, hyphens before numbers become minus signs.

    Examples:
        >>> powers("lr* ∝ width^-0.03 (-0.16 to 0.09) <b>")
        'lr* ∝ width<sup>−0.03</sup> (−0.16 to 0.09) &lt;b&gt;'
    """
    written = re.sub(r"(?<![\w-])-(?=\d)", "−", html.escape(text))
    return re.sub(r"\^(−?\d+(?:\.\d+)?|α)", r"<sup>\1</sup>", written)


def power(x: float, digits: str = ".4g") -> str:
    """2 to some power; "0" and "∞" at the ends."""
    return f"2^{x:{digits}}" if math.isfinite(x) else "0" if x < 0 else "∞"
