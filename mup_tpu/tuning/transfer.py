"""Zero-shot transfer: the best trials of a search, or the optimum that a sweep predicts, at the target.

μP transfers learning rate, schedule, init and multipliers across width. It does not transfer regularisation
(weight decay, dropout), which depends on model and data size: Yang et al. 2022 (Tensor Programs V), table 2.
Other parametrizations declare the scales along which their optimum stays.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mup_tpu import data
from mup_tpu.analysis import analyze, load_table
from mup_tpu.analysis.planned import Planned, predict_planned
from mup_tpu.analysis.prediction import predict_analysis
from mup_tpu.analysis.scores import Score, score, to_keep
from mup_tpu.analysis.targets import Target as At
from mup_tpu.config import MOST_TRIALS, RunOptions, SweepOptions, Trial, columns, field_column
from mup_tpu.config.columns import configured, label
from mup_tpu.config.options import TransferOptions
from mup_tpu.config.toml import stored_trial
from mup_tpu.errors import ConfigError, StoreError, TableError, raised_as
from mup_tpu.jobs.pack_job import describe
from mup_tpu.models import sizes
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.store import StoredAxes, is_search, load_axes, load_runs
from mup_tpu.store.header import KeptPrediction, keep_predictions
from mup_tpu.tuning.runner import Corpora
from mup_tpu.tuning.target import Goal
from mup_tpu.words.plans import planned_optimum
from mup_tpu.words.predictions import prediction, prediction_details
from mup_tpu.words.verdicts import score as score_sentence

if TYPE_CHECKING:
    from rich.console import Console


SOURCE = "Yang et al. 2022, Tensor Programs V, table 2"
_MOVES = {
    "width": "without a rule for width the best learning rate falls with it",
    "depth": "a rule for width says nothing of depth",
    "steps": "training time moves the optimum, by less in μP than in SP, but it moves",
    "batch_size": "the best learning rate depends on the batch size, which μP leaves out",
    "sequence_length": "the sequence length changes the batch in tokens",
    "corpus": "another corpus may have another optimum",
}


@dataclass(frozen=True)
class KnownTrial:
    """Trial of a search, and its loss (nat per token)."""

    trial: Trial
    loss: float


def finished_runs(results: str) -> pd.DataFrame:
    runs = load_runs(results)
    finished = runs[runs["status"] == "finished"]
    if finished.empty:
        raise StoreError(f"results folder {results} holds no finished trial to transfer from")
    return finished


def best_trials(results: str, count: int = 1, rule: str | None = None) -> list[KnownTrial]:
    """Return finished trials of least loss in a results folder, of one rule if the folder has any of it."""
    finished = finished_runs(results)
    of_rule = finished[finished[field_column("parametrization")] == rule]
    best = (finished if of_rule.empty else of_rule).nsmallest(count, "loss")
    return [known_trial(row, results) for row in best.to_dict("records")]


def known_trial(row: Mapping[Any, Any], results: str) -> KnownTrial:
    misfit = f"results folder {results} has a row whose config is no JSON of a trial"
    with raised_as(StoreError, misfit, (TypeError, ValueError)):
        return KnownTrial(stored_trial(json.loads(row["config"])), float(row["loss"]))


def target_trials(
    sources: Sequence[KnownTrial],
    target: Mapping[str, Any],
    parametrizations: Sequence[str],
    num_seeds: int = 1,
    **changes: int | str | None,
) -> list[Trial]:
    """Return trials with the same hyperparameters at the target.

    Args:
        sources: trials to transfer from.
        target: growing fields with their values at the target, such as {"width": 256} or {"depth": 8}.
        parametrizations: "mup" for the transfer; others, with the same hyperparameters, for comparison.
        num_seeds: seeds of each trial.
        changes: other fields to change; None changes nothing.

    Raises:
        ConfigError: the target is not larger than the source, or not allowed.
    """
    for name, value in target.items():
        sources[0].trial.replace(**{name: value})  # checks name and value
        small = max(f.trial.flat()[name] for f in sources)
        if not value > small:
            raise ConfigError(f"{name} {value} is not above the search's {name} {small}; give a larger one")
    if (count := len(sources) * len(parametrizations) * num_seeds) > MOST_TRIALS:
        raise ConfigError(
            f"num_seeds {num_seeds} makes {count:,} trials; at most {MOST_TRIALS:,} are planned"
        )
    changed = {name: value for name, value in changes.items() if value is not None}
    trials = []
    for source, rule in itertools.product([known.trial for known in sources], parametrizations):
        fields, is_timescale = source.flat(), source.optimizer.rules.decay == "timescale"
        # A rule of depth, batch size or steps without a base would take the target for its own base, and
        # scale nothing.
        bases = {
            f"base_{name}": fields[name]
            for name, follows in (
                ("depth", "depth" in PARAMETRIZATIONS[rule].follows),
                ("batch_size", is_timescale),
                ("steps", is_timescale),
            )
            if follows and not fields[f"base_{name}"]
        }
        for seed in range(num_seeds):
            trials.append(source.replace(parametrization=rule, seed=seed, **bases, **changed, **target))
    return trials


def transfer_warnings(source: Trial, target: Trial, is_predicted: bool = False) -> list[str]:
    """Warn of changes from source to target that the parametrization does not cover.

    Where the source is a prediction, its rule need not keep the optimum in place.
    """
    warnings = []
    rule = PARAMETRIZATIONS[source.model.parametrization]
    if not rule.transfers and not is_predicted:
        warnings.append(
            f"the search was in {source.model.parametrization}: only μP keeps the optimum in place"
        )
    if target.optimizer.weight_decay > 0:
        warnings.append(
            f"weight_decay {target.optimizer.weight_decay:g} is regularisation: its best value depends on "
            f"model and data size, and μP does not transfer it ({SOURCE})"
        )
    before_all, after_all = source.flat(), target.flat()
    stays = {*rule.transfers}
    stays |= {"batch_size"} if target.optimizer.batch_rule != "none" else set()
    stays |= {"tokens"} if target.optimizer.token_rule != "none" else set()
    for name, why in _MOVES.items():
        before, after = before_all[name], after_all[name]
        is_said = not rule.transfers and name == "width"
        scale = "tokens" if name == "steps" else name
        if before != after and scale not in stays and not is_said:
            warnings.append(f"{name} {before} became {after}: {why} ({SOURCE})")
    return warnings


def regret_against_sweep(runs: pd.DataFrame, sweep: str) -> list[dict[Any, Any]]:
    """Return loss minus the best of a sweep at the same scale and parametrization.

    A row for each parametrization of the sweep at that scale: loss, best and regret (nat per token).
    """
    best = best_of_sweep(sweep)
    reached = runs.groupby(list(best.index.names))["loss"].mean()
    table = pd.DataFrame({"loss": reached}).join(best.rename("best"), how="inner")
    return table.assign(regret=table["loss"] - table["best"]).reset_index().to_dict("records")


def best_of_sweep(sweep: str) -> pd.Series:
    """Return the mean loss at the best tuned value (nat per token), by parametrization and scale."""
    known, axes = load_runs(sweep), _axes(sweep)
    cell = ["parametrization", axes.scale.column]
    finished = known[known["status"] == "finished"]
    if finished.empty:
        raise StoreError(f"results folder {sweep} holds no finished trial to compare with")
    return finished.groupby([*cell, axes.tune.column])["loss"].mean().groupby(cell).min()


def _axes(path: str) -> StoredAxes:
    axes = load_axes(path)
    if axes.scale.is_study:
        raise StoreError(
            f"results folder {path} holds a study, whose training is your own: mup-tpu predict says the "
            f"value to train with at a larger {label(axes.scale.column)}"
        )
    return axes


class Transfer:
    """Trials at a target: of a search its best, of a sweep each rule's predicted optimum or its best few.

    Args:
        path: results folder of the search or sweep.
        target: where they go.
        sweep: results folder of a sweep at the target; its optimum is the reference of the regret.

    Raises:
        ConfigError: the target is not larger, or not allowed.
        StoreError: a folder holds no finished trial.
    """

    def __init__(self, path: str, target: TransferOptions, sweep: str | None = None) -> None:
        axes = _axes(path)
        self.sweep, self.tuned = sweep, axes.tune.column
        self._fields, changes = target.split(axes.scale.fields)
        self._name = f"{Path(path).name}_transfer"
        self.chosen: list[Choice] = []
        if target.top > 1 or is_search(path):
            best_of_rule = {rule: best_trials(path, target.top, rule) for rule in target.rules(("mup", "sp"))}
            self.trials = [
                trial
                for rule, best in best_of_rule.items()
                for trial in target_trials(best, self._fields, (rule,), target.num_seeds, **changes)
            ]
            self.source = next(iter(best_of_rule.values()))[0]
        else:
            self.chosen = choices(path, target)
            self.trials = [
                trial
                for choice in self.chosen
                for trial in target_trials(
                    [choice.source],
                    self._fields,
                    (choice.source.trial.model.parametrization,),
                    target.num_seeds,
                    **changes,
                )
            ]
            self.source = self.chosen[0].source
        if sweep is not None:
            best_of_sweep(sweep)  # raises before anything trains

    @property
    def warnings(self) -> list[str]:
        """Return warnings of changes that neither the parametrization nor the prediction covers."""
        source, is_predicted = self.source.trial, bool(self.chosen) and self.chosen[0].is_predicted
        if is_predicted:
            source = source.replace(**self._fields)
        return transfer_warnings(source, self.trials[0], is_predicted)

    @property
    def sizes(self) -> tuple[str, str]:
        return describe(self.source.trial, tuple(self._fields)), describe(self.trials[0], tuple(self._fields))

    @property
    def origin(self) -> list[str]:
        if not self.chosen:
            return [f"{self.sizes[0]}, searched: loss {self.source.loss:.4f} nat/token"]
        return [choice.sentence for choice in self.chosen]

    def keep(self, results: str) -> None:
        keep_predictions(results, [c.prediction for c in self.chosen if c.prediction is not None])

    def run(self, results: str, where: SweepOptions, run: RunOptions, console: Console) -> Counter[str]:
        from mup_tpu.tuning.sweep import run_trials

        return run_trials(self._name, self.trials, tuple(self._fields), results, where, run, console)

    def reached(self, results: str) -> pd.DataFrame:
        ids = map(Corpora(self.trials).trial_id, self.trials)
        runs = load_runs(results)
        return runs[runs["trial_id"].isin([*ids])].sort_values("loss")

    def outcomes(self, runs: pd.DataFrame) -> list[str]:
        """Compare each prediction with its result, in a sentence each.

        The loss is of the runs at the predicted value; the optimum is of the sweep at the target, where one
        is given.
        """
        sentences = []
        for choice in self.chosen:
            prediction = choice.prediction
            if prediction is None:
                continue
            rule, column = choice.source.trial.model.parametrization, field_column("parametrization")
            rows = runs[(runs[column] == rule) & (runs["status"] == "finished")]
            rows = rows[np.isclose(rows[self.tuned], 2**prediction.x, rtol=1e-6)]
            x = error = math.nan
            if self.sweep is not None:
                with contextlib.suppress(TableError):
                    scores = [s for s in score([prediction], analyze(self.sweep)) if math.isfinite(s.x)]
                    x, error = (scores[0].x, scores[0].error) if scores else (x, error)
            if len(rows) or math.isfinite(x):
                loss = float(rows["loss"].mean()) if len(rows) else math.nan
                sentences.append(score_sentence(Score(prediction, x, error, loss)))
        return sentences

    def regrets(self, runs: pd.DataFrame) -> list[dict[Any, Any]]:
        return [] if self.sweep is None else regret_against_sweep(runs, self.sweep)


@dataclass(frozen=True)
class Choice:
    """A sweep's trial to be trained at the target, with the value for the target."""

    source: KnownTrial
    sentence: str
    """Sentence on where its value comes from."""
    is_predicted: bool = False
    """Whether its value is its rule's predicted optimum at the target; else it is its own best value."""
    prediction: KeptPrediction | None = None
    """The prediction, where a run of the trial scores it: not with other steps or another batch size."""


def choices(path: str, target: TransferOptions) -> list[Choice]:
    """Choose a trial for each rule of the target, with its predicted optimum there.

    If nothing can be predicted (one scale, or a target along another one), the rule's best trial at the
    sweep's largest scale is taken.
    """
    axes, finished = load_axes(path), finished_runs(path)
    scale, tuned, rule_column = axes.scale.column, axes.tune.column, field_column("parametrization")
    stored_rules = sorted(finished[rule_column].dropna().unique())
    rules = target.rules(stored_rules if len(stored_rules) == 1 else ("mup",))
    lender = next((rule for rule in (*rules, "mup") if rule in stored_rules), stored_rules[0])
    if lender not in rules and (lender != "mup" and len(stored_rules) > 1 or target.compare is None):
        raise ConfigError(
            f"results folder {path} has no trial of {rules[0]}: give --compare {' or '.join(stored_rules)}"
        )
    fields, changes = target.split(axes.scale.fields)
    analysis, why_not = None, ""
    try:
        table = load_table(path)
        analysis = analyze(table)
    except TableError as error:
        why_not = str(error)
    chosen = []
    for rule in rules:
        rows = finished[finished[rule_column] == (rule if rule in stored_rules else lender)]
        largest = rows[rows[scale] == rows[scale].max()]
        means = largest.groupby([axes.compare.column, tuned])["loss"].transform("mean")
        source = known_trial(largest.loc[means.idxmin()].to_dict(), path)
        values, why, choice = configured(source.trial), why_not, None
        compared = str(values[axes.compare.column])
        if (planned := Planned.load(path)) is not None and {*fields} <= {*axes.scale.fields}:
            sizes_there = Goal(fields, planned.follows, {}, base=source.trial).sizes(fields)
            optimum = predict_planned(path, sizes_there)
            assert optimum is not None
            trial = source.trial.replace(learning_rate=2.0**optimum.x)
            words = "\n  ".join(planned_optimum(optimum))
            choice = Choice(KnownTrial(trial, source.loss), words, True)
        elif analysis is not None:
            only = tuple(result for result in analysis.results if result.compared == compared)
            if not set(fields) <= set(axes.scale.fields):
                why = f"the sweep's scale is {columns.label(scale)}, not {', '.join(fields)}"
            elif len(axes.tune.fields) > 1 or not only:
                why = "its tuned value is not one field" if only else "the verdict takes none of its rows"
            else:
                goal = source.trial.replace(**changes, **fields)
                at = At(", ".join(f"{n}={v}" for n, v in fields.items()), _measure(goal, scale))
                try:
                    predictions = predict_analysis(replace(analysis, results=only), (at,))
                except TableError as error:
                    why = str(error)
                else:
                    (made,), (kept,) = predictions.predictions, to_keep(predictions, table)
                    is_scored = all(source.trial.flat()[n] == v for n, v in changes.items())
                    trial = source.trial.replace(**{axes.tune.fields[0]: made.value})
                    details = prediction_details(made, predictions)
                    sentence = "\n  ".join([prediction(made, predictions), *details])
                    known = KnownTrial(trial, source.loss)
                    choice = Choice(known, sentence, True, kept if is_scored else None)
        if choice is None:
            place = "its scale"
            if scale in values:
                place = f"{columns.label(scale)} {columns.write_scale(scale, values[scale])}"
            choice = Choice(
                source,
                f"{source.trial.model.parametrization}: nothing predicted ({why}); the best of {place} is "
                f"taken: {columns.label(tuned)} "
                f"{columns.write(tuned, values[tuned])}, loss {source.loss:.4f} nat/token",
            )
        if rule not in stored_rules:  # its result does not score the lender's prediction
            trial = choice.source.trial.replace(parametrization=rule)
            choice = Choice(KnownTrial(trial, source.loss), f"{rule} takes the value of {choice.sentence}")
        chosen.append(choice)
    return chosen


def _measure(trial: Trial, column: str) -> float:
    values = configured(trial)
    if column not in values:
        values |= sizes(trial, data.load(trial.data).vocab_size)
    if column not in values:
        raise ConfigError(f"the scale {column} of a target is not known before it is run")
    return float(values[column])
