"""Plans: what they assume of runs before these are made; targets in a folder, and the optimum there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from mup_tpu.analysis.design import REACH, Cell
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.ingest.table_values import Reading
from mup_tpu.analysis.load import check_table, default_columns
from mup_tpu.analysis.optimum import Estimate, LossCurve, Optimum
from mup_tpu.analysis.prediction import RulePrediction, Surroundings, best_value, frame_of
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.result import Shown
from mup_tpu.analysis.run_table import run_cost
from mup_tpu.analysis.scaling_law import LEAST, ExpectedLoss, expected_loss
from mup_tpu.analysis.surface import Interaction
from mup_tpu.analysis.together import analyze_together
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.analysis.trend import LAWFUL, Priors, Trend, claims, fit_trend, fixed, kind_of, priors_of
from mup_tpu.analysis.valley import Valley
from mup_tpu.analysis.verdict import Question, weigh
from mup_tpu.config.columns import CONFIGURED
from mup_tpu.errors import StoreError, TableError, raised_as
from mup_tpu.files import require_seal, sealed
from mup_tpu.store import holds_store, load_runs, results_folder
from mup_tpu.store.header import KeptPrediction, fingerprint, read_file, write_file

_PER_RUN = 0.1  # Squared standard error of an optimum times runs within reach, octaves²: median of 162 sweeps
_FLOOR = 0.04**2  # Squared standard error that no seed takes away, octaves²: the valley's unknown shape
_CURVATURES = {"width": 0.065, "depth": 0.14, "batch size": 0.047, "tokens": 0.026, "size": 0.036}
_USUAL_CURVATURE = 0.05  # Mean curvatures of valleys in the stored and public sweeps, nat per octave²


def runs_within_reach(cells: Sequence[Cell]) -> float:
    """Mean number of runs within reach of an optimum up to half an octave from the cells' middle."""
    middle = (cells[0].x + cells[-1].x) / 2
    return sum(c.runs * min(1.0, max(0.0, REACH + 0.5 - abs(c.x - middle))) for c in cells)


@dataclass(frozen=True)
class Assumed:
    """Drift and valleys of one rule along one scale, before it is run."""

    priors: Priors
    curvature: float  # Curvature of the valley at the target, nat per octave²
    per_run: float  # Squared standard error of an optimum from one run, octaves²
    source: Reason  # Origin of the numbers

    @classmethod
    def usual(cls, scale: str, rule: str) -> Assumed:
        """Return numbers of stored and public sweeps of a kind of scale, by its column."""
        kind = kind_of(scale)
        claimed = claims(rule, kind)
        priors = priors_of(scale, claimed)
        source = Reason.of("usual sweeps", count=priors.sweeps, kind=kind, keeps=rule if claimed else "")
        return cls(priors, _CURVATURES.get(kind, _USUAL_CURVATURE), _PER_RUN, source)

    @classmethod
    def measured(cls, analysis: TransferAnalysis, rule: str) -> Assumed:
        """Return assumptions fitted to the user's own table."""
        result = next((r for r in analysis.results if r.compared == rule), analysis.results[0])
        priors = priors_of(analysis.scale, claims(rule, kind_of(analysis.scale)))
        trend = fit_trend(result.optima, priors, result.valleys)
        if trend is None:
            raise TableError(
                f"from {analysis.name!r}: a plan needs two {analysis.scale}s with a known optimum of "
                f"{result.compared}"
            )
        known = [
            (o, c, v)
            for o, c, v in zip(result.optima, result.curves, result.valleys, strict=True)
            if o.is_bracketed and v is not None
        ]
        per_runs = [o.se**2 * float(c.count_G[np.abs(c.x_G - o.x) <= REACH].sum()) for o, c, _ in known]
        source = Reason.of("this sweep", name=analysis.name, compared=result.compared)
        after = replace(priors, steady=trend.steady, mean=trend.slope().mean)
        return cls(after, float(known[-1][2].curvature_R.mean()), float(np.median(per_runs)), source)

    def error(self, runs: float) -> float:
        # Squared standard error of an optimum from some runs within reach of it, octaves²
        return max(self.per_run / runs, _FLOOR)

    def regret(self, variance: float) -> float:
        # Expected regret of a value of some variance, nat
        return self.curvature / 2 * variance


# An exponent whose error is this share of the prior's is known by the prior alone
_PRIOR_SHARE = 0.8

FILE = "plan.json"


@dataclass(frozen=True)
class Planned:
    """A plan in its results folder: the target, and the sizes to run, the cheapest first."""

    tuned: tuple[str, ...]  # Columns of the hyperparameters
    compared: str  # Column of the compared field
    follows: tuple[str, ...]  # Sizes that the optimum may follow
    target: dict[str, float]  # Sizes of the target
    cells: tuple[tuple[dict[str, float], dict[str, float]], ...]
    """Values of each cell by column, and its sizes."""
    rule: str = ""
    fix: dict[str, float] = field(default_factory=dict)  # Known exponents by size
    values: dict[str, Any] = field(default_factory=dict)  # Of the target's run, by names of whoever trains it
    derived: tuple[str, ...] = ()  # Laws behind values that were not given, a sentence each
    promised: tuple[dict[str, Any], ...] = ()
    """What the plan expected of each cell: runs, cost, octaves and regret at the target after it."""
    unit: str = "FLOP"  # Of its costs: s or FLOP
    published: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What published laws say at the target before any run: log2 of a hyperparameter, and its error."""

    def claimed(self, tuned: str) -> tuple[str, ...]:
        return tuple(n for n in self.follows if n not in self.fix and claims(self.rule, kind_of(n), tuned))

    def priors(self, tuned: str) -> tuple[Priors, ...]:
        claimed = self.claimed(tuned)
        return tuple(
            fixed(self.fix[name]) if name in self.fix else priors_of(name, name in claimed)
            for name in self.follows
        )

    def trend(self, tuned: str, known: Mapping[int, Profile | Estimate]) -> Trend:
        sizes = np.array([self.sizes(self.cells[cell][1]) for cell in known])
        optima = [(e.optimum.mean, e.optimum.se) for e in known.values()]
        if tuned in self.published:  # a prior is a measurement that came first
            sizes = np.vstack([sizes, self.sizes(self.target)])
            optima.append(self.published[tuned])
        x_S, error_S = np.array(optima).T
        return Trend(sizes, x_S, error_S, self.priors(tuned), lawful=LAWFUL if len(self.follows) > 1 else 0.0)

    def sizes(self, values: Mapping[str, float]) -> list[float]:
        return [values[name] for name in self.follows]

    def rows_of(self, rows: pd.DataFrame, cell: int) -> pd.Series:
        """Return which rows are a cell's."""
        values = pd.Series(self.cells[cell][0], dtype=object)
        return (rows[values.index] == values).all(axis=1)

    def estimates(self, rows: pd.DataFrame) -> Estimates:
        """Return the optimum of each cell that has been run, by its number, for each hyperparameter."""
        of_cells = (rows[self.rows_of(rows, i)].assign(**sizes) for i, (_, sizes) in enumerate(self.cells))
        known = pd.concat(of_cells) if len(rows) else rows
        if known.empty or not np.isfinite(known["loss"].astype(float)).any():
            return Estimates({name: {} for name in self.tuned})
        (scale, *scales), (first, *tuned) = self.follows, self.tuned
        columns = Columns(scale, first, "loss", parametrization=self.compared)
        columns = replace(columns, scales_beside=tuple(scales), tuned_beside=tuple(tuned))
        taken = [*self.follows, *self.tuned, *([self.compared] if self.compared in known else [])]
        checked = check_table(known[[*taken, "loss", "status", "seed"]], Reading(columns))
        question = Question.of(checked)
        optima: dict[str, list[Profile | Estimate]] = {}
        if tuned:
            result = analyze_together(self.rule, checked.runs, question, run_cost(checked), whole=False)
            for name, part in zip(self.tuned, result.parts, strict=True):
                optima[name] = [*map(Profile, part.optima, part.valleys, part.curves)]
        else:
            optima[first] = [*weigh(checked.runs, question).estimates]
        by_cell = {
            name: {
                cell: e
                for e in each
                for cell, (_, sizes) in enumerate(self.cells)
                if tuple(self.sizes(sizes)) == e.optimum.sizes
            }
            for name, each in optima.items()
        }
        return Estimates(by_cell, result.pairs if tuned else ())

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Planned:
        """Convert the plain values of a plan's fields, and check them."""
        planned = cls(
            tuple(map(str, values["tuned"])),
            str(values["compared"]),
            tuple(values["follows"]),
            {str(k): float(v) for k, v in values["target"].items()},
            tuple(({**at}, {**sizes}) for at, sizes in values["cells"]),
            str(values["rule"]),
            {str(k): float(v) for k, v in values["fix"].items()},
            dict(values["values"]),
            tuple(map(str, values["derived"])),
            tuple(map(dict, values.get("promised", ()))),
            str(values.get("unit", "FLOP")),
            {str(n): (float(x), float(se)) for n, (x, se) in values.get("published", {}).items()},
        )
        if not planned.tuned or not planned.follows or not planned.cells:
            raise ValueError("the plan has no hyperparameter, size or cell")
        for sizes in (planned.target, *(of_cell for _, of_cell in planned.cells)):
            for name in planned.follows:
                if not 0 < sizes[name] < math.inf:
                    raise ValueError(f"the plan has {name} {sizes[name]}, which is no size")
        if not all(name in planned.follows and math.isfinite(x) for name, x in planned.fix.items()):
            raise ValueError(f"the plan fixes {planned.fix}, which are no exponents of its sizes")
        if not all(abs(x) < 1000 and 0 < se < 1000 for x, se in planned.published.values()):
            raise ValueError(f"the plan has {planned.published} by laws, which are no values with errors")
        return planned

    @classmethod
    def load(cls, folder: str) -> Planned | None:
        """Return the plan of a results folder; None if it holds none."""
        content = read_file(results_folder(folder), FILE)
        if content is None:
            return None
        misfits = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
        with raised_as(StoreError, f"results folder {folder}: {FILE} cannot be read", misfits):
            values = json.loads(content)
            require_seal(values, "the plan")
            return cls.parse(values)

    def keep(self, folder: str) -> None:
        write_file(results_folder(folder), FILE, json.dumps(sealed(asdict(self)), indent=1).encode())


class Profile(NamedTuple):
    """Optimum and valley of one hyperparameter at a size, with the others at their best."""

    optimum: Optimum
    valley: Valley | None
    curve: LossCurve | None


@dataclass(frozen=True)
class Estimates:
    """Optima of a plan's cells."""

    optima: dict[str, dict[int, Profile | Estimate]]  # Of each hyperparameter, by cell
    pairs: tuple[Interaction, ...] = ()  # Interactions of several hyperparameters

    def known(self, tuned: str) -> dict[int, Profile | Estimate]:
        return {cell: e for cell, e in sorted(self.optima[tuned].items()) if e.optimum.is_bracketed}


@dataclass(frozen=True)
class PlannedOptimum(RulePrediction):
    """Prediction of a hyperparameter at the target of a plan."""

    octave_cost: float = math.nan  # Of an error of one octave, nat; nan if no curvature is known
    exponents: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Exponent of each size and its standard deviation."""
    by_prior: tuple[str, ...] = ()  # Sizes whose exponent the runs hardly tell
    by_rule: tuple[str, ...] = ()  # Sizes along which the rule claims to keep the optimum
    known: int = 0  # Cells with a known optimum
    published: tuple[float, float] | None = None  # What laws say before any run: log2, and its error


@dataclass(frozen=True)
class PlannedSize:
    """What came of a planned size, beside what the plan promised."""

    values: dict[str, Any]
    runs: int
    seconds: float  # Of all of its runs
    octaves: tuple[float, ...]
    """Half-width of each 95 % interval at the target by this size and those before; nan if not known."""
    promised: dict[str, Any]


@dataclass(frozen=True)
class AtTarget:
    """What runs of the target itself brought."""

    runs: int
    loss: float  # Least mean loss of a value, nat; +inf if every run diverged
    best: dict[str, float]  # Hyperparameters of that loss
    values: int  # Points of the hyperparameters that were run
    regret: float  # Loss at the point nearest to the predicted one, less the least, nat


@dataclass(frozen=True, repr=False)
class Recipe(Shown):
    """All values of a plan's target: predicted, given and derived."""

    rule: str
    sizes: dict[str, float]  # Of the target
    optima: tuple[PlannedOptimum, ...]  # One a hyperparameter
    loss: ExpectedLoss | None  # Of a tuned run of the target
    why_no_loss: Reason | None
    values: dict[str, Any]  # Of the target's run, without tuned ones
    fix: dict[str, float]
    derived: tuple[str, ...]
    pairs: tuple[Interaction, ...]
    cells: int
    steps: tuple[PlannedSize, ...]
    came: AtTarget | None  # None if the target has not been run
    unit: str  # Of promised costs
    loss_name: str  # As the runs call what they are judged by
    loss_unit: str  # "nat", "bpb" or its name again
    runs: int
    rows: str  # Fingerprint of the runs

    def to_frame(self) -> pd.DataFrame:
        return frame_of(self.optima, "rule")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; those of a single hyperparameter are also keys of the top level."""
        tuned = [one.to_dict() for one in self.optima]
        return (tuned[0] if len(tuned) == 1 else {}) | asdict(self) | {"optima": tuned}

    def kept(self, compared: str, scale_column: str, scale: float) -> list[KeptPrediction]:
        """Return the predictions as they are kept beside a run of the target."""
        made = (replace(one, compared=compared, scale=scale, loss=self.loss) for one in self.optima)
        return [one.kept(self.runs, self.rows, scale_column) for one in made]


def predict_planned(folder: str, at: Mapping[str, float] | None = None) -> Recipe | None:
    """Predict the optima at the target of a folder's plan, or at other sizes; None without a plan."""
    planned = Planned.load(folder)
    if planned is None:
        return None
    if unknown := next((name for name in at or {} if name not in planned.follows), None):
        raise TableError(f"at {unknown!r}: the plan follows {', '.join(planned.follows)}")
    if below := next((f"{name}={size:g}" for name, size in (at or {}).items() if not size > 0), None):
        raise TableError(f"at {below} is not allowed: a size is above 0")
    target = planned.target | dict(at or {})
    rows = load_runs(folder)
    estimates, made = planned.estimates(rows), list[PlannedOptimum]()
    for tuned in planned.tuned:
        known = estimates.known(tuned)
        if not known:
            raise TableError("no planned size has an optimum inside its grid yet: run the plan first")
        trend, every = planned.trend(tuned, known), [*estimates.optima[tuned].values()]
        optimum, octave, around = trend.optimum(planned.sizes(target)), math.nan, None
        if (valley := [*known.values()][-1].valley) is not None:
            curves, optima, valleys = zip(*((e.curve, e.optimum, e.valley) for e in every), strict=True)
            around = Surroundings.of(curves, optima, valleys, planned.sizes(target)[0])
            octave = float(valley.curvature_R.mean()) / 2
        exponents = dict(zip(planned.follows, trend.exponents(planned.sizes(target)), strict=True))
        by_prior = []
        for name, prior in zip(planned.follows, planned.priors(tuned), strict=True):
            octaves = math.log2(target[name] / min(planned.cells[cell][1][name] for cell in known))
            mean, square = prior.moves(octaves)
            is_prior = octaves * exponents[name][1] > _PRIOR_SHARE * (square - mean**2) ** 0.5
            by_prior += [name] if is_prior and name not in planned.fix else []
        made.append(
            PlannedOptimum(
                planned.rule,
                tuned,
                "the target",
                planned.sizes(target)[0],
                {name: target[name] for name in planned.follows},
                **best_value(optimum, around),
                octave_cost=octave,
                exponents=exponents,
                by_prior=tuple(by_prior),
                by_rule=planned.claimed(tuned),
                known=len(known),
                published=planned.published.get(tuned),
            )  # fmt: skip
        )
    loss, columns = _loss(planned, estimates.known(planned.tuned[0]), target), default_columns(folder)
    return Recipe(
        rule=planned.rule,
        sizes={name: target[name] for name in planned.follows},
        optima=tuple(made),
        loss=None if isinstance(loss, Reason) else loss,
        why_no_loss=loss if isinstance(loss, Reason) else None,
        values=_values(planned, at or {}),
        fix=planned.fix,
        derived=planned.derived if at is None else (),
        pairs=tuple(pair for pair in estimates.pairs if pair.interacts),
        cells=len(planned.cells),
        steps=_steps(planned, rows, estimates, target),
        came=None if at else _at_target(planned, folder, rows, [one.x for one in made]),
        unit=planned.unit,
        loss_name=columns.loss_name,
        loss_unit=columns.unit,
        runs=len(rows),
        rows=fingerprint(rows["trial_id"].tolist()),
    )


def _steps(
    planned: Planned, rows: pd.DataFrame, estimates: Estimates, target: Mapping[str, float]
) -> tuple[PlannedSize, ...]:
    made = []
    for cell, (values, _) in enumerate(planned.cells):
        octaves = []
        for tuned in planned.tuned:
            known = {c: e for c, e in estimates.known(tuned).items() if c <= cell}
            if cell in known:
                optimum = planned.trend(tuned, known).optimum(planned.sizes(target))
                octaves.append((optimum.quantile(0.975) - optimum.quantile(0.025)) / 2)
            else:
                octaves.append(math.nan)
        runs = rows[planned.rows_of(rows, cell)]
        promised = planned.promised[cell] if cell < len(planned.promised) else {}
        seconds = float(runs["wall_time_s"].sum())
        made.append(PlannedSize(values, len(runs), seconds, tuple(octaves), promised))
    return tuple(made)


def _at_target(
    planned: Planned, folder: str, rows: pd.DataFrame, predicted: Sequence[float]
) -> AtTarget | None:
    """Return what came of runs at the target, in the folder or in that of `mup-tpu transfer`."""
    beside = f"{folder.rstrip('/')}_transfer"
    for column in planned.cells[0][0]:
        field = CONFIGURED[column].field if column in CONFIGURED else column
        rows = rows[rows[column] == planned.values.get(field)]
    if rows.empty and holds_store(beside):
        rows = load_runs(beside)
    tuned = [*planned.tuned]
    rows = rows[rows["status"].isin(("finished", "diverged"))] if {*tuned} <= {*rows} else rows[:0]
    if rows.empty:
        return None
    loss = rows["loss"].where(rows["status"] == "finished", math.inf)
    loss_P = loss.groupby([rows[name] for name in tuned]).mean()
    points_PH = np.log2(loss_P.index.to_frame().to_numpy(float))
    nearest = int(np.abs(points_PH - np.asarray(predicted)).sum(axis=1).argmin())
    best, least = int(loss_P.argmin()), float(loss_P.min())
    regret = float(loss_P.iloc[nearest]) - least if math.isfinite(least) else math.nan
    values = dict(zip(tuned, map(float, 2.0 ** points_PH[best]), strict=True))
    return AtTarget(len(rows), least, values, len(loss_P), regret)


def _values(planned: Planned, at: Mapping[str, float]) -> dict[str, Any]:
    """Return the values of a run of the target, or of other sizes."""
    values = dict(planned.values)
    for name, size in at.items():
        if name in values:
            values[name] = type(values[name])(size)
    if {"tokens", "batch"} & {*at} and "steps" in values:
        # Our networks count a batch in sequences; only the plan knows its tokens.
        sizes = planned.target | dict(at)
        batch = sizes.get("batch") or values.get("batch") or planned.target["tokens"] / values["steps"]
        values["steps"] = round(sizes["tokens"] / batch)
    return values


def _loss(
    planned: Planned, known: Mapping[int, Profile | Estimate], target: Mapping[str, float]
) -> ExpectedLoss | Reason | None:
    """Predict the loss at the target by the cells of a ladder, where all sizes grow by the same share."""
    end_A = np.log2(planned.sizes(target))
    first_A = np.log2(planned.sizes(planned.cells[0][1]))
    if (end_A <= first_A).any():
        return None
    points = list[tuple[float, float]]()
    for cell, e in known.items():
        share_A = (np.log2(planned.sizes(planned.cells[cell][1])) - first_A) / (end_A - first_A)
        if np.ptp(share_A) < 0.15 and (not points or share_A.mean() > points[-1][0] + 0.02):
            points.append((float(share_A.mean()), e.optimum.loss))
    octaves = float((end_A - first_A).sum())
    if len(points) < LEAST:
        return Reason.of("few on the way", known=len(points), needed=LEAST)
    share_S, loss_S = np.reshape(points, (-1, 2)).T
    return expected_loss(loss_S, 2.0 ** (octaves * share_S), 2.0**octaves)
