"""The analysis of one rule's runs: optima, drift, regrets, verdict, law, and the next runs."""

from __future__ import annotations

import html
import importlib
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy

from mup_tpu.analysis.design import Batch
from mup_tpu.analysis.drift import Drift, WiderIsBetter
from mup_tpu.analysis.optimum import Estimate, LossCurve, Noise, Optimum
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost
from mup_tpu.analysis.scaling_law import ScalingLaw, fit_scaling_law
from mup_tpu.analysis.trend import Pace, Priors, Trend
from mup_tpu.analysis.valley import Valley
from mup_tpu.analysis.verdict import Evidence, LookTaken, Regret, Verdict
from mup_tpu.errors import TableError

if TYPE_CHECKING:
    from mup_tpu.analysis.surface import Interaction, Surface


_SCATTER = 0.2  # prior scale of τ, octaves
_SHARED = (0.03, 0.1, 0.2, 0.45)  # scatters that cells of one value may share, octaves
_LEAST_VALUES = 4  # With fewer values of a scale, what cells share is not told from its exponent.


class Shown(ABC):
    """Result that shows itself by its sentences, and in a notebook by its table too."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame: ...

    def __repr__(self) -> str:
        # The room of words imports this one, so it is imported only when a result is shown.
        return str(importlib.import_module("mup_tpu.words").summary(self))

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(index=False, max_rows=60, float_format="{:.4g}".format)
        return f"<pre style='white-space: pre-wrap'>{html.escape(repr(self))}</pre>{table}"


@dataclass(frozen=True)
class FittedLaw:
    """Loss at each scale's optimum against parameters, and a law through these points if there is one.

    It is fitted when it is first read: most analyses print no law.
    """

    params: tuple[float, ...]
    tokens: tuple[float, ...]
    losses: tuple[float, ...]
    refused: Reason | None = None  # Reason why none is fitted

    @cached_property
    def _fit(self) -> ScalingLaw | Reason:
        if self.refused is not None:
            return self.refused
        try:
            law = fit_scaling_law(np.array(self.losses), np.array(self.params))
        except TableError as error:
            return Reason.of("refused", error=str(error))
        return law.why_not_identified or law

    @property
    def law(self) -> ScalingLaw | None:
        return None if isinstance(self._fit, Reason) else self._fit

    @property
    def why_not(self) -> Reason | None:
        return self._fit if isinstance(self._fit, Reason) else None

    def to_dict(self) -> dict[str, Any]:
        points = {"params": self.params, "tokens": self.tokens, "losses": self.losses}
        if (law := self.law) is None:
            return points
        fit = {"E": law.irreducible, "A": law.coefficient, "α": law.exponent}
        return points | {"fit": fit, "intervals": law.intervals, "scatter": law.scatter}


@dataclass(frozen=True)
class LearningCurve:
    """Training loss on the way, mean over seeds."""

    scale: float
    x: float  # log2 of the hyperparameter
    steps: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Sequenced:
    """Looks of a sequence, with their costs."""

    looks: tuple[LookTaken, ...]
    costs: Cost
    stops: Reason | None  # Reason why it ends unsettled; None if it may go on, or is settled

    @property
    def spent(self) -> tuple[float, ...]:
        cost = self.costs.of
        return tuple(float(sum(c.count_G.sum() * cost(c.scale) for c in of.curves)) for of in self.looks)

    def to_dict(self) -> dict[str, Any]:
        looks = [look.to_dict() | {"spent": s} for look, s in zip(self.looks, self.spent, strict=True)]
        return {"looks": looks, "unit": self.costs.unit}


@dataclass(frozen=True)
class ScaleExponent:
    """Exponent of one scale, with its 95 % interval."""

    scale: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Cells predicted from the others."""

    cells: int
    rmse: float  # Octaves
    regret: float  # Mean loss over the cell's best, nat
    inside: float  # Share inside the 95 % interval, widened by the optimum's own error


@dataclass(frozen=True, repr=False)
class PowerLaw:
    """A rule's optimum as a power law of several scales at once: lr* ∝ N^a · D^b · B^c.

    A **cell** is one size: one value of each scale. Optima are estimated cell by cell, as along one scale,
    and their trend is straight along each scale. Cells that share a value of a scale, such as one model or
    one batch size, miss the law together, and each by itself too: without the former, many cells at few
    values would make exponents look surer than they are. Each cell is then predicted from the others.

    Shapes: S cells with a known optimum, A scales, N sizes.
    """

    scales: tuple[str, ...]
    estimates: tuple[Estimate, ...]  # of the cells with a known optimum

    @cached_property
    def sizes_SA(self) -> np.ndarray:
        # log2 of each known cell's sizes
        return np.log2([e.optimum.sizes for e in self.estimates])

    @cached_property
    def trend(self) -> Trend:
        x_S, error_S = np.array([(e.optimum.x, e.optimum.se) for e in self.estimates]).T
        straight = Priors(0.0, _SCATTER, moving=Pace(1.0, 0.0))
        shared = replace(straight, shared=_SHARED)
        # With few values, what they share cannot be separated from the exponent.
        counts = [len(np.unique(column)) for column in self.sizes_SA.T]
        priors = tuple(shared if _LEAST_VALUES <= n <= len(x_S) / 2 else straight for n in counts)
        return Trend(2**self.sizes_SA, x_S, error_S, priors)

    @cached_property
    def exponents(self) -> tuple[ScaleExponent, ...]:
        slopes = zip(self.scales, self.trend.mean_slopes(), strict=True)
        return tuple(ScaleExponent(name, m.mean, m.quantile(0.025), m.quantile(0.975)) for name, m in slopes)

    @property
    def tau(self) -> float:
        # Scatter of each cell by itself about the law, octaves
        return self.trend.tau

    def optima(self, sizes_NA: np.ndarray) -> np.ndarray:
        # log2 of the law's optimum at plain sizes, without what cells of one value share
        away_NA = np.log2(sizes_NA) - self.sizes_SA.mean(axis=0)
        return np.asarray(self.trend.x_S.mean() + away_NA @ [e.value for e in self.exponents])

    @cached_property
    def held_out(self) -> HeldOut:
        """Predict each cell from the others."""
        predicted, truth_S = self.trend.left_out(), self.trend.x_S
        x_S = np.array([one.mean for one in predicted])
        below_S = np.array([one.below(x) for one, x in zip(predicted, truth_S, strict=True)])
        inside = float(((below_S > 0.025) & (below_S < 0.975)).mean())
        regrets = [curve_regret(e, x) for e, x in zip(self.estimates, x_S.tolist(), strict=True)]
        rmse = math.sqrt(float(np.square(x_S - truth_S).mean()))
        return HeldOut(len(x_S), rmse, float(np.mean(regrets)), inside)

    def to_dict(self) -> dict[str, Any]:
        return {
            "exponents": [asdict(e) for e in self.exponents],
            "known": len(self.estimates),
            "tau": self.tau,
            "held_out": asdict(self.held_out),
        }


def curve_regret(estimate: Estimate, x: float) -> float:
    """Return the loss of a value above the optimum on a cell's curve; beyond the grid, that of its end."""
    curve, optimum = estimate.curve, estimate.optimum
    used = np.isfinite(curve.mean_G) & (np.abs(curve.x_G - optimum.x) > 0.05)
    at = np.append(curve.x_G[used], optimum.x)
    rise = np.append(np.maximum(curve.mean_G[used] - optimum.loss, 0.0), 0.0)
    order = np.argsort(at)
    inside = float(np.clip(x, at.min(), at.max()))
    return float(scipy.interpolate.PchipInterpolator(at[order], rise[order])(inside))


@dataclass(frozen=True, repr=False)
class TransferResult:
    """Analysis of one parametrization's runs, or of its optima where these come from no loss curves."""

    compared: str  # Value of the compared axis, such as a parametrization's name
    noise: Noise
    optima: tuple[Optimum, ...]
    valleys: tuple[Valley | None, ...]  # Draws of each scale's valley; None where every run was lost
    drift: Drift
    verdict: Verdict
    regrets: tuple[Regret, ...] = ()
    curves: tuple[LossCurve, ...] = ()
    wider_is_better: WiderIsBetter = WiderIsBetter()
    law: FittedLaw = FittedLaw((), (), (), Reason.of("no losses"))
    learning_curves: tuple[LearningCurve, ...] = ()
    """Curve of each scale at the grid point nearest to its optimum, if the table has one."""
    next_batch: Batch | None = None  # Next runs; None after a settled verdict
    sequence: Sequenced | None = None  # Looks of the sequence; None for a single look
    guessing: float = math.nan  # Loss of guessing, or the largest on the way, nat; nan if unknown
    power_law: PowerLaw | None = None  # The optimum as a power law of several scales
    surface: Surface | None = None  # Draws of the losses of several hyperparameters
    pairs: tuple[Interaction, ...] = ()  # Interactions of several hyperparameters
    parts: tuple[TransferResult, ...] = ()
    """Each of several hyperparameters with the others at their best; the verdict is on all together."""

    @classmethod
    def of(cls, compared: str, evidence: Evidence, verdict: Verdict, **of_rule: Any) -> TransferResult:
        """Make the result of evidence; `of_rule` has the other fields."""
        valleys = tuple(e.valley for e in evidence.estimates)
        drift, curves = evidence.drift, evidence.curves
        return cls(
            compared, evidence.noise, evidence.optima, valleys, drift, verdict, curves=curves, **of_rule
        )

    @property
    def parametrization(self) -> str:
        return self.compared

    @property
    def headline_regret(self) -> Regret | None:
        # From the smallest bracketed scale to the largest that was run
        if self.parts:
            return next(iter(self.regrets), None)
        source = next((o.scale for o in self.optima if o.is_bracketed), None)
        ends = source, self.optima[-1].scale
        return next((r for r in self.regrets if (r.source, r.target) == ends), None)

    def __repr__(self) -> str:
        return f"TransferResult({self.compared!r}, {self.verdict.decision})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "parametrization": self.compared,
            "verdict": {"verdict": self.verdict.decision},
            "drift": self.drift.to_dict(),
            "noise": asdict(self.noise),
            "curves": [curve_to_dict(c, self.noise) for c in self.curves],
            "optima": [o.to_dict() for o in self.optima],
            "regrets": [asdict(r) for r in self.regrets],
            "wider_is_better": asdict(self.wider_is_better) | {"share": self.wider_is_better.share},
            "law": self.law.to_dict(),
            "learning_curves": [asdict(c) for c in self.learning_curves],
            "next": self.next_batch.to_dict() if self.next_batch else None,
            **({"sequence": self.sequence.to_dict()} if self.sequence else {}),
            **({} if self.power_law is None else {"power_law": self.power_law.to_dict()}),
            **({} if self.surface is None else {
                "octave_cost": [list(cost) for cost in self.surface.octave_cost],
                "interactions": [asdict(pair) | {"interacts": pair.interacts} for pair in self.pairs],
                "each": [part.to_dict() for part in self.parts],
            }),
        }  # fmt: skip


def curve_to_dict(curve: LossCurve, noise: Noise) -> dict[str, Any]:
    return {
        "scale": curve.scale,
        "log2_hyperparameter": curve.x_G.tolist(),
        "loss": curve.mean_G.tolist(),
        "standard_error": noise.errors_G(curve).tolist(),
        "runs": curve.count_G.tolist(),
        "diverged": curve.diverged_G.tolist(),
        "stopped": (curve.stopped_G - curve.refused_G).tolist(),
        **({"refused": curve.refused_G.tolist()} if curve.refused_G.any() else {}),
    }
