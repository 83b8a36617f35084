"""Parametrizations: how init, learning rate, weight decay, ε and the forward pass scale as a model grows.

A rule is a function of a parameter's declaration (`mup_tpu.models`), its growing axes (mup's shape inference,
the source of the width multiplier m = width / base width), and the trial's growth from its base along every
scale. Factors are kept by parameter name, because attributes on tensors do not survive `.to("xla")`, deepcopy
or vmap.

Sources: Yang et al. 2022 (Tensor Programs V, arXiv:2203.03466), Tables 3 and 8; Dey et al. 2025 (CompleteP,
arXiv:2505.01618), Table 1; others at their entries. `docs/rules.md` explains them all.

A parametrization is one entry of `PARAMETRIZATIONS`; adding one means adding it here and nowhere else. How
the optimizer follows batch size and tokens is chosen beside it: `mup_tpu.rules.optimizer`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from mup_tpu.errors import ConfigError

if TYPE_CHECKING:
    from mup.infshape import InfShape


Role = Literal["token_embedding", "position_embedding", "hidden", "router", "readout", "norm", "bias"]
"""Kind of a parameter: "hidden" is a matrix from activations to activations, "norm" a norm's gain, "router" a
matrix from activations to a choice among few, such as experts."""

Module = Literal["all", "embedding", "hidden", "readout", "norm"]
"""Parameters whose learning rate can have a factor apart from the others'."""

MODULES: Mapping[Module, tuple[Role, ...]] = {
    "all": get_args(Role),
    "embedding": ("token_embedding", "position_embedding"),
    "hidden": ("hidden", "router"),
    "readout": ("readout",),
    "norm": ("norm", "bias"),
}


@dataclass(frozen=True)
class Slice:
    """Part of a fused parameter, such as the queries of qkv."""

    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """One parameter of an architecture at one size."""

    shape: tuple[int, ...]  # Axes of the matrix or vector; before them, the axis of a stack of alike ones
    role: Role
    fan_in: int  # Inputs that each output sums over; 1 for vectors, which scale or shift
    fan_out: int  # Outputs; of one matrix of a stack
    in_block: bool = False  # Whether it lies in a block; the model's depth is the number of blocks
    ends_branch: bool = False  # Whether it ends a residual branch, whose factor then folds into it
    init: Literal["normal", "zeros", "ones"] = "normal"  # "normal": init_std × init_factor × the rule's
    init_factor: float = 1.0  # The architecture's own factor on the standard deviation
    init_depth_exponent: float = 0.0  # Exponent of `init_factor` in depth
    slices: Mapping[str, Slice] = field(default_factory=dict)  # Parts of a fused parameter, by name
    sliced_axis: int = -1  # Axis along which the parts lie
    active: float = 1.0  # Share of its elements that a token uses: experts a token over experts

    @property
    def decays(self) -> bool:
        return self.role not in ("norm", "bias")

    @property
    def is_embedding(self) -> bool:
        return self.role in ("token_embedding", "position_embedding")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Growth:
    """Growth of a trial from its base, a ratio for each scale; all are 1 at the base."""

    width: float = 1.0
    head_size: float = 1.0
    depth: float = 1.0
    batch_size: float = 1.0
    """Sequences a step over the base's."""
    tokens: float = 1.0
    """Training tokens over the base's."""


@dataclass(frozen=True)
class Scaling:
    """Factors of one parameter, all 1 at the base."""

    init: float = 1.0
    """× standard deviation of its init."""
    learning_rate: float = 1.0
    """× learning rate."""
    weight_decay: float = 1.0
    """× weight decay, in an update rule that multiplies it by the learning rate (coupled decay)."""
    eps: float = 1.0
    """× Adam's ε."""


@dataclass(frozen=True)
class ForwardScaling:
    """Factors in the forward pass, all 1 at the base; times the alphas of `ModelConfig`."""

    attention: float = 1.0
    """× q·k/√d_head."""
    residual: float = 1.0
    """× output of each residual branch, before it joins the stream."""
    logits: float = 1.0
    """× logits."""


Rule = Callable[[Parameter, "InfShape", Growth], Scaling]


@dataclass(frozen=True)
class Parametrization:
    """One way of scaling."""

    source: str
    """Paper and table."""
    parameters: Mapping[str, Rule]
    """Rules by the scaling name of the update rule (`UpdateRule.scaled_as`)."""
    forward: Callable[[Growth], ForwardScaling] = lambda growth: ForwardScaling()
    """Factors of the forward pass."""
    transfers: tuple[str, ...] = ()
    """Scales (fields of `Growth`) along which, by the source, the best hyperparameters stay."""
    follows: tuple[str, ...] = ("width", "head_size")
    """Scales (fields of `Growth`) that its factors depend on."""

    @property
    def is_standard(self) -> bool:
        # SP and its variants leave init and forward pass as the model has them.
        return "head_size" not in self.follows


def _unscaled(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    return Scaling()


def _mup_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """Scale matrices with two growing axes alone (TP-V, Table 8, Adam rows; as in mup.MuAdamW)."""
    if parameter.role == "router":
        return _router(infshape.width_mult())
    if infshape.ninf() == 2:
        return _hidden_adamw(infshape.width_mult())
    return Scaling()  # embeddings, biases, norms, readout: one growing axis


def _hidden_adamw(m: float) -> Scaling:
    return Scaling(init=m**-0.5, learning_rate=1 / m, weight_decay=m)


def _router(m: float) -> Scaling:
    # TP-V, Table 3, output weights, alike for Adam and SGD; the readout has logits × 1/m instead. Małaśnicki
    # et al. 2025 (arXiv:2508.09752) and Jiang et al. 2026 (arXiv:2601.20205) scale routers so.
    return Scaling(init=1 / m, learning_rate=1 / m, weight_decay=m)


def _mup_sgd(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """Let parameters with one growing axis learn m times faster (TP-V, Table 8, SGD rows; mup.MuSGD)."""
    m = infshape.width_mult()
    if parameter.role == "router":
        return _router(m)
    if infshape.ninf() == 2:
        ratio = infshape.fanin_fanout_mult_ratio()
        return Scaling(init=m**-0.5, learning_rate=1 / ratio, weight_decay=ratio)
    return Scaling(learning_rate=m, weight_decay=1 / m)


def _sp_embedding_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    m = infshape.width_mult()
    # The decay a step, lr·λ, stays the base's.
    return Scaling(learning_rate=m, weight_decay=1 / m) if parameter.is_embedding else Scaling()


def _in_blocks(rule: Rule, alpha: float) -> Rule:
    """Return a rule for width, and in blocks learning rate × m_L^(α-1) and ε × 1/(m_N·m_L^α).

    Dey et al. 2025, Table 1, for Adam. It needs steps whose size does not follow the gradient's, so it holds
    for Muon and Hyperball too: L branches, each × m_L^-α, change the stream by L·m_L^-α times one layer's
    change. Weight decay has the width's factor alone. An architecture's init factor that follows depth, as
    GPT-2's 1/√(2·layers), stays the base depth's.
    """

    def deep(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
        wide, m_L = rule(parameter, infshape, growth), growth.depth
        if not parameter.in_block:
            return wide
        return dataclasses.replace(
            wide,
            init=wide.init * m_L**-parameter.init_depth_exponent,
            learning_rate=wide.learning_rate * m_L ** (alpha - 1),
            eps=m_L**-alpha / infshape.width_mult(),
        )

    return deep


def _completedp_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """Add ε/m_N of embeddings and readout to CompleteP (Mlodozeniec et al. 2025, Table 1).

    In the paper the readout's init, learning rate and 1/λ have the factor 1/m_N, and its ε and the logits
    have none. With Adam both are the same function with the same updates; this form fits tied readouts too.
    """
    scaling = _in_blocks(_mup_adamw, 1.0)(parameter, infshape, growth)
    if parameter.is_embedding or parameter.role == "readout":
        return dataclasses.replace(scaling, eps=1 / infshape.width_mult())
    return scaling


def _umup_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """Follow Blake et al. 2024, Table 2: depth-μP (α = ½), and embeddings with learning rate × 1/√m_N.

    There all inits are 1, and forward factors are 1/√fan_in (hidden) and 1/fan_in (readout). Adam's steps do
    not follow the gradient's size, so a factor θ moves freely from the forward pass to init and learning
    rate: (A, B, C) and (A/θ, B·θ, C·θ) train the same function. Moved into the weights, what grows is here,
    and the rest is a constant of the base. Decay is independent: η·λ is the base's. ε is not scaled.
    """
    wide, m_L = _mup_adamw(parameter, infshape, growth), growth.depth
    rate = infshape.width_mult() ** -0.5 if parameter.is_embedding else wide.learning_rate
    if parameter.in_block:
        rate, init = rate * m_L**-0.5, wide.init * m_L**-parameter.init_depth_exponent
        return Scaling(init, rate, 1 / rate)
    return Scaling(wide.init, rate, 1 / rate)


def _mup_by_norm(growth_of_update: float) -> Rule:
    """Return μP's rule for matrices whose updates have a spectral norm ∝ m^growth_of_update.

    A layer's output changes by that norm times its input, at most. It must be ∝ √(out/in) (Yang et al. 2023,
    arXiv:2310.17813, Condition 1), constant if both grow, so the learning rate is × m^-growth_of_update.
    Init is Adam's, and a step's decay, η·λ, the base's.

    - Muon: 0 in "spectral"; ½ in "match_rms_adamw", whose updates are ∝ √max(out, in). Adam needs 1/m for
      entries of the same size: its updates align with their inputs in a few directions, with norm ∝ m; an
      orthogonal matrix spreads over all directions, with norm ∝ √m.
    - Hyperball: updates have Frobenius norm η·R, and R ∝ √m under this init. Adam's alignment makes that the
      spectral norm, so ½; Muon's has √m times as many directions, so 0.
    """

    def rule(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
        m = infshape.width_mult()
        if infshape.ninf() == 2:
            grown = m**growth_of_update
            return Scaling(init=m**-0.5, learning_rate=1 / grown, weight_decay=grown)
        return Scaling()

    return rule


UPDATE_GROWTH: Mapping[str, float] = {"muon": 0.0, "muon_match_rms_adamw": 0.5, "adamh": 0.5, "muonh": 0.0}
"""Power of the width multiplier by which the spectral norm of updates grows, by the update rule's scaling
name: Muon's in both of its conventions of scale, and Hyperball's."""


def _by_norm(of: Callable[[float], Rule]) -> Mapping[str, Rule]:
    return {name: of(power) for name, power in UPDATE_GROWTH.items()}


def _hyperp(rule: Rule) -> Rule:
    """Follow Ren et al. 2026, Table 1: all × 1/√m_L, hidden matrices × m_D^-0.32; × √m_B is their code's.

    Steps on a sphere need no factor for the width. Elsewhere the width's is μP's: AdamW trains the readout,
    and logits are × 1/m_N, where the authors keep the readout's norm too and scale no logits.
    """

    def scaled(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
        wide = _in_blocks(rule, 1.0)(parameter, infshape, growth)
        rate = wide.learning_rate * growth.depth**-0.5 * growth.batch_size**0.5
        if parameter.role == "hidden":
            rate *= growth.tokens**-0.32
        return dataclasses.replace(wide, learning_rate=rate, eps=1.0)

    return scaled


_SP: Mapping[str, Rule] = {"adamw": _unscaled, "sgd": _unscaled, **_by_norm(lambda _: _unscaled)}
_MUP: Mapping[str, Rule] = {"adamw": _mup_adamw, "sgd": _mup_sgd, **_by_norm(_mup_by_norm)}


def _mup_forward(growth: Growth) -> ForwardScaling:
    # TP-V, Table 8 (mup.MuReadout), and Definition 4.1: attention by 1/d, not 1/√d
    return ForwardScaling(attention=growth.head_size**-0.5, logits=1 / growth.width)


_WIDTH = ("width", "head_size")
_WITH_DEPTH = (*_WIDTH, "depth")


def _completep(alpha: float, transfers: tuple[str, ...] = _WIDTH) -> Parametrization:
    return Parametrization(
        source="Dey et al. 2025 (arXiv:2505.01618), Table 1",
        parameters={
            "adamw": _in_blocks(_mup_adamw, alpha),
            **_by_norm(lambda grown: _in_blocks(_mup_by_norm(grown), alpha)),
        },
        # Residual branches × m_L^-α.
        forward=lambda growth: dataclasses.replace(_mup_forward(growth), residual=growth.depth**-alpha),
        transfers=transfers,
        follows=_WITH_DEPTH,
    )


_COMPLETEP = _completep(1.0, _WITH_DEPTH)

PARAMETRIZATIONS: Mapping[str, Parametrization] = {
    "mup": Parametrization(
        source="Yang et al. 2022, Table 8", parameters=_MUP, forward=_mup_forward, transfers=_WIDTH
    ),
    "sp": Parametrization(source="Radford et al. 2019, section 2.3", parameters=_SP, follows=()),
    "sp_embedding": Parametrization(
        source="Kalra & Barkeshli 2026 (arXiv:2605.21486), abstract: SP, embeddings' learning rate × width",
        parameters={"adamw": _sp_embedding_adamw},
        transfers=("width",),
        follows=("width",),
    ),
    # α: exponent at which residual branches shrink with depth. The source advises 1. For comparison: 1/2 is
    # Yang et al.'s 2023 (Tensor Programs VI), and 0 leaves all to the learning rates.
    "completep": _COMPLETEP,
    "completep_half": _completep(0.5),
    "completep_zero": _completep(0.0),
    "completedp": dataclasses.replace(
        _COMPLETEP,
        source="Mlodozeniec et al. 2025 (arXiv:2512.22382), Table 1, width and depth",
        parameters={**_COMPLETEP.parameters, "adamw": _completedp_adamw},
    ),
    "umup": dataclasses.replace(
        _completep(0.5, _WITH_DEPTH),
        source="Blake et al. 2024 (arXiv:2407.17465), Table 2; factors of growth, without unit scales",
        parameters={"adamw": _umup_adamw},
    ),
    "hyperp": dataclasses.replace(
        _completep(0.5, (*_WITH_DEPTH, "batch_size", "tokens")),
        source="Ren et al. 2026 (arXiv:2603.28743), Table 1; microsoft/ArchScale, c2ec1d6, pretrain.py",
        parameters={"muonh": _hyperp(_mup_by_norm(0.0)), "adamw": _hyperp(_mup_adamw)},
        follows=(*_WITH_DEPTH, "batch_size", "tokens"),
    ),
    # Common mistakes, to measure their cost.
    "mup_sqrt_attention": Parametrization(
        source="mup, with attention by 1/√d as in SP",
        parameters=_MUP,
        forward=lambda g: ForwardScaling(logits=1 / g.width),
    ),
    "mup_unscaled_readout": Parametrization(
        source="mup, with logits as in SP",
        parameters=_MUP,
        forward=lambda g: ForwardScaling(attention=g.head_size**-0.5),
    ),
    "mup_hidden_embedding": Parametrization(
        source="mup, with embeddings scaled as hidden matrices",
        parameters={
            "adamw": lambda p, shape, growth: (
                _hidden_adamw(shape.width_mult()) if p.is_embedding else _mup_adamw(p, shape, growth)
            )
        },
        forward=_mup_forward,
    ),
    "mup_lost_multipliers": Parametrization(
        source="mup, with the learning rates of SP",
        parameters={"adamw": lambda p, shape, growth: Scaling(init=_mup_adamw(p, shape, growth).init)},
        forward=_mup_forward,
    ),
}

Shapes = Mapping[str, tuple[int, ...]]


def infer_infshapes(base: Shapes, delta: Shapes, target: Shapes) -> dict[str, InfShape]:
    """Return the InfShape (mup's) of each parameter of `target`, by name.

    Args:
        base: parameter shapes at the base width.
        delta: at another width, to tell which axes grow.
        target: at the width to train.

    Raises:
        ConfigError: base and delta are the same: every multiplier would be 1, silently.
    """
    from mup.shape import make_base_shapes, zip_infshapes

    if {n: tuple(s) for n, s in base.items()} == {n: tuple(s) for n, s in delta.items()}:
        raise ConfigError(
            "the delta model has the base model's shapes, so no axis would grow; give it another width"
        )
    infshapes: dict[str, InfShape] = zip_infshapes(make_base_shapes(dict(base), dict(delta)), dict(target))
    return infshapes


def scaling(
    parametrization: str, update_rule: str, parameter: Parameter, infshape: InfShape, growth: Growth
) -> Scaling:
    """Return the factors of one parameter.

    Args:
        parametrization: a key of `PARAMETRIZATIONS`.
        update_rule: scaling name of the update rule (`UpdateRule.scaled_as`).
        parameter: its declaration.
        infshape: from `infer_infshapes`.
        growth: the trial's.
    """
    require_rule(parametrization, update_rule)
    return PARAMETRIZATIONS[parametrization].parameters[update_rule](parameter, infshape, growth)


def require_rule(parametrization: str, update_rule: str) -> None:
    """Check that a parametrization has factors for an update rule."""
    rules = PARAMETRIZATIONS[parametrization].parameters
    if update_rule not in rules:
        raise ConfigError(
            f"parametrization {parametrization!r} has no rule for optimizer {update_rule!r}; "
            f"it has them for {', '.join(rules)}"
        )
