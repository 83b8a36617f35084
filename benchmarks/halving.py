"""Steps that `--halving` saves on stored sweeps, and moves of their optima: a replay of learning curves.

    python benchmarks/halving.py --out benchmarks/halving.csv

The stored runs are whole, so that what halving would have stopped is known: packs as a sweep on two cores
makes them, each member's curve looked at on the rungs, then both tables analysed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from rich.console import Console

from mup_tpu.analysis import analyze, check_table
from mup_tpu.config.toml import stored_trial
from mup_tpu.jobs.pack_job import make_packs
from mup_tpu.store import load_curves, load_runs
from mup_tpu.training.record import behind_best
from mup_tpu.training.trials import RECENT, rungs


def replay(runs: pd.DataFrame, curves: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """The run table that halving would have left, and the share of steps it would have saved."""
    trials = {stored_trial(json.loads(row.config)): row for row in runs.itertuples()}
    steps = int(runs["steps_planned"].iloc[0])
    losses = curves[curves["split"] == "train"].pivot(index="step", columns="trial_id", values="loss")
    saved, stopped = 0, set()
    for pack in make_packs(list(trials), workers=2, execution="loop"):
        groups = [trial.replace(learning_rate=1.0, seed=0) for trial in pack]
        names = [trials[trial].trial_id for trial in pack]
        for rung, limit in rungs(steps).items():
            recent = losses.loc[(losses.index <= rung) & (losses.index > rung - RECENT * steps), names]
            recent = recent.mask(recent.columns.isin(stopped)[None, :].repeat(len(recent), 0))
            for name, gap in zip(names, behind_best(recent.to_numpy(), groups), strict=True):
                if gap > limit:
                    stopped.add(name)
                    saved += steps - rung
    halved = runs.assign(status=runs["status"].mask(runs["trial_id"].isin(stopped), "stopped"))
    return halved, saved / runs["steps_done"].sum()


def main(
    results: tuple[Path, ...] = (
        Path("results/lr_transfer"),
        Path("results/lr_transfer_untuned"),
    ),
    out: Path | None = None,
) -> None:
    """Replay stored sweeps.

    Args:
        results: Results folders of sweeps whose runs are whole.
        out: CSV file for the table.
    """  # fmt: skip
    rows = []
    for folder in results:
        runs = load_runs(folder)
        halved, saved = replay(runs, load_curves(folder))
        whole, left = (analyze(check_table(table)) for table in (runs, halved))
        for before, after in zip(whole.results, left.results, strict=True):
            for a, b in zip(before.optima, after.optima, strict=True):
                mine = halved[
                    (halved["parametrization"] == before.parametrization) & (halved["width"] == a.scale)
                ]
                rows.append(
                    {
                        "sweep": folder.name,
                        "parametrization": before.parametrization,
                        "width": int(a.scale),
                        "trials": len(mine),
                        "stopped": int((mine["status"] == "stopped").sum()),
                        "saved_of_sweep": saved,
                        "log2_lr": a.x,
                        "log2_lr_halving": b.x,
                        "low": a.low,
                        "high": a.high,
                        "low_halving": b.low,
                        "high_halving": b.high,
                        "moved_octaves": b.x - a.x,
                        "verdict": before.verdict.decision,
                        "verdict_halving": after.verdict.decision,
                    }
                )
    table = pd.DataFrame(rows)
    console = Console(width=180)
    console.print(table.drop(columns=["low", "high", "low_halving", "high_halving"]).to_string())
    shares = table.groupby("sweep")["saved_of_sweep"].first()
    for name, share in shares.items():
        console.print(f"{name}: {share:.0%} of the steps saved", highlight=False)
    console.print(f"largest move of an optimum: {np.nanmax(table['moved_octaves'].abs()):.3f} octaves")
    if out is not None:
        table.to_csv(out, index=False, float_format="%.4f")


if __name__ == "__main__":
    tyro.cli(main)
