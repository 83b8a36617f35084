"""The command check: does any layer grow with the scale?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from mup_tpu.cli.console import Console, progress_bar, to_json
from mup_tpu.cli.table import Repeated
from mup_tpu.config import Axis, Trial, require_above_zero
from mup_tpu.config.fields import require_one_of
from mup_tpu.config.options import File
from mup_tpu.config.options import Folder as FolderName
from mup_tpu.config.toml import kind_of, load_sweep, load_trial, parse_axis, parse_value, read_toml
from mup_tpu.errors import CheckFailed, ConfigError, StoreError, raised_as
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

if TYPE_CHECKING:
    from mup_tpu.files import Folder

WIDTHS = Axis("width", (64, 128, 256, 512, 1024))

_SECONDS = 60.0  # time within which a check's last width is expected to end, and its module's last seed


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
        for name in self.parametrizations:
            require_one_of("compare", name, tuple(PARAMETRIZATIONS))

    @property
    def default_results(self) -> str:
        """Return the default results folder; a table holds one scale."""
        return "results/coord_check" + ("" if self.scale.field == "width" else f"_{self.scale.field}")


def check(
    file: Annotated[File | None, tyro.conf.Positional] = None,
    set: Repeated = (),
    scale: str | None = None,
    compare: str | None = None,
    num_seeds: int = 3,
    steps: int = 4,
    results: FolderName | None = None,
    module: str | None = None,
    json: bool = False,
) -> None:
    """Check that no layer's activations or updates grow with the scale.

    Trains a few steps at each point of the scale, and plots the size of each layer's activations and updates.
    A parametrization passes where no layer grows: in μP none should, in SP some do and blow up.

    Args:
        file: TOML file of a trial or a sweep, whose model is checked; by default a GPT-2.
        set: Fields of the trial, FIELD=VALUE: depth=4 optimizer=muon learning_rate=2^-6.
        scale: Points of the scale, FIELD=VALUES: depth=2,4,8,16. Values alone are widths: 64,128. By default
            widths 64 to 1024; a width that would take longer than a minute is left to the same command, run
            again. Without a base along the scale, the smallest value is the base.
        compare: Parametrizations to compare; by default sp,mup, and of --module mup.
        num_seeds: Seeds to average over.
        steps: Optimizer steps, at a constant learning rate.
        results: Folder for the table and the figures; stored points are not measured again. By default
            results/coord_check, or results/coord_check_depth and so on.
        module: Your own module in place of our networks, my_module:build, where my_module also has `batch`,
            a value or a function without arguments, and loss(module, batch). The exit code is 1 where a layer
            grows or dies. It stops adding widths after a minute.
        json: Print JSON only, for machines; of --module.
    """
    base = Trial()
    if file is not None:
        base = load_trial(file) if kind_of(read_toml(file)) == "trial" else load_sweep(file).base
    changes = {}
    for text in set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"set {text!r} is not FIELD=VALUE; write for example depth=4")
        changes[name] = parse_value(name, value, "set")
    base = base.replace(**changes)
    axis = WIDTHS if scale is None else parse_axis(scale, "scale")
    rules = parse_axis(compare or ("sp,mup" if module is None else "mup"), "compare")
    if rules.field != "parametrization":
        raise ConfigError(f"compare {compare!r} is not allowed: a check compares parametrizations, as sp,mup")
    seconds = _SECONDS if axis is WIDTHS or module is not None else math.inf
    points = Check(axis, rules.values, num_seeds, steps, seconds)
    if module is None:
        if json:
            raise ConfigError("json needs --module")
        coord_checks(results or points.default_results, [base], points)
        return
    if axis.field != "width" or results is not None or file is not None:
        raise ConfigError("a module is checked along the width, without a file or results: leave them out")
    _check_module(module, points, base, json)


def _check_module(text: str, points: Check, trial: Trial, json: bool) -> None:
    from mup_tpu.study.trainer import load

    console = Console()
    with console.status("importing"):
        from mup_tpu.parametrize.check import ModuleCheck

        build = load(text, "module")
        batch, loss = (load(f"{text.partition(':')[0]}:{name}", "module") for name in ("batch", "loss"))
    widths = [int(width) for width in points.scale.values]
    with progress_bar(console) as update:
        modules = ModuleCheck(
            build, batch() if callable(batch) else batch, loss, widths, trial.optimizer.learning_rate,
            points.parametrizations, points.steps, points.num_seeds, probes=(), options={},
        )  # fmt: skip
        *_, table = modules.measure(points.seconds, update)
    check = modules.conclude(table)
    if json:
        console.write(to_json(check.to_dict()))
    else:
        for sentence in check.sentences:
            console.print(sentence, style="bold")
    if check.failures:
        raise CheckFailed("; ".join(f"{rule}: {layer}" for rule, layer in check.failures.items()))


def coord_checks(results: str, trials: Sequence[Trial], check: Check) -> None:
    """Measure missing points of several trials, which differ in optimizer or tying; draw and print them."""
    import pyarrow as pa

    from mup_tpu.cli.analysis import show
    from mup_tpu.files import Folder

    if "://" in results:
        raise ConfigError(f"results {results} of a coordinate check is a URL: give a local folder")
    with raised_as(StoreError, f"results folder {results} cannot be used", (OSError, pa.ArrowException)):
        for trial in trials:
            _measure(trial, Folder(results), check)
    show(results)


def _measure(trial: Trial, folder: Folder, check: Check) -> None:
    import pandas as pd

    from mup_tpu.cli.results import CHECK_FILE
    from mup_tpu.training.coord_check import measure

    console, scale = Console(), check.scale
    # A constant rate from the first step on: a warm-up would hide how fast layers grow.
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
        console.print(
            f"{scale.field} {', '.join(left)} would take longer than a minute: run the same command again to "
            "measure it"
        )
