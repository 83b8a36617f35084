"""One trial: trained, stored, checkpointed, exported."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mup_tpu.config import RunOptions, Trial
from mup_tpu.config.options import File, FolderName
from mup_tpu.config.values import VisibleFormatter
from mup_tpu.errors import ConfigError, Preempted, raised_as

if TYPE_CHECKING:
    from rich.console import Console

    from mup_tpu.training.record import PackResult


@dataclass(frozen=True)
class Kept:
    """Files and folders for the products of a trial."""

    results: FolderName | None = None
    """Results folder (or fsspec URL) for the row and the learning curve."""
    checkpoints: FolderName | None = None
    """Folder (or fsspec URL) for checkpoints, every tenth of the run unless --checkpoint-every; the same
    command goes on from the last. Each trial has a folder in it, with the last two checkpoints."""
    export: File | None = None
    """Folder for the trained model and its tokenizer, as transformers' AutoModelForCausalLM and AutoTokenizer
    load them."""

    def prepare(self) -> None:
        """Make folders, so that a bad path ends the command before training."""
        for name, path in (("checkpoint folder", self.checkpoints), ("export", self.export)):
            if path is not None and "://" not in str(path):
                with raised_as(ConfigError, f"{name} {path} cannot be written"):
                    Path(path).mkdir(parents=True, exist_ok=True)


def train_one(
    trial: Trial, run: RunOptions, kept: Kept, console: Console, shorter: Trial | None = None
) -> tuple[PackResult, Path | None]:
    """Train a trial, store its row, then export it; return its result and the folder of the export.

    With `shorter`, the same trial with fewer steps, training goes on from its checkpoint.
    """
    from mup_tpu.tuning.runner import refuse_another_device, with_precision

    kept.prepare()
    refuse_another_device(kept.results, run)
    trial = with_precision(trial, kept.results, run, console)
    with console.status("importing torch"):
        from mup_tpu import data
        from mup_tpu.data.corpus import save_stock
        from mup_tpu.files import Folder
        from mup_tpu.jobs.this_machine import unused_gpus
        from mup_tpu.models.weights import export_stock
        from mup_tpu.store import Store
        from mup_tpu.training.checkpoint import begin
        from mup_tpu.training.loop import PackRun

    store = None if kept.results is None else Store(kept.results, "train")
    dataset, checkpoints = data.load(trial.data), None

    def trial_id(one: Trial) -> str:
        return one.trial_id(dataset.fingerprint)

    if (root := kept.checkpoints) is not None:
        run = replace(run, checkpoint_every=run.checkpoint_every or max(1, trial.train.steps // 10))
        checkpoints = f"{root.rstrip('/')}/{trial_id(trial)}"
        if shorter is not None:
            before = [shorter.replace(precision=trial.train.precision)]
            if not begin(Folder(root), [trial], before, trial_id, checkpoints):
                console.print(f"no checkpoint in {root} to go on from: it trains from the start")
    if note := unused_gpus(run):
        console.print(note, style="yellow")
    with console.status("initialising parameters") as status, _log_lines(console, kept.results):
        training = PackRun([trial], dataset, run, checkpoints)
        status.update(training.first_report_waits_for)
        with training.preemptible():
            result = training.finish(lambda report: status.update(str(report)))
        if store is not None:
            store.append(result.rows, result.curves)
    row = result.rows[0]
    if row["status"] == "preempted":
        place = f"its checkpoint is in {checkpoints}, the same command goes on" if checkpoints else "not kept"
        raise Preempted(f"preempted at step {row['steps_done']} of {row['steps_planned']}: {place}")
    if kept.export is None:
        return result, None
    assert result.pack is not None
    weights = result.pack.member_parameters(0)
    length, tokenizer = trial.data.sequence_length, dataset.tokenizer
    out = export_stock(trial, weights, result.pack.vocab_size, length, tokenizer.separator, kept.export)
    save_stock(tokenizer, length, out)
    return result, out


@contextlib.contextmanager
def _log_lines(console: Console, results: str | None) -> Iterator[None]:
    """Log lines in the results' logs, and on a console that is no terminal."""
    from mup_tpu.training.process import attached, host_log

    with contextlib.ExitStack() as stack:
        if not console.is_terminal:
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(VisibleFormatter())
            # The command line's console notes the loss, and frees what waits in the buffer.
            stack.enter_context(attached(handler, "mup_tpu", lost=getattr(console, "lose", None)))
        if results is not None:
            stack.enter_context(host_log(results))
        yield
