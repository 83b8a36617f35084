"""From a function that builds a module to the factors of a rule, by parameter name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mup_tpu.config import OptimizerConfig
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers import update_rule_of
from mup_tpu.parametrize.forward import attention_factors, branch_factors, readout_factors
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
    """Work out a rule's factors for every parameter of a module.

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
        build: makes the module: build(width), or build(width, depth) where depth is given. It is called on
            the meta device for shapes, and by `init_` on the CPU for the size of the init.
        width: to train at; in any unit that build takes.
        base_width: at which hyperparameters were tuned, and all factors are 1.
        depth: blocks, to train with; they are members of nn.ModuleLists or nn.Sequentials.
        base_depth: blocks at which hyperparameters were tuned.
        rule: key of `mup_tpu.rules.parametrization.PARAMETRIZATIONS` (docs/rules.md).
        optimizer: update rule, "adamw" (and whatever divides by the gradient's size) or "sgd".
        roles: of parameters whose role cannot be told, by name or pattern: {"layers.*.gamma": "norm"}.
        branches: patterns of the submodules that end a residual branch, for rules with a factor on these.
        by_hand: patterns of the submodules whose forward factor you apply in your own code.
        delta_width: another width, to tell which axes grow; twice the base width by default.

    Raises:
        ConfigError: build fails, parameters change names with width, no axis grows, a role cannot be told, a
            forward factor cannot be applied, or the rule has none for the optimizer.
    """
    if optimizer not in _OPTIMIZERS:
        raise ConfigError(
            f"optimizer {optimizer!r} is not one of {', '.join(_OPTIMIZERS)}: the groups are those of one "
            "optimizer of torch"
        )
    _require_sizes(rule, width, base_width, depth, base_depth)
    delta_width = 2 * base_width if delta_width is None else delta_width
    base, delta, target = (build_on_meta(build, w, depth) for w in (base_width, delta_width, width))
    found = parameters_of(target)
    require_used(roles, found)
    axes = _axes(found, parameters_of(base), parameters_of(delta), base_width, delta_width, width)
    growth = Growth(width=width / base_width)
    blocks: tuple[str, ...] = ()
    exponents: dict[str, float] = {}
    if depth is not None and base_depth is not None:
        growth = dataclasses.replace(growth, depth=depth / base_depth)
        blocks = blocks_of(target, build_on_meta(build, width, 2 * depth))
        if growth.depth != 1:
            exponents = _init_depth_exponents(build, base_width, depth, base_depth, tuple(found), blocks)
    parameters = {
        name: declared(f, axes[name], roles, name.startswith(blocks), exponents.get(name, 0.0))
        for name, f in found.items()
    }
    axes = {
        name: _as_hidden(shape) if _said_hidden(parameters[name], shape) else shape
        for name, shape in axes.items()
    }
    config = OptimizerConfig(optimizer=optimizer)  # type: ignore[arg-type]
    scalings = {
        name: scaling(rule, update_rule_of(config, p).scaled_as(config), p, axes[name], growth)
        for name, p in parameters.items()
    }
    multipliers = {name: float(shape.width_mult()) for name, shape in axes.items()}
    forward = PARAMETRIZATIONS[rule].forward
    logits = {name: forward(Growth(width=m, depth=growth.depth)).logits for name, m in multipliers.items()}
    factors = (
        *attention_factors(base, target, lambda grown: forward(Growth(head_size=grown)), by_hand),
        *branch_factors(target, branches, forward(growth).residual, rule),
        *readout_factors(found, parameters, logits, by_hand),
    )
    ratios = functools.partial(_init_ratios, build, width, base_width, depth, scalings, rule)
    return ModuleParametrization(rule, optimizer, width, parameters, multipliers, scalings, factors, ratios)


def _require_sizes(rule: str, width: int, base_width: int, depth: int | None, base_depth: int | None) -> None:
    if rule not in PARAMETRIZATIONS:
        raise ConfigError(f"rule {rule!r} is not one of {', '.join(PARAMETRIZATIONS)}")
    if (depth is None) != (base_depth is None):
        raise ConfigError("depth and base_depth go together: give both, or none to leave depth as it is")
    if depth is None and "depth" in PARAMETRIZATIONS[rule].follows:
        raise ConfigError(f"rule {rule!r} follows depth: give depth and base_depth, and build(width, depth)")
    sizes = {"width": width, "base_width": base_width, "depth": depth, "base_depth": base_depth}
    for name, size in sizes.items():
        if size is not None and size <= 0:
            raise ConfigError(f"{name} {size} is not allowed: it must be above 0")


def _axes(
    target: Mapping[str, Found],
    base: Mapping[str, Found],
    delta: Mapping[str, Found],
    base_width: int,
    delta_width: int,
    width: int,
) -> dict[str, InfShape]:
    """Which axes of each parameter grow, outputs first, by mup's shape inference."""
    for other, at in ((base, base_width), (delta, delta_width)):
        if target.keys() != other.keys():
            name = sorted(target.keys() ^ other.keys())[0]
            there, missing = (width, at) if name in target else (at, width)
            raise ConfigError(
                f"parameter {name!r} is there at width {there}, but not at {missing}; the names of "
                "parameters must not change with width"
            )
    shapes = [{n: outputs_first(target[n], f.shape) for n, f in of.items()} for of in (base, delta, target)]
    if shapes[0] == shapes[1]:
        raise ConfigError(
            f"build({base_width}) and build({delta_width}) make parameters of the same shapes, so no axis "
            "would grow; build must make its module as wide as it is told, and delta_width differ from "
            "base_width"
        )
    axes = infer_infshapes(*shapes)
    for name, shape in axes.items():
        for i, dim in enumerate(shape):
            before = shapes[0][name][i]
            if not dim.isinf() and dim.dim != before:
                raise ConfigError(
                    f"parameter {name!r} has an axis of {before} at widths {base_width} and {delta_width}, "
                    f"but {dim.dim} at {width}; give a delta_width at which that axis has grown"
                )
    return axes


def _said_hidden(parameter: Parameter, axes: InfShape) -> bool:
    """Whether only the inputs of a matrix grow, as of a readout, and the user says that it is hidden."""
    return parameter.role == "hidden" and axes.ninf() == 1 and len(axes) >= 2 and axes[1].isinf()


def _as_hidden(axes: InfShape) -> InfShape:
    """The same with outputs that count as growing, by a factor of 1, so that rules see a hidden matrix."""
    from mup.infshape import InfDim, InfShape

    return InfShape([InfDim(axes[0].dim, axes[0].dim), *axes[1:]])


def _init_depth_exponents(
    build: Build, width: int, depth: int, base_depth: int, names: Sequence[str], blocks: Sequence[str]
) -> dict[str, float]:
    """The power of depth that the init of each parameter in a block follows, from two depths of one width."""
    deep, shallow = init_sizes(build, width, depth), init_sizes(build, width, base_depth)
    exponents = {}
    for name in names:
        if not name.startswith(tuple(blocks)) or not deep[name]:
            continue
        if before := shallow.get(_in_base(name, blocks, shallow)):
            exponents[name] = round(math.log(deep[name] / before) / math.log(depth / base_depth), 5)
    return exponents


def _in_base(name: str, blocks: Sequence[str], shallow: Mapping[str, float]) -> str:
    """The same parameter of the last block that the base has, where it has not that block."""
    own = next(block for block in blocks if name.startswith(block))
    listed = own.rstrip(".").rpartition(".")[0]
    for block in [own, *reversed([b for b in blocks if b.rstrip(".").rpartition(".")[0] == listed])]:
        if block + name.removeprefix(own) in shallow:
            return block + name.removeprefix(own)
    return name


def _init_ratios(
    build: Build, width: int, base_width: int, depth: int | None, scalings: Mapping[str, Scaling], rule: str
) -> dict[str, float]:
    """Factor on what build draws at the width to train, that makes it the base's times the rule's."""
    if width == base_width and all(s.init == 1 for s in scalings.values()) or _leaves_init(rule):
        return dict.fromkeys(scalings, 1.0)
    base, own = init_sizes(build, base_width, depth), init_sizes(build, width, depth)
    ratios = {}
    for name, factors in scalings.items():
        ratio = factors.init * base[name] / own[name] if own[name] else 1.0
        ratios[name] = 1.0 if abs(ratio - 1) < 1e-5 else ratio  # rounding of float32
    return ratios


def _leaves_init(rule: str) -> bool:
    """Whether a rule has no factor on the init of hidden matrices: as in SP, the init is the module's own."""
    from mup.infshape import InfDim, InfShape

    hidden, shape = Parameter((2, 2), "hidden", 2, 2), InfShape([InfDim(1, 2), InfDim(1, 2)])
    rules = PARAMETRIZATIONS[rule].parameters
    return all(of(hidden, shape, Growth(width=2.0)).init == 1 for of in rules.values())
