"""Plans: which proxies to run, for a budget, to know a target's learning rate, and what that will tell.

Every proxy has some of the target's growing fields smaller, down a ray to the least useful size, and the
others as the target has them. Of all rungs and seeds that the budget allows, the plan takes those of the
least expected regret plus price; a run's price is the loss that its share of the target's compute is worth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from mup_tpu.analysis import RunTable, TransferAnalysis, analyze
from mup_tpu.analysis.drift import NEEDED
from mup_tpu.analysis.outlook import PACK, Assumed
from mup_tpu.config import Axis, Ladder, Sweep, Trial
from mup_tpu.config.columns import configured, write
from mup_tpu.config.toml import parse_value, write_sweep
from mup_tpu.config.values import parse_number, parse_seconds, shown
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.plan import describe
from mup_tpu.models import training_flops
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.tuning.corpora import Corpora

GROWING = ("width", "depth", "batch_size", "steps")
_WORTH = 0.1
"""Loss that e times the compute saves, nat: that of L(N, D) in Hoffmann et al. 2022 at 1e19 to 1e23 FLOP."""
_LEAST = {"width": 64, "depth": 2, "batch_size": 8, "steps": 100}
"""Least useful sizes of a proxy, unless the base has smaller ones."""
_MOST_RUNGS, _MOST_LEVELS, _MOST_PACKS = 5, 12, 24


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
        time = "" if self.flops_per_second is None else f", {_time(flops / self.flops_per_second)}"
        return f"{flops:.2g} FLOP{time}"

    def lines(self) -> list[str]:
        """What to run, what it costs and what it tells, a line each."""
        numbered = [
            f"{i}. {s.size}, {self.rule}: {s.says}; {self.cost(s.flops)}; then lr at the target within "
            f"×{2**s.half_width:.2g} (95 %), expected regret {s.regret:.4f} nat"
            for i, s in enumerate(self.steps, start=1)
        ]
        share = f"{100 * self.flops / self.target_flops:.3g} % of the target's own"
        others = "".join(f"; with the same runs in {name} {value:.4f}" for name, value in self.others.items())
        top = next(
            s.size for s in self.steps if s.flops / s.runs == max(t.flops / t.runs for t in self.steps)
        )
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
        steps = [
            {"size": s.size, "rule": self.rule, "runs": s.runs, "says": s.says, "flops": s.flops}
            | {"half_width": s.half_width, "regret": s.regret}
            for s in self.steps
        ]
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
        table: runs of one's own, as for `analyze`, from which drift, scatter and valleys are taken.
        flops_per_second: FLOP a second that training reaches, all devices together.

    Raises:
        ConfigError: a field or value is not allowed, or the budget does not pay three proxies.
        TableError: the table cannot be used.
    """
    sweep = base if isinstance(base, Sweep) else Sweep("plan", base or Trial())
    fields = _fields(target, sweep.base)
    corpora = Corpora()
    goal = sweep.base.replace(**fields)
    vocab_size = corpora.of(goal).vocab_size
    whole = training_flops(goal, vocab_size)
    paid = _flops(budget, flops_per_second)
    analysis = None if table is None else analyze(table)
    best: tuple[float, _Candidate] | None = None
    for rule in _rules(sweep, fields):
        for levels in _levels(goal, sweep.base, fields):
            ray = _Ray.of(levels, goal.replace(parametrization=rule), rule, vocab_size, analysis)
            for candidate in ray.candidates(paid):
                score = candidate.regret + _WORTH * candidate.flops / whole
                if best is None or score < best[0]:
                    best = score, candidate
    if best is None:
        raise ConfigError(_too_little(budget, goal, sweep.base, fields, vocab_size))
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
    optimizer = sweep.base.optimizer.optimizer
    usual = ("mup", "completep") if "depth" in fields else ("mup",)
    return tuple(r for r in usual if _has_rule(r, optimizer)) or (sweep.base.model.parametrization,)


def _has_rule(rule: str, optimizer: str) -> bool:
    from mup_tpu.rules.parametrization import require_rule

    try:
        require_rule(rule, optimizer)
    except ConfigError:
        return False
    return rule in PARAMETRIZATIONS


def _least(base: Trial) -> dict[str, int]:
    """Least useful sizes of a proxy: at most those of the base."""
    own = base.flat() | {"width": base.model.base_width}
    return {name: min(least, own[name]) for name, least in _LEAST.items()}


def _levels(goal: Trial, base: Trial, fields: Mapping[str, int]) -> Iterator[list[dict[str, int]]]:
    """Sizes on each ray below the target, ascending: a ray for every set of fields that shrink."""
    model = goal.model
    unit = model.head_size if model.growing_dimension == "heads" else model.base_width // model.head_size
    units = {"width": unit}
    floors = {
        name: -(-least // units.get(name, 1)) * units.get(name, 1) for name, least in _least(base).items()
    }
    can_shrink = [name for name, value in fields.items() if value >= 2 * floors[name]]
    for count in range(1, len(can_shrink) + 1):
        for names in itertools.combinations(can_shrink, count):
            ratios = {name: fields[name] / floors[name] for name in names}
            steps = min(_MOST_LEVELS, max(NEEDED, round(math.log2(max(ratios.values())))))
            found = []
            for i in range(steps):
                point = dict(fields)
                for name in names:
                    size = floors[name] * ratios[name] ** (i / steps)
                    point[name] = max(1, round(size / units.get(name, 1))) * units.get(name, 1)
                if point not in found:
                    found.append(point)
            yield found


@dataclass(frozen=True)
class _Ray:
    """Sizes between the least useful one and the target, under one rule."""

    points: tuple[dict[str, int], ...]
    """Fields that change, at each size."""
    trials: tuple[Trial, ...]
    costs: tuple[float, ...]
    """Cost of a run, FLOP."""
    octaves: tuple[float, ...]
    """Distance from the target along the scale, below 0."""
    rule: str
    assumed: Assumed

    @classmethod
    def of(
        cls,
        levels: Sequence[dict[str, int]],
        goal: Trial,
        rule: str,
        vocab_size: int,
        analysis: TransferAnalysis | None,
    ) -> _Ray:
        """The ray through some sizes.

        Raises:
            ConfigError: a size is not allowed.
        """
        changing = [name for name in levels[0] if len({level[name] for level in levels}) > 1]
        trials = tuple(goal.replace(**level) for level in levels)
        costs = tuple(training_flops(trial, vocab_size) for trial in trials)
        points = tuple({name: level[name] for name in changing} for level in levels)
        axis = _axis(points)
        if isinstance(axis, Axis):
            column, at = axis.column, [float(point[changing[0]]) for point in points]
            whole = float(configured(goal)[column])
        else:
            column, at, whole = axis.column, list(costs), training_flops(goal, vocab_size)
        octaves = tuple(math.log2(value / whole) for value in at)
        own = analysis is not None and analysis.scale == column
        assumed = Assumed.usual(column, rule)
        if own and analysis is not None:
            assumed = Assumed.measured(analysis, rule)
        return cls(points, trials, costs, octaves, rule, assumed)

    def candidates(self, budget: float) -> Iterator[_Candidate]:
        """Every choice of evenly spaced rungs, a pack each, that the budget pays."""
        for count, space, first in itertools.product(
            range(NEEDED, _MOST_RUNGS + 1), (1, 2, 3), range(len(self.trials))
        ):
            rungs = tuple(range(first, first + count * space, space))
            if rungs[-1] < len(self.trials) and self.octaves[rungs[-1]] < 0:
                candidate = _Candidate(self, rungs, (1,) * count)
                if candidate.flops <= budget:
                    yield candidate


@dataclass(frozen=True)
class _Candidate:
    """Rungs of a ray, and the packs of runs at each."""

    ray: _Ray
    rungs: tuple[int, ...]
    packs: tuple[int, ...]

    @property
    def flops(self) -> float:
        """Cost of all runs."""
        return sum(PACK * n * self.ray.costs[i] for i, n in zip(self.rungs, self.packs, strict=True))

    @property
    def variance(self) -> float:
        """Variance of the prediction at the target, octaves²."""
        at = [self.ray.octaves[i] for i in self.rungs]
        return self.ray.assumed.variance(at, [PACK * n for n in self.packs])

    @property
    def regret(self) -> float:
        """Expected regret at the target, nat."""
        return self.ray.assumed.regret(self.variance)

    def seeded(self, budget: float, whole: float) -> _Candidate:
        """This candidate with further packs, as long as each pays."""
        now = self
        for _ in range(_MOST_PACKS):
            packs = [
                replace(now, packs=(*now.packs[:i], now.packs[i] + 1, *now.packs[i + 1 :]))
                for i in range(len(now.packs))
            ]
            packs = [more for more in packs if more.flops <= budget]
            if not packs:
                return now
            best = min(packs, key=lambda more: more.regret + _WORTH * more.flops / whole)
            if best.regret + _WORTH * best.flops / whole >= now.regret + _WORTH * now.flops / whole:
                return now
            now = best
        return now


def _axis(points: Sequence[dict[str, int]]) -> Axis | Ladder:
    """The scale of a sweep over some points: an axis where one field changes, else a ladder by FLOPs."""
    if len(points[0]) == 1:
        ((name, _),) = points[0].items()
        return Axis(name, tuple(point[name] for point in points))
    return Ladder(tuple(points))


def _too_little(
    budget: str | float, goal: Trial, base: Trial, fields: Mapping[str, int], vocab_size: int
) -> str:
    """Why nothing can be planned, in a sentence."""
    costs = [
        PACK * sum(sorted(training_flops(goal.replace(**level), vocab_size) for level in levels)[:NEEDED])
        for levels in _levels(goal, base, fields)
    ]
    if not costs:
        at = ", ".join(f"{name}={value}" for name, value in fields.items())
        least = ", ".join(f"{name} {_least(base)[name]}" for name in fields)
        return f"target {at} has no smaller proxy: it must be at least twice {least}; sweep it itself"
    return (
        f"budget {budget} does not pay three proxies of {PACK} runs, which cost {min(costs):.2g} FLOP at the "
        "least: give a larger one"
    )


def _told(
    found: _Candidate,
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
    rates = given.learning_rates or _rates(base, analysis)
    # Axes of the file are replaced: the plan has its own scale, and tunes the learning rate.
    seeds = max(found.packs) + 1
    planned = Sweep(given.experiment, base, (ray.rule,), None, tuple(rates), seeds, _axis(points))
    steps, packs = list[Step](), [0] * len(points)
    extra = [i for i, n in enumerate(found.packs) if n > 1]
    for number, i in enumerate([*range(len(points)), *extra]):
        added = 1 if number < len(points) else found.packs[i] - 1
        packs[i] += added
        known = [(ray.octaves[r], PACK * n) for r, n in zip(found.rungs, packs, strict=True) if n]
        variance = ray.assumed.variance([at for at, _ in known], [runs for _, runs in known])
        says = f"{PACK * added} more runs, as seeds beside its optimum"
        if number == 0:
            says = f"{PACK} runs, {write('lr', rates[0])} to {write('lr', rates[-1])}, a seed each"
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
        larger=_larger(found, budget, whole),
        assumed=ray.assumed,
        goal=tuple(f"{name}={value}" for name, value in fields.items()),
    )


def _larger(found: _Candidate, budget: float, whole: float) -> str:
    """Why no larger proxy is run, in words."""
    ray, top = found.ray, found.rungs[-1]
    if top + 1 >= len(ray.trials):
        return "the next one is the target itself"
    more = replace(found, rungs=(*found.rungs, top + 1), packs=(*found.packs, 1))
    name = describe(ray.trials[top + 1], tuple(ray.points[0]))
    cost = more.flops - found.flops
    if more.flops > budget:
        return f"{name} would cost {cost:.2g} FLOP more, beyond the budget"
    saved, price = found.regret - more.regret, _WORTH * cost / whole
    return f"{name} would save {max(saved, 0.0):.4f} nat, and as much compute is worth {price:.4f} nat"


def _rates(base: Trial, analysis: TransferAnalysis | None) -> tuple[float, ...]:
    """Eight learning rates an octave apart, around the table's optimum or the trial's own."""
    centre = math.log2(base.optimizer.learning_rate)
    if analysis is not None and analysis.hyperparameter == "lr":
        known = [o.x for result in analysis.results for o in result.optima if o.is_bracketed]
        centre = known[0] if known else centre
    return tuple(2.0 ** (round(centre) + k) for k in range(-PACK // 2, PACK // 2))


def _time(seconds: float) -> str:
    unit, length = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / length:.{1 if unit == 'h' else 0}f} {unit}"
