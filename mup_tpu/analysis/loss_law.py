"""Laws of the loss from tables without a learning rate: (parameters, tokens, loss) or (compute, loss).

Each recipe of a table has its law (scaling_law.py). From it follow losses and best sizes at targets, how much
more compute another recipe needs for the same loss, and a test: the largest run, predicted from smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.expressions import with_derived
from mup_tpu.analysis.ingest.table_columns import SIZES, Columns, Usual, means, plain_name
from mup_tpu.analysis.ingest.table_values import Reading, numbers, plain_size, plain_sizes
from mup_tpu.analysis.load import Place, check_table, read_rows
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.result import Shown
from mup_tpu.analysis.run_table import RunTable, each_of, no_column
from mup_tpu.analysis.scaling_law import FLOP, BestSize, ExpectedLoss, ScalingLaw, fit_scaling_law
from mup_tpu.config import on_one_line
from mup_tpu.config.values import as_number
from mup_tpu.errors import TableError, given

PARAMS, TOKENS, COMPUTE = "params", "tokens", "compute"
_CONTRADICTS = 4.0  # a larger factor between compute and 6·N·D is a contradiction
# Standard deviation of log(D) about its line in log(N), above which parameters and tokens are told apart
_TOGETHER = 0.05
_LARGEST = 0.9  # runs of at least this share of the largest compute are held out together
_ABOUT_SWEEPS = ("unequal seeds", "repeats are seeds", "mixed", "confounded")  # notes that are not of points
_NAMES = {
    PARAMS: "n parameters params_non_embedding non_embedding_params parameter_count active_params",
    TOKENS: "d tokens total_tokens throughput_total_tokens",
    COMPUTE: "c compute flop flops training_flop training_flops train_flops total_flops budget flop_budget",
}
_MEANINGS = {PARAMS: "size", TOKENS: "tokens"}


@dataclass(frozen=True)
class LargestRun:
    """The largest run, predicted from all that are not as large."""

    sizes: tuple[float, ...]
    count: int  # runs that were held out; this is the one with the least loss
    loss: float
    expected: ExpectedLoss


@dataclass(frozen=True, eq=False)
class RecipeLaw:
    """Law of one recipe's losses, with its points."""

    compared: str
    sizes: tuple[str, ...]  # params and tokens, or one size
    size_PA: np.ndarray
    loss_P: np.ndarray
    law: ScalingLaw

    @property
    def is_of_both(self) -> bool:
        return self.sizes == (PARAMS, TOKENS)

    @property
    def compute_P(self) -> np.ndarray:
        return self.compute_of(self.size_PA)

    def compute_of(self, size_PA: np.ndarray) -> np.ndarray:
        # Of a law of one size that size itself
        return FLOP * size_PA.prod(axis=1) if self.is_of_both else size_PA[:, 0]

    @cached_property
    def frontier(self) -> ScalingLaw:
        return self.law.along_compute()

    @cached_property
    def held_out(self) -> LargestRun | Reason:
        is_large = self.compute_P >= _LARGEST * self.compute_P.max()
        rest = self.size_PA[~is_large].T
        try:
            law = fit_scaling_law(self.loss_P[~is_large], *rest, asymptote=self.law.asymptote)
        except TableError as error:
            return Reason.of("refused", error=str(error))
        best = np.flatnonzero(is_large)[self.loss_P[is_large].argmin()]
        sizes = tuple(self.size_PA[best].tolist())
        return LargestRun(sizes, int(is_large.sum()), float(self.loss_P[best]), law.predict(*sizes))


@dataclass(frozen=True)
class Speedup:
    """Compute that the baseline needs for a recipe's loss, over the recipe's, with its 95 % interval."""

    compared: str
    baseline: str
    at: float  # compute of the recipe, or the law's only size
    factor: float
    low: float
    high: float


@dataclass(frozen=True)
class LossTarget:
    """A loss, or the best size of a budget, of one recipe."""

    compared: str
    sizes: dict[str, float]
    expected: ExpectedLoss
    best: BestSize | None = None


@dataclass(frozen=True, repr=False, eq=False)
class LossLaws(Shown):
    """Laws of all recipes of a table."""

    table: RunTable
    notes: tuple[Reason, ...]
    laws: tuple[RecipeLaw, ...]
    targets: tuple[LossTarget, ...]
    speedups: tuple[Speedup, ...]

    @property
    def sizes(self) -> tuple[str, ...]:
        return self.laws[0].sizes

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each recipe: the parameters of its law."""
        return pd.DataFrame([{"recipe": one.compared, **one.law.parameters} for one in self.laws])

    def to_dict(self) -> dict[str, Any]:
        return {
            "laws": [
                {
                    "recipe": one.compared,
                    "sizes": list(one.sizes),
                    "runs": len(one.loss_P),
                    "fit": one.law.parameters,
                    "intervals": one.law.intervals,
                    "scatter": one.law.scatter,
                    **({"split": one.law.split} if one.is_of_both else {}),
                    **({} if isinstance(one.held_out, Reason) else {"held_out": asdict(one.held_out)}),
                }
                for one in self.laws
            ],
            "targets": [asdict(target) for target in self.targets],
            "speedups": [asdict(speedup) for speedup in self.speedups],
        }


def loss_laws(
    path: Place | pd.DataFrame,
    at: Sequence[str] = (),
    asymptote: float | None = None,
    reading: Reading = Reading(),
) -> LossLaws:
    """Fit a law of the loss to each recipe of a table, and predict losses at targets.

    Examples:
        >>> sizes = [(n, d) for n in (1e7, 1e8, 1e9) for d in (1e9, 1e10, 1e11)]
        >>> runs = pd.DataFrame(sizes, columns=["N", "D"])
        >>> runs["loss"] = 1.8 + 500 * runs["N"] ** -0.35 + 2000 * runs["D"] ** -0.37
        >>> print(f"{loss_laws(runs, ['compute=1e21']).targets[0].best.params[0]:.2g}")
        3.3e+09

    Args:
        path: a results folder, a table in a file, or the runs of a tracker.
        at: targets: params=7e9,tokens=2e12, or compute=1e21 for the best size of a budget.
        asymptote: E, where it is not fitted.
        reading: how the table is read; its parametrization is the column of the recipe, and its scales, where
            any are given, are the law's one or two sizes.

    Raises:
        TableError: too few runs, a loss or size that is not above 0, or compute that contradicts the sizes.
    """
    rows, read = read_rows(path, reading)
    table = _points(rows, read)
    runs, columns = table.runs[np.isfinite(table.runs["loss"])], table.columns
    if columns.maximized:
        raise TableError("a law of the loss needs a loss, and the table has a metric that is maximized")
    laws = []
    for compared, rows in runs.groupby("compared", sort=False):
        size_PA, loss_P = rows[each_of("scale", rows)].to_numpy(float), rows["loss"].to_numpy(float)
        try:
            law = fit_scaling_law(loss_P, *size_PA.T, asymptote=asymptote)
        except TableError as error:
            raise TableError(str(error) if compared == "all" else f"{compared}: {error}") from None
        laws.append(RecipeLaw(str(compared), columns.scales, size_PA, loss_P, law))
    if not laws:
        raise TableError("no run of the table has a finite loss")
    targets, computes = list[LossTarget](), list[float]()
    for target in at:
        values = _read_target(target, laws[0])
        if (budget := values.get(COMPUTE)) is not None:
            computes.append(budget)
        for one in laws:
            if budget is None or not one.is_of_both:
                targets.append(LossTarget(one.compared, values, one.law.predict(*values.values())))
            else:
                best = one.law.best_size(budget)
                expected = one.frontier.predict(budget)
                targets.append(LossTarget(one.compared, values, expected, best))
    baseline = laws[0]
    # Without a target recipes are compared where each has runs.
    computes = computes or [min(float(one.compute_P.max()) for one in laws)]
    speedups = [
        Speedup(one.compared, baseline.compared, at, *one.frontier.speedup_over(baseline.frontier, at))
        for one in laws[1:]
        for at in computes
    ]
    whys = [(one.compared, why) for one in laws if (why := one.law.why_not_identified) is not None]
    unidentified = [Reason.of("law not identified", recipe=recipe, why=why) for recipe, why in whys]
    return LossLaws(table, (*table.notes, *unidentified), tuple(laws), tuple(targets), tuple(speedups))


def _points(rows: pd.DataFrame, reading: Reading) -> RunTable:
    """Return the runs of a table as points, whose scales are the law's sizes.

    Other settings may differ from run to run. Of several learning rates at one size the best is a point.
    """
    rows, columns = with_derived(rows.reset_index(drop=True), reading.columns or Columns())
    notes, roles = list[Reason](), (columns.loss, columns.parametrization, columns.seed, columns.status)
    needed = [name for name in roles if name and not isinstance(name, Usual)]
    needed += [] if any(means(c) == "loss" for c in rows) else [columns.loss]
    if missing := [name for name in dict.fromkeys(needed) if name not in rows]:
        raise TableError(no_column(rows, *missing))
    sizes = _sizes(rows, columns, notes)
    for name, values in sizes.items():
        if values.isna().any():
            raise TableError(f"{name} is empty in row {values.index[values.isna()][0]}")
    known = [c for c in rows if c in roles or means(c) or rows[c].dtype.kind not in "iuf"]
    known = [c for c in known if means(c) not in SIZES]
    at = [*sizes.values()]
    at += [rows[columns.parametrization].astype(str)] if columns.parametrization in rows else []
    rates = [str(c) for c in rows if c == columns.hyperparameter or means(c) == "lr"]
    tuned = next((c for c in rates if rows[c].astype(str).groupby(at).nunique().max() > 1), None)
    rate = 1.0 if tuned is None else rows[tuned]
    points = rows[[c for c in known if c not in rates]].assign(**sizes, **{tuned or "the_only_rate": rate})
    if columns.seed not in rows and not any(means(c) == "step" for c in points):
        by = at if tuned is None else [*at, rate]
        points = points.assign(**{columns.seed: rows.groupby(by, dropna=False).cumcount()})
    first, *beside = sizes
    columns = replace(
        columns, scale=first, scales_beside=tuple(beside), hyperparameter=tuned or "the_only_rate",
        tuned_beside=(), cost="", along=(), seed=str(columns.seed),
        params=PARAMS if PARAMS in sizes else Usual(), tokens=TOKENS if TOKENS in sizes else Usual(),
    )  # fmt: skip
    table = check_table(points, replace(reading, columns=columns, best_over=()))
    runs, cell = table.runs, ["compared", *each_of("scale", table.runs)]
    recipes = [*runs["compared"].unique()]
    if tuned is not None:
        means_X = runs.groupby([*cell, "x"], as_index=False)["loss"].mean()
        runs = runs.merge(means_X.loc[means_X.groupby(cell)["loss"].idxmin(), [*cell, "x"]])
        notes.append(Reason.of("best of rates", name=tuned))
    notes = [note for note in table.notes if note.code not in _ABOUT_SWEEPS] + notes
    runs = runs.sort_values(cell, key=lambda of: of.map(recipes.index) if of.name == "compared" else of)
    return replace(table, runs=runs.reset_index(drop=True), notes=tuple(notes))


def _is_size(column: object, size: str) -> bool:
    return plain_name(column) in _NAMES[size].split() or means(column) == _MEANINGS.get(size)


def _sizes(rows: pd.DataFrame, columns: Columns, notes: list[Reason]) -> dict[str, pd.Series]:
    """Return the sizes of a law by name: the scales, if they were chosen, else those that rows show.

    These are parameters and tokens, or the only one of them that is known or varies.
    """
    is_chosen = not isinstance(columns.scale, Usual)
    named = {COMPUTE: columns.cost or Usual(), PARAMS: columns.params, TOKENS: columns.tokens}
    for size, column in named.items():
        if isinstance(column, Usual) and column not in rows:
            named[size] = next((str(c) for c in rows if _is_size(c, size)), "")
    named = {name: name for name in columns.scales} if is_chosen else named
    if missing := [column for column in named.values() if column and column not in rows]:
        raise TableError(no_column(rows, *missing))
    sizes = {size: numbers(plain_sizes(rows[column]), column) for size, column in named.items() if column}
    if len(sizes) > 2 and is_chosen:
        raise TableError(f"a law of the loss has one size or two, not {len(sizes)}: {', '.join(sizes)}")
    if is_chosen:
        return sizes
    compute, params, tokens = map(sizes.get, (COMPUTE, PARAMS, TOKENS))
    if compute is not None and params is not None and tokens is not None:
        ratio = compute / (FLOP * params * tokens)
        wrong = ratio.index[(ratio < 1 / _CONTRADICTS) | (ratio > _CONTRADICTS)]
        if len(wrong):
            row = wrong[0]
            raise TableError(
                f"compute {compute[row]:.3g} of row {row} contradicts 6 × {params[row]:.3g} parameters × "
                f"{tokens[row]:.3g} tokens = {FLOP * params[row] * tokens[row]:.3g} FLOP by more than "
                f"{_CONTRADICTS:g} times: give the columns that belong together, or drop one"
            )
    elif compute is not None and params is not None:
        tokens = compute / (FLOP * params)
        notes.append(Reason.of("size from compute", name=TOKENS))
    elif compute is not None and tokens is not None:
        params = compute / (FLOP * tokens)
        notes.append(Reason.of("size from compute", name=PARAMS))
    if params is None or tokens is None:
        if not sizes:
            options = given("scale", "COLUMN,COLUMN")
            raise TableError(f"table has no column of parameters, tokens or compute: {options} names them")
        return sizes
    for varies, (name, other) in zip((tokens, params), ((PARAMS, params), (TOKENS, tokens)), strict=True):
        if varies.nunique() == 1 and 0 < varies.iloc[0] < math.inf:
            return {name: other}
    with np.errstate(all="ignore"):
        log_n, log_d = np.log(params.to_numpy(float)), np.log(tokens.to_numpy(float))
    if len(log_n) > 1 and np.isfinite(log_n + log_d).all():
        away = log_d - log_d.mean() - (log_n - log_n.mean()) * np.cov(log_n, log_d)[0, 1] / log_n.var(ddof=1)
        if away.std() < _TOGETHER:
            notes.append(Reason.of("sizes grow together"))
            return {COMPUTE: FLOP * params * tokens}
    return {PARAMS: params, TOKENS: tokens}


def _read_target(text: str, law: RecipeLaw) -> dict[str, float]:
    """Read sizes of a target by name, in the law's order, or the compute of a budget."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, written = (piece.strip() for piece in part.partition("="))
        alike = (size for size in _NAMES if _is_size(name, size))
        value = as_number(plain_size(written).replace("_", "")) or math.nan
        if name in values:
            raise TableError(f"at {on_one_line(text)} has {name} twice")
        values[name if name in law.sizes else next(alike, name)] = value
    if law.sizes == (COMPUTE,) and {*values} == {PARAMS, TOKENS}:
        values = {COMPUTE: FLOP * math.prod(values.values())}
    allowed = [[*law.sizes], *([[COMPUTE]] if law.is_of_both else [])]
    if sorted(values) not in map(sorted, allowed) or not all(0 < x < math.inf for x in values.values()):
        ways = " or ".join(",".join(f"{name}=NUMBER" for name in names) for names in allowed)
        raise TableError(f"at {on_one_line(text)} is no target of this law: give {ways}, each above 0")
    return {name: values[name] for name in (law.sizes if COMPUTE not in values else (COMPUTE,))}
