"""Several sweeps beside each other: the verdict of each rule along each way of growing, and its cost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.drift import Drift
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.optimum import LossCurve
from mup_tpu.analysis.prediction import score
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.run_table import RunTable, rows_of
from mup_tpu.analysis.transfer import TransferAnalysis, analyze
from mup_tpu.analysis.verdict import Regret
from mup_tpu.config.columns import label
from mup_tpu.errors import MupTpuError, TableError
from mup_tpu.store import is_search, load_runs
from mup_tpu.store.header import PREDICTIONS, load_predictions

_FIRST = "parametrization"  # compared column whose rows come first
# Values of columns that the rows of the first releases lack
_BEFORE = {"architecture": "gpt2", "optimizer": "adamw"}


@dataclass(frozen=True)
class Ruling:
    """The verdict of one sweep on one rule."""

    sweep: str  # Folder of the sweep
    columns: Columns
    result: TransferResult
    alone: bool = True  # Whether the sweep has no other rule
    architecture: str = "own"
    update_rule: str = "own"  # Names of what the sweep trained; "own" in a study of somebody's training
    hours: float = math.nan  # Training time of its runs on one device (on CPUs, one thread); nan if unknown

    @classmethod
    def of(cls, sweep: str, analysis: TransferAnalysis, result: TransferResult) -> Ruling:
        made: dict[str, Any] = {}
        if (rows := analysis.table.stored) is not None:
            rows = rows_of(rows, analysis.compares, result.compared)
            for part, column in (("architecture", "architecture"), ("update_rule", "optimizer")):
                if column in rows:
                    made[part] = ", ".join(sorted(map(str, rows[column].fillna(_BEFORE[column]).unique())))
            made["hours"] = float(rows["wall_time_s"].sum() / 3600) if "wall_time_s" in rows else math.nan
        return cls(sweep, analysis.columns, result, len(analysis.results) == 1, **made)

    @property
    def rule(self) -> str:
        return self.result.compared

    @property
    def drift(self) -> Drift:
        return self.result.drift

    @property
    def regret(self) -> Regret | None:
        return self.result.headline_regret

    @property
    def decision(self) -> str:
        return self.result.verdict.decision

    @cached_property
    def parabola(self) -> float:
        # Drift exponent by `parabola_slope`; nan if unknown
        return parabola_slope(self.result.curves)

    @property
    def parts_from_parabola(self) -> bool:
        is_known = self.drift.is_told and not math.isnan(self.parabola)
        return is_known and not self.drift.low <= self.parabola <= self.drift.high

    @property
    def setting(self) -> tuple[str, str, str]:
        return self.architecture, self.update_rule, self.columns.hyperparameter


@dataclass(frozen=True)
class Comparison:
    """Several sweeps beside each other."""

    rulings: tuple[Ruling, ...]  # By way of growing, then by rule and sweep
    left_out: Mapping[str, Reason] = field(default_factory=dict)  # Reason why each other folder has no ruling

    @classmethod
    def of(cls, sweeps: Mapping[str, TransferAnalysis]) -> Comparison:
        """Compare analyses by the names of their sweeps; each of several hyperparameters has its rulings."""
        rulings = [
            Ruling.of(name, part, result)
            for name, analysis in sweeps.items()
            for part in analysis.parts
            for result in part.results
        ]
        return cls(tuple(sorted(rulings, key=_place)))

    def table(self, name_of: Callable[[str, str], str] = lambda compared, _: compared) -> pd.DataFrame:
        """Return one row a ruling, the worst regret first: an unknown one before all.

        `name_of` writes a compared value, given its column. Regrets (nat per token) are from the smallest
        scale to the largest; nan where something is not known.
        """
        rows = []
        for r in self.rulings:
            cost = (r.regret.value, r.regret.low, r.regret.high) if r.regret else (math.nan,) * 3
            rule = "" if r.alone else f": {name_of(r.rule, r.columns.parametrization)}"
            rows.append(
                {
                    "name": r.sweep + rule, "alpha": r.drift.alpha, "low": r.drift.low, "high": r.drift.high,
                    **dict(zip(("regret", "regret_low", "regret_high"), cost, strict=True)),
                    "regret_status": r.regret.status if r.regret else "not known",
                    "best_loss": r.result.optima[-1].loss, "verdict": r.decision,
                }
            )  # fmt: skip
        return pd.DataFrame(rows).sort_values(
            ["regret", "name"], ascending=[False, True], ignore_index=True, na_position="first"
        )


def compare(
    folders: Mapping[str, str | Path],
    load: Callable[[str | Path], RunTable] = load_table,
    judge: Callable[[RunTable], TransferAnalysis] = analyze,
) -> Comparison:
    """Compare the sweeps of results folders, by their names.

    Raises:
        TableError: no folder has a sweep of several scales and values.
    """
    sweeps: dict[str, TransferAnalysis] = {}
    left_out: dict[str, Reason] = {}
    for name, path in folders.items():
        try:
            if is_search(path):
                left_out[name] = Reason.of("a search")
                continue
            table = load(path)
            scale, tuned = table.columns.scale, table.columns.hyperparameter
            if table.runs["scale"].nunique() < 2:
                left_out[name] = Reason.of("one scale", column=scale)
            elif table.runs.groupby("scale")["x"].nunique().max() < 2:
                left_out[name] = Reason.of("one value", column=scale, tuned_column=tuned)
            else:
                sweeps[name] = judge(table)
        except MupTpuError as error:
            left_out[name] = Reason.of("refused", error=str(error))
    if not sweeps:
        whys = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise TableError(f"no folder has a sweep to compare: {whys}")
    return replace(Comparison.of(sweeps), left_out=left_out)


def predictions_inside(root: Path) -> dict[str, list[bool]]:
    """Return whether the intervals of kept predictions hold the optima that came out, by folder of `root`."""
    inside: dict[str, list[bool]] = {}
    for file in sorted(root.rglob(PREDICTIONS)):
        with contextlib.suppress(MupTpuError):
            folder, runs = file.parent, load_runs(file.parent)
            made = load_predictions(folder)
            kept = [p for p in made if p.scale in {*runs.get(p.scale_column, ())} - {*p.scales}]
            if not kept:
                continue
            scores = score(kept, analyze(load_table(folder), whole=False))
            if known := [one.is_inside for one in scores if one.is_inside is not None]:
                inside.setdefault(file.relative_to(root).parts[0], []).extend(known)
    return inside


def parabola_slope(curves: Sequence[LossCurve]) -> float:
    """Return the drift exponent that a reader would fit by hand, as a check of ours.

    An optimum is the vertex of a parabola through a scale's five lowest points; the exponent is the slope of
    a straight line through the optima. Scales whose five points have no minimum between them are left out;
    nan for fewer than two.
    """
    optima = []
    for curve in curves:
        lowest_G = np.argsort(curve.mean_G)[: min(5, np.isfinite(curve.mean_G).sum())]
        x_G = curve.x_G[lowest_G]
        if len(x_G) >= 3:
            bend, tilt, _ = np.polyfit(x_G, curve.mean_G[lowest_G], 2)
            if bend > 0 and x_G.min() <= (x := -tilt / (2 * bend)) <= x_G.max():
                optima.append((math.log2(curve.scale), x))
    if len(optima) < 2:
        return math.nan
    log_scale_S, x_S = np.transpose(optima)
    return float(np.polyfit(log_scale_S, x_S, 1)[0])


def _place(ruling: Ruling) -> tuple[str, bool, str, str, str]:
    compared = ruling.columns.parametrization
    return label(ruling.columns.scale), compared != _FIRST, compared, ruling.rule, ruling.sweep
