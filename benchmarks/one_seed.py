"""Tables with one run a cell: what `predict` costs at a held-out largest scale, beside a line and a copy.

    python benchmarks/one_seed.py                     # tables in results/, each thinned to one seed
    python benchmarks/one_seed.py --tables FOLDER     # also those of step-law/steplaw, a clone in FOLDER

The truth is the valley of all runs at the largest scale. Each rival sees one seed at the smaller ones: the
line goes through the vertices of parabolas by the three lowest points of each scale, the copy is the vertex
of the largest of them.

Shapes: G grid points.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from rich.progress import track

from mup_tpu.analysis import Columns, Reading, RunTable, check_table, load_table
from mup_tpu.analysis.result import curve_regret
from mup_tpu.analysis.trend import Mixture, claims, fit_trend, kind_of, priors_of
from mup_tpu.analysis.verdict import Question, weigh
from mup_tpu.errors import MupTpuError

PUBLIC = {
    "gemstone": Columns(along=("depth",)),
    "hyperball_width": Columns("width", parametrization="optimizer"),
    "hyperball_depth": Columns("depth", parametrization="optimizer"),
    "hyperball_tokens": Columns("tokens", parametrization="optimizer"),
    "marin_moe_tokens": Columns("steps"),
    "marin_depth_mup": Columns("flops"),
    "marin_adamh": Columns("params"),
    "marin_adamc": Columns("params"),
    "marin_muonh": Columns("params"),
    "small_batches": Columns("batch_size"),
    "nanogpt_mup_owt": Columns(),
    "nanogpt_mup_shakespeare": Columns(),
    "mup_mlp": Columns(),
}
"""Copied public tables and their columns."""
SEEDS = 2  # Seeds of a table that are taken alone, one after the other
_LEAST_VALUES = 6  # Values a scale of Step Law needs, of which every second one is taken

Source = tuple[str, RunTable, bool]  # name, table, whether its grid is thinned to octaves


def sources(tables: Path | None) -> Iterator[Source]:
    for folder in sorted(path.parent for path in Path("results").glob("*/store.json")):
        try:
            table = load_table(str(folder))
        except MupTpuError:  # a search, or several scales
            continue
        if table.columns.unit == "nat" and not table.columns.tuned_beside:
            yield "stored sweeps", table, False
    for name, columns in PUBLIC.items():
        rows = pd.read_csv(f"results/public/rows/{name}.csv").drop(columns="loss_err", errors="ignore")
        yield "public tables", check_table(rows, Reading(columns, name=name)), False
    for name, size in (("dense", "N"), ("moe", "Na")) if tables else ():
        path = next((tables / "steplaw" / "data").glob(f"{name}*.csv"))
        rows = pd.read_csv(path)
        for scale in (size, "D", "bs"):
            fixed = [column for column in (size, "D", "bs") if column != scale]
            for at, cell in rows.groupby(fixed):
                runs = cell.groupby([scale, "lr"], as_index=False)["smooth loss"].mean()
                values = runs.groupby(scale)["lr"].transform("nunique")
                runs = runs[values >= _LEAST_VALUES].rename(columns={"smooth loss": "loss", scale: "size"})
                if runs["size"].nunique() > 2:
                    kind = {"N": "params", "Na": "params", "D": "tokens", "bs": "batch_size"}[scale]
                    columns = Columns(kind)
                    runs = runs.rename(columns={"size": kind})
                    yield f"Step Law, {name}", check_table(runs, Reading(columns, name=str(at))), True


def vertex(x_G: np.ndarray, loss_G: np.ndarray) -> float:
    """Return the vertex of the parabola through the lowest point and its neighbours; an edge is its own."""
    i = int(np.argmin(loss_G))
    if 0 < i < len(x_G) - 1 and np.isfinite(loss_G[i - 1 : i + 2]).all():
        a, b, _ = np.polyfit(x_G[i - 1 : i + 2] - x_G[i], loss_G[i - 1 : i + 2], 2)
        if a > 0:
            return float(np.clip(x_G[i] - b / (2 * a), x_G[i - 1], x_G[i + 1]))
    return float(x_G[i])


def held_out(
    table: RunTable, is_thinned: bool, generator: np.random.Generator
) -> Iterator[dict[str, object]]:
    """Yield what each way costs at the largest scale of each rule, for each seed alone."""
    for rule, runs in table.runs.groupby("compared"):
        scales = sorted(runs["scale"].unique())
        if len(scales) < 3:
            continue
        truth = weigh(runs.assign(purchase=0), Question.of(table)).estimates[-1]
        if not truth.optimum.is_bracketed:
            continue
        for seed in sorted(runs["seed"].unique())[:SEEDS]:
            small = runs[(runs["seed"] == seed) & (runs["scale"] < scales[-1])]
            if is_thinned:
                small = small[small["x"].isin(np.sort(small["x"].unique())[generator.integers(2) :: 2])]
            if small["scale"].nunique() < 2:
                continue
            one = RunTable(small, (), table.columns, table.name)
            estimates = weigh(small, Question.of(one)).estimates
            priors = priors_of(table.columns.scale, claims(str(rule), kind_of(table.columns.scale)))
            trend = fit_trend([e.optimum for e in estimates], priors, [e.valley for e in estimates])
            of_scale = [group.sort_values("x") for _, group in small.groupby("scale")]
            vertices = [vertex(g["x"].to_numpy(), g["loss"].to_numpy()) for g in of_scale]
            at = np.log2([float(g["scale"].iloc[0]) for g in of_scale])
            line = np.polyval(np.polyfit(at, vertices, 1), math.log2(scales[-1]))
            row: dict[str, object] = {
                "table": table.name,
                "rule": rule,
                "line": curve_regret(truth, float(line)),
                "copy": curve_regret(truth, vertices[-1]),
                "predict": math.nan,
                "share": math.nan,
            }
            if trend is not None:
                made = trend.optimum(scales[-1])
                # The truth has an error of its own.
                spread = Mixture(made.mean_K, np.hypot(made.deviation_K, truth.optimum.se), made.weight_K)
                row |= {"predict": curve_regret(truth, made.mean), "share": spread.below(truth.optimum.x)}
            yield row


def main(tables: Path | None = None, out: Path = Path("benchmarks/one_seed.csv")) -> None:
    """Score predictions from one seed by source.

    Args:
        tables: Folder with clones of public repositories.
        out: File for a row of each table, rule and seed.
    """
    warnings.simplefilter("ignore")
    generator, rows = np.random.default_rng(5), list[dict[str, object]]()
    for source, table, is_thinned in track([*sources(tables)], "tables"):
        rows += [row | {"source": source} for row in held_out(table, is_thinned, generator)]
    held = pd.DataFrame(rows)
    held.round(5).to_csv(out, index=False)
    known = held[held["predict"].notna()]
    print("source, targets, refused; mean cost in nat of predict, line, copy; share inside 50 % and 95 %")
    for source, of in known.groupby("source"):
        refused = int((held["source"] == source).sum()) - len(of)
        costs = ", ".join(f"{of[way].mean():.4f}" for way in ("predict", "line", "copy"))
        inside = ", ".join(f"{((of['share'] - 0.5).abs() < half).mean():.2f}" for half in (0.25, 0.475))
        print(f"{source}: {len(of)}, {refused}; {costs}; {inside}")


if __name__ == "__main__":
    tyro.cli(main)
