"""Commands that train many trials: sweep, search, transfer. Ray and torch are imported when they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.cli.grid import GridOptions, SearchRun, SweepRun
from mup_tpu.cli.study import StudyOptions
from mup_tpu.cli.tables import TableOptions
from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.config.paths import File, Folder, Where
from mup_tpu.config.search import Search
from mup_tpu.config.toml import read_toml
from mup_tpu.config.values import counted
from mup_tpu.errors import ConfigError, MupTpuError, StoreError, TrialsFailed
from mup_tpu.tuning.target import Target

_OF_A_STUDY = {"trainer", "settings"}
"""Keys that make a TOML file a study file."""


def sweep(
    file: Annotated[File, tyro.conf.Positional],
    how: SweepRun = SweepRun(),
    continue_to: int | None = None,
    study: StudyOptions = StudyOptions(),
) -> None:
    """Run and store missing trials of a sweep in a TOML file.

    Args:
        file: TOML file: experiment, widths, learning_rates, parametrizations, num_seeds, and the shared trial
            under [base.model], [base.data], [base.optimizer], [base.train]. Other axes are
            scale = {depth = [2, 4, 8]}, tune = {weight_decay = [0, 0.01]}, compare = {precision = [...]}, and
            [[ladder]] tables for fields that grow together.
        how: How the sweep is run.
        continue_to: Steps of all trials in place of the file's; trials go on from checkpoints of the shorter
            ones (--checkpoint-every). For schedules constant and wsd. The store keeps both rows.
        study: Own training; the file then has experiment, scale, tune, compare, num_seeds, all under names of
            yours, and [settings] (`mup-tpu init study`).
    """
    from mup_tpu.config.toml import load_sweep

    if study.trainer is not None or not _OF_A_STUDY.isdisjoint(read_toml(file)):
        if how.grid != GridOptions() or continue_to is not None:
            raise ConfigError("a study's grid stands in its file: change it there")
        run_study(file, study, how)
        return
    if study != StudyOptions():
        raise ConfigError("workers, timeout and resources are options of a --trainer, and there is none")
    run_and_show(load_sweep(file), how, continue_to)


def run_study(file: Path, options: StudyOptions, how: SweepRun) -> None:
    """Run the missing trials of a study in a TOML file, then show its verdict and figures."""
    from mup_tpu.cli.replay import show
    from mup_tpu.study.toml import load_study

    study, trainer = load_study(file, how.results)
    trainer = options.trainer or trainer
    if trainer is None:
        raise ConfigError("trainer is missing: give --trainer, or name one in the file")
    if how.is_dry:
        Console().print(f"{study.space.name}: {len(study.trials())} trials in the grid")
        return
    outcome = study.run(
        trainer,
        until_settled=how.until.until_settled,
        first_looks=how.until.first_looks,
        budget=how.until.budget,
        workers=options.workers,
        timeout=options.timeout,
        heartbeat=how.where.heartbeat,
        halving=how.run.halving,
        ray=how.where.ray,
        address=how.where.address,
        resources=options.amounts(),
        track=how.where.track,
        console=Console(),
    )
    show_and_judge(outcome, study.folder, lambda: show(study.folder))


def run_and_show(sweep: Sweep, how: SweepRun, continue_to: int | None = None) -> None:
    """Run a sweep, whole or until it is settled, then draw its figures and print its optima and verdict."""
    from mup_tpu.jobs.this_machine import start_server

    sweep = how.grid.change(sweep)
    sweep.trials()  # raises for trials that are not allowed, before anything starts
    folder = how.results or f"results/{sweep.experiment}"
    if how.is_dry:
        if continue_to is not None:
            raise ConfigError("continue_to and dry_run were both given: give one of them")
        from mup_tpu.cli.dry_run import say_what_would_run

        say_what_would_run(sweep, folder, how)
        return
    if not Path(folder, "store.json").exists():  # else all trials may be stored already
        start_server(how.where, how.run)
    # While the workers' server starts, this core imports plots and statistics. Not in a thread: scipy fails
    # while torch is half imported, as by a pack in this process.
    import scipy.stats  # noqa: F401

    import mup_tpu.plots  # noqa: F401
    from mup_tpu.cli import replay

    console = Console()
    try:
        outcome = run_either(sweep, folder, how, console, continue_to)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; finished trials are stored in {folder}, run the same command to go on"
        ) from None
    if outcome:
        ended = counted(sorted(outcome.items()))
        console.print(f"ran {outcome.total()} trials: {ended}; stored in {folder}")
    rows = () if continue_to is None else (f"steps_planned={continue_to}",)
    show_and_judge(outcome, folder, lambda: replay.show(folder, TableOptions(where=rows)))


def show_and_judge(outcome: Mapping[str, int], folder: str, show: Callable[[], None]) -> None:
    """Show results, then raise TrialsFailed if trials failed."""
    failed = outcome.get("failed", 0)
    try:
        show()
    except MupTpuError as error:
        if not failed:
            raise
        Console().print(f"nothing to show: {error}")
    if failed:
        total = sum(outcome.values())
        raise TrialsFailed(
            f"{failed} of {total} trials failed, with their reasons in {folder}; the same command tries them "
            "again"
        )


def run_either(
    sweep: Sweep, folder: str, how: SweepRun, console: Console, continue_to: int | None = None
) -> Counter[str]:
    """Run missing trials of a sweep's grid, or buy runs until its verdicts are settled."""
    if how.until.until_settled:
        if continue_to is not None:
            raise ConfigError("continue_to and until_settled were both given: give one of them")
        with console.status("importing"):
            from mup_tpu.tuning.sequence import run_until_settled

        return run_until_settled(sweep, folder, how.until, how.where, how.run, console)
    with console.status("importing"):
        from mup_tpu.tuning.sweep import run_sweep

    return run_sweep(sweep, folder, how.where, how.run, console, continue_to)


def search(file: Annotated[File, tyro.conf.Positional], how: SearchRun = SearchRun()) -> None:
    """Search the space in a TOML file with Ray Tune; every trial is stored.

    Args:
        file: TOML file: experiment, the shared trial under [base.model] and so on, and [space.NAME] tables
            with kind (loguniform, uniform, choice), low and high, or values.
        how: How the search is run.
    """
    from mup_tpu.config.search import load_search

    search_and_show(load_search(file), how, f"mup-tpu search {file}")


def search_and_show(search: Search, how: SearchRun, command: str) -> None:
    """Run a search, then print the numbers of its trials, the best trial, and the next command."""
    from mup_tpu.config.columns import write

    console = Console()
    with console.status("importing ray"):
        from mup_tpu.tuning.found import best_trials
        from mup_tpu.tuning.search import run_search

    folder = how.results or f"results/{search.experiment}"
    outcome = run_search(search, folder, how.options, how.run, how.resume, console)
    ended = counted(sorted(outcome.counts.items()))
    console.print(f"ended in this call: {ended or 'no trial'}; stored in {folder}")
    if outcome.unfinished:
        at = f" --results {how.results}" if how.results else ""
        line = f"{outcome.unfinished} trials to go; go on with: {command}{at} --resume"
        console.print(line)
    if outcome.counts["finished"]:
        best = best_trials(folder)[0]
        point = ", ".join(f"{name} {write(name, best.trial.flat()[name])}" for name in search.space)
        console.print(f"best: loss {best.loss:.4f} at {point}", style="bold")
        width = 4 * search.base.model.width
        console.print(f"transfer it with: mup-tpu transfer {folder} --width {width}")
    if outcome.interrupted:
        raise KeyboardInterrupt
    show_and_judge(outcome.counts, folder, lambda: None)


def transfer(
    path: Where,
    target: Target = Target(),
    results: Folder | None = None,
    sweep: Folder | None = None,
    run: RunOptions = RunOptions(),
    where: SweepOptions = SweepOptions(),
) -> None:
    """Train a larger model, or for longer, with hyperparameters found small, and print its loss.

    A search gives its best trials. A sweep gives its rule's predicted optimum at the target (mup's by
    default); the prediction is kept (predictions.json) and scored.

    Args:
        path: Results folder of the search or sweep.
        target: Scale of the transfer, and its trials there.
        results: Results folder; by default PATH_transfer.
        sweep: Results folder of a sweep at the target; its optimum is the reference of the regret.
        run: Options of each trial.
        where: Machine or cluster of the trials.
    """
    from mup_tpu.config.columns import write
    from mup_tpu.tuning.zero_shot import Transfer

    console = Console()
    moved = Transfer(path, target, sweep)
    for warning in moved.warnings:
        console.print(f"warning: {warning}", style="yellow")
    for origin in moved.origin:
        console.print(origin)
    try:
        moved.keep(path)
    except StoreError as error:  # one may transfer from a folder that others own
        console.print(f"warning: the prediction is not kept there: {error}", style="yellow")
    folder = results or f"{path.rstrip('/')}_transfer"
    outcome = moved.run(folder, where, run, console)
    moved.keep(folder)
    runs, (_, at), tuned = moved.reached(folder), moved.sizes, moved.tuned
    rows: list[dict[Any, Any]] = runs.to_dict("records")
    for row in rows:
        console.print(
            f"{at}, {row['parametrization']}, {tuned} {write(tuned, row[tuned])}, "
            f"seed {row['seed']}: {row['status']}, loss {row['loss']:.4f} nat/token"
        )
    for row in moved.regrets(runs):
        console.print(
            f"{row['parametrization']}: regret {row['regret']:+.4f} nat at {at} against "
            f"the best of {sweep} there ({row['best']:.4f})",
            style="bold",
        )
    for said in moved.outcomes(runs):
        console.print(said, style="bold")
    show_and_judge(outcome, folder, lambda: None)
