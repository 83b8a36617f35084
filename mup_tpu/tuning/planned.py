"""Plan for a target: runs in order, their cost and the expected regret."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mup_tpu.analysis.outlook import Assumed, runs_within_reach
from mup_tpu.config import Sweep, Trial
from mup_tpu.config.toml import write_sweep
from mup_tpu.config.values import write_time
from mup_tpu.jobs.plan import describe
from mup_tpu.tuning.proxies import WORTH, Candidate
from mup_tpu.words.reasons import because


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
        """Name of the rule."""
        return self.chosen.ray.rule

    @property
    def assumed(self) -> Assumed:
        """Drift, scatter and valleys that are assumed."""
        return self.chosen.ray.assumed

    @property
    def copied(self) -> float:
        """Expected regret of the smallest proxy's optimum, copied, nat."""
        octaves = self.chosen.ray.octaves[self.chosen.rungs[0]]
        return self.assumed.copied(octaves, runs_within_reach(self.chosen.looks[0]))

    @property
    def with_larger(self) -> Candidate | None:
        """The proxies and the next larger one; None if that is the target itself."""
        top = self.chosen.rungs[-1] + 1
        if top >= len(self.chosen.ray.trials):
            return None
        return replace(self.chosen, rungs=(*self.chosen.rungs, top))

    @property
    def larger(self) -> str:
        """Reason why no larger proxy is run, in words."""
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
        """Sentence on a sweep of the target itself; "" where the budget does not pay it."""
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
        """Sentence on the rest of the budget."""
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
        """The target as `mup-tpu transfer --at` takes it: the fields that grow in the sweep."""
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

    def cost(self, flops: float) -> str:
        """A cost in words: FLOP, and time where the machine is known."""
        return cost_in_words(flops, self.flops_per_second)

    def lines(self) -> list[str]:
        """Steps, costs and expectations, a line each."""
        numbered = [
            f"{i}. {s.size}, {self.rule}: {s.says}; {self.cost(s.flops)}; then lr at the target within "
            f"×{2**s.half_width:.2g} (95 %), expected regret {s.regret:.4f} nat"
            for i, s in enumerate(self.steps, start=1)
        ]
        share = f"{100 * self.flops / self.target_flops:.3g} % of the target's own"
        top = max(self.steps, key=lambda s: s.flops / s.runs).size
        return [
            f"target: {', '.join(self.goal)}; one run costs {self.cost(self.target_flops)}; "
            f"budget {self.cost(self.budget)}",
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
        """TOML for `mup-tpu sweep --until-settled --first-looks`; the lines are its comments."""
        comments = "".join(f"# {line}\n" for line in self.lines())
        return f"{comments}{write_sweep(self.sweep)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        told = ("size", "runs", "says", "flops", "half_width", "regret")
        steps = [{"rule": self.rule} | {name: getattr(s, name) for name in told} for s in self.steps]
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
    """A cost: FLOP, and time where the machine is known."""
    time = "" if flops_per_second is None else f", {_time(flops / flops_per_second)}"
    return f"{flops:.2g} FLOP{time}"


def _time(seconds: float) -> str:
    return f"{seconds:.1g} s" if seconds < 9.5 else write_time(seconds)
