"""Whether a hyperparameter's optimum transfers across a scale: from a run table to numbers and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mup_tpu.analysis.drift import Drift, WiderIsBetter, collapse_exponent, fit_drift, wider_is_better
from mup_tpu.analysis.optimum import (
    LossCurve,
    Noise,
    Optimum,
    draw_curve,
    find_optimum,
    loss_curve,
    pooled_noise,
)
from mup_tpu.analysis.regret import Regret, regret
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.verdict import DELTA, EPSILON, Verdict, decide, settle


@dataclass(frozen=True)
class TransferResult:
    """All that one parametrization's runs say about transfer."""

    parametrization: str
    curves: tuple[LossCurve, ...]
    noise: Noise
    optima: tuple[Optimum, ...]
    drift: Drift
    regrets: tuple[Regret, ...]
    wider_is_better: WiderIsBetter
    collapse_exponent: float
    """Shift per octave of scale, in octaves, that best brings the loss curves together."""
    verdict: Verdict

    @property
    def headline_regret(self) -> Regret | None:
        """From the smallest bracketed scale to the largest."""
        return _headline(self.optima, self.regrets)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: all that the figures show."""
        return {
            "parametrization": self.parametrization,
            "verdict": asdict(self.verdict),
            "drift": asdict(self.drift),
            "noise": asdict(self.noise),
            "curves": [curve_to_dict(c, self.noise) for c in self.curves],
            "optima": [o.to_dict() for o in self.optima],
            "regrets": [asdict(r) for r in self.regrets],
            "wider_is_better": asdict(self.wider_is_better) | {"share": self.wider_is_better.share},
            "collapse_exponent": self.collapse_exponent,
        }


@dataclass(frozen=True)
class TransferAnalysis:
    """The analysis of a run table, one result a parametrization."""

    name: str
    scale: str
    hyperparameter: str
    notes: tuple[str, ...]
    results: tuple[TransferResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "scale": self.scale,
            "hyperparameter": self.hyperparameter,
            "notes": list(self.notes),
            "results": [r.to_dict() for r in self.results],
        }


def analyze(
    table: RunTable, epsilon: float = EPSILON, delta: float = DELTA, seed: int = 0
) -> TransferAnalysis:
    """Optima, drift, regret and verdict of every parametrization in a table.

    Args:
        table: checked runs.
        epsilon: regret that does not matter, nat per token.
        delta: drift exponent that does not matter.
        seed: of the bootstrap; the same table and seed give the same numbers.
    """
    notes = list(table.notes)
    losses = table.runs["loss"].to_numpy()
    losses = losses[np.isfinite(losses)]
    rounding = _rounding(losses)
    if rounding > 1e-5:
        notes.append(f"losses are rounded to {rounding:g}: noise is taken as no less than that allows")
    results = []
    for parametrization, runs in table.runs.groupby("parametrization", sort=True):
        curves = [loss_curve(group) for _, group in runs.groupby("scale")]
        noise = pooled_noise(curves, rounding)
        if noise.source == "lack of fit":
            notes.append(f"{parametrization}: one run a cell, so intervals come from the fits' lack of fit")
        results.append(_analyze_one(str(parametrization), curves, noise, table, epsilon, delta, seed))
    columns = table.columns
    return TransferAnalysis(table.name, columns.scale, columns.hyperparameter, tuple(notes), tuple(results))


def _analyze_one(
    parametrization: str,
    curves: list[LossCurve],
    noise: Noise,
    table: RunTable,
    epsilon: float,
    delta: float,
    seed: int,
) -> TransferResult:
    generator = np.random.default_rng(seed)
    draws = [draw_curve(curve, noise, generator) for curve in curves]
    optima = [find_optimum(curve, d) for curve, d in zip(curves, draws, strict=True)]
    drift = fit_drift(optima, noise.df)
    regrets = [
        regret(curves[i], optima[i], draws[i], curves[j], optima[j], draws[j])
        for i in range(len(curves))
        for j in range(i + 1, len(curves))
    ]
    headline = _headline(optima, regrets)
    verdict, sentence = decide(parametrization, optima, drift, headline, table.columns, epsilon, delta)
    open_ = verdict == "INCONCLUSIVE"
    remedy = settle(parametrization, curves, optima, table.columns, table.command) if open_ else ""
    return TransferResult(
        parametrization,
        tuple(curves),
        noise,
        tuple(optima),
        drift,
        tuple(regrets),
        wider_is_better(curves),
        collapse_exponent(curves),
        Verdict(verdict, sentence, remedy),
    )


def _headline(optima: Sequence[Optimum], regrets: Sequence[Regret]) -> Regret | None:
    bracketed = [o.scale for o in optima if o.is_bracketed]
    if len(bracketed) < 2:
        return None
    return next(r for r in regrets if (r.source, r.target) == (bracketed[0], bracketed[-1]))


def curve_to_dict(curve: LossCurve, noise: Noise) -> dict[str, Any]:
    """Plain values of a loss curve."""
    return {
        "scale": curve.scale,
        "log2_hyperparameter": curve.x_G.tolist(),
        "loss": curve.mean_G.tolist(),
        "standard_error": noise.errors_G(curve).tolist(),
        "runs": curve.count_G.tolist(),
        "diverged": curve.diverged_G.tolist(),
    }


def _rounding(losses: np.ndarray) -> float:
    """Power of ten that all losses are multiples of, or 0."""
    for digits in range(1, 6):
        if len(losses) and np.allclose(losses, np.round(losses, digits), atol=1e-9):
            return 10.0**-digits
    return 0.0
