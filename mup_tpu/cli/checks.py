"""Commands that check: layers that blow up (coord-check), and this machine (doctor)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mup_tpu.cli.console import Console, progress_bar
from mup_tpu.config import Axis, Trial, require_above_zero
from mup_tpu.config.paths import Folder as FolderName
from mup_tpu.config.toml import parse_axis
from mup_tpu.errors import ConfigError, LayerGrows, StoreError, raised_as

if TYPE_CHECKING:
    from mup_tpu.files import Folder

WIDTHS = Axis("width", (64, 128, 256, 512, 1024))

_SECONDS = 60.0
"""Time within which a check's last width is expected to end, and its module's last seed."""


@dataclass(frozen=True)
class Check:
    """Points of a coordinate check."""

    scale: Axis
    parametrizations: tuple[str, ...] = ("sp", "mup")
    num_seeds: int = 3
    steps: int = 4
    """Optimizer steps."""
    seconds: float = math.inf
    """Time within which a point of the scale must be expected to end, beyond the first three."""

    def __post_init__(self) -> None:
        require_above_zero("num_seeds", self.num_seeds)
        if not self.parametrizations:
            raise ConfigError("parametrizations is empty: give at least one")

    @property
    def usual_results(self) -> str:
        """Results folder by default; a table holds one scale."""
        return "results/coord_check" + ("" if self.scale.field == "width" else f"_{self.scale.field}")


def coord_check(
    results: FolderName | None = None,
    trial: Trial = Trial(),
    scale: str | None = None,
    widths: tuple[int, ...] | None = None,
    parametrizations: tuple[str, ...] = ("sp", "mup"),
    num_seeds: int = 3,
    check_steps: int = 4,
    module: str | None = None,
    json: bool = False,
) -> None:
    """Train a few steps at several widths; plot each layer's activation and update size against width.

    A parametrization passes where no layer grows: in μP none should, in SP some do and blow up. Another
    scale, such as --scale depth=2,4,8,16, is measured in the same way.

    Args:
        results: Folder for the table and the figures; stored points are not measured again. By default
            results/coord_check, or results/coord_check_depth and so on.
        trial: Trial at each point, with the scale's values, --parametrizations and a constant schedule.
            Without a base along the scale, the smallest value is the base.
        scale: Another scale, any number of a trial: depth=2,4,8,16,32,64.
        widths: Widths to compare; short for --scale width=... By default 64 to 1024; a width that would
            take longer than a minute is left to the same command, run again.
        parametrizations: Parametrizations to compare.
        num_seeds: Seeds to average over.
        check_steps: Optimizer steps, at a constant learning rate.
        module: Own module in place of our networks, my_module:build, where my_module also has `batch`, a
            value or a function without arguments, and loss(module, batch). The exit code is 1 where a layer
            grows. It stops adding widths and seeds after a minute.
        json: Print JSON only, for machines; of an own module.
    """
    if module is not None:
        if scale is not None or results is not None:
            raise ConfigError("scale and results are options of checks of our own networks: leave them out")
        rules = ("mup",) if parametrizations == ("sp", "mup") else parametrizations
        axis = scale_of_check(None, widths, WIDTHS)
        _check_module(module, Check(axis, rules, num_seeds, check_steps, _SECONDS), trial, json)
        return
    if json:
        raise ConfigError("json is an option of --module, and there is none")
    axis = scale_of_check(scale, widths, WIDTHS)
    seconds = _SECONDS if axis is WIDTHS else math.inf
    check = Check(axis, parametrizations, num_seeds, check_steps, seconds)
    coord_checks(results or check.usual_results, [trial], check)


def _check_module(text: str, asked: Check, trial: Trial, json: bool) -> None:
    """Check a module of somebody's own; LayerGrows where a layer grows."""
    from mup_tpu.cli.output import to_json
    from mup_tpu.study.program import load

    console = Console()
    with console.status("importing"):
        from mup_tpu.parametrize import coord_check

        build = load(text, "module")
        batch, loss = (load(f"{text.partition(':')[0]}:{name}", "module") for name in ("batch", "loss"))
    widths = [int(width) for width in asked.scale.values]
    with progress_bar(console) as update:
        check = coord_check(
            build, batch() if callable(batch) else batch, loss, widths=widths, base_width=min(widths),
            lr=trial.optimizer.learning_rate, rules=asked.parametrizations, seeds=asked.num_seeds,
            steps=asked.steps, seconds=asked.seconds, update=update,
        )  # fmt: skip
    if json:
        console.write(to_json(check.to_dict()))
    else:
        for sentence in check.sentences:
            console.print(sentence, style="bold")
    if check.growing:
        raise LayerGrows(
            "; ".join(
                f"{rule}: {g.layer} grows, {g.quantity} ∝ width^{g.exponent:.2f} (95 % above {g.low:.2f})"
                for rule, g in check.growing.items()
            )
        )


def scale_of_check(scale: str | None, widths: tuple[int, ...] | None, usual: Axis) -> Axis:
    """Scale of a check, from its long form or its short one."""
    if scale is not None and widths is not None:
        raise ConfigError("scale and widths were both given: widths is short for one")
    if widths == ():
        raise ConfigError("widths is empty: give at least one")
    if widths is not None:
        return Axis("width", widths)
    return usual if scale is None else parse_axis(scale, "scale")


def coord_checks(results: str, trials: Sequence[Trial], check: Check) -> None:
    """Measure missing points of several trials, which differ in optimizer or tying; draw and print them."""
    import pyarrow as pa

    from mup_tpu.cli import replay
    from mup_tpu.files import Folder

    if "://" in results:
        raise ConfigError(f"results {results} of a coordinate check is a URL: give a local folder")
    with raised_as(StoreError, f"results folder {results} cannot be used", (OSError, pa.ArrowException)):
        for trial in trials:
            _measure(trial, Folder(results), check)
    replay.show(results)


def _measure(trial: Trial, folder: Folder, check: Check) -> None:
    """Measure missing points of one trial, and store the table after each."""
    import pandas as pd

    from mup_tpu.cli.results import CHECK_FILE
    from mup_tpu.training.coord_check import measure

    console, scale = Console(), check.scale
    trial = trial.replace(steps=check.steps, warmup=0.0, schedule="constant")
    if trial.train.precision == "auto":  # the table of an earlier check goes on
        trial = trial.replace(precision="float32")
    stored = pd.read_parquet(f"{folder}/{CHECK_FILE}") if CHECK_FILE in folder.names() else None
    with progress_bar(console) as update:
        for table in measure(
            trial, scale, check.parametrizations, check.num_seeds, stored, update, check.seconds
        ):
            if len(table):
                with folder.writing(CHECK_FILE) as file:
                    table.to_parquet(file, index=False)
    measured = {*table[table["setting"] == table["setting"].iloc[-1]][scale.column]}
    if left := [str(value) for value in scale.values if value not in measured]:
        console.print(f"{scale.field} {', '.join(left)} would take longer: the same command measures it")


def doctor(results: FolderName = "results", tpu: str | None = None) -> None:
    """Report packages, devices, folders and services for training, with a remedy for each problem.

    Args:
        results: Results folder (or fsspec URL) to write to.
        tpu: Type of TPU (such as v4-8, or all): instead, compile packs for it with the TPU's own compiler on
            this machine, and report memory, collectives and estimated cycles of each.
    """
    from mup_tpu.cli.doctor import examine, examine_tpu

    console = Console()
    doing, found = ("looking", examine(results)) if tpu is None else ("compiling", examine_tpu(tpu))
    findings = []
    with console.status(doing) as status:
        for finding in found:
            findings.append(finding)
            status.update(f"{doing} ({len(findings)} done)")
    for finding in findings:
        console.print(f"{finding.subject:>20}  {finding.found}")
    problems = [finding.problem for finding in findings if finding.problem]
    for problem in problems:
        console.print(f"- {problem}", style="yellow")
    if not problems:
        console.print("nothing is missing" if tpu is None else "all as promised", style="green")
