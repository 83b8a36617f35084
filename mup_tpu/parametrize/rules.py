"""Factors of a rule by parameter name, from a function that builds a module, or from a `transformers` config.

The size of an init is read exactly and without a draw: while a module is built, each random draw is replaced
by the third quartile of its distribution. Operations on single elements (scales, shifts, truncation) take
quartiles to quartiles. So the ratio of a parameter's values at two widths is the ratio of the standard
deviations for any init, with no noise from the draw.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from mup_tpu.config.values import require_above_zero, require_one_of, shown
from mup_tpu.errors import ConfigError
from mup_tpu.optimizers import update_rule_of
from mup_tpu.parametrize.module import (
    ForwardFactor,
    ModuleParametrization,
    attention_factors,
    branch_factors,
    embedding_factors,
    readout_factors,
)
from mup_tpu.parametrize.roles import (
    OPTIMIZERS,
    Build,
    blocks_of,
    build_on_meta,
    call,
    config_for,
    declared,
    is_linear,
    is_norm,
    outputs_first,
    parameters_of,
    require_roles,
    require_used,
    role_of,
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
    growth = Growth(width / base_width, depth=depth / base_depth if depth and base_depth else 1.0)
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
    shown = require_roles({name: role_of(b, axes[name], roles) for name, b in built.items()}, built, axes)
    parameters = {
        name: declared(built[name], axes[name], role, name.startswith(blocks), exponents.get(name, 0.0))
        for name, role in shown.items()
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


# Sizes of MLPs, experts, low ranks (DeepSeek, MiniCPM3) and state spaces (Falcon-H1, LFM2). Where all axes
# grow each matrix is hidden, and μP's rule for it needs nothing that is known of its layer.
_SIZES = (
    "hidden_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
    "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "mamba_d_ssm", "conv_dim", "q_lora_rank", "kv_lora_rank",
    "word_embed_proj_dim", "lru_width", "attention_hidden_size",
)  # fmt: skip
_NUMBERS = (
    "num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_heads", "mamba_n_heads",
    "mamba_num_heads", "linear_num_value_heads", "linear_num_key_heads", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class GrownModel:
    """Model of `transformers` at a width, grown from a configuration at the base width."""

    config: Any
    """Configuration at the width."""
    grown: Mapping[str, tuple[int, int]]
    """Fields of the configuration that grew, with their values at the base and at the width."""
    build: Build = field(repr=False)
    """Function that makes the plain model at any width, as `coord_check` takes it, with `roles`."""
    roles: Mapping[str, str] = field(repr=False)
    mup: ModuleParametrization = field(repr=False)

    def model(self) -> Any:
        # Fresh, with the rule's init and forward factors
        return self.mup.init_(self.build(self.mup.width))

    def __str__(self) -> str:
        grown = ", ".join(f"{name} {before} → {after}" for name, (before, after) in self.grown.items())
        return f"{grown}; heads of size {_head_size(self.config)}"


def from_config(
    config: Any,
    *,
    width: int,
    heads: Literal["number", "size"] = "number",
    model_class: Any = None,
    grow: Sequence[str] = (),
    roles: Mapping[str, str] = {},
    **options: Any,
) -> GrownModel:
    """Build a model of `transformers` at a width, grown from its configuration at the base width.

    Hidden and intermediate sizes, low ranks and state spaces grow, and heads in number or in size. All other
    fields stay; a model that does not grow whole by them is refused.

    Examples:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=8)
        >>> print(from_config(config, width=256))  # doctest: +NORMALIZE_WHITESPACE
        hidden_size 64 → 256, intermediate_size 128 → 512, num_attention_heads 4 → 16,
        num_key_value_heads 4 → 16; heads of size 16

    Args:
        config: configuration at the base width, where all factors are 1.
        width: hidden size to train at.
        heads: "number" adds heads of the base's size, "size" lets the base's number of heads grow.
        model_class: class of the model; by default a causal language model's.
        grow: further fields that grow with the width.
        roles: as in `parametrize`; here also of matrices that keep an axis, which are refused without.
        options: rule and optimizer of `parametrize`.

    Raises:
        ConfigError: a field is missing, the width is no multiple, or a matrix of a block does not grow whole.
    """
    base = getattr(config, "hidden_size", None)
    if not isinstance(base, int):
        raise ConfigError(
            f"config {shown(type(config).__name__)} has no hidden_size: give a configuration of transformers"
        )
    if missing := [name for name in grow if not isinstance(getattr(config, name, None), int)]:
        raise ConfigError(f"grow has {missing[0]!r}, which is no number of {type(config).__name__}")
    require_one_of("heads", heads, ("number", "size"))
    if getattr(config, "block_auto_adjust_ff_dim", False):  # LFM2 rounds its inner size; take the base's
        config = copy.deepcopy(config)
        inner, rounds = int(2 * config.intermediate_size / 3), config.block_ffn_dim_multiplier
        if rounds is not None:
            inner = -(-int(rounds * inner) // config.block_multiple_of) * config.block_multiple_of
        config.intermediate_size, config.block_auto_adjust_ff_dim = inner, False
    called = getattr(config, "attribute_map", {})
    numbers = [called.get(name, name) for name in _NUMBERS]
    wanted = [*(called.get(name, name) for name in _SIZES), *grow]
    wanted += numbers if heads == "number" else ["head_dim"]
    sizes = {name: size for name in wanted if isinstance(size := getattr(config, name, None), int)}
    sizes.setdefault(called.get("hidden_size", "hidden_size"), base)

    def at(width: int) -> Any:
        step = base // math.gcd(base, *sizes.values())
        if width % step:
            grow = ", ".join(sizes)
            raise ConfigError(f"width {width} is not allowed: {grow} grow, so give a multiple of {step}")
        grown = copy.deepcopy(config)
        for name, size in sizes.items():
            setattr(grown, name, size * width // base)
        return grown

    def build(width: int) -> nn.Module:
        from transformers import AutoModelForCausalLM

        made: nn.Module = (model_class or AutoModelForCausalLM.from_config)(at(width))
        for name, p in made.named_parameters():
            if name.endswith(".A_log") and p.dim() == 1 and width > base:
                # Stock state spaces start head n at decay n: heads of a wider model would forget at once.
                repeated = p.detach()[: p.numel() * base // width].repeat(-(-width // base))
                p.data.copy_(repeated[: p.numel()])
        return made

    grown = {name: (size, getattr(at(width), name)) for name, size in sizes.items()}
    experts = {getattr(config, name, None) for name in _EXPERTS}
    # The class's own factor on logits: MiniCPM3 divides by the width, T5 by its root.
    scales = []
    for of in (at(base), at(2 * base)):
        root = of.hidden_size**-0.5 if getattr(of, "scale_decoder_outputs", False) else 1.0
        scales.append(root / (getattr(of, "logits_scaling", None) or 1.0))
    if getattr(config, "model_type", "") == "recurrent_gemma":  # the factor is the model's, no embedding's
        roles = {"*.embed_tokens": "width^0.5", **roles}
    roles = {**_roles(build, base, experts, roles, math.log2(scales[1] / scales[0])), **roles}
    mup = parametrize(build, width=width, base_width=base, roles=roles, **options)
    return GrownModel(at(width), grown, build, roles, mup)


def _roles(
    build: Build, base: int, experts: Set[Any], known: Mapping[str, str], logits: float
) -> dict[str, str]:
    """Return roles that stock models show; refuse matrices of blocks that keep an axis.

    `logits` is the power of the width by which the class multiplies its logits.
    """
    small, large = (build_on_meta(build, width, None) for width in (base, 2 * base))
    before, after = parameters_of(small), parameters_of(large)
    roles: dict[str, str] = {}
    partly, smaller = [], dict(small.named_modules())
    for name, part in large.named_modules():
        scales = [1.0, 1.0]
        for i, one in enumerate((smaller.get(name), part)):
            for attribute in ("embed_scale", "scalar_embed_scale"):
                factor = getattr(one, attribute, None)
                if isinstance(one, nn.Embedding) and isinstance(factor, int | float):
                    scales[i] = factor
        power = math.log2(scales[1] / scales[0])
        if logits and part is large.get_output_embeddings():  # type: ignore[operator]
            power = logits
        if power:
            roles[name] = f"width^{round(power, 3):g}"
    for name, built in after.items():
        if name not in before or any(fnmatchcase(name, pattern) for pattern in known):
            continue
        owner = built.owners[-1]
        grows = [a != b for a, b in zip(built.shape, before[name].shape, strict=True)]
        is_layer = isinstance(owner.module, nn.Embedding) or is_linear(owner.module)
        in_block = bool(re.search(r"\.\d+\.", name))
        if "bias" in owner.attribute and built.shape[0] in experts:
            roles[name] = "bias"  # stacked experts have matrices of biases
        elif len(grows) == 1:
            if grows[0] and "bias" not in owner.attribute and not is_norm(owner.module):
                roles[name] = "bias"  # A_log and D of state spaces, and sinks, have the rate of vectors
        elif grows[-1] and all(size == 1 for size in built.shape[:-1]):
            roles[name] = "router" if is_layer else "bias"  # RWKV has vectors of the shape of a gate
        elif built.shape[0] in experts and not grows[0] and sum(grows) == 1:
            roles[name] = "router"
        elif not in_block and not is_layer and sum(grows) == 1 and grows[-1]:
            roles[name] = "position_embedding"  # such as the class token of a ViT
        elif in_block and grows == [True, False, False] and not is_layer:
            roles[name] = "token_embedding"  # blocks of one size, whose number grows (RecurrentGemma)
        elif in_block and grows[0] and sum(grows) == 1 and "bias" in owner.attribute:
            roles[name] = "bias"
        elif in_block and sum(grows) != 2 and not isinstance(owner.module, nn.Embedding):
            depthwise = isinstance(owner.module, _ConvNd) and owner.module.groups > 1
            if not depthwise:
                partly.append(f"{name!r} {tuple(before[name].shape)} → {tuple(built.shape)}")
    if any(".A_log" in name for name in partly):
        raise ConfigError(
            f"no rule is known for {partly[0]} of Mamba-1's selective state space: its products leave "
            "Tensor Programs (Vankadara et al. 2024, openreview.net/forum?id=aQv5AbN1wF); Mamba-2 has one"
        )
    if partly:
        more = f" and {len(partly) - 1} more" if len(partly) > 1 else ""
        raise ConfigError(
            f"the model does not grow whole: {partly[0]}{more} keep an axis at twice the width; add the "
            "field of the configuration that sets it, grow=[...], or give such matrices roles, such as "
            "{'*.q_a_proj.weight': 'hidden'}"
        )
    return roles


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return int(size or config.hidden_size // config.num_attention_heads)
