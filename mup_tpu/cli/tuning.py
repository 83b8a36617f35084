"""Commands that train many trials: sweep, search, transfer. Ray and torch are imported when they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from mup_tpu.cli.console import console as make_console
from mup_tpu.cli.grid import GridOptions
from mup_tpu.config import (
    DryRunOptions,
    RunOptions,
    SequenceOptions,
    Sweep,
    SweepOptions,
    Trial,
    require_above_zero,
)
from mup_tpu.config.search import Search, SearchOptions
from mup_tpu.errors import ConfigError, MupTpuError, TrialsFailed


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    grid: GridOptions = GridOptions(),
    results: str | None = None,
    run: RunOptions = RunOptions(),
    where: SweepOptions = SweepOptions(),
    until: SequenceOptions = SequenceOptions(),
    dry: DryRunOptions = DryRunOptions(),
    continue_to: int | None = None,
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
        until: Whether runs are bought until the verdict is settled.
        dry: Whether to say what would run in place of running it.
        continue_to: Train all trials for so many steps in place of the file's, on from the checkpoints that
            --checkpoint-every kept of those; for schedules constant and wsd. The store keeps both rows.
    """
    from mup_tpu.config.toml import load_sweep

    run_and_show(grid.change(load_sweep(file)), results, where, run, until, dry, continue_to)


def run_and_show(
    sweep: Sweep,
    results: str | None,
    where: SweepOptions,
    run: RunOptions,
    until: SequenceOptions,
    dry: DryRunOptions,
    continue_to: int | None = None,
) -> None:
    """Run a sweep, whole or until it is settled, then print its optima and verdict and draw its figures."""
    from mup_tpu.jobs.this_machine import start_server

    sweep.trials()  # what is not allowed is said before anything starts
    folder = results or f"results/{sweep.experiment}"
    if dry.dry_run or dry.dry_run_on:
        if continue_to is not None:
            raise ConfigError("continue_to and dry_run were both given: give one of them")
        say_what_would_run(sweep, folder, where, run, until, dry)
        return
    if not Path(folder, "store.json").exists():  # or there may be nothing left to run
        start_server(where, run)
    # Now that the workers' server starts, a core is free to import what shows results. Not in a thread: scipy
    # fails where torch is half imported, as it would be by a pack in this process.
    import mup_tpu.plots  # noqa: F401
    from mup_tpu.cli import replay

    console = make_console()
    try:
        outcome = run_either(sweep, folder, where, run, until, console, continue_to)
    except KeyboardInterrupt:
        console.print(f"stopped; what had finished is stored in {folder}, run the same command to go on")
        raise
    if outcome:
        ended = ", ".join(f"{count} {status}" for status, count in sorted(outcome.items()))
        console.print(f"ran {sum(outcome.values())} trials: {ended}; stored in {folder}", highlight=False)
    rows = () if continue_to is None else (f"steps_planned={continue_to}",)
    show_and_judge(outcome, folder, lambda: replay.show(folder, replay.TableOptions(where=rows)))


def say_what_would_run(
    sweep: Sweep,
    folder: str,
    where: SweepOptions,
    run: RunOptions,
    until: SequenceOptions,
    dry: DryRunOptions,
) -> None:
    """Print what is missing of a sweep, by size, with its arithmetic, memory and the time that may take."""
    from rich.table import Table

    from mup_tpu.training.report import format_seconds
    from mup_tpu.tuning import forecast
    from mup_tpu.tuning.sweep import what_is_missing

    console, total = make_console(), len(sweep.trials())
    missing, corpora = what_is_missing(sweep, folder)
    console.print(
        f"{sweep.experiment}: {total} trials, {total - len(missing)} stored in {folder}", highlight=False
    )
    if not missing:
        return
    if dry.dry_run_on:
        from mup_tpu.tpu_compiler import target

        machine = forecast.tpu(target(dry.dry_run_on))
    else:
        machine = forecast.this_machine(missing, run)

    def vocab_size(trial: Trial) -> int:
        return corpora.of(trial).vocab_size

    sizes = forecast.forecast(
        missing, sweep.scale_axis.fields, vocab_size, machine, dry.mfu, where, run.micro_batches
    )
    each = " on each device" if machine.devices > 1 else ""
    table = Table("size", "trials", "packs", "FLOP a trial", f"a pack's memory{each}", "time of all")
    for row in sizes:
        needed = f"{row.memory_bytes / 2**20:,.0f} MiB"
        if row.memory_bytes > machine.memory_bytes:
            needed += f", {machine.memory_bytes / 2**20:,.0f} are there: it would be split"
        counts = map(str, (row.size, row.trials, row.packs))
        table.add_row(*counts, f"{row.flops:.2g}", needed, format_seconds(row.seconds))
    console.print(table)
    seconds = format_seconds(sum(row.seconds for row in sizes))
    flops = sum(row.flops * row.trials for row in sizes)
    console.print(
        f"in all {len(missing)} trials, {flops:.2g} FLOP: about {seconds} on {machine.name}, at "
        f"{dry.mfu:.0%} of {machine.flops / 1e12:.3g} TFLOP/s (--mfu), without start-up, compilation "
        "and evaluation",
        highlight=False,
        soft_wrap=True,
    )
    if until.until_settled:
        console.print("--until-settled buys a part of them, look by look, and may buy more seeds")


def show_and_judge(outcome: Mapping[str, int], folder: str, show: Callable[[], None]) -> None:
    """Show what there is, and say at the end that trials failed, if any did.

    Raises:
        TrialsFailed: some did.
    """
    failed = outcome.get("failed", 0)
    try:
        show()
    except MupTpuError as error:
        if not failed:
            raise
        make_console().print(f"nothing to show: {error}", soft_wrap=True)
    if failed:
        total = sum(outcome.values())
        raise TrialsFailed(
            f"{failed} of {total} trials failed, with their reasons in {folder}; the same command tries them "
            "again"
        )


def run_either(
    sweep: Sweep,
    folder: str,
    where: SweepOptions,
    run: RunOptions,
    until: SequenceOptions,
    console: Console,
    continue_to: int | None = None,
) -> Counter[str]:
    """Run what is missing of a sweep's grid, or buy runs of it until it is settled."""
    if until.until_settled:
        if continue_to is not None:
            raise ConfigError("continue_to and until_settled were both given: give one of them")
        with console.status("importing"):
            from mup_tpu.tuning.sequence import run_until_settled

        return run_until_settled(sweep, folder, until, where, run, console)
    with console.status("importing"):
        from mup_tpu.tuning.sweep import run_sweep

    return run_sweep(sweep, folder, where, run, console, continue_to)


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
        results: Results folder (or fsspec URL); by default results/EXPERIMENT.
        resume: Go on with the search that the folder holds. What ended is not repeated, what ran goes on from
            its checkpoint, and the algorithm keeps what it learned.
        options: Algorithm, scheduler, limits, and where it runs.
        run: How each trial is run.
    """
    from mup_tpu.config.search import load_search

    search_and_show(load_search(file), results, resume, options, run, f"mup-tpu search {file}")


def search_and_show(
    search: Search, results: str | None, resume: bool, options: SearchOptions, run: RunOptions, command: str
) -> None:
    """Run a search, then print how it ended, its best trial, and how to go on."""
    from mup_tpu.config.columns import write

    console = make_console()
    with console.status("importing ray"):
        from mup_tpu.tuning.search import run_search
        from mup_tpu.tuning.zero_shot import best_trials

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
    show_and_judge(outcome.counts, folder, lambda: None)


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
    from mup_tpu.config import field_column
    from mup_tpu.config.columns import configured, write
    from mup_tpu.jobs.plan import describe
    from mup_tpu.store import load_axes, load_runs
    from mup_tpu.tuning import zero_shot as rules
    from mup_tpu.tuning.sweep import run_trials

    console = make_console()
    target = ({} if width is None else {"width": width}) | _assignments(to)
    require_above_zero("top", top)
    require_above_zero("num_seeds", num_seeds)
    if not target:
        raise ConfigError("transfer needs a target: give --width, or --to FIELD=VALUE such as --to depth=8")
    found = rules.best_trials(path, top)
    trials = rules.target_trials(
        found, target, parametrizations, num_seeds, steps=steps, batch_size=batch_size
    )
    for warning in rules.transfer_warnings(found[0].trial, trials[0]):
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    if sweep is not None:
        rules.best_of_sweep(sweep)  # whether it is one is said before anything trains
    folder = results or f"{path.rstrip('/')}_transfer"
    outcome = run_trials(f"{Path(path).name}_transfer", trials, tuple(target), folder, where, run, console)
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
    show_and_judge(outcome, folder, lambda: None)


def _assignments(given: Sequence[str]) -> dict[str, Any]:
    """Values by field, from FIELD=VALUE."""
    from mup_tpu.config.toml import parse_value

    values = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"to {text!r} is not FIELD=VALUE; write for example depth=8")
        values[name] = parse_value(name, value, "to")
    return values
