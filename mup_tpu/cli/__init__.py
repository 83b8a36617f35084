"""The command line: `mup-tpu COMMAND`, also `python -m mup_tpu COMMAND`.

Commands are plain typed functions; options come from their signatures and from the config dataclasses. Heavy
packages are imported inside the command that needs them, so that help and replay answer at once.
"""

from __future__ import annotations

import mup_tpu.cli.interrupt  # noqa: F401 (before all others: Ctrl-C may come while they are imported)

# isort: split
import re
import sys
from collections.abc import Callable, Sequence

import tyro

import mup_tpu
from mup_tpu.cli.ending import guard
from mup_tpu.cli.experiments import run_ablations, run_coord_checks, run_experiment, run_search_experiment

__all__ = ["guard", "main", "run_ablations", "run_coord_checks", "run_experiment", "run_search_experiment"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command of `mup-tpu`; wrong input ends it with one sentence and exit code 2."""
    from mup_tpu.cli import checks, data, plan, replay, start, study, training, tuning

    app = tyro.extras.SubcommandApp()
    commands: tuple[Callable[..., None], ...] = (
        start.init,
        plan.plan,
        training.train,
        tuning.sweep,
        tuning.search,
        tuning.transfer,
        study.ask,
        study.tell,
        checks.coord_check,
        replay.runs,
        replay.analyze,
        replay.where_,
        replay.next_,
        replay.predict,
        replay.law,
        replay.isoflop,
        replay.plot,
        replay.report,
        replay.referee,
        checks.doctor,
    )
    for command in commands:
        app.command(name=command.__name__.rstrip("_").replace("_", "-"))(command)
    app.command(data.app, name="data", help="Prepare shards of a corpus, or look at one.")
    arguments = _each_at(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"mup-tpu {mup_tpu.__version__}")
        return
    guard(
        lambda: app.cli(
            prog="mup-tpu",
            description="Tune GPT-2 narrow, check with numbers that the optimum transfers, train wide once.",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    )


def _each_at(arguments: Sequence[str]) -> list[str]:
    """Arguments with an --at before each target: `--at width=64 depth=2` as `--at width=64 --at depth=2`.

    An option of several values would take a path behind it too.
    """
    found, is_at = list[str](), False
    for argument in arguments:
        is_target = re.fullmatch(r"\w+=[^/\\]*|[\d.]+e\d+", argument)
        if is_at and is_target and found[-1] != "--at":
            found.append("--at")
        is_at = argument == "--at" or (is_at and is_target is not None)
        found.append(argument)
    return found
