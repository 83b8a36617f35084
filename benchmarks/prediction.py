"""Optima predicted from smaller scales: calibration by distance, and priors by empirical Bayes.

    python benchmarks/prediction.py             # the package's priors beside three other methods
    python benchmarks/prediction.py --choose    # also priors chosen without the source that is scored
    python benchmarks/prediction.py --largest steplaw/data/dense_lr_bs_loss.csv  # largest sizes held out

Sweeps: those of the atlas (results/public/sweeps.csv) with three known optima or more. Each prefix of two
optima or more predicts every later one; intervals are widened by the later optimum's own error. A repository
is one source, and so are our own sweeps of one name. All prefixes go through the regression of
mup_tpu/analysis/trend.py together, which a test holds to it. Losses at the optima are predicted from each
prefix of three or more.

Shapes: P prefixes, S optima of a prefix (padded by optima without weight), T later optima (padded), K sets
times scatters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from scipy import optimize, special

from mup_tpu.analysis import Reading, analyze
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import check_table
from mup_tpu.analysis.optimum import Estimate
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.result import curve_regret
from mup_tpu.analysis.scaling_law import LEAST, expected_loss
from mup_tpu.analysis.trend import (
    BY_KIND,
    FLAT,
    KEPT,
    LEAST_ERROR,
    Mixture,
    Pace,
    Priors,
    Trend,
    claims,
    fit_trend,
    kind_of,
    priors_of,
)  # fmt: skip
from mup_tpu.analysis.verdict import Question, weigh
from mup_tpu.tuning.laws import rate_by_law

RANGES = (0.0, 1.25, 2.4, 3.6, 99.0)
"""Bounds of the distances, octaves, by which calibration is counted."""
Mixtures = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Means, standard deviations and weights, (K, P, T) each."""


@dataclass(frozen=True)
class Prefixes:
    """Optima of each prefix and the later ones, in octaves from the prefix's last optimum."""

    source_P: np.ndarray
    sweep_P: np.ndarray
    kind_P: np.ndarray
    claimed_P: np.ndarray
    r_PS: np.ndarray
    x_PS: np.ndarray
    error_PS: np.ndarray
    later_r_PT: np.ndarray
    later_x_PT: np.ndarray
    later_error_PT: np.ndarray
    is_later_PT: np.ndarray

    def part(self, chosen_P: np.ndarray) -> Prefixes:
        """Return some prefixes, without padding that none of them needs."""
        taken = {f.name: getattr(self, f.name)[chosen_P] for f in fields(self)}
        first, later = (taken["error_PS"] < 1e3).any(axis=0), taken["is_later_PT"].any(axis=0)
        for name, columns in taken.items():
            if name.endswith(("PS", "PT")):
                taken[name] = columns[:, first if name.endswith("PS") else later]
        return Prefixes(**taken)


def prefixes(sweeps: pd.DataFrame) -> Prefixes:
    """All prefixes of the atlas."""
    of_sweeps = []
    for number, row in enumerate(sweeps.fillna({"kind": "", "optima": ""}).to_dict("records")):
        known = np.array([one.split() for one in row["optima"].split("; ") if one], float).reshape(-1, 3)
        if len(known) > 2:
            source = row["source"] if row["source"] != "ours" else f"ours: {row['sweep'].split('_')[0]}"
            known[:, 0] = np.log2(known[:, 0])
            known[:, 2] = np.maximum(known[:, 2], LEAST_ERROR)
            of_sweeps.append(((source, number, row["kind"], bool(row["claimed"])), known))
    most = max(len(known) for _, known in of_sweeps) - 1
    rows = []
    for labels, known in of_sweeps:
        for count in range(2, len(known)):
            first, later = (part - [*known[count - 1, :2], 0.0] for part in (known[:count], known[count:]))
            first = np.pad(first, ((0, most - count), (0, 0)), constant_values=(0.0, 0.0))
            first[count:, 2] = 1e3
            later = np.pad(later, ((0, most - 1 - len(later)), (0, 0)))
            is_later = np.arange(most - 1) < len(known) - count
            rows.append((*labels, *first.T, *later[:, :2].T, np.where(is_later, later[:, 2], 1.0), is_later))
    return Prefixes(*(np.array(column) for column in zip(*rows, strict=True)))


def predicted(given: Prefixes, priors: Priors, kept: float = KEPT, scatters: int = 16) -> Mixtures:
    """Each later optimum from its prefix; `kept` is the probability of steadiness where a rule claims it."""
    tau_K = -priors.scatter * special.stdtrit(3, (1 - (np.arange(scatters) + 0.5) / scatters) / 2)
    steady_P = np.where(given.claimed_P, max(kept, priors.steady), priors.steady)
    means, variances, logs = [], [], []
    for chance_P, slope, pace in (
        (steady_P, 0.0, priors.quiet),
        (1 - steady_P, priors.mean, priors.moving),
    ):
        optima_PSS, across_PTS, later_PT = (
            FLAT + part for part in _covariances(pace, given.r_PS, given.later_r_PT)
        )
        away_PS = given.x_PS - slope * given.r_PS
        for tau in tau_K:
            diagonal_PSS = (tau**2 + given.error_PS**2)[:, :, None] * np.eye(given.r_PS.shape[1])
            inverse_PSS = np.linalg.inv(optima_PSS + diagonal_PSS)
            weighed_PS = np.einsum("pst,pt->ps", inverse_PSS, away_PS)
            log_P = 0.5 * (np.linalg.slogdet(inverse_PSS)[1] - (weighed_PS * away_PS).sum(axis=1))
            means.append(slope * given.later_r_PT + np.einsum("pts,ps->pt", across_PTS, weighed_PS))
            known_PT = np.einsum("pts,psu,ptu->pt", across_PTS, inverse_PSS, across_PTS)
            variances.append(np.maximum(later_PT + tau**2 - known_PT, 1e-8) + given.later_error_PT**2)
            logs.append(log_P + np.log(chance_P))
    mean_KPT, variance_KPT, log_KP = np.array(means), np.array(variances), np.array(logs)
    weight_KP = np.exp(log_KP - log_KP.max(axis=0))
    weight_KPT = (weight_KP / weight_KP.sum(axis=0))[:, :, None] + 0 * mean_KPT
    beyond_PT = np.maximum(given.later_r_PT, 0.0)
    chance_PT, more_PT = -np.expm1(-priors.breaks * beyond_PT), (priors.broken * beyond_PT) ** 2 / 3
    return (
        np.concatenate([mean_KPT, mean_KPT]),
        np.sqrt(np.concatenate([variance_KPT, variance_KPT + more_PT])),
        np.concatenate([weight_KPT * (1 - chance_PT), weight_KPT * chance_PT]),
    )


def _covariances(pace: Pace, r_PS: np.ndarray, t_PT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Covariance of a trend at the optima, from the later ones to them, and variance at the later ones."""

    def apart(a_PN: np.ndarray, b_PM: np.ndarray) -> np.ndarray:
        a_PN1, b_P1M = a_PN[:, :, None], b_PM[:, None, :]
        away = pace._variogram(a_PN1) + pace._variogram(b_P1M) - pace._variogram(a_PN1 - b_P1M)
        return pace.slope**2 * a_PN1 * b_P1M + away / 2

    return apart(r_PS, r_PS), apart(t_PT, r_PS), pace.slope**2 * t_PT**2 + pace._variogram(t_PT)


@dataclass(frozen=True)
class Process:
    """A Gaussian process: a line of random slope, and a squared-exponential part."""

    mean: float = 0.0
    slope: float = 0.4
    height: float = 0.2
    length: float = 2.0
    scatter: float = 0.1

    def predicted(self, given: Prefixes) -> Mixtures:
        def apart(a_PN: np.ndarray, b_PM: np.ndarray) -> np.ndarray:
            a_PN1, b_P1M = a_PN[:, :, None], b_PM[:, None, :]
            near = np.exp(-(((a_PN1 - b_P1M) / self.length) ** 2) / 2)
            return FLAT + self.slope**2 * a_PN1 * b_P1M + self.height**2 * near

        diagonal_PS = given.error_PS**2 + self.scatter**2
        optima_PSS = apart(given.r_PS, given.r_PS) + diagonal_PS[:, :, None] * np.eye(given.r_PS.shape[1])
        inverse_PSS, across_PTS = np.linalg.inv(optima_PSS), apart(given.later_r_PT, given.r_PS)
        away_PS = given.x_PS - self.mean * given.r_PS
        mean_PT = self.mean * given.later_r_PT + np.einsum("pts,psu,pu->pt", across_PTS, inverse_PSS, away_PS)
        prior_PT = FLAT + (self.slope * given.later_r_PT) ** 2 + self.height**2 + self.scatter**2
        known_PT = np.einsum("pts,psu,ptu->pt", across_PTS, inverse_PSS, across_PTS)
        deviation_PT = np.sqrt(np.maximum(prior_PT - known_PT, 1e-8) + given.later_error_PT**2)
        return mean_PT[None], deviation_PT[None], np.ones_like(mean_PT)[None]


def log_density(given: Prefixes, made: Mixtures) -> np.ndarray:
    mean, deviation, weight = made
    z = (given.later_x_PT - mean) / deviation
    return np.log(
        (weight * np.exp(-np.minimum(z * z, 80) / 2) / deviation).sum(axis=0) / math.sqrt(2 * math.pi)
    )


def quantile(made: Mixtures, q: float) -> np.ndarray:
    """By bisection."""
    mean, deviation, weight = made
    low, high = (mean - 8 * deviation).min(axis=0), (mean + 8 * deviation).max(axis=0)
    for _ in range(40):
        middle = (low + high) / 2
        is_above = (weight * special.ndtr((middle - mean) / deviation)).sum(axis=0) < q
        low, high = np.where(is_above, middle, low), np.where(is_above, high, middle)
    return (low + high) / 2


def crps(given: Prefixes, made: Mixtures) -> np.ndarray:
    """Continuous ranked probability score of a mixture of normals (Grimit et al. 2006), octaves."""
    mean, deviation, weight = made

    def absolute(m: np.ndarray, s: np.ndarray) -> np.ndarray:
        density = np.exp(-((m / s) ** 2) / 2) / math.sqrt(2 * math.pi)
        return 2 * s * density + m * (2 * special.ndtr(m / s) - 1)

    score = (weight * absolute(given.later_x_PT - mean, deviation)).sum(axis=0)
    for m, s, w in zip(*made, strict=True):
        score = score - w * (weight * absolute(m - mean, np.hypot(s, deviation))).sum(axis=0) / 2
    return np.asarray(score)


def scores(given: Prefixes, made: Mixtures, rival: Mixtures | None = None) -> pd.DataFrame:
    """A row for each later optimum: distance, coverage, CRPS of four methods, and squared errors."""
    low, half_low, half_high, high = (quantile(made, q) for q in (0.025, 0.25, 0.75, 0.975))
    mean, deviation, weight = made
    mean_PT = (weight * mean).sum(axis=0)
    promised_PT = (weight * (deviation**2 + mean**2)).sum(axis=0) - mean_PT**2
    weight_PS = (given.error_PS < 1e3) * 1.0
    center_P, away_P = ((weight_PS * v).sum(axis=1) / weight_PS.sum(axis=1) for v in (given.r_PS, given.x_PS))
    aside_PS = weight_PS * (given.r_PS - center_P[:, None])
    slope_P = (aside_PS * given.x_PS).sum(axis=1) / (aside_PS**2).sum(axis=1)
    line_PT = away_P[:, None] + slope_P[:, None] * (given.later_r_PT - center_P[:, None])
    x_PT = given.later_x_PT
    columns = {
        "octaves": given.later_r_PT,
        "in 50 %": (half_low <= x_PT) & (x_PT <= half_high),
        "in 95 %": (low <= x_PT) & (x_PT <= high),
        "crps": crps(given, made),
        "of a process": crps(given, rival) if rival else np.full_like(x_PT, np.nan),
        "of a line": np.abs(x_PT - line_PT),
        "of the last": np.abs(x_PT),
        "realised": (x_PT - mean_PT) ** 2,
        "promised": promised_PT,
        "density": log_density(given, made),
    }
    chosen = given.is_later_PT
    table = pd.DataFrame({name: column[chosen] for name, column in columns.items()})
    for name in ("source", "sweep", "kind"):
        table[name] = np.repeat(getattr(given, f"{name}_P"), chosen.sum(axis=1))
    return table.assign(range=np.searchsorted(RANGES, table["octaves"]) - 1)


def summary(table: pd.DataFrame, by_source: bool = False) -> pd.DataFrame:
    """Means by range of distances; by source, each counts once."""
    rows = {}
    for number, part in table.groupby("range"):
        numbers = part.drop(columns=["sweep", "kind", "range", "octaves"])
        means = (
            numbers.groupby("source").mean().mean() if by_source else numbers.drop(columns="source").mean()
        )
        means["realised / promised"] = means.pop("realised") / means.pop("promised")
        name = f"{RANGES[number]:g} to {RANGES[number + 1]:g}"
        rows[name] = {"n": len(part), "sources": part["source"].nunique(), **means}
    return pd.DataFrame(rows).T.round(3)


def _fitted(
    given: Prefixes,
    start_N: np.ndarray,
    width_N: np.ndarray,
    mixtures: Callable[[np.ndarray], Mixtures],
    most: int,
) -> np.ndarray:
    """Numbers of the highest density at later optima, near a start; a source counts as the root of them."""
    counts = pd.Series(np.repeat(given.source_P, given.is_later_PT.sum(axis=1))).value_counts()
    weight_PT = given.is_later_PT * counts.loc[given.source_P].to_numpy()[:, None] ** -0.5

    def loss(numbers_N: np.ndarray) -> float:
        away = float((((numbers_N - start_N) / width_N) ** 2).sum()) / 2
        return away - float((weight_PT * log_density(given, mixtures(numbers_N))).sum())

    simplex = np.vstack([start_N, start_N + np.diag(width_N / 2)])
    options = {"maxfev": most, "fatol": 0.02, "xatol": 0.01, "adaptive": True, "initial_simplex": simplex}
    return np.asarray(optimize.minimize(loss, start_N, method="Nelder-Mead", options=options).x)


START = Priors(0.3, 0.1, moving=Pace(0.4, 0.15))
"""Priors of any kind, around which a kind's own are chosen."""
_WIDTH_N = np.array([0.7, 0.7, 0.7, 0.5, 1.0, 0.2, 0.5])
"""How far numbers of priors may lie from their start: logarithms, log odds, and a mean slope."""


def _numbers(priors: Priors) -> np.ndarray:
    pace, odds = priors.moving, priors.steady / (1 - priors.steady)
    logs = np.log([pace.slope, pace.wander, pace.memory, priors.scatter, odds])
    return np.r_[logs, priors.mean, math.log(priors.quiet.slope)]


def _priors(numbers_N: np.ndarray, base: Priors) -> Priors:
    logs_N = np.clip(numbers_N, [-4, -4, -1, -5, -4, -1, -5], [1.5, 1.5, 3, 0.5, 4, 1, -0.5])
    slope, wander, memory, scatter, odds = np.exp(logs_N[:5])
    calm = float(np.exp(logs_N[6]))
    return replace(
        base, steady=float(odds / (1 + odds)), scatter=float(scatter), mean=float(logs_N[5]),
        quiet=Pace(calm, calm), moving=Pace(float(slope), float(wander), float(memory)),
    )  # fmt: skip


def chosen(given: Prefixes, start: Priors, most: int = 160) -> Priors:
    """Priors of the highest density at later optima."""

    def mixtures(numbers_N: np.ndarray) -> Mixtures:
        return predicted(given, _priors(numbers_N, start), scatters=8)

    return _priors(_fitted(given, _numbers(start), _WIDTH_N, mixtures, most), start)


def process_of(given: Prefixes, start: Process, most: int = 200) -> Process:
    """Gaussian process of the highest density at later optima."""

    def of(numbers_N: np.ndarray) -> Process:
        return Process(float(numbers_N[0]), *np.exp(np.clip(numbers_N[1:], -5, 2)).tolist())

    start_N = np.r_[start.mean, np.log([start.slope, start.height, start.length, start.scatter])]
    return of(
        _fitted(given, start_N, np.array([0.2, 0.7, 0.7, 0.7, 0.5]), lambda n: of(n).predicted(given), most)
    )


def loss_scores(sweeps: pd.DataFrame) -> pd.DataFrame:
    """Whether the 95 % interval of each later loss at an optimum holds it, and its width over the loss."""
    rows = []
    for row in sweeps.dropna(subset="losses").to_dict("records"):
        scales_S, losses_S = np.array([one.split() for one in row["losses"].split("; ")], float).T
        pairs = itertools.combinations_with_replacement(range(LEAST, len(losses_S)), 2)
        for count, later in pairs:
            made = expected_loss(losses_S[:count], scales_S[:count], scales_S[later])
            if isinstance(made, Reason):
                continue
            rows.append(
                {
                    "sweep": (row["source"], row["sweep"], row["rule"]),
                    "along": "batch size" if row["kind"] == "batch size" else "others",
                    "octaves": math.log2(scales_S[later] / scales_S[count - 1]),
                    "in 95 %": made.holds(losses_S[later]),
                    "width": (made.high - made.low) / made.loss,
                }
            )
    return pd.DataFrame(rows)


TABLES = (
    ("marin_muonh", "params"), ("marin_adamh", "params"), ("marin_moe_tokens", "steps"),
    ("marin_depth_mup", "flops"), ("hyperball_tokens", "tokens"), ("hyperball_width", "width"),
    ("hyperball_depth", "depth"), ("small_batches", "batch_size"), ("mup_mlp", "width"),
    ("nanogpt_mup_owt", "width"),
)  # fmt: skip
"""Copied public tables with losses, and their scales."""
Held = list[dict[str, object]]


def scored(table: str, compared: str, truth: Estimate, made: Mixture, formula: float = math.nan) -> Held:
    """A row with an optimum that was held out, beside its prediction and a formula's."""
    x, low, high = made.mean, made.quantile(0.025), made.quantile(0.975)
    error = 1.96 * truth.optimum.se
    return [
        {"table": table, "rule": compared, "off": x - truth.optimum.x, "half_width": (high - low) / 2,
         "in_95": low - error <= truth.optimum.x <= high + error, "regret": curve_regret(truth, x),
         "formula": curve_regret(truth, formula) if math.isfinite(formula) else math.nan}
    ]  # fmt: skip


def of_step_law(path: Path, over: Sequence[str]) -> Held:
    """Cells with the largest N or D of a dense table, by the others; its authors' law has seen them."""
    scales = [name for name in ("N", "D", "bs") if name not in over]
    rows, (first, *beside) = pd.read_csv(path), scales
    columns = Columns(first, "lr", loss="smooth loss", scales_beside=tuple(beside))
    is_largest = (rows["N"] == rows["N"].max()) | (rows["D"] > 0.6 * rows["D"].max())
    law, truth = (
        analyze(check_table(some, Reading(columns, best_over=over))).results[0].power_law
        for some in (rows[~is_largest], rows[is_largest])
    )
    assert law is not None and truth is not None
    x_S, error_S = np.array([(e.optimum.x, e.optimum.se) for e in law.estimates]).T
    priors = tuple(BY_KIND[kind] for kind in ("size", "tokens", "batch size")[: len(scales)])
    trend, held = Trend(2**law.sizes_SA, x_S, error_S, priors), Held()
    for log_A, e in zip(truth.sizes_SA, truth.estimates, strict=True):
        sizes = dict(zip(scales, (2**log_A).tolist(), strict=True))
        formula = math.log2(rate_by_law(sizes["N"], sizes["D"]))
        held += scored("step_law " + ",".join(scales), "plan", e, trend.optimum([*sizes.values()]), formula)
        held += scored(
            "step_law " + ",".join(scales), "law", e, law.trend.optimum([*sizes.values()]), formula
        )
    return held


def of_table(name: str, scale: str, rows: pd.DataFrame) -> Held:
    """The largest scale of a public table, by the others; priors as of all sources."""
    compared = next((c for c in ("optimizer", "parametrization") if c in rows), "parametrization")
    reading = Reading(Columns(scale=scale, parametrization=compared), name=name)
    table, held = check_table(rows, reading), Held()
    for rule, runs in table.runs.groupby("compared"):
        last = weigh(runs, Question.of(table)).estimates[-1]
        # Noise and shapes of the smaller scales alone.
        some = weigh(runs[runs["scale"] < last.optimum.scale], Question.of(table)).estimates
        priors = priors_of(scale, claims(str(rule), kind_of(scale)))
        trend = fit_trend([e.optimum for e in some], priors, [e.valley for e in some])
        if trend is not None and last.optimum.is_bracketed:
            held += scored(name, str(rule), last, trend.optimum(last.optimum.scale))
    return held


def main(
    sweeps: Path = Path("results/public/sweeps.csv"), choose: bool = False, largest: Path | None = None
) -> None:
    """Print calibration and CRPS by distance.

    Args:
        sweeps: The atlas.
        choose: Score priors, and a Gaussian process, that are chosen without the source that is scored.
        largest: Step Law's dense table: print instead what the largest sizes of public tables would have
            cost, predicted from the others.
    """
    if largest is not None:
        held = [*of_step_law(largest, ("bs",)), *of_step_law(largest, ())]
        for name, scale in TABLES:
            held += of_table(name, scale, pd.read_csv(f"results/public/rows/{name}.csv"))
        columns = ["off", "half_width", "in_95", "regret", "formula"]
        table = pd.DataFrame(held).groupby(["table", "rule"], sort=False)
        print(table[columns].mean().assign(n=table.size()).round(5).to_string())
        return
    everything, tables = prefixes(pd.read_csv(sweeps)), []
    for kind in sorted(set(everything.kind_P)):
        given = everything.part(everything.kind_P == kind)
        if not choose:
            tables.append(scores(given, predicted(given, BY_KIND[kind])))
            continue
        print(f"{kind or 'any'}: {chosen(given, START)}", flush=True)
        for source in sorted(set(given.source_P)):
            others, scored = given.part(given.source_P != source), given.part(given.source_P == source)
            is_alone = not len(others.kind_P)
            priors = START if is_alone else chosen(others, START)
            process = Process() if is_alone else process_of(others, Process())
            tables.append(scores(scored, predicted(scored, priors), process.predicted(scored)))
    table = pd.concat(tables, ignore_index=True)
    counts = f"{table['sweep'].nunique()} sweeps, {table['source'].nunique()} sources"
    print(f"{len(table)} later optima, {counts}")
    print(summary(table).to_string(), summary(table, by_source=True).to_string(), sep="\n")
    columns = ["in 50 %", "in 95 %", "crps", "of a process", "of a line", "of the last"]
    print(table.groupby("kind")[columns].mean().round(3).to_string())
    losses = loss_scores(pd.read_csv(sweeps))
    by_range = [pd.cut(losses["octaves"], RANGES), "along"]
    of_losses = losses.groupby(by_range, observed=True)
    print(of_losses.agg({"sweep": "size", "in 95 %": "mean", "width": "median"}).round(3).to_string())


if __name__ == "__main__":
    tyro.cli(main)
