"""Sentences about verdicts: the verdict, advice, the next runs, and the state of an optimum."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mup_tpu.analysis.design import Batch
from mup_tpu.analysis.drift import NEEDED, Drift, is_told
from mup_tpu.analysis.ingest.table_columns import Columns, means
from mup_tpu.analysis.optimum import Optimum, Status
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.analysis.verdict import AT_LEAST, MOST_LOOKS, Decision, LookTaken, Regret, Verdict
from mup_tpu.config.columns import CONFIGURED, label, plural
from mup_tpu.words import names
from mup_tpu.words.names import amount, exponent, listed, number, plain, point, power
from mup_tpu.words.reasons import because, notes

if TYPE_CHECKING:
    from mup_tpu.analysis.prediction import Score
    from mup_tpu.analysis.surface import Interaction


def verdict(
    result: TransferResult, analysis: TransferAnalysis, scores: Iterable[Score] = (), name: str = ""
) -> str:
    """Return the verdict on a rule with its numbers.

    At a single scale the score of a prediction takes the verdict's place.
    """
    name = name or names.rule_name(result.compared, analysis.compares)
    if result.power_law is not None:
        exponents = result.power_law.exponents
        factors = " · ".join(f"{e.scale}^{number(e.value, 2)}" for e in exponents)
        ends = ", ".join(f"{e.scale} {number(e.low, 2)} to {number(e.high, 2)}" for e in exponents)
        return f"{name}: best {label(analysis.hyperparameter)} ∝ {factors} (95 %: {ends})"
    if result.parts:
        scale, regret, tuned = analysis.scale, result.headline_regret, tuned_words(analysis.columns)
        if regret is None:
            at = point(scale, result.parts[0].optima[0].scale)
            needed = f"a verdict needs several values of {label(scale)}"
            return f"{name}: the optimum in {tuned} at {at}; {needed}."
        source, target = point(scale, regret.source), point(scale, regret.target)
        value, low, high = (number(one, 4) for one in (regret.value, regret.low, regret.high))
        return (
            f"{name}: {result.verdict.decision}: with {tuned} of {source}, {target} loses {value} "
            f"{analysis.columns.unit} (95 % {low} to {high})."
        )
    if len(result.optima) == 1:
        for one in scores:
            if one.prediction.compared == result.compared:
                return f"{score_sentence(one, analysis.columns, name)}."
        if is_target(result):
            (run,), columns = result.optima, analysis.columns
            loss = names.measured(columns.loss_name, columns.unit, columns.metric(run.loss), ".4g")
            tuned = f"{label(columns.hyperparameter)} {power(run.best_x)}"
            return f"{name}: {loss} at {point(columns.scale, run.scale)}, with {tuned}."
    regret = result.headline_regret
    return _verdict(name, result.verdict, len(result.optima), result.drift, regret, analysis.columns)


def is_target(result: TransferResult) -> bool:
    """Return whether all runs have one size and one value, as those of a transfer, which get no verdict."""
    return [optimum.status for optimum in result.optima] == [Status.ONE_VALUE]


def look_verdict(name: str, look: LookTaken, columns: Columns) -> str:
    evidence = look.evidence
    name = names.rule_name(name, columns.parametrization)
    return _verdict(name, look.verdict, len(evidence.estimates), evidence.drift, evidence.headline, columns)


def _verdict(
    name: str, decided: Verdict, scales: int, drift: Drift, regret: Regret | None, columns: Columns
) -> str:
    if drift.is_known and not columns.loss:
        alpha = exponent(drift.alpha, drift.low, drift.high).replace("(", "(95 % ")
        law = f"best {label(columns.hyperparameter)} ∝ {label(columns.scale)}^{alpha}"
        return f"{name}: {law}; no verdict, since a regret needs losses, and the table has optima alone."
    if not drift.is_known or regret is None:
        known = f"{len(drift.scales)} of {scales} {plural(columns.scale)} have an optimum inside their grid"
        return f"{name}: {decided.decision}: {known}, and {NEEDED} are needed."
    moves = decided.decision == Decision.MOVES
    numbers = drift.moved if moves else (drift.alpha, drift.low, drift.high)
    law = f"best {label(columns.hyperparameter)} ∝ {label(columns.scale)}^"
    law += exponent(*numbers).replace("(", "(95 % ") if is_told(*numbers[1:]) else "α with α not known"
    if moves:
        law += f" over these {plural(columns.scale)}"
    elif decided.decision == Decision.DRIFTS and drift.is_told and not drift.has_moved:
        law += ", not a power law"
    elif decided.decision == Decision.OPEN:
        law = f"{'does it move?' if decided.may_copy else 'may it be copied?'} {law}"
    looks = "" if decided.look is None else f" after {decided.look} of at most {MOST_LOOKS} looks"
    return f"{name}: {decided.decision}{looks}: {law}; {_regret(regret, columns)}."


def _regret(regret: Regret, columns: Columns) -> str:
    source, target = point(columns.scale, regret.source), point(columns.scale, regret.target)
    if regret.status == "diverged":
        return f"the optimum of {source} diverges at {target}"
    if regret.status == "stopped early":
        return f"the optimum of {source} was stopped early at {target}, far behind the best"
    if regret.status == "refused":
        return f"the optimum of {source} does not meet the condition at {target}"
    if regret.status == "not bracketed":
        return f"the regret at {target} is unknown: its grid holds no optimum"
    least = "at least " if regret.status == AT_LEAST else ""
    value, low, high = (_cost(number, columns) for number in (regret.value, regret.low, regret.high))
    return f"the optimum of {source} costs {least}{value} {columns.unit} at {target} (95 % {low} to {high})"


def _cost(value: float, columns: Columns) -> str:
    """Write a regret, three decimals of a nat, two digits of another unit."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:.3f}" if columns.unit == "nat" else f"{value:.2g}"


def details(result: TransferResult, analysis: TransferAnalysis) -> list[str]:
    """Return the lines below a verdict; the advice comes first."""
    lines, columns = [], analysis.columns
    if (law := result.power_law) is not None:
        return [
            f"{len(law.estimates)} of {len(result.optima)} cells have an optimum inside their grid; they "
            f"scatter by {law.tau:.2f} octaves about the law",
            f"each cell predicted from the others: RMSE {law.held_out.rmse:.2f} octaves, mean regret "
            f"{law.held_out.regret:.4f} {columns.unit}, {law.held_out.inside:.0%} inside the 95 % interval",
        ]
    if result.surface is not None:
        several = zip(result.parts, analysis.parts, result.surface.octave_cost, strict=True)
        for part, of_part, (value, high) in several:
            if result.regrets:
                lines.append(verdict(part, of_part, name=label(of_part.hyperparameter)))
            flat = " It may be left alone." if high < analysis.epsilon else ""
            tuned = label(of_part.hyperparameter)
            lines.append(f"An error of one octave in {tuned} costs {number(value, 4)} {columns.unit}.{flat}")
        lines += [interaction(pair) for pair in result.pairs if pair.interacts]
    elif not columns.loss:
        first, last = result.optima[0], result.optima[-1]
        values = " and ".join(power(o.x, ".1f") for o in (first, last))
        at = point(columns.scale, last.scale)
        return [
            f"for a regret, give the losses at {at} of {values}, the best of "
            f"{point(columns.scale, first.scale)} and its own, and of values beside them"
        ]
    if advice := recommendation(result, columns):
        lines.append(advice)
    if result.sequence is not None and result.sequence.stops:
        lines.append(f"the sequence ends here: {because(result.sequence.stops, columns)}")
    # `analyze --next` lists the points where several hyperparameters are tuned.
    elif result.next_batch is not None and not result.parts and not is_target(result):
        lines.append(f"to settle it: {remedy(result, analysis)}")
        lines.append(f"{because(result.next_batch.reason, columns)}; {price(result.next_batch)}")
    if result.drift.is_known and result.drift.rests_on_prior:
        lines.append(
            "the verdict rests on the prior: half or twice the scatter in it would change whether the optima "
            "have moved, or lie within ±δ"
        )
    wider = result.wider_is_better
    if wider.pairs:
        word = "wider" if means(analysis.scale) == "width" else "larger"
        line = f"{word} is better in {wider.better} of {wider.pairs} comparisons of final losses"
        if wider.optima:
            line += f", and in {wider.optima_held} of {wider.optima} at the optima"
        lines.append(line)
    return lines


def tuned_words(columns: Columns) -> str:
    return listed([label(one) for one in columns.tuned])


def interaction(pair: Interaction) -> str:
    first, second = label(pair.first), label(pair.second)
    return (
        f"{first} and {second} interact (correlation of their curvatures {number(pair.correlation, 2)}, "
        f"95 % {number(pair.low, 2)} to {number(pair.high, 2)}): an octave more of {second} moves the best "
        f"{first} by {number(pair.shift, 2)} octaves."
    )


def recommendation(result: TransferResult, columns: Columns) -> str:
    """Return advice on the smallest scale's optimum at the largest, with its cost; "" if unknown."""
    headline = result.headline_regret
    if headline is None or result.parts:
        return ""
    at = {o.scale: o for o in result.optima}
    source, target = point(columns.scale, headline.source), point(columns.scale, headline.target)
    value = f"{label(columns.hyperparameter)} {power(at[headline.source].x, '.1f')}"
    use = f"use {value}, the optimum of {source}, at {target}"
    if result.verdict.decision == Decision.DRIFTS:
        best = at[headline.target]
        if best.is_bracketed:
            return f"do not {use}: the optimum there is {power(best.x, '.1f')}"
        return f"do not {use}: its optimum is {status(best, columns.unit)}"
    if headline.status != "estimated":
        return ""
    if not math.isfinite(headline.expected):
        return f"if you {use}: some of the runs may be lost"
    cost, high = (f"{_cost(c, columns)} {columns.unit}" for c in (headline.expected, headline.high))
    advice = use if result.verdict.may_copy else f"if you {use}"
    beyond = ""
    if result.verdict.decision == Decision.MOVES:
        beyond = f"; the optimum moves, so do not copy it beyond these {plural(columns.scale)}"
    return f"{advice}: the expected cost is {cost}, at most {high}{beyond}"


def remedy(result: TransferResult, analysis: TransferAnalysis) -> str:
    """Return the runs that would settle a verdict: command lines of our own sweeps, else sentences."""
    batch, command = result.next_batch, analysis.table.command
    if batch is None:
        return ""
    if command and result.sequence is not None:
        return f"{command} --until-settled"
    between = " && " if _is_ours(analysis.columns, command) else "; "
    return between.join(commands(batch, analysis.columns, command))


def commands(batch: Batch, columns: Columns, command: str | None) -> tuple[str, ...]:
    """Return the command lines that run a batch of an experiment's script; for other tables sentences."""
    groups: dict[tuple[float, int], list[str]] = {}
    for cell in sorted(batch.cells, key=lambda c: (c.scale, c.seeds, c.values)):
        values = ", ".join(f"2^{x:.4g}" for x in cell.values)
        groups.setdefault((cell.scale, cell.seeds), []).append(f"({values})" if cell.beside else values)
    axes = {"compare": columns.parametrization, "scale": columns.scale, "tune": columns.hyperparameter}
    lines = []
    for (scale, seeds), grid in groups.items():
        values = " ".join(grid)
        if _is_ours(columns, command):
            compared, scaled, tuned = (
                f"--{role} {CONFIGURED[column].field}=" for role, column in axes.items()
            )
            lines.append(
                f"{command} {compared}{batch.parametrization} {scaled}{scale:g} --num-seeds {seeds} "
                f"{tuned}{values.replace(' ', ',')}"
            )
        else:
            many = "1 seed" if seeds == 1 else f"{seeds} seeds each"
            tuned, at = ", ".join(map(label, columns.tuned)), point(columns.scale, scale)
            lines.append(f"add {tuned} {values} at {at}, {many}")
    return tuple(lines)


def _is_ours(columns: Columns, command: str | None) -> bool:
    axes = {columns.parametrization, columns.scale, *columns.tuned}
    return command is not None and not columns.tuned_beside and set(columns.along) <= axes <= set(CONFIGURED)


def price(batch: Batch) -> str:
    """Return the cost of a batch, beside the cost so far and until the verdict."""
    costs, at = batch.costs, ""
    # Runs of other sizes count as so many of the smallest: they are no number of runs to start.
    if not costs.is_measured and math.isfinite(costs.smallest):
        at = f" at {point(costs.scale, costs.smallest)}"
    cost, spent = amount(costs, batch.cost), amount(costs, batch.spent)
    parts = [f"next batch: {'as dear as ' * bool(at)}{cost}{at}", f"spent so far: {spent}"]
    if math.isinf(batch.to_verdict):
        parts.append("total to a verdict: unknown")
    elif math.isfinite(batch.to_verdict):
        parts.append(f"total to a verdict: about {amount(costs, batch.to_verdict)}")
    if costs.scale:
        power_law = f"cost ∝ {label(costs.scale)}^{costs.exponent:.1f}"
        parts.append(f"{'measured' if costs.is_measured else 'assumed'}: {power_law}")
    return "; ".join(parts)


def status(optimum: Optimum, unit: str = "nat") -> str:
    """Return the state of an optimum in its grid, with what to do."""
    if optimum.status == Status.LOWER:
        return f"at or below 2^{optimum.best_x:.4g}, the lower edge: extend the grid downwards"
    if optimum.status == Status.UPPER:
        return f"at or above 2^{optimum.best_x:.4g}, the upper edge: extend the grid upwards"
    if optimum.status == Status.NO_RUN:
        return "unknown, since every run diverged: extend the grid downwards"
    if optimum.status == Status.FLAT:
        near = f"2^{optimum.band_low:.4g} to 2^{optimum.band_high:.4g}"
        within = f"within {optimum.epsilon:.3g} {unit} of the best"
        return f"flat, so a wide interval: from {near} the expected loss is {within}"
    if not optimum.is_fitted:
        side = "below" if optimum.missed_by > 0 else "above"
        return (
            f"{optimum.status}; the fit lies {abs(optimum.missed_by):.2g} {unit} {side} the runs at "
            f"2^{optimum.missed_x:.4g}, more than their errors allow"
        )
    return optimum.status


def score_sentence(one: Score, columns: Columns, name: str = "") -> str:
    """Return a prediction beside its outcome."""
    p, measured = one.prediction, functools.partial(names.measured, columns.loss_name, columns.unit)
    low, high = p.interval
    parts = [
        f"{name or names.rule_name(p.compared)}: at {point(p.scale_column, p.scale)}, predicted on "
        f"{p.made_at[:10]} from {p.rows} runs: {label(p.hyperparameter)} {power(p.x, '.2f')} "
        f"(95 % {plain(low)} to {plain(high)})"
    ]
    if math.isfinite(one.x):
        parts.append(f"measured {power(one.x, '.2f')}, {_inside(one.is_inside)}")
    else:
        parts.append("the optimum is not known")
    if p.loss is not None and math.isfinite(one.loss):
        loss, least, most = p.loss
        parts.append(f"{measured(loss, words='predicted ')} ({names.interval(least, most)})")
        parts.append(f"measured {one.loss:.3f}, {_inside(one.is_loss_inside)}")
    elif math.isfinite(one.loss):
        parts.append(f"{measured(one.loss)}, not predicted")
    return "; ".join(parts)


def _inside(is_inside: bool | None) -> str:
    return "inside the interval" if is_inside else "outside the interval"


def summary(analysis: TransferAnalysis, scores: Sequence[Score] = ()) -> str:
    """Return notes, verdicts and their details as text, a line each."""
    lines = [f"note: {note}" for note in notes(analysis)]
    for result in analysis.results:
        lines.append(verdict(result, analysis, scores))
        lines += [f"  {line}" for line in details(result, analysis)]
    return "\n".join(lines)


def to_dict(analysis: TransferAnalysis, scores: Iterable[Score] = ()) -> dict[str, Any]:
    """Return an analysis as plain values, with its sentences, for JSON."""
    scores = [*scores]
    plain_values = analysis.to_dict() | {"notes": notes(analysis)}
    for values, result in zip(plain_values["results"], analysis.results, strict=True):
        _add_sentences(values, result, analysis, scores)
        for number_of, part in enumerate(analysis.parts if result.parts else ()):
            values["each"][number_of]["hyperparameter"] = part.hyperparameter
            _add_sentences(values["each"][number_of], result.parts[number_of], part, ())
    scored = [
        one.to_dict() | {"sentence": score_sentence(one, analysis.columns, one.prediction.compared)}
        for one in scores
    ]
    return plain_values | ({"predictions": scored} if scored else {})


def _add_sentences(
    values: dict[str, Any], result: TransferResult, analysis: TransferAnalysis, scores: Iterable[Score]
) -> None:
    columns = analysis.columns
    values["verdict"] |= {
        "sentence": verdict(result, analysis, scores, result.compared),
        "settle": remedy(result, analysis),
    }
    for optimum, of_scale in zip(values["optima"], result.optima, strict=True):
        optimum["sentence"] = status(of_scale, columns.unit)
    if result.law.why_not is not None:
        values["law"]["why_not"] = because(result.law.why_not, columns)
    if result.next_batch is not None:
        values["next"] = batch_to_dict(result.next_batch, columns)
    if result.sequence is not None:
        stops = result.sequence.stops
        values["sequence"]["stops"] = because(stops, columns) if stops else ""


def batch_to_dict(batch: Batch, columns: Columns) -> dict[str, Any]:
    return batch.to_dict() | {"reason": because(batch.reason, columns)}
