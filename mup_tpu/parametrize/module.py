"""Factors of a module's parameters by name, and their application to it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pandas as pd
import torch
from torch import nn

from mup_tpu.config import OptimizerConfig
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers import update_rule_of
from mup_tpu.parametrize import forward
from mup_tpu.parametrize.forward import ForwardFactor
from mup_tpu.parametrize.roles import by_name, config_for
from mup_tpu.rules.parametrization import Parameter, Scaling

Module = TypeVar("Module", bound=nn.Module)


# Attribute of a module that has the forward factors: rule and width. Wrappers, copies and pickles keep it.
_APPLIED = "_mup_tpu_applied"


class FactorTable(pd.DataFrame):
    """Table that prints all of its rows and columns."""

    def __repr__(self) -> str:
        return self.to_string(float_format="{:.4g}".format, na_rep="–")


@dataclass(frozen=True)
class ModuleParametrization:
    """Factors of a module by parameter name; nothing lies on the module or its tensors."""

    rule: str
    """Key of `mup_tpu.rules.parametrization.PARAMETRIZATIONS`."""
    optimizer: str
    """Update rule."""
    width: int
    """Width to train at."""
    parameters: Mapping[str, Parameter]
    """Declaration of each parameter."""
    multipliers: Mapping[str, float]
    """Width multiplier m of each parameter, by mup's shape inference; 1 if none of its axes grows."""
    scalings: Mapping[str, Scaling]
    """Factors of each parameter."""
    forward: tuple[ForwardFactor, ...]
    """Factors of the forward pass."""
    init_ratios: Callable[[], Mapping[str, float]] = field(repr=False)
    """Function for the factor on the drawn weights of each parameter; it builds the module twice."""
    _initialized: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet, repr=False)

    @torch.no_grad()
    def init_(self, module: Module, std: float | None = None) -> Module:
        """Give a fresh module the rule's init, in place, and the rule's forward factors.

        Args:
            module: module as `build` made it. Its drawn weights are scaled to the standard deviation of build
                at the base width, times the rule's factor. A rule without factors on init (such as "sp")
                leaves them.
            std: standard deviation at the base of newly drawn matrices and embeddings; biases become 0 and
                norms' gains 1. For modules whose memory has no values yet.

        Returns:
            The module.

        Raises:
            ConfigError: the module is not build's, or was initialized before.
        """
        values = by_name(module, self.parameters)
        for name, parameter in self.parameters.items():
            if tuple(values[name].shape) != parameter.shape:
                raise ConfigError(
                    f"parameter {name!r} has shape {tuple(values[name].shape)}, at width {self.width} it is "
                    f"{parameter.shape}; give the module that build makes at that width, before wrapping it"
                )
        if std is None:
            if module in self._initialized:
                raise ConfigError("init_ has scaled this module's weights before, and would scale them twice")
            for name, ratio in self.init_ratios().items():
                if ratio != 1:
                    values[name].mul_(ratio)
        else:
            for name, parameter in self.parameters.items():
                if parameter.role in ("norm", "bias"):
                    values[name].fill_(1.0 if parameter.role == "norm" else 0.0)
                else:
                    values[name].normal_(0.0, std * self.scalings[name].init)
        self._initialized.add(module)
        return self.forward_(module)

    def forward_(self, module: Module) -> Module:
        # For weights from a state dict, which has no factors
        forward.apply(module, self.forward)
        setattr(module, _APPLIED, (self.rule, self.width))
        return module

    def bake_(self, module: Module, untie: bool = False) -> Module:
        """Multiply the weights by the forward factors, the inverse of `forward_`; return the module.

        The stock class then computes the same from the checkpoint. Training goes on from a checkpoint before
        baking only.

        Args:
            module: module with the forward factors.
            untie: give a tied readout with a factor a matrix of its own. A module that ties it again, as a
                fresh one of the same class does, would load the baked weights wrongly without a word.

        Raises:
            ConfigError: the factor of a module cannot go into a weight, or a readout is tied.
        """
        forward.bake(module, self.forward, untie)
        setattr(module, _APPLIED, None)
        return module

    def param_groups(
        self,
        module: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        decay_mode: Literal["coupled", "independent"] = "coupled",
        adamw_lr: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return groups for an optimizer of torch, one for each combination of factors.

        Under Muon those with `use_muon` are for `torch.optim.Muon`, the others for AdamW. It takes matrices
        of two axes: stacked experts are AdamW's, and a fused matrix of queries, keys and values is one.

        Norms and biases do not decay.

        A group also has `lr_factor`, for loops that set learning rates by hand:
        group["lr"] = schedule(step) * group["lr_factor"]. Schedulers of torch need nothing.

        Args:
            module: module as built, or wrapped by FSDP, DDP or torch.compile.
            lr: learning rate at the base.
            weight_decay: λ at the base.
            eps: Adam's ε at the base; groups for SGD have none.
            adamw_lr: under Muon AdamW's learning rate at the base; by default lr.
            decay_mode: "coupled", a step shrinks weights by lr·λ, as in torch; "independent", by λ alone
                times the schedule.

        Raises:
            ConfigError: a value is not allowed, the module is not build's, or it has not gone through `init_`
                or `forward_`.
        """
        is_muon = self.optimizer.startswith("muon")
        chosen: dict[str, OptimizerConfig] = {}
        for name, parameter in self.parameters.items():
            of = config_for(self.optimizer, parameter)
            rate = adamw_lr if is_muon and adamw_lr is not None and of.optimizer == "adamw" else lr
            chosen[name] = dataclasses.replace(
                of, learning_rate=rate, weight_decay=weight_decay, eps=eps, decay_mode=decay_mode
            )
        values = by_name(module, self.parameters)
        self._require_applied(module)
        groups: dict[Any, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            config, scaling = chosen[name], self.scalings[name]
            rule = update_rule_of(config, parameter)
            settings: dict[str, Any] = {
                "lr": config.learning_rate * scaling.learning_rate,
                "weight_decay": rule.weight_decay(config, parameter, scaling),
                "lr_factor": scaling.learning_rate,
            }
            if is_muon:
                settings["use_muon"] = rule.name == "muon"
            if rule.name == "adamw" and self.optimizer != "lion":
                settings["eps"] = eps * scaling.eps
            group = groups.setdefault(tuple(settings.items()), {"params": [], **settings})
            group["params"].append(values[name])
        return list(groups.values())

    def _require_applied(self, module: nn.Module) -> None:
        """Refuse a module with learning rates of the rule and without its init and forward factors."""
        marks = [getattr(part, _APPLIED) for part in module.modules() if hasattr(part, _APPLIED)]
        if not any(marks):
            raise ConfigError(
                f"the module lacks the init and the forward factors of rule {self.rule!r}, and learning "
                "rates alone are half of it: call init_ on a fresh module, or forward_ on one with weights "
                "from a state dict, before param_groups" + ("; a baked one does not train" if marks else "")
            )
        if (self.rule, self.width) not in marks:
            rule, width = next(filter(None, marks))
            raise ConfigError(
                f"the module was initialized by rule {rule!r} for width {width}, and these groups are for "
                f"rule {self.rule!r} and width {self.width}; take both from one parametrization"
            )

    def table(self) -> FactorTable:
        """Return role, shape, multiplier and factors of each parameter, a row each.

        "forward" is the factor of the module behind the matrix, for a tied one of its logits.
        """
        forward = {f.parameter: f.factor for f in self.forward if f.parameter}
        outputs = {f.module: f.factor for f in self.forward if f.place == "output"}
        rows = [
            {
                "parameter": name,
                "role": p.role,
                "shape": p.shape,
                "m": self.multipliers[name],
                "init": self.scalings[name].init,
                "learning_rate": self.scalings[name].learning_rate,
                "weight_decay": self.scalings[name].weight_decay if p.decays else 0.0,
                "eps": self.scalings[name].eps,
                "forward": forward.get(name, 1.0) * outputs.get(name.rpartition(".")[0], 1.0),
            }
            for name, p in self.parameters.items()
        ]
        return FactorTable(pd.DataFrame(rows).set_index("parameter"))
