"""The command check: does any layer grow with the scale?"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from mup_tpu.analysis.diagnosis import pooled_name
from mup_tpu.cli.analysis import show
from mup_tpu.cli.console import Console, progress_bar, to_json
from mup_tpu.config import Trial, require_above_zero
from mup_tpu.config.columns import Table
from mup_tpu.config.grid import Axis
from mup_tpu.config.options import FolderName, Repeated
from mup_tpu.config.toml import kind_of, load_sweep, load_trial, parse_axis, parse_value, read_toml
from mup_tpu.config.values import parse_pairs, require_one_of
from mup_tpu.errors import CheckFailed, ConfigError, StoreError, raised_as
from mup_tpu.files import Folder
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

if TYPE_CHECKING:
    from mup_tpu.parametrize import CoordinateCheck, LintReport

WIDTHS = {"width": (64, 128, 256, 512, 1024)}

_SECONDS = 60.0  # time within which a check's last size is expected to end


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
    """Check that nothing grows or dies with the scale, and name the cause of what does.

    Trains a few steps on one batch at each size. Each parameter gets a verdict, with cause and remedy. The
    exit code is 1 where one grows or dies, except under SP beside other rules, where some do.

    Args:
        subject: TOML file of a trial or a sweep, whose model is checked; by default a GPT-2. Or a module of
            yours, my_package.my_module:build, where my_module also has `batch`, a value or a function, and
            loss(module, batch). build(width) returns the module as you train it, alone or with its
            optimizer.
        set: Fields of the trial, FIELD=VALUE: depth=4 optimizer=muon learning_rate=2^-6.
        scale: Points of the scale, FIELD=VALUES: depth=2,4,8,16. Values alone are widths: 64,128. By default
            widths 64 to 1024, of which none is begun that would take longer than a minute. Without a base
            along the scale, the smallest value is the base. For a module of yours any parameter of build or
            batch: heads=2,4,8 or batch_size=4,8,16.
        compare: Parametrizations to compare; by default sp,mup. A module of yours is checked as it is, or
            with these applied to it by `parametrize`.
        num_seeds: Seeds to average over.
        steps: Optimizer steps, at a constant learning rate.
        results: Folder for sizes of layers, the conclusions, and figures; `mup-tpu analyze` shows it again.
        json: Print JSON only, for machines.
    """
    base = Trial()
    module = subject if subject and re.fullmatch(r"[\w.]+:\w+", subject) else ""
    if subject and not module:
        path = Path(subject)
        if path.suffix == ".py":
            raise ConfigError(f"subject {subject} is Python: name its function, as {path.stem}:build")
        base = load_trial(path) if kind_of(read_toml(path)) == "trial" else load_sweep(path).base
    given = parse_pairs("set", set, "FIELD=VALUE; write for example depth=4")
    changes = {name: parse_value(name, value, "set") for name, value in given.items()}
    base = base.replace(**changes)
    if module and (unused := [name for name in changes if name != "learning_rate"]):
        raise ConfigError(f"set {', '.join(unused)}: a module of yours takes learning_rate alone")
    require_above_zero("num_seeds", num_seeds)
    compared = parse_axis(compare or "sp,mup", "compare")
    if "parametrization" not in compared:
        raise ConfigError(f"compare {compare!r} is not allowed: a check compares parametrizations, as sp,mup")
    rules = tuple(map(str, compared["parametrization"]))
    for name in rules:
        require_one_of("compare", name, tuple(PARAMETRIZATIONS))
    console, began = Console(), time.monotonic()
    options: dict[str, Any] = {"steps": steps, "seeds": num_seeds}
    from mup_tpu.tuning.progress import cost, starting

    within = "" if scale and not module else f", about {_SECONDS:g} s a rule"
    aside = Console(stderr=True)
    aside.print(starting(f"checks {subject or 'GPT-2'} at several sizes{within}", again="it begins anew"))
    with progress_bar(console) as update:
        options["progress"] = update if console.is_terminal else None  # else lines on stderr
        if module:
            options |= {"lr": base.optimizer.learning_rate, "seconds": _SECONDS}
            checked = _of_module(module, scale, rules if compare else (), options)
        else:
            axis = WIDTHS if scale is None else parse_axis(scale, "scale")
            seconds = _SECONDS if axis is WIDTHS else math.inf
            from mup_tpu.parametrize.trials import check_trial

            checked = check_trial(base, axis, rules, seconds=seconds, **options)
    setting = module.partition(":")[2] or setting_of(base)
    if results:
        keep(results, setting, checked)
    if json:
        console.write(to_json(checked.to_dict()))
    for rule, report in checked.reports.items() if not json else ():
        sentence, *more = report.lines
        console.print(f"{rule}: {sentence}", style="bold")
        for line in more:
            console.print(f"  {line}")
        console.print(_parameters(report))
    aside.print(f"checked in {cost(time.monotonic() - began)}")
    if results and not json:
        show(results)
    others = [rule for rule in checked.reports if rule != "sp"] or ["sp"]
    if failed := [rule for rule in others if not checked.reports[rule].passes]:
        raise CheckFailed(f"not passed: {', '.join(failed)}")


def _parameters(report: LintReport) -> Table:
    rows = dict[tuple[str, ...], dict[str, float]]()
    for name, row in report.table().iterrows():
        key = pooled_name(str(name)), row["role"].replace("_", " "), row["verdict"], row["cause"]
        rows.setdefault(key, {})[str(name)] = row["effect"]
    cells = []
    for (name, role, verdict, cause), effects in rows.items():
        effect = max(effects.values(), key=abs)
        shown = "–" if math.isnan(effect) else f"{effect + 0.0:.2f}"
        cells.append((name if len(effects) > 1 else next(iter(effects)), role, shown, verdict, cause))
    headings = ("parameter", "role", f"∝ {report.scale}^", "verdict", "cause")
    left = ("parameter", "role", "verdict", "cause")
    return Table(headings, cells, "effect of updates", left, whole=("parameter", "verdict"))


def _of_module(
    text: str, scale: str | None, rules: tuple[str, ...], options: dict[str, Any]
) -> CoordinateCheck:
    from mup_tpu.study.trainer import load

    field, equals, values = (scale or ",".join(map(str, WIDTHS["width"]))).rpartition("=")
    field = field.strip() if equals else "width"
    if rules and field != "width":
        raise ConfigError("rules are compared along the width")
    try:
        sizes = [int(size) for size in values.split(",") if size]
    except ValueError:
        raise ConfigError(f"scale {scale!r} is not FIELD=SIZES; write for example heads=2,4,8") from None
    from mup_tpu.parametrize import CoordinateCheck, coord_check, lint

    build = load(text, "module")
    module = text.partition(":")[0]
    try:
        batch, loss = (load(f"{module}:{name}", "module") for name in ("batch", "loss"))
    except ConfigError:
        raise ConfigError(
            f"module {module} needs more for a check, which trains a few steps: batch, a value or a "
            "function, and loss(module, batch)"
        ) from None
    if rules:
        return coord_check(build, batch, loss, widths=sizes, rules=rules, **options)
    report = lint(build, batch, loss, widths=sizes, scale=field, **options)
    return CoordinateCheck(report.sizes.assign(parametrization="as trained"), {"as trained": report})


def setting_of(trial: Trial) -> str:
    return f"{trial.optimizer.optimizer}_{'tied' if trial.model.tied else 'untied'}"


def keep(results: str, setting: str, checked: CoordinateCheck) -> None:
    """Write sizes of layers and conclusions of a setting into a folder, in place of its earlier ones."""
    import json

    import pandas as pd
    import pyarrow as pa

    from mup_tpu.cli.results import CHECK_FILE

    if "://" in results:
        raise ConfigError(f"results {results} of a coordinate check is a URL: give a local folder")
    folder = Folder(results)
    with raised_as(StoreError, f"results folder {results} cannot be used", (OSError, pa.ArrowException)):
        table = checked.table.assign(setting=setting)
        conclusions: dict[Any, Any] = {setting: json.loads(to_json(checked.to_dict()))}
        if CHECK_FILE in folder.names():
            before = pd.read_parquet(f"{folder}/{CHECK_FILE}")
            if {*before} != {*table}:
                raise StoreError(f"{results} holds no check along this scale; give another --results")
            conclusions = before.attrs | conclusions
            table = pd.concat([before[before["setting"] != setting], table], ignore_index=True)
        table.attrs = conclusions  # kept in the file
        with folder.writing(CHECK_FILE) as file:
            table.to_parquet(file, index=False)


def check_trials(
    results: str, trials: Sequence[Trial], scale: Axis, rules: Sequence[str] = ("sp", "mup"), steps: int = 4
) -> None:
    """Check trials that differ in optimizer or tying, and keep and show what is measured, for experiments."""
    from mup_tpu.parametrize.trials import check_trial

    console = Console()
    for trial in trials:
        with progress_bar(console) as update:
            checked = check_trial(trial, scale, rules, steps=steps, progress=update)
        keep(results, setting_of(trial), checked)
    show(results)
