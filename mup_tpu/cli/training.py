"""The command `train`. torch is imported when it runs."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mup_tpu.cli.console import console as make_console
from mup_tpu.config import RunOptions, Trial
from mup_tpu.errors import ConfigError, Preempted

if TYPE_CHECKING:
    from mup_tpu.training.report import PackResult


def train(
    trial: Trial = Trial(),
    run: RunOptions = RunOptions(),
    config: Path | None = None,
    results: str | None = None,
    checkpoints: str | None = None,
    export: Path | None = None,
    export_best: bool = False,
    continue_to: int | None = None,
    xla_report: bool = False,
    profile: Path | None = None,
) -> None:
    """Train one trial and print its loss.

    Args:
        trial: What to train.
        run: How to run it.
        config: TOML file with [model], [data], [optimizer], [train]; it takes the place of the options for
            them.
        results: Results folder (or fsspec URL) to store the row and the learning curve in.
        checkpoints: Folder (or fsspec URL) to checkpoint to and to go on from, every tenth of the run unless
            --checkpoint-every; each trial has a folder in it. The last two are kept, and the best of those
            that --eval-every evaluated.
        export: Folder to write the trained model and its tokenizer to, as transformers' AutoModelForCausalLM
            and AutoTokenizer load them.
        export_best: Export the checkpoint of least held-out loss in place of the last weights.
        continue_to: Train for so many steps in place of the trial's, on from a checkpoint of that in
            --checkpoints; for schedules constant and wsd.
        profile: File for a trace of two log intervals, after two for warming up; Perfetto opens it.
        xla_report: Say what XLA did: compilations, executions, transfers (--device xla).
    """
    console = make_console()
    if xla_report and run.device != "xla":
        raise ConfigError(f"--xla-report needs --device xla, not {run.device}")
    if export_best and not (export and checkpoints and run.eval_every):
        raise ConfigError("--export-best needs --export, --checkpoints and --eval-every")
    trial = _trial_of(config, trial)
    run.require_parts(trial.data.batch_size)
    shorter = trial
    if continue_to is not None:
        from mup_tpu.training.continuation import longer

        trial = longer(trial, continue_to)
        if checkpoints is None:
            raise ConfigError("--continue-to needs --checkpoints, to go on from")
    if export is not None:
        try:
            export.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"export {export} cannot be written: {error.strerror}") from None
    if checkpoints is not None:
        root, checkpoints = checkpoints, _folder_of(trial, checkpoints)
        if continue_to is not None:
            _begin(root, shorter, trial, checkpoints, console)
    result = _train(trial, run, results, checkpoints, profile, console)
    row = result.rows[0]
    if row["status"] == "preempted":
        kept = f"its checkpoint is in {checkpoints}, the same command goes on" if checkpoints else "not kept"
        raise Preempted(f"preempted at step {row['steps_done']} of {row['steps_planned']}: {kept}")
    loss = (
        f"loss {row['loss']:.4f} nat/token ({row['loss_kind']})"
        if math.isfinite(row["loss"])
        else row["reason"]
    )
    console.print(
        f"{row['status']}: {loss}, width {row['width']}, {row['params']:,} parameters, "
        f"{row['tokens']:,} tokens, {row['wall_time_s']:.1f} s · {result.rates}",
        highlight=False,
        soft_wrap=True,
    )
    if xla_report:
        _print_xla_report(console, row, result.rates.input_wait if result.rates else 0.0)
    if export is not None:
        _export(trial, result, export, checkpoints if export_best else None, console)


def _trial_of(config: Path | None, trial: Trial) -> Trial:
    """The trial of a TOML file, or that of the options.

    Raises:
        ConfigError: both were given.
    """
    from mup_tpu.config.toml import load_trial

    if config is None:
        return trial
    if trial != Trial():
        raise ConfigError(
            f"--config {config} and options of the trial were both given; change the file instead"
        )
    return load_trial(config)


def _folder_of(trial: Trial, checkpoints: str) -> str:
    """A trial's folder in that of all checkpoints; the latter itself where an earlier version used it."""
    from mup_tpu import data
    from mup_tpu.training.checkpoint import load_latest

    trial_id = trial.trial_id(data.load(trial.data).fingerprint)
    found = load_latest(checkpoints)
    is_old = found is not None and found.meta.get("trial_ids") == [trial_id]
    return checkpoints if is_old else f"{checkpoints.rstrip('/')}/{trial_id}"


def _begin(root: str, shorter: Trial, trial: Trial, folder: str, console: Console) -> None:
    """Have a trial go on from where the same with fewer steps was, or say that it cannot."""
    from mup_tpu import data
    from mup_tpu.files import Folder
    from mup_tpu.training.continuation import begin

    fingerprint = data.load(trial.data).fingerprint
    if not begin(Folder(root), [trial], [shorter], lambda t: t.trial_id(fingerprint), folder):
        console.print(
            f"no checkpoint in {root} to go on from: it trains from the start",
            highlight=False,
            soft_wrap=True,
        )


def _train(
    trial: Trial,
    run: RunOptions,
    results: str | None,
    checkpoints: str | None,
    profile: Path | None,
    console: Console,
) -> PackResult:
    """Train a trial under a live line of its progress, and store what comes of it."""
    with console.status("importing torch"):
        import torch

        from mup_tpu import data
        from mup_tpu.store import Store
        from mup_tpu.training.loop import PackRun, run_to_end
        from mup_tpu.training.report import Report

    if checkpoints is not None and not run.checkpoint_every:
        run = replace(run, checkpoint_every=max(1, trial.train.steps // 10))
    store = Store(results, "train") if results else None
    dataset = data.load(trial.data)
    if run.threads:
        torch.set_num_threads(run.threads)
    with console.status("initialising parameters") as status, _log_lines(console, results):
        training = PackRun([trial], dataset, run, checkpoints)
        status.update(training.first_report_waits_for)
        with training.preemptible(), _profiler(profile) as next_interval:

            def show(report: Report) -> None:
                status.update(str(report))
                next_interval()

            result = run_to_end(training.steps(), show)
        if store is not None:  # before anything more is printed, which can fail
            store.append(result.rows, result.curves)
    return result


def _export(trial: Trial, result: PackResult, path: Path, checkpoints: str | None, console: Console) -> None:
    """Write a stock model of the trained weights, or of a folder's best checkpoint, and its tokenizer."""
    from mup_tpu import data
    from mup_tpu.data.tokenizer import save_stock
    from mup_tpu.models.weights import export_stock
    from mup_tpu.training.checkpoint import load_best

    assert result.pack is not None
    weights, which = result.pack.member_parameters(0), ""
    best = load_best(checkpoints) if checkpoints is not None else None
    if best is not None and best.meta["evaluation_loss"] < result.rows[0]["loss"]:
        weights = {name: best.tensors[f"parameters/{name}"][0] for name in weights}
        which = f" of step {best.step}, held-out loss {best.meta['evaluation_loss']:.4f},"
    sequence_length = trial.data.sequence_length
    tokenizer = data.load(trial.data).tokenizer
    out = export_stock(trial, weights, result.pack.vocab_size, sequence_length, tokenizer.separator, path)
    save_stock(tokenizer, sequence_length, out)
    console.print(f"exported a stock model{which} to {out}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _log_lines(console: Console, results: str | None) -> Iterator[None]:
    """Lines at every log point: to the console where it is no terminal, and to the logs of the results."""
    from mup_tpu.training.host_log import attached, host_log

    with contextlib.ExitStack() as stack:
        if not console.is_terminal:
            stack.enter_context(attached(logging.StreamHandler(sys.stdout), "mup_tpu"))
        if results is not None:
            stack.enter_context(host_log(results))
        yield


@contextlib.contextmanager
def _profiler(file: Path | None) -> Iterator[Callable[[], None]]:
    """Trace what runs between the third and the fifth call of what is yielded; None traces nothing."""
    if file is None:
        yield lambda: None
        return
    from torch.profiler import profile, schedule

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    except OSError as error:
        raise ConfigError(f"profile {file} cannot be written: {error.strerror}") from None
    intervals = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(schedule=intervals, on_trace_ready=lambda p: p.export_chrome_trace(str(file))) as profiler:
        yield profiler.step


def _print_xla_report(console: Console, row: dict[str, Any], input_wait: float) -> None:
    from mup_tpu.devices import xla

    counts = xla.report()
    rate = row["tokens"] / row["wall_time_s"]
    lines = (
        f"XLA compiled {counts['compilations']:.0f} programs in {counts['compile_s']:.1f} s "
        f"({counts['compile_s'] / row['wall_time_s']:.0%} of the run): two for the first steps, one each for "
        "evaluation and start-up is as it should be",
        f"{counts['executions']:.0f} executions for {row['steps_done']} steps: one a step, and those of "
        "evaluations",
        f"{counts['transfers_to_host']:.0f} transfers to the host: losses, read at evaluations",
        f"{counts['fallbacks']:.0f} operations that XLA lacks ran on the host"
        + (": each stops the device" if counts["fallbacks"] else ""),
        f"input wait {input_wait:.1%}; {rate:,.0f} tokens/s with compilation counted",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
