"""The command line: `mup-tpu COMMAND`, also `python -m mup_tpu COMMAND`.

Commands are plain typed functions, options come from their signatures and from the config dataclasses. Heavy
packages are imported inside the command that needs them, so that help and replay answer at once.
"""

from __future__ import annotations

import mup_tpu.cli.interrupt  # noqa: F401 (before all others: Ctrl-C may come while they are imported)

# isort: split
import contextlib
import errno
import importlib.metadata
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import tyro

from mup_tpu.cli.console import console as make_console
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
from mup_tpu.config.search import Search, SearchOptions
from mup_tpu.errors import ConfigError, MupTpuError, not_installed, reason


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command of `mup-tpu`; exits with 2 and one sentence where the input is wrong."""
    from mup_tpu.cli import checks, data, replay, start, training, tuning

    app = tyro.extras.SubcommandApp()
    commands: tuple[Callable[..., None], ...] = (
        start.init,
        training.train,
        tuning.sweep,
        tuning.search,
        tuning.transfer,
        checks.coord_check,
        replay.runs,
        replay.analyze,
        replay.ask,
        replay.next_,
        replay.plot,
        replay.report,
        replay.referee,
        checks.doctor,
    )
    for command in commands:
        app.command(name=command.__name__.rstrip("_").replace("_", "-"))(command)
    app.command(data.app, name="data", help="Prepare shards of a corpus, or look at one.")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    guard(
        lambda: app.cli(
            prog="mup-tpu",
            description="Tune GPT-2 narrow, check with numbers that the optimum transfers, train wide once.",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    )


def run_experiment(sweep: Sweep, description: str | None, h200: Sweep | None = None) -> None:
    """The command line of an experiment: run what is missing of its sweep, then show verdict and figures.

    Args:
        sweep: the experiment's grid, for a few CPU cores; options narrow or extend it.
        description: what the help says, the script's docstring.
        h200: the grid for one such GPU, an experiment of its own.
    """
    presets = {"cpu": sweep} | ({"h200": h200} if h200 else {})

    def experiment(
        preset: str = "cpu",
        grid: GridOptions = GridOptions(),
        results: str | None = None,
        run: RunOptions = RunOptions(),
        where: SweepOptions = SweepOptions(),
        until: SequenceOptions = SequenceOptions(),
        dry: DryRunOptions = DryRunOptions(),
    ) -> None:
        """Run an experiment.

        Args:
            preset: The grid to start from: cpu, for hours on two cores, or for some experiments h200.
            grid: What to run in place of the preset's.
            results: Results folder (or fsspec URL); what is stored there is not run again. By default
                results/NAME, or results/NAME_h200.
            run: How each trial is run.
            where: Where the sweep runs.
            until: Whether runs are bought until the verdict is settled.
            dry: Whether to say what would run in place of running it.
        """
        if preset not in presets:
            allowed = " or ".join(map(repr, presets))
            raise ConfigError(f"preset {preset!r} is not one of this experiment's: {allowed}")
        from mup_tpu.cli.tuning import run_and_show

        run_and_show(grid.change(presets[preset]), results, where, run, until, dry)

    guard(lambda: tyro.cli(experiment, description=description, config=(tyro.conf.OmitArgPrefixes,)))


def run_ablations(sweeps: Mapping[str, Sweep], description: str | None) -> None:
    """The command line of an experiment of several sweeps: run what is missing, then compare them.

    Args:
        sweeps: by name, which is each one's folder in the results folder.
        description: what the help says, the script's docstring.
    """

    def experiment(
        names: tuple[str, ...] = tuple(sweeps),
        grid: GridOptions = GridOptions(),
        results: str = "results/ablations",
        run: RunOptions = RunOptions(),
        where: SweepOptions = SweepOptions(),
        until: SequenceOptions = SequenceOptions(),
    ) -> None:
        """Run several sweeps.

        Args:
            names: Sweeps to run.
            grid: What to run in place of each sweep's own.
            results: Results folder; what is stored there is not run again.
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
            outcome += run_either(sweep, folder, where, run, until, make_console())
        show_and_judge(outcome, results, lambda: replay.show_ablations(results))

    guard(lambda: tyro.cli(experiment, description=description, config=(tyro.conf.OmitArgPrefixes,)))


def run_coord_checks(
    trials: Sequence[Trial],
    description: str | None,
    usual: Axis,
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    check_steps: int = 4,
) -> None:
    """The command line of several coordinate checks into one table, each of its own optimizer or tying.

    Args:
        trials: what to train in each.
        description: what the help says, the script's docstring.
        usual: the scale, where no option says another.
        parametrizations: what to compare.
        check_steps: optimizer steps.
    """

    def experiment(
        scale: str | None = None,
        widths: tuple[int, ...] | None = None,
        num_seeds: int = 3,
        results: str | None = None,
    ) -> None:
        """Run several coordinate checks.

        Args:
            scale: Another way of growing, or other points: depth=2,4,8.
            widths: Widths to compare; short for --scale width=...
            num_seeds: Seeds to average over.
            results: Results folder; what is stored there is not measured again. By default
                results/coord_check, or results/coord_check_depth and so on.
        """
        from mup_tpu.cli.checks import coord_checks, default_results, scale_of_check

        axis = scale_of_check(scale, widths, usual)
        coord_checks(results or default_results(axis), trials, axis, parametrizations, num_seeds, check_steps)

    guard(lambda: tyro.cli(experiment, description=description, config=(tyro.conf.OmitArgPrefixes,)))


def run_search_experiment(search: Search, description: str | None) -> None:
    """The command line of a search: run it or go on with it, then show its best trial.

    Args:
        search: the base trial and the space.
        description: what the help says, the script's docstring.
    """

    def experiment(
        results: str | None = None,
        resume: bool = False,
        options: SearchOptions = SearchOptions(),
        run: RunOptions = RunOptions(),
    ) -> None:
        """Run a search.

        Args:
            results: Results folder; by default results/EXPERIMENT.
            resume: Go on with the search that the folder holds.
            options: Algorithm, scheduler, limits, and where it runs.
            run: How each trial is run.
        """
        from mup_tpu.cli.tuning import search_and_show

        command = f"python experiments/{search.experiment}.py"
        search_and_show(search, results, resume, options, run, command)

    guard(lambda: tyro.cli(experiment, description=description, config=(tyro.conf.OmitArgPrefixes,)))


def _is_for_training(package: str) -> bool:
    """Whether the extra `train` installs a package: it is imported by the package's own name."""
    try:
        asked = importlib.metadata.requires("mup_tpu") or []
    except importlib.metadata.PackageNotFoundError:  # of a checkout that was not installed
        return package != "mup_tpu"
    return package in {
        re.split(r"\W", line, maxsplit=1)[0] for line in asked if "extra == 'train'" in line.replace('"', "'")
    }


def _fail(sentence: str, code: int) -> NoReturn:
    """End with a sentence on stderr."""
    with contextlib.suppress(OSError):  # the disk that it goes to may be full too
        make_console(stderr=True).print(f"error: {sentence}", style="red", soft_wrap=True)
    sys.exit(code)


def guard(call: Callable[[], Any]) -> None:
    """Run a command; errors that are the user's to mend become one sentence and exit code 2."""
    try:
        call()
        sys.stdout.flush()  # here, where what goes wrong becomes a sentence
    except MupTpuError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not _is_for_training(missing):
            raise
        _fail(f"this command {not_installed(missing)}", 2)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # Ctrl-C reaches a reader of ours too
            make_console(stderr=True).print("stopped", style="yellow")
            sys.stdout.flush()
        # What libraries do at exit waits for threads, which an interrupt may have left without partners.
        os._exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again at its end
        if error.errno != errno.EPIPE:
            _fail(f"{reason(error)}; what was stored before is kept, the same command goes on", 2)
