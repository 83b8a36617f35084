"""Commands about one trial, train, and about its text, data prepare. Torch is imported when it is needed."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.config import DataConfig, RunOptions, Trial
from mup_tpu.config.options import File, FolderName
from mup_tpu.config.toml import load_trial
from mup_tpu.config.values import VisibleFormatter, parse_price
from mup_tpu.errors import ConfigError, Preempted, raised_as


@dataclass(frozen=True)
class TrialRun(RunOptions):
    """Options for running one trial in this process."""

    # The other places are for packs on Ray.
    placement: Annotated[Literal["host", "chip", "slice"], tyro.conf.Suppress] = "host"


@dataclass(frozen=True)
class PreparedText(DataConfig):
    """Text as tokens, whose batches are chosen in training."""

    batch_size: Annotated[int, tyro.conf.Suppress] = DataConfig.batch_size
    data_seed: Annotated[int, tyro.conf.Suppress] = DataConfig.data_seed


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


@dataclass(frozen=True)
class TrainOptions:
    """Source and length of one trial, and its report."""

    config: File | None = None
    """TOML file with [model], [data], [optimizer], [train], in place of options of the trial."""
    continue_to: int | None = None
    """Number of steps in place of the trial's; training continues from the checkpoint in --checkpoints. For
    schedules constant and wsd."""
    xla_dump: FolderName | None = None
    """Folder to write XLA's programs to as text (--device tpu or xla)."""


def train(
    trial: Trial = Trial(),
    run: TrialRun = TrialRun(),
    kept: Kept = Kept(),
    options: TrainOptions = TrainOptions(),
) -> None:
    """Train one trial and print its loss.

    Args:
        trial: Trial to train.
        run: How the trial is run.
        kept: Files and folders for row, checkpoints, model and profile.
        options: Source and length of the trial, and its report.
    """
    if options.xla_dump is not None and run.device not in ("tpu", "xla"):
        raise ConfigError(f"--xla-dump needs --device tpu or xla, not {run.device}")
    if run.checkpoint_every and kept.checkpoints is None:
        raise ConfigError(f"--checkpoint-every {run.checkpoint_every} needs --checkpoints, a folder for them")
    if options.continue_to is not None and kept.checkpoints is None:
        raise ConfigError("--continue-to needs --checkpoints to continue from")
    if options.config is not None:
        if trial != Trial():
            raise ConfigError(
                f"--config {options.config} and options of the trial were both given; change the file instead"
            )
        trial = load_trial(options.config)
    shorter = None
    run.require_parts(trial.data.batch_size)
    if options.continue_to is not None:
        from mup_tpu.training import longer

        shorter, trial = trial, longer(trial, options.continue_to)
    from mup_tpu.devices.base import MODULES
    from mup_tpu.tuning.progress import cost, starting
    from mup_tpu.tuning.runner import refuse_another_device, with_precision

    if options.xla_dump is not None:
        importlib.import_module(MODULES[run.device]).dump_programs(options.xla_dump)
    console = Console()
    again = "the same command goes on" if kept.checkpoints else ""
    Console(stderr=True).print(starting(f"1 trial, {trial.train.steps} steps", again=again))
    # A bad path ends the command before training.
    for name, path in (("checkpoint folder", kept.checkpoints), ("export", kept.export)):
        if path is not None and "://" not in str(path):
            with raised_as(ConfigError, f"{name} {path} cannot be written"):
                Path(path).mkdir(parents=True, exist_ok=True)
    refuse_another_device(kept.results, run)
    trial = with_precision(trial, kept.results, run, console)
    with console.status("importing torch"):
        from mup_tpu import data
        from mup_tpu.data.corpus import save_stock
        from mup_tpu.jobs.this_machine import unused_gpus
        from mup_tpu.models.networks import export_stock
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
            shorter = shorter.replace(precision=trial.train.precision)
            if not begin(f"{root}/{trial_id(shorter)}", [shorter], checkpoints, [trial], trial_id):
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
    (row,), rates = result.rows, result.rates
    if row["status"] == "preempted":
        place = f"its checkpoint is in {checkpoints}, the same command goes on" if checkpoints else "not kept"
        raise Preempted(f"preempted at step {row['steps_done']} of {row['steps_planned']}: {place}")
    exported = None
    if kept.export is not None:
        assert result.pack is not None
        weights, tokenizer = result.pack.member_parameters(0), dataset.tokenizer
        length, separator = trial.data.sequence_length, tokenizer.separator
        exported = export_stock(trial, weights, result.pack.vocab_size, length, separator, kept.export)
        save_stock(tokenizer, length, exported)
    took = cost(row["wall_time_s"], parse_price(run.price))
    loss = f"loss {row['loss']:.4f} nat/token ({row['loss_kind']})"
    console.print(
        f"{row['status']}: {loss if math.isfinite(row['loss']) else row['reason']}, width {row['width']}, "
        f"{row['params']:,} parameters, {row['tokens']:,} tokens, {took} · {rates}"
    )
    if run.device in ("tpu", "xla"):
        counts, seconds = importlib.import_module(MODULES[run.device]).report(), row["wall_time_s"]
        stops = ": each stops the device" if counts["fallbacks"] else ""
        for line in (
            f"XLA compiled {counts['compilations']:.0f} programs in {counts['compile_s']:.1f} s "
            f"({counts['compile_s'] / seconds:.0%} of the run); expected: one for the steps, and one for "
            "evaluations",
            f"{counts['executions']:.0f} executions for {row['steps_done']} steps; expected: one for up to "
            "100 steps, and one for each evaluation",
            f"{counts['transfers_to_host']:.0f} transfers to the host: losses, read at evaluations",
            f"{counts['fallbacks']:.0f} operations that XLA lacks ran on the host{stops}",
            f"input wait {rates.input_wait if rates else 0.0:.1%}; {row['tokens'] / seconds:,.0f} tokens/s "
            "with compilation counted",
        ):
            console.print(line)
    if exported is not None:
        console.print(f"exported a stock model to {exported}")


@contextlib.contextmanager
def _log_lines(console: Console, results: str | None) -> Iterator[None]:
    """Log lines in the results' logs, and on a console that is no terminal."""
    from mup_tpu.training.process import attached, host_log

    with contextlib.ExitStack() as stack:
        if not console.is_terminal:
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(VisibleFormatter())
            # The console notes the loss, and frees what waits in the buffer.
            stack.enter_context(attached(handler, "mup_tpu", lost=console.lose))
        if results is not None:
            stack.enter_context(host_log(results))
        yield


def prepare(out: FolderName, data: PreparedText = PreparedText()) -> None:
    """Write a corpus as tokenised shards that training streams.

    `mup-tpu train --corpus OUT` trains on them. Shards are WebDataset tar files with an index. After a kill,
    run the same command to continue; it ends with the same bytes.

    Args:
        out: Folder or fsspec URL to write to (gs://, s3://).
        data: Text, tokenizer and sequence length.
    """
    from mup_tpu.data import shards

    index = shards.prepare(data, out)
    console = Console()
    for name, split in (("training", index.train), ("held-out", index.validation)):
        size = sum(shard.size for shard in split.shards) / 2**20
        console.print(
            f"{name}: {len(split.shards):,} shards of {split.samples_per_shard:,} sequences, {size:,.1f} MiB"
        )
    console.print(
        f"train on them with: mup-tpu train --corpus {out} --sequence-length {index.sequence_length}"
    )
