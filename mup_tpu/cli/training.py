"""Commands that train, and doctor: what they need. torch and ray are imported when one of them runs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from mup_tpu.cli.grid import GridOptions
from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial
from mup_tpu.config_search import Search, SearchOptions
from mup_tpu.errors import ConfigError, Preempted, StoreError, reason

if TYPE_CHECKING:
    import pandas as pd

    from mup_tpu.training.report import PackResult


def train(
    trial: Trial = Trial(),
    run: RunOptions = RunOptions(),
    config: Path | None = None,
    results: str | None = None,
    checkpoints: str | None = None,
    export: Path | None = None,
    export_best: bool = False,
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
            --checkpoint-every. The last two are kept, and the best of those that --eval-every evaluated.
        export: Folder to write the trained model to, as a stock Hugging Face model.
        export_best: Export the checkpoint of least held-out loss in place of the last weights.
        profile: File for a trace of two log intervals, after two for warming up; Perfetto opens it.
        xla_report: Say what XLA did: compilations, executions, transfers (--device xla).
    """
    console = Console()
    if xla_report and run.device != "xla":
        raise ConfigError(f"--xla-report needs --device xla, not {run.device}")
    if export_best and not (export and checkpoints and run.eval_every):
        raise ConfigError("--export-best needs --export, --checkpoints and --eval-every")
    trial = _trial_of(config, trial)
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
    from mup_tpu.config_io import load_trial

    if config is None:
        return trial
    if trial != Trial():
        raise ConfigError(
            f"--config {config} and options of the trial were both given; change the file instead"
        )
    return load_trial(config)


def _train(
    trial: Trial,
    run: RunOptions,
    results: str | None,
    checkpoints: str | None,
    profile: Path | None,
    console: Console,
) -> PackResult:
    """Train a trial under a live line of its progress, and store what comes of it."""
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
    with console.status("starting") as status, _log_lines(console, results):
        training = PackRun([trial], dataset, run, checkpoints)
        with training.preemptible(), _profiler(profile) as next_interval:

            def show(report: Report) -> None:
                status.update(str(report))
                next_interval()

            result = run_to_end(training.steps(), show)
    if store is not None:
        store.append(result.rows, result.curves)
    return result


def _export(trial: Trial, result: PackResult, path: Path, checkpoints: str | None, console: Console) -> None:
    """Write the trained weights, or those of the best checkpoint of a folder, as a stock model."""
    from mup_tpu.models.weights import export_stock
    from mup_tpu.training.checkpoint import load_best

    assert result.pack is not None
    weights, which = result.pack.member_parameters(0), ""
    best = load_best(checkpoints) if checkpoints is not None else None
    if best is not None and best.meta["evaluation_loss"] < result.rows[0]["loss"]:
        weights = {name: best.tensors[f"parameters/{name}"][0] for name in weights}
        which = f" of step {best.step}, held-out loss {best.meta['evaluation_loss']:.4f},"
    sequence_length = trial.data.sequence_length
    out = export_stock(trial, weights, result.pack.vocab_size, sequence_length, path)
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


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    grid: GridOptions = GridOptions(),
    results: str | None = None,
    run: RunOptions = RunOptions(),
    where: SweepOptions = SweepOptions(),
) -> None:
    """Run what is missing of a sweep described in a TOML file, and store it.

    Args:
        file: TOML file: experiment, widths, learning_rates, parametrizations, num_seeds, and the shared trial
            under [base.model], [base.data], [base.optimizer], [base.train]. Other axes are
            scale = {depth = [2, 4, 8]}, tune = {weight_decay = [0, 0.01]}, compare = {precision = [...]}, and
            [[ladder]] tables for fields that grow together.
        grid: What to run in place of the file's.
        results: Results folder (or fsspec URL); by default results/EXPERIMENT.
        run: How each trial is run.
        where: Where the sweep runs.
    """
    from mup_tpu.config_io import load_sweep

    run_and_show(grid.change(load_sweep(file)), results, where, run)


def run_and_show(sweep: Sweep, results: str | None, where: SweepOptions, run: RunOptions) -> None:
    """Run a sweep, then print its optima and verdict and draw its figures."""
    from mup_tpu.tuning.this_machine import start_server

    sweep.trials()  # what is not allowed is said before anything starts
    folder = results or f"results/{sweep.experiment}"
    if not Path(folder, "store.json").exists():  # or there may be nothing left to run
        start_server(where, run)
    from mup_tpu.cli import replay
    from mup_tpu.tuning.sweep import run_sweep

    # The analysis takes seconds to import: while the workers' server starts, a core is free for it.
    threading.Thread(target=importlib.import_module, args=["mup_tpu.plots"], daemon=True).start()
    console = Console()
    try:
        outcome = run_sweep(sweep, folder, where, run, console)
    except KeyboardInterrupt:
        console.print(f"stopped; what had finished is stored in {folder}, run the same command to go on")
        raise
    if outcome:
        ended = ", ".join(f"{count} {status}" for status, count in sorted(outcome.items()))
        console.print(f"ran {sum(outcome.values())} trials: {ended}; stored in {folder}", highlight=False)
    replay.show(folder)


def search(
    file: Annotated[Path, tyro.conf.Positional],
    results: str | None = None,
    resume: bool = False,
    options: SearchOptions = SearchOptions(),
    run: RunOptions = RunOptions(),
) -> None:
    """Search the space described in a TOML file with Ray Tune, and store every trial.

    Args:
        file: TOML file: experiment, the shared trial under [base.model] and so on, and [space.NAME] tables
            with kind (loguniform, uniform, choice), low and high, or values.
        results: Results folder; by default results/EXPERIMENT.
        resume: Go on with the search that the folder holds. What ended is not repeated, what ran goes on from
            its checkpoint, and the algorithm keeps what it learned.
        options: Algorithm, scheduler, limits, and where it runs.
        run: How each trial is run.
    """
    from mup_tpu.config_search import load_search

    search_and_show(load_search(file), results, resume, options, run, f"mup-tpu search {file}")


def search_and_show(
    search: Search, results: str | None, resume: bool, options: SearchOptions, run: RunOptions, command: str
) -> None:
    """Run a search, then print how it ended, its best trial, and how to go on."""
    from mup_tpu.columns import write
    from mup_tpu.tuning.search import run_search
    from mup_tpu.tuning.transfer import best_trials

    console = Console()
    folder = results or f"results/{search.experiment}"
    outcome = run_search(search, folder, options, run, resume, console)
    ended = ", ".join(f"{count} {status}" for status, count in sorted(outcome.counts.items()))
    console.print(f"ended in this call: {ended or 'no trial'}; stored in {folder}", highlight=False)
    if outcome.unfinished:
        at = f" --results {results}" if results else ""
        line = f"{outcome.unfinished} trials to go; go on with: {command}{at} --resume"
        console.print(line, highlight=False, soft_wrap=True)
    if outcome.counts["finished"]:
        best = best_trials(folder)[0]
        point = ", ".join(f"{name} {write(name, best.trial.flat()[name])}" for name in search.space)
        console.print(f"best: loss {best.loss:.4f} at {point}", style="bold", highlight=False, soft_wrap=True)
        width = 4 * search.base.model.width
        console.print(f"transfer it with: mup-tpu transfer {folder} --width {width}", highlight=False)
    if outcome.interrupted:
        raise KeyboardInterrupt


def transfer(
    path: Annotated[str, tyro.conf.Positional],
    width: int | None = None,
    to: tuple[str, ...] = (),
    top: int = 1,
    num_seeds: int = 1,
    steps: int | None = None,
    batch_size: int | None = None,
    parametrizations: tuple[str, ...] = ("mup", "sp"),
    results: str | None = None,
    sweep: str | None = None,
    run: RunOptions = RunOptions(),
    where: SweepOptions = SweepOptions(),
) -> None:
    """Train a larger model, or for longer, with the best trials of a search, and say what each reached.

    Args:
        path: Results folder of the search (or of a sweep).
        width: Width of the target; short for --to width=WIDTH.
        to: Fields that grow, with their values at the target: --to depth=8, or --to width=512 depth=8.
        top: How many of the best trials to transfer.
        num_seeds: Seeds of each.
        steps: Train the target for so many steps instead of the search's.
        batch_size: Train it with this batch size instead of the search's.
        parametrizations: mup is the transfer; sp, with the same hyperparameters, is what it would be without.
        results: Results folder; by default PATH_transfer.
        sweep: Results folder of a sweep at the target, to give the regret against its optimum.
        run: How each trial is run.
        where: Where they run.
    """
    from mup_tpu.columns import configured, write
    from mup_tpu.config import field_column
    from mup_tpu.store import load_axes, load_runs
    from mup_tpu.tuning import transfer as rules
    from mup_tpu.tuning.plan import describe
    from mup_tpu.tuning.sweep import run_trials

    console = Console()
    target = ({} if width is None else {"width": width}) | _assignments(to)
    if not target:
        raise ConfigError("transfer needs a target: give --width, or --to FIELD=VALUE such as --to depth=8")
    found = rules.best_trials(path, top)
    trials = rules.target_trials(
        found, target, parametrizations, num_seeds, steps=steps, batch_size=batch_size
    )
    for warning in rules.transfer_warnings(found[0].trial, trials[0]):
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    folder = results or f"{path.rstrip('/')}_transfer"
    run_trials(f"{Path(path).name}_transfer", trials, tuple(target), folder, where, run, console)
    runs = load_runs(folder)
    for name in target:
        column = field_column(name)
        runs = runs[runs[column] == configured(trials[0])[column]]
    tuned = load_axes(path).tune.column
    at = describe(trials[0], tuple(target))
    small = describe(found[0].trial, tuple(target))
    console.print(f"{small}, searched: loss {found[0].loss:.4f} nat/token", highlight=False)
    rows: list[dict[Any, Any]] = runs.sort_values("loss").to_dict("records")
    for row in rows:
        console.print(
            f"{at}, {row['parametrization']}, {tuned} {write(tuned, row[tuned])}, "
            f"seed {row['seed']}: {row['status']}, loss {row['loss']:.4f} nat/token",
            highlight=False,
        )
    if sweep is not None:
        for row in rules.regret_against_sweep(runs, sweep):
            console.print(
                f"{row['parametrization']}: regret {row['regret']:+.4f} nat at {at} against "
                f"the best of {sweep} there ({row['best']:.4f})",
                style="bold",
                highlight=False,
                soft_wrap=True,
            )


def _assignments(given: Sequence[str]) -> dict[str, Any]:
    """Values by field, from FIELD=VALUE."""
    from mup_tpu.config_io import parse_value

    values = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"to {text!r} is not FIELD=VALUE; write for example depth=8")
        values[name] = parse_value(name, value, "to")
    return values


def coord_check(
    results: str = "results/coord_check",
    trial: Trial = Trial(),
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024),
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    num_seeds: int = 3,
    check_steps: int = 4,
) -> None:
    """Train a few steps at several widths; plot each layer's activation and update size against width.

    In μP no slope is above 0 by much; in SP some are: those layers blow up as the model grows.

    Args:
        results: Folder for the table and the figures; what is stored there is not measured again.
        trial: What to train at each width; its width, parametrization and schedule are not used.
        widths: Widths to compare.
        parametrizations: Parametrizations to compare.
        num_seeds: Seeds to average over.
        check_steps: Optimizer steps, at a constant learning rate.
    """
    coord_checks(results, [trial], widths, parametrizations, num_seeds, check_steps)


def coord_checks(
    results: str,
    trials: Sequence[Trial],
    widths: tuple[int, ...],
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    num_seeds: int = 3,
    check_steps: int = 4,
) -> None:
    """`coord_check` of several trials into one table, each of its own optimizer or tying; drawn once."""
    from mup_tpu.cli import replay

    for trial in trials:
        _coord_check(results, trial, widths, parametrizations, num_seeds, check_steps)
    replay.plot(results)


def _coord_check(
    results: str,
    trial: Trial,
    widths: tuple[int, ...],
    parametrizations: tuple[str, ...],
    num_seeds: int,
    check_steps: int,
) -> None:
    """Measure what is missing of one, store it, and print its slopes."""
    import pandas as pd
    import pyarrow as pa

    from mup_tpu import data
    from mup_tpu.analysis import coord_check as analysis
    from mup_tpu.files import Folder
    from mup_tpu.training.coord_check import measure

    if "://" in results:
        raise ConfigError(f"results {results} of a coordinate check is a URL: give a local folder")
    console = Console()
    trial = trial.replace(steps=check_steps, warmup=0.0, schedule="constant")
    folder, name = Folder(results), "coord_check.parquet"
    try:
        stored = pd.read_parquet(Path(results) / name) if name in folder.names() else None
        with console.status("measuring") as status:
            dataset = data.load(trial.data)
            for table in measure(trial, dataset, widths, parametrizations, num_seeds, stored, status.update):
                if len(table):
                    with folder.writing(name) as file:
                        table.to_parquet(file, index=False)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"results folder {results} cannot be used: {reason(error)}") from None
    own = analysis.setting_name(trial.optimizer.optimizer, trial.model.tied)
    _print_slopes(console, analysis.slopes(analysis.by_setting(table)[own]), own)


def doctor(results: str = "results", tpu: str | None = None) -> None:
    """Say what this machine has for training, and what will not work and how to mend it.

    Args:
        results: Results folder (or fsspec URL) that is to be written.
        tpu: Compile packs for a TPU of this type (such as v4-8, or all of them: all) instead, on this
            machine and with the TPU's own compiler: memory, collectives and estimated cycles of each.
    """
    from mup_tpu.doctor import examine, examine_tpu

    console = Console()
    doing, found = ("looking", examine(results)) if tpu is None else ("compiling", examine_tpu(tpu))
    findings = []
    with console.status(doing) as status:
        for finding in found:
            findings.append(finding)
            status.update(f"{doing} ({len(findings)} done)")
    for finding in findings:
        console.print(
            f"{finding.subject:>20}  {finding.found}", markup=False, highlight=False, soft_wrap=True
        )
    problems = [finding.problem for finding in findings if finding.problem]
    for problem in problems:
        console.print(f"- {problem}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if not problems:
        console.print("nothing is missing" if tpu is None else "all as promised", style="green")


def _print_slopes(console: Console, slopes: pd.DataFrame, setting: str) -> None:
    """A row a layer; then, for each parametrization, the layer that grows fastest with width."""
    rows: list[dict[Any, Any]] = slopes.to_dict("records")
    cells = {
        (r["layer"], r["parametrization"], r["quantity"]): f"{r['slope']:+.2f} ± {r['high'] - r['slope']:.2f}"
        for r in rows
    }
    columns = list(dict.fromkeys((p, quantity) for _, p, quantity in cells))
    shown = Table("layer", title=f"{setting}: exponent of width (95 %)")
    for parametrization, quantity in columns:
        shown.add_column(f"{parametrization} {quantity}", justify="right")
    for layer in dict.fromkeys(r["layer"] for r in rows):
        shown.add_row(layer, *(cells[layer, *column] for column in columns))
    console.print(shown)
    for parametrization in dict.fromkeys(p for p, _ in columns):
        known = [r for r in rows if r["parametrization"] == parametrization and not math.isnan(r["slope"])]
        if not known:
            continue
        top = max(known, key=lambda r: r["slope"])
        what = f"{top['quantity']} of {top['layer']} ∝ width^{top['slope']:.2f}"
        console.print(f"{parametrization}: fastest growing is the {what}", style="bold", highlight=False)
