"""Whether torch's compiler pays for a pack on a GPU: it takes half a minute, and saves half of each step.

The rule looks at no clock, so that a pack trains alike each time. Seconds of a step without the compiler are
those of one H100 in bf16 (`benchmarks/gpu_peers.csv`). Other GPUs and precisions are a guess.
"""

from __future__ import annotations

from mup_tpu.models import Declaration

_COMPILATION_S = 40.0
"""Seconds of a compilation: 28 to 42 on 16 cores (measured)."""
_SAVED = 0.5
"""Share of a step that it saves: 0.68 at width 64 (measured)."""

_LAYER_S = 0.65e-3
"""Seconds of a layer's launches."""
_NUMBER_S = 0.29e-9
"""Seconds of a token, for each layer and unit of its width."""
_LOGIT_S = 0.05e-9
"""Seconds of a token, for each entry of the vocabulary."""


def plain_step_s(declaration: Declaration, vocab_size: int, tokens: int) -> float:
    """Seconds of a step that is not compiled, on this number of tokens of all members."""
    a_token = _NUMBER_S * declaration.width * declaration.layers + _LOGIT_S * vocab_size
    return _LAYER_S * declaration.layers + a_token * tokens


def pays(declaration: Declaration, vocab_size: int, tokens: int, steps: int) -> bool:
    """Whether that number of steps saves more time than their compilation takes."""
    return _SAVED * steps * plain_step_s(declaration, vocab_size, tokens) > _COMPILATION_S
