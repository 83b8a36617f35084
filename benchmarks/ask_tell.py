"""Time of ask and tell of a study against Optuna's on SQLite, where many trials are stored, in one run.

    python benchmarks/ask_tell.py --out benchmarks/ask_tell.csv

Each pair is an ask and a tell of one trial, the two packages in turns; medians, and their ratio. In a
"new process" the folder or database is opened for each pair, without the imports.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import tyro

from mup_tpu import Study, octaves
from mup_tpu.study.attempt import Outcome
from mup_tpu.study.study import _rows


def study_in(folder: str, rows: int) -> Study:
    """A study of twice as many trials as are stored."""
    seeds = -(-2 * rows // 20)
    return Study(folder, scale={"width": [64, 128, 256, 512]}, tune={"lr": octaves(-8, -4)}, seeds=seeds)


def fill(folder: str, rows: int) -> None:
    """Store the first trials of a study, as tells have merged them."""
    study = study_in(folder, rows)
    store, _ = study._open()
    trials = study.trials()
    for first in range(0, rows, 500):
        both = [_rows(trial, Outcome("finished", 2.5)) for trial in trials[first : min(first + 500, rows)]]
        store.append([row for made, _ in both for row in made])


def optuna_study(folder: str, rows: int = 0):  # type: ignore[no-untyped-def]
    """Optuna's study in a SQLite database, with so many finished trials more."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(
        storage=f"sqlite:///{folder}/o.db", study_name="x", sampler=sampler, load_if_exists=True
    )
    with sqlite3.connect(f"{folder}/o.db") as database:  # add_trials would take minutes
        kind = optuna.distributions.distribution_to_json(
            optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)
        )
        ids = range(1, rows + 1)
        trials = [(k, k - 1, 1, "COMPLETE", "2026-01-01 00:00:00", "2026-01-01 00:00:01") for k in ids]
        database.executemany("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?)", trials)
        database.executemany(
            "INSERT INTO trial_params VALUES (?, ?, 'lr', 0.01, ?)", [(k, k, kind) for k in ids]
        )
        database.executemany(
            "INSERT INTO trial_values VALUES (?, ?, 0, 2.5, 'FINITE')", [(k, k) for k in ids]
        )
    return study


def pair_of_ours(study: Study) -> None:
    (trial,) = study.ask(1)
    study.tell(trial, 2.5)


def pair_of_optuna(study) -> None:  # type: ignore[no-untyped-def]
    trial = study.ask()
    trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    study.tell(trial, 2.5)


def timed(calls: list[Callable[[], None]], pairs: int) -> list[tuple[float, float]]:
    """Median wall and CPU time of each call in ms, in turns."""
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    for _ in range(pairs):
        for call, own in zip(calls, times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            own.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [
        (1e3 * statistics.median(w for w, _ in t), 1e3 * statistics.median(c for _, c in t)) for t in times
    ]


def main(rows: tuple[int, ...] = (100, 1000, 10_000), pairs: int = 30, out: Path | None = None) -> None:
    """Time both.

    Args:
        rows: Stored trials.
        pairs: Pairs of ask and tell.
        out: CSV file for the times; printed in any case.
    """
    table = []
    for count in rows:
        with tempfile.TemporaryDirectory() as folder:
            fill(folder, count)
            theirs, ours = optuna_study(folder, count), study_in(folder, count)
            pair_of_ours(ours)
            for what, calls, n in (
                ("one process", [lambda s=ours: pair_of_ours(s), lambda s=theirs: pair_of_optuna(s)], pairs),
                (
                    "new process",
                    [
                        lambda f=folder, c=count: pair_of_ours(study_in(f, c)),
                        lambda f=folder: pair_of_optuna(optuna_study(f)),
                    ],
                    max(3, pairs // 5),
                ),
            ):
                (wall, cpu), (their_wall, their_cpu) = timed(calls, n)
                table.append(
                    {
                        "rows": count, "what": what, "ms": wall, "cpu_ms": cpu, "optuna_ms": their_wall,
                        "optuna_cpu_ms": their_cpu, "ratio": wall / their_wall, "cpu_ratio": cpu / their_cpu,
                    }
                )  # fmt: skip
    frame = pd.DataFrame(table).round(2)
    print(frame.to_string(index=False))
    if out is not None:
        frame.to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
