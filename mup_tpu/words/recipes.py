"""Recipes: predicted values, and those that all runs shared, as a training program takes them.

Under μP the predicted learning rate is that of the base width. A recipe then has the parameter groups of the
target, or is refused for a program that has none. A setting of the runs that the program cannot take is a
comment, as is one that it needs and the runs do not name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mup_tpu.analysis.ingest.table_columns import means, plain_name
from mup_tpu.analysis.trend import rule_named
from mup_tpu.config.columns import label
from mup_tpu.config.toml import write_values
from mup_tpu.errors import ConfigError
from mup_tpu.rules.parametrization import UPDATE_GROWTH
from mup_tpu.words.names import plain, rule_name
from mup_tpu.words.programs import PROGRAMS, TargetRun, digits

# Setting of a training -> its further names in tables and programs. `means` knows those of learning rates.
_NAMES = {
    "learning_rate": "",
    "matrix_lr": "",
    "embedding_lr": "",
    "unembedding_lr": "",
    "scalar_lr": "",
    "weight_decay": "wd",
    "beta1": "adam_beta1 b1",
    "beta2": "adam_beta2 b2",
    "eps": "epsilon adam_epsilon adam_eps",
    "grad_clip": "max_grad_norm clip_grad grad_clip_norm gradient_clip_val max_norm",
    "steps": "steps_planned max_steps num_steps train_steps total_steps max_iters train_iters num_iterations",
    "warmup": "warmup_steps warmup_iters num_warmup_steps warmup_ratio warmup_fraction",
    "schedule": "lr_scheduler_type lr_schedule lr_scheduler lr_decay_style decay_type",
    "cooldown": "warmdown_ratio decay_ratio",
    "final_lr_fraction": "final_lr_frac min_lr_ratio min_lr_rate min_lr_factor",
    "sequence_length": "seq_len seq_length max_seq_len block_size context_length",
    "batch": "total_batch_size batch_tokens",
    "batch_size": "",
    "seed": "",
    "head_size": "head_dim",
    "width": "",
    "depth": "",
    "base_width": "mup_base_width base_d_model base_hidden_size mup_base_hidden_size",
    "parametrization": "",
    "optimizer": "optim",
    "muon_scale": "",
    "init_std": "",
    "alpha_in": "",
    "alpha_out": "",
    "alpha_attn": "",
    "batch_rule": "",
    "token_rule": "",
}
_MEANINGS = {known: name for name, others in _NAMES.items() for known in (name, *others.split())}
FORMATS = ("toml", *PROGRAMS)
# Values of our networks that change nothing
_NEUTRAL = {"alpha_in": 1, "alpha_out": 1, "alpha_attn": 1, "batch_rule": "none", "token_rule": "none"}
_ADAMW = ("adamw", "adam", "adamw_torch", "adamw_torch_fused")
_COUNTS = (
    "steps",
    "batch",
    "batch_size",
    "sequence_length",
    "seed",
    "head_size",
    "width",
    "depth",
    "base_width",
)
_TRAINING = ("weight_decay", "beta1", "beta2", "eps", "grad_clip", "steps", "batch", "warmup", "schedule",
             "final_lr_fraction", "sequence_length", "seed")  # fmt: skip


def meaning(name: str) -> str:
    """Return the setting that a column's name spells: peak_lr and lr are one; "" for none."""
    known = _MEANINGS.get(plain_name(name))
    return known or {"lr": "learning_rate", "batch size": "batch_size"}.get(means(name), means(name))


def shared_settings(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the settings of a training that have one value in all rows, by their columns."""
    shared: dict[str, Any] = {}
    for name in map(str, rows):
        of = meaning(name)
        if plain_name(name) == "betas" and rows[name].astype(str).nunique() == 1:
            both = map(float, re.findall(r"[\d.]+", str(rows[name].iloc[0])))
            shared |= dict(zip(("beta1", "beta2"), both, strict=False))
        if of not in _NAMES or of == "batch" or of in map(meaning, shared):
            continue
        values = rows[name].dropna().unique()
        if len(values) == 1 and str(values[0]).strip() and values[0] != _NEUTRAL.get(of):
            shared[name] = values[0].item() if hasattr(values[0], "item") else values[0]
    return shared


def base_rate_words(values: Mapping[str, Any], rule: str, tuned: str, rate: float) -> str:
    """Say whose rate a prediction under μP is; "" where it is that of all parameters, or this is unknown."""
    if meaning(tuned) != "learning_rate":
        return ""
    known = {meaning(name): value for name, value in values.items()}
    base, width, power = known.get("base_width"), known.get("width"), _rate_power(known)
    if rule_named(str(known.get("parametrization", rule))) != "mup" or not (base and width and power):
        return ""
    if base == width:
        return ""
    factor = (base / width) ** power
    return (
        f"{rule_name('mup')}: {rate:.3g} is the rate at base width {base:g}: hidden matrices of width "
        f"{width:g} train at {rate * factor:.3g} (× {factor:.3g}), other parameters at {rate:.3g}"
    )


def _rate_power(known: Mapping[str, Any]) -> float | None:
    """Return the power of 1/m by which μP scales the rates of hidden matrices; None where it is unknown."""
    optimizer = str(known.get("optimizer", "")).lower()
    if optimizer == "muon" and (scale := known.get("muon_scale")) != "spectral":
        optimizer = f"muon_{scale}"
    return 1.0 if optimizer in ("", *_ADAMW) else UPDATE_GROWTH.get(optimizer)


def write_recipe(
    program: str,
    tuned: Mapping[str, Sequence[float]],
    values: Mapping[str, Any],
    rule: str = "",
    shared: Mapping[str, Any] | None = None,
) -> str:
    """Write a recipe for one of `FORMATS`.

    Args:
        program: key of `PROGRAMS`.
        tuned: log2 of each tuned value, and of the ends of its 95 % interval.
        values: sizes of the target and what is known of its run.
        rule: rule of the runs, if they name it elsewhere than in `shared`.
        shared: settings that all runs share.

    Raises:
        ConfigError: the program would train another model, or at another rate.
    """
    best = {name: digits(2.0**x) for name, (x, *_) in tuned.items()}
    names, known = dict[str, str](), dict[str, Any]()  # by setting: as the runs call it, and its value
    for name, value in [*(shared or {}).items(), *values.items(), *best.items()]:
        of = meaning(name) or plain_name(name)
        names[of], known[of] = name, int(value) if of in _COUNTS and value % 1 == 0 else value
    if known.get("schedule") != "wsd":
        known.pop("cooldown", None)
    named = str(known.pop("parametrization", "") or rule)
    run = TargetRun(program, known, rule_named(named))
    _find_growth(run, named)
    intervals = [f"{name}: 95 % {' to '.join(map(plain, ends))}" for name, (_, *ends) in tuned.items()]
    if program == "toml":
        body = {names[of]: value for of, value in known.items()}
        if run.growth != 1:
            rate = run.hidden_rate
            hidden = {} if rate is None else {f"hidden_{names['learning_rate']}": rate}
            body = {"parametrization": named} | hidden | body
        return "".join(f"# {one}\n" for one in (*intervals, *run.comments)) + write_values(body)
    if "batch" not in known and {"batch_size", "sequence_length"} <= known.keys():
        known["batch"] = known["batch_size"] * known["sequence_length"]
    optimizer, needed = str(known.pop("optimizer", "")), "AdamW"
    fits = optimizer.lower() in ("", *_ADAMW)
    if program == "nanochat":
        needed, fits = "Muon", optimizer.lower() == "muon" or "learning_rate" not in map(meaning, best)
    if not fits:
        of = optimizer or "an optimizer that they do not name (column optimizer)"
        raise ConfigError(
            f"format {program}: it trains matrices with {needed}, and these runs use {of}: its rate is not "
            "known from them"
        )
    unknown = [label(name) for name in _TRAINING if name not in known]
    body_lines = PROGRAMS[program](run)
    for name in ("base_width", *([] if "batch" in known else ["batch_size"])):
        known.pop(name, None)
    if left := [f"{names.get(of, of)} {_short(value)}" for of, value in known.items()]:
        run.comments.append(f"no option here, so set by hand: {', '.join(left)}")
    if unknown:
        run.comments.append(f"not known from these runs, so its defaults hold: {', '.join(unknown)}")
    return "\n".join([*(f"# {one}" for one in (*intervals, *run.comments)), *body_lines]) + "\n"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _find_growth(run: TargetRun, named: str) -> None:
    """Set the growth that the rule's factors follow, and say what rate the recipe has."""
    base, width, rate = (run.values.get(name, math.nan) for name in ("base_width", "width", "learning_rate"))
    called, why = rule_name(run.rule), ""
    if "width" in run.values and width % 1 and run.program != "toml":  # as of a target in parameters
        raise ConfigError(f"format {run.program}: width {width:g} is that of no model: give --at width=VALUE")
    missing = [name for name in ("base_width", "width", "learning_rate") if name not in run.values]
    if run.rule == "mup" and missing:
        why = (
            f"under {called} the rate is that of the base width, and factors follow width over base width; "
            f"these runs name no {missing[0]}: add a column {missing[0]}"
        )
    elif run.rule not in ("", "sp", "mup"):
        why = f"no recipe is known for {called}: mup_tpu.parametrize gives the groups of its rates"
    elif not run.rule and "base_width" in run.values and base != width:
        why = f"these runs have base_width {base:g} and no rule: name it in a column parametrization, as mup"
    if why and run.program != "toml":
        raise ConfigError(f"format {run.program}: {why}")
    if why:
        run.comments.append(why)
    elif run.rule != "mup":
        known = (
            "SP" if run.rule else f"rule {named!r} is not known" if named not in ("", "all") else "no rule"
        )
        run.comments.append(f"{known}: the learning rate is that of all parameters")
    elif width != base:
        run.growth, power = width / base, _rate_power(run.values)
        if power is None:
            of_hidden = (
                f"how those of hidden matrices follow the width under {run.values['optimizer']} is not known "
                "from these runs"
            )
        else:
            run.hidden_rate = digits(rate / run.growth**power)
            of_hidden = f"hidden matrices of width {width:g} have {run.hidden_rate:g}"
        run.comments.append(f"{called}: learning rate {rate:g} is that of base width {base:g}; {of_hidden}")
