"""Plans: the proxies to run, for a budget, to know a target's learning rate, and the expected regret.

Of all proxies that the budget allows (`proxies.py`), the plan takes those of the least expected
regret plus price; a run's price is the loss that its share of the target's compute is worth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from mup_tpu.analysis import RunTable, analyze
from mup_tpu.analysis.design import Cell
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.outlook import Assumed, runs_within_reach
from mup_tpu.config import Sweep, Trial, require_above_zero
from mup_tpu.config.columns import write
from mup_tpu.config.toml import parse_value, write_sweep
from mup_tpu.config.values import parse_number, parse_seconds, shown, write_time
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.pack_job import describe
from mup_tpu.models import training_flops
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, require_rule
from mup_tpu.tuning.proxies import GROWING, WORTH, Candidate, Ray, axis_of, least_of, levels_of
from mup_tpu.tuning.runner import Corpora
from mup_tpu.words.reasons import because

# Seconds to launch the kernels of one layer's training step, on the fastest device that was measured (one
# H100 with CUDA graphs, benchmarks/gpu_peers.csv): steps are never shorter.
_LAUNCH_S = 0.17e-3

# Runs shorter than this, in seconds, are not worth an error.
_SHORT_S = 60.0

# Longest training without a checkpoint, in seconds.
_CHECKPOINT_S = 300.0


def plan(
    target: str | Sequence[str],
    budget: str | float,
    base: Sweep | Trial | None = None,
    table: RunTable | pd.DataFrame | str | Path | None = None,
    flops_per_second: float | None = None,
) -> Plan:
    """Plan the runs, for a budget, that tell a target's learning rate.

    Examples:
        >>> found = plan("width=2048", "1e17")
        >>> print(found.rule, [step.size for step in found.steps])
        mup ['width 64', 'width 128', 'width 256']

    Args:
        target: fields at the target: width=4096, depth=32, batch_size=256, steps=10000 or tokens=26e9.
        budget: FLOP (1e20), or a time (200h) if flops_per_second is given.
        base: the model and its training: a trial, or a sweep, whose rules are planned for if it names any.
        table: runs of one's own, as for `analyze`; their drift, scatter, valleys and optimum replace priors.
        flops_per_second: FLOP a second that training reaches, all devices together.

    Raises:
        ConfigError: a field or value is not allowed, or the budget does not pay three proxies.
        TableError: the table cannot be used.
    """
    sweep = base if isinstance(base, Sweep) else Sweep("plan", base or Trial())
    if sweep.tune is not None and sweep.tune.field != "learning_rate":
        raise ConfigError(f"tune {sweep.tune.field} of the sweep: a plan is made for the learning rate alone")
    fields = _fields(target, sweep.base)
    corpora = Corpora()
    goal = sweep.base.replace(**fields)
    vocab_size = corpora.of(goal).vocab_size
    whole = training_flops(goal, vocab_size)
    paid = _flops(budget, flops_per_second)
    analysis = None if table is None else analyze(table)
    rates = sweep.tune_axis.values if sweep.learning_rates or sweep.tune else ()
    rays = [
        Ray.of(levels, goal.replace(parametrization=rule), rule, vocab_size, analysis, rates)
        for rule in _rules(sweep, fields)
        for levels in levels_of(goal, sweep.base, fields)
    ]
    candidates = [candidate for ray in rays for candidate in ray.candidates(paid)]
    if not candidates:
        raise ConfigError(_too_little(paid, flops_per_second, rays, sweep.base, fields))
    chosen = min(candidates, key=lambda candidate: candidate.score(whole))
    planned, steps = _planned(chosen, sweep, fields, rates)
    if flops_per_second is not None:
        for step in steps:
            _check_speed(step, step.flops / flops_per_second)
    return Plan(
        target=planned.base.replace(**fields),
        target_flops=whole,
        budget=paid,
        flops_per_second=flops_per_second,
        goal=tuple(f"{name}={value}" for name, value in fields.items()),
        chosen=chosen,
        sweep=planned,
        steps=steps,
        others={} if analysis else _in_sp(chosen, planned.scale_axis.column),
    )


def _check_speed(step: Step, seconds: float) -> None:
    """Refuse a time in which the steps of one run could not be launched, were all runs at once."""
    count, depth, data = step.trial.train.steps, step.trial.model.depth, step.trial.data
    most = 1 / (depth * _LAUNCH_S)
    if count / most > max(seconds, _SHORT_S):
        raise ConfigError(
            f"{step.size}: {step.runs} runs of {count:,} steps in {write_time(seconds)} would need "
            f"{count / seconds:,.0f} steps a second, and no device makes more than "
            f"{most:,.0f} with {depth} layers: give a larger batch_size than {data.batch_size} "
            f"({data.batch_size * data.sequence_length:,} tokens a step), or fewer tokens"
        )


def _fields(target: str | Sequence[str], base: Trial) -> dict[str, int]:
    """Parse the growing fields at the target; tokens become steps.

    Raises:
        ConfigError: a text is not FIELD=VALUE, a field does not grow, or nothing does.
    """
    texts = [target] if isinstance(target, str) else list(target)
    fields: dict[str, int] = {}
    tokens = None
    parts = [part for whole in texts for part in re.sub(r"\s*=\s*", "=", whole).replace(",", " ").split()]
    for text in parts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if name in fields or (name == "tokens" and tokens is not None):
            raise ConfigError(f"target {shown(text)} and another value of {name} were both given: give one")
        if not equals or name not in (*GROWING, "tokens"):
            allowed = ", ".join((*GROWING, "tokens"))
            raise ConfigError(f"target {shown(text)} is not FIELD=VALUE with a field of {allowed}")
        if name == "tokens":
            tokens = parse_number(value, "target: tokens")
            require_above_zero("target: tokens", tokens)
        else:
            fields[name] = parse_value(name, value, "target")
    if tokens is not None:
        if "steps" in fields:
            raise ConfigError("target: steps and tokens were both given: give one of them")
        batch = fields.get("batch_size", base.data.batch_size) * base.data.sequence_length
        fields["steps"] = max(1, round(tokens / batch))
    if not fields:
        raise ConfigError("a plan needs a target: give --at width=4096")
    return fields


def _flops(budget: str | float, flops_per_second: float | None) -> float:
    """Return the budget in FLOP.

    Raises:
        ConfigError: it is neither FLOP nor a time, or a time whose machine is not known.
    """
    text = str(budget).strip()
    try:
        flops = float(text)
    except ValueError:
        seconds = parse_seconds("budget", text)
        if flops_per_second is None:
            raise ConfigError(
                f"budget {text} is a time: give flops_per_second, or a budget in FLOP"
            ) from None
        return seconds * flops_per_second
    if not 0 < flops < math.inf:
        raise ConfigError(f"budget {text} is not allowed: FLOP above 0, as 1e20, or a time, as 200h")
    return flops


def _rules(sweep: Sweep, fields: Mapping[str, int]) -> tuple[str, ...]:
    """Return the sweep's rules; without any, μP, and CompleteP too if depth grows."""
    if sweep.parametrizations:
        return sweep.parametrizations
    if sweep.compare is not None and sweep.compare.field == "parametrization":
        return tuple(map(str, sweep.compare.values))
    optimizer = sweep.base.optimizer.optimizer
    default = ("mup", "completep") if "depth" in fields else ("mup",)
    return tuple(r for r in default if _has_rule(r, optimizer)) or (sweep.base.model.parametrization,)


def _has_rule(rule: str, optimizer: str) -> bool:
    try:
        require_rule(rule, optimizer)
    except ConfigError:
        return False
    return rule in PARAMETRIZATIONS


def _too_little(
    budget: float,
    flops_per_second: float | None,
    rays: Sequence[Ray],
    base: Trial,
    fields: Mapping[str, int],
) -> str:
    """Explain why nothing can be planned."""
    smallest = [Candidate(ray, tuple(range(NEEDED))) for ray in rays if len(ray.trials) >= NEEDED]
    if not smallest:
        at = ", ".join(f"{name}={value}" for name, value in fields.items())
        least = ", ".join(f"{name} {least_of(base)[name]}" for name in fields)
        return f"target {at} has not {NEEDED} smaller proxies, from {least} on: sweep it itself"
    cheapest = min(smallest, key=lambda candidate: candidate.flops)
    least, given = (cost_in_words(cost, flops_per_second) for cost in (cheapest.flops, budget))
    runs = " + ".join(map(str, cheapest.runs))
    return (
        f"budget ({given}) does not pay three proxies ({runs} runs), which cost at the least {least}: "
        "give a larger one"
    )


def _planned(
    chosen: Candidate, given: Sweep, fields: Mapping[str, int], rates: Sequence[Any]
) -> tuple[Sweep, tuple[Step, ...]]:
    """Convert a candidate into a sweep and its steps."""
    ray, start = chosen.ray, chosen.looks[0]
    points = tuple(ray.points[i] for i in chosen.rungs)
    fixed = {name: value for name, value in fields.items() if name not in points[0]}
    bases = {f"base_{name}": points[0][name] for name in ("width", "depth") if name in points[0]}
    base = given.base.replace(**fixed, **bases, parametrization=ray.rule)
    values = tuple(rates or (2.0**cell.x for cell in start))
    seeds = max(cell.seeds for cell in start)
    planned = Sweep(given.experiment, base, (ray.rule,), None, values, seeds, axis_of(points))
    steps = list[Step]()
    for number, (i, look) in enumerate(zip(chosen.rungs, chosen.looks, strict=True)):
        variance = replace(chosen, rungs=chosen.rungs[: number + 1]).variance
        trial, runs = ray.trials[i], sum(cell.runs for cell in look)
        half_width, regret = 1.96 * math.sqrt(variance), ray.assumed.regret(variance)
        says, size = f"{runs} runs, {_in_words(look, number == 0)}", describe(trial, tuple(points[0]))
        steps.append(Step(size, trial, runs, says, runs * ray.costs[i], half_width, regret))
    return planned, tuple(steps)


def _in_words(look: Sequence[Cell], is_first: bool) -> str:
    ends = [write("lr", 2.0**cell.x) for cell in (look[0], look[-1])]
    counts = sorted({cell.seeds for cell in look})
    seeds = "a seed each" if counts == [1] else f"{' or '.join(map(str, counts))} seeds each"
    if is_first:
        return f"{ends[0]} to {ends[1]}, {seeds}, and beyond an end where the loss still falls"
    return f"within {(look[-1].x - look[0].x) / 2:g} octaves of the optimum so far, {seeds}"


def _in_sp(chosen: Candidate, column: str) -> dict[str, float]:
    """Return the expected regret of the same runs in SP, if SP has priors of its own; else nothing."""
    sp = Assumed.usual(column, "sp")
    if chosen.ray.rule == "sp" or sp.priors == chosen.ray.assumed.priors:
        return {}
    return {"sp": replace(chosen, ray=replace(chosen.ray, assumed=sp)).regret}


@dataclass(frozen=True)
class Step:
    """Runs of one size, and the expected interval and regret after them."""

    size: str
    """Name of the size, as "width 64"."""
    trial: Trial
    runs: int
    says: str
    """Learning rates and seeds, in words."""
    flops: float
    """Cost of all of its runs, FLOP."""
    half_width: float
    """Half of the 95 % interval of log2 of the target's learning rate after this step."""
    regret: float
    """Expected regret of the prediction after this step, nat."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Runs for a target, in order, and the expected regret."""

    target: Trial
    target_flops: float
    budget: float
    """FLOP."""
    flops_per_second: float | None
    """Speed at which budget and costs are times; None if they are FLOP."""
    goal: tuple[str, ...]
    """Fields at the target: width=4096."""
    chosen: Candidate
    sweep: Sweep
    steps: tuple[Step, ...]
    others: dict[str, float]
    """Expected regret of the same runs under other rules, nat."""

    @property
    def rule(self) -> str:
        return self.chosen.ray.rule

    @property
    def assumed(self) -> Assumed:
        return self.chosen.ray.assumed

    @property
    def copied(self) -> float:
        """Expected regret of the smallest proxy's optimum, copied, nat."""
        octaves = self.chosen.ray.octaves[self.chosen.rungs[0]]
        return self.assumed.copied(octaves, runs_within_reach(self.chosen.looks[0]))

    @property
    def with_larger(self) -> Candidate | None:
        """Return the proxies and the next larger one; None if that is the target itself."""
        top = self.chosen.rungs[-1] + 1
        if top >= len(self.chosen.ray.trials):
            return None
        return replace(self.chosen, rungs=(*self.chosen.rungs, top))

    @property
    def larger(self) -> str:
        """Explain why no larger proxy is run."""
        more = self.with_larger
        if more is None:
            return "the next one is the target itself"
        trial = more.ray.trials[more.rungs[-1]]
        name, cost = describe(trial, tuple(more.ray.points[0])), more.flops - self.flops
        if more.flops > self.budget:
            return f"{name} would cost {self.cost(cost)} more, beyond the budget"
        saved, price = self.regret - more.regret, WORTH * cost / self.target_flops
        return f"{name} would save {max(saved, 0.0):.4f} nat, and as much compute is worth {price:.4f} nat"

    @property
    def at_target(self) -> str:
        """Compare with a sweep of the target itself; "" where the budget does not pay it."""
        look = [replace(cell, runs=1) for cell in self.chosen.looks[0]]
        cost = len(look) * self.target_flops
        if cost > self.budget:
            return ""
        regret = self.assumed.regret(self.assumed.error(runs_within_reach(look)))
        with_target = self.flops + self.target_flops
        saved, price = self.regret - regret, WORTH * (cost - with_target) / self.target_flops
        advice = "sweep it rather than proxies" if saved >= price else "the plan costs less"
        return (
            f"{len(look)} runs of the target itself, the best of which is kept: expected regret "
            f"{regret:.4f} nat, for {self.cost(cost)}; the plan and one run of it: "
            f"{self.cost(with_target)}; {advice}"
        )

    @property
    def left(self) -> str:
        """Describe the rest of the budget."""
        rest = self.budget - self.flops
        if rest < self.target_flops:
            return f"left of the budget: {self.cost(rest)}; the target's own run costs more"
        more = self.with_larger
        is_larger_paid = more is None or more.flops <= self.budget
        times = rest / self.target_flops
        return (
            f"left of the budget: {self.cost(rest)}, {times:.3g} times the target's own run; "
            + ("a larger proxy saves less than it costs, " if is_larger_paid else "")
            + f"a longer or larger run of the target saves {WORTH:g} nat for each e times the compute"
        )

    @property
    def transfer(self) -> str:
        """Return the fields that grow in the sweep, as `mup-tpu transfer --at` takes them."""
        grown = self.sweep.scale_axis.fields
        return " ".join(text for text in self.goal if text.partition("=")[0] in grown)

    @property
    def flops(self) -> float:
        """Cost of all runs, FLOP."""
        return self.chosen.flops

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval that is expected for log2 of the target's learning rate."""
        return self.steps[-1].half_width

    @property
    def regret(self) -> float:
        """Expected regret of the prediction, nat."""
        return self.chosen.regret

    @property
    def checkpoint_every(self) -> int:
        """Return the steps between checkpoints, about five minutes; 0 for shorter runs, or unknown times."""
        if self.flops_per_second is None:
            return 0
        # The runs of a size may train in one pack.
        parts = max(step.flops / self.flops_per_second for step in self.steps) / _CHECKPOINT_S
        return 0 if parts <= 1 else max(1, int(min(s.trial.train.steps for s in self.steps) / parts))

    def cost(self, flops: float) -> str:
        return cost_in_words(flops, self.flops_per_second)

    def lines(self) -> list[str]:
        """Return steps, costs and expectations, a line each."""
        numbered = [
            f"{i}. {s.size}, {self.rule}: {s.says}; {self.cost(s.flops)}; then lr at the target within "
            f"×{2**s.half_width:.2g} (95 %), expected regret {s.regret:.4f} nat"
            for i, s in enumerate(self.steps, start=1)
        ]
        share = f"{100 * self.flops / self.target_flops:.3g} % of the target's own"
        top = max(self.steps, key=lambda s: s.flops / s.runs).size
        model, data = self.target.model, self.target.data
        return [
            f"target: {', '.join(self.goal)}; one run costs {self.cost(self.target_flops)}; "
            f"budget {self.cost(self.budget)}",
            f"each step of the target trains {model.architecture} on {data.batch_size} × "
            f"{data.sequence_length} = {data.batch_size * data.sequence_length:,} tokens of {data.corpus}",
            *numbered,
            f"with the plan: learning rate within ×{2**self.half_width:.2g} (95 %), expected regret "
            f"{self.regret:.4f} nat, for {self.cost(self.flops)} ({share})",
            "without --first-looks seeds for the verdict follow; the target's rate gains little by them",
            f"without: the smallest proxy's best, copied, expected regret {self.copied:.4f} nat",
            *(
                f"under {name} the same runs would leave {value:.4f} nat: its optimum moves more"
                for name, value in self.others.items()
            ),
            f"the largest proxy that pays: {top}; {self.larger}",
            self.left,
            *([self.at_target] if self.at_target else []),
            f"drift, scatter and valleys as in {because(self.assumed.source)}",
        ]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def toml(self) -> str:
        """Return TOML for `mup-tpu sweep --until-settled --first-looks`; the lines are its comments."""
        comments = "".join(f"# {line}\n" for line in self.lines())
        return f"{comments}{write_sweep(self.sweep)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        of_step = ("size", "runs", "says", "flops", "half_width", "regret")
        steps = [{"rule": self.rule} | {name: getattr(s, name) for name in of_step} for s in self.steps]
        plain = ("target_flops", "budget", "flops_per_second", "rule", "flops", "half_width", "regret")
        words = ("copied", "others", "larger", "left", "at_target")
        return {
            "target": self.target.to_dict(),
            **{name: getattr(self, name) for name in (*plain, *words)},
            "steps": steps,
            "assumed": because(self.assumed.source),
            "toml": self.toml(),
        }


def cost_in_words(flops: float, flops_per_second: float | None) -> str:
    time = "" if flops_per_second is None else f", {_time(flops / flops_per_second)}"
    return f"{flops:.2g} FLOP{time}"


def _time(seconds: float) -> str:
    return f"{seconds:.1g} s" if seconds < 9.5 else write_time(seconds)
