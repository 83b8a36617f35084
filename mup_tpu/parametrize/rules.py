"""Factors of a rule by parameter name, derived from a function that builds a module."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from mup_tpu.config import OptimizerConfig
from mup_tpu.config.fields import require_above_zero, require_one_of
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers import update_rule_of
from mup_tpu.parametrize.forward import ForwardFactor, attention_factors, branch_factors, readout_factors
from mup_tpu.parametrize.module import ModuleParametrization
from mup_tpu.parametrize.quartiles import init_sizes
from mup_tpu.parametrize.roles import declared, outputs_first, require_used
from mup_tpu.parametrize.survey import Build, Found, blocks_of, build_on_meta, parameters_of
from mup_tpu.rules.parameter import Parameter
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, Growth, Scaling, infer_infshapes, scaling

if TYPE_CHECKING:
    from mup.infshape import InfShape

_OPTIMIZERS = ("adamw", "sgd")
"""Update rules that train every parameter."""


def parametrize(
    build: Build,
    *,
    width: int,
    base_width: int,
    depth: int | None = None,
    base_depth: int | None = None,
    rule: str = "mup",
    optimizer: str = "adamw",
    roles: Mapping[str, str] = {},
    branches: Sequence[str] = (),
    by_hand: Sequence[str] = (),
    delta_width: int | None = None,
) -> ModuleParametrization:
    """Factors of a rule for every parameter of a module.

    Examples:
        >>> from torch import nn
        >>> def build(width):
        ...     return nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 2))
        >>> parametrize(build, width=256, base_width=64).table()[["role", "init", "learning_rate"]]
                             role  init  learning_rate
        parameter
        0.weight  token_embedding   1.0           1.00
        0.bias               bias   1.0           1.00
        1.weight           hidden   0.5           0.25
        1.bias               bias   1.0           1.00
        2.weight          readout   1.0           1.00
        2.bias               bias   1.0           1.00

    Args:
        build: function that makes the module: build(width), or with depth build(width, depth). It is called
            on the meta device for shapes, and by `init_` on the CPU for the size of the init.
        width: width to train at, in any unit that build takes.
        base_width: width of the tuning; there all factors are 1.
        depth: number of blocks to train with, members of nn.ModuleLists or nn.Sequentials.
        base_depth: number of blocks of the tuning.
        rule: key of `mup_tpu.rules.parametrization.PARAMETRIZATIONS` (docs/rules.md).
        optimizer: update rule, "adamw" (or another that divides by the gradient's size) or "sgd".
        roles: roles of parameters by name or pattern, where the module does not tell:
            {"layers.*.gamma": "norm"}.
        branches: patterns of submodules that end a residual branch, for rules with a factor on branches.
        by_hand: patterns of submodules whose forward factor your own code applies.
        delta_width: another width that tells which axes grow; by default twice the base width.

    Raises:
        ConfigError: build fails, parameters change names with width, no axis grows, a role cannot be told, a
            forward factor cannot be applied, or the rule has no factors for the optimizer.
    """
    derivation = _Derivation(
        build, width, base_width, delta_width or 2 * base_width, depth, base_depth, rule, optimizer, roles,
        branches, by_hand,
    )  # fmt: skip
    return derivation.result()


@dataclass(frozen=True)
class _Derivation:
    """Derivation of a module's factors, step by step; fields as the arguments of `parametrize`."""

    build: Build
    width: int
    base_width: int
    delta_width: int
    depth: int | None
    base_depth: int | None
    rule: str
    optimizer: str
    roles: Mapping[str, str]
    branches: Sequence[str]
    by_hand: Sequence[str]

    def __post_init__(self) -> None:
        if (self.depth is None) != (self.base_depth is None):
            raise ConfigError("depth and base_depth go together: give both, or none to leave depth as it is")
        for name in ("width", "base_width", "depth", "base_depth"):
            size = getattr(self, name)
            if size is not None:
                require_above_zero(name, size)
        if self.optimizer not in _OPTIMIZERS:
            raise ConfigError(
                f"optimizer {self.optimizer!r} is not one of {', '.join(_OPTIMIZERS)}: the groups are for "
                "one optimizer of torch"
            )
        require_one_of("rule", self.rule, tuple(PARAMETRIZATIONS))
        if self.depth is None and "depth" in PARAMETRIZATIONS[self.rule].follows:
            raise ConfigError(
                f"rule {self.rule!r} follows depth: give depth and base_depth, and build(width, depth)"
            )

    def result(self) -> ModuleParametrization:
        require_used(self.roles, self.found)
        axes = self._axes()
        parameters = self._declarations(axes)
        for name, shape in axes.items():
            # Growing inputs only, as a readout has, but hidden by the user's roles.
            if (
                parameters[name].role == "hidden"
                and shape.ninf() == 1
                and len(shape) >= 2
                and shape[1].isinf()
            ):
                axes[name] = _as_hidden(shape)
        config = OptimizerConfig(optimizer=self.optimizer)  # type: ignore[arg-type]
        scalings = {
            name: scaling(self.rule, update_rule_of(config, p).scaled_as(config), p, axes[name], self.growth)
            for name, p in parameters.items()
        }
        multipliers = {name: float(shape.width_mult()) for name, shape in axes.items()}
        return ModuleParametrization(
            self.rule,
            self.optimizer,
            self.width,
            parameters,
            multipliers,
            scalings,
            self._forward_factors(parameters, multipliers),
            functools.partial(self._init_ratios, scalings),
        )

    @property
    def growth(self) -> Growth:
        depth = 1.0 if self.depth is None or self.base_depth is None else self.depth / self.base_depth
        return Growth(width=self.width / self.base_width, depth=depth)

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module at the base width, at the second width that tells which axes grow, and at its own."""
        widths = (self.base_width, self.delta_width, self.width)
        return tuple(build_on_meta(self.build, width, self.depth) for width in widths)

    @cached_property
    def found(self) -> dict[str, Found]:
        """Parameters of the module to train."""
        return parameters_of(self.modules[-1])

    def _axes(self) -> dict[str, InfShape]:
        """Axes of each parameter, outputs first, and which of them grow, by mup's shape inference."""
        base, delta = (parameters_of(module) for module in self.modules[:-1])
        for other, at in ((base, self.base_width), (delta, self.delta_width)):
            if self.found.keys() != other.keys():
                name = sorted(self.found.keys() ^ other.keys())[0]
                there, missing = (self.width, at) if name in self.found else (at, self.width)
                raise ConfigError(
                    f"parameter {name!r} is there at width {there}, but not at {missing}; the names of "
                    "parameters must not change with width"
                )
        shapes = [
            {name: outputs_first(self.found[name], f.shape) for name, f in of.items()}
            for of in (base, delta, self.found)
        ]
        if shapes[0] == shapes[1]:
            raise ConfigError(
                f"build({self.base_width}) and build({self.delta_width}) make parameters of the same shapes, "
                "so no axis would grow; build must make its module as wide as it is told, and delta_width "
                "differ from base_width"
            )
        axes = infer_infshapes(*shapes)
        for name, shape in axes.items():
            for dim, before in zip(shape, shapes[0][name], strict=True):
                if not dim.isinf() and dim.dim != before:
                    raise ConfigError(
                        f"parameter {name!r} has an axis of {before} at widths {self.base_width} and "
                        f"{self.delta_width}, but {dim.dim} at {self.width}; give a delta_width at which "
                        "that axis has grown"
                    )
        return axes

    def _declarations(self, axes: Mapping[str, InfShape]) -> dict[str, Parameter]:
        blocks: tuple[str, ...] = ()
        exponents: dict[str, float] = {}
        if self.depth is not None:
            blocks = blocks_of(self.modules[-1], build_on_meta(self.build, self.width, 2 * self.depth))
            if self.growth.depth != 1:
                exponents = self._init_depth_exponents(blocks)
        return {
            name: declared(f, axes[name], self.roles, name.startswith(blocks), exponents.get(name, 0.0))
            for name, f in self.found.items()
        }

    def _init_depth_exponents(self, blocks: tuple[str, ...]) -> dict[str, float]:
        """Power of depth in the init of each parameter of a block, from both depths at the base width."""
        deep, shallow = (
            init_sizes(self.build, self.base_width, depth) for depth in (self.depth, self.base_depth)
        )
        exponents = {}
        for name in self.found:
            if not name.startswith(blocks) or not deep[name]:
                continue
            if before := shallow.get(_in_base(name, blocks, shallow)):
                exponents[name] = round(math.log(deep[name] / before) / math.log(self.growth.depth), 5)
        return exponents

    def _forward_factors(
        self, parameters: Mapping[str, Parameter], multipliers: Mapping[str, float]
    ) -> tuple[ForwardFactor, ...]:
        forward, growth = PARAMETRIZATIONS[self.rule].forward, self.growth
        logits = {
            name: forward(Growth(width=m, depth=growth.depth)).logits for name, m in multipliers.items()
        }
        base, _, target = self.modules
        return (
            *attention_factors(base, target, lambda grown: forward(Growth(head_size=grown)), self.by_hand),
            *branch_factors(target, self.branches, forward(growth).residual, self.rule),
            *readout_factors(self.found, parameters, logits, self.by_hand),
        )

    def _init_ratios(self, scalings: Mapping[str, Scaling]) -> dict[str, float]:
        """Factor on each weight from build: the rule's factor × size at the base / size at the width."""
        is_base = self.width == self.base_width and all(s.init == 1 for s in scalings.values())
        if is_base or _leaves_init(self.rule):
            return dict.fromkeys(scalings, 1.0)
        base, own = (init_sizes(self.build, width, self.depth) for width in (self.base_width, self.width))
        ratios = {}
        for name, factors in scalings.items():
            ratio = factors.init * base[name] / own[name] if own[name] else 1.0
            ratios[name] = 1.0 if abs(ratio - 1) < 1e-5 else ratio  # rounding of float32
        return ratios


def _as_hidden(axes: InfShape) -> InfShape:
    """Axes whose outputs count as growing by a factor of 1, so that rules see a hidden matrix."""
    from mup.infshape import InfDim, InfShape

    return InfShape([InfDim(axes[0].dim, axes[0].dim), *axes[1:]])


def _in_base(name: str, blocks: Sequence[str], shallow: Mapping[str, float]) -> str:
    """Name of a parameter in the base; if the base lacks its block, in the base's last block."""
    own = next(block for block in blocks if name.startswith(block))
    listed = own.rstrip(".").rpartition(".")[0]
    for block in [own, *reversed([b for b in blocks if b.rstrip(".").rpartition(".")[0] == listed])]:
        if block + name.removeprefix(own) in shallow:
            return block + name.removeprefix(own)
    return name


def _leaves_init(rule: str) -> bool:
    """Whether a rule leaves the init of hidden matrices to the module, as SP does."""
    from mup.infshape import InfDim, InfShape

    hidden, shape = Parameter((2, 2), "hidden", 2, 2), InfShape([InfDim(1, 2), InfDim(1, 2)])
    rules = PARAMETRIZATIONS[rule].parameters
    return all(of(hidden, shape, Growth(width=2.0)).init == 1 for of in rules.values())
