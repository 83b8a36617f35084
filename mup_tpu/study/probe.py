"""Times of somebody's trainer, by a few steps at some sizes, for a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from mup_tpu.errors import ConfigError, MupTpuError
from mup_tpu.files.local import scratch_folder
from mup_tpu.jobs.this_machine import visible_gpus
from mup_tpu.store import load_runs
from mup_tpu.study.study import Study
from mup_tpu.tuning.plan import Machine, Measured, Plan, plan
from mup_tpu.words.plans import at_words

_FIRST_STEPS = 10
_LONGER = 4  # attempts to time enough steps
_ROUNDS = 3  # of timing the sizes that a plan chooses, and planning again


def probed_plan(trainer: Any, limit_s: float, console: Console, **arguments: Any) -> Plan:
    """Plan by measured times of a trainer, not by FLOPs; each timed training takes at most `limit_s`, s."""
    budget, workers = arguments.pop("budget"), max(1, len(visible_gpus()))
    # Every size costs the same here, so that this first plan only names sizes.
    unknown = Machine(devices=1, measured=Measured(((0.0, 0.0),), 0.0))
    made = plan(budget="1000000000h", flops_per_second=unknown, **arguments)
    goal, rate = made.goal, made.rates[len(made.rates) // 2]
    times: dict[float, tuple[float, float]] = {}

    def time(values: Mapping[str, Any]) -> None:
        """Train a few steps, and a few more, for the time before the first step and that of a step."""
        work = round(math.log2(goal.work(values) / max(1, goal.steps(values)[0])), 6)
        if work in times:
            return
        others = {name: tried[len(tried) // 2] for name, tried in made.beside.items()}
        known = {**goal.settings, **others, **values}
        if "steps" not in known:
            raise ConfigError(
                "probe needs steps among the names of the study, so that a few of them can be timed"
            )
        names = [name for name in (*values, "steps") if isinstance(known[name], int | float)]
        steps = max(1, min(_FIRST_STEPS, int(known["steps"]) // 4))
        few = _run(trainer, known | {"steps": steps}, names, made.tuned, rate, limit_s)
        more = int(steps * min(max(limit_s / 4 / max(few, 1e-3), 2.0), 20.0))
        for _ in range(_LONGER):
            many = _run(trainer, known | {"steps": steps + more}, names, made.tuned, rate, limit_s)
            if many - few > few / 2 or many > limit_s / 4:
                break
            more *= 4  # the start took as long as these steps, and would hide them
        each = max((many - few) / more, 1e-6)
        start = max(few - steps * each, 0.0)
        times[work] = start, each
        at = at_words(values, [name for name in values if name != "steps"])
        console.print(f"timed {at}: {each:.2g} s a step, after {start:.2g} s")

    time(goal.values_at(goal.floors))
    for _ in range(_ROUNDS):
        points = tuple((work, math.log2(each)) for work, (_, each) in sorted(times.items()))
        start_s = max(start for start, _ in times.values())
        machine = Machine(devices=workers, measured=Measured(points, start_s))
        made, before = plan(budget=budget, flops_per_second=machine, **arguments), len(times)
        for step in made.steps:
            time(step.values)
        if len(times) == before:
            break
    return made


def _run(
    trainer: Any, values: Mapping[str, Any], names: Iterable[str], tuned: str, rate: float, limit_s: float
) -> float:
    """Train once; return the seconds. `names` are those of the sizes."""
    at = at_words(values, [*dict.fromkeys(names)])
    with scratch_folder() as scratch:
        settings = {name: value for name, value in values.items() if name != "steps"}
        study = Study(
            scratch / "probe", scale={"steps": [values["steps"]]}, tune={tuned: [rate]}, settings=settings
        )
        try:
            study.run(trainer, workers=1, timeout=f"{limit_s:g}s", console=Console(quiet=True))
            row = load_runs(str(scratch / "probe")).iloc[0]
        except ConfigError:
            raise
        except MupTpuError as error:
            raise ConfigError(f"probe: the trainer cannot be timed at {at}: {error}") from None
        if row["status"] not in ("finished", "diverged"):
            why = row["reason"] or "no reason is known"
            raise ConfigError(
                f"probe: the trainer {row['status']} at {at}: {why}; mend it or give a longer --probe"
            )
        return float(row["wall_time_s"])
