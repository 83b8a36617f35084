"""The target of a study: one training with the values that its runs predict, in a folder of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mup_tpu.analysis import JointPredictions
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.planned import Planned, predict_planned
from mup_tpu.analysis.prediction import Predictions, to_keep
from mup_tpu.config.options import TransferOptions
from mup_tpu.errors import ConfigError
from mup_tpu.store.header import KeptPrediction, keep_predictions
from mup_tpu.study.study import Study
from mup_tpu.words.plans import recipe_lines


def target_study(path: str, target: TransferOptions, results: str | None) -> tuple[Study, list[str]]:
    """Return a study of the predicted values at a target, and what is predicted, a sentence each.

    The target is that of a plan in the folder, or `target.at`; the prediction is kept for its score.

    Raises:
        ConfigError: the target lacks a value, or a rule has to be chosen.
        TableError: nothing can be predicted.
    """
    source = Study.load(path)
    space = source.space
    rules = {str(next(iter(point.values()), space.name)): point for point in space.compare}
    name = next(iter(target.compare or rules))
    if name not in rules or len(rules) > 1 and not target.compare:
        raise ConfigError(
            f"results folder {path} compares {', '.join(rules)}: give --compare with one of them"
        )
    point: dict[str, Any] = {}
    if (made := predict_planned(path)) is not None:
        if target.at:
            raise ConfigError(
                f"at {target.at[0]!r}: the target of {path} is its plan's; plan again for another"
            )
        point = {key: made.values[key] for key in space.scale[0] if key in made.values}
        planned = Planned.load(path)
        assert planned is not None
        measure = point.setdefault(space.measured_by, planned.target.get(space.measured_by, math.nan))
        best = {one.hyperparameter: one.value for one in made.optima}
        kept, sentences = made.kept(name, space.measured_by, float(measure)), recipe_lines(made)
    else:
        point, _ = target.split(space.scale[0])
        if missing := [key for key in space.scale[0] if key not in point]:
            raise ConfigError(f"at {', '.join(target.at)}: {', '.join(missing)} of the target is missing")
        predicted = source.predict(**{space.measured_by: point[space.measured_by]})
        parts = predicted.parts if isinstance(predicted, JointPredictions) else (predicted,)
        best, kept, sentences = {}, list[KeptPrediction](), str(predicted).splitlines()
        for part in parts:
            one = replace(part, predictions=(part.of(name),))
            best[part.hyperparameter] = one.predictions[0].value
            kept += to_keep(one, load_table(path)) if isinstance(predicted, Predictions) else []
    # A single value is no design of several: the others are settings.
    first, *others = best
    settings = dict(space.settings) | {key: best[key] for key in others}
    study = Study(
        results or f"{path.rstrip('/')}_transfer",
        scale=[{key: type(space.scale[0][key])(value) for key, value in point.items()}],
        tune={first: [best[first]]},
        compare={key: [value] for key, value in rules[name].items()},
        seeds=target.num_seeds,
        settings=settings,
        name=f"{space.name}_transfer",
        measured_by=space.measured_by,
    )
    study.to_frame()  # writes the folder
    if not rules[name]:  # then the study's name stands for the rule
        kept = [replace(one, compared=study.space.name) for one in kept]
    keep_predictions(study.folder, kept)
    return study, sentences
