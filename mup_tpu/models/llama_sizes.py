"""Llama's constants, which its declaration and its network share; without torch."""

from __future__ import annotations

EPS = 1e-6
"""Added to the mean square in norms, the default of transformers' Llama and Qwen3."""

ROTARY_BASE = 10_000.0
"""Of rotary positions (Su et al. 2021, arXiv:2104.09864, section 3.2.2), Llama's."""


def mlp_width(width: int) -> int:
    """Width between an MLP's layers: 43/16 of the model's, which is 8/3 rounded up to what Llama's have.

    Llama rounds ⌊8/3·D⌋ up to a multiple of 256, which at 4096 (7B) and 8192 (65B) comes to 43/16. At the
    widths of a sweep that multiple would make the share differ from width to width (4 at 64, 3 at 256), and
    width multipliers with it; so it is D/16 here, as it is at 4096.
    """
    return -(-43 * width // 16)
