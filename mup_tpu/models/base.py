"""What an architecture declares, so that no other file knows its parameters by name.

Plain values, without torch: drivers count, compare and plan trials in processes that never import it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mup_tpu.config import ModelConfig
from mup_tpu.rules.parameter import Parameter, Slice
from mup_tpu.rules.parametrization import ForwardScaling

if TYPE_CHECKING:
    from torch import nn


def readout(config: ModelConfig, vocab_size: int) -> Parameter:
    """An untied readout, stored (vocabulary, width)."""
    init: Literal["zeros", "normal"] = "zeros" if config.readout_zero_init else "normal"
    return Parameter((vocab_size, config.width), "readout", config.width, vocab_size, init=init)


@dataclass(frozen=True)
class ActivationMemory:
    """Numbers kept for the backward pass, as measured; a vector is one of the model's width."""

    vectors: Mapping[str, float]
    """Vectors a token and layer by execution: "loop" or "vmap"."""
    scores: Mapping[str, float]
    """For each pair of tokens and head, a layer, by execution."""
    logits: float
    """For each token and vocabulary entry."""
    xla_vectors: Mapping[str, float]
    """As `vectors` where XLA compiles the step, by the form of attention."""
    xla_scores: Mapping[str, float]
    """As `scores` where XLA compiles the step, by the form of attention."""
    xla_logits: float
    """As `logits` where XLA compiles the step."""
    xla_bf16: float
    """Share that is left of what a layer keeps where XLA multiplies in bf16."""


@dataclass(frozen=True)
class Declaration:
    """An architecture at one size."""

    parameters: Mapping[str, Parameter]
    """By name; a tied readout is there once, as the token embedding."""
    width: int
    """Of the residual stream."""
    layers: int
    heads: int
    head_size: int
    probes: Mapping[str, str]
    """Label -> submodule whose output the coordinate check measures, from the input on; without logits. In
    blocks, and of blocks, labels end in the block's number."""
    blocks: tuple[str, ...]
    """Submodule of each block, from the input on; the residual stream is its first argument and output."""
    activations: ActivationMemory

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by name."""
        return {name: p.shape for name, p in self.parameters.items()}

    @property
    def structure(self) -> tuple[Any, ...]:
        """What members of a pack must share to be one program."""
        return (*self.shapes.items(), self.heads)

    @property
    def total(self) -> int:
        """Parameters."""
        return sum(p.size for p in self.parameters.values())

    @property
    def non_embedding(self) -> int:
        """Parameters that are neither embeddings nor readout (Kaplan et al. 2020, N)."""
        return sum(p.size for p in self.parameters.values() if not (p.is_embedding or p.role == "readout"))

    def flops_per_token(self, vocab_size: int, sequence_length: int) -> float:
        """Arithmetic of training on one token, forward and backward: 6·N + 12·L·D·T FLOP.

        Chowdhery et al. 2022 (PaLM), appendix B. N counts the matrices that tokens are multiplied with: the
        readout (tied or not), but not the embedding tables, which are looked up. As there, attention is
        counted without the half that causality would save, and nothing that is computed twice.
        """
        matrices = sum(p.size for p in self.parameters.values() if p.role == "hidden")
        attention = self.layers * self.heads * self.head_size * sequence_length
        return float(6 * (matrices + vocab_size * self.width) + 12 * attention)


@dataclass(frozen=True)
class Fold:
    """A factor of the forward pass as a factor of a parameter, in a stock checkpoint."""

    parameter: str
    factor: float
    slice: Slice | None = None
    """The part of it along the last axis; None is the whole."""


@dataclass(frozen=True)
class Forms:
    """How a network is computed: the same function in forms that are fast on one device or another."""

    attention: str = "fused"
    """A form of `mup_tpu.models.attention`: "fused", "matmul" under vmap, "blocks" for CPUs."""
    one_pass_norms: bool = False
    """Norms as few elementary operations, for XLA."""
    in_blocks: bool = False
    """Activations and RMS norms a cache-sized block at a time, for CPUs; not for bf16, which would be too
    coarse for GELU's x³, nor under vmap or torch.compile."""
    vmapped: bool = False
    """Whether members go through it at once: then layers keep as little as they can for backward. Not under
    torch.compile, which takes no autograd function there and keeps little by itself."""
    scaled_branches: bool = False
    """Whether residual branches have a factor; without, it must be 1, and costs nothing."""
    scanned: bool = False
    """Whether blocks are one loop of the compiler's, for XLA under vmap."""


class Architecture(ABC):
    """One architecture: all that the rest of the package asks of it."""

    name: str
    """What `ModelConfig.architecture` and its users call it."""

    @abstractmethod
    def declare(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Declaration:
        """Its parameters and what follows from its size."""

    @abstractmethod
    def factors(self, config: ModelConfig, scaling: ForwardScaling) -> dict[str, float]:
        """Value of each buffer of its network: the rule's factors times the configuration's alphas."""

    @abstractmethod
    def network(
        self, config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms = Forms()
    ) -> nn.Module:
        """Its module without weights (meta device), tokens_BT to logits_BTV; parameters as declared."""

    @abstractmethod
    def folds(self, config: ModelConfig, scaling: ForwardScaling) -> list[Fold]:
        """What turns trained parameters into those of the stock class, which has no factors."""

    @abstractmethod
    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        """A model of the stock class of transformers, of the same shape."""
