"""Declaration of an architecture: no other file knows its parameters by name.

Plain values, without torch: drivers count, compare and plan trials without importing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mup_tpu.rules.parameter import Parameter, Slice


@dataclass(frozen=True)
class ActivationMemory:
    """Numbers kept for the backward pass, as measured; a vector has the model's width."""

    vectors: Mapping[str, float]
    """Vectors a token and layer by execution: "loop" or "vmap"."""
    scores: Mapping[str, float]
    """Numbers a pair of tokens, head and layer, by execution."""
    logits: float
    """Numbers a token and vocabulary entry."""
    cuda_vectors: Mapping[str, float]
    """`vectors` of a step on CUDA in float32 numbers, by precision: "bf16" or "float32"."""
    cuda_evaluation: float
    """Vectors a token that an evaluation in bf16 takes beside the memory of training steps."""
    xla_vectors: Mapping[str, float]
    """`vectors` of a step that XLA compiles, by the form of attention."""
    xla_scores: Mapping[str, float]
    """`scores` of a step that XLA compiles, by the form of attention."""
    xla_logits: float
    """`logits` of a step that XLA compiles."""
    xla_bf16: float
    """Factor on a layer's numbers if XLA multiplies in bf16."""


@dataclass(frozen=True)
class Declaration:
    """An architecture at one size."""

    parameters: Mapping[str, Parameter]
    """Parameters by name; a tied readout is the token embedding."""
    width: int
    """Width of the residual stream."""
    layers: int
    heads: int
    head_size: int
    probes: Mapping[str, str]
    """Label -> submodule whose output the coordinate check measures, from input to output, without logits. A
    block's labels end in its number."""
    blocks: tuple[str, ...]
    """Submodules of the blocks, in order; a block's first argument and its output are the residual stream."""
    activations: ActivationMemory

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by name."""
        return {name: p.shape for name, p in self.parameters.items()}

    @property
    def structure(self) -> tuple[Any, ...]:
        """Shapes and heads, equal for all members of a pack."""
        return (*self.shapes.items(), self.heads)

    @property
    def total(self) -> int:
        """Number of parameters."""
        return sum(p.size for p in self.parameters.values())

    @property
    def non_embedding(self) -> int:
        """Number of parameters other than embeddings and readout (Kaplan et al. 2020, N)."""
        return sum(p.size for p in self._non_embedding)

    @property
    def active(self) -> int:
        """`non_embedding` that a token uses: of a stack of experts, those that it is sent to."""
        return round(sum(p.size * p.active for p in self._non_embedding))

    @property
    def _non_embedding(self) -> list[Parameter]:
        return [p for p in self.parameters.values() if not (p.is_embedding or p.role == "readout")]

    def flops_per_token(self, vocab_size: int, sequence_length: int) -> float:
        """Arithmetic of training on one token, forward and backward: 6·N + 12·L·D·T FLOP.

        Chowdhery et al. 2022 (PaLM), appendix B. N counts the matrices that a token is multiplied with: the
        readout (tied or not), not the embedding tables, and of a stack of experts those that the token is
        sent to. As there, attention counts both causal halves, and recomputation counts nothing.
        """
        matrices = sum(p.size * p.active for p in self.parameters.values() if p.role in ("hidden", "router"))
        attention = self.layers * self.heads * self.head_size * sequence_length
        return float(6 * (matrices + vocab_size * self.width) + 12 * attention)


@dataclass(frozen=True)
class Fold:
    """A factor of the forward pass as a factor of a parameter of the stock checkpoint."""

    parameter: str
    factor: float
    slice: Slice | None = None
    """Part of the parameter along its last axis; None is the whole."""


@dataclass(frozen=True)
class Forms:
    """Forms of a network: the same function, each fast on some device."""

    attention: str = "fused"
    """A form of `mup_tpu.models.attention`: "fused", "matmul" under vmap, "blocks" for CPUs."""
    one_pass_norms: bool = False
    """Norms as few elementary operations, for XLA."""
    in_blocks: bool = False
    """Activations and RMS norms a cache-sized block at a time, for CPUs; not under vmap or torch.compile."""
    vmapped: bool = False
    """Layers for members under vmap, which keep as little as possible for backward. Not under torch.compile:
    it takes no autograd function under vmap, and keeps little by itself."""
    scaled_branches: bool = False
    """Whether residual branches have a factor; a factor of 1 needs none."""
    scan: Callable[..., Any] | None = None
    """Loop of the device's compiler (`Device.scan`) that has all blocks as one, under vmap; None calls one
    block after another."""
