"""Sentences about predictions, and about laws of the optimum and of the loss."""

from __future__ import annotations

import math
import re
from typing import Any

from mup_tpu.analysis.loss_law import COMPUTE, PARAMS, TOKENS, LargestRun, LossLaws, RecipeLaw
from mup_tpu.analysis.prediction import ExpectedCost, Predictions, RulePrediction
from mup_tpu.analysis.scaling_law import ExpectedLoss
from mup_tpu.analysis.trend import kind_of
from mup_tpu.config.columns import label
from mup_tpu.words import names
from mup_tpu.words.names import interval, plain, point, power
from mup_tpu.words.plans import short
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import details, interaction, verdict


def prediction(made: RulePrediction, predictions: Predictions, name: str = "") -> str:
    """Return the predicted optimum with its intervals, and its distance from the table."""
    scale = predictions.scale
    at = ", ".join(point(n, float(f"{size:.4g}") if size % 1 else size) for n, size in made.sizes.items())
    if not re.match(rf"([\w/]+[./])*{re.escape(scale)}", made.target):
        at = f"{made.target}, {at}"
    below, several = math.log2(made.smallest[0] / made.scale), len(made.sizes) > 1
    reach = f"between {'size' if several else 'scale'}s that were run"
    if made.reach > 0.005:
        beyond = "the sizes that were run" if several else point(scale, _largest(made))
        reach = f"{_octaves(made.reach)} beyond {beyond}"
    elif below > 0.005:
        reach = f"{_octaves(below)} below {point(scale, made.smallest[0])}"
    (low, high), (half_low, half_high) = made.interval, made.half
    name = name or names.rule_name(made.compared, predictions.analysis.compares)
    return (
        f"{name}: {label(made.hyperparameter)} {power(made.x, '.2f')} at {at} "
        f"({reach}); 95 % {plain(low)} to {plain(high)}, 50 % {plain(half_low)} to {plain(half_high)}"
    )


def prediction_details(made: RulePrediction, predictions: Predictions) -> list[str]:
    """Return limits, costs and loss of a prediction, a line each."""
    columns, scale, lines = predictions.analysis.columns, predictions.scale, list[str]()
    unit = columns.unit
    if not made.bears:
        limit = f"the expected cost exceeds {predictions.analysis.epsilon:.3g} {unit}"
        furthest = float(f"{_largest(made) * 2**made.furthest:.3g}")
        beyond = f"beyond {point(scale, furthest)}" if made.furthest > 0.05 else "at any distance"
        if len(made.sizes) > 1 and made.furthest > 0.05:
            beyond = f"more than {_octaves(made.furthest)} beyond the sizes that were run"
        lines.append(f"extrapolated too far: {beyond} {limit}")
    (low, high), kind = made.unclaimed, kind_of(scale) or "any scale"
    if made.claimed:
        wider = (high - low) / (made.interval[1] - made.interval[0])
        lines.append(
            f"{names.rule_name(made.compared)} claims that the optimum stays: probability {made.steady:.2f}, "
            f"before the runs {made.steady_before:.2f} ({kind} under such rules, {made.sweeps} sweeps); "
            f"without the claim 95 % {plain(low)} to {plain(high)}, {wider:.1f} times as wide"
        )
    elif made.sweeps > 1:
        lines.append(f"prior: {kind}, {made.sweeps} sweeps")
    if math.isnan(made.taking.expected):
        return [*lines, "its cost and the loss there are unknown, since the table has no losses"]
    lines.append(f"expected cost over the best value there: {_cost(made.taking, unit)}")
    if len(made.sizes) > 1:
        return lines
    small, large = (f"{power(x, '.2f')}, of {point(scale, at)}" for at, x in (made.smallest, made.largest))
    staying, following = _cost(made.staying, unit), _cost(made.following, unit)
    lines.append(f"with the optimum {small}: {staying}; {large}: {following}")
    if made.loss is not None:
        digits = ".3f" if unit == "nat" else ".3g"
        low, value, high = sorted(columns.metric(x) for x in (made.loss.loss, made.loss.low, made.loss.high))
        loss = names.measured(columns.loss_name, unit, value, digits)
        lines.append(f"expected {loss} ({interval(low, high, digits)})")
    elif made.why_no_loss is not None and not columns.maximized:
        lines.append(f"expected {columns.loss_name} unknown: {because(made.why_no_loss, columns)}")
    return lines


def lines(predictions: Predictions) -> list[str]:
    """Return predictions with their details, which are indented, a line each."""
    made = []
    for result in predictions.analysis.results:
        for one in predictions.predictions:
            if one.compared == result.compared:
                made.append(prediction(one, predictions))
                made += [f"  {line}" for line in prediction_details(one, predictions)]
        made += [f"  {interaction(pair)}" for pair in result.pairs if pair.interacts]
        if result.power_law is not None:
            law = verdict(result, predictions.analysis), *details(result, predictions.analysis)
            made += [f"  {line}" for line in law]
    return made


def summary(predictions: Predictions) -> str:
    notes = (because(note, predictions.analysis.columns) for note in predictions.notes)
    return "\n".join([*lines(predictions), *notes])


def _largest(made: RulePrediction) -> float:
    return float(made.scale / 2**made.reach)


def _octaves(count: float) -> str:
    written = f"{count:.1f}".removesuffix(".0")
    return f"{written} octave" if written == "1" else f"{written} octaves"


def _cost(cost: ExpectedCost, unit: str) -> str:
    digits = ".2g" if unit != "nat" else ".4f" if cost.expected < 0.1 else ".2f"
    return f"{cost.expected:{digits}} {unit} (at most {cost.high:{digits}})"


def predictions_to_dict(predictions: Predictions) -> dict[str, Any]:
    """Return predictions as plain values, with their sentences, for JSON."""
    columns = predictions.analysis.columns
    values = predictions.to_dict() | {"notes": [because(note, columns) for note in predictions.notes]}
    for one, made in zip(values["predictions"], predictions.predictions, strict=True):
        one["sentence"] = prediction(made, predictions, made.compared)
        one["details"] = prediction_details(made, predictions)
        one["why_no_loss"] = because(made.why_no_loss, columns) if made.why_no_loss else ""
    return values


_SYMBOLS = {PARAMS: "N", TOKENS: "D", COMPUTE: "C"}


def loss_law_lines(laws: LossLaws) -> list[str]:
    """Return laws of the loss with what follows from them; details are indented, a line each."""
    made = []
    for one in laws.laws:
        values = [*one.law.parameters.values()]
        terms = (
            f"{coefficient:.4g}·{_SYMBOLS.get(size, size)}^-{exponent:.3f}"
            for size, coefficient, exponent in zip(one.sizes, values[1::2], values[2::2], strict=True)
        )
        of = "" if len(laws.laws) == 1 else f"{one.compared}: "
        made.append(
            f"{of}loss {' + '.join([f'{one.law.irreducible:.4g}', *terms])} {laws.table.columns.unit} "
            f"({len(one.loss_P)} runs, scatter {one.law.scatter:.2%})"
        )
        made += [f"  {line}" for line in _law_details(one, laws)]
    along = COMPUTE if laws.laws[0].is_of_both else laws.sizes[0]
    for gain in laws.speedups:
        factor, low, high = (names.number(value, 2) for value in (gain.factor, gain.low, gain.high))
        made.append(
            f"{gain.compared} over {gain.baseline}: × {factor} (95 % {low} to {high}) in {along} at "
            f"{_size(along, gain.at)}"
        )
    return made


def _law_details(one: RecipeLaw, laws: LossLaws) -> list[str]:
    parameters = (
        f"{name} {interval[0]:.3g} to {interval[1]:.3g}"
        for name, interval in one.law.intervals.items()
        if name != "E" or one.law.asymptote is None
    )
    pinned = "" if one.law.asymptote is None else f"; E {one.law.asymptote:g} as given"
    made = [f"95 %: {', '.join(parameters)}{pinned}"]
    if one.is_of_both:
        a, low, high = one.law.split
        made.append(f"best size of a budget: N ∝ C^{a:.2f} ({interval(low, high, '.2f')})")
    if isinstance(largest := one.held_out, LargestRun):
        sizes = ", ".join(_size(name, value) for name, value in zip(one.sizes, largest.sizes, strict=True))
        ruling = "inside" if largest.expected.holds(largest.loss) else "outside"
        of = f", best of the {largest.count} largest," if largest.count > 1 else ""
        made.append(
            f"the largest run{of} predicted from the smaller ones: {_expected(largest.expected)} at {sizes}; "
            f"it came out {largest.loss:.4g}, {ruling}"
        )
    for target in (t for t in laws.targets if t.compared == one.compared):
        at, best = ", ".join(_size(name, value) for name, value in target.sizes.items()), ""
        if target.best is not None:
            n, d = ([short(value) for value in values] for values in (target.best.params, target.best.tokens))
            best = f"best size {n[0]} ({n[1]} to {n[2]}) on {d[0]} tokens ({d[1]} to {d[2]}), "
        made.append(f"at {at}: {best}loss {_expected(target.expected)}")
    return made


def _expected(loss: ExpectedLoss) -> str:
    return f"{loss.loss:.4g} ({interval(loss.low, loss.high, '.4g')})"


def _size(name: str, value: float) -> str:
    if name == COMPUTE:
        return f"{value:.3g} FLOP"
    unit = {PARAMS: "parameters", TOKENS: "tokens"}.get(name)
    return point(name, value) if unit is None else f"{short(value)} {unit}"


def loss_laws_to_dict(laws: LossLaws) -> dict[str, Any]:
    """Return laws of the loss as plain values, with their sentences, for JSON."""
    columns = laws.table.columns
    return laws.to_dict() | {
        "sentences": [line.strip() for line in loss_law_lines(laws)],
        "notes": [because(note, columns) for note in laws.notes],
    }
