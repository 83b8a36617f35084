"""Optima predicted from smaller scales: calibration by distance, and density-based priors.

    python benchmarks/prediction.py --results results --tables FOLDER --out benchmarks/prediction.csv

Sweeps: every rule of every stored and public sweep with three known optima or more, and tables in a folder; a
table with several batch sizes, parameters N and tokens D is one sweep for each way to hold two of them fixed.
Each prefix of two optima or more predicts every later one. Intervals are widened by the later optimum's own
error. Nothing of a sweep of one half of the sources has a part in the priors that score it.

Shapes: S scales.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from scipy import optimize, stats

from mup_tpu.analysis import Columns, RunTable, check_table, load_table
from mup_tpu.analysis.trend import Mixture, Pace, Priors, Trend, claims, kind_of, priors_of
from mup_tpu.analysis.verdict import Question, weigh
from mup_tpu.errors import MupTpuError

RANGES = (0.0, 1.25, 2.4, 3.6, 99.0)
"""Bounds of the distances, octaves, by which calibration is counted."""


@dataclass(frozen=True)
class Case:
    """A later optimum and those before it."""

    source: str
    """Repository or experiment that the runs come from."""
    sweep: str
    kind: str
    claimed: bool
    scales: tuple[float, ...]
    x_S: tuple[float, ...]
    error_S: tuple[float, ...]
    target: float
    x: float
    error: float

    @property
    def octaves(self) -> float:
        """Distance of the target from the largest scale of the prefix."""
        return math.log2(self.target / self.scales[-1])

    def predicted(self, priors: Priors) -> Mixture:
        """Prediction, with the target's own error."""
        made = Trend(self.scales, np.array(self.x_S), np.array(self.error_S), (priors,)).optimum(self.target)
        return replace(made, deviation_K=np.hypot(made.deviation_K, self.error))

    def log_density(self, priors: Priors) -> float:
        """Log density of the later optimum."""
        made = self.predicted(priors)
        log_K = stats.norm.logpdf(self.x, made.mean_K, made.deviation_K)
        return float(np.log(made.weight_K @ np.exp(np.maximum(log_K, -30.0))))


def sweeps_of(results: Path, tables: Path | None) -> Iterator[tuple[str, str, RunTable]]:
    """Source, name and table of every sweep."""
    for header in sorted(results.rglob("store.json")):
        try:
            name = str(header.parent.relative_to(results))
            yield f"stored/{name.split('/')[0]}", name, load_table(header.parent)
        except MupTpuError:
            continue
    for file in sorted((results / "public" / "rows").glob("*.csv")):
        try:
            yield file.stem, file.stem, load_table(file)
        except MupTpuError as error:
            print(f"{file.name} left out: {error}")
    for file in sorted(tables.glob("*.csv")) if tables else ():
        frame = pd.read_csv(file)
        size = "Na" if "Na" in frame else "N"
        for scale in (size, "D", "bs"):
            fixed = [c for c in (size, "D", "bs") if c != scale]
            for values, part in frame.groupby(fixed):
                means = part.groupby([scale, "lr"], as_index=False)["smooth loss"].mean()
                if means[scale].nunique() >= 3:
                    # All cells that share two values share runs with others: one source a table and scale.
                    name = f"{file.stem}/{scale}/{values}"
                    yield (
                        f"{file.stem}/{scale}",
                        name,
                        check_table(means, Columns(scale=scale, loss="smooth loss")),
                    )


def cases_of(source: str, name: str, table: RunTable) -> Iterator[Case]:
    """Prefixes and later optima of each rule."""
    table = replace(table, planned=())
    kind = kind_of(table.columns.scale)
    for rule, runs in table.runs.groupby("compared"):
        known = [
            e.optimum
            for e in weigh(runs, Question.of(table)).estimates
            if e.optimum.is_bracketed and e.optimum.status != "flat"
        ]
        if len({o.x for o in known}) == 1:
            continue
        for first in range(2, len(known)):
            for later in known[first:]:
                yield Case(
                    source, f"{name} {rule}", kind, claims(str(rule), kind), tuple(o.scale for o in
                    known[:first]), tuple(o.mean for o in known[:first]), tuple(o.se for o in known[:first]),
                    later.scale, later.mean, later.se,
                )  # fmt: skip


def half(source: str) -> int:
    """Half of the sources."""
    return hashlib.sha256(source.encode()).digest()[0] % 2


def calibration(cases: Sequence[Case], priors_of_case: dict[int, Priors]) -> pd.DataFrame:
    """Coverage, CRPS and regret-like squares by distance."""
    rows = []
    quantiles = np.arange(0.025, 1.0, 0.05)
    for i, case in enumerate(cases):
        made = case.predicted(priors_of_case[i])
        at_Q = np.array([made.quantile(q) for q in quantiles])
        low, high = made.quantile(0.025), made.quantile(0.975)
        inner = made.quantile(0.25), made.quantile(0.75)
        crps = 2 * float(np.mean((case.x - at_Q) * (quantiles - (case.x < at_Q))))
        line = np.polyval(np.polyfit(np.log2(case.scales), case.x_S, 1), math.log2(case.target))
        rows.append(
            {
                "range": int(np.searchsorted(RANGES, case.octaves)) - 1,
                "source": case.source,
                "kind": case.kind,
                "in 50 %": inner[0] <= case.x <= inner[1],
                "in 95 %": low <= case.x <= high,
                "crps": crps,
                "crps of a line": abs(case.x - line),
                "crps of the last": abs(case.x - case.x_S[-1]),
                "realised / promised": (case.x - made.mean) ** 2,
                "promised": made.variance,
            }
        )
    table = pd.DataFrame(rows)
    # A source counts once, however many cells of it there are.
    table["weight"] = 1 / table.groupby(["range", "source"])["source"].transform("size")
    return table


def summary(table: pd.DataFrame, weighted: bool) -> pd.DataFrame:
    """Means by range."""
    rows = {}
    for number, part in table.groupby("range"):
        weight = part["weight"] if weighted else np.ones(len(part))
        mean = {c: np.average(part[c].astype(float), weights=weight) for c in part if c not in _NAMES}
        mean["realised / promised"] /= mean.pop("promised")
        name = f"{RANGES[number]:g} to {RANGES[number + 1]:g}"
        rows[name] = {"n": len(part), "sources": part["source"].nunique(), **mean}
    return pd.DataFrame(rows).T.round(3)


_NAMES = ("range", "source", "kind", "weight")


def priors_from(logs: np.ndarray, kind: str) -> Priors:
    """Priors by the logarithms of their numbers."""
    slope, wander, memory, scatter, calm, breaks = np.exp(np.clip(logs[:6], -5, 3))
    base = priors_of("width")
    return replace(
        base, steady=float(1 / (1 + math.exp(-logs[6]))), scatter=scatter, mean=float(logs[7]),
        quiet=Pace(calm, calm), moving=Pace(slope, wander, memory), breaks=min(breaks, 0.5),
    )  # fmt: skip


def chosen(cases: Sequence[Case], kind: str, start: Priors) -> Priors:
    """Priors of the highest density at later optima, a source counting as the root of its cases."""
    counts = pd.Series([c.source for c in cases]).value_counts()
    weights = np.array([counts[c.source] ** -0.5 for c in cases])
    odds = math.log(start.steady / (1 - start.steady))
    first = np.r_[
        np.log([start.moving.slope, max(start.moving.wander, 0.01), start.moving.memory, start.scatter]),
        np.log([start.quiet.slope, max(start.breaks, 0.01)]), odds, start.mean,
    ]  # fmt: skip

    def loss(logs: np.ndarray) -> float:
        priors = priors_from(logs, kind)
        away = 1.5 * float((((logs - first) / np.r_[np.full(6, 0.7), 1.0, 0.2]) ** 2).sum())
        return away - float(sum(w * c.log_density(priors) for w, c in zip(weights, cases, strict=True)))

    best = optimize.minimize(loss, first, method="Nelder-Mead", options={"maxiter": 120, "fatol": 0.05}).x
    return priors_from(best, kind)


def main(
    results: Path = Path("results"), tables: Path | None = None, out: Path | None = None, choose: bool = False
) -> None:
    """Print calibration by distance: of the package's priors, and of priors chosen on the other half of
    sources.

    Args:
        results: Folder of results folders.
        tables: Folder of tables.
        out: CSV file for a row for each later optimum.
        choose: Choose priors too, which takes minutes.
    """
    cases = [case for sweep in sweeps_of(results, tables) for case in cases_of(*sweep)]
    columns = {"batch size": "bs", "size": "n"}
    own = {i: priors_of(columns.get(c.kind, c.kind), c.claimed) for i, c in enumerate(cases)}
    table = calibration(cases, own)
    sweeps, sources = len({c.sweep for c in cases}), len({c.source for c in cases})
    print(f"{len(cases)} later optima of {sweeps} sweeps of {sources} sources")
    print(summary(table, False).to_string(), summary(table, True).to_string(), sep="\n")
    print(table.groupby("kind")[["in 50 %", "in 95 %", "crps", "crps of a line"]].mean().round(3).to_string())
    if choose:
        held_out = {}
        for kind in sorted({c.kind for c in cases}):
            for h in (0, 1, 2):
                part = [c for c in cases if c.kind == kind and (h == 2 or half(c.source) != h)]
                start = priors_of(columns.get(kind, kind))
                found = chosen(part, kind, start) if len(part) >= 10 else start
                print(kind, h, len(part), found, flush=True)
                if h < 2:
                    for i, c in enumerate(cases):
                        if c.kind == kind and half(c.source) == h:
                            steady = own[i].steady if c.claimed else found.steady
                            held_out[i] = replace(found, steady=steady)
        print("priors of the other half of the sources")
        print(summary(calibration(cases, held_out), False).to_string())
    if out is not None:
        table.to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
