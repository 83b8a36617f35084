"""μP and SP as tables: how each parameter's init, learning rate and weight decay scale with width.

Rules: Yang et al. 2022 (Tensor Programs V, arXiv:2203.03466), Tables 3 and 8. The width multiplier
m = width / base width comes from mup's shape inference (`mup.shape`, base and delta model on the meta device)
and is kept by parameter name, because attributes on tensors do not survive `.to("xla")`, deepcopy or vmap.

A parametrization is one entry of `TABLES`; adding one means adding it here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mup_tpu.errors import ConfigError

if TYPE_CHECKING:
    from mup.infshape import InfShape


@dataclass(frozen=True)
class Scaling:
    """How one parameter departs from the base model; all factors are 1 at the base width."""

    init: float = 1.0
    """× standard deviation of its init."""
    learning_rate: float = 1.0
    """× learning rate."""
    weight_decay: float = 1.0
    """× weight decay, in a rule that multiplies it by the learning rate, so that lr·λ is that of the base."""


@dataclass(frozen=True)
class ForwardScaling:
    """Factors in the forward pass, all 1 at the base width; times the alphas of `ModelConfig`."""

    attention: float = 1.0
    """× q·k/√d_head."""
    logits: float = 1.0
    """× logits."""


@dataclass(frozen=True)
class Parametrization:
    """One way of scaling with width."""

    adamw: Callable[[InfShape], Scaling]
    """Rule of Adam-type optimizers."""
    sgd: Callable[[InfShape], Scaling]
    """Rule of SGD."""
    forward: Callable[[float, float], ForwardScaling]
    """Forward factors from (width / base width, head size / base head size)."""


def _unscaled(infshape: InfShape) -> Scaling:
    return Scaling()


def _mup_adamw(infshape: InfShape) -> Scaling:
    """TP-V, Table 8, Adam rows: only matrices with two growing axes are scaled (as in mup.MuAdamW)."""
    m = infshape.width_mult()
    if infshape.ninf() == 2:
        return Scaling(init=m**-0.5, learning_rate=1 / m, weight_decay=m)
    return Scaling()  # embeddings, biases, norms, readout: one growing axis


def _mup_sgd(infshape: InfShape) -> Scaling:
    """TP-V, Table 8, SGD rows: what has one growing axis learns m times faster (as in mup.MuSGD)."""
    m = infshape.width_mult()
    if infshape.ninf() == 2:
        ratio = infshape.fanin_fanout_mult_ratio()
        return Scaling(init=m**-0.5, learning_rate=1 / ratio, weight_decay=ratio)
    return Scaling(learning_rate=m, weight_decay=1 / m)


def _mup_forward(m: float, head_ratio: float) -> ForwardScaling:
    """Logits over m (TP-V, Table 8; mup.MuReadout); attention by 1/d, not 1/√d (TP-V, Definition 4.1)."""
    return ForwardScaling(attention=head_ratio**-0.5, logits=1 / m)


TABLES: Mapping[str, Parametrization] = {
    "mup": Parametrization(adamw=_mup_adamw, sgd=_mup_sgd, forward=_mup_forward),
    "sp": Parametrization(adamw=_unscaled, sgd=_unscaled, forward=lambda m, head_ratio: ForwardScaling()),
    # Two common mistakes, here so that what they cost can be measured.
    "mup_sqrt_attention": Parametrization(
        adamw=_mup_adamw, sgd=_mup_sgd, forward=lambda m, head_ratio: ForwardScaling(logits=1 / m)
    ),
    "mup_unscaled_readout": Parametrization(
        adamw=_mup_adamw,
        sgd=_mup_sgd,
        forward=lambda m, head_ratio: ForwardScaling(attention=head_ratio**-0.5),
    ),
}

Shapes = Mapping[str, tuple[int, ...]]


def infer_infshapes(base: Shapes, delta: Shapes, target: Shapes) -> dict[str, InfShape]:
    """InfShape (mup's) of each parameter of `target`, by name.

    Args:
        base: parameter shapes at the base width.
        delta: at another width, to tell which axes grow.
        target: at the width to train.

    Raises:
        ConfigError: base and delta are the same, which would make every multiplier 1 without a word.
    """
    from mup.shape import make_base_shapes, zip_infshapes

    if {n: tuple(s) for n, s in base.items()} == {n: tuple(s) for n, s in delta.items()}:
        raise ConfigError(
            "the delta model has the base model's shapes, so no axis would grow; give it another width"
        )
    return zip_infshapes(make_base_shapes(dict(base), dict(delta)), dict(target))


def scalings(parametrization: str, optimizer: str, infshapes: Mapping[str, InfShape]) -> dict[str, Scaling]:
    """The table's row of each parameter, by name.

    Args:
        parametrization: a key of `TABLES`.
        optimizer: "adamw" or "sgd".
        infshapes: from `infer_infshapes`.
    """
    rule = getattr(TABLES[parametrization], optimizer)
    return {name: rule(infshape) for name, infshape in infshapes.items()}
