"""Sentences about plans (what is run, what it costs, what is then known) and recipes of a training.

A recipe has the predicted values with intervals and costs, and where others come from; `recipes.py` writes it
for the programs that train it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mup_tpu.analysis.design import Cell
from mup_tpu.analysis.planned import PlannedOptimum, Recipe
from mup_tpu.analysis.trend import KEPT
from mup_tpu.config import columns
from mup_tpu.config.columns import write
from mup_tpu.config.values import as_number, write_time
from mup_tpu.words.names import listed, plain, power, rule_name
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import interaction

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


def at_words(values: Mapping[str, Any], names: Sequence[str], in_tokens: bool = False) -> str:
    """Name a run by some of its values: "width 64, depth 4, 8.19k tokens a step, 2,000 steps".

    A batch is of tokens, or in the unit of somebody's own training.
    """
    words = []
    for name in names:
        value = values[name]
        if name == "steps":
            words.append(f"{value:,} steps")
        elif name == "batch" and in_tokens:
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
    at = partial(at_words, in_tokens=goal.is_in_tokens)
    rule = rule_name(plan.rule)
    names = [name for name in goal.values if name not in ("params", "tokens")]
    lines = [
        f"target: {at(goal.values, names)}; one run costs {cost_words(plan.target_cost, is_time)}; "
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
            f"{i}. {at(step.values, changing)}{f', {rule}' if rule else ''}: {step.runs} runs, "
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
    lines.append(f"the largest proxy that pays: {at(steps[-1].values, changing)}; {plan.largest}")
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


def recipe_lines(made: Recipe) -> list[str]:
    """Return each value at a plan's target with its intervals, what an error costs, and what was fixed."""
    at = ", ".join(f"{label(name)} {short(size)}" for name, size in made.sizes.items())
    rule = f"{rule_name(made.rule)}: " if made.rule else ""
    lines = [line for one in made.optima for line in _optimum(one, rule, at)]
    lines += [interaction(pair) for pair in made.pairs]
    known = min(one.known for one in made.optima)
    lines.append(f"from {known} of {made.cells} planned sizes with a known optimum, {made.runs} runs")
    if known < made.cells:
        lines.append("sizes are missing: run the same sweep again for a narrower interval")
    if made.loss is not None:
        low, high = made.loss.low, made.loss.high
        lines.append(f"expected loss {made.loss.loss:.3f} nat (95 % {low:.3f} to {high:.3f})")
    elif made.why_no_loss is not None:
        lines.append(f"expected loss unknown: {because(made.why_no_loss)}")
    for one in made.optima:
        tuned = label(one.hyperparameter)
        if one.by_rule:
            sizes = listed([*map(label, one.by_rule)])
            chance = f"{KEPT:.0%} of the prior"
            lines.append(f"by rule: {rule_name(made.rule)} keeps the best {tuned} along {sizes} ({chance})")
        if one.by_prior:
            sizes = listed([*map(label, one.by_prior)])
            lines.append(f"by prior: the runs hardly tell how {tuned} moves along {sizes}")
    tuned = listed([label(one.hyperparameter) for one in made.optima])
    lines += [f"fixed: {tuned} ∝ {label(n)}^{value:g}" for n, value in made.fix.items()]
    lines += [f"by law: {sentence}" for sentence in made.derived]
    if values := ", ".join(f"{label(name)} {_value(name, value)}" for name, value in made.values.items()):
        lines.append(f"the target's run: {values}")
    return lines


def _optimum(one: PlannedOptimum, rule: str, at: str) -> list[str]:
    (low, high), (half_low, half_high) = one.interval, one.half
    lines = [
        f"{rule}{label(one.hyperparameter)} {power(one.x, '.2f')} at the target ({at}); 95 % {plain(low)} "
        f"to {plain(high)}, 50 % {plain(half_low)} to {plain(half_high)}"
    ]
    if math.isfinite(one.expected_cost):
        lines.append(
            f"  expected cost over the best value there: {one.expected_cost:.4f} nat (at most "
            f"{one.high_cost:.4f}); an error of one octave costs {one.octave_cost:.4f} nat"
        )
    for name, (slope, error) in one.exponents.items():
        low, high = slope - 1.96 * error, slope + 1.96 * error
        lines.append(f"  it moves as {label(name)}^{slope:.2f} (95 % {low:.2f} to {high:.2f})")
    return lines


def _value(name: str, value: Any) -> str:
    number = as_number(str(value))
    return short(number) if name in ("tokens", "batch") and number else write(name, value)
