"""Declaration of a decoder-only transformer: embeddings, blocks on a residual stream, norm, readout."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, Literal

from mup_tpu.config import ModelConfig
from mup_tpu.models.base import ActivationMemory, Declaration, Fold, Forms, Parameter
from mup_tpu.rules.parametrization import ForwardScaling

if TYPE_CHECKING:
    from torch import nn

READOUT = "lm_head.weight"


class Architecture(ABC):
    """Decoder-only transformer whose blocks are attention and MLP, each behind a norm.

    Names are those of transformers.
    """

    name: str
    """Value of `ModelConfig.architecture`."""
    embedding_scale: str
    """Module that multiplies the embeddings by their factor."""
    blocks: str
    """Module that holds the blocks, by their numbers."""
    final_norm: str
    branches: Mapping[str, str]
    """Branch of a block ("attention", "mlp") -> module of its last layer."""
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
    def embeddings(self, width: int, vocab_size: int, sequence_length: int) -> dict[str, Parameter]:
        """Embedding tables, by name."""

    @abstractmethod
    def block(self, config: ModelConfig, index: int) -> dict[str, Parameter]:
        """Parameters of a block, by their names in it."""

    @abstractmethod
    def norm(self, width: int, in_block: bool = True) -> dict[str, Parameter]:
        """Parameters of a norm, by their names in it."""

    @abstractmethod
    def query(self, config: ModelConfig) -> str:
        """Module of a block whose parameters scale the queries."""

    @abstractmethod
    def activations(self, config: ModelConfig) -> ActivationMemory:
        """Numbers that a layer keeps, as measured."""

    @abstractmethod
    def stock(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
        """A model of the stock class of transformers, of the same shape."""

    def network(
        self, config: ModelConfig, vocab_size: int, sequence_length: int, forms: Forms = Forms()
    ) -> nn.Module:
        """Module without weights (meta device), tokens_BT to logits_BTV; parameters as declared.

        It is built by the file beside the architecture's, NAME_network.py. Its second argument, a list, takes
        terms that training adds to the loss.
        """
        beside = importlib.import_module(f"{type(self).__module__}_network")
        network: nn.Module = beside.build(config, vocab_size, sequence_length, forms)
        return network

    def declare(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> Declaration:
        """Parameters, and what follows from the size."""
        width = config.width
        blocks = tuple(f"{self.blocks}.{i}" for i in range(config.depth))
        parameters = self.embeddings(width, vocab_size, sequence_length)
        probes = {"embedding": self.embedding_scale}
        for i, block in enumerate(blocks):
            parameters |= _inside(block, self.block(config, i))
            probes |= {f"{branch} {i}": f"{block}.{layer}" for branch, layer in self.branches.items()}
            probes[f"residual {i}"] = block
        parameters |= _inside(self.final_norm, self.norm(width, in_block=False))
        if not config.tied:
            init: Literal["zeros", "normal"] = "zeros" if config.readout_zero_init else "normal"
            parameters[READOUT] = Parameter((vocab_size, width), "readout", width, vocab_size, init=init)
        return Declaration(
            parameters=parameters,
            width=width,
            layers=config.depth,
            heads=config.heads,
            head_size=config.actual_head_size,
            probes=probes | {"final norm": self.final_norm},
            blocks=blocks,
            activations=self.activations(config),
        )

    def factors(self, config: ModelConfig, scaling: ForwardScaling) -> dict[str, float]:
        """Value of each buffer of the network: the rule's factors times the configuration's alphas."""
        return {
            f"{self.embedding_scale}.factor": config.alpha_in,
            "attention_factor": config.alpha_attn * scaling.attention,
            "residual_factor": scaling.residual,
            "logit_factor": config.alpha_out * scaling.logits,
        }

    def folds(self, config: ModelConfig, scaling: ForwardScaling) -> list[Fold]:
        """Factors on trained parameters for the stock class, which has no factors of its own.

        The embeddings' folds into the embedding tables; attention's into the queries; the residual branches'
        into their last layers; the logits' into the final norm, divided by the embeddings' if the readout is
        tied.
        """
        embeddings, attention, residual, logits, *_ = self.factors(config, scaling).values()
        folds = []
        for name, parameter in self.declare(config, 1, 1).parameters.items():
            if parameter.is_embedding:
                folds.append(Fold(name, embeddings))
            if name.startswith(f"{self.final_norm}."):
                folds.append(Fold(name, logits / (embeddings if config.tied else 1.0)))
            if f".{self.query(config)}." in name:
                folds.append(Fold(name, attention, parameter.slices.get("query")))
            if parameter.branch:
                folds.append(Fold(name, residual))
        return folds


def _inside(module: str, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {f"{module}.{name}": parameter for name, parameter in parameters.items()}
