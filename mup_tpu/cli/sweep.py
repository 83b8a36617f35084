"""Commands that train many trials: sweep and search. Ray and torch are imported when they run."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from mup_tpu.cli.analysis import predict_planned_folder, print_recipe, show
from mup_tpu.cli.console import Console
from mup_tpu.cli.study import StudyOptions, keep_plan, refuse_options_of_networks
from mup_tpu.cli.table import TableOptions
from mup_tpu.config import Grid, RunOptions, SequenceOptions, Sweep, SweepOptions
from mup_tpu.config.columns import Table, write
from mup_tpu.config.options import File, FolderName
from mup_tpu.config.sweep import Search, SearchOptions
from mup_tpu.config.toml import kind_of, load_sweep, parse_axis, read_toml
from mup_tpu.config.values import write_time
from mup_tpu.errors import ConfigError, MupTpuError, TrialsFailed, given, raised_as
from mup_tpu.files import near

T = TypeVar("T")


@dataclass(frozen=True)
class GridOptions:
    """Axes in place of a sweep's own."""

    scale: str | None = None
    """Values of the scale, FIELD=VALUES: depth=2,4,8. Values alone are widths: 64,128; in a study they
    are values of the name that the file has."""
    tune: str | None = None
    """Values of the tuned hyperparameter: weight_decay=0,0.01. Values alone are peak learning rates at the
    base: 2^-8,2^-7."""
    compare: str | None = None
    """Values of the compared field: precision=float32,bf16. Values alone are parametrizations: sp,mup."""
    num_seeds: int | None = None
    """Number of seeds of every cell, from 0."""

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def change(self, sweep: Sweep) -> Sweep:
        """Return the sweep with these axes in place of its own."""
        changes: dict[str, Any]
        changes = {n: v if n == "num_seeds" else parse_axis(v, n) for n, v in self.given.items()}
        changes |= {"measured_by": None} if "scale" in changes else {}
        changes |= {"design": None} if "tune" in changes else {}
        return replace(sweep, **changes)


@dataclass(frozen=True)
class SweepRun:
    """Options of a run of a sweep."""

    grid: GridOptions = GridOptions()
    """Axes in place of the sweep's own."""
    results: FolderName | None = None
    """Results folder (or fsspec URL); stored trials are not run again. By default results/EXPERIMENT."""
    run: RunOptions = RunOptions()
    """Options of each trial."""
    where: SweepOptions = SweepOptions()
    """Machine or cluster of the sweep."""
    until: SequenceOptions = SequenceOptions()
    """Whether runs are bought until the verdict is settled."""
    dry_run: bool = False
    """Print the missing trials, their packs, and the time and memory that they may take; train nothing."""
    on: str | None = None
    """Machine of the dry run, a type of TPU such as v4-8; by default this one."""

    def __post_init__(self) -> None:
        if self.on is not None and not self.dry_run:
            raise ConfigError(f"{given('on', self.on)} needs {given('dry_run')}")


@dataclass(frozen=True)
class SearchedTrial(RunOptions):
    """Options of each trial of a search, which evaluates and checkpoints by --evaluations."""

    split_over: Annotated[int, tyro.conf.Suppress] = 1
    eval_every: Annotated[int, tyro.conf.Suppress] = 0
    checkpoint_every: Annotated[int, tyro.conf.Suppress] = 0


@dataclass(frozen=True)
class SearchRun:
    """Options of a run of a search."""

    results: FolderName | None = None
    """Results folder (or fsspec URL); by default results/EXPERIMENT."""
    options: SearchOptions = SearchOptions()
    """Algorithm, scheduler, limits."""
    where: SweepOptions = SweepOptions(pack_size=1)
    """Machine or cluster of the search."""
    run: SearchedTrial = SearchedTrial()
    """Options of each trial."""


def sweep(
    file: Annotated[File, tyro.conf.Positional],
    how: SweepRun = SweepRun(),
    continue_to: int | None = None,
    study: StudyOptions = StudyOptions(),
) -> None:
    """Run the missing trials of a sweep.

    Args:
        file: Script with a SWEEP, as experiments/quickstart.py; FILE.py:NAME is another sweep of it. Or a
            TOML file, as `mup-tpu init` writes one: experiment, scale, tune, compare, num_seeds, and the
            shared trial under [base.model], [base.data], [base.optimizer], [base.train]. [[scale]] tables
            are a scale of several fields that grow together. With trainer or [settings] it is a study of
            your own training (`mup-tpu init study`).
        how: How the sweep is run.
        continue_to: Steps of all trials in place of the file's; trials continue from checkpoints of the
            shorter ones (--checkpoint-every). For schedules constant and wsd. The store keeps both rows.
        study: Options of a study.
    """
    if not is_study(file, study):
        run_and_show(read_script(file, "SWEEP", Sweep) or load_sweep(file), how, continue_to)
        return
    if continue_to is not None:
        raise ConfigError(
            "continue_to is for our networks: give a study's longer runs as values of its scale"
        )
    refuse_options_of_networks(how.run, how.where)
    made, trainer = study.load(file, how.results, how.grid.given)
    if made.grid.space is not None:
        raise ConfigError(f"{file} is the file of a search, not of a sweep: `mup-tpu search {file}` takes it")
    if how.dry_run:
        Console().print(f"{made.grid.experiment}: {len(made.trials())} trials in the grid")
        return
    keep_plan(made.grid, made.folder)
    until = vars(_until(how, made.grid))
    outcome = study.run(made, trainer, how.where, how.run.price, **until)
    show_and_judge(outcome, made.folder, lambda: _show(made.folder))


def is_study(file: Path, options: StudyOptions) -> bool:
    """Return whether a file is of somebody's own training; refuse options of one that is not."""
    is_script = file.suffix == ".py" or ".py:" in str(file)
    if options.trainer is not None or (not is_script and kind_of(read_toml(file)) == "study"):
        return True
    if options != StudyOptions():
        raise ConfigError("loss, workers, timeout and resources need a study or --trainer")
    return False


def read_script(file: Path, name: str, kind: type[T]) -> T | None:
    """Run a script and return its sweep or search; FILE.py:NAME has another name. None for another file."""
    path, _, given = str(file).partition(".py:")
    path, name = (f"{path}.py", given) if given else (path, name)
    if not path.endswith(".py"):
        return None
    sys.path.insert(0, str(Path(path).parent))  # scripts import each other
    try:
        with raised_as(ConfigError, f"script {path} cannot be read"):
            values = runpy.run_path(path)
    finally:
        del sys.path[0]
    if not isinstance(value := values.get(name), kind):
        names = ", ".join(sorted(n for n, value in values.items() if isinstance(value, kind))) or "none"
        raise ConfigError(f"script {path} has no {kind.__name__} of the name {name}; there are {names}")
    return value


def _until(how: SweepRun, grid: Grid[Any]) -> SequenceOptions:
    # Runs of a plan are bought size after size.
    return how.until if grid.target is None else replace(how.until, until_settled=True)


def _show(folder: str, options: TableOptions = TableOptions()) -> None:
    """Print the prediction of a planned folder, else the optima, figures and verdict, and what comes next."""
    if (made := predict_planned_folder(folder, ())) is not None:
        print_recipe(made, folder)
        return
    analysis = show(folder, options).analysis
    is_open = any(result.next_batch is not None for result in analysis.results)
    if is_open and all(result.sequence is None for result in analysis.results):
        Console().print("next: the same command with --until-settled runs what settles it", wrap=False)
    elif not is_open and len(analysis.results[0].optima) > 1:
        wide = write(analysis.scale, 4 * max(o.scale for o in analysis.results[0].optima))
        Console().print(f"next: mup-tpu predict {near(folder)} --at {analysis.scale}={wide}", wrap=False)


def run_and_show(sweep: Sweep, how: SweepRun, continue_to: int | None = None) -> None:
    """Run a sweep, whole or until it is settled, then draw its figures and print its optima and verdict."""
    from mup_tpu.internals.processes import importing
    from mup_tpu.jobs.this_machine import start_server

    sweep = how.grid.change(sweep)
    trials = sweep.trials()  # raises for trials that are not allowed, before anything starts
    folder = how.results or f"results/{sweep.experiment}"
    if how.dry_run:
        if continue_to is not None:
            raise ConfigError("continue_to and dry_run were both given: give one of them")
        print_forecast(sweep, folder, how)
        return
    keep_plan(sweep, folder)
    if not Path(folder, "store.json").exists():  # else all trials may be stored already
        start_server(len(trials), how.where, how.run)
    # While the workers' server starts, this core imports plots and statistics. Not in a thread: scipy fails
    # while torch is half imported, as by a pack in this process.
    with importing():
        import mup_tpu.plots  # noqa: F401

    console = Console()
    try:
        with console.status("importing"):
            from mup_tpu.tuning.sweep import run_sweep

        outcome = run_sweep(sweep, folder, how.where, how.run, console, _until(how, sweep), continue_to)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; finished trials are stored in {folder}; run the same command to continue"
        ) from None
    rows = () if continue_to is None else (f"steps_planned={continue_to}",)
    show_and_judge(outcome, folder, lambda: _show(folder, TableOptions(where=rows)))


def show_and_judge(outcome: Mapping[str, int], folder: str, show: Callable[[], object]) -> None:
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
        why = f"{failed} of {total} trials failed, with their reasons in {near(folder)}"
        raise TrialsFailed(f"{why}; run the same command to try them again")


def print_forecast(sweep: Sweep, folder: str, how: SweepRun) -> None:
    """Print the missing trials of a sweep by size, with arithmetic, memory and time."""
    from mup_tpu.tuning.runner import refuse_another_device, sweep_with_precision
    from mup_tpu.tuning.sweep import MFU, forecast, machine_here, tpu, what_is_missing

    console, run = Console(), how.run
    if how.on and run.device != "tpu":
        run = replace(run, device="xla")
    sweep = sweep_with_precision(sweep, folder, run, console)
    total = len(sweep.trials())
    missing, corpora = what_is_missing(sweep, folder)
    console.print(f"{sweep.experiment}: {total} trials, {total - len(missing)} stored in {folder}")
    if not missing:
        return
    if how.on is None and how.where.address in (None, "local"):  # a cluster's devices are not known here
        refuse_another_device(folder, run)
    if how.on is None:
        machine = machine_here(missing, run)
    else:
        from mup_tpu.devices.peak import tpu_type

        machine = tpu(tpu_type(how.on), run.device)
    sizes = forecast(
        missing, sweep.axes.scale, lambda trial: corpora.of(trial).vocab_size, machine, how.where, run
    )
    rows, hint = [], "" if machine.kind == "tpu" else " (--split-over takes more GPUs)"
    if machine.kind == "xla":
        hint = f" (--split-over {machine.devices} may)" if how.run.split_over < machine.devices else ""
    for row in sizes:
        needed = f"{row.memory_bytes / 2**20:,.0f} MiB"
        if row.memory_bytes > machine.memory_bytes:
            what = "the pack would be split" if row.fits else f"a trial does not fit{hint}"
            needed += f", {machine.memory_bytes / 2**20:,.0f} are available: {what}"
        took = write_time(row.seconds) if row.fits and not math.isnan(row.seconds) else "?"
        rows.append((row.size, f"{row.trials}", f"{row.packs}", f"{row.flops:.2g}", needed, took))
    each = " on each device" if machine.devices > 1 else ""
    headings = ("size", "trials", "packs", "FLOP a trial", f"a pack's memory{each}", "time of all")
    console.print(Table(headings, rows, left=("size",)))
    fitting = [row for row in sizes if row.fits]
    seconds = sum(row.seconds for row in fitting)
    flops = sum(row.flops * row.trials for row in fitting)
    within = f"the peak of {machine.name} in {missing[0].train.precision} is not known, so no time is given"
    if not math.isnan(seconds):
        within = (
            f"about {write_time(seconds)} on {machine.name}, at {MFU:.0%} of "
            f"{machine.flops / 1e12:.3g} TFLOP/s, without start-up, compilation and evaluation"
        )
    trials = sum(row.trials for row in fitting)
    which = "trials" if trials == len(missing) else "trials that fit"
    console.print(f"in all {trials} {which}, {flops:.2g} FLOP: {within}")
    if _until(how, sweep).until_settled:
        console.print("--until-settled runs a part of these trials, batch by batch, and may add seeds")


def search(
    file: Annotated[File, tyro.conf.Positional],
    how: SearchRun = SearchRun(),
    study: StudyOptions = StudyOptions(),
) -> None:
    """Search several hyperparameters at once with Ray Tune.

    Every trial is stored. The same command goes on after a stop.

    Args:
        file: Script with a SEARCH; or a TOML file: experiment, the shared trial under [base.model] and so on,
            and [space.NAME] tables with kind (loguniform, uniform, choice), low and high, or values. With
            trainer, scale and [settings] in place of the base it searches your own training. [search] sets
            the options below for each run, and grace, reduction_factor and seed (docs/study.md); an option
            of the command line comes before it.
        how: How the search is run.
        study: Options of a search of your own training.
    """
    from mup_tpu.config.toml import load_search

    changed = {n: value for n, value in vars(how.options).items() if value != getattr(SearchOptions, n)}
    console = Console()
    if is_study(file, study):
        refuse_options_of_networks(how.run, replace(how.where, pack_size=0))
        made, trainer = study.load(file, how.results)
        if made.grid.space is None:
            raise ConfigError(f"{file} has no [space]: `mup-tpu sweep {file}` takes it")
        made.search, folder = replace(made.search, **changed), made.folder
        run = partial(study.run, made, trainer, how.where, how.run.price)
    else:
        loaded = read_script(file, "SEARCH", Search) or load_search(file)
        loaded = replace(loaded, search=replace(loaded.search, **changed))
        folder = how.results or f"results/{loaded.experiment}"
        with console.status("importing ray"):
            from mup_tpu.tuning.search import search_networks
        run = partial(search_networks, loaded, folder, how.where, how.run, console)
    try:
        outcome = run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; finished trials are stored in {folder}; continue with: mup-tpu search {file}"
        ) from None
    show_and_judge(outcome, folder, lambda: _show_best(folder, console))


def _show_best(folder: str, console: Console) -> None:
    from mup_tpu.analysis.load import named_loss
    from mup_tpu.analysis.run_table import of_status, ranked, varied
    from mup_tpu.store import load_axes, load_runs
    from mup_tpu.words.names import measured

    runs = load_runs(folder)
    if len(finished := of_status(ranked(runs), "finished")):
        best = finished.iloc[0]
        point = ", ".join(f"{name} {write(name, best[name])}" for name in varied(runs))
        loss = measured(*named_loss(runs.get("versions", ())), best["loss"], ".4f")
        console.print(f"best: {loss} at {point}", style="bold")
        size = load_axes(folder).size
        wide = write(size, 4 * best[size])  # an example: two octaves are often predicted well
        console.print(f"transfer it with: mup-tpu transfer {folder} --at {size}={wide}")
