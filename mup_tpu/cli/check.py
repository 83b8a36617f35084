"""The command check: does any layer grow with the scale?"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from mup_tpu.cli.console import Console, progress_bar, to_json
from mup_tpu.config import Trial, field_column, require_above_zero
from mup_tpu.config.grid import Axis
from mup_tpu.config.options import FolderName, Repeated
from mup_tpu.config.toml import kind_of, load_sweep, load_trial, parse_axis, parse_value, read_toml
from mup_tpu.config.values import require_one_of
from mup_tpu.errors import CheckFailed, ConfigError, StoreError, raised_as
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

WIDTHS = {"width": (64, 128, 256, 512, 1024)}

_SECONDS = 60.0  # time within which a check's last width is expected to end, and its module's last seed


def check(
    subject: Annotated[FolderName | None, tyro.conf.Positional] = None,
    set: Repeated = (),
    scale: str | None = None,
    compare: str | None = None,
    num_seeds: int = 3,
    steps: int = 4,
    results: FolderName | None = None,
    json: bool = False,
) -> None:
    """Check that no layer's activations or updates grow with the scale.

    Trains a few steps at each point of the scale, and plots the size of each layer's activations and updates.
    A parametrization passes where no layer grows: in μP none should, in SP some do and blow up.

    Args:
        subject: TOML file of a trial or a sweep, whose model is checked; by default a GPT-2. Or a module of
            yours, my_package.my_module:build, where my_module also has `batch`, a value or a function, and
            loss(module, batch). build(width) returns the module as you train it, alone or with its
            optimizer. Each parameter gets a verdict, with cause and remedy; the exit code is 1 where one
            grows or dies. No width is added after a minute.
        set: Fields of the trial, FIELD=VALUE: depth=4 optimizer=muon learning_rate=2^-6.
        scale: Points of the scale, FIELD=VALUES: depth=2,4,8,16. Values alone are widths: 64,128. By default
            widths 64 to 1024; a width that would take longer than a minute is left to the same command,
            run again. Without a base along the scale, the smallest value is the base. For a module of yours
            any parameter of build or batch: heads=2,4,8 or batch_size=4,8,16.
        compare: Parametrizations to compare; by default sp,mup. A module of yours is checked as it is, or
            with these applied to it by `parametrize`.
        num_seeds: Seeds to average over.
        steps: Optimizer steps, at a constant learning rate.
        results: Folder for the table and the figures; stored points are not measured again. By default
            results/coord_check, or results/coord_check_depth and so on; for a module of yours none.
        json: Print JSON only, for machines; of a module of yours.
    """
    base = Trial()
    module = subject if subject and re.fullmatch(r"[\w.]+:\w+", subject) else ""
    if subject and not module:
        path = Path(subject)
        base = load_trial(path) if kind_of(read_toml(path)) == "trial" else load_sweep(path).base
    changes = {}
    for text in set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"set {text!r} is not FIELD=VALUE; write for example depth=4")
        changes[name] = parse_value(name, value, "set")
    base = base.replace(**changes)
    if module:
        if unused := [name for name in changes if name != "learning_rate"]:
            raise ConfigError(f"set {', '.join(unused)}: a module of yours takes learning_rate alone")
        _check_module(module, scale, compare, num_seeds, steps, base.optimizer.learning_rate, results, json)
        return
    if json:
        raise ConfigError("json needs a module of yours, my_module:build")
    axis = WIDTHS if scale is None else parse_axis(scale, "scale")
    seconds = _SECONDS if axis is WIDTHS else math.inf
    coord_checks(results, [base], axis, _rules(compare), num_seeds, steps, seconds)


def _rules(compare: str | None) -> tuple[str, ...]:
    rules = parse_axis(compare or "sp,mup", "compare")
    if "parametrization" not in rules:
        raise ConfigError(f"compare {compare!r} is not allowed: a check compares parametrizations, as sp,mup")
    return tuple(rules["parametrization"])


def _check_module(
    text: str,
    scale: str | None,
    compare: str | None,
    num_seeds: int,
    steps: int,
    lr: float,
    results: str | None,
    json: bool,
) -> None:
    from mup_tpu.study.trainer import load

    console = Console()
    field, equals, values = (scale or ",".join(map(str, WIDTHS["width"]))).rpartition("=")
    field = field.strip() if equals else "width"
    if compare and field != "width":
        raise ConfigError("rules are compared along the width")
    try:
        sizes = [int(size) for size in values.split(",") if size]
    except ValueError:
        raise ConfigError(f"scale {scale!r} is not FIELD=SIZES; write for example heads=2,4,8") from None
    rules = _rules(compare)
    require_above_zero("num_seeds", num_seeds)
    with console.status("importing"):
        from mup_tpu.parametrize import coord_check, lint

        build = load(text, "module")
        module = text.partition(":")[0]
        try:
            batch, loss = (load(f"{module}:{name}", "module") for name in ("batch", "loss"))
        except ConfigError:
            raise ConfigError(
                f"module {module} lacks batch, a value or a function that returns one, or "
                "loss(module, batch): a check trains with both"
            ) from None
    options: dict[str, Any] = {
        "widths": sizes, "lr": lr, "steps": steps, "seeds": num_seeds, "seconds": _SECONDS
    }  # fmt: skip
    with progress_bar(console) as update:
        progress = update if console.is_terminal else None  # else lines on stderr
        if compare:
            check = coord_check(build, batch, loss, rules=rules, **options, progress=progress)
            reports, result = dict(check.reports), check.to_dict()
        else:
            report = lint(build, batch, loss, **options, scale=field, progress=progress)
            reports, result = {"": report}, report.to_dict()
    if results:
        import pandas as pd

        from mup_tpu.plots import coordinate_check_figure, save_figure

        drawn = [r.sizes.assign(parametrization=rule or "as trained") for rule, r in reports.items()]
        save_figure(coordinate_check_figure(pd.concat(drawn)), Path(results), f"check_{field}")
        for rule, report in reports.items():
            name = "_".join(filter(None, ("check", rule, field)))
            report.slopes().to_csv(Path(results) / f"{name}.csv", index_label="layer")
    if json:
        console.write(to_json(result))
    for rule, report in reports.items() if not json else ():
        console.print(f"{rule}: {report.sentence}".removeprefix(": "), style="bold")
        console.write(str(report).partition("\n")[2] + "\n")
    if failed := {rule: report for rule, report in reports.items() if not report.passes}:
        raise CheckFailed("; ".join(f"{rule}: {r.sentence}".removeprefix(": ") for rule, r in failed.items()))


def coord_checks(
    results: str | None,  # folder of the table; one holds one scale
    trials: Sequence[Trial],
    scale: Axis,
    rules: Sequence[str] = ("sp", "mup"),
    num_seeds: int = 3,
    steps: int = 4,
    seconds: float = math.inf,  # in which a point must be expected to end, beyond the first three
) -> None:
    """Measure missing points of several trials, which differ in optimizer or tying; draw and print them."""
    import pandas as pd
    import pyarrow as pa

    from mup_tpu import files
    from mup_tpu.cli.analysis import show
    from mup_tpu.cli.results import CHECK_FILE
    from mup_tpu.training.coord_check import measure

    require_above_zero("num_seeds", num_seeds)
    for name in rules:
        require_one_of("compare", name, tuple(PARAMETRIZATIONS))
    ((field, values),) = scale.items()
    results = results or "results/coord_check" + ("" if field == "width" else f"_{field}")
    if "://" in results:
        raise ConfigError(f"results {results} of a coordinate check is a URL: give a local folder")
    console, folder = Console(), files.Folder(results)
    with raised_as(StoreError, f"results folder {results} cannot be used", (OSError, pa.ArrowException)):
        for trial in trials:
            # A constant rate from the first step on: a warm-up would hide how fast layers grow.
            trial = trial.replace(steps=steps, warmup=0.0, schedule="constant")
            if trial.train.precision == "auto":  # the table of an earlier check goes on
                trial = trial.replace(precision="float32")
            stored = pd.read_parquet(f"{folder}/{CHECK_FILE}") if CHECK_FILE in folder.names() else None
            with progress_bar(console) as update:
                for table in measure(trial, scale, rules, num_seeds, stored, update, seconds):
                    if len(table):
                        with folder.writing(CHECK_FILE) as file:
                            table.to_parquet(file, index=False)
            measured = {*table[table["setting"] == table["setting"].iloc[-1]][field_column(field)]}
            if left := [str(value) for value in values if value not in measured]:
                console.print(
                    f"{field} {', '.join(left)} would take longer than a minute: run the same command "
                    "again to measure it"
                )
    show(results)
