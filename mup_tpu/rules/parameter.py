"""A parameter as rules see it: its shape, role and fans, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["token_embedding", "position_embedding", "hidden", "readout", "norm", "bias"]
"""What a parameter is: "hidden" is a matrix from activations to activations, "norm" a norm's gain."""


@dataclass(frozen=True)
class Slice:
    """Part of a fused parameter along its last axis that is a parameter of its own, as queries are of qkv."""

    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """One parameter of an architecture at one size."""

    shape: tuple[int, ...]
    role: Role
    fan_in: int
    """Inputs that each of its outputs sums over; 1 for vectors, which scale or shift."""
    fan_out: int
    """Outputs."""
    in_block: bool = False
    """Whether it lies in a block, of which there are as many as the model is deep."""
    branch: str = ""
    """Residual branch whose output it makes, if it is the last of one: the residual factor folds into it."""
    init: Literal["normal", "zeros", "ones"] = "normal"
    """What it starts as; "normal" is of standard deviation init_std × init_factor × the rule's factor."""
    init_factor: float = 1.0
    """The architecture's own factor of that standard deviation."""
    init_depth_exponent: float = 0.0
    """How that factor follows depth: it is proportional to depth to this power."""
    slices: Mapping[str, Slice] = field(default_factory=dict)
    """The parameters that a fused one is made of, by name."""

    @property
    def decays(self) -> bool:
        """Whether weight decay is for it: matrices and embeddings have it; norms and biases have none."""
        return self.role not in ("norm", "bias")

    @property
    def is_embedding(self) -> bool:
        """Whether it is looked up, not multiplied with."""
        return self.role in ("token_embedding", "position_embedding")

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)
