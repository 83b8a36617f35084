"""Factors of a module's parameters and of its forward pass, by name, and their application to it.

Factors of the forward pass are plain numbers in hooks and attributes of modules. They are neither buffers nor
parameters: the state dict does not change, no cast rounds a factor, and a module that was built on the meta
device keeps its factors when it gets memory.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pandas as pd
import torch
from torch import Tensor, nn

from mup_tpu.analysis.diagnosis import pooled_name
from mup_tpu.config import OptimizerConfig
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers import update_rule_of
from mup_tpu.parametrize.roles import (
    BRANCH,
    BY_HAND,
    Built,
    by_name,
    config_for,
    is_linear,
    matches,
    own_power,
)
from mup_tpu.rules.parametrization import ForwardScaling, Parameter, Scaling

# Attributes of attention modules with their number of heads.
_NUMBER_OF_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")

Place = Literal["input", "output", "scaling", "by hand"]


@dataclass(frozen=True)
class ForwardFactor:
    """One factor of the forward pass."""

    module: str
    """Submodule with the factor."""
    place: Place
    """Place of the factor: input or output of the module, or its attribute `scaling` (attention logits)."""
    factor: float
    """1 at the base."""
    parameter: str = ""
    """Matrix of a readout."""
    scaling: float = 1.0
    """Value of attention's attribute, with the factor."""


class _Scale:
    """A hook that multiplies. It is an object, so that it can be copied, pickled and found again."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class _ScaleInput(_Scale):
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        first, *others = kwargs
        return args, {first: kwargs[first] * self.factor} | {name: kwargs[name] for name in others}


class _ScaleOutput(_Scale):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return output * self.factor
        return (output[0] * self.factor, *output[1:])


def _tied_to(module: nn.Module, part: nn.Module) -> str:
    """Return the name of another module with the same weight; "" for none."""
    others = (
        name
        for name, other in module.named_modules()
        if other is not part and getattr(other, "weight", None) is getattr(part, "weight", part)
    )
    return next(others, "")


def _bake_queries(part: Any, factor: ForwardFactor) -> None:
    """Multiply the queries of an attention module of `transformers` by the factor of its logits."""
    stock = factor.scaling / factor.factor
    norm, alone, joint = (getattr(part, name, None) for name in ("q_norm", "q_proj", "c_attn"))
    queries: list[Tensor | None]
    if isinstance(norm, nn.Module):
        queries = [norm.weight]  # type: ignore[list-item]
    elif isinstance(alone, nn.Linear):
        queries = [alone.weight, alone.bias]
    elif joint is not None and is_linear(joint) and isinstance(size := part.split_size, int):
        queries = [joint.weight[..., :size], joint.bias[..., :size]]  # GPT-2 fuses queries, keys and values
    else:
        raise ConfigError(
            f"the factor of {factor.module!r} ({type(part).__name__}) cannot be baked: it has no "
            f"q_proj, q_norm or c_attn; multiply queries by {factor.factor:g}, and set scaling to {stock:g}"
        )
    for tensor in queries:
        if tensor is not None:
            tensor.mul_(factor.factor)
    part.scaling = stock


def embedding_factors(
    built: Mapping[str, Built], parameters: Mapping[str, Parameter], m: float, roles: Mapping[str, str]
) -> list[ForwardFactor]:
    """Return the factor of each embedding whose class multiplies it by a power of the width, as Gemma's.

    The output then keeps its size over widths, as the embedding's σ and learning rate expect.
    """
    owners = [o for name, p in parameters.items() if p.is_embedding for o in built[name].owners]
    powers = {o.name: own_power(o.name, roles) for o in owners if not is_linear(o.module)}
    return [ForwardFactor(name, "output", m**-power) for name, power in powers.items() if power]


def readout_factors(
    built: Mapping[str, Built],
    parameters: Mapping[str, Parameter],
    logits: Mapping[str, float],
    m: float,
    roles: Mapping[str, str],
) -> list[ForwardFactor]:
    """Return the factor of each readout's logits, tied ones too; it goes before the matrix, as mup's."""
    factors = []
    for name, parameter in parameters.items():
        owners = built[name].owners
        if parameter.is_embedding:  # a readout may be tied to it
            owners = tuple(o for o in owners if len(owners) > 1 and is_linear(o.module))
        elif parameter.role != "readout":
            continue
        for owner in owners:
            place: Place = "by hand" if matches(owner.name, BY_HAND, roles) else "input"
            factor = logits[name]
            if factor != 1:  # a factor of 1 leaves the logits of the class
                factor *= m ** -own_power(owner.name, roles)
            if place == "input" and factor != 1 and not is_linear(owner.module):
                raise ConfigError(
                    f"the readout {name!r} lies in a {type(owner.module).__name__}, whose logits cannot be "
                    f"scaled from outside: multiply the input of {name!r} by {factor:g} in your code "
                    f"(base width / width), and give roles={{{owner.name!r}: 'by hand'}}"
                )
            factors.append(ForwardFactor(owner.name, place, factor, parameter=name))
    return factors


def attention_factors(
    base: nn.Module, module: nn.Module, rule: Callable[[float], ForwardScaling], roles: Mapping[str, str]
) -> list[ForwardFactor]:
    """Return the factor of the attention logits of each module with an attribute `head_dim`."""
    factors: list[ForwardFactor] = []
    growing = []  # modules whose heads seem to grow in size
    for name, part in module.named_modules():
        size, scaling = getattr(part, "head_dim", None), getattr(part, "scaling", None)
        before = getattr(base.get_submodule(name), "head_dim", None)
        by_hand = matches(name, BY_HAND, roles)
        if size is None and not by_hand:
            smaller = base.get_submodule(name)
            pairs = zip(part.parameters(), smaller.parameters(), strict=False)
            numbers = {attribute: getattr(part, attribute, None) for attribute in _NUMBER_OF_HEADS}
            alike = [a for a, n in numbers.items() if isinstance(n, int) and n == getattr(smaller, a, None)]
            if alike and any(wide.numel() > narrow.numel() for wide, narrow in pairs):
                growing.append((pooled_name(name), type(part).__name__, alike[0], numbers[alike[0]]))
        if not (isinstance(size, int) and isinstance(before, int)) or size == before:
            continue
        factor = rule(size / before).attention
        if by_hand:
            factors.append(ForwardFactor(name, "by hand", factor))
        elif isinstance(scaling, float):
            factors.append(ForwardFactor(name, "scaling", factor, scaling=scaling * factor))
        elif factor != 1:
            raise ConfigError(
                f"the head size of {name!r} ({type(part).__name__}) grows from {before} to {size}, and it "
                "has no attribute `scaling` to divide its attention logits by the head size: let the number "
                "of heads grow in place of their size, or multiply the logits by "
                f"{factor:g} in your code (scaled_dot_product_attention takes scale={factor * size**-0.5:g}) "
                f"and give roles={{{name!r}: 'by hand'}}"
            )
    if growing:  # one warning for all blocks
        name, kind, attribute, number = growing[0]
        warnings.warn(
            f"{name!r} ({kind}) has {attribute} {number} at every width, so its heads seem to grow, and no "
            "head_dim and scaling to set: divide its logits by the head size, not by its root, and give "
            f"roles={{{name!r}: 'by hand'}}; or let {attribute} grow",
            stacklevel=2,
        )
    return factors


def branch_factors(
    module: nn.Module, residual: float, rule: str, roles: Mapping[str, str]
) -> list[ForwardFactor]:
    """Return the factor of each residual branch, which goes after its last layer."""
    ends = [name for name, _ in module.named_modules() if matches(name, BRANCH, roles)]
    if residual != 1 and not ends:
        raise ConfigError(
            f"rule {rule!r} multiplies residual branches by {residual:g} here; name the last submodule of "
            "each, such as roles={'layers.*.self_attn.o_proj': 'branch', 'layers.*.mlp.down_proj': 'branch'}"
        )
    return [ForwardFactor(name, "output", residual) for name in ends]


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
        """Add the forward factors to a module that is not yet wrapped or compiled; return the module.

        For weights from a state dict, which has no factors. A second call changes nothing.
        """
        for factor in self.forward:
            if factor.place == "by hand":
                continue
            part = module.get_submodule(factor.module)
            if factor.place == "scaling":
                part.scaling = factor.scaling  # type: ignore[assignment]
                continue
            hooks: Any = part._forward_pre_hooks if factor.place == "input" else part._forward_hooks
            if scales := [hook for hook in hooks.values() if isinstance(hook, _Scale)]:
                scales[0].factor = factor.factor
            elif factor.factor == 1:
                continue
            elif factor.place == "input":
                part.register_forward_pre_hook(_ScaleInput(factor.factor), with_kwargs=True)
            else:
                part.register_forward_hook(_ScaleOutput(factor.factor))
        setattr(module, _APPLIED, (self.rule, self.width))
        return module

    @torch.no_grad()
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
        for factor in self.forward if not untie else ():
            part = module.get_submodule(factor.module)
            hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
            if any(isinstance(hook, _Scale) for hook in hooks) and (other := _tied_to(module, part)):
                raise ConfigError(
                    f"the module {factor.module!r} is tied to {other!r} and has a factor × "
                    f"{factor.factor:g}: baked, '{factor.module}.weight' is another matrix, which a module "
                    "that ties both drops without a word; call bake_(module, untie=True), and load it where "
                    "they are not tied"
                )
        for factor in self.forward:
            if factor.place == "by hand":
                continue
            part = module.get_submodule(factor.module)
            if factor.place == "scaling":
                if part.scaling == factor.scaling:
                    _bake_queries(part, factor)
                continue
            scales: Any = part._forward_pre_hooks if factor.place == "input" else part._forward_hooks
            for key in [key for key, hook in scales.items() if isinstance(hook, _Scale)]:
                if not is_linear(part) and not isinstance(part, nn.Embedding):
                    raise ConfigError(
                        f"the factor of {factor.module!r} ({type(part).__name__}) cannot be baked: it "
                        "is no linear layer"
                    )
                weight, bias = part.get_parameter("weight"), getattr(part, "bias", None)
                if _tied_to(module, part):
                    part.weight = nn.Parameter(weight * scales[key].factor)
                    config: Any = getattr(module, "config", None)
                    if config is not None:  # otherwise transformers would tie the embeddings again
                        config.tie_word_embeddings = False
                else:
                    weight.mul_(scales[key].factor)
                if factor.place == "output" and bias is not None:
                    bias.mul_(scales[key].factor)
                del scales[key]
                part._forward_pre_hooks_with_kwargs.pop(key, None)
        setattr(module, _APPLIED, None)
        return module

    def param_groups(
        self,
        module: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.0,
        eps: float = 1e-8,
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
            weight_decay: λ at the base; a step shrinks weights by lr·λ, as in torch.
            eps: Adam's ε at the base; groups for SGD have none.
            adamw_lr: under Muon AdamW's learning rate at the base; by default lr.

        Raises:
            ConfigError: a value is not allowed, the module is not build's, or it has not gone through `init_`
                or `forward_`.
        """
        is_muon = self.optimizer.startswith("muon")
        chosen: dict[str, OptimizerConfig] = {}
        for name, parameter in self.parameters.items():
            of = config_for(self.optimizer, parameter)
            rate = adamw_lr if is_muon and adamw_lr is not None and of.optimizer == "adamw" else lr
            chosen[name] = dataclasses.replace(of, learning_rate=rate, weight_decay=weight_decay, eps=eps)
        values = by_name(module, self.parameters)
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
