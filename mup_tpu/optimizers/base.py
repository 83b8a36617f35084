"""What an update rule is: its state, its update of one member and of a stack of them, and what it takes.

No file outside of this folder knows an update rule by name. torch is imported where an update is made, so
that drivers, which do not import it, can ask which trials fit into one pack.

Shapes: K members, leading on every stacked tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mup_tpu.config import OptimizerConfig
from mup_tpu.rules.parameter import Parameter
from mup_tpu.rules.parametrization import MomentScaling, Scaling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Parameters of one member that share a rule and all factors, as torch.optim's functions take them."""

    parameters: list[Parameter]
    """What the architecture declares of each: fans, and slices of a fused matrix."""
    leaves: list[Tensor]
    slots: dict[str, list[Tensor]]
    updates: list[Tensor]
    """How many updates each has had."""
    lr_factor: float
    weight_decay: float
    eps: float


@dataclass(frozen=True)
class Factors:
    """Of one stacked parameter: what it is, and, each (K, 1, ...), what differs between members."""

    parameter: Parameter
    """What the architecture declares of it."""
    lr: Tensor
    """× learning rate."""
    weight_decay: Tensor
    eps: Tensor


class UpdateRule(ABC):
    """One update rule."""

    name: str
    """What `OptimizerConfig.optimizer` and the parametrizations call it."""

    @abstractmethod
    def slots(self, config: OptimizerConfig) -> tuple[str, ...]:
        """Names of its state of each parameter, as torch.optim has them."""

    def scaled_as(self, config: OptimizerConfig) -> str:
        """The name under which parametrizations have factors for it: one for each way that its updates grow
        with a matrix.
        """
        return self.name

    def takes(self, parameter: Parameter) -> bool:
        """Whether it trains this parameter; AdamW trains those that are left."""
        return True

    def learning_rate(self, config: OptimizerConfig) -> float:
        """Peak learning rate of the parameters that it takes, before the parametrization's factors."""
        return config.learning_rate

    @abstractmethod
    def constants(self, config: OptimizerConfig, moments: MomentScaling) -> Any:
        """What is part of its program as numbers, so that the members of a pack must share it."""

    def applied(self, config: OptimizerConfig, constants: Any, scaling: Scaling) -> dict[str, float]:
        """Its hyperparameters that rules scale, but learning rate and decay, as applied to a parameter."""
        return {}

    @abstractmethod
    def update_member(self, group: Group, constants: Any, learning_rate: float) -> None:
        """Apply the leaves' gradients in place; the learning rate comes without the group's factor."""

    @abstractmethod
    def step_numbers(self, constants: Any, step: int, learning_rate: float) -> tuple[float, ...]:
        """All of a member's update at `step` (from 0) that changes with it, for `update_stack`."""

    @abstractmethod
    def update_stack(
        self,
        p: Tensor,
        gradient: Tensor,
        slots: Mapping[str, Tensor],
        constants: Any,
        numbers: tuple[Tensor, ...],
        factors: Factors,
    ) -> None:
        """Apply a stacked gradient in place.

        Args:
            p: stacked parameter.
            gradient: likewise.
            slots: its state, likewise.
            constants: as `constants`, of all members.
            numbers: as `step_numbers`, each (K, 1, ...).
            factors: of the parameter.
        """


def weight_decay(config: OptimizerConfig, peak: float, parameter: Parameter, scaling: Scaling) -> float:
    """λ of one parameter as torch's update rules take it: a step shrinks a weight by learning rate · λ.

    Coupled: the parametrization's factor times the configured λ. Independent (Loshchilov & Hutter 2019;
    Wortsman et al. 2023, section 3.2.2): a step shrinks every matrix by schedule·λ, so that the peak learning
    rate and its factor are divided out. Norms and biases do not decay.

    Args:
        config: λ, and which form.
        peak: peak learning rate before the parametrization's factor.
        parameter: which.
        scaling: its factors.
    """
    if not parameter.decays or config.weight_decay == 0:
        return 0.0
    if config.decay_mode == "coupled":
        return config.weight_decay * scaling.weight_decay
    return config.weight_decay / peak * (1 / scaling.learning_rate)
