"""Sentences about an analysis, for reports and the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any

import pandas as pd

from mup_tpu.analysis.ingest.table_columns import means
from mup_tpu.analysis.transfer import AtZero, TransferAnalysis, TransferResult
from mup_tpu.config import Trial
from mup_tpu.config.columns import COLUMNS, CONFIGURED, configured, label, write, write_scale
from mup_tpu.config.values import counted
from mup_tpu.plots import name

_MADE = (
    "dataset", "data_fingerprint", "tokens", *(column for column in CONFIGURED if column != "corpus"),
    "device", "versions", "git_commit",
)  # fmt: skip
_ALWAYS = (
    "architecture", "width", "depth", "parametrization", "sequence_length", "batch_size", "optimizer", "lr",
    "steps_planned", "schedule", "loss_kind", "precision",
)  # fmt: skip
"""Settings that are shown although they are the defaults."""
_SNAKE = re.compile(rf"\b(?:{'|'.join(column for column in COLUMNS if '_' in column)})\b")
"""Names of columns that are no words of plain text."""
_MOST_VALUES = 8
"""Most values of a column that are written one by one."""


def said(text: str, *columns: str, compares: str = "parametrization") -> str:
    """A sentence of the analysis for people: μP for mup, labels for names of columns.

    Args:
        text: the sentence, which may begin with a compared value and a colon.
        columns: further names to replace, which could be words of plain text: lr, flops.
        compares: column of the compared value.
    """
    compared, colon, rest = text.partition(": ")
    text = f"{name(compared, compares)}{colon}{rest}" if colon else text
    for column in columns:
        text = re.sub(rf"(?<!\w){re.escape(column)}(?!\w)", lambda found: label(found[0]), text)
    return _SNAKE.sub(lambda found: label(found[0]), text)


def number(value: float, digits: int) -> str:
    """A number with `digits` decimals: "-" where unknown, never −0.00."""
    if math.isnan(value):
        return "-"
    return f"{round(value, digits) + 0.0:.{digits}f}" if math.isfinite(value) else "∞" if value > 0 else "−∞"


def details(result: TransferResult, analysis: TransferAnalysis) -> list[str]:
    """Lines below a verdict; the advice comes first."""
    lines = []
    if advice := recommendation(result, analysis.scale, analysis.hyperparameter):
        lines.append(advice)
    if result.sequence is not None and result.sequence.stops:
        lines.append(f"the sequence ends here: {result.sequence.stops}")
    elif result.next_batch is not None:
        lines += [
            f"to settle it: {result.verdict.settle}",
            f"{result.next_batch.reason}; {result.next_batch.price()}",
        ]
    lines += [_zero_line(zero, result) for zero in result.at_zero]
    wider = result.wider_is_better
    if wider.pairs:
        word = "wider" if means(analysis.scale) == "width" else "larger"
        line = f"{word} is better in {wider.held} of {wider.pairs} comparisons of final losses"
        if wider.optima:
            line += f", at the optima in {wider.optima_held} of {wider.optima}"
        lines.append(line)
    return [*lines, *filter(None, [_compute_line(result)])]


def _compute_line(result: TransferResult) -> str:
    """The headline regret as compute, or why it is not given; "" if it is not estimated."""
    headline = result.headline_regret
    if headline is None:
        return ""
    if math.isfinite(headline.compute_share):
        share = f"{headline.compute_share:.0%} of its compute"
        interval = f"95 % {headline.compute_low:.0%} to {headline.compute_high:.0%}"
        target = write_scale("", headline.target)
        return f"that regret is like training the model of {target} with {share} ({interval})"
    why = result.law.why_not or "the irreducible loss E may be as high as the loss there"
    return f"compute-equivalent of that regret not given: {why}" if headline.status == "estimated" else ""


def recommendation(result: TransferResult, scale: str, hyperparameter: str) -> str:
    """Advice on taking the smallest scale's optimum at the largest, with its cost; "" if unknown."""
    headline = result.headline_regret
    if headline is None:
        return ""
    at = {o.scale: o for o in result.optima}
    source, target = (write_scale(scale, s) for s in (headline.source, headline.target))
    value = f"{label(hyperparameter)} {power(at[headline.source].x, '.1f')}"
    take = f"take {value} from {label(scale)} {source} to {target}"
    if result.verdict.decision == "DRIFTS":
        there = at[headline.target]
        if there.is_bracketed:
            return f"do not {take}: {power(there.x, '.1f')} is the optimum there"
        return f"do not {take}: its optimum is {there.sentence()}"
    if headline.status != "estimated":
        return ""
    most = f"{headline.high:.3f}" if math.isfinite(headline.high) else "an unknown amount"
    advice = take if result.verdict.decision == "TRANSFERS" else f"if you {take}"
    return f"{advice}: expected cost {headline.value:.3f} nat, at most {most}"


def _zero_line(zero: AtZero, result: TransferResult) -> str:
    """Loss at hyperparameter 0, beside the best one above 0."""
    best = next((o.loss for o in result.optima if o.scale == zero.scale), math.nan)
    at = write_scale("", zero.scale)
    line = f"at 0, scale {at}: loss {zero.loss:.4f} ± {zero.error:.4f}, left out of the fit"
    if math.isfinite(best) and zero.loss < best - 2 * zero.error:
        return f"{line}; {best - zero.loss:.4f} below the best of the others: the best value may be 0"
    return line


def how_made(source: pd.DataFrame) -> list[tuple[str, str]]:
    """Number of runs, and names and values of their settings that vary or are not the defaults."""
    made = [("runs", str(len(source)))]
    if "status" in source:
        made.append(("ended", counted(source["status"].value_counts().items())))
    if "wall_time_s" in source:
        made.append(("training time, all runs", f"{source['wall_time_s'].sum() / 60:.1f} min"))
    usual = {name: value for name, value in configured(Trial()).items() if name not in _ALWAYS}
    for column in _MADE:
        if column in source:
            values = sorted(source[column].dropna().unique().tolist())
            if values and not (column in usual and values == [usual[column]]):
                made.append((label(column), _written(column, values)))
    return [*made, ("all other settings", "the defaults")]


def _written(column: str, values: list[Any]) -> str:
    """Values of a column, or the range of many."""
    if len(values) > _MOST_VALUES and isinstance(values[0], int | float):
        return f"{len(values)} values, {_readable(column, values[0])} to {_readable(column, values[-1])}"
    return ", ".join(dict.fromkeys(_readable(column, v) for v in values))


def _readable(column: str, value: Any) -> str:
    if column == "versions":
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # not written by this program
            return ", ".join(f"{package} {number}" for package, number in json.loads(value).items())
        return str(value)
    return name(value) if column == "parametrization" else write(column, value)


def power(x: float, digits: str = ".4g") -> str:
    """A power of two and its value: 2^-5.53 = 0.0216."""
    exponent = f"{x:{digits}}"
    return f"2^{exponent if float(exponent) else exponent.lstrip('-')} = {2.0**x:.3g}"
