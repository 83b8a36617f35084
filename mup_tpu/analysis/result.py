"""The analysis of one rule's runs: optima, drift, regrets, verdict, law, and the next runs."""

from __future__ import annotations

import html
import importlib
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.design import Batch
from mup_tpu.analysis.drift import Drift, WiderIsBetter
from mup_tpu.analysis.optimum import LossCurve, Noise, Optimum
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import Cost
from mup_tpu.analysis.scaling_law import ScalingLaw, fit_scaling_law
from mup_tpu.analysis.valley import Valley
from mup_tpu.analysis.verdict import LookTaken, Regret, Verdict
from mup_tpu.errors import TableError

if TYPE_CHECKING:
    from mup_tpu.analysis.power_law import PowerLaw
    from mup_tpu.analysis.surface import Interaction, Surface


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
        return tuple(
            float(sum(c.count_G.sum() * self.costs.of(c.scale) for c in look.curves)) for look in self.looks
        )

    def to_dict(self) -> dict[str, Any]:
        looks = [
            {**look.to_dict(), "spent": spent} for look, spent in zip(self.looks, self.spent, strict=True)
        ]
        return {"looks": looks, "unit": self.costs.unit}


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
