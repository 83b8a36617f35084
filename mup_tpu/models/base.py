"""Declaration of an architecture, a decoder-only transformer: no other file knows its parameters by name.

Plain values, without torch: drivers count, compare and plan trials without importing it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mup_tpu.config import ModelConfig
from mup_tpu.rules.parametrization import ForwardScaling, Parameter

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Declaration:
    """An architecture at one size."""

    parameters: Mapping[str, Parameter]  # Parameters by name; a tied readout is the token embedding
    width: int  # Width of the residual stream
    layers: int
    heads: int
    head_size: int
    blocks: tuple[str, ...]  # Submodules; a block's first argument and output are the residual stream

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: p.shape for name, p in self.parameters.items()}

    @property
    def structure(self) -> tuple[Any, ...]:
        return (*self.shapes.items(), self.heads)

    @property
    def total(self) -> int:
        return sum(p.size for p in self.parameters.values())

    @property
    def non_embedding(self) -> int:
        """Count parameters other than embeddings and readout (Kaplan et al. 2020, N)."""
        return sum(p.size for p in self._non_embedding)

    @property
    def active(self) -> int:
        """Count non-embedding parameters that a token uses, with only the experts to which it is sent."""
        return round(sum(p.size * p.active for p in self._non_embedding))

    @property
    def _non_embedding(self) -> list[Parameter]:
        return [p for p in self.parameters.values() if not (p.is_embedding or p.role == "readout")]

    def flops_per_token(self, vocab_size: int, sequence_length: int) -> float:
        """Return the arithmetic of training on one token, forward and backward: 6·N + 12·L·D·T FLOP.

        Chowdhery et al. 2022 (PaLM), appendix B. N counts the matrices that a token is multiplied with: the
        readout (tied or not), not the embedding tables, and of a stack of experts those that the token is
        sent to. As there, attention counts both causal halves, and recomputation counts nothing.
        """
        matrices = sum(p.size * p.active for p in self.parameters.values() if p.role in ("hidden", "router"))
        attention = self.layers * self.heads * self.head_size * sequence_length
        return float(6 * (matrices + vocab_size * self.width) + 12 * attention)


@dataclass(frozen=True)
class Forms:
    """Forms of a network: the same function, each fast on some device."""

    attention: str = "fused"  # A form of `mup_tpu.models.attention`: "fused", or "matmul" under vmap
    one_pass_norms: bool = False  # Norms as few elementary operations, for XLA
    gathered: bool = False  # Each expert computes only the tokens sent to it; not under vmap
    vmapped: bool = False  # Layers under vmap; they save as little as possible for the backward pass


class Architecture(ABC):
    """Decoder-only transformer whose blocks are attention and MLP, each behind a norm.

    Names are those of transformers.
    """

    name: str  # Value of `ModelConfig.architecture`
    embedding_scale: str  # Module that multiplies the embeddings by their factor
    blocks: str  # Module that holds the blocks, by their numbers
    final_norm: str
    counted: Set[str] = frozenset({"width", "depth", "head_size", "growing_dimension", "tied"})
    """Fields of `ModelConfig` that the network is built with, and whose arithmetic
    `Declaration.flops_per_token` counts. All members of a pack agree in them."""
    per_member: Set[str] = frozenset(
        {
            "parametrization", "base_width", "base_depth", "init_std", "alpha_in", "alpha_out", "alpha_attn",
            "readout_zero_init", "head_size", "growing_dimension",
        }
    )  # fmt: skip
    """Fields in which members of a pack may differ: they change initial weights or buffers, never the
    network. (The network takes from `head_size` and `growing_dimension` the number of heads alone, in which
    members agree.)"""

    @abstractmethod
    def embeddings(self, width: int, vocab_size: int, sequence_length: int) -> dict[str, Parameter]: ...

    @abstractmethod
    def block(self, config: ModelConfig) -> dict[str, Parameter]: ...

    @abstractmethod
    def norm(self, width: int, in_block: bool = True) -> dict[str, Parameter]: ...

    @abstractmethod
    def query(self, config: ModelConfig) -> str:
        """Name the module of a block whose parameters scale the queries."""

    @abstractmethod
    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any: ...

    def network(
        self, config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms = Forms()
    ) -> nn.Module:
        """Build the module without weights (meta device), tokens_BT to logits_BTV; parameters as declared.

        `networks.py`, which needs torch, has it under the architecture's name. The module's second argument,
        a list, takes terms that training adds to the loss.
        """
        build = getattr(importlib.import_module("mup_tpu.models.networks"), self.name)
        network: nn.Module = build(config, vocab_size, sequence_length, forms)
        return network

    def declare(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Declaration:
        """Declare the parameters, and what follows from the size."""
        width = config.width
        blocks = tuple(f"{self.blocks}.{i}" for i in range(config.depth))
        parameters = self.embeddings(width, vocab_size, sequence_length)
        of_block = self.block(config)
        for block in blocks:
            parameters |= _inside(block, of_block)
        parameters |= _inside(self.final_norm, self.norm(width, in_block=False))
        if not config.tied:
            init: Literal["zeros", "normal"] = "zeros" if config.readout_zero_init else "normal"
            readout = Parameter((vocab_size, width), "readout", width, vocab_size, init=init)
            parameters["lm_head.weight"] = readout
        heads = config.heads, config.actual_head_size
        return Declaration(parameters, width, config.depth, *heads, blocks)

    def factors(self, config: ModelConfig, scaling: ForwardScaling) -> dict[str, float]:
        """Return the value of each buffer: the rule's factors times the configuration's alphas."""
        return {
            f"{self.embedding_scale}.factor": config.alpha_in,
            "attention_factor": config.alpha_attn * scaling.attention,
            "residual_factor": scaling.residual,
            "logit_factor": config.alpha_out * scaling.logits,
        }

    def folds(self, config: ModelConfig, scaling: ForwardScaling) -> Iterator[tuple[str, float, slice]]:
        """Yield factors on trained parameters for the stock class, which has no factors.

        Each comes with the name of its parameter, and the part along the last axis that it multiplies.
        The embeddings' folds into the embedding tables; attention's into the queries; the residual branches'
        into their last layers; the logits' into the final norm, divided by the embeddings' if the readout is
        tied.
        """
        embeddings, attention, residual, logits, *_ = self.factors(config, scaling).values()
        for name, parameter in self.declare(config, 1, 1).parameters.items():
            if parameter.is_embedding:
                yield name, embeddings, slice(None)
            if name.startswith(f"{self.final_norm}."):
                yield name, logits / (embeddings if config.tied else 1.0), slice(None)
            if f".{self.query(config)}." in name:
                query = parameter.slices.get("query")
                yield name, attention, slice(query.start, query.stop) if query else slice(None)
            if parameter.ends_branch:
                yield name, residual, slice(None)


def _inside(module: str, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {f"{module}.{name}": parameter for name, parameter in parameters.items()}
