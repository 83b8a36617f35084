"""Constants that Llama's declaration and network share; without torch."""

from __future__ import annotations

EPS = 1e-6
"""Addend to the mean square in norms, the default of transformers' Llama and Qwen3."""

ROTARY_BASE = 10_000.0
"""Llama's base of rotary positions (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""


def mlp_width(width: int) -> int:
    """Width between an MLP's layers: 43/16 of the model's, Llama's share at 4096 (7B) and 8192 (65B).

    Llama rounds ⌊8/3·D⌋ up to a multiple of 256. At the widths of a sweep the share would then change with
    width (4 at 64, 3 at 256), and width multipliers with it; here the multiple is D/16.
    """
    return -(-43 * width // 16)
