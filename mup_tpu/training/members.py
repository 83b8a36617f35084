"""Rows of a pack's members, and the interface of their executions: in turns, and stacked.

Shapes: R rows of the stack, S steps, N evaluation batches, B sequences, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mup_tpu.config import Trial
from mup_tpu.devices import Device
from mup_tpu.internals.torch import compile_function
from mup_tpu.models import Parameter
from mup_tpu.rules.parametrization import Scaling
from mup_tpu.training.loss import MemberLoss
from mup_tpu.training.optimizer import State


@dataclass
class Members(ABC):
    """Rows of members on the device, in one execution."""

    device: Device
    loss: MemberLoss
    declared: Mapping[str, Parameter]
    compile: bool
    """Whether the step goes through torch.compile."""
    micro_batches: int
    trials: Sequence[Trial]
    """Trial of each row; the last ones may be padding."""
    scalings: Sequence[Mapping[str, Scaling]]
    """Factors by parameter name, one mapping a row."""
    parameters: dict[str, Tensor]
    """Tensors (R, ...), which training changes in place."""
    state: State
    """Optimizer state, changed in place too."""
    buffers: dict[str, Tensor]
    """Forward factors."""
    steps_done: int
    """Updates already made when the rows were placed."""

    is_stacked = False
    """Whether all rows are one program that takes several steps at once."""

    @abstractmethod
    def __post_init__(self) -> None: ...

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function through torch.compile, if asked for."""
        return compile_function(function) if self.compile else function

    @abstractmethod
    def train(self, tokens_SBT1: Tensor, steps: range, live: Sequence[int]) -> Tensor:
        """Losses_SR before each update, after training `live` rows on the first batches of a stack.

        `steps` are their numbers, for schedules. Other rows may train too. Losses after the last step are
        meaningless.
        """

    @abstractmethod
    def evaluate(self, tokens_NBT1: Tensor, live: Sequence[int]) -> Tensor:
        """Mean losses_R over N batches, without training."""
