"""CPU seconds of commands from start to end, imports and all, beside those of an earlier checkout.

    python benchmarks/commands.py --before CHECKOUT --out benchmarks/commands.csv

The versions take turns, and the least of each one's runs counts. Each version writes its own folder of 64 000
trials: the quickstart's under new ids and seeds, 16 a part.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import tyro
from paired import SWEEP

HERE = Path(__file__).parents[1]

FILL = """
import sys
import pandas as pd
from mup_tpu.store import Store, load_curves, load_runs
folder, parts = sys.argv[1], int(sys.argv[2])
store = Store(folder, "quickstart")
runs = load_runs("results/quickstart").dropna(axis="columns", how="all")
curves = load_curves("results/quickstart")
points = {name: of for name, of in curves.groupby("trial_id")}
for part in range(parts):
    at = 16 * part
    rows = runs.iloc[[row % len(runs) for row in range(at, at + 16)]].drop(columns="experiment")
    ids = [f"{row:016x}" for row in range(at, at + 16)]
    own = [points[of].assign(trial_id=name) for of, name in zip(rows["trial_id"], ids)]
    rows = rows.assign(trial_id=ids, seed=rows["seed"] + 100 * (at // len(runs)))
    store.append(rows.to_dict("records"), pd.concat(own).to_dict("records"))
"""
STUDY = """
import sys
from mup_tpu import Study
scale, tune = {"width": [1, 2, 4, 8]}, {"learning_rate": [2.0**e for e in range(50)]}
study = Study(sys.argv[1], scale=scale, tune=tune)
"""
ASK = (
    STUDY
    + """
for _ in range(200):
    (trial,) = study.ask(1)
    study.tell(trial, 1.0)
"""
)
NO_OP = STUDY + "study.run(lambda trial, report: 1.0, workers=1)"


def used(command: list[str], checkout: Path) -> float:
    """Run a command of Python with a checkout's package in a process; return its CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call = [sys.executable, *command]
    subprocess.run(
        call, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd=checkout
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(trials: int = 64_000, before: Path | None = None, repeats: int = 3, out: Path | None = None) -> None:
    """Time commands on stored results, on a large folder, and on a study of a function that does nothing.

    Args:
        trials: Trials of the large folder.
        before: Checkout of an earlier version.
        repeats: Runs of each command.
        out: CSV file for the table.
    """
    checkouts = [HERE] if before is None else [before.resolve(), HERE]
    with tempfile.TemporaryDirectory() as scratch:
        one = {"width": 64, "learning_rates": [0.01], "num_seeds": 1, "steps": 1, "precision": "float32"}
        Path(scratch, "sweep.toml").write_text(SWEEP.format(**one))
        new, large = (f"{scratch}/run-{number}" for number in itertools.count()), f"{scratch}/LARGE"
        target = ["width=2048", "--budget", "2h", "--on", "8xA100", "--json"]
        report = ["--report", "--out", f"{scratch}/report.html"]
        commands = {
            "--help": ["--help"],
            "sweep --help": ["sweep", "--help"],
            "sweep of one trial and step": ["sweep", f"{scratch}/sweep.toml", "--results", "NEW"],
            "analyze results/quickstart": ["analyze", "results/quickstart"],
            "predict results/lr_transfer": ["predict", "results/lr_transfer", "--at", "width=1024"],
            "plan --at width=2048": ["plan", "--at", *target],
            "analyze results/lr_transfer --report": ["analyze", "results/lr_transfer", *report],
            "analyze results": ["analyze", "results"],
            f"write {trials} trials": ["-c", FILL, "NEW", str(trials // 16)],
            f"analyze {trials} trials": ["analyze", "LARGE"],
            f"analyze {trials} trials --csv": ["analyze", "LARGE", "--csv", f"{scratch}/runs.csv"],
            "200 times ask and tell": ["-c", ASK, "NEW"],
            "200 trials that do nothing": ["-c", NO_OP, "NEW"],
        }
        for i, checkout in enumerate(checkouts):
            used(["-c", FILL, f"{large}{i}", str(trials // 16)], checkout)
        rows = []
        for name, command in commands.items():
            call = command if command[0] == "-c" else ["-m", "mup_tpu", *command]
            turns = []
            for _ in range(1 if name.startswith("write") else repeats):
                places = [{"NEW": next(new), "LARGE": f"{large}{i}"} for i in range(len(checkouts))]
                turns.append([
                    used([place.get(word, word) for word in call], checkout)
                    for place, checkout in zip(places, checkouts, strict=True)
                ])  # fmt: skip
            *earlier, now = map(min, zip(*turns, strict=True))
            ratio = {"before_cpu_s": earlier[0], "ratio": now / earlier[0]} if earlier else {}
            rows.append({"command": name, "cpu_s": now, **ratio})
            print(rows[-1], flush=True)
    if out is not None:
        pd.DataFrame(rows).round(2).to_csv(out, index=False)


if __name__ == "__main__":
    tyro.cli(main)
