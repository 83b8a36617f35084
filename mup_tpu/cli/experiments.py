"""Command lines of experiments: a script gives its grid, and options narrow or extend it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.cli.ending import guard
from mup_tpu.cli.grid import GridOptions
from mup_tpu.config import (
    Axis,
    DryRunOptions,
    RunOptions,
    SequenceOptions,
    Sweep,
    SweepOptions,
    Trial,
    unknown_key,
)
from mup_tpu.config.paths import Folder
from mup_tpu.config.search import Search, SearchOptions
from mup_tpu.errors import ConfigError


def run_experiment(sweep: Sweep, description: str | None, h200: Sweep | None = None) -> None:
    """Command line of an experiment: run missing trials of its sweep, then show verdict and figures.

    `h200` is the grid for one H200, an experiment of its own. `description` is shown by --help.
    """
    presets = {"cpu": sweep} | ({"h200": h200} if h200 else {})

    def experiment(
        preset: str = "cpu",
        grid: GridOptions = GridOptions(),
        results: Folder | None = None,
        run: RunOptions = RunOptions(),
        where: SweepOptions = SweepOptions(),
        until: SequenceOptions = SequenceOptions(),
        dry: DryRunOptions = DryRunOptions(),
    ) -> None:
        """Run an experiment.

        Args:
            preset: Grid to start from: cpu, for hours on two cores, or for some experiments h200.
            grid: Axes in place of the preset's.
            results: Results folder (or fsspec URL); stored trials are not run again. By default
                results/NAME, or results/NAME_h200.
            run: How each trial is run.
            where: Where the sweep runs.
            until: Whether runs are bought until the verdict is settled.
            dry: Whether to print the missing runs in place of running them.
        """
        if preset not in presets:
            allowed = " or ".join(map(repr, presets))
            raise ConfigError(f"preset {preset!r} is not one of this experiment's: {allowed}")
        from mup_tpu.cli.tuning import run_and_show

        run_and_show(grid.change(presets[preset]), results, where, run, until, dry)

    _command_line(experiment, description)


def run_ablations(sweeps: Mapping[str, Sweep], description: str | None) -> None:
    """Command line of several sweeps, each in a folder of its name: run missing trials, then compare."""

    def experiment(
        names: tuple[str, ...] = tuple(sweeps),
        grid: GridOptions = GridOptions(),
        results: Folder = "results/ablations",
        run: RunOptions = RunOptions(),
        where: SweepOptions = SweepOptions(),
        until: SequenceOptions = SequenceOptions(),
    ) -> None:
        """Run several sweeps.

        Args:
            names: Sweeps to run.
            grid: Axes in place of each sweep's own.
            results: Results folder; stored trials are not run again.
            run: How each trial is run.
            where: Where the sweeps run.
            until: Whether runs are bought until each verdict is settled.
        """
        for name in names:
            if name not in sweeps:
                raise ConfigError(f"names: {unknown_key(name, sweeps)}")
        from mup_tpu.cli import replay
        from mup_tpu.cli.tuning import run_either, show_and_judge

        outcome = Counter[str]()
        for name in names:
            sweep, folder = grid.change(sweeps[name]), f"{results}/{name}"
            outcome += run_either(sweep, folder, where, run, until, Console())
        show_and_judge(outcome, results, lambda: replay.show(results))

    _command_line(experiment, description)


def run_coord_checks(
    trials: Sequence[Trial],
    description: str | None,
    usual: Axis,
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    check_steps: int = 4,
) -> None:
    """Command line of several coordinate checks into one table."""

    def experiment(
        scale: str | None = None,
        widths: tuple[int, ...] | None = None,
        num_seeds: int = 3,
        results: Folder | None = None,
    ) -> None:
        """Run several coordinate checks.

        Args:
            scale: Another scale, or other points: depth=2,4,8.
            widths: Widths to compare; short for --scale width=...
            num_seeds: Seeds to average over.
            results: Results folder; stored points are not measured again. By default results/coord_check,
                or results/coord_check_depth and so on.
        """
        from mup_tpu.cli.checks import coord_checks, default_results, scale_of_check

        axis = scale_of_check(scale, widths, usual)
        coord_checks(results or default_results(axis), trials, axis, parametrizations, num_seeds, check_steps)

    _command_line(experiment, description)


def run_search_experiment(search: Search, description: str | None) -> None:
    """Command line of a search: run it or go on with it, then show its best trial."""

    def experiment(
        results: Folder | None = None,
        resume: bool = False,
        options: SearchOptions = SearchOptions(),
        run: RunOptions = RunOptions(),
    ) -> None:
        """Run a search.

        Args:
            results: Results folder; by default results/EXPERIMENT.
            resume: Go on with the search in the folder.
            options: Algorithm, scheduler, limits, and where it runs.
            run: How each trial is run.
        """
        from mup_tpu.cli.tuning import search_and_show

        command = f"python experiments/{search.experiment}.py"
        search_and_show(search, results, resume, options, run, command)

    _command_line(experiment, description)


def _command_line(experiment: object, description: str | None) -> None:
    config = (tyro.conf.OmitArgPrefixes,)
    guard(lambda: tyro.cli(experiment, description=description, config=config))  # type: ignore[call-overload]
