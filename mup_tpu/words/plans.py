"""Sentences about plans (what is run, what it costs, what is then known) and recipes of a training.

A recipe has the predicted values with intervals and costs, and where others come from; `recipes.py` writes it
for the programs that train it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from mup_tpu.analysis.design import Cell
from mup_tpu.analysis.ingest.table_values import is_cross_entropy
from mup_tpu.analysis.planned import AtTarget, PlannedOptimum, Recipe
from mup_tpu.analysis.trend import KEPT, NORMAL_95
from mup_tpu.config import columns
from mup_tpu.config.columns import Table, write
from mup_tpu.config.values import as_number, write_time
from mup_tpu.words.names import interval, listed, measured, number, plain, power, rule_name
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import interaction

# Loss that e times the compute saves, nat, by L(N, D) of Hoffmann et al. 2022 at 1e19 to 1e23 FLOP.
WORTH = 0.1
CHECKPOINT_S = 300.0  # longest training without a checkpoint
# A transformer's vocabulary, if it is not given: GPT-2's, rounded up to a multiple of 64
VOCABULARY = 50_304


def label(name: str) -> str:
    return name if name in ("tokens", "batch", "steps") else columns.label(name)


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
    if is_first:
        return " to ".join(write(column, 2.0**look.x) for look in (looks[0], looks[-1]))
    return f"within {(looks[-1].x - looks[0].x) / 2:g} octaves of the expected optimum"


def as_text(table: Table) -> str:
    shown = io.StringIO()
    Console(file=shown, width=110, color_system=None, force_jupyter=False).print(table)
    return shown.getvalue().rstrip()


def _size(name: str, value: Any, in_tokens: bool = False) -> str:
    is_large = name == "tokens" or (name == "batch" and in_tokens) or value >= 1e5
    return short(value) if is_large else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def plan_target(plan: Any) -> str:
    """Return the target and the budget of a `tuning.plan.Plan`."""
    goal, is_time = plan.goal, plan.is_time
    names = [name for name in goal.values if name not in ("params", "tokens")]
    whole, speed = [], plan.speed
    if speed is not None and speed.measured is None and speed.devices > 1:
        whole.append(f"{plan.budget / 3600 * speed.devices:,.0f} device hours")
    if speed is not None and math.isfinite(speed.price):
        whole.append(f"{plan.budget / 3600 * speed.devices * speed.price:,.0f} at {speed.price:g}/h")
    return (
        f"target: {at_words(goal.values, names, goal.is_in_tokens)}; one run costs "
        f"{cost_words(plan.target_cost, is_time)}; budget {cost_words(plan.budget, is_time)}"
        + (f" ({', '.join(whole)})" if whole else "")
    )


def _unit(plan: Any) -> str:
    """Return the unit of a plan's regrets: nat, or the loss that the trainer names otherwise."""
    loss = plan.program.get("loss")
    return "nat" if loss is None or is_cross_entropy(loss) else str(loss)


def plan_table(plan: Any) -> Table:
    """Return the sizes of a plan with their runs, costs and what is then known of the target, and the sum."""
    goal, speed, names = plan.goal, plan.speed, plan.changing
    has_tokens = goal.is_in_tokens and "steps" in names
    names = [name for name in names if not (has_tokens and name == "steps")]
    is_priced = speed is not None and math.isfinite(speed.price)
    # 80 columns have no room for both.
    has_mfu = speed is not None and speed.measured is None and math.isfinite(speed.peak) and not is_priced
    has_seeds = any(look.seeds > 1 for step in plan.steps for look in step.looks)
    tuned = [label(name) for name in (plan.tuned, *plan.beside)]

    def sizes(values: Mapping[str, Any], of: Mapping[str, float]) -> list[str]:
        cells = [_size(name, values[name], goal.is_in_tokens) for name in names]
        return cells + ([short(of["tokens"])] if has_tokens else [])

    def costs(cost: float, flops: float) -> list[str]:
        mfu = [f"{100 * flops / cost / speed.peak:.2g}"] if has_mfu else []
        price = [f"{cost / 3600 * speed.devices * speed.price:,.0f}"] if is_priced else []
        return [_whole(cost_words(cost, plan.is_time).removesuffix(" FLOP")), *mfu, *price]

    rows, flops = list[list[str]](), [step.runs * goal.flops(step.values) for step in plan.steps]
    for step, of_step in zip(plan.steps, flops, strict=True):
        counts = sorted({look.seeds for look in step.looks})
        seeds = ["–".join(map(str, sorted({counts[0], counts[-1]})))] * has_seeds
        known = [_factor(width) for width in (step.half_width, *step.beside)]
        regret = f"{step.regret:.4f}" if math.isfinite(step.regret) else "–"
        cost = costs(step.cost, of_step)
        rows.append([*sizes(step.values, step.sizes), f"{step.runs}", *seeds, *cost, *known, regret])
    nothing, blank = [""] * (len(tuned) + 1), [""] * (len(names) + has_tokens - 1)
    no_seeds = [""] * has_seeds
    runs = f"{sum(step.runs for step in plan.steps)}"
    rows.append(["sum", *blank, runs, *no_seeds, *costs(plan.cost, sum(flops)), *nothing])
    whole = sizes(goal.values, goal.sizes(goal.values))
    rows.append(["target", *whole[1:], "1", *no_seeds, *costs(plan.target_cost, goal.flops({})), *nothing])
    share = f"{100 * plan.cost / plan.target_cost:.2g} %"
    rows.append(["share", *blank, "", *no_seeds, share, *[""] * (has_mfu + is_priced), *nothing])
    headings = [*map(label, names), *["tokens"] * has_tokens, "runs", *["seeds"] * has_seeds]
    headings += ["time" if plan.is_time else "FLOP", *["MFU, %"] * has_mfu, *["price"] * is_priced]
    rule = f", {rule_name(plan.rule)}" if plan.rule else ""
    title = f"what is run{rule}, and what is then known of the target"
    return Table([*headings, *_within(tuned)], rows, title)


def _whole(words: str) -> str:
    return words.replace(" ", "\N{NO-BREAK SPACE}")  # so that no cell breaks inside


def _within(tuned: Sequence[str]) -> list[str]:
    names = [name.replace("learning ", "") for name in tuned]
    return [*(f"{name}\nknown\nwithin" for name in names), "expected\nregret"]


def _factor(octaves: float) -> str:
    factor = 2.0**octaves
    return "–" if octaves > 10 else f"×{factor:.0f}" if factor >= 100 else f"×{factor:.2g}"


def plan_lines(plan: Any) -> list[str]:
    """Return what a plan gains, what it derived and assumed, and at most five remarks, a sentence each."""
    goal, steps, unit = plan.goal, plan.steps, _unit(plan)
    gains = [
        f"expected regret at the target: {plan.regret:.4f} {unit} with this plan",
        f"{plan.copied:.4f} {unit} with the smallest size's best value",
        *(f"{value:.4f} {unit} with the same runs under {rule_name(n)}" for n, value in plan.others.items()),
    ]
    lines, beside = ["; ".join(gains)], len(plan.beside)
    first, then = (looks_words(s.looks, i == 0, plan.tuned, beside) for i, s in enumerate(steps[:2]))
    tuned = listed([*map(label, (plan.tuned, *plan.beside))])
    lines.append(f"{tuned}: {first} at the first size, then {then}")
    lines += [f"derived: {sentence}" for sentence in goal.derived]
    lines += [] if plan.published is None else [published_words(plan.published)]
    if goal.base is not None:
        model, data = goal.base.model, goal.base.data
        batch = goal.values.get("batch_size", data.batch_size)
        lines.append(
            f"each step of the target trains {model.architecture} on {batch} × {data.sequence_length} = "
            f"{batch * data.sequence_length:,} tokens of {data.corpus}"
        )
    lines += [f"fixed: {label(plan.tuned)} ∝ {label(name)}^{value:g}" for name, value in plan.fixes.items()]
    return [*lines, f"assumed: drift, scatter and valleys as in {because(plan.source)}", *_remarks(plan)]


def published_words(prior: Any) -> str:
    """Return what published laws say of a learning rate before any run, a `tuning.laws.RatePrior`."""
    each = ", ".join(f"{one.law.name} {one.rate:.2g}" for one in prior.rates)
    apart = "" if prior.apart is None else f"; they are {prior.apart:.2g} times apart"
    return (
        f"before any run: learning rate {prior.rate:.2g} (95 % {prior.low:.2g} to {prior.high:.2g}) with "
        f"AdamW and no rule, by published laws: {each}{apart}"
    )


def published_table(prior: Any) -> Table:
    """Return what each published law says of a learning rate, with its source, domain and error."""
    rows = [
        (one.law.name, f"{one.rate:.2g}", one.law.formula, _factor(one.law.error),
         ", ".join(one.outside) or "–", one.law.source)
        for one in prior.rates
    ]  # fmt: skip
    headings = ("law", "rate", "formula", "off by", "beyond its runs", "source")
    return Table(headings, rows, "published learning rates, AdamW without a rule", {*headings} - {"rate"})


def _remarks(plan: Any) -> list[str]:
    """Return at most five sentences that say what to do, the most useful first."""
    goal, speed, steps, remarks = plan.goal, plan.speed, plan.steps, list[str]()
    if speed is not None and speed.measured is None and goal.base is None:
        of = ""
        if math.isfinite(speed.peak):
            share, peak = speed.flops_per_second / speed.peak, speed.peak / 1e12 / speed.devices
            of = f": times assume {share:.0%} (--mfu) of {speed.devices} × {peak:.4g} TFLOP/s"
        remarks.append(f"Time your trainer by --probe 60s{of}.")
    longest = max(step.cost / step.runs for step in steps)
    if plan.is_time and goal.base is None and longest > CHECKPOINT_S:
        remarks.append(f"Have the trainer save to its folder: the longest run takes {write_time(longest)}.")
    name, narrowest = min(plan.shortened.items(), key=lambda pair: pair[1], default=("", math.inf))
    if plan.half_width - narrowest > 0.07:
        whole, now = short(goal.sizes(goal.values)[name]), _factor(plan.half_width)
        in_proxies = f"Keep {label(name)} at {whole} in the largest proxies if you can"
        remarks.append(f"{in_proxies}: {now} narrows to {_factor(narrowest)}.")
    remarks.append(_budget_left(plan))
    target_bytes, proxy_bytes = goal.memory_bytes({}), goal.memory_bytes(steps[-1].values)
    if goal.base is None and math.isfinite(target_bytes):
        tables = "" if goal.counts else f" (vocab={VOCABULARY})"
        remarks.append(
            f"Choose the micro-batch by memory: the target{tables} takes {target_bytes / 1e9:.3g} GB, and "
            f"{goal.activation_bytes({}) / 1e6:.2g} MB a token; the largest proxy {proxy_bytes / 1e9:.2g} GB."
        )
    return remarks[:5]


def _budget_left(plan: Any) -> str:
    """Say what to do with the rest of a budget, and what it saves."""
    left, is_time, larger = plan.budget - plan.cost, plan.is_time, plan.larger
    longer = f"Train the target longer with the {cost_words(left, is_time)} that are left"
    if larger is None:
        return f"{longer}: no size lies between the largest here and the target."
    names = [name for name, value in larger.values.items() if value != plan.goal.values[name]]
    at, cost = at_words(larger.values, names, plan.goal.is_in_tokens), cost_words(larger.cost, is_time)
    if math.isnan(plan.saved):
        return f"Raise --budget by {cost_words(larger.cost - left, is_time)} for one more size, {at}."
    price = WORTH * larger.cost / plan.target_cost
    return f"{longer}: {cost} save {price:.4f} {_unit(plan)} there, and {plan.saved:.4f} in a larger proxy."


def recipe_table(made: Recipe) -> Table:
    """Return what came of each planned size, with what the plan promised in brackets."""
    names = [n for n in made.steps[0].values if len({str(step.values[n]) for step in made.steps}) > 1]
    tuned = [label(one.hyperparameter) for one in made.optima]

    def both(came: str, promised: str | None) -> str:
        return f"{came} ({promised})".strip() if promised else came

    def time(seconds: float, promised: Sequence[Mapping[str, Any]]) -> str:
        costs = [one["cost"] for one in promised if made.unit == "s" and one]
        planned = _whole(cost_words(sum(costs), True)) if costs else None
        return both(_whole(cost_words(seconds, True)), planned)

    def regret(of: Mapping[str, Any]) -> str | None:
        return f"{of['regret']:.4f}" if "regret" in of else None

    rows, every = list[list[str]](), [step.promised for step in made.steps]
    for step, of in zip(made.steps, every, strict=True):
        wanted = of.get("octaves") or [None] * len(tuned)
        known = [
            both("–" if math.isnan(came) else _factor(came), None if octaves is None else _factor(octaves))
            for came, octaves in zip(step.octaves, wanted, strict=True)
        ]
        sizes = [_size(name, step.values[name]) for name in names]
        runs = both(f"{step.runs}", f"{of['runs']}" if of else None)
        rows.append([*sizes, runs, time(step.seconds, [of]), *known, both("", regret(of))])
    wanted_runs = sum(int(of["runs"]) for of in every if of)
    runs = both(f"{sum(step.runs for step in made.steps)}", f"{wanted_runs}" if wanted_runs else None)
    total = [_factor((one.interval[1] - one.interval[0]) / 2) for one in made.optima]
    regrets = sum(one.taking.expected for one in made.optima)
    seconds = time(sum(step.seconds for step in made.steps), every)
    blank = [""] * (len(names) - 1)
    rows.append(["all", *blank, runs, seconds, *total, both(f"{regrets:.4f}", regret(every[-1]))])
    headings = [*map(label, names), "runs", "time", *_within(tuned)]
    return Table(headings, rows, "what came (in brackets: as planned)")


def _next_size(made: Recipe) -> str:
    """Say what the next runs buy."""
    step = next((s for s in made.steps if any(math.isnan(o) for o in s.octaves)), made.steps[-1])
    at, promised = at_words(step.values, [*step.values]), step.promised
    words = f"next: {at}; the same sweep command runs it"
    if "octaves" not in promised:
        return words
    cost = cost_words(promised["cost"], made.unit == "s")
    pairs = zip(made.optima, promised["octaves"], strict=True)
    known = listed([f"{label(one.hyperparameter)} within {_factor(octaves)}" for one, octaves in pairs])
    return f"{words}, and is planned to leave {known}, for {promised['runs']} runs and {cost}"


def recipe_lines(made: Recipe) -> list[str]:
    """Return each value at a plan's target, what the runs say beside it, and what was fixed or derived.

    Below a value its intervals and what an error costs are indented.
    """
    at = ", ".join(f"{label(name)} {short(size)}" for name, size in made.sizes.items())
    rule = f"{rule_name(made.rule)}: " if made.rule else ""
    lines = [line for one in made.optima for line in _optimum(one, rule, at, made.loss_unit)]
    lines += [interaction(pair) for pair in made.pairs]
    known = min(one.known for one in made.optima)
    lines.append(f"from {known} of {made.cells} planned sizes with a known optimum, {made.runs} runs")
    if known < made.cells:
        lines.append(_next_size(made))
    if made.loss is not None:
        low, high = made.loss.low, made.loss.high
        loss = measured(made.loss_name, made.loss_unit, made.loss.loss)
        lines.append(f"expected {loss} ({interval(low, high)})")
    elif made.why_no_loss is not None:
        lines.append(f"expected {made.loss_name} unknown: {because(made.why_no_loss)}")
    if made.came is not None:
        lines.append(_came(made, made.came))
    for one in made.optima:
        tuned = label(one.hyperparameter)
        if one.by_rule:
            sizes = listed([*map(label, one.by_rule)])
            chance = f"{KEPT:.0%} of the prior"
            lines.append(f"by rule: {rule_name(made.rule)} keeps the best {tuned} along {sizes} ({chance})")
        if one.published is not None:
            x, error = one.published
            lines.append(f"published laws say {power(x, '.2f')} ± {error:.1f} octaves: taken in as a run is")
        if one.by_prior:
            sizes = listed([*map(label, one.by_prior)])
            lines.append(f"by prior: the runs hardly tell how {tuned} moves along {sizes}")
    tuned = listed([label(one.hyperparameter) for one in made.optima])
    lines += [f"fixed: {tuned} ∝ {label(n)}^{value:g}" for n, value in made.fix.items()]
    lines += [f"by law: {sentence}" for sentence in made.derived]
    if values := ", ".join(f"{label(name)} {_value(name, value)}" for name, value in made.values.items()):
        lines.append(f"the target's run: {values}")
    return lines


def _came(made: Recipe, came: AtTarget) -> str:
    """Say what came at the target, beside what the plan promised and the recipe expected."""
    runs = "1 run" if came.runs == 1 else f"{came.runs} runs"
    if not math.isfinite(came.loss):
        return f"came at the target: {runs}, diverged"
    best = listed([f"{label(name)} {power(math.log2(x), '.2f')}" for name, x in came.best.items()])
    loss = measured(made.loss_name, made.loss_unit, came.loss)
    words = f"came at the target: {runs}, {loss} at {best}"
    if came.values == 1:
        return words
    expected = sum(one.taking.expected for one in made.optima)
    planned = made.steps[-1].promised.get("regret", math.nan)
    return (
        f"{words}, the best of {came.values} values; the nearest to the prediction costs {came.regret:.4f} "
        f"{made.loss_unit} more (the plan promised {number(planned, 4)}, the recipe expects "
        f"{number(expected, 4)})"
    )


def _optimum(one: PlannedOptimum, rule: str, at: str, unit: str) -> list[str]:
    (low, high), (half_low, half_high) = one.interval, one.half
    lines = [
        f"{rule}{label(one.hyperparameter)} {power(one.x, '.2f')} at the target ({at}); 95 % {plain(low)} "
        f"to {plain(high)}, 50 % {plain(half_low)} to {plain(half_high)}"
    ]
    if math.isfinite(one.taking.expected):
        lines.append(
            f"  expected cost over the best value there: {one.taking.expected:.4f} {unit} (at most "
            f"{one.taking.high:.4f}); an error of one octave costs {one.octave_cost:.4f} {unit}"
        )
    for name, (slope, error) in one.exponents.items():
        low, high = slope - NORMAL_95 * error, slope + NORMAL_95 * error
        lines.append(f"  it moves as {label(name)}^{slope:.2f} ({interval(low, high, '.2f')})")
    return lines


def _value(name: str, value: Any) -> str:
    count = as_number(str(value))
    return short(count) if name in ("tokens", "batch") and count else write(name, value)
