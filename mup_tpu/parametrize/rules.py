"""Factors of a rule by parameter name, derived from a function that builds a module.

The size of an init is read exactly and without a draw: while a module is built, each random draw is replaced
by the third quartile of its distribution. Operations on single elements (scales, shifts, truncation) take
quartiles to quartiles. So the ratio of a parameter's values at two widths is the ratio of the standard
deviations for any init, with no noise from the draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mup_tpu.config.fields import require_above_zero, require_one_of
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers import update_rule_of
from mup_tpu.parametrize.forward import (
    ForwardFactor,
    attention_factors,
    branch_factors,
    embedding_factors,
    readout_factors,
)
from mup_tpu.parametrize.module import ModuleParametrization
from mup_tpu.parametrize.roles import (
    OPTIMIZERS,
    Build,
    blocks_of,
    build_on_meta,
    call,
    config_for,
    declared,
    outputs_first,
    parameters_of,
    require_used,
)
from mup_tpu.rules.parametrization import (
    PARAMETRIZATIONS,
    ForwardScaling,
    Growth,
    Scaling,
    infer_infshapes,
    scaling,
)

if TYPE_CHECKING:
    from mup.infshape import InfShape

_NORMAL = 0.6744897501960817  # third quartile of the standard normal distribution


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
) -> ModuleParametrization:
    """Derive the factors of a rule for every parameter of a module.

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
            on the meta device for shapes, and by `init_` on the CPU for the size of the init. Axes that
            differ between the base width and twice the base width grow.
        width: width to train at, in any unit that build takes.
        base_width: width of the tuning; there all factors are 1.
        depth: number of blocks to train with, members of nn.ModuleLists or nn.Sequentials.
        base_depth: number of blocks of the tuning.
        rule: key of `mup_tpu.rules.parametrization.PARAMETRIZATIONS` (docs/rules.md).
        optimizer: "adamw", "adam", "lion", "sgd", or "muon" for matrices with AdamW for the rest;
            "muon_match_rms_adamw" is torch.optim.Muon's other adjust_lr_fn.
        roles: facts that the module does not show, by name or pattern. Of a parameter its role,
            {"layers.*.gamma": "norm"}. Of a submodule "branch" if it ends a residual branch, for rules with
            a factor on branches; "by hand" if your own code applies its forward factor; "width^0.5" if its
            class multiplies it by that power of the width, as Gemma its embedding, which is taken out again.

    Raises:
        ConfigError: build fails, parameters change names with width, no axis grows, a role is not known, a
            forward factor cannot be applied, or the rule has no factors for the optimizer.
    """
    from mup.infshape import InfDim, InfShape

    growth = _growth(width, base_width, depth, base_depth, rule, optimizer)
    base, twice, target = (build_on_meta(build, w, depth) for w in (base_width, 2 * base_width, width))
    built = parameters_of(target)
    require_used(roles, target, built)
    axes = _axes({base_width: base, 2 * base_width: twice, width: target}, base_width, width)

    blocks: tuple[str, ...] = ()
    exponents: dict[str, float] = {}
    if depth is not None:
        blocks = blocks_of(target, build_on_meta(build, width, 2 * depth))
        if growth.depth != 1:
            deep, shallow = (init_sizes(build, base_width, d) for d in (depth, base_depth))
            exponents = _init_depth_exponents(blocks, deep, shallow, growth.depth)
    parameters = {
        name: declared(b, axes[name], roles, name.startswith(blocks), exponents.get(name, 0.0))
        for name, b in built.items()
    }
    for name, shape in axes.items():
        # Growing inputs only, as a readout has, but hidden by the caller's roles.
        is_hidden = parameters[name].role == "hidden" and len(shape) >= 2
        if is_hidden and shape.ninf() == 1 and shape[1].isinf():
            # Outputs that count as growing by a factor of 1, so that rules see a hidden matrix
            axes[name] = InfShape([InfDim(shape[0].dim, shape[0].dim), *shape[1:]])
    multipliers = {name: float(shape.width_mult()) for name, shape in axes.items()}
    scalings = {}
    for name, p in parameters.items():
        config = config_for(optimizer, p)
        scalings[name] = scaling(rule, update_rule_of(config, p).scaled_as(config), p, axes[name], growth)

    of_rule = PARAMETRIZATIONS[rule]
    forward: Callable[[Growth], ForwardScaling] = of_rule.forward
    logits = {name: forward(Growth(width=m, depth=growth.depth)).logits for name, m in multipliers.items()}
    factors: tuple[ForwardFactor, ...] = (
        *attention_factors(base, target, lambda grown: forward(Growth(head_size=grown)), roles),
        *branch_factors(target, forward(growth).residual, rule, roles),
        *readout_factors(built, parameters, logits, growth.width, roles),
        *(() if of_rule.is_standard else embedding_factors(built, parameters, growth.width, roles)),
    )
    ratios = functools.partial(_init_ratios, build, width, base_width, depth, rule, scalings)
    return ModuleParametrization(rule, optimizer, width, parameters, multipliers, scalings, factors, ratios)


def _growth(
    width: int, base_width: int, depth: int | None, base_depth: int | None, rule: str, optimizer: str
) -> Growth:
    """Check the arguments of `parametrize`, and return the growth from the base."""
    if (depth is None) != (base_depth is None):
        raise ConfigError("depth and base_depth go together: give both, or none to leave depth as it is")
    sizes = {"width": width, "base_width": base_width, "depth": depth, "base_depth": base_depth}
    for name, size in sizes.items():
        if size is not None:
            require_above_zero(name, size)
    require_one_of("optimizer", optimizer, tuple(OPTIMIZERS))
    require_one_of("rule", rule, tuple(PARAMETRIZATIONS))
    if depth is None and "depth" in PARAMETRIZATIONS[rule].follows:
        raise ConfigError(f"rule {rule!r} follows depth: give depth and base_depth, and build(width, depth)")
    return Growth(width / base_width, depth=depth / base_depth if depth and base_depth else 1.0)


def _axes(modules: Mapping[int, nn.Module], base_width: int, width: int) -> dict[str, InfShape]:
    """Infer by mup the axes of each parameter, outputs first, and which of them grow."""
    built = {at: parameters_of(module) for at, module in modules.items()}
    for at, other in built.items():
        if other.keys() != built[width].keys():
            name = sorted(other.keys() ^ built[width].keys())[0]
            present, missing = (width, at) if name in built[width] else (at, width)
            raise ConfigError(
                f"parameter {name!r} exists at width {present}, but not at {missing}; the names of "
                "parameters must not change with width"
            )
    shapes = [
        {name: outputs_first(built[width][name], b.shape) for name, b in built[at].items()}
        for at in (base_width, 2 * base_width, width)
    ]
    if shapes[0] == shapes[1]:
        raise ConfigError(
            f"build({base_width}) and build({2 * base_width}) make parameters of the same shapes, so no axis "
            "would grow; build must make its module at the width that it is given"
        )
    axes = infer_infshapes(*shapes)
    for name, shape in axes.items():
        for dim, before in zip(shape, shapes[0][name], strict=True):
            if not dim.isinf() and dim.dim != before:
                raise ConfigError(
                    f"parameter {name!r} has an axis of {before} at widths {base_width} and "
                    f"{2 * base_width}, but {dim.dim} at {width}; give a base_width from which that axis "
                    "grows with every width"
                )
    return axes


def _init_depth_exponents(
    blocks: tuple[str, ...], deep: Mapping[str, float], shallow: Mapping[str, float], growth: float
) -> dict[str, float]:
    """Return the power of depth in the init of each parameter of a block, from sizes at both depths."""
    exponents = {}
    for name, size in deep.items():
        of = next((block for block in blocks if name.startswith(block)), "")
        # A block that the base lacks is compared with the base's last.
        parent = of.rstrip(".").rpartition(".")[0]
        alike = [of, *reversed([b for b in blocks if b.rstrip(".").rpartition(".")[0] == parent])]
        before = next((shallow[n] for b in alike if (n := b + name.removeprefix(of)) in shallow), None)
        if of and size and before:
            exponents[name] = round(math.log(size / before) / math.log(growth), 5)
    return exponents


def _init_ratios(
    build: Build, width: int, base_width: int, depth: int | None, rule: str, scalings: Mapping[str, Scaling]
) -> dict[str, float]:
    """Return the factor on each weight from build: the rule's × size at the base / size at the width."""
    is_base = width == base_width and all(s.init == 1 for s in scalings.values())
    if is_base or PARAMETRIZATIONS[rule].is_standard:
        return dict.fromkeys(scalings, 1.0)
    base, target = (init_sizes(build, w, depth) for w in (base_width, width))
    ratios = {}
    for name, factors in scalings.items():
        ratio = factors.init * base[name] / target[name] if target[name] else 1.0
        ratios[name] = 1.0 if abs(ratio - 1) < 1e-5 else ratio  # rounding of float32
    return ratios


_aten = torch.ops.aten
# In-place draws: default arguments, and the third quartile as a function of the arguments.
_DRAWS: Mapping[Any, tuple[tuple[float, float], Callable[[float, float], float]]] = {
    _aten.normal_.default: ((0.0, 1.0), lambda mean, std: mean + _NORMAL * std),
    _aten.uniform_.default: ((0.0, 1.0), lambda low, high: low + 0.75 * (high - low)),
}


class _Quartiles(TorchDispatchMode):
    """Puts third quartiles in place of draws."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DRAWS:  # arguments that are missing are at their defaults
            default, quartile = _DRAWS[func]
            return args[0].fill_(quartile(*args[1:], *default[len(args) - 1 :]))
        drawn = func(*args, **(kwargs or {}))
        if func.overloadpacket in (_aten.randn, _aten.randn_like):
            drawn.fill_(_NORMAL)
        elif func.overloadpacket in (_aten.rand, _aten.rand_like):
            drawn.fill_(0.75)
        return drawn


@torch.no_grad()
def init_sizes(build: Build, width: int, depth: int | None) -> dict[str, float]:
    """Return the size of each parameter's init at one size of the module; only ratios have a meaning.

    An init that mixes elements, such as an orthogonal one, is drawn once; its root mean square is taken.
    """
    with torch.random.fork_rng(devices=[]), _Quartiles(), torch.enable_grad():
        module = call(build, width, depth)
    sizes = {name: _quartile(parameter) for name, parameter in module.named_parameters()}
    if None in sizes.values():
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            module = call(build, width, depth)
        for name, parameter in module.named_parameters():
            # A vector of several values, as the decays of a state space, is no draw: the rule leaves it.
            if sizes[name] is None and parameter.dim() > 1:
                sizes[name] = float(parameter.double().square().mean().sqrt())
    return {name: size or 0.0 for name, size in sizes.items()}


def _quartile(parameter: torch.Tensor) -> float | None:
    """Return the value of most elements, without rows that stay 0, as for padding; None if they differ."""
    if not parameter.numel():
        return 0.0
    values = parameter.abs().flatten()
    quartile = values.median()
    alike = bool((values == quartile).double().mean() >= 0.5)
    is_zero_vector = parameter.dim() < 2 and not values.any()
    return float(quartile) if alike and (quartile > 0 or is_zero_vector) else None
