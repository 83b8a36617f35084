"""The target of a study's plan: times of somebody's trainer, to plan with, and the training that follows.

A few steps at some sizes give the times. The target is one training with the values that the runs predict, in
a folder of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from mup_tpu.analysis.load import named_loss
from mup_tpu.analysis.planned import Planned, predict_planned
from mup_tpu.analysis.prediction import to_keep
from mup_tpu.analysis.run_table import of_status, ranked
from mup_tpu.config import parse_number, unknown_key
from mup_tpu.config.columns import write
from mup_tpu.config.grid import Value
from mup_tpu.config.options import TransferOptions
from mup_tpu.errors import ConfigError, MupTpuError, StoreError
from mup_tpu.files import scratch_folder
from mup_tpu.jobs.this_machine import visible_gpus
from mup_tpu.store import load_runs
from mup_tpu.store.header import KeptPrediction, keep_predictions
from mup_tpu.study.study import Study
from mup_tpu.tuning.plan import Measured, Plan, Speed, plan
from mup_tpu.tuning.progress import starting
from mup_tpu.words.plans import at_words, recipe_lines

_FIRST_STEPS = 10
_LONGER = 4  # attempts to time enough steps
_ROUNDS = 3  # of timing the sizes that a plan chooses, and planning again


def probed_plan(trainer: Any, limit_s: float, console: Console, **arguments: Any) -> Plan:
    """Plan by measured times of a trainer, not by FLOPs; each timed training takes at most `limit_s`, s."""
    budget, base, workers = arguments.pop("budget"), arguments["base"], max(1, len(visible_gpus()))
    console.print(starting(f"times the trainer at a few sizes, each run within {limit_s:g} s", again=""))
    # Every size costs the same here, so that this first plan only names sizes.
    unknown = Speed(devices=1, measured=Measured(((0.0, 0.0),), 0.0))
    made = plan(budget="1000000000h", flops_per_second=unknown, **arguments)
    goal, rate = made.goal, made.rates[len(made.rates) // 2]
    times: dict[float, tuple[float, float]] = {}

    def seconds(values: Mapping[str, Any], names: Iterable[str]) -> float:
        """Return the time of one training."""
        at = at_words(values, [*dict.fromkeys(names)])
        with scratch_folder() as scratch:
            settings = {name: value for name, value in values.items() if name != "steps"}
            study = Study(
                scratch / "probe", scale={"steps": [values["steps"]]}, tune={made.tuned: [rate]},
                settings=settings, loss=getattr(base, "loss", None), config=getattr(base, "config", None),
            )  # fmt: skip
            try:
                study.run(trainer, workers=1, timeout=f"{limit_s:g}s", console=Console(quiet=True))
                row = load_runs(str(scratch / "probe")).iloc[0]
            except ConfigError:
                raise
            except MupTpuError as error:
                raise ConfigError(f"probe: the trainer cannot be timed at {at}: {error}") from None
            if row["status"] not in ("finished", "diverged"):
                why = row["reason"] or "no reason is known"
                raise ConfigError(
                    f"probe: the trainer {row['status']} at {at}: {why}; mend it or give a longer --probe"
                )
            return float(row["wall_time_s"])

    def time(values: Mapping[str, Any]) -> None:
        """Train a few steps, and a few more, for the time before the first step and that of a step."""
        work = round(math.log2(goal.work(values) / max(1, goal.steps(values)[0])), 6)
        if work in times:
            return
        others = {name: tried[len(tried) // 2] for name, tried in made.beside.items()}
        known = {**goal.settings, **others, **values}
        if "steps" not in known:
            raise ConfigError(
                "probe needs steps among the names of the study, so that a few of them can be timed"
            )
        names = [name for name in (*values, "steps") if isinstance(known[name], int | float)]
        steps = max(1, min(_FIRST_STEPS, int(known["steps"]) // 4))
        few = seconds(known | {"steps": steps}, names)
        more = int(steps * min(max(limit_s / 4 / max(few, 1e-3), 2.0), 20.0))
        for _ in range(_LONGER):
            many = seconds(known | {"steps": steps + more}, names)
            if many - few > few / 2 or many > limit_s / 4:
                break
            more *= 4  # the start took as long as these steps, and would hide them
        # Less than a tenth of the start is within its scatter.
        each = max(many - few, few / 10) / more
        start = max(few - steps * each, 0.0)
        times[work] = start, each
        at = at_words(values, [name for name in values if name != "steps"])
        known_as = "" if many - few > few / 10 else "at most "
        console.print(f"timed {at}: {known_as}{each:.2g} s a step, after {start:.2g} s")

    time(goal.values_at(goal.floors))
    for _ in range(_ROUNDS):
        points = tuple((work, math.log2(each)) for work, (_, each) in sorted(times.items()))
        start_s = max(start for start, _ in times.values())
        machine = Speed(devices=workers, measured=Measured(points, start_s))
        made, before = plan(budget=budget, flops_per_second=machine, **arguments), len(times)
        for step in made.steps:
            time(step.values)
        if len(times) == before:
            break
    return made


def target_study(path: str, target: TransferOptions, results: str | None) -> tuple[Study, list[str]]:
    """Return a study of the predicted values at a target, and what is predicted, a sentence each.

    The target is that of a plan in the folder, or `target.at`; a prediction is kept for its score. The values
    of a search are those of its best trial.
    """
    source = Study.load(path)
    grid = source.grid
    name, *others = target.rules([*grid.rules], path)
    if others:
        raise ConfigError(f"compare {', '.join((name, *others))}: a study's target has one of them")
    point: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    kept: Sequence[KeptPrediction] = ()
    if (made := predict_planned(path)) is not None:
        if target.at:
            raise ConfigError(f"at {target.at[0]!r}: the target of {path} is its plan's; plan again")
        point = {key: made.values[key] for key in grid.points[0] if key in made.values}
        planned = Planned.load(path)
        assert planned is not None
        measure = point.setdefault(grid.measure, planned.target.get(grid.measure, math.nan))
        best = {one.hyperparameter: one.value for one in made.optima}
        kept, sentences = made.kept(name, grid.measure, float(measure)), recipe_lines(made)
    else:
        known = {**grid.points[0], **grid.settings}

        def read(key: str, text: str) -> Value:
            if key not in known:
                raise ConfigError(f"at: {unknown_key(key, known)}")
            kind = type(known[key])
            return kind(parse_number(text, f"at: {key}")) if kind in (int, float) else text

        changes = target.values(read)
        point = {key: changes.pop(key) for key in grid.points[0] if key in changes}
        if missing := [key for key in grid.points[0] if key not in point]:
            raise ConfigError(f"at {', '.join(target.at)}: {', '.join(missing)} of the target is missing")
        if grid.space is not None:
            finished = of_status(ranked(load_runs(path)), "finished")
            if finished.empty:
                raise StoreError(f"results folder {path} holds no finished trial")
            row = finished.to_dict("records")[0]
            best = {key: row[key] for key in grid.space}
            points = ([f"{n} {write(n, x)}" for n, x in p.items()] for p in (grid.points[0], best))
            at, values = map(", ".join, points)
            loss, _ = named_loss([row["versions"]])
            sentences = [f"{at}, searched: {loss} {row['loss']:.4f} with {values}"]
        else:
            predicted = source.predict(**{grid.measure: point[grid.measure]})
            of_rule = tuple(p for p in predicted.predictions if p.compared == name)
            chosen = replace(predicted, predictions=of_rule)
            best = {one.hyperparameter: one.value for one in chosen.predictions}
            kept, sentences = to_keep(chosen), str(predicted).splitlines()
    # A single value is no design of several: the others are settings. A tuned value is a number.
    first = next((key for key, value in best.items() if type(value) in (int, float)), "")
    if not first:
        raise ConfigError(f"space of {path} has no hyperparameter with numbers, which a study tunes")
    settings = dict(grid.settings) | changes | {key: best[key] for key in best if key != first}
    study = Study(
        results or f"{path.rstrip('/')}_transfer",
        scale=[{key: type(grid.points[0][key])(value) for key, value in point.items()}],
        tune={first: [best[first]]},
        compare={key: [value] for key, value in grid.rules[name].items()},
        seeds=target.num_seeds,
        settings=settings,
        name=f"{grid.experiment}_transfer",
        measured_by=grid.measure,
        loss=source.loss,
        config=source.config,
    )
    study.to_frame()  # writes the folder
    if not grid.rules[name]:  # then the study's name stands for the rule
        kept = [replace(one, compared=study.grid.experiment) for one in kept]
    keep_predictions(study.folder, kept)
    return study, sentences
