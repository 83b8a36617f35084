"""Sentences about several hyperparameters that are tuned together."""

from __future__ import annotations

import math

from mup_tpu.analysis.next_points import next_points
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.prediction import Predictions
from mup_tpu.analysis.surface import Interaction, JointAnalysis, JointPredictions, JointResult
from mup_tpu.config.columns import label
from mup_tpu.words import names
from mup_tpu.words.names import listed, number, plain, point, power
from mup_tpu.words.predictions import prediction, prediction_details
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import spending, verdict


def lines(result: JointAnalysis | JointPredictions) -> list[str]:
    """Return the sentences on all rules; details are indented."""
    if isinstance(result, JointPredictions):
        made = [line for one in result.joint.results for line in recipe(one, [*result.parts])]
        return [*made, *(f"not predicted: {reason}" for reason in result.refused)]
    return [line for number in range(len(result.results)) for line in together(result, number)]


def together(joint: JointAnalysis, number_of_rule: int) -> list[str]:
    """Return the verdict on a rule's values together, on each hyperparameter, and their interactions."""
    result, unit = joint.results[number_of_rule], joint.parts[0].columns.unit
    scale, regret = joint.parts[0].scale, result.regret
    name = names.rule_name(result.compared, joint.parts[0].compares)
    source, target = point(scale, regret.source), point(scale, regret.target)
    tuned = listed([label(one) for one in joint.tuned])
    lines = [f"{name}: the optimum in {tuned} at {source}; a verdict needs several values of {label(scale)}."]
    if regret.source != regret.target:
        lines = [
            f"{name}: {result.verdict.decision}: with {tuned} of {source}, {target} loses "
            f"{number(regret.value, 4)} {unit} (95 % {number(regret.low, 4)} to {number(regret.high, 4)})."
        ]
    for h, part in enumerate(joint.parts):
        if regret.source != regret.target:
            lines.append(f"  {verdict(part.results[number_of_rule], part, name=label(joint.tuned[h]))}")
        lines += [f"  {best(label(joint.tuned[h]), scale, o)}" for o in part.results[number_of_rule].optima]
        value, high = result.surface.octave_cost[h]
        flat = " It may be left alone." if high < joint.epsilon else ""
        lines.append(f"    An error of one octave costs {number(value, 4)} {unit}.{flat}")
    return [*lines, *(f"  {interaction(pair)}" for pair in result.pairs if pair.interacts)]


def next_lines(joint: JointAnalysis, number_of_rule: int) -> list[str]:
    """Return a rule's verdict, the runs that bring it nearer per cost, and their price."""
    first, *_ = together(joint, number_of_rule)
    made, columns = next_points(joint, number_of_rule), joint.parts[0].columns
    if made is None:
        return [first, "  settled: no runs needed"]
    regrets = zip(joint.results[number_of_rule].surface.scales, made.regrets, strict=True)
    known = ", ".join(f"{number(regret, 4)} at {point(columns.scale, scale)}" for scale, regret in regrets)
    lines = [first, f"  expected cost of the estimated best values: {known} ({columns.unit})"]
    for one in made.points:
        at = ", ".join(f"{label(name)} {power(x)}" for name, x in zip(joint.tuned, one.x, strict=True))
        runs = "1 run" if one.runs == 1 else f"{one.runs} runs"
        lines.append(f"  add {runs} at {point(columns.scale, one.scale)}, {at}")
    return [*lines, f"  {because(made.reason, columns)}; {spending(made.costs, made.cost, made.spent)}"]


def best(tuned: str, scale: str, optimum: Optimum) -> str:
    low, high = (
        plain(end) if math.isfinite(end) else "beyond the runs" for end in (optimum.low, optimum.high)
    )
    return f"  {point(scale, optimum.scale)}: best {tuned} {power(optimum.x, '.2f')} (95 % {low} to {high})"


def interaction(pair: Interaction) -> str:
    first, second = label(pair.first), label(pair.second)
    return (
        f"{first} and {second} interact (correlation of their curvatures {number(pair.correlation, 2)}, "
        f"95 % {number(pair.low, 2)} to {number(pair.high, 2)}): an octave more of {second} moves the best "
        f"{first} by {number(pair.shift, 2)} octaves."
    )


def recipe(result: JointResult, predictions: list[Predictions]) -> list[str]:
    """Return the predicted value of each hyperparameter of a rule, with its intervals and cost."""
    lines = [f"{names.rule_name(result.compared, predictions[0].analysis.compares)}:"]
    for each in predictions:
        for made in each.predictions:
            if made.compared == result.compared:
                lines.append(f"  {prediction(made, each, name='best')}")
                lines += [f"    {line}" for line in prediction_details(made, each)]
    return [*lines, *(f"  {interaction(pair)}" for pair in result.pairs if pair.interacts)]
