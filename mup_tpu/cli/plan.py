"""The command `plan`; torch is imported only where this machine's speed is asked for."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.cli.output import to_json, write_new
from mup_tpu.config import RunOptions, Sweep, Trial
from mup_tpu.config.paths import File
from mup_tpu.config.toml import read_toml, sweep_of
from mup_tpu.config.values import as_number
from mup_tpu.errors import ConfigError


def plan(
    file: Annotated[File | None, tyro.conf.Positional] = None,
    target: tuple[str, ...] = (),
    budget: str | None = None,
    table: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    on: str | None = None,
    mfu: float = 0.3,
    out: File | None = None,
    json: bool = False,
) -> None:
    """Plan the runs, for a budget, that tell the learning rate of a model that cannot be swept.

    Writes the plan as a sweep for `mup-tpu sweep FILE --until-settled --first-looks`.

    Args:
        file: TOML file of a sweep, with its model under [base.model] and so on; its parametrizations are the
            choices. It may hold target = {width = 4096} and budget = "200h" as well.
        target: Fields at the target: width=4096 depth=32 batch_size=256 tokens=26e9 (or steps=10000).
        budget: FLOP (1e20), or a time on this machine or --on (200h).
        table: Results folder or table of runs, whose drift, scatter, valleys and optimum are assumed in place
            of usual ones.
        on: Machine of the budget and the costs: a TPU type (v4-8), or GPUs (8xH100). By default this one.
        mfu: Share of the machine's peak that training is assumed to reach, between 0 and 1.
        out: File for the sweep; by default plan.toml. An existing file is never overwritten.
        json: Print JSON only, for machines; --out alone writes the sweep.
    """
    from mup_tpu.tuning.target_plan import plan as make

    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu {mfu:g} is not allowed: a share above 0, at most 1")
    sweep, asked = _read(file)
    goal = target or asked.get("target", ())
    paid = budget or asked.get("budget")
    if paid is None:
        raise ConfigError("a plan needs a budget: give --budget 200h, or FLOP as --budget 1e20")
    is_time = as_number(str(paid)) is None
    speed = mfu * _peak(on, sweep.base) if is_time or on else None
    found = make(goal, paid, sweep, table, speed)
    written = out or (None if json else File("plan.toml"))
    if written is not None:
        write_new(written, found.toml())
    console = Console()
    if json:
        console.write(to_json(found.to_dict()))
        return
    for line in found.lines():
        console.print(line)
    results = f"results/{found.sweep.experiment}"
    limit = f" --budget {paid}" if is_time and on is None else ""
    console.print(f"wrote {written}; next:", wrap=False)
    console.print(f"  mup-tpu sweep {written} --until-settled --first-looks{limit}", wrap=False)
    console.print(f"  mup-tpu transfer {results} --to {found.transfer}", wrap=False)


def _read(file: File | None) -> tuple[Sweep, dict[str, Any]]:
    """Sweep of a file, with its target and budget."""
    if file is None:
        return Sweep("plan", Trial().replace(precision="auto")), {}
    values = read_toml(file)
    asked: dict[str, Any] = {name: values.pop(name) for name in ("target", "budget") if name in values}
    if isinstance(goal := asked.get("target"), dict):
        asked["target"] = tuple(f"{name}={value}" for name, value in goal.items())
    elif "target" in asked:
        asked["target"] = str(goal)
    return sweep_of({"experiment": "plan"} | values, str(file)), asked


def _peak(on: str | None, base: Trial) -> float:
    """Peak FLOP/s of a machine, all of its devices together.

    Raises:
        ConfigError: the machine is unknown.
    """
    from mup_tpu.tuning import forecast
    from mup_tpu.tuning.precision import precision_of

    if base.train.precision == "auto":
        base = base.replace(precision=precision_of(RunOptions())[0] if on is None else "bf16")
    if on is None:
        machine = forecast.this_machine([base] * 8, RunOptions())
        if math.isnan(machine.flops):
            raise ConfigError(
                f"the peak of {machine.name} in {base.train.precision} is not known: give --budget as FLOP "
                "(1e20), or --on with a known machine, as H100"
            )
        return machine.flops
    from mup_tpu.devices.peak import gpu_peak_flops, tpu_type

    count, _, name = on.rpartition("x")
    if re.fullmatch(r"\d+", count) or not count:
        peak = gpu_peak_flops(name, base.train.precision)
        if peak is not None:
            return int(count or 1) * peak
    if not re.match(r"v\d", on):
        raise ConfigError(f"on {on!r} is not a known machine: give GPUs, as 8xH100, or a TPU type, as v4-8")
    return forecast.tpu(tpu_type(on)).flops
