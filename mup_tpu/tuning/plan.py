"""Plans: the smaller trainings to run, for a budget, to know a large one's learning rate.

Proxies shrink every size that costs, together along a ladder, and apart from some rungs to learn an exponent.
The plan adds cell after cell, each time the one that lowers the expected regret at the target plus its price
most; a run's price is the loss that its share of the target's compute is worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis import RunTable, TransferAnalysis, analyze
from mup_tpu.analysis.design import Cell, first_batch
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.planned import Planned
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.together import design_around
from mup_tpu.analysis.trend import NORMAL_95, kind_of
from mup_tpu.config import Grid, Sweep, Trial
from mup_tpu.config.grid import DESIGNS, ORDERS, design_points
from mup_tpu.config.toml import write_grid, write_sweep, write_values
from mup_tpu.config.values import parse_number, parse_seconds
from mup_tpu.errors import ConfigError, raised_as
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.tuning.cells import Belief, Designed, Step, belief_of, design, rungs_of
from mup_tpu.tuning.laws import ParameterCounts, RatePrior, params_of, rate_by_law
from mup_tpu.tuning.target import SIZES, Goal, Values, goal_of, read_target
from mup_tpu.words.plans import (
    CHECKPOINT_S,
    WORTH,
    as_text,
    at_words,
    cost_words,
    plan_lines,
    plan_table,
    plan_target,
)  # fmt: skip

# Seconds to launch the kernels of one layer's training step, on the fastest device that was measured (one
# H100 with CUDA graphs, benchmarks/gpu_peers.csv): steps are never shorter.
LAUNCH_S = 0.17e-3
# Seconds of a layer in a step of a compiled loop of one training, at the least: nanoGPT's takes 6.9 ms for 2
# layers on an H100 (benchmarks/gpu_peers.csv)
LOOP_S = 3.4e-3
_PACK = 32  # trials of our networks that share launches
# Best learning rates at the smallest scale of stored sweeps of our networks: medians, to an octave
_TYPICAL_RATES = {"adamw": 2.0**-6, "muon": 2.0**-5}


@dataclass(frozen=True)
class Measured:
    """Times of a trainer that was run for a few steps at some sizes."""

    points: tuple[tuple[float, float], ...]  # log2 of a step's work, and log2 of its seconds, ascending
    start_s: float  # time before the first step

    def seconds(self, goal: Goal, values: Values) -> float:
        """Return the time of a run; beyond the sizes that were timed it grows as between the last two."""
        steps = max(1, goal.steps(values)[0])
        work = math.log2(goal.work(values) / steps)
        at, log_s = zip(*self.points, strict=True)
        slope = (log_s[-1] - log_s[-2]) / (at[-1] - at[-2]) if len(at) > 1 else 1.0
        beyond = max(0.0, work - at[-1]) * min(max(slope, 0.0), 1.0)
        return self.start_s + steps * 2.0 ** (float(np.interp(work, at, log_s)) + beyond)


@dataclass(frozen=True)
class Speed:
    """Speed of the runs; without one, costs are FLOP."""

    flops_per_second: float = math.nan  # that training reaches, all devices together
    devices: int = 1
    measured: Measured | None = None  # times of a trainer of one's own, in place of FLOPs
    peak: float = math.nan  # FLOP/s of all devices together
    price: float = math.nan  # of one device for an hour

    def seconds(self, goal: Goal, values: Values, runs: int) -> float:
        """Return the time of some runs of a size, several at once on several devices."""
        if self.measured is not None:
            return runs * self.measured.seconds(goal, values) / min(self.devices, runs)
        steps, depth = goal.steps(values)
        together = min(runs, _PACK) if goal.base is not None else 1
        launch_s = LOOP_S if goal.base is None else LAUNCH_S
        launches = steps * depth * launch_s * math.ceil(runs / together) / min(self.devices, runs)
        return max(runs * goal.flops(values) / self.flops_per_second, launches)


@dataclass(frozen=True, repr=False)
class Plan:
    """Runs for a target, in order, and the expected regret."""

    goal: Goal
    rule: str  # rule of the runs; "" where none is known
    steps: tuple[Step, ...]
    budget: float  # in the unit of costs
    target_cost: float  # of one run of the target
    speed: Speed | None  # of the machine, whose costs are seconds; without one they are FLOP
    shortened: Mapping[str, float]
    """Half-width if the cells had the target's value of a size, octaves, by size."""
    copied: float  # expected regret of the smallest proxy's optimum, copied, nat
    others: Mapping[str, float]  # expected regret of the same runs under other rules, nat
    source: Reason  # where priors and curvature come from
    fixes: Mapping[str, float]
    base: Sweep | None  # sweep of our networks that was planned; None for somebody's own training
    experiment: str
    rates: tuple[float, ...]  # learning rates, or other values of the hyperparameter, to start with
    tuned: str
    beside: Mapping[str, tuple[float, ...]]  # further hyperparameters, with the values to start with
    larger: Step | None  # the next larger proxy
    saved: float  # regret that it would save; nan if the budget does not pay it
    program: Mapping[str, str] = field(default_factory=dict)
    """Trainer, loss and configuration file of somebody's own training, by key of a study's file."""

    @property
    def is_time(self) -> bool:
        return self.speed is not None

    @property
    def cost(self) -> float:
        return sum(step.cost for step in self.steps)

    @property
    def half_width(self) -> float:
        return self.steps[-1].half_width

    @property
    def regret(self) -> float:
        return self.steps[-1].regret

    @property
    def published(self) -> RatePrior | None:
        # Published laws are of learning rates without a rule.
        return self.goal.published if self.tuned == "learning_rate" and not self.rule else None

    @property
    def checkpoint_every(self) -> int:
        """Return the steps between checkpoints of our networks, about five minutes; 0 for shorter runs."""
        if self.goal.base is None or not self.is_time:
            return 0
        # The runs of a size may train in one pack.
        parts = max(step.cost for step in self.steps) / CHECKPOINT_S
        return 0 if parts <= 1 else max(1, int(min(self.goal.steps(s.values)[0] for s in self.steps) / parts))

    def __repr__(self) -> str:
        return "\n".join([plan_target(self), as_text(plan_table(self)), *plan_lines(self)])

    def toml(self) -> str:
        """Return TOML for `mup-tpu sweep`."""
        comments = f"# {plan_target(self)}\n"
        target: dict[str, Any]
        target = {"values": dict(self.goal.values), "follows": list(self.goal.shrinks), "rule": self.rule}
        target |= {"fix": dict(self.fixes)} if self.fixes else {}
        target |= {"laws": list(self.goal.derived)} if self.goal.derived else {}
        target |= {"counts": asdict(self.goal.counts)} if self.goal.counts else {}
        if (prior := self.published) is not None:
            target |= {"published": {self.tuned: [round(math.log2(prior.rate), 3), round(prior.error, 3)]}}
        promised = list[dict[str, Any]]()
        for step in self.steps:
            octaves = [round(width, 3) for width in (step.half_width, *step.beside) if math.isfinite(width)]
            known = {"octaves": octaves, "regret": float(f"{step.regret:.4g}")} if octaves else {}
            promised.append({"runs": step.runs, "cost": float(f"{step.cost:.4g}")} | known)
        target |= {"unit": "s" if self.is_time else "FLOP", "promised": promised}
        if self.sweep is not None:
            return f"{comments}{write_sweep(self.sweep)}\n[target]\n{write_values(target)}"
        top: dict[str, Any] = {"experiment": self.experiment, **self.program}
        top |= {"continued": "steps"} if self.goal.is_continued and "steps" in self.changing else {}
        top["tune"] = {self.tuned: list(self.rates)} | {n: list(v) for n, v in self.beside.items()}
        seeds = max(look.seeds for look in self.steps[-1].looks)
        top |= {"num_seeds": seeds} if self.beside and seeds > 1 else {}
        top["scale"] = points = [dict(point) for point in self._points]
        if len(self.changing) > 1:
            # FLOP, or a product of values where these do not give them
            top["measured_by"] = name = ORDERS[not math.isfinite(self.goal.flops({}))]
            for point, step in zip(points, self.steps, strict=True):
                point[name] = self.goal.compute(step.values)
        settings = dict(self.goal.settings) | self._same
        tables = f"\n[settings]\n{write_values(settings)}\n[target]\n{write_values(target)}"
        return f"{comments}{write_grid(top)}{tables}"

    @property
    def changing(self) -> list[str]:
        values = [step.values for step in self.steps]
        return [name for name in values[0] if len({v[name] for v in values}) > 1]

    @property
    def _points(self) -> tuple[Values, ...]:
        return tuple({name: step.values[name] for name in self.changing} for step in self.steps)

    @property
    def _same(self) -> Values:
        return {name: value for name, value in self.goal.values.items() if name not in self.changing}

    @property
    def sweep(self) -> Sweep | None:
        """Return the plan as a sweep of our networks; None for somebody's own training."""
        if self.base is None:
            return None
        names, points = self.changing, self._points
        bases = {f"base_{name}": min(p[name] for p in points) for name in ("width", "depth") if name in names}
        base = self.base.base.replace(**self._same, **bases, parametrization=self.rule)
        tune, compare = {self.tuned: self.rates, **self.beside}, {"parametrization": [self.rule]}
        seeds = max(look.seeds for look in self.steps[0].looks)
        return Sweep(self.experiment, base, scale=points, tune=tune, compare=compare, num_seeds=seeds)

    def to_dict(self) -> dict[str, Any]:
        steps = [
            {n: value for n, value in asdict(step).items() if n != "looks" and value not in ((), False)}
            | {"runs": step.runs, "at": at_words(step.values, self.changing, self.goal.is_in_tokens)}
            for step in self.steps
        ]
        numbers = ("target_cost", "budget", "cost", "half_width", "regret", "copied")
        return {
            "target": dict(self.goal.values),
            "derived": list(self.goal.derived),
            "rule": self.rule,
            "unit": "s" if self.is_time else "FLOP",
            **{name: getattr(self, name) for name in numbers},
            "shortened": dict(self.shortened),
            "others": dict(self.others),
            "steps": steps,
            "lines": [plan_target(self), *plan_lines(self)],
            "toml": self.toml(),
        }


def plan(
    target: str | Sequence[str] | Mapping[str, Any],
    budget: str | float | None = None,
    base: Any = None,
    table: RunTable | pd.DataFrame | str | Path | None = None,
    flops_per_second: float | Speed | None = None,
    rule: str | None = None,
    fix: Mapping[str, float] | Sequence[str] = (),
    tune: Mapping[str, Sequence[float]] | None = None,
) -> Plan:
    """Plan the runs, for a budget, that tell a target's learning rate, or several hyperparameters.

    Examples:
        >>> made = plan("params=1.3B", "200h", flops_per_second=8 * 0.3 * 312e12)
        >>> made.goal.values["width"], made.goal.values["depth"]
        (2112, 24)

    Args:
        target: sizes at the target: params=1.3B, or width=4096 depth=32 tokens=26e9 batch=0.5M; the path of
            a config.json of transformers, or of a TOML file.
        budget: FLOP (1e20), or a time (200h) if the machine is known; by default a tenth of the target's run.
        base: a trial or sweep of our networks, whose other fields stay; a `Study` of one's own training,
            under its names; None for one's own transformer, whose missing sizes are derived by laws.
        table: runs of one's own, as for `analyze`; their drift, valleys and optimum replace priors.
        flops_per_second: FLOP per second that training reaches, all devices together; or a machine.
        rule: rule that the runs follow, such as "mup"; by default the base's, else none.
        fix: exponents that are known, by size: {"width": 0}.
        tune: values to start from of further hyperparameters, without a base: {"weight_decay": [0.03, 0.1,
            0.3]}; a sweep or study has its own.

    Raises:
        ConfigError: a name or value is not allowed, or the budget does not pay three proxies.
        TableError: the table cannot be used.
    """
    given, grid = read_target(target), getattr(base, "grid", base)
    sweep = base if isinstance(base, Sweep) else Sweep("plan", base) if isinstance(base, Trial) else None
    if tune and base is not None:
        raise ConfigError(f"tune {', '.join(tune)}: a {'study' if sweep is None else 'sweep'} names its own")
    given_values = _start(sweep or grid, tune or {})
    tuned, vocabulary = tuple(given_values), 0
    if sweep is not None:
        # With all that trains, which one's own transformer does without.
        from mup_tpu.tuning.runner import Corpora

        vocabulary = Corpora().of(sweep.base).vocab_size
    goal = goal_of(given, grid, vocabulary)
    pairs = dict(fix) if isinstance(fix, Mapping) else dict(text.partition("=")[::2] for text in fix)
    fixes: dict[str, float] = {}
    for name, value in pairs.items():
        if name not in goal.shrinks:
            raise ConfigError(
                f"fix {name}={value}: proxies make {', '.join(goal.shrinks)} smaller, not {name}"
            )
        fixes[name] = parse_number(value, f"fix: {name}")
    machine = flops_per_second
    if machine is not None and not isinstance(machine, Speed):
        machine = Speed(float(machine))
    is_timed = machine is not None and machine.measured is not None
    if not is_timed and not math.isfinite(goal.flops(goal.values)):
        raise ConfigError(
            "the cost of a run does not follow from the target: give --probe 60s, which times your training "
            "(--trainer, where the file names none), or its width, depth, batch (tokens) and steps"
        )

    def cost(values: Values, runs: int) -> float:
        return runs * goal.flops(values) if machine is None else machine.seconds(goal, values, runs)

    whole, rungs = cost(goal.values, 1), rungs_of(goal)
    paid = whole / 10 if budget is None else _budget(budget, machine)
    analysis = None if table is None else analyze(table)
    rates, seeds = given_values[tuned[0]], 1
    if base is not None and len(tuned) > 1:
        seeds = (sweep or grid).num_seeds
    designs = list[tuple[float, int, Designed, str, Belief, tuple[float, ...]]]()
    rules: Sequence[str] = ("",)
    if rule is not None:
        rules = (rule,)
    elif sweep is not None and sweep.compare is not None and "parametrization" in sweep.compared[0]:
        rules = tuple(sweep.rules)
    elif sweep is not None:
        follow = ("mup", "completep") if "depth" in goal.values else ("mup",)
        trained = sweep.base.optimizer.optimizer
        rules = [name for name in follow if trained in PARAMETRIZATIONS[name].parameters]
        rules = rules or (sweep.base.model.parametrization,)
    for name in rules:
        belief = belief_of(goal, name, fixes, analysis, tuned)
        start = rates or (_guess(goal, name, analysis),)
        first = first_batch(name, 1.0, [math.log2(r) for r in start if r > 0]).cells
        # Of several the design of the given values, and one about the optimum that it shows; a look has the
        # value of the first of them.
        about = sorted(design_around([first[len(first) // 2].x] + [0.0] * (len(tuned) - 1)))
        around = [Cell(1.0, at[0], seeds, seeds) for at in about]
        looks = first if len(tuned) == 1 else tuple(sorted([*around, *around], key=lambda look: look.x))
        made = design(belief, rungs, looks, around, cost, paid, whole)
        if made is not None:
            steps = made[0]
            score = steps[-1].regret + WORTH * sum(step.cost for step in steps) / whole
            values = rates or tuple(2.0**look.x for look in first)
            designs.append((score, len(designs), made, name, belief, values))
    if not designs:
        at = ", ".join(f"{name}={value}" for name, value in given.items())
        cells = list[Values]()
        for smaller in map(goal.values_at, rungs):
            cells += [smaller] if smaller not in cells and smaller != goal.values else []
        if len(cells) < NEEDED:
            least = ", ".join(f"{name} {size:g}" for name, size in goal.floors.items())
            raise ConfigError(
                f"target {at} has not {NEEDED} smaller proxies, from {least} on: sweep it itself"
            )
        counts = (sum(look.runs for look in looks), len(around), len(around))
        needed = sum(cost(smaller, count) for smaller, count in zip(cells, counts, strict=False))
        has, needs = (cost_words(amount, machine is not None) for amount in (paid, needed))
        raise ConfigError(
            f"budget ({has}) does not pay three proxies ({' + '.join(map(str, counts))} runs), which cost "
            f"at the least {needs}: give a larger one"
        )
    _, _, (steps, larger, saved), name, belief, rates = min(designs)
    belief, sp = belief.promised, belief_of(goal, "sp", fixes, None, tuned).promised
    is_other = name not in ("", "sp") and analysis is None and sp.priors != belief.priors
    return Plan(
        goal=goal,
        rule=name,
        steps=steps,
        budget=paid,
        target_cost=whole,
        speed=machine,
        shortened={n: NORMAL_95 * math.sqrt(belief.variances(steps, n)[0]) for n in goal.shrinks},
        copied=belief.copied(steps[0]),
        others={"sp": sp.regret(steps)} if is_other else {},
        source=belief.assumed.source,
        fixes=fixes,
        base=sweep,
        # Not the folder of the file's own sweep
        experiment="plan" if base is None else f"{getattr(sweep or grid, 'experiment', '')}_plan",
        rates=rates,
        tuned=tuned[0],
        beside={n: values for n, values in given_values.items() if n != tuned[0]},
        larger=larger,
        saved=saved,
    )


def planned_of(grid: Grid[Any]) -> Planned:
    """Return the plan of a grid with a target, for the results folder of its runs."""
    table: Any = grid.target
    base, settings = getattr(grid, "base", None), getattr(grid, "settings", {})
    misfit = "[target] is not as `mup-tpu plan` writes it, with values, follows, rule, fix and laws"
    with raised_as(ConfigError, misfit, (TypeError, ValueError, KeyError, AttributeError)):
        values = {str(name): value for name, value in table["values"].items()}
        counts = ParameterCounts(**table["counts"]) if "counts" in table else None
        goal = Goal(values, tuple(table["follows"]), {}, base=base, settings=settings, counts=counts)
        cells = []
        for point in grid.points:
            known = {name: value for name, value in point.items() if name not in ORDERS}
            cells.append((grid.by_column(known), goal.sizes(known)))
        sizes, known = goal.sizes(values), {**settings, **values}
        sizes |= {name: goal.compute(values) for name in ORDERS if name in grid.points[0]}
        if base is not None:  # fields that are not at their defaults
            default = Trial().flat()
            known = {n: v for n, v in (base.flat() | values).items() if v != default[n] or n in values}
        axes = {"tuned": grid.axes.tuned, "compared": grid.axes.compared, "follows": goal.shrinks}
        made = {"target": sizes, "cells": cells, "values": known, "derived": table.get("laws", ())}
        return Planned.parse({"fix": {}, **table, **axes, **made})


def _budget(budget: str | float, machine: Speed | None) -> float:
    text = str(budget).strip()
    try:
        flops = float(text)
    except ValueError:
        seconds = parse_seconds("budget", text)
        if machine is not None:
            return seconds
        raise ConfigError(f"budget {text} is a time: give flops_per_second, or a budget in FLOP") from None
    if not 0 < flops < math.inf:
        raise ConfigError(f"budget {text} is not allowed: FLOP above 0, as 1e20, or a time, as 200h")
    if machine is not None and machine.measured is not None:
        raise ConfigError(f"budget {text} is FLOP, and the trainer is timed: give a time, as 2h")
    return flops if machine is None else flops / machine.flops_per_second


def _start(grid: Grid[Any] | None, tune: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Return the hyperparameters to tune, with the values to start with; () where a guess is made."""
    if isinstance(grid, Sweep) and next(iter(grid.tuned)) != "learning_rate":
        raise ConfigError(
            f"tune {', '.join(grid.tuned)} of the sweep: a plan is made for the learning rate, and others "
            "named after it"
        )
    if grid is not None:
        return {name: () if grid.tune is None else values for name, values in grid.tuned.items()}
    start: dict[str, tuple[float, ...]] = {"learning_rate": ()}
    for name, values in tune.items():
        if name in SIZES:
            raise ConfigError(f"tune {name}: it is a size of the target, which a plan does not tune")
        start[name] = tuple(sorted({parse_number(value, f"tune: {name}") for value in values}))
    if (rates := start["learning_rate"]) and not 2**-60 <= rates[0] <= rates[-1] <= 2**60:
        raise ConfigError("tune: a learning rate must be above 0, from 2^-60 to 2^60")
    if len(start) > 1:
        design_points({name: values or (1.0, 2.0, 4.0) for name, values in start.items()}, DESIGNS[0])
    return start


def _guess(goal: Goal, rule: str, analysis: TransferAnalysis | None) -> float:
    """Guess the best rate of the smallest cell: the table's, the trial's, a typical one, or by Step Law."""
    smallest = goal.values_at(goal.floors)
    if analysis is not None and analysis.hyperparameter in ("lr", "learning_rate"):
        results = {result.compared: result for result in analysis.results}
        known = [o for o in results.get(rule, analysis.results[0]).optima if o.is_bracketed]
        if known:
            kind, sizes = kind_of(analysis.scale), goal.sizes(smallest)
            scale = next((s for n, s in sizes.items() if kind_of(n) == kind), known[0].scale)
            return 2.0 ** round(min(known, key=lambda o: abs(math.log2(o.scale / scale))).x)
    if goal.base is not None:
        optimizer = goal.base.optimizer
        rate, default = optimizer.learning_rate, type(optimizer)().learning_rate
        rate = _TYPICAL_RATES.get(optimizer.optimizer, rate) if rate == default else rate
        return 2.0 ** round(math.log2(rate))
    known_sizes = dict(goal.settings) | smallest
    if {"width", "depth", "steps", "batch"} <= known_sizes.keys():
        params = params_of(known_sizes["width"], known_sizes["depth"])
        return 2.0 ** round(math.log2(rate_by_law(params, known_sizes["steps"] * known_sizes["batch"])))
    return _TYPICAL_RATES["adamw"]
