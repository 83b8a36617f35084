"""Parametrizations: how init, learning rate, weight decay, ε and the forward pass scale as a model grows.

A rule is a function of what a parameter is (its declaration, `mup_tpu.models`), of its growing axes (mup's
shape inference, the source of the width multiplier m = width / base width) and of how far the trial has grown
from its base along every scale. Factors are kept by parameter name, because attributes on tensors do not
survive `.to("xla")`, deepcopy or vmap.

Sources: Yang et al. 2022 (Tensor Programs V, arXiv:2203.03466), Tables 3 and 8; Dey et al. 2025 (CompleteP,
arXiv:2505.01618), Table 1; others at their entries. `docs/rules.md` explains them all.

A parametrization is one entry of `PARAMETRIZATIONS`; adding one means adding it here and nowhere else. How
the optimizer follows batch size and tokens is chosen beside it: `mup_tpu.rules.optimizer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mup_tpu.errors import ConfigError
from mup_tpu.rules.parameter import Parameter

if TYPE_CHECKING:
    from mup.infshape import InfShape


@dataclass(frozen=True)
class Growth:
    """How far a trial has grown from its base, a ratio for each scale; all are 1 at the base."""

    width: float = 1.0
    head_size: float = 1.0
    depth: float = 1.0
    batch_size: float = 1.0
    """Sequences a step over the base's."""
    tokens: float = 1.0
    """Training tokens over the base's."""


@dataclass(frozen=True)
class Scaling:
    """How one parameter departs from the base model; all factors are 1 at the base."""

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

    embeddings: float = 1.0
    """× sum of the embeddings."""
    attention: float = 1.0
    """× q·k/√d_head."""
    residual: float = 1.0
    """× output of each residual branch, before it joins the stream."""
    logits: float = 1.0
    """× logits."""


@dataclass(frozen=True)
class MomentScaling:
    """Factors on the decay of an update rule's running averages; both are 1 at the base."""

    beta1: float = 1.0
    """× (1 - β₁)."""
    beta2: float = 1.0
    """× (1 - β₂)."""


Rule = Callable[[Parameter, "InfShape", Growth], Scaling]


@dataclass(frozen=True)
class Parametrization:
    """One way of scaling."""

    source: str
    """Paper and table."""
    parameters: Mapping[str, Rule]
    """Factors of a parameter, by what the update rule that trains it is scaled as: its name, or one of
    several where a field of its changes how its updates grow with width."""
    forward: Callable[[Growth], ForwardScaling] = lambda growth: ForwardScaling()
    """Factors of the forward pass."""
    moments: Callable[[Growth], MomentScaling] = lambda growth: MomentScaling()
    """Factors of the update rule's own constants."""
    transfers: tuple[str, ...] = ()
    """Scales (fields of `Growth`) along which the source says that the best hyperparameters stay."""
    follows: tuple[str, ...] = ("width", "head_size")
    """Scales (fields of `Growth`) that its factors depend on."""


def _unscaled(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    return Scaling()


def _mup_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """TP-V, Table 8, Adam rows: only matrices with two growing axes are scaled (as in mup.MuAdamW)."""
    if infshape.ninf() == 2:
        return _hidden_adamw(infshape.width_mult())
    return Scaling()  # embeddings, biases, norms, readout: one growing axis


def _hidden_adamw(m: float) -> Scaling:
    """What μP gives a matrix both of whose axes grew to m times the base's."""
    return Scaling(init=m**-0.5, learning_rate=1 / m, weight_decay=m)


def _mup_sgd(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """TP-V, Table 8, SGD rows: what has one growing axis learns m times faster (as in mup.MuSGD)."""
    m = infshape.width_mult()
    if infshape.ninf() == 2:
        ratio = infshape.fanin_fanout_mult_ratio()
        return Scaling(init=m**-0.5, learning_rate=1 / ratio, weight_decay=ratio)
    return Scaling(learning_rate=m, weight_decay=1 / m)


def _sp_embedding_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """SP but for embeddings, which learn m times faster; their decay a step, lr·λ, stays the base's."""
    m = infshape.width_mult()
    return Scaling(learning_rate=m, weight_decay=1 / m) if parameter.is_embedding else Scaling()


def _hidden_embedding_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """μP but for embeddings, a tied readout with them, which are scaled as if both of their axes grew."""
    if parameter.is_embedding:
        return _hidden_adamw(infshape.width_mult())
    return _mup_adamw(parameter, infshape, growth)


def _lost_multipliers_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """μP's init, and SP's learning rates: what an optimizer gives a copy that lost its growing axes."""
    return Scaling(init=_mup_adamw(parameter, infshape, growth).init)


def _completep_adamw(alpha: float) -> Rule:
    """Dey et al. 2025, Table 1: μP, and in blocks learning rate × m_L^(α-1) and ε × 1/(m_N·m_L^α).

    An init factor that the architecture lets follow depth, as GPT-2's 1/√(2·layers), stays the base depth's.
    """

    def rule(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
        mup, m_N, m_L = _mup_adamw(parameter, infshape, growth), infshape.width_mult(), growth.depth
        if not parameter.in_block:
            return mup
        return dataclasses.replace(
            mup,
            init=mup.init * m_L**-parameter.init_depth_exponent,
            learning_rate=mup.learning_rate * m_L ** (alpha - 1),
            eps=m_L**-alpha / m_N,
        )

    return rule


def _completedp_adamw(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
    """Mlodozeniec et al. 2025, Table 1: CompleteP, with ε/m_N of embeddings and readout as well.

    There the logits have no factor 1/m_N; the readout's init, learning rate and 1/λ have it instead, and its
    ε has none. With Adam that is the same function of the same updates, and ours holds where readout and
    embedding are one matrix too.
    """
    scaling = _completep_adamw(1.0)(parameter, infshape, growth)
    if parameter.is_embedding or parameter.role == "readout":
        return dataclasses.replace(scaling, eps=1 / infshape.width_mult())
    return scaling


def _mup_muon(growth_of_update: float) -> Rule:
    """μP of a hidden matrix whose update is orthogonal, times m^growth_of_update as it grows by m both ways.

    A layer's output changes by at most the update's spectral norm times its input, and by as much: an
    orthogonal matrix keeps the norm of all in its row space, where the inputs lie that it was made from. So
    the norm must be ∝ √(out/in) (Yang et al. 2023, arXiv:2310.17813, Condition 1), which stays where both
    grow, and the learning rate be × m^-growth_of_update: no factor for "spectral", 1/√m for
    "match_rms_adamw", whose updates are ∝ √max(out, in). That is not Adam's 1/m for entries of the same size:
    Adam's line up with their inputs in a few directions, so that their norm is ∝ m; those of an orthogonal
    matrix share its norm out over all directions, and it is ∝ √m. Init is as with Adam, and a step's decay,
    η·λ, stays the base's.
    """

    def rule(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
        m = infshape.width_mult()
        if infshape.ninf() == 2:
            grown = m**growth_of_update
            return Scaling(init=m**-0.5, learning_rate=1 / grown, weight_decay=grown)
        return Scaling()

    return rule


def _completep_muon(alpha: float, growth_of_update: float) -> Rule:
    """μP's, and in blocks learning rate × m_L^(α-1), which with α = 1 is no factor.

    Dey et al. 2025, Table 1, has it for Adam; that a step's size does not follow the gradient's is all that
    it needs: L branches, each × m_L^-α, change the stream by L·m_L^-α times what one layer changes. Weight
    decay has the width's factor alone, as there; ε is none of Muon's.
    """

    def rule(parameter: Parameter, infshape: InfShape, growth: Growth) -> Scaling:
        mup = _mup_muon(growth_of_update)(parameter, infshape, growth)
        if not parameter.in_block:
            return mup
        return dataclasses.replace(
            mup,
            init=mup.init * growth.depth**-parameter.init_depth_exponent,
            learning_rate=mup.learning_rate * growth.depth ** (alpha - 1),
        )

    return rule


def _with_muon(rules: Mapping[str, Rule], of: Callable[[float], Rule]) -> Mapping[str, Rule]:
    """Rules of parameters, and those for Muon in both conventions of scale, by how its updates grow."""
    return {**rules, "muon": of(0.0), "muon_match_rms_adamw": of(0.5)}


_SP: Mapping[str, Rule] = _with_muon({"adamw": _unscaled, "sgd": _unscaled}, lambda _: _unscaled)
_MUP: Mapping[str, Rule] = _with_muon({"adamw": _mup_adamw, "sgd": _mup_sgd}, _mup_muon)


def _mup_forward(growth: Growth) -> ForwardScaling:
    """Logits over m (TP-V, Table 8; mup.MuReadout); attention by 1/d, not 1/√d (Definition 4.1)."""
    return ForwardScaling(attention=growth.head_size**-0.5, logits=1 / growth.width)


def _completep_forward(alpha: float) -> Callable[[Growth], ForwardScaling]:
    """μP's, and residual branches × m_L^-α."""
    return lambda growth: dataclasses.replace(_mup_forward(growth), residual=growth.depth**-alpha)


def _completep(alpha: float, transfers: tuple[str, ...] = ("width", "head_size")) -> Parametrization:
    return Parametrization(
        source="Dey et al. 2025 (arXiv:2505.01618), Table 1",
        parameters=_with_muon(
            {"adamw": _completep_adamw(alpha)}, lambda grown: _completep_muon(alpha, grown)
        ),
        forward=_completep_forward(alpha),
        transfers=transfers,
        follows=("width", "head_size", "depth"),
    )


PARAMETRIZATIONS: Mapping[str, Parametrization] = {
    "mup": Parametrization(
        source="Yang et al. 2022, Table 8",
        parameters=_MUP,
        forward=_mup_forward,
        transfers=("width", "head_size"),
    ),
    "sp": Parametrization(source="Radford et al. 2019, section 2.3", parameters=_SP, follows=()),
    "sp_embedding": Parametrization(
        source="Kalra & Barkeshli 2026 (arXiv:2605.21486), abstract: SP, embeddings' learning rate × width",
        parameters={"adamw": _sp_embedding_adamw},
        transfers=("width",),
        follows=("width",),
    ),
    # α is how fast residual branches shrink with depth. Its source advises 1; 1/2 is Yang et al.'s 2023
    # (Tensor Programs VI) and 0 gives all to the learning rates, both here to be compared.
    "completep": _completep(1.0, transfers=("width", "head_size", "depth")),
    "completep_half": _completep(0.5),
    "completep_zero": _completep(0.0),
    "completedp": Parametrization(
        source="Mlodozeniec et al. 2025 (arXiv:2512.22382), Table 1, width and depth",
        parameters=_with_muon({"adamw": _completedp_adamw}, lambda grown: _completep_muon(1.0, grown)),
        forward=_completep_forward(1.0),
        transfers=("width", "head_size", "depth"),
        follows=("width", "head_size", "depth"),
    ),
    # Common mistakes, here so that what they cost can be measured.
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
        parameters={"adamw": _hidden_embedding_adamw},
        forward=_mup_forward,
    ),
    "mup_lost_multipliers": Parametrization(
        source="mup, with the learning rates of SP",
        parameters={"adamw": _lost_multipliers_adamw},
        forward=_mup_forward,
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
    infshapes: dict[str, InfShape] = zip_infshapes(make_base_shapes(dict(base), dict(delta)), dict(target))
    return infshapes


def scaling(
    parametrization: str, update_rule: str, parameter: Parameter, infshape: InfShape, growth: Growth
) -> Scaling:
    """Factors of one parameter.

    Args:
        parametrization: a key of `PARAMETRIZATIONS`.
        update_rule: what the update rule that trains the parameter is scaled as (`UpdateRule.scaled_as`).
        parameter: its declaration.
        infshape: from `infer_infshapes`.
        growth: of the trial.

    Raises:
        ConfigError: the parametrization has no rule for that update rule.
    """
    require_rule(parametrization, update_rule)
    return PARAMETRIZATIONS[parametrization].parameters[update_rule](parameter, infshape, growth)


def require_rule(parametrization: str, update_rule: str) -> None:
    """Check that a parametrization has factors for an update rule.

    Raises:
        ConfigError: it has none.
    """
    rules = PARAMETRIZATIONS[parametrization].parameters
    if update_rule not in rules:
        raise ConfigError(
            f"parametrization {parametrization!r} has no rule for optimizer {update_rule!r}; "
            f"it has them for {', '.join(rules)}"
        )
