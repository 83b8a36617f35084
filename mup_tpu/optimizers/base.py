"""Update rules: their state, their updates of one member and of a stack, and the parameters that they take.

No file outside of this folder knows an update rule by name. Updates import torch when they are made, since
drivers, which import none, ask which trials fit into one pack.

Shapes: K members, leading on every stacked tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mup_tpu.config import OptimizerConfig
from mup_tpu.rules.parametrization import Parameter, Scaling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Parameters of one member that share a rule and all factors, as torch.optim's functions take them."""

    parameters: list[Parameter]  # Declarations: fans, and slices of a fused matrix
    leaves: list[Tensor]
    slots: dict[str, list[Tensor]]
    updates: list[Tensor]  # Number of updates of each so far
    lr_factor: float
    weight_decay: float
    eps: float


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of all members in one step; numbers and factors are (K, 1, ...) each."""

    parameter: Parameter
    values: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    numbers: tuple[Tensor, ...]  # Numbers of the step, from `UpdateRule.step_numbers`
    lr_factor: Tensor
    weight_decay: Tensor
    eps: Tensor


class UpdateRule(ABC):
    """One update rule."""

    name: str  # Value of `OptimizerConfig.optimizer`
    is_elementwise = True  # Whether a number's update needs only its gradient and state, not whole matrices

    @abstractmethod
    def slots(self, config: OptimizerConfig) -> tuple[str, ...]:
        """Return names of a parameter's state, as in torch.optim."""

    def scaled_as(self, config: OptimizerConfig) -> str:
        """Return the name of its factors in parametrizations, one for each way that its updates grow."""
        return self.name

    def takes(self, parameter: Parameter) -> bool:
        """Return whether it trains this parameter; AdamW trains the others."""
        return True

    def learning_rate(self, config: OptimizerConfig) -> float:
        """Return the peak learning rate of its parameters, before the parametrization's factors."""
        return config.learning_rate

    def weight_decay(self, config: OptimizerConfig, parameter: Parameter, scaling: Scaling) -> float:
        """Return λ of one parameter for torch's update rules: a step shrinks a weight by learning rate · λ.

        Coupled: the parametrization's factor times the configured λ. Independent (Loshchilov & Hutter 2019;
        Wortsman et al. 2023, section 3.2.2): a step shrinks every matrix by schedule·λ, so λ is divided by
        the learning rate's peak (before factors) and factor. Norms and biases do not decay.
        """
        if not parameter.decays or config.weight_decay == 0:
            return 0.0
        if config.decay_mode == "coupled":
            return config.weight_decay * scaling.weight_decay
        return config.weight_decay / self.learning_rate(config) * (1 / scaling.learning_rate)

    @abstractmethod
    def constants(self, config: OptimizerConfig, moments: float) -> Any:
        """Return numbers of its program, equal in a pack; `moments` multiplies 1 - β of running averages."""

    def applied(self, config: OptimizerConfig, constants: Any, scaling: Scaling) -> dict[str, float]:
        """Return scaled hyperparameters other than learning rate and decay, as applied to a parameter."""
        return {}

    @abstractmethod
    def update_member(self, group: Group, constants: Any, learning_rate: float) -> None:
        """Apply the leaves' gradients in place; the learning rate comes without the group's factor."""

    def step_numbers(self, constants: Any, step: int, learning_rate: float) -> tuple[float, ...]:
        """Return numbers of a member's update that change with the step (from 0), for `update_stack`."""
        return (learning_rate,)

    @abstractmethod
    def update_stack(self, stack: StackedParameter, constants: Any) -> None:
        """Apply a stacked gradient in place."""


def matrices_of(parameter: Parameter, values: Tensor) -> tuple[Tensor, ...]:
    """Return views of each matrix in a parameter, in order: the whole, or the parts of a fused one."""
    if not parameter.slices:
        return (values,)
    parts = sorted(parameter.slices.values(), key=lambda part: part.start)
    return values.split([part.stop - part.start for part in parts], parameter.sliced_axis)
