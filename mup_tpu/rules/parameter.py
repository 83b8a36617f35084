"""Declaration of a parameter: shape, role and fans. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["token_embedding", "position_embedding", "hidden", "router", "readout", "norm", "bias"]
"""Kind of a parameter: "hidden" is a matrix from activations to activations, "norm" a norm's gain, "router" a
matrix from activations to a choice among few, such as experts."""


@dataclass(frozen=True)
class Slice:
    """Part of a fused parameter, such as the queries of qkv."""

    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """One parameter of an architecture at one size."""

    shape: tuple[int, ...]  # Axes of the matrix or vector; before them, the axis of a stack of alike ones
    role: Role
    fan_in: int  # Inputs that each output sums over; 1 for vectors, which scale or shift
    fan_out: int  # Outputs; of one matrix of a stack
    in_block: bool = False  # Whether it lies in a block; the model's depth is the number of blocks
    branch: str = ""  # Residual branch whose last layer this is: the residual factor folds into it
    init: Literal["normal", "zeros", "ones"] = "normal"  # "normal": init_std × init_factor × the rule's
    init_factor: float = 1.0  # The architecture's own factor on the standard deviation
    init_depth_exponent: float = 0.0  # Exponent of `init_factor` in depth
    slices: Mapping[str, Slice] = field(default_factory=dict)  # Parts of a fused parameter, by name
    sliced_axis: int = -1  # Axis along which the parts lie
    active: float = 1.0  # Share of its elements that a token uses: experts a token over experts

    @property
    def decays(self) -> bool:
        return self.role not in ("norm", "bias")

    @property
    def is_embedding(self) -> bool:
        return self.role in ("token_embedding", "position_embedding")

    @property
    def size(self) -> int:
        return math.prod(self.shape)
