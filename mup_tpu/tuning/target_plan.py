"""Plans: which proxies to run, for a budget, to know a target's learning rate, and what that will tell.

Of all proxies and seeds that the budget allows (`proxies.py`), the plan takes those of the least expected
regret plus price; a run's price is the loss that its share of the target's compute is worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from mup_tpu.analysis import RunTable, TransferAnalysis, analyze
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.outlook import PACK, Assumed
from mup_tpu.config import Sweep, Trial
from mup_tpu.config.columns import write
from mup_tpu.config.toml import parse_value, write_sweep
from mup_tpu.config.values import parse_number, parse_seconds, shown
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.plan import describe
from mup_tpu.models import training_flops
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, require_rule
from mup_tpu.tuning.corpora import Corpora
from mup_tpu.tuning.proxies import GROWING, WORTH, Candidate, Ray, axis_of, least_of, levels_of

_USUAL_RATES = {"adamw": 2.0**-6, "muon": 2.0**-5}
"""Best learning rates at the smallest scale of stored sweeps: medians, to an octave."""


@dataclass(frozen=True)
class Step:
    """Runs of one size, and what is expected after them."""

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
    """What to run for a target, in order, and what it will tell."""

    target: Trial
    target_flops: float
    budget: float
    """FLOP."""
    flops_per_second: float | None
    """Speed at which budget and costs are times; None where they are FLOP."""
    rule: str
    sweep: Sweep
    steps: tuple[Step, ...]
    copied: float
    """Expected regret of the smallest proxy's optimum, copied, nat."""
    others: Mapping[str, float]
    """Expected regret of the same runs under other rules, nat."""
    larger: str
    """Why no larger proxy is run, in words."""
    assumed: Assumed
    goal: tuple[str, ...]
    """Fields at the target: width=4096."""

    @property
    def at_target(self) -> str:
        """Sentence for a budget that pays a sweep of the target itself; "" for a smaller one."""
        cost = PACK * self.target_flops
        if cost > self.budget:
            return ""
        alone = self.assumed.regret(self.assumed.error(PACK))
        return f"the budget pays {PACK} runs at the target itself: expected regret {alone:.4f} nat"

    @property
    def transfer(self) -> str:
        """The target as `mup-tpu transfer --to` takes it: the fields that grow in the sweep."""
        grown = self.sweep.scale_axis.fields
        return " ".join(text for text in self.goal if text.partition("=")[0] in grown)

    @property
    def flops(self) -> float:
        """Cost of all runs, FLOP."""
        return sum(step.flops for step in self.steps)

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval that is expected for log2 of the target's learning rate."""
        return self.steps[-1].half_width

    @property
    def regret(self) -> float:
        """Expected regret of the prediction, nat."""
        return self.steps[-1].regret

    def cost(self, flops: float) -> str:
        """A cost in words: FLOP, and time where the machine is known."""
        return _cost(flops, self.flops_per_second)

    def lines(self) -> list[str]:
        """What to run, what it costs and what it tells, a line each."""
        numbered = [
            f"{i}. {s.size}, {self.rule}: {s.says}; {self.cost(s.flops)}; then lr at the target within "
            f"×{2**s.half_width:.2g} (95 %), expected regret {s.regret:.4f} nat"
            for i, s in enumerate(self.steps, start=1)
        ]
        share = f"{100 * self.flops / self.target_flops:.3g} % of the target's own"
        others = "".join(f"; with the same runs in {name} {value:.4f}" for name, value in self.others.items())
        top = max(self.steps, key=lambda s: s.flops / s.runs).size
        return [
            f"target: {', '.join(self.goal)}; one run costs {self.cost(self.target_flops)}; "
            f"budget {self.cost(self.budget)}",
            *numbered,
            f"with the plan: learning rate within ×{2**self.half_width:.2g} (95 %), expected regret "
            f"{self.regret:.4f} nat, for {self.cost(self.flops)} ({share})",
            f"without: the smallest proxy's best, copied, {self.copied:.4f} nat{others}",
            f"the largest proxy that pays: {top}; {self.larger}",
            f"drift, scatter and valleys as in {self.assumed.source}",
            *([self.at_target] if self.at_target else []),
        ]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def toml(self) -> str:
        """The plan as a sweep for `mup-tpu sweep --until-settled`; its comments say what is expected."""
        comments = "".join(f"# {line}\n" for line in self.lines())
        return f"{comments}{write_sweep(self.sweep)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        told = ("size", "runs", "says", "flops", "half_width", "regret")
        steps = [{"rule": self.rule} | {name: getattr(s, name) for name in told} for s in self.steps]
        return {
            "target": self.target.to_dict(),
            "target_flops": self.target_flops,
            "budget": self.budget,
            "flops_per_second": self.flops_per_second,
            "rule": self.rule,
            "steps": steps,
            "flops": self.flops,
            "half_width": self.half_width,
            "regret": self.regret,
            "copied": self.copied,
            "others": dict(self.others),
            "larger": self.larger,
            "assumed": self.assumed.source,
            "toml": self.toml(),
        }


def plan(
    target: str | Sequence[str],
    budget: str | float,
    base: Sweep | Trial | None = None,
    table: RunTable | pd.DataFrame | str | Path | None = None,
    flops_per_second: float | None = None,
) -> Plan:
    """What to run, for a budget, to know a target's learning rate.

    Examples:
        >>> found = plan("width=2048", "1e17")
        >>> print(found.rule, [step.size for step in found.steps])
        mup ['width 64', 'width 128', 'width 256']

    Args:
        target: fields at the target: width=4096, depth=32, batch_size=256, steps=10000 or tokens=26e9.
        budget: FLOP (1e20), or a time (200h) where the machine's speed is given.
        base: the model and its training: a trial, or a sweep whose rules, if it names them, are planned for.
        table: runs of one's own, as for `analyze`, whose drift, scatter, valleys and optimum are taken.
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
    best: tuple[float, Candidate] | None = None
    for rule in _rules(sweep, fields):
        for levels in levels_of(goal, sweep.base, fields):
            ray = Ray.of(levels, goal.replace(parametrization=rule), rule, vocab_size, analysis)
            for candidate in ray.candidates(paid):
                score = candidate.regret + WORTH * candidate.flops / whole
                if best is None or score < best[0]:
                    best = score, candidate
    if best is None:
        raise ConfigError(_too_little(paid, flops_per_second, goal, sweep.base, fields, vocab_size))
    found = best[1].seeded(paid, whole)
    return _told(found, sweep, goal, fields, whole, paid, flops_per_second, analysis)


def _fields(target: str | Sequence[str], base: Trial) -> dict[str, int]:
    """Growing fields at the target; tokens become steps.

    Raises:
        ConfigError: a text is not FIELD=VALUE, a field does not grow, or nothing does.
    """
    texts = [target] if isinstance(target, str) else list(target)
    found: dict[str, int] = {}
    tokens = None
    for text in (part for whole in texts for part in whole.split(",") if part.strip()):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in (*GROWING, "tokens"):
            allowed = ", ".join((*GROWING, "tokens"))
            raise ConfigError(f"target {shown(text)} is not FIELD=VALUE with a field of {allowed}")
        if name == "tokens":
            tokens = parse_number(value, "target: tokens")
        else:
            found[name] = parse_value(name, value, "target")
    if tokens is not None:
        if "steps" in found:
            raise ConfigError("target: steps and tokens were both given: give one of them")
        batch = found.get("batch_size", base.data.batch_size) * base.data.sequence_length
        found["steps"] = max(1, round(tokens / batch))
    if not found:
        raise ConfigError("a plan needs a target: give --target width=4096")
    return found


def _flops(budget: str | float, flops_per_second: float | None) -> float:
    """Budget in FLOP.

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
    """Rules to choose from: the sweep's own, else μP, and CompleteP where depth grows."""
    if sweep.parametrizations:
        return sweep.parametrizations
    if sweep.compare is not None and sweep.compare.field == "parametrization":
        return tuple(map(str, sweep.compare.values))
    optimizer = sweep.base.optimizer.optimizer
    usual = ("mup", "completep") if "depth" in fields else ("mup",)
    return tuple(r for r in usual if _has_rule(r, optimizer)) or (sweep.base.model.parametrization,)


def _has_rule(rule: str, optimizer: str) -> bool:
    try:
        require_rule(rule, optimizer)
    except ConfigError:
        return False
    return rule in PARAMETRIZATIONS


def _too_little(
    budget: float,
    flops_per_second: float | None,
    goal: Trial,
    base: Trial,
    fields: Mapping[str, int],
    vocab_size: int,
) -> str:
    """Why nothing can be planned, in a sentence."""
    costs = [
        PACK * sum(sorted(training_flops(goal.replace(**level), vocab_size) for level in levels)[:NEEDED])
        for levels in levels_of(goal, base, fields)
    ]
    if not costs:
        at = ", ".join(f"{name}={value}" for name, value in fields.items())
        least = ", ".join(f"{name} {least_of(base)[name]}" for name in fields)
        return f"target {at} has no smaller proxy: it must be at least twice {least}; sweep it itself"
    return (
        f"budget ({_cost(budget, flops_per_second)}) does not pay three proxies of {PACK} runs, which cost "
        f"at the least {_cost(min(costs), flops_per_second)}: give a larger one"
    )


def _told(
    found: Candidate,
    given: Sweep,
    goal: Trial,
    fields: Mapping[str, int],
    whole: float,
    budget: float,
    flops_per_second: float | None,
    analysis: TransferAnalysis | None,
) -> Plan:
    """A candidate in words, and as a sweep."""
    ray = found.ray
    points = tuple(ray.points[i] for i in found.rungs)
    fixed = {name: value for name, value in fields.items() if name not in points[0]}
    bases = {f"base_{name}": points[0][name] for name in ("width", "depth") if name in points[0]}
    base = given.base.replace(**fixed, **bases, parametrization=ray.rule)
    rates = given.learning_rates or (given.tune.values if given.tune else _rates(base, found, analysis))
    seeds = max(found.packs) + 1
    planned = Sweep(given.experiment, base, (ray.rule,), None, tuple(rates), seeds, axis_of(points))
    steps, packs = list[Step](), [0] * len(points)
    extra = [i for i, n in enumerate(found.packs) if n > 1]
    for number, i in enumerate([*range(len(points)), *extra]):
        added = 1 if number < len(points) else found.packs[i] - 1
        packs[i] += added
        known = [(ray.octaves[r], PACK * n) for r, n in zip(found.rungs, packs, strict=True) if n]
        variance = ray.assumed.variance([at for at, _ in known], [runs for _, runs in known])
        says = f"{PACK * added} more runs, as seeds beside its optimum"
        if number == 0:
            ends = f"{write('lr', rates[0])} to {write('lr', rates[-1])}"
            says = f"{PACK} runs, {ends}, a seed each, and beyond an end where the loss still falls"
        elif number < len(points):
            says = f"{PACK} runs, within 2 octaves of the optimum so far, the inner three with 2 seeds"
        trial = ray.trials[found.rungs[i]]
        half_width = 1.96 * math.sqrt(variance)
        runs, name = PACK * added, describe(trial, tuple(points[0]))
        cost = runs * ray.costs[found.rungs[i]]
        steps.append(Step(name, trial, runs, says, cost, half_width, ray.assumed.regret(variance)))
    at, counts = [ray.octaves[r] for r in found.rungs], [PACK * n for n in found.packs]
    others = {}
    if ray.rule != "sp" and analysis is None:
        column = planned.scale_axis.column
        sp = Assumed.usual(column, "sp")
        others = {"sp": sp.regret(sp.variance(at, counts))} if sp.priors != ray.assumed.priors else {}
    return Plan(
        target=goal.replace(parametrization=ray.rule, **bases),
        target_flops=whole,
        budget=budget,
        flops_per_second=flops_per_second,
        rule=ray.rule,
        sweep=planned,
        steps=tuple(steps),
        copied=ray.assumed.copied(at[0], counts[0]),
        others=others,
        larger=_larger(found, budget, whole, flops_per_second),
        assumed=ray.assumed,
        goal=tuple(f"{name}={value}" for name, value in fields.items()),
    )


def _larger(found: Candidate, budget: float, whole: float, flops_per_second: float | None) -> str:
    """Why no larger proxy is run, in words."""
    ray, top = found.ray, found.rungs[-1]
    if top + 1 >= len(ray.trials):
        return "the next one is the target itself"
    more = replace(found, rungs=(*found.rungs, top + 1), packs=(*found.packs, 1))
    name = describe(ray.trials[top + 1], tuple(ray.points[0]))
    cost = more.flops - found.flops
    if more.flops > budget:
        return f"{name} would cost {_cost(cost, flops_per_second)} more, beyond the budget"
    saved, price = found.regret - more.regret, WORTH * cost / whole
    return f"{name} would save {max(saved, 0.0):.4f} nat, and as much compute is worth {price:.4f} nat"


def _rates(base: Trial, found: Candidate, analysis: TransferAnalysis | None) -> tuple[float, ...]:
    """Eight learning rates an octave apart, around the table's optimum, the trial's own rate, or a usual one.

    The table's optimum is its rule's, at the scale nearest to the smallest proxy.
    """
    usual, rate = type(base.optimizer)().learning_rate, base.optimizer.learning_rate
    centre = _USUAL_RATES.get(base.optimizer.optimizer, rate) if rate == usual else rate
    if analysis is not None and analysis.hyperparameter == "lr":
        results = {result.compared: result for result in analysis.results}
        result = results.get(found.ray.rule, analysis.results[0])
        smallest = found.ray.scales[found.rungs[0]]
        known = [o for o in result.optima if o.is_bracketed]
        nearest = min(known, key=lambda o: abs(math.log2(o.scale / smallest)), default=None)
        centre = 2.0**nearest.x if nearest else centre
    return tuple(2.0 ** (round(math.log2(centre)) + k) for k in range(-PACK // 2, PACK // 2))


def _cost(flops: float, flops_per_second: float | None) -> str:
    """A cost in words: FLOP, and time where the machine is known."""
    time = "" if flops_per_second is None else f", {_time(flops / flops_per_second)}"
    return f"{flops:.2g} FLOP{time}"


def _time(seconds: float) -> str:
    unit, length = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / length:.{1 if unit == 'h' else 0}f} {unit}"
