"""Is anything lost or doubled when processes share one study and any of them is killed at any moment?

    python benchmarks/walk.py --seed 1 --walks 600 --seconds 600

In each walk six processes work on one folder: a runner whose longer trials continue shorter ones, two that
ask and tell, one that merges parts, one that keeps predictions and plans sizes, and one that calls
`analyze` and `watch`. At random moments SIGKILL ends one of them, with or without all that it has started,
or a process that it has started; dead ones start again. Afterwards the study is run to its end, and
compared with what its trials must give and with what tellers have confirmed.
"""

import contextlib
import io
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "study" / "importable"))

import pandas as pd
import psutil
import tyro
from merging import merge_all

from mup_tpu import Study, octaves
from mup_tpu.cli import main as mup_tpu
from mup_tpu.errors import StoreError
from mup_tpu.files import Folder
from mup_tpu.store import Store, load_curves, load_header, load_runs, tables
from mup_tpu.store.header import load_predictions

LEASE_S = 1.0
AT = (640, 1280, 2560)  # steps at which predictions are kept


def study_in(folder: Path) -> Study:
    scale = {"steps": [20, 40, 80]}
    return Study(folder, scale=scale, tune={"lr": octaves(-8, -4)}, seeds=3, continued="steps")


def loss_of(trial) -> float:
    return 3 + 0.05 * (math.log2(trial.lr) + 6) ** 2 - 0.1 * math.log2(trial.steps / 20) + trial.seed / 1000


def train(trial, report) -> float:
    """Write down each step; a run that goes on must find all steps before its own."""
    path = Path(report.folder, "state.json")
    state = json.loads(path.read_text())[: report.resume_step] if report.resume_step else []
    for step in range(report.resume_step + 1, trial.steps + 1):
        state.append([step, trial.lr, trial.seed])
        time.sleep(0.01)
        if step % 10 == 0:
            path.with_suffix(".new").write_text(json.dumps(state))
            path.with_suffix(".new").rename(path)
        report(step=step, steps=trial.steps, loss=10 / step, saved=step % 10 == 0)
    assert state == [[step, trial.lr, trial.seed] for step in range(1, trial.steps + 1)]
    return loss_of(trial)


class Walk:
    """A folder, its processes, and what they have confirmed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.notes = folder / "walk", folder / "notes"
        self.random, self.counts = random.Random(seed), Counter[str]()
        self.alive: dict[int, str] = {}
        study_in(self.folder).ask(1, patience=1e-9)  # the folder is there

    def note(self, *words: object) -> None:
        """Write a line down that a kill cannot take back."""
        file = os.open(self.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, ("\t".join(map(str, words)) + "\n").encode())
        os.close(file)

    def run(self) -> None:
        study_in(self.folder).run(train, workers=2)
        time.sleep(1)

    def tell(self) -> None:
        study = study_in(self.folder)
        while True:
            for trial in study.ask(patience=LEASE_S):
                time.sleep(self.random.expovariate(10))
                if self.random.random() < 0.1:
                    continue  # it is given again when its lease ends
                try:
                    study.tell(trial, loss_of(trial))
                    self.note("told", trial.id)
                    if self.random.random() < 0.1:
                        study.tell(trial, 1.0)
                        self.note("fault", "a loss was told twice", trial.id)
                except StoreError as error:
                    if "has a loss already" not in str(error):
                        raise
            time.sleep(self.random.expovariate(1))

    def merge(self) -> None:
        while True:
            merge_all(Store(self.folder, "walk"))
            time.sleep(self.random.expovariate(5))

    def keep(self) -> None:
        while True:
            at = self.random.choice(AT)
            if self.call("predict", self.folder, "--at", f"steps={at}", "--keep") == 0:
                self.note("kept", at)
            if self.call("analyze", self.folder, "--where", "lr<=0.25", "--keep") == 0:
                self.note("where")
            for trial in study_in(self.folder).ask(1, until_settled=True, patience=LEASE_S):
                study_in(self.folder).tell(trial, failed="the node was lost")

    def read(self) -> None:
        while True:
            self.call("analyze", self.folder, *self.random.choice(([], ["--runs"], ["--next"])))
            self.call("watch", self.folder, "--once", "--json")

    def call(self, *words: object) -> int:
        """Call a command, and note one that ends otherwise than by an answer or a sentence."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                mup_tpu([str(word) for word in words])
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
        if code not in (0, 2) or (code == 2 and "error: " not in out.getvalue()):
            self.note("fault", *words, out.getvalue().replace("\n", " "))
        self.note("called", words[0], code)
        return code

    def start(self, name: str, act: Callable[[], None]) -> None:
        seed, pid = self.random.random(), os.fork()
        if pid:
            self.alive[pid] = name
            self.counts[f"starts of {name}"] += 1
            return
        os.setpgid(0, 0)
        self.random = random.Random(seed)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        code = 1
        try:
            act()
            code = 0
        except Exception as error:
            # An earlier runner's last moment; a lease that ended before a slow process told.
            expected = ("is being run by another process", "has a loss already")
            if not any(words in str(error) for words in expected):
                self.note("fault", name, type(error).__name__, str(error).replace("\n", " "))
        finally:
            os._exit(code)

    def kill(self) -> None:
        pid = self.random.choice([*self.alive])
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            below = psutil.Process(pid).children(recursive=True)
            kind = self.random.choice(("it", "all", "child") if below else ("it",))
            for one in below if kind == "all" else ():
                one.kill()
            self.random.choice(below).kill() if kind == "child" else os.kill(pid, signal.SIGKILL)
            self.counts["kills"] += 1

    def walk(self, seconds: float) -> None:
        actors = {
            "run": self.run, "tell": self.tell, "tell too": self.tell, "merge": self.merge, "keep": self.keep,
            "read": self.read,
        }  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name in sorted({*actors} - {*self.alive.values()}):
                self.start(name, actors[name])
            time.sleep(self.random.expovariate(1.2))
            self.kill()
            for pid in [*self.alive]:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self.alive[pid]
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.alive.clear()
        self.finish()

    def finish(self) -> None:
        """Run what is missing, and compare."""
        expected = {trial.id: loss_of(trial) for trial in study_in(self.folder).trials()}
        time.sleep(LEASE_S)
        for _ in range(20):
            self.start("last run", self.run)
            os.waitpid(self.alive.popitem()[0], 0)
            runs = load_runs(self.folder)
            if {*expected} <= {*runs.loc[runs["status"] == "finished", "trial_id"]}:
                break
            time.sleep(LEASE_S)
        losses = runs[runs["status"] == "finished"].set_index("trial_id")["loss"].to_dict()
        notes = [tuple(line.split("\t")) for line in self.notes.read_text().splitlines()]
        self.counts["told"] = sum(note[0] == "told" for note in notes)
        self.counts["calls"] = sum(note[0] == "called" for note in notes)
        self.counts["answers"] = sum(note[0] == "called" and note[2] == "0" for note in notes)
        self.counts["rows"] = len(runs)
        told = Counter(note[1] for note in notes if note[0] == "told")
        runs_in = tables.Parts(Folder(self.folder), "runs")
        parts = runs_in.read(runs_in.names())
        stored = pd.concat(part.to_pandas() for part in parts)
        # Where a merge was killed, both the old parts and the new one hold a row.
        finished = stored[stored["status"] == "finished"].drop_duplicates()["trial_id"]
        kept = {p.scale for p in load_predictions(self.folder)}
        faults = [" ".join(note[1:]) for note in notes if note[0] == "fault"]
        faults += [f"lost or wrong: {name}" for name in expected if losses.get(name) != expected[name]]
        faults += [f"double: {name}" for name in finished[finished.duplicated()]]
        faults += [f"told twice: {name}" for name, count in told.items() if count > 1]
        faults += [f"lost prediction: {n[1]}" for n in notes if n[0] == "kept" and float(n[1]) not in kept]
        if ("where",) in notes and not load_header(self.folder).where:
            faults.append("lost condition")
        curves = load_curves(self.folder)
        faults += [
            f"double curve: {name}" for name in curves[curves.duplicated(["trial_id", "step"])]["trial_id"]
        ]
        faults += [
            f"wrong curve: {name}" for name in curves[curves["loss"] != 10 / curves["step"]]["trial_id"]
        ]
        longest = {trial.id for trial in study_in(self.folder).trials() if trial.steps == 80}
        faults += [f"left over: {path}" for path in (self.folder / "work").glob("*") if path.name in longest]
        self.counts["faults"] = len(faults)
        for fault in faults:
            print(f"fault: {re.sub(' +', ' ', fault)[:600]}", file=sys.stderr, flush=True)


def main(seed: int = 0, walks: int = 10, seconds: float = 20.0) -> None:
    """Walk at random on studies whose processes are killed, and count.

    Args:
        seed: Seed of the first walk; the next ones have the next seeds.
        walks: Number of walks.
        seconds: Length of a walk before its last run.
    """
    tables.MERGE_EVERY = 3  # parts of a table that a writer merges
    total = Counter[str]()
    for number in range(seed, seed + walks):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            walk = Walk(Path(folder), number)
            walk.walk(seconds)
        total += walk.counts
        print(f"seed {number}: {dict(walk.counts)}", file=sys.stderr, flush=True)
    print(f"| count, over {walks} walks of {seconds:g} s |  |\n|---|---|")
    for name, count in sorted((total | {"faults": total["faults"]}).items()):
        print(f"| {name} | {count:,} |")
    sys.exit(total["faults"] > 0)


if __name__ == "__main__":
    tyro.cli(main)
