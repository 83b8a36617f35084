"""Zero-shot transfer: the best trials of a search, or the optimum that a sweep predicts, at the target.

μP transfers learning rate, schedule, init and multipliers across width. It does not transfer regularisation
(weight decay, dropout), which depends on model and data size: Yang et al. 2022 (Tensor Programs V), table 2.
Other parametrizations declare the scales along which their optimum stays.
"""

from __future__ import annotations

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
from mup_tpu.analysis import analyze
from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.planned import Planned, predict_planned
from mup_tpu.analysis.prediction import Score, Target, predict_analysis, to_keep
from mup_tpu.config import RunOptions, SweepOptions, Trial, columns, field_column
from mup_tpu.config.columns import configured
from mup_tpu.config.grid import MOST_TRIALS
from mup_tpu.config.options import TransferOptions
from mup_tpu.config.toml import from_dict
from mup_tpu.config.values import require_one_of
from mup_tpu.errors import ConfigError, StoreError, TableError, raised_as
from mup_tpu.jobs.pack_job import describe
from mup_tpu.models import sizes
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.store import Store, is_search, load_axes, load_runs
from mup_tpu.store.header import KeptPrediction, keep_predictions
from mup_tpu.tuning.runner import Corpora, Packs
from mup_tpu.tuning.target import Goal
from mup_tpu.words.plans import recipe_lines
from mup_tpu.words.predictions import summary
from mup_tpu.words.verdicts import score_sentence

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
class Choice:
    """A stored trial to train at the target, with the value for the target."""

    trial: Trial
    loss: float  # loss of the stored trial, nat per token
    sentence: str = ""  # where the value comes from
    is_predicted: bool = False
    """Whether its value is the optimum that its rule predicts at the target, not the best so far."""
    predictions: tuple[KeptPrediction, ...] = ()
    """One a hyperparameter, where runs at the target score them: not of other steps or batch sizes."""


def _finished(results: str) -> pd.DataFrame:
    if (runs := load_runs(results).query("status == 'finished'")).empty:
        raise StoreError(f"results folder {results} holds no finished trial")
    return runs


def _choice(row: Mapping[Any, Any], results: str) -> Choice:
    misfit = f"results folder {results} has a row whose config is no JSON of a trial"
    with raised_as(StoreError, misfit, (TypeError, ValueError)):
        return Choice(from_dict(Trial, json.loads(row["config"])), float(row["loss"]))


def best_trial(results: str, rule: str | None = None) -> Choice:
    finished = _finished(results)
    of_rule = finished[finished[field_column("parametrization")] == rule]
    (row,) = (finished if of_rule.empty else of_rule).nsmallest(1, "loss").to_dict("records")
    return _choice(row, results)


def target_trials(
    source: Trial, target: Mapping[str, Any], rule: str, num_seeds: int = 1, **changes: int | str | None
) -> list[Trial]:
    """Return trials with the source's hyperparameters at the target, whose fields grow ({"depth": 8}).

    `changes` are of other fields; None changes nothing.
    """
    fields = source.flat()
    for name, value in target.items():
        source.replace(**{name: value})  # checks name and value
        if not value > fields[name]:
            small = f"the search's {name} {fields[name]}"
            raise ConfigError(f"{name} {value} is not above {small}; give a larger one")
    if num_seeds > MOST_TRIALS:
        raise ConfigError(
            f"num_seeds {num_seeds} makes {num_seeds:,} trials; at most {MOST_TRIALS:,} are planned"
        )
    changed = {name: value for name, value in changes.items() if value is not None}
    followed = {*PARAMETRIZATIONS[rule].follows}
    followed |= {"batch_size", "tokens"} if source.optimizer.rules.decay == "timescale" else set()
    follows = {name: name in followed for name in ("depth", "batch_size")} | {"steps": "tokens" in followed}
    # A rule of depth, batch size or steps without a base would take the target for its own base, and scale
    # nothing.
    bases = {f"base_{n}": fields[n] for n, is_so in follows.items() if is_so and not fields[f"base_{n}"]}
    shared = {"parametrization": rule, **bases, **changed, **target}
    return [source.replace(seed=seed, **shared) for seed in range(num_seeds)]


def transfer_warnings(source: Trial, target: Trial, predicted: Sequence[str] = ()) -> list[str]:
    """Warn of changes from source to target that the parametrization does not cover.

    Where values are predicted, the columns of which are given, a rule need not keep the optimum in place.
    """
    warnings = []
    rule = PARAMETRIZATIONS[source.model.parametrization]
    if not rule.transfers and not predicted:
        name = source.model.parametrization
        warnings.append(f"the search was in {name}: only μP keeps the optimum in place")
    if target.optimizer.weight_decay > 0 and "weight_decay" not in predicted:
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


class Transfer:
    """Trials at a target: the best one of a search, or the optimum that a sweep predicts for each rule.

    `path` is the results folder of the search or sweep.
    """

    def __init__(self, path: str, target: TransferOptions) -> None:
        for name in target.compare or ():
            require_one_of("compare", name, tuple(PARAMETRIZATIONS))
        load_runs(path, ())  # a folder without runs is named before a missing target
        axes, planned = load_axes(path), Planned.load(path)
        self.tuned = axes.tuned
        if planned is not None:  # sizes that are not given are the plan's target's
            given = {part.partition("=")[0].strip() for text in target.at for part in text.split(",")}
            sizes_at = [f"{n}={planned.values[n]}" for n in axes.scale if n not in given]
            target = replace(target, at=(*target.at, *sizes_at))
        self._fields, changes = target.split(axes.scale)
        self._name = f"{Path(path).name}_transfer"
        if is_search(path):
            best = {rule: best_trial(path, rule) for rule in target.compare or ("mup", "sp")}
        else:
            best = {choice.trial.model.parametrization: choice for choice in choices(path, target)}
        self.chosen = [*best.values()]
        self.trials = [
            trial
            for rule, source in best.items()
            for trial in target_trials(source.trial, self._fields, rule, target.num_seeds, **changes)
        ]

    @property
    def warnings(self) -> list[str]:
        source = self.chosen[0].trial
        if not self.chosen[0].is_predicted:
            return transfer_warnings(source, self.trials[0])
        return transfer_warnings(source.replace(**self._fields), self.trials[0], self.tuned)

    @property
    def size(self) -> str:
        return describe(self.trials[0], tuple(self._fields))

    @property
    def origin(self) -> list[str]:
        first = self.chosen[0]
        searched = f"{describe(first.trial, (*self._fields,))}, searched: loss {first.loss:.4f} nat/token"
        return [choice.sentence for choice in self.chosen if choice.sentence] or [searched]

    def keep(self, results: str) -> None:
        keep_predictions(results, [made for choice in self.chosen for made in choice.predictions])

    def run(self, results: str, where: SweepOptions, run: RunOptions, console: Console) -> Counter[str]:
        store = Store(results, self._name)
        with Packs(store, Corpora(self.trials), tuple(self._fields), where, run, console) as packs:
            outcome = packs.run(dict.fromkeys(self.trials))
            packs.say_cost(outcome)
            return outcome

    def reached(self, results: str) -> pd.DataFrame:
        ids = map(Corpora(self.trials).trial_id, self.trials)
        runs = load_runs(results)
        return runs[runs["trial_id"].isin([*ids])].sort_values("loss")

    def outcomes(self, runs: pd.DataFrame) -> list[str]:
        """Compare each prediction with the loss of the runs at the predicted value, in a sentence each."""
        sentences = []
        for choice in self.chosen:
            rule = choice.trial.model.parametrization
            rows = runs[(runs[field_column("parametrization")] == rule) & (runs["status"] == "finished")]
            for made in choice.predictions:
                rows = rows[np.isclose(rows[made.hyperparameter], 2**made.x, rtol=1e-6)]
            for made in choice.predictions if len(rows) else ():
                score = Score(made, math.nan, math.nan, float(rows["loss"].mean()))
                sentences.append(score_sentence(score, Columns()))
        return sentences


def tuned_words(tuned: Sequence[str], row: Mapping[Any, Any]) -> str:
    return ", ".join(f"{columns.label(name)} {columns.write(name, row[name])}" for name in tuned)


def choices(path: str, target: TransferOptions) -> list[Choice]:
    """Choose a trial for each rule of the target, with its predicted optimum there.

    If nothing can be predicted (one scale, or a target along another one), the rule's best trial at the
    sweep's largest scale is taken.
    """
    axes, finished = load_axes(path), _finished(path)
    scale, tuned, rule_column = axes.size, [*axes.tuned], field_column("parametrization")
    stored_rules = sorted(finished[rule_column].dropna().unique())
    rules = target.rules(stored_rules, path)
    fields, changes = target.split(axes.scale)
    analysis, why_not, planned = None, "", Planned.load(path)
    try:
        analysis = analyze(path, whole=False)
    except TableError as error:
        why_not = str(error)

    def measure(goal: Trial) -> float:
        measures = configured(goal)
        if scale not in measures:
            measures |= sizes(goal, data.load(goal.data).vocab_size)
        if scale not in measures:
            raise ConfigError(f"the scale {scale} of a target is not known before it is run")
        return float(measures[scale])

    chosen = []
    for rule in rules:
        rows = finished[finished[rule_column] == rule]
        largest = rows[rows[scale] == rows[scale].max()]
        means = largest.groupby([axes.compared, *tuned])["loss"].transform("mean")
        choice = source = _choice(largest.loc[means.idxmin()].to_dict(), path)
        values, why = configured(source.trial), why_not
        name = str(values[axes.compared])
        if planned is not None and {*fields} <= {*axes.scale}:
            recipe = predict_planned(path, Goal(fields, planned.follows, {}, base=source.trial).sizes(fields))
            assert recipe is not None
            size = measure(source.trial.replace(**changes, **fields))
            kept = () if changes else tuple(recipe.kept(name, scale, size))
            best = {f: one.value for f, one in zip(axes.tune, recipe.optima, strict=True)}
            sentence = "\n  ".join(recipe_lines(recipe))
            choice = Choice(source.trial.replace(**best), source.loss, sentence, True, kept)
        elif analysis is not None and not {*fields} <= {*axes.scale}:
            why = f"the sweep's scale is {columns.label(scale)}, not {', '.join(fields)}"
        elif analysis is not None and all(result.compared != name for result in analysis.results):
            why = "the verdict takes none of its rows"
        elif analysis is not None:
            only = replace(analysis, results=tuple(r for r in analysis.results if r.compared == name))
            size = measure(source.trial.replace(**changes, **fields))
            at = Target(", ".join(f"{n}={v}" for n, v in fields.items()), size)
            try:
                made = predict_analysis(only, (at,))
            except TableError as error:
                why = str(error)
            else:
                field_of = dict(zip(tuned, axes.tune, strict=True))
                best = {field_of[one.hyperparameter]: one.value for one in made.predictions}
                is_scored = all(source.trial.flat()[n] == v for n, v in changes.items())
                kept = tuple(to_keep(made)) if is_scored else ()
                choice = Choice(source.trial.replace(**best), source.loss, summary(made), True, kept)
        if not choice.sentence:
            place = "its scale"
            if scale in values:
                place = f"{columns.label(scale)} {columns.write_scale(scale, values[scale])}"
            words = (
                f"{source.trial.model.parametrization}: nothing predicted ({why}); the best of {place} is "
                f"taken: {tuned_words(tuned, values)}, loss {source.loss:.4f} nat/token"
            )
            choice = replace(source, sentence=words)
        chosen.append(choice)
    return chosen
