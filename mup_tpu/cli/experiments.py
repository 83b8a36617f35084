"""Command lines of experiments: a script gives its grid, and options narrow or extend it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import tyro

from mup_tpu.cli.analysis import show
from mup_tpu.cli.console import Console, guard
from mup_tpu.cli.sweep import (
    SearchRun,
    SweepRun,
    print_forecast,
    run_and_show,
    run_either,
    search_and_show,
    show_and_judge,
)
from mup_tpu.config import Axis, Sweep, Trial, unknown_key
from mup_tpu.config.options import Folder
from mup_tpu.config.sweep import Search
from mup_tpu.config.toml import parse_axis
from mup_tpu.errors import ConfigError


def run_experiment(sweep: Sweep, description: str | None, h200: Sweep | None = None) -> None:
    """Run an experiment's command line: train missing trials of its sweep, then show verdict and figures.

    `h200` is the grid for one H200, an experiment of its own. `description` is shown by --help.
    """
    presets = {"cpu": sweep} | ({"h200": h200} if h200 else {})

    def experiment(preset: str = "cpu", how: SweepRun = SweepRun()) -> None:
        """Run an experiment.

        Args:
            preset: Grid to start from: cpu, for hours on two cores, or for some experiments h200.
            how: How the sweep is run.
        """
        if preset not in presets:
            allowed = " or ".join(map(repr, presets))
            raise ConfigError(f"preset {preset!r} is not allowed: this experiment has {allowed}")
        run_and_show(presets[preset], how)

    _command_line(experiment, description)


def run_ablations(sweeps: Mapping[str, Sweep], description: str | None) -> None:
    """Run the command line of several sweeps, each in a folder of its name, and compare them."""

    def experiment(
        names: tuple[str, ...] = tuple(sweeps), how: SweepRun = SweepRun(results="results/ablations")
    ) -> None:
        """Run several sweeps.

        Args:
            names: Sweeps to run.
            how: How each sweep is run.
        """
        for name in names:
            if name not in sweeps:
                raise ConfigError(f"names: {unknown_key(name, sweeps)}")
        outcome, results = Counter[str](), str(how.results)
        for name in names:
            sweep, folder = how.grid.change(sweeps[name]), f"{results}/{name}"
            if how.dry.dry_run:
                print_forecast(sweep, folder, how)
            else:
                outcome += run_either(sweep, folder, how, Console())
        if not how.dry.dry_run:
            show_and_judge(outcome, results, lambda: show(results))

    _command_line(experiment, description)


def run_coord_checks(
    trials: Sequence[Trial],
    description: str | None,
    default: Axis,
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    check_steps: int = 4,
) -> None:
    """Run the command line of several coordinate checks into one table."""

    def experiment(scale: str | None = None, num_seeds: int = 3, results: Folder | None = None) -> None:
        """Run several coordinate checks.

        Args:
            scale: Points of the scale, FIELD=VALUES: depth=2,4,8. Values alone are widths.
            num_seeds: Seeds to average over.
            results: Results folder; stored points are not measured again. By default results/coord_check,
                or results/coord_check_depth and so on.
        """
        from mup_tpu.cli.check import coord_checks

        axis = default if scale is None else parse_axis(scale, "scale")
        coord_checks(results, trials, axis, parametrizations, num_seeds, check_steps)

    _command_line(experiment, description)


def run_search_experiment(search: Search, description: str | None) -> None:
    """Run the command line of a search, then show its best trial."""

    def experiment(how: SearchRun = SearchRun()) -> None:
        """Run a search.

        Args:
            how: How the search is run.
        """
        search_and_show(search, how, f"python experiments/{search.experiment}.py")

    _command_line(experiment, description)


def _command_line(experiment: object, description: str | None) -> None:
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    guard(lambda: tyro.cli(experiment, description=description, config=config))  # type: ignore[call-overload]
