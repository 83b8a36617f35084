"""Predictions at scales that were not run: the optimum, the cost of its error, and the expected loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.load import Runs, run_table
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.scaling_law import Prediction as ExpectedLoss
from mup_tpu.analysis.scaling_law import expected_loss
from mup_tpu.analysis.targets import Target, read_targets
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult, analyze
from mup_tpu.analysis.trend import LEAST, Mixture, Priors, Trend, claims, fit_trend, kind_of, priors_of
from mup_tpu.analysis.valley import CURVATURE_SCATTER, Valley
from mup_tpu.config import columns
from mup_tpu.errors import TableError

_FARTHEST = 20.0  # Limit of the search for the farthest scale that can be predicted, octaves


@dataclass(frozen=True)
class Cost:
    """Loss over the target's own optimum, nat per token; nan if no curvature is known."""

    expected: float
    high: float  # 97.5 % quantile, or the mean where that is higher


@dataclass(frozen=True)
class RulePrediction:
    """Prediction of one rule at one target."""

    compared: str
    """Name of the rule."""
    target: str
    """Target in the words of the question: "width=4096"."""
    scale: float
    """Value of the table's scale at the target."""
    reach: float
    """Octaves beyond the largest scale that was run; 0 or less inside the table."""
    x: float
    """log2 of the optimum: mean of its draws, the value of least expected cost."""
    half: tuple[float, float]
    """50 % interval of x."""
    interval: tuple[float, float]
    """95 % interval of x."""
    smallest: tuple[float, float]
    """Smallest scale with a known optimum, and log2 of the optimum."""
    largest: tuple[float, float]
    """Largest scale with a known optimum, and log2 of the optimum."""
    taking: Cost
    """Cost of the predicted optimum."""
    staying: Cost
    """Cost of the smallest scale's optimum."""
    following: Cost
    """Cost of the largest scale's optimum."""
    loss: ExpectedLoss | None
    """Loss of a tuned model at the target."""
    why_no_loss: Reason | None
    """Reason why no loss is predicted."""
    bears: bool
    """Whether the table bears the prediction: its expected cost is at most epsilon."""
    furthest: float
    """Octaves beyond the largest scale up to which the table bears a prediction."""
    claimed: bool
    """Whether the prior takes the rule's claim into account that the optimum stays along the scale."""
    steady: float
    """Probability that the rule is steady, after the optima."""
    steady_before: float
    """The same before them: the part that is prior."""
    unclaimed: tuple[float, float]
    """95 % interval of x without the claim."""
    sweeps: int
    """Sweeps of the atlas that the priors rest on."""

    @property
    def value(self) -> float:
        return float(2**self.x)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"value": self.value}


@dataclass(frozen=True, repr=False)
class Predictions:
    """Predictions of a table, by target and rule."""

    analysis: TransferAnalysis
    targets: tuple[Target, ...]
    predictions: tuple[RulePrediction, ...]
    trends: Mapping[str, Trend]
    """Trend of the optima of each predicted rule, by name."""
    notes: tuple[Reason, ...]
    """Reasons why other rules are not predicted."""

    def of(self, compared: str, target: str | None = None) -> RulePrediction:
        """Return the prediction of a rule at a target, by default the first.

        Raises:
            KeyError: there is none.
        """
        for rule in self.predictions:
            if rule.compared == compared and target in (None, rule.target):
                return rule
        raise KeyError((compared, target))

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each target and rule: the optimum (log2), its intervals, and expected cost."""
        return pd.DataFrame(
            [
                {
                    "target": one.target, self.analysis.compares: one.compared, "x": one.x,
                    "low_50": one.half[0], "high_50": one.half[1], "low_95": one.interval[0],
                    "high_95": one.interval[1], "expected_cost": one.taking.expected,
                    "loss": one.loss.loss if one.loss else math.nan,
                }
                for one in self.predictions
            ]
        )  # fmt: skip

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(index=False, float_format="{:.4g}".format))

    @property
    def scale(self) -> str:
        return self.analysis.scale

    @property
    def hyperparameter(self) -> str:
        return self.analysis.hyperparameter

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.analysis.name,
            "scale": self.scale,
            "hyperparameter": self.hyperparameter,
            "epsilon": self.analysis.epsilon,
            "predictions": [rule.to_dict() for rule in self.predictions],
        }


def predict(
    table: Runs,
    at: str | Sequence[str],
    epsilon: float | None = None,
    seed: int = 0,
    claim: bool | None = None,
) -> Predictions:
    """Predict the optimum of each rule at scales that were not run, with intervals, costs and losses.

    Examples:
        >>> found = predict("results/lr_transfer", "width=1024").of("mup")
        >>> print(f"2^{found.x:.1f}, 95 % 2^{found.interval[0]:.1f} to 2^{found.interval[1]:.1f}")
        2^-5.1, 95 % 2^-5.5 to 2^-4.8

    Args:
        table: runs, as for `analyze`.
        at: targets, NAME=VALUE: the table's scale, or a column that follows from it, such as params.
        epsilon: largest regret that does not matter, as for `analyze`.
        seed: seed of the draws; the same table and seed give the same numbers.
        claim: whether every rule claims to keep the optimum along the scale; None for the claims of rules
        that the package knows by their name.

    Raises:
        TableError: a target is not allowed, or no rule has two scales with a known optimum.
        StoreError: the results folder holds no runs.
    """
    table = run_table(table)
    targets = read_targets(table, [at] if isinstance(at, str) else at)
    return predict_analysis(analyze(table, epsilon=epsilon, seed=seed, laws=False), targets, seed, claim)


def predict_analysis(
    analysis: TransferAnalysis, targets: Sequence[Target], seed: int = 0, claim: bool | None = None
) -> Predictions:
    """Predict the optima of each rule of an analysis; arguments as for `predict`.

    Raises:
        TableError: no rule has two scales with a known optimum.
    """
    made: list[RulePrediction] = []
    notes, trends = list[Reason](), dict[str, Trend]()
    for result in analysis.results:
        by_name = claims(result.compared, kind_of(analysis.scale), analysis.hyperparameter)
        claimed = by_name if claim is None else claim
        trend = fit_trend(result.optima, priors_of(analysis.scale, claimed), result.valleys)
        if trend is None:
            known = sum(o.is_bracketed for o in result.optima)
            counts = {"known": known, "scales": len(result.optima), "needed": LEAST}
            notes.append(Reason.of("no prediction", compared=result.compared, **counts))
            continue
        trends[result.compared] = trend
        unclaimed = priors_of(analysis.scale)
        made += [_predict(result, trend, unclaimed, target, analysis.epsilon, seed) for target in targets]
    if not made:
        most = max(sum(o.is_bracketed for o in result.optima) for result in analysis.results)
        raise TableError(
            f"no rule can be predicted: {LEAST} {columns.label(analysis.scale)}s with an optimum inside the "
            f"grid are needed, and the best rule has {most}"
        )
    return Predictions(analysis, tuple(targets), tuple(made), trends, tuple(notes))


def _predict(
    result: TransferResult, trend: Trend, unclaimed: Priors, target: Target, epsilon: float, seed: int
) -> RulePrediction:
    known = [(o, v) for o, v in zip(result.optima, result.valleys, strict=True) if o.is_bracketed]
    (first, _), (last, valley) = known[0], known[-1]
    optimum = trend.optimum(target.scale)
    low, half_low, half_high, high = (optimum.quantile(q) for q in (0.025, 0.25, 0.75, 0.975))
    x = optimum.mean
    without = replace(trend, priors=(unclaimed,)).optimum(target.scale)
    (taking, staying, following), curvature = costs(optimum, valley, (x, first.x, last.x), seed)
    losses_S, scales_S = np.array([(o.loss, o.scale) for o, _ in known]).T
    loss = Reason.of("no losses") if valley is None else expected_loss(losses_S, scales_S, target.scale)
    run = max(o.scale for o in result.optima)
    return RulePrediction(
        compared=result.compared,
        target=target.text,
        scale=target.scale,
        reach=math.log2(target.scale / run),
        x=x,
        half=(half_low, half_high),
        interval=(low, high),
        smallest=(first.scale, first.x),
        largest=(last.scale, last.x),
        taking=taking,
        staying=staying,
        following=following,
        loss=None if isinstance(loss, Reason) else loss,
        why_no_loss=loss if isinstance(loss, Reason) else None,
        bears=valley is None or taking.expected <= epsilon,
        furthest=0.0 if valley is None else _furthest(trend, curvature, run, epsilon),
        claimed=trend.priors != (unclaimed,),
        steady=trend.steady,
        steady_before=trend.priors[0].steady,
        unclaimed=(without.quantile(0.025), without.quantile(0.975)),
        sweeps=trend.priors[0].sweeps,
    )


def costs(
    optimum: Mixture, valley: Valley | None, taken: Sequence[float], seed: int
) -> tuple[list[Cost], float]:
    """Return the cost of taking each of some values at a target, and the mean curvature, nat per octave².

    Args:
        optimum: at the target.
        valley: of the largest scale that was run; None for a table of optima, without losses.
        taken: values, log2.
        seed: seed of the draws.
    """
    if valley is None:
        return [Cost(math.nan, math.nan) for _ in taken], math.nan
    generator = np.random.default_rng([seed, 1])
    shocks_R = np.exp(CURVATURE_SCATTER * generator.standard_normal(len(valley.x_R)))
    curvature_R = valley.curvature_R * shocks_R
    optima_R = optimum.draws_R(generator, len(curvature_R))
    made = []
    for x in taken:
        loss_R = curvature_R / 2 * (optima_R - x) ** 2
        mean = float(loss_R.mean())
        # Slopes break seldom and then cost much: the mean may lie above what 97.5 % of the draws reach.
        made.append(Cost(mean, max(mean, float(np.quantile(loss_R, 0.975)))))
    return made, float(curvature_R.mean())


def _furthest(trend: Trend, curvature: float, run: float, epsilon: float) -> float:
    """Return octaves beyond the largest scale that was run at which a prediction costs epsilon."""

    def excess(octaves: float) -> float:
        return curvature / 2 * trend.optimum(run * 2**octaves).variance - epsilon

    if excess(0.0) > 0:
        return 0.0
    if excess(_FARTHEST) <= 0:
        return _FARTHEST
    low, high = 0.0, _FARTHEST
    for _ in range(
        14
    ):  # to a thousandth of an octave; importing scipy's root finders takes longer than all else
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
    return (low + high) / 2
