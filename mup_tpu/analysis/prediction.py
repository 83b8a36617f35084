"""Predictions at scales that were not run: targets, optima, costs of their errors, expected losses, scores.

A target is a scale that is asked about, as `width=4096`, or by a column that the table's scale measures. A
prediction that was kept before its scale was run has a score: it stands beside the scale's rows now.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.expressions import canonical
from mup_tpu.analysis.ingest.table_columns import means, short_name
from mup_tpu.analysis.ingest.table_values import plain_size
from mup_tpu.analysis.load import Runs, run_table
from mup_tpu.analysis.optimum import LossCurve, Optimum
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.result import Shown, TransferResult
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.scaling_law import ExpectedLoss, expected_loss
from mup_tpu.analysis.transfer import TransferAnalysis, analyze
from mup_tpu.analysis.trend import LEAST, NORMAL_95, Mixture, Trend, claims, fit_trend, kind_of, priors_of
from mup_tpu.analysis.valley import CURVATURE_SCATTER, Valley
from mup_tpu.config import columns, on_one_line, parse_number
from mup_tpu.config.columns import CONFIGURED, write_scale
from mup_tpu.config.values import as_number
from mup_tpu.errors import ConfigError, TableError, given
from mup_tpu.store.header import KeptPrediction, fingerprint

# Most relative error of a measure's polynomial: sizes of networks are polynomials of their widths
_MISFIT = 0.02
_FURTHEST_TARGET = 40  # most octaves of a target beyond the largest scale


@dataclass(frozen=True)
class Target:
    """A scale to predict at."""

    text: str  # The target as it was asked for: "width=4096"
    scale: float  # Value of the table's scale at the target
    beside: tuple[float, ...] = ()  # Values of the scales that vary beside it

    @property
    def sizes(self) -> tuple[float, ...]:
        return self.scale, *self.beside


def read_targets(table: RunTable, at: Sequence[str]) -> tuple[Target, ...]:
    """Read targets, NAME=VALUE with commas between them; of several scales, each target has a value of each.

    A name is the scale itself, or a column with one value per scale, such as params or flops.
    """
    if not at and table.runs["scale"].nunique() < LEAST:
        several = columns.plural(table.columns.scale)
        raise TableError(f"a prediction needs runs at {LEAST} {several}, and these are of one")
    if not at:
        target = f"{table.columns.scale}={2 * table.runs['scale'].max():g}"
        raise TableError(f"a prediction needs a target, such as {given('at', target)}")
    for text in at:
        if not all(part.partition("=")[0].strip() and "=" in part for part in text.split(",")):
            raise TableError(f"at {on_one_line(text)} is not NAME=VALUE; write for example width=4096")
    if not table.columns.scales_beside:
        return tuple(_read(table, part.strip()) for text in at for part in text.split(","))
    scales, targets = table.columns.scales, list[Target]()
    for text in at:
        values = {
            name.strip(): as_number(v) for name, _, v in (part.partition("=") for part in text.split(","))
        }
        values = {canonical(n) if canonical(n) in scales else n: value for n, value in values.items()}
        sizes = [values.get(name) or math.nan for name in scales]
        if {*values} != {*scales} or not all(0 < size < math.inf for size in sizes):
            raise TableError(f"at {on_one_line(text)}: give a number above 0 for each of {', '.join(scales)}")
        targets.append(Target(text, sizes[0], tuple(sizes[1:])))
    return tuple(targets)


def _read(table: RunTable, text: str) -> Target:
    name, _, written = (part.strip() for part in text.partition("="))
    try:
        value = parse_number(plain_size(written).replace("_", ""))
    except ConfigError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise TableError(f"at {on_one_line(text)} is not allowed: its value must be a finite number above 0")
    scale_column, largest = table.columns.scale, float(table.runs["scale"].max())
    name = scale_column if canonical(name) == scale_column else name
    if table.stored is not None and name != scale_column:  # a study may have a column of the field's name
        name = next((c.name for c in CONFIGURED.values() if c.field == name), name)
    is_scale = name in {scale_column, short_name(scale_column)} or (
        means(name) != "" and means(name) == means(scale_column)
    )
    scale = value if is_scale else _inverse(table, name, value)
    if abs(math.log2(scale / largest)) > _FURTHEST_TARGET:
        raise TableError(
            f"at {on_one_line(text)} lies {math.log2(scale / largest):.0f} octaves from the largest "
            f"{scale_column}, {write_scale(scale_column, largest)}; at most {_FURTHEST_TARGET} are predicted"
        )
    return Target(text, scale)


def _inverse(table: RunTable, name: str, value: float) -> float:
    """Return the scale at which a column has a value.

    The column is taken for a polynomial of the scale with coefficients of 0 or more, as parameters and FLOP
    are. Where none fits, it is taken for a power between its points.
    """
    from scipy import optimize  # slow to import, and seldom needed

    scale_S, value_S = _measure(table, name)
    terms_ST = (scale_S[:, None] / scale_S[-1]) ** np.arange(4)
    coefficients, _ = optimize.nnls(terms_ST / value_S[:, None], np.ones(len(scale_S)))
    misfit = float(np.abs(terms_ST @ coefficients / value_S - 1).max())
    log_S, log_value_S = np.log2(scale_S), np.log2(value_S)

    def log_measure(log_scale: float) -> float:
        if misfit < _MISFIT:
            return float(np.log2(((2**log_scale / scale_S[-1]) ** np.arange(4)) @ coefficients))
        i = int(np.clip(np.searchsorted(log_S, log_scale), 1, len(log_S) - 1))
        slope = (log_value_S[i] - log_value_S[i - 1]) / (log_S[i] - log_S[i - 1])
        return float(log_value_S[i] + slope * (log_scale - log_S[i]))

    ends = log_S[0] - 2 * _FURTHEST_TARGET, log_S[-1] + 2 * _FURTHEST_TARGET
    if not log_measure(ends[0]) < math.log2(value) < log_measure(ends[1]):
        raise TableError(f"at {name}={value:g} is not reached at any {table.columns.scale}")
    return float(2 ** optimize.brentq(lambda log_scale: log_measure(log_scale) - math.log2(value), *ends))


def _measure(table: RunTable, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of a table, and the value of a column, which must grow with them, at each."""
    scale_column = table.columns.scale
    rows, known = _columns(table)
    if name not in known or rows[name].dtype.kind not in "iuf" or not (rows[name] > 0).all():
        grow = [scale_column]
        for column in known:
            values = rows.groupby("scale")[column]
            first, is_one = values.first(), bool((values.nunique() <= 1).all())
            if column != scale_column and is_one and first.is_monotonic_increasing and first.nunique() > 1:
                grow += [column] if first.is_unique else []
        listed = ", ".join(f"{column}=VALUE" for column in grow[:6])
        has_sizes = table.stored is not None or bool(rows[table.columns.params].notna().all())
        hint = "" if has_sizes else f" ({given('params')} names the column of parameters)"
        raise TableError(
            f"at {name!r}: the table does not say how {name} follows {scale_column}{hint}; give {listed}"
        )
    by_scale = rows.groupby("scale")[name]
    counts, value_S, why = by_scale.nunique(), by_scale.first(), ""
    if (counts > 1).any():
        mixed = write_scale(scale_column, float(counts.index[int(counts.argmax())]))
        why = f"runs of {scale_column} {mixed} differ in {name}"
    elif value_S.nunique() == 1:
        why = f"all runs have {name} {value_S.iloc[0]:g}, so the table says nothing of another"
    elif len(value_S) < 2 or not value_S.is_monotonic_increasing or not value_S.is_unique:
        shown = ", ".join(f"{v:g}" for v in list(value_S)[:4])
        why = f"{name} does not grow with {scale_column} ({shown})"
    if why:
        raise TableError(f"at {name!r}: {why}; give {scale_column}=VALUE")
    return value_S.index.to_numpy(float), value_S.to_numpy(float)


def _columns(table: RunTable) -> tuple[pd.DataFrame, list[str]]:
    names, measures = table.columns, ("params", table.columns.params, "tokens", table.columns.tokens, "flops")
    if table.stored is not None and {names.scale, "params_active"} <= {*table.stored}:  # not a study's
        rows = table.stored.assign(scale=table.stored[names.scale].astype(float))
        rows = rows[rows["scale"].isin(table.runs["scale"])]
        params = rows["params_active"].fillna(rows["params_non_embedding"])
    else:
        rows = table.runs.assign(**{names.params: table.runs["params"], names.tokens: table.runs["tokens"]})
        rows["flops"] = rows["cost"] if table.cost_unit == "FLOP" else math.nan
        params = rows["params"]
    if "flops" not in rows or rows["flops"].isna().any():
        rows = rows.assign(flops=6.0 * params * rows["tokens"])
    sizes = [c.name for c in CONFIGURED.values() if c.type in (int, float)]
    return rows, [c for c in dict.fromkeys((*measures, *sizes)) if c in rows]


_CHOICES, _THINNED = 25, 4  # Values that may be advised, and draws per draw that chooses among them
_FARTHEST = 20.0  # Limit of the search for the farthest scale that can be predicted, octaves


@dataclass(frozen=True)
class ExpectedCost:
    """Loss over the target's own optimum, nat per token; nan if no curvature is known."""

    expected: float
    high: float  # 97.5 % quantile, or the mean where that is higher


UNKNOWN = ExpectedCost(math.nan, math.nan)


@dataclass(frozen=True)
class RulePrediction:
    """Prediction of one rule's best value of a hyperparameter at one size."""

    compared: str  # Name of the rule
    hyperparameter: str  # Column of the hyperparameter
    target: str  # Target in the words of the question: "width=4096"
    scale: float  # Value of the table's scale at the target
    sizes: Mapping[str, float]  # Value of each scale at the target
    x: float  # log2 of the value of least expected cost; the optimum's mean in a table of optima alone
    half: tuple[float, float]  # 50 % interval of x
    interval: tuple[float, float]  # 95 % interval of x
    taking: ExpectedCost  # Cost of the predicted optimum
    loss: ExpectedLoss | None = None  # Loss of a tuned model at the target
    why_no_loss: Reason | None = None  # Reason why no loss is predicted
    reach: float = math.nan  # Octaves beyond the largest scale that was run; 0 or less inside the table
    smallest: tuple[float, float] = (math.nan, math.nan)
    """Smallest scale with a known optimum, and log2 of the optimum; nan for several scales."""
    largest: tuple[float, float] = (math.nan, math.nan)  # The same of the largest scale
    staying: ExpectedCost = UNKNOWN  # Cost of the smallest scale's optimum
    following: ExpectedCost = UNKNOWN  # Cost of the largest scale's optimum
    bears: bool = True  # Whether the table bears the prediction: its expected cost is at most epsilon
    furthest: float = 0.0  # Octaves beyond the largest scale within which the expected cost does not matter
    claimed: bool = False
    """Whether the prior takes the rule's claim into account that the optimum stays along the scale."""
    steady: float = math.nan  # Probability that the rule is steady, after the optima
    steady_before: float = math.nan  # The same before them: the part that is prior
    unclaimed: tuple[float, float] = (math.nan, math.nan)  # 95 % interval of x without the claim
    sweeps: int = 0  # Sweeps of the atlas that the priors rest on

    @property
    def value(self) -> float:
        return float(2**self.x)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"value": self.value}

    def kept(
        self, rows: int, fingerprint: str, scale_column: str, scales: tuple[float, ...] = ()
    ) -> KeptPrediction:
        """Return the prediction as it is kept beside rows, whose number, hash and scales are given."""
        return KeptPrediction(
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            rows=rows,
            fingerprint=fingerprint,
            scales=scales,
            compared=self.compared,
            scale_column=scale_column,
            hyperparameter=self.hyperparameter,
            scale=self.scale,
            x=self.x,
            half=self.half,
            interval=self.interval,
            expected_cost=self.taking.expected if math.isfinite(self.taking.expected) else None,
            loss=(self.loss.loss, self.loss.low, self.loss.high) if self.loss else None,
        )


def frame_of(predictions: Iterable[RulePrediction], compares: str) -> pd.DataFrame:
    """Return a row for each prediction: the best value (log2), its intervals, and expected cost."""
    return pd.DataFrame(
        [
            {
                "target": one.target, compares: one.compared, "hyperparameter": one.hyperparameter,
                "x": one.x, "low_50": one.half[0], "high_50": one.half[1], "low_95": one.interval[0],
                "high_95": one.interval[1], "expected_cost": one.taking.expected,
                "loss": one.loss.loss if one.loss else math.nan,
            }
            for one in predictions
        ]
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Predictions(Shown):
    """Predictions of a table, by rule, hyperparameter and target."""

    analysis: TransferAnalysis
    targets: tuple[Target, ...]
    predictions: tuple[RulePrediction, ...]
    trends: Mapping[tuple[str, str], Trend]
    """Trend of the optima of each rule and hyperparameter that is predicted."""
    notes: tuple[Reason, ...]  # Reasons why others are not predicted

    def of(
        self, compared: str, target: str | None = None, hyperparameter: str | None = None
    ) -> RulePrediction:
        """Return the prediction of a rule, by default the first: of its first target and hyperparameter."""
        for one in self.predictions:
            is_asked = target in (None, one.target) and hyperparameter in (None, one.hyperparameter)
            if one.compared == compared and is_asked:
                return one
        raise KeyError((compared, target, hyperparameter))

    def to_frame(self) -> pd.DataFrame:
        return frame_of(self.predictions, self.analysis.compares)

    @property
    def scale(self) -> str:
        return self.analysis.scale

    def to_dict(self) -> dict[str, Any]:
        laws = {r.compared: r.power_law.to_dict() for r in self.analysis.results if r.power_law is not None}
        return {
            "name": self.analysis.name,
            "scale": ", ".join(self.analysis.columns.scales),
            "hyperparameter": ", ".join(self.analysis.columns.tuned),
            "epsilon": self.analysis.epsilon,
            "predictions": [rule.to_dict() for rule in self.predictions],
            **({"power_laws": laws} if laws else {}),
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
        2^-5.2, 95 % 2^-5.5 to 2^-4.8

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
    return predict_analysis(analyze(table, epsilon=epsilon, seed=seed, whole=False), targets, seed, claim)


def predict_analysis(
    analysis: TransferAnalysis, targets: Sequence[Target], seed: int = 0, claim: bool | None = None
) -> Predictions:
    """Predict the optima of each rule of an analysis; arguments as for `predict`."""
    if claim is not None and analysis.columns.scales_beside:
        raise TableError("claim: a power law of several scales rests on no claim")
    made: list[RulePrediction] = []
    notes, trends, most = list[Reason](), dict[tuple[str, str], Trend](), 0
    each = [(part.hyperparameter, part.results) for part in analysis.parts]
    for number, (tuned, results) in itertools.product(range(len(analysis.results)), each):
        result = results[number]
        by_name = claims(result.compared, kind_of(analysis.scale), tuned)
        claimed = by_name if claim is None else claim
        law, priors = result.power_law, priors_of(analysis.scale, claimed)
        trend = law.trend if law is not None else fit_trend(result.optima, priors, result.valleys)
        if trend is None:
            known = sum(o.is_bracketed for o in result.optima)
            counts = {"known": known, "scales": len(result.optima), "needed": LEAST}
            notes.append(Reason.of("no prediction", compared=result.compared, tuned_column=tuned, **counts))
            most = max(most, known)
            continue
        trends[result.compared, tuned] = trend
        made += [_predict(result, tuned, trend, analysis, target, seed) for target in targets]
    if not made:
        raise TableError(
            f"no rule can be predicted: {LEAST} {columns.plural(analysis.scale)} with an optimum inside the "
            f"grid are needed, and the best rule has {most}"
        )
    return Predictions(analysis, tuple(targets), tuple(made), trends, tuple(notes))


def _predict(
    result: TransferResult,
    tuned: str,
    trend: Trend,
    analysis: TransferAnalysis,
    target: Target,
    seed: int,
) -> RulePrediction:
    known = [(o, v) for o, v in zip(result.optima, result.valleys, strict=True) if o.is_bracketed]
    (first, _), (last, valley) = known[0], known[-1]
    run_A = np.max([o.sizes for o in result.optima], axis=0)
    optimum, around = trend.optimum(target.sizes), None
    if valley is not None:
        around = Surroundings.of(result.curves, result.optima, result.valleys, target.scale, result.guessing)
    made = RulePrediction(
        result.compared, tuned, target.text, target.scale,
        dict(zip(analysis.columns.scales, target.sizes, strict=True)), **best_value(optimum, around, seed),
        why_no_loss=Reason.of("no losses"), reach=float(np.log2(target.sizes / run_A).max()),
    )  # fmt: skip
    if around is not None:
        losses = around.losses(optimum, seed)
        made = replace(
            made, bears=made.taking.expected <= analysis.epsilon, why_no_loss=None,
            staying=losses.cost(first.x), following=losses.cost(last.x),
            furthest=_furthest(trend, around, run_A, analysis.epsilon, seed),
        )  # fmt: skip
    if target.beside:
        return made
    if around is not None:
        losses_S, scales_S = np.array([(o.loss, o.scale) for o, _ in known]).T
        loss = expected_loss(losses_S, scales_S, target.scale)
        of_loss: dict[str, Any] = {"why_no_loss" if isinstance(loss, Reason) else "loss": loss}
        made = replace(made, **of_loss)
    unclaimed = priors_of(analysis.scale)
    without = replace(trend, priors=(unclaimed,)).optimum(target.scale)
    return replace(
        made, smallest=(first.scale, first.x), largest=(last.scale, last.x),
        claimed=trend.priors != (unclaimed,), steady=trend.steady, steady_before=trend.priors[0].steady,
        sweeps=trend.priors[0].sweeps, unclaimed=(without.quantile(0.025), without.quantile(0.975)),
    )  # fmt: skip


def best_value(optimum: Mixture, around: Surroundings | None, seed: int = 0) -> dict[str, Any]:
    """Return x of a prediction with its intervals and cost, by name; without losses the optimum's mean."""
    low, half_low, half_high, high = (optimum.quantile(q) for q in (0.025, 0.25, 0.75, 0.975))
    x, taking = optimum.mean, UNKNOWN
    if around is not None:
        losses = around.losses(optimum, seed)
        x = losses.safest(low, high)
        taking = losses.cost(x)
    return {"x": x, "half": (half_low, half_high), "interval": (low, high), "taking": taking}


_WALL_SLOPE, _WALL_SCATTER = 0.35, 0.25
"""Standard deviations of where runs break above an optimum: octaves per octave of the scale, octaves."""

_BREAKS, _LEAST_BREAK = 3.0, 0.1
"""A loss breaks the valley where it rises this much more than the valley may, at least by these nat."""


@dataclass(frozen=True)
class Surroundings:
    """Losses around an optimum at a target: those of the largest scale, and where runs break."""

    valley: Valley
    most: float = math.inf  # Loss of guessing less that at the optimum, nat: no run costs more
    wall: tuple[float, float] | None = None
    """Octaves above the optimum at which runs break, with a standard deviation; None if none did."""
    broken: float = math.inf  # Loss of broken runs over the best, nat

    @classmethod
    def of(
        cls,
        curves: Sequence[LossCurve],
        optima: Sequence[Optimum],
        valleys: Sequence[Valley | None],
        scale: float,
        guessing: float = math.nan,
    ) -> Surroundings:
        """Return those at a scale, or of several scales by all sizes alike; the last optimum has a valley."""
        last, valley = [(o, v) for o, v in zip(optima, valleys, strict=True) if o.is_bracketed][-1]
        assert valley is not None, "losses are known"
        finite = (c.mean_G[np.isfinite(c.mean_G)].max(initial=last.loss) for c in curves)
        worst = max(map(float, finite), default=math.inf)
        most = max(worst, guessing) if math.isfinite(guessing) else worst
        walls, broken = [], []
        for curve, o, of_scale in zip(curves, optima, valleys, strict=True):
            breaks_G = curve.diverged_G > 0
            if of_scale is not None:
                high_G = np.quantile(of_scale.loss(curve.x_G), 0.975, axis=0)
                breaks_G |= curve.mean_G - o.loss > _BREAKS * np.maximum(high_G - o.loss, _LEAST_BREAK)
            broken_x = curve.x_G[breaks_G & (curve.x_G > o.best_x)]
            if o.is_bracketed and len(broken_x):
                before = float(curve.x_G[curve.x_G < broken_x[0]].max())
                error = math.hypot((broken_x[0] - before) / math.sqrt(12), o.se, _WALL_SCATTER)
                r = 0.0 if o.beside else math.log2(o.scale / scale)
                walls.append((r, (broken_x[0] + before) / 2 - o.mean, error))
                loss = float(curve.mean_G[curve.x_G == broken_x[0]][0])
                broken.append(min(loss - o.loss, most - last.loss))
        if not walls:
            return cls(valley, most - last.loss)
        # Distances are a line along the scale, whose slope has a prior around 0: a wall moves as optima do.
        r_S, away_S, error_S = np.array(walls).T
        design = np.column_stack([np.ones(len(r_S)), r_S]) / error_S[:, None]
        precision = design.T @ design + np.diag([0.0, _WALL_SLOPE**-2])
        covariance = np.linalg.inv(precision + 1e-12 * np.eye(2))
        at = float((covariance @ design.T @ (away_S / error_S))[0])
        deviation = math.hypot(math.sqrt(covariance[0, 0]), _WALL_SCATTER)
        return cls(valley, most - last.loss, (at, deviation), float(np.mean(broken)))

    def losses(self, optimum: Mixture, seed: int) -> Losses:
        """Draw the optimum at the target, and the losses around it."""
        generator, draws = np.random.default_rng([seed, 1]), len(self.valley.x_R)
        shocks_R = np.exp(CURVATURE_SCATTER * generator.standard_normal(draws))
        valley = replace(self.valley, height_R=self.valley.height_R * shocks_R)
        wall_R = np.full(draws, math.inf)
        x_R = optimum.draws_R(generator, draws)
        if self.wall is not None:
            wall_R = self.wall[0] + self.wall[1] * generator.standard_normal(draws)
        return Losses(replace(valley, x_R=x_R), wall_R, self.broken, self.most)


@dataclass(frozen=True)
class Losses:
    """Draws of the loss over its best at a scale that was not run."""

    valley: Valley
    wall_R: np.ndarray  # Octaves above the optimum from which runs break
    broken: float  # Least loss of broken runs over the best, nat
    most: float

    @cached_property
    def best_R(self) -> np.ndarray:
        # Rise at the best value that trains: that at the wall where it lies below the optimum
        return self.valley.rise(np.minimum(self.wall_R, 0.0))

    def over_best(self, x_N: np.ndarray, every: int = 1) -> np.ndarray:
        part, wall_R1 = self.valley.part(slice(None, None, every)), self.wall_R[::every, None]
        away_RN = x_N - part.x_R[:, None]
        over_RN = part.rise(away_RN) - self.best_R[::every, None]
        over_RN = np.where(away_RN > wall_R1, np.maximum(over_RN, self.broken), over_RN)
        return np.minimum(over_RN, self.most)

    def cost(self, x: float) -> ExpectedCost:
        """Return the cost of taking a value (log2)."""
        loss_R = self.over_best(np.array([x]))[:, 0]
        mean = float(loss_R.mean())
        # Slopes break seldom and then cost much: the mean may lie above what 97.5 % of the draws reach.
        return ExpectedCost(mean, max(mean, float(np.quantile(loss_R, 0.975))))

    def safest(self, low: float, high: float) -> float:
        """Return the value of least expected cost, log2: a step from the steeper side, or from the wall."""
        low = min(low, float(np.quantile(self.valley.x_R + np.minimum(self.wall_R, 0.0), 0.025)))
        at_X = np.linspace(low, high, _CHOICES)
        cost_X = self.over_best(at_X, _THINNED).mean(axis=0)
        best = int(np.clip(np.argmin(cost_X), 1, _CHOICES - 2))
        bend, tilt, _ = np.polyfit(at_X[best - 1 : best + 2] - at_X[best], cost_X[best - 1 : best + 2], 2)
        step = -tilt / (2 * bend) if bend > 0 else 0.0
        return float(at_X[best] + np.clip(step, low - at_X[best], high - at_X[best]))


def _furthest(trend: Trend, around: Surroundings, run_A: np.ndarray, epsilon: float, seed: int) -> float:
    """Return octaves beyond the largest sizes that were run at which a prediction costs epsilon."""

    def excess(octaves: float) -> float:
        optimum = trend.optimum((run_A * 2**octaves).tolist())
        losses = around.losses(optimum, seed)
        x = losses.safest(optimum.quantile(0.025), optimum.quantile(0.975))
        return float(losses.over_best(np.array([x])).mean()) - epsilon

    if excess(0.0) > 0:
        return 0.0
    if excess(_FARTHEST) <= 0:
        return _FARTHEST
    low, high = 0.0, _FARTHEST
    for _ in range(10):  # to a fiftieth of an octave
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Score:
    """Prediction and outcome; nan if the rows do not tell."""

    prediction: KeptPrediction
    x: float  # log2 of the optimum by the rows
    error: float  # Standard error of x, octaves
    loss: float  # Least loss at the scale: at the optimum if it is known, else of the value that was run

    @property
    def is_inside(self) -> bool | None:
        """Return whether x lies in the 95 % interval, widened by its own error; None if x is unknown."""
        if not math.isfinite(self.x):
            return None
        low, high = self.prediction.interval
        half = math.hypot((high - low) / 2, NORMAL_95 * self.error)
        return abs(self.x - (low + high) / 2) <= half

    @property
    def is_loss_inside(self) -> bool | None:
        # Whether the loss lies in its 95 % interval; None if it was not predicted
        if self.prediction.loss is None or not math.isfinite(self.loss):
            return None
        return self.prediction.loss[1] <= self.loss <= self.prediction.loss[2]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_inside": self.is_inside, "is_loss_inside": self.is_loss_inside}


def to_keep(predictions: Predictions) -> list[KeptPrediction]:
    """Return predictions as they are kept beside the rows of their table."""
    table = predictions.analysis.table
    if table.columns.scales_beside:
        raise TableError("predictions are kept along one scale, and there are several")
    if table.stored is None:
        raise TableError("predictions are kept in a results folder, and this table is none")
    ids, scales = table.stored["trial_id"], tuple(sorted(table.runs["scale"].unique().tolist()))
    rows = len(ids), fingerprint(ids)
    return [one.kept(*rows, predictions.scale, scales) for one in predictions.predictions]


def answered(analysis: TransferAnalysis, scores: Iterable[Score]) -> TransferAnalysis:
    """Drop the next runs of rules with one scale whose prediction is scored.

    A transfer's folder holds its target alone. Its question is the prediction, so no other scale is needed.
    """
    scored = {one.prediction.compared for one in scores if one.is_inside is not None}
    results = (replace(r, next_batch=None) if r.compared in scored else r for r in analysis.results)
    is_target = analysis.table.runs["scale"].nunique() == 1
    return replace(analysis, results=tuple(results)) if is_target else analysis


def score(kept: Iterable[KeptPrediction], analysis: TransferAnalysis) -> list[Score]:
    """Return scores of predictions for scales that were run since."""
    scores = []
    optima_of = {(r.compared, part.hyperparameter): r.optima for part in analysis.parts for r in part.results}
    for p in kept:
        optima = optima_of.get((p.compared, p.hyperparameter), ()) if p.scale_column == analysis.scale else ()
        optimum = next((o for o in optima if math.isclose(o.scale, p.scale, rel_tol=1e-6)), None)
        if optimum is None or p.scale in p.scales or not math.isfinite(optimum.loss):
            continue
        known = (optimum.x, optimum.se) if optimum.is_bracketed else (math.nan, math.nan)
        scores.append(Score(p, *known, loss=optimum.loss))
    return scores
