"""Hyperparameters that a sweep gives a larger model: each rule's optimum, predicted at the target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from mup_tpu import data
from mup_tpu.analysis import RunTable, TransferAnalysis, analyze, load_table
from mup_tpu.analysis.prediction import predict_analysis
from mup_tpu.analysis.scores import to_keep
from mup_tpu.analysis.targets import Target as At
from mup_tpu.config import columns, field_column
from mup_tpu.config.columns import configured
from mup_tpu.errors import ConfigError, TableError
from mup_tpu.models import sizes
from mup_tpu.store import StoredAxes, load_axes
from mup_tpu.store.predictions import KeptPrediction
from mup_tpu.tuning.found import Found, finished_runs, found_in
from mup_tpu.tuning.target import Target
from mup_tpu.words.predictions import prediction, prediction_details

if TYPE_CHECKING:
    from mup_tpu.config import Trial


@dataclass(frozen=True)
class Choice:
    """A sweep's trial to be trained at the target, with the value for the target."""

    source: Found
    said: str
    """Sentence on where its value comes from."""
    is_predicted: bool = False
    """Whether its value is its rule's predicted optimum at the target; else it is its own best value."""
    prediction: KeptPrediction | None = None
    """The prediction, where a run of the trial scores it: not with other steps or another batch size."""


def choices(path: str, target: Target) -> list[Choice]:
    """A choice for each rule of the target, with its predicted optimum there.

    If nothing can be predicted (one scale, or a target along another one), the rule's best trial at the
    sweep's largest scale is taken.
    """
    axes, finished = load_axes(path), finished_runs(path)
    rule_column = field_column("parametrization")
    there = sorted(finished[rule_column].dropna().unique())
    rules = target.rules(there if len(there) == 1 else ("mup",))
    lender = next((rule for rule in (*rules, "mup") if rule in there), there[0])
    if lender not in rules and (lender != "mup" and len(there) > 1 or target.compare is None):
        raise ConfigError(
            f"results folder {path} has no trial of {rules[0]}: give --compare {' or '.join(there)}"
        )
    analysis, table, why = _analysis(path)
    found = []
    for rule in rules:
        own = finished[finished[rule_column] == (rule if rule in there else lender)]
        source = found_in(_best_row(own, axes), path)
        choice = Choice(source, _best_said(source, axes, why))
        if analysis is not None and table is not None:
            choice = _predicted(source, target, axes, analysis, table)
        if rule not in there:  # its result does not score the lender's prediction
            trial = choice.source.trial.replace(parametrization=rule)
            choice = Choice(Found(trial, source.loss), f"{rule} takes the value of {choice.said}")
        found.append(choice)
    return found


def _analysis(path: str) -> tuple[TransferAnalysis | None, RunTable | None, str]:
    """Analysis of a sweep, or the reason why there is none."""
    try:
        table = load_table(path)
        return analyze(table), table, ""
    except TableError as error:
        return None, None, str(error)


def _best_row(rows: pd.DataFrame, axes: StoredAxes) -> dict[Any, Any]:
    """Row of the best tuned value at the largest scale, by its mean over seeds."""
    scale, tuned = axes.scale.column, axes.tune.column
    largest = rows[rows[scale] == rows[scale].max()]
    cells = [axes.compare.column, tuned]
    means = largest.groupby(cells)["loss"].transform("mean")
    return dict(largest.loc[means.idxmin()].to_dict())


def _best_said(source: Found, axes: StoredAxes, why: str) -> str:
    tuned, scale = axes.tune.column, axes.scale.column
    values = configured(source.trial)
    at = (
        f"{columns.label(scale)} {columns.write_scale(scale, values[scale])}"
        if scale in values
        else "its scale"
    )
    return (
        f"{source.trial.model.parametrization}: nothing predicted ({why}); the best of {at} is taken: "
        f"{columns.label(tuned)} {columns.write(tuned, values[tuned])}, loss {source.loss:.4f} nat/token"
    )


def _predicted(
    source: Found, target: Target, axes: StoredAxes, analysis: TransferAnalysis, table: RunTable
) -> Choice:
    """Choice of a rule by its prediction at the target; without one, its best trial."""
    fields, changes = target.split(axes.scale.fields)
    compared = str(configured(source.trial)[axes.compare.column])
    only = [result for result in analysis.results if result.compared == compared]
    if not set(fields) <= set(axes.scale.fields):
        why = f"the sweep's scale is {columns.label(axes.scale.column)}, not {', '.join(fields)}"
    elif len(axes.tune.fields) > 1 or not only:
        why = "its tuned value is not one field" if only else "the verdict takes none of its rows"
    else:
        goal = source.trial.replace(**changes, **fields)
        at = At(", ".join(f"{n}={v}" for n, v in fields.items()), _measure(goal, axes.scale.column))
        try:
            predictions = predict_analysis(replace(analysis, results=tuple(only)), (at,))
        except TableError as error:
            why = str(error)
        else:
            (made,), (kept,) = predictions.predictions, to_keep(predictions, table)
            own = source.trial.flat()
            is_scored = all(own[n] == v for n, v in changes.items())
            (field,) = axes.tune.fields
            trial = source.trial.replace(**{field: made.value})
            said = "\n  ".join([prediction(made, predictions), *prediction_details(made, predictions)])
            return Choice(Found(trial, source.loss), said, True, kept if is_scored else None)
    return Choice(source, _best_said(source, axes, why))


def _measure(trial: Trial, column: str) -> float:
    values = configured(trial)
    if column not in values:
        values |= sizes(trial, data.load(trial.data).vocab_size)
    if column not in values:
        raise ConfigError(f"the scale {column} of a target is not known before it is run")
    return float(values[column])
