"""Published laws of the learning rate beside optima that were measured.

    python benchmarks/published_laws.py --tables DIR     prints the table of published_laws.md

DIR holds public repositories, of which nothing is kept: step-law/steplaw as steplaw/, and
fabian-sp/lr-scheduling as lr-scheduling/. Optima of AdamW without a rule: of Step Law's dense models at the
best batch, of a Llama of 12 layers by its schedule and length (without constant rates, which no law is of),
and of our own small networks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import tyro

from mup_tpu.analysis import Columns, Reading, analyze, check_table
from mup_tpu.errors import ConfigError, StoreError, TableError
from mup_tpu.store import load_runs
from mup_tpu.tuning.laws import LAWS, params_of, published_rates

SETTINGS = ("n_embd", "n_layer", "dataset", "scheduler", "wsd_fract_decay", "iterations")
Optimum = tuple[float, float, float, float, float]  # width, params, tokens, batch (tokens), log2 of the rate


def of_step_law(folder: Path) -> Iterator[Optimum]:
    rows = pd.read_csv(folder / "steplaw/data/dense_lr_bs_loss.csv")
    columns = Columns("N", "lr", loss="smooth loss", scales_beside=("D",))
    law = analyze(check_table(rows, Reading(columns, best_over=("bs",)))).results[0].power_law
    assert law is not None
    best = rows.loc[rows.groupby(["N", "D"])["smooth loss"].idxmin()].set_index(["N", "D"])
    for estimate in law.estimates:
        params, tokens = estimate.optimum.sizes
        row = best.loc[(params, tokens)]
        yield row["h"], params, tokens, 2048 * row["bs"], estimate.optimum.x


def of_schedules(folder: Path) -> Iterator[Optimum]:
    rows = []
    for file in (folder / "lr-scheduling/data").rglob("*.json"):
        run = json.loads(file.read_text())
        config, loss = run["config"], run["summary"].get("final-val/loss", math.nan)
        batch = config["batch_size"] * config["acc_steps"] * config["world_size"] * config["sequence_length"]
        rows.append((*(config.get(name) for name in SETTINGS), batch, config["lr"], loss))
    columns = ["width", "depth", "data", "schedule", "cooldown", "steps", "batch", "lr", "loss"]
    table = pd.DataFrame(rows, columns=columns).dropna(subset=["loss"])
    for key, runs in table.groupby(columns[:-2], dropna=False):
        losses = runs.groupby("lr")["loss"].min()
        least = int(losses.to_numpy().argmin())
        is_constant = key[3] == "wsd" and not key[4]
        if is_constant or len(losses) < 4 or least in (0, len(losses) - 1):
            continue
        near = losses.iloc[least - 1 : least + 2]
        a, b, _ = np.polyfit(np.log2(near.index.to_numpy()), near.to_numpy(), 2)
        width, depth, *_, steps, batch = key
        yield width, params_of(width, depth), steps * batch, batch, -b / 2 / a


def ours() -> Iterator[Optimum]:
    for file in sorted(Path("results").glob("*/store.json")):
        try:
            runs = load_runs(file.parent)
            analysis = analyze(str(file.parent), whole=False)
        except (ConfigError, StoreError, TableError):  # a search, or a folder without an optimum
            continue
        if not {"optimizer", "parametrization"} <= {*runs.columns}:  # a study of another trainer
            continue
        runs = runs[(runs["optimizer"] == "adamw") & (runs["parametrization"] == "sp")]
        if analysis.hyperparameter != "lr" or analysis.columns.scales_beside or runs.empty:
            continue
        for result in analysis.results:
            for optimum in (o for o in result.optima if o.is_bracketed):
                of = runs[
                    (runs[analysis.scale] == optimum.scale) & (runs[analysis.compares] == result.compared)
                ]
                if len(of):
                    row = of.iloc[0]
                    batch = row["batch_size"] * row["sequence_length"]
                    yield row["width"], row["params_non_embedding"], row["tokens"], batch, optimum.x


def main(tables: Path) -> None:
    """Print the table; `tables` holds the repositories."""
    print(f"| optima | | {' | '.join(law.name for law in LAWS)} | all together | inside its 95 % |")
    print("|---|---|" + "---|" * (len(LAWS) + 2))
    sources = {"Step Law": of_step_law(tables), "lr-scheduling": of_schedules(tables), "ours, SP": ours()}
    for name, optima in sources.items():
        away, inside = [], []
        for *sizes, x in optima:
            made = published_rates(*sizes)
            away.append([math.log2(one.rate) - x for one in made.rates] + [math.log2(made.rate) - x])
            inside.append(math.log2(made.low) <= x <= math.log2(made.high))
        errors, biases = np.sqrt(np.square(away).mean(axis=0)), np.mean(away, axis=0)
        shown = " | ".join(f"{error:.2f} ({bias:+.2f})" for error, bias in zip(errors, biases, strict=True))
        print(f"| {name} | {len(away)} | {shown} | {sum(inside)} of {len(inside)} |")


if __name__ == "__main__":
    tyro.cli(main)
