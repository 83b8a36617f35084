"""Sentences about plans: what is run, what it costs, what is then known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mup_tpu.analysis.design import Cell
from mup_tpu.config import columns
from mup_tpu.config.columns import write
from mup_tpu.config.values import write_time
from mup_tpu.words.names import name as rule_name
from mup_tpu.words.reasons import because

# Loss that e times the compute saves, nat, by L(N, D) of Hoffmann et al. 2022 at 1e19 to 1e23 FLOP.
WORTH = 0.1
CHECKPOINT_S = 300.0  # longest training without a checkpoint


def label(name: str) -> str:
    return name if name in ("tokens", "batch") else columns.label(name)


def short(value: float) -> str:
    """Write a size: 1.3B, 524k."""
    for exponent, prefix in ((12, "T"), (9, "B"), (6, "M"), (4, "k")):
        if value >= 10**exponent:
            return f"{value / 10 ** (3 if prefix == 'k' else exponent):.3g}{prefix}"
    return f"{value:g}"


def cost_words(cost: float, is_time: bool) -> str:
    if not is_time:
        return f"{cost:.2g} FLOP"
    return f"{cost:.1g} s" if cost < 9.5 else write_time(cost)


def at_words(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Name a run by some of its values: "width 64, depth 4, 8.19k tokens a step, 2,000 steps"."""
    words = []
    for name in names:
        value = values[name]
        if name == "steps":
            words.append(f"{value:,} steps")
        elif name == "batch":
            words.append(f"{short(value)} tokens a step")
        else:
            words.append(f"{label(name)} {short(value)}")
    return ", ".join(words)


def looks_words(looks: Sequence[Cell], is_first: bool, tuned: str, others: int = 0) -> str:
    if others:
        first = "a design of all values, and one about the optimum that it shows"
        return first if is_first else "a design about the expected optimum"
    column = "lr" if tuned == "learning_rate" else tuned
    ends = [write(column, 2.0**look.x) for look in (looks[0], looks[-1])]
    counts = sorted({look.seeds for look in looks})
    seeds = "a seed each" if counts == [1] else f"{' or '.join(map(str, counts))} seeds each"
    if is_first:
        return f"{ends[0]} to {ends[1]}, {seeds}, and beyond an end where the loss still falls"
    return f"within {(looks[-1].x - looks[0].x) / 2:g} octaves of the expected optimum, {seeds}"


def within(plan: Any, step: Any, where: str = "") -> str:
    """Name the half-width of each hyperparameter's interval after a step of a plan."""
    widths = zip((plan.tuned, *plan.beside), (step.half_width, *step.beside), strict=True)
    return ", ".join(f"{label(name)}{where} within ×{2**width:.2g}" for name, width in widths)


def plan_lines(plan: Any) -> list[str]:
    """Return steps, costs and expectations of a `tuning.plan.Plan`, a line each."""
    goal, is_time, steps = plan.goal, plan.is_time, plan.steps
    rule = rule_name(plan.rule)
    names = [name for name in goal.values if name not in ("params", "tokens")]
    lines = [
        f"target: {at_words(goal.values, names)}; one run costs {cost_words(plan.target_cost, is_time)}; "
        f"budget {cost_words(plan.budget, is_time)}"
    ]
    lines += [f"derived: {sentence}" for sentence in goal.derived]
    if goal.base is not None:
        model, data = goal.base.model, goal.base.data
        batch = goal.values.get("batch_size", data.batch_size)
        lines.append(
            f"each step of the target trains {model.architecture} on {batch} × {data.sequence_length} = "
            f"{batch * data.sequence_length:,} tokens of {data.corpus}"
        )
    changing = plan.changing
    for i, step in enumerate(steps, start=1):
        known = f"{within(plan, step, ' at the target')} (95 %), expected regret {step.regret:.4f} nat"
        lines.append(
            f"{i}. {at_words(step.values, changing)}{f', {rule}' if rule else ''}: {step.runs} runs, "
            f"{'which go on from shorter ones, ' if step.is_continued else ''}"
            f"{looks_words(step.looks, i == 1, plan.tuned, len(plan.beside))}; "
            f"{cost_words(step.cost, is_time)}; then "
            f"{known if math.isfinite(step.half_width) else 'nothing is known yet'}"
        )
    share = f"{100 * plan.cost / plan.target_cost:.3g} % of the target's own run"
    whole = goal.sizes(goal.values)
    lines.append(
        f"with the plan: {within(plan, steps[-1])} (95 %), expected regret {plan.regret:.4f} nat, "
        f"for {cost_words(plan.cost, is_time)} ({share})"
    )
    for name, half_width in plan.shortened.items():
        largest = max(step.sizes[name] for step in steps)
        lines.append(
            f"proxies have {label(name)} {short(largest)} at most; with the target's {short(whole[name])} "
            f"the interval would be ×{2**half_width:.2g}"
            + (f" (exponent fixed at {plan.fixes[name]:g})" if name in plan.fixes else "")
        )
    lines.append(f"without: the smallest proxy's best, copied, expected regret {plan.copied:.4f} nat")
    lines += [
        f"under {rule_name(name)} the same runs would leave {value:.4f} nat: its optimum moves more"
        for name, value in plan.others.items()
    ]
    lines.append(f"the largest proxy that pays: {at_words(steps[-1].values, changing)}; {plan.largest}")
    target_bytes, proxy_bytes = goal.memory_bytes({}), goal.memory_bytes(steps[-1].values)
    if math.isfinite(target_bytes):
        lines.append(
            "memory of weights, gradients and AdamW's moments, 16 bytes a parameter: "
            f"{target_bytes / 1e9:.2g} GB at the target, {proxy_bytes / 1e9:.2g} GB for the largest proxy; "
            f"activations {goal.activation_bytes({}) / 1e6:.2g} MB a token at once at the target, "
            f"{goal.activation_bytes(steps[-1].values) / 1e6:.2g} MB for the proxy, without recomputation"
        )
    left = plan.budget - plan.cost
    if left < plan.target_cost:
        lines.append(f"left of the budget: {cost_words(left, is_time)}; the target's own run costs more")
    else:
        lines.append(
            f"left of the budget: {cost_words(left, is_time)}, {left / plan.target_cost:.3g} times the "
            f"target's own run; a longer or larger run of the target saves {WORTH:g} nat for each e times "
            "the compute"
        )
    if is_time and not plan.is_measured:
        lines.append("times are of training steps alone; --probe 60s measures your trainer with its start-up")
    longest = max(step.cost / step.runs for step in steps)
    if is_time and goal.base is None and longest > CHECKPOINT_S:
        lines.append(f"the longest run takes {write_time(longest)}: have the trainer save to its folder")
    lines.append(f"drift, scatter and valleys as in {because(plan.source)}")
    return lines
