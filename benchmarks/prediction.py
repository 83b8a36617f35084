"""Optima and losses predicted from smaller scales: errors, and coverage of intervals.

    python benchmarks/prediction.py --results results --tables FOLDER --out benchmarks/prediction.csv

Sweeps: every rule of every stored sweep with three known optima or more, and tables in a folder; a table with
several batch sizes, parameters N and tokens D is one sweep for each way to hold two of them fixed. Each sweep
is analysed without its largest scales, and the optimum there is predicted from the rest. Regret is read off
the held-out scale's own curve. Intervals are widened by the held-out optimum's own error. Since priors were
chosen on these sweeps, coverage is measured in simulated worlds too, whose optima need not lie on a line.

Shapes: S scales, R draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from rich.progress import track
from scipy.interpolate import PchipInterpolator

from mup_tpu.analysis import Columns, RunTable, check_table, fit_scaling_law, load_table
from mup_tpu.analysis.expected_loss import expected_loss
from mup_tpu.analysis.line import LineRegression, fit_line
from mup_tpu.analysis.looks import Question, weigh
from mup_tpu.analysis.loss_curve import LossCurve
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.priors import Priors, keeps, kind_of, priors_of
from mup_tpu.analysis.reasons import Reason
from mup_tpu.errors import MupTpuError, TableError

LINES = {
    "line that may bend": None,
    "straight line": Priors(slope=10.0, bend=1e-3),
    "mean of all": Priors(slope=1e-3, bend=1e-3),
}
"""Priors of each line; None for the priors of the kind of scale."""
PARABOLA, PARABOLA_BEND = Priors(slope=0.5, scatter=0.15), 0.1
"""Priors of β₀ + α·r + q·r²: α ~ N(0, 0.5²), q ~ N(0, 0.1²), τ half-normal of scale 0.15."""
METHODS = (*LINES, "parabola", "largest's optimum", "smallest's optimum")
_NEEDED = 3
"""Least known optima of a sweep: two to predict from, one to predict."""


@dataclass(frozen=True)
class Case:
    """One held-out scale."""

    sweep: str
    scale: str
    """Column of the scale."""
    ahead: str
    """"next" (the largest scale left out) or "two octaves"."""
    octaves: float
    """Octaves from the largest remaining scale to the predicted one."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out optimum, and the optima of smaller scales."""

    case: Case
    rule: str
    optima: tuple[Optimum, ...]
    """Optima of smaller scales."""
    truth: Optimum
    curve: LossCurve
    """Curve of the held-out scale."""


def main(
    results: Path = Path("results"),
    tables: Path | None = None,
    out: Path | None = None,
    worlds: int = 500,
    least_known: int = _NEEDED,
) -> None:
    """Predict stored sweeps and simulated worlds, and print both tables.

    Args:
        results: Folder of results folders.
        tables: Folder of tables.
        out: CSV file for a row for each prediction and method.
        worlds: Simulated worlds of each family.
        least_known: Least known optima of a sweep.
    """
    held_out = every_held_out(results, tables, least_known)
    found = pd.DataFrame([_row(one, method) for one in held_out for method in METHODS])
    if out:
        found.round(5).to_csv(out, index=False)
    parts = {
        "all": found,
        "optimum known to 0.4 octave": found[1.96 * found["se"] <= 0.4],
        "three scales or more left": found[found["known"] >= 3],
        **dict([*found.groupby("kind")]),
        **dict([*found.groupby("source")]),
    }
    for ahead, (name, part) in itertools.product(("next", "two octaves"), parts.items()):
        print(f"\n{ahead}, {name}\n{summary(part, ahead).to_string()}")
    losses = pd.DataFrame([row for one in held_out for row in _loss_rows(one)])
    sizes = {"n": ("inside", "size"), "inside": ("inside", "mean"), "width": ("width", "median")}
    for by in (["source"], ["kind"], ["source", "kind"]):
        print(f"\nlosses\n{losses.groupby(['method', 'ahead', *by]).agg(**sizes).round(3).to_string()}")
    print(f"\nsimulated worlds\n{simulated(worlds).to_string()}")


def every_held_out(results: Path, tables: Path | None, least_known: int) -> list[HeldOut]:
    """Held-out optima of stored sweeps and of tables in a folder."""
    sweeps = [*stored_sweeps(results), *(public_sweeps(tables) if tables else ())]
    found = list[HeldOut]()
    for name, table in track(sweeps, "sweeps"):
        try:
            found += held_out_of(name, table, least_known)
        except MupTpuError as error:
            print(f"{name} left out: {error}")
    return found


def stored_sweeps(folder: Path) -> Iterator[tuple[str, RunTable]]:
    """Run tables of the sweeps in a folder of results folders."""
    for header in sorted(folder.rglob("store.json")):
        try:
            yield f"ours/{header.parent.relative_to(folder)}", load_table(header.parent)
        except MupTpuError:
            continue


def public_sweeps(folder: Path) -> Iterator[tuple[str, RunTable]]:
    """Run tables of the CSV files in a folder."""
    for file in sorted(folder.glob("*.csv")):
        frame = pd.read_csv(file)
        if {"N", "D", "bs", "lr", "smooth loss"} <= set(frame):
            yield from grids(f"public/{file.stem}", frame)
        else:
            try:
                yield f"public/{file.stem}", load_table(file)
            except MupTpuError as error:
                print(f"{file.name} left out: {error}")


def grids(name: str, frame: pd.DataFrame) -> Iterator[tuple[str, RunTable]]:
    """Sweeps of a table over parameters N, tokens D and batch size, two of them fixed in each."""
    size = "Na" if "Na" in frame else "N"
    for scale in (size, "D", "bs"):
        fixed = [c for c in (size, "D", "bs") if c != scale]
        for values, part in frame.groupby(fixed):
            part = part.groupby([scale, "lr"], as_index=False)["smooth loss"].mean()
            if part[scale].nunique() < _NEEDED:
                continue
            at = ", ".join(f"{c}={v:.4g}" for c, v in zip(fixed, values, strict=True))
            yield f"{name}/{scale} ({at})", check_table(part, Columns(scale=scale, loss="smooth loss"))


def held_out_of(name: str, table: RunTable, least_known: int) -> Iterator[HeldOut]:
    """Held-out optima of each rule of a sweep: at the next scale, and two octaves ahead."""
    for rule, runs in table.runs.groupby("compared"):

        def optima_below(scale: float, runs: pd.DataFrame = runs) -> tuple[Optimum, ...]:
            """Optima of smaller scales, by their runs alone."""
            part = replace(table, runs=runs[runs["scale"] < scale], planned=())
            return tuple(e.optimum for e in weigh(part.runs, Question.of(part)).estimates)

        evidence = weigh(runs, Question.of(replace(table, planned=())))
        known = [e.optimum for e in evidence.estimates if e.optimum.is_bracketed]
        if len(known) < least_known or len({o.x for o in known}) == 1:
            continue
        truth = known[-1]
        curve = next(c for c in evidence.curves if c.scale == truth.scale)
        nearer = [o.scale for o in known if math.log2(truth.scale / o.scale) >= 1.9]
        cuts = {"next": truth.scale, "two octaves": nearer[-1] * 1.001 if nearer else 0.0}
        for ahead, cut in cuts.items():
            if sum(o.scale < cut for o in known) < 2:
                continue
            optima = optima_below(cut)
            below = [o.scale for o in optima if o.is_bracketed]
            if len(below) >= 2:
                case = Case(f"{name} {rule}", table.columns.scale, ahead, math.log2(truth.scale / max(below)))
                yield HeldOut(case, str(rule), optima, truth, curve)


def _row(one: HeldOut, method: str) -> dict[str, object]:
    """One method's prediction of a held-out optimum."""
    case, truth = one.case, one.truth
    known = [o for o in one.optima if o.is_bracketed]
    x, inside_50, inside_95 = known[-1 if method.startswith("largest") else 0].x, math.nan, math.nan
    generator = np.random.default_rng(0)
    if method in LINES or method == "parabola":
        if method in LINES:
            line = fit_line(one.optima, generator, LINES[method] or priors_of(case.scale, one.rule))
            assert line is not None, "two optima are known"
            optima_R = line.optima_R(truth.scale, generator)
        else:
            optima_R = parabola_R(known, truth.scale, generator)
        x = float(optima_R.mean())
        observed_R = optima_R + truth.se * generator.standard_normal(len(optima_R))
        inside_50, inside_95 = (_is_inside(truth.x, observed_R, share) for share in (0.5, 0.95))
    return {
        "sweep": case.sweep,
        "source": "stored" if case.sweep.startswith("ours/") else "public",
        "scale": case.scale,
        "kind": kind_of(case.scale) + (", kept" if keeps(one.rule, kind_of(case.scale)) else ""),
        "ahead": case.ahead,
        "octaves": case.octaves,
        "known": len(known),
        "method": method,
        "predicted": x,
        "truth": truth.x,
        "se": truth.se,
        "regret": regret_of(one.curve, truth, x),
        "inside_50": inside_50,
        "inside_95": inside_95,
    }


def _loss_rows(one: HeldOut) -> Iterator[dict[str, object]]:
    """Losses predicted for a held-out scale by each method; by the law only if it is identified."""
    known = [o for o in one.optima if o.is_bracketed]
    losses_S, scales_S = np.array([(o.loss, o.scale) for o in known]).T
    line = expected_loss(losses_S, scales_S, one.truth.scale)
    if isinstance(line, Reason):
        return
    found = {"line": line}
    try:
        law = fit_scaling_law(losses_S, scales_S)
        found |= {"law": law.predict(one.truth.scale)} if law.is_identified else {}
    except TableError:
        pass
    for method, loss in found.items():
        yield {
            "source": "stored" if one.case.sweep.startswith("ours/") else "public",
            "kind": "batch size" if kind_of(one.case.scale) == "batch size" else "others",
            "ahead": one.case.ahead,
            "method": method,
            "inside": float(loss.holds(one.truth.loss)),
            "width": (loss.high - loss.low) / one.truth.loss,
        }


def parabola_R(known: list[Optimum], scale: float, generator: np.random.Generator) -> np.ndarray:
    """Draws of log2 of the optimum at a scale, by a parabola through the known optima."""

    def design(scales: list[float]) -> np.ndarray:
        r_S = np.log2(np.array(scales) / known[-1].scale)
        return np.column_stack([np.ones_like(r_S), r_S, PARABOLA_BEND * r_S**2])

    regression = LineRegression(tuple(known), (), design([o.scale for o in known]), PARABOLA)
    coefficients_RB, chosen_R = regression.draw(generator, 20_000)
    scatter_R = PARABOLA.tau_K[chosen_R] * generator.standard_normal(len(chosen_R))
    return np.asarray(coefficients_RB @ design([scale])[0] + scatter_R)


def _is_inside(x: float, draws_R: np.ndarray, share: float) -> float:
    low, high = np.quantile(draws_R, [(1 - share) / 2, (1 + share) / 2])
    return float(low <= x <= high)


def regret_of(curve: LossCurve, optimum: Optimum, x: float) -> float:
    """Loss at x less the loss at the optimum, nat, by a monotone spline through the curve's finite means."""
    finite_G = np.isfinite(curve.mean_G) & (np.abs(curve.x_G - optimum.x) > 0.05)
    at = np.append(curve.x_G[finite_G], optimum.x)
    rise = np.append(np.maximum(curve.mean_G[finite_G] - optimum.loss, 0.0), 0.0)
    order = np.argsort(at)
    at, rise = at[order], rise[order]
    inside = float(np.clip(x, at[0], at[-1]))
    value = float(PchipInterpolator(at, rise)(inside))
    if inside == x:
        return value
    side = slice(0, 2) if x < at[0] else slice(-2, None)  # beyond the grid: along its last segment
    slope = float(np.diff(rise[side])[0] / np.diff(at[side])[0])
    return max(value + slope * (x - inside), value)


def summary(found: pd.DataFrame, ahead: str) -> pd.DataFrame:
    """A row for each method; "beyond its error" is the rmse without the held-out optimum's own error."""
    part = found[found["ahead"] == ahead]
    rows = {}
    for method in METHODS:
        own = part[part["method"] == method]
        square, of_target = ((own["predicted"] - own["truth"]) ** 2).mean(), (own["se"] ** 2).mean()
        rows[method] = {
            "n": len(own),
            "rmse": math.sqrt(square),
            "beyond its error": math.sqrt(max(square - of_target, 0.0)),
            "mean regret": own["regret"].mean(),
            "median regret": own["regret"].median(),
            "50 %": own["inside_50"].mean(),
            "95 %": own["inside_95"].mean(),
        }
    return pd.DataFrame(rows).T.round(4)


FAMILIES = ("power", "settles", "begins late", "bends", "scatters", "heavy tails")
"""power: a power of the scale. settles: drift halves with each octave. begins late: no drift up to a scale in
the sweep, then a power. bends: drift changes evenly. scatters: a power, with scatter of 0.3 octave. heavy
tails: a power, with scatter of Student's t with three degrees of freedom."""


def simulated(worlds: int, scales: int = 4) -> pd.DataFrame:
    """Coverage, one and two octaves ahead, of optima in worlds of each family."""
    rows = {}
    for family in FAMILIES:
        generator = np.random.default_rng(len(family))
        counts = np.zeros(6)
        for _ in range(worlds):
            octaves_S = np.arange(scales + 2.0) - (scales - 1)
            true_S = world(family, octaves_S, generator)
            error_S = np.exp(generator.normal(math.log(0.07), 0.5, scales))
            seen_S = true_S[:scales] + error_S * generator.standard_normal(scales)
            optima = [_optimum(*values) for values in zip(2**octaves_S, seen_S, error_S)]  # noqa: B905
            line = fit_line(optima, generator, draws=2000)
            assert line is not None
            for i in (0, 1):
                draws_R = line.optima_R(float(2 ** (i + 1)), generator)
                truth = float(true_S[scales + i])
                counts[2 * i] += _is_inside(truth, draws_R, 0.5)
                counts[2 * i + 1] += _is_inside(truth, draws_R, 0.95)
                counts[4 + i] += (float(draws_R.mean()) - truth) ** 2
        shares = counts / worlds
        rows[family] = {
            "1 octave, 50 %": shares[0],
            "1 octave, 95 %": shares[1],
            "rmse, 1 octave": math.sqrt(shares[4]),
            "2 octaves, 50 %": shares[2],
            "2 octaves, 95 %": shares[3],
            "rmse, 2 octaves": math.sqrt(shares[5]),
        }
    return pd.DataFrame(rows).T.round(3)


def world(family: str, octaves_S: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Optima of one world: half of them transfer (α near 0), half drift."""
    drifts = generator.uniform() < 0.5
    alpha = generator.normal(-0.6, 0.3) if drifts else generator.normal(0.0, 0.08)
    scatter = 0.3 if family == "scatters" else math.exp(generator.normal(math.log(0.08), 0.5))
    shocks_S = generator.standard_normal(len(octaves_S))
    if family == "heavy tails":
        shocks_S = generator.standard_t(3, len(octaves_S))
    from_first_S = octaves_S - octaves_S[0]
    path_S = alpha * octaves_S
    if family == "settles":
        path_S = 2 * alpha * (1 - 2.0**-from_first_S)
    elif family == "begins late":
        path_S = alpha * np.maximum(0.0, octaves_S - generator.uniform(octaves_S[0], 0.0))
    elif family == "bends":
        path_S = path_S + generator.uniform(-0.15, 0.15) * octaves_S**2
    return -7 + path_S + scatter * shocks_S


def _optimum(scale: float, x: float, error: float) -> Optimum:
    low, high = x - 1.96 * error, x + 1.96 * error
    return Optimum(scale, "bracketed", x, low, high, 2.5, round(x), x - 0.5, x + 0.5, error)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.OmitArgPrefixes,))
