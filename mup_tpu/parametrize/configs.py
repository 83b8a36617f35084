"""Models of `transformers` of any width, from one configuration."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd

from mup_tpu.config.fields import require_one_of
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.module import ModuleParametrization
from mup_tpu.parametrize.roles import Build, build_on_meta, is_linear, is_norm, parameters_of
from mup_tpu.parametrize.rules import parametrize

# Sizes of MLPs, experts, low ranks (DeepSeek, MiniCPM3) and state spaces (Falcon-H1, LFM2). Where all axes
# grow each matrix is hidden, and μP's rule for it needs nothing that is known of its layer.
_SIZES = (
    "hidden_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "mamba_d_ssm", "conv_dim",
    "q_lora_rank", "kv_lora_rank",
)  # fmt: skip
_NUMBERS = (
    "num_attention_heads", "num_key_value_heads", "num_heads", "mamba_n_heads", "mamba_num_heads",
    "linear_num_value_heads", "linear_num_key_heads", "encoder_attention_heads", "decoder_attention_heads",
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
    if getattr(config, "block_auto_adjust_ff_dim", False):  # LFM2 rounds its inner size: as it is at the base
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
    partly = []
    for name, part in large.named_modules():
        scales = [_embedding_scale(of) for of in (small.get_submodule(name), part)]
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
        is_layer = isinstance(owner.module, nn.Linear | nn.Embedding | _ConvNd) or is_linear(owner.module)
        in_block = bool(re.search(r"\.\d+\.", name))
        if "bias" in owner.attribute and built.shape[0] in experts:
            roles[name] = "bias"  # of stacked experts
        elif len(grows) == 1:
            if grows[0] and "bias" not in owner.attribute and not is_norm(owner.module):
                roles[name] = "bias"  # as A_log and D of state spaces, and sinks: η as of all vectors
        elif built.shape[0] in experts and not grows[0] and sum(grows) == 1:
            roles[name] = "router"
        elif not in_block and not is_layer and sum(grows) == 1 and grows[-1]:
            roles[name] = "position_embedding"  # as the class token of a ViT
        elif in_block and sum(grows) != 2 and not isinstance(owner.module, nn.Embedding):
            depthwise = isinstance(owner.module, _ConvNd) and owner.module.groups > 1
            if not depthwise:
                partly.append(f"{name!r} {tuple(before[name].shape)} → {tuple(built.shape)}")
    if partly:
        more = f" and {len(partly) - 1} more" if len(partly) > 1 else ""
        raise ConfigError(
            f"the model does not grow whole: {partly[0]}{more} keep an axis at twice the width; add the "
            "field of the configuration that sets it, grow=[...], or give such matrices roles, such as "
            "{'*.q_a_proj.weight': 'hidden'}"
        )
    return roles


def _embedding_scale(module: nn.Module) -> float:
    values = (getattr(module, name, None) for name in ("scalar_embed_scale", "embed_scale"))
    scale = next((value for value in values if isinstance(value, int | float)), 1.0)
    return scale if isinstance(module, nn.Embedding) else 1.0


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return int(size or config.hidden_size // config.num_attention_heads)
