"""Recipes: predicted values, and those that all runs shared, as a training program takes them.

Under μP the predicted learning rate is that of the base width. A recipe then has the parameter groups of the
target, or is refused for a program that has none. A setting of the runs that the program cannot take is a
comment, as is one that it needs and the runs do not name.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from mup_tpu.analysis.ingest.table_columns import means, plain_name
from mup_tpu.analysis.trend import rule_named
from mup_tpu.config.columns import label
from mup_tpu.config.toml import write_values
from mup_tpu.errors import ConfigError
from mup_tpu.rules.parametrization import UPDATE_GROWTH
from mup_tpu.words.names import plain, rule_name

# Setting of a training -> its further names in tables and programs. `means` knows those of learning rates.
_NAMES = {
    **dict.fromkeys(("learning_rate", "matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr"), ""),
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
    **dict.fromkeys(("batch_size", "seed", "width", "depth"), ""),
    "head_size": "head_dim",
    "base_width": "mup_base_width base_d_model base_hidden_size mup_base_hidden_size",
    "optimizer": "optim",
    **dict.fromkeys(("parametrization", "muon_scale", "init_std", "batch_rule", "token_rule"), ""),
    **dict.fromkeys(("alpha_in", "alpha_out", "alpha_attn"), ""),
}
_MEANINGS = {known: name for name, others in _NAMES.items() for known in (name, *others.split())}
# Values that change nothing in our networks
_NEUTRAL = {"alpha_in": 1, "alpha_out": 1, "alpha_attn": 1, "batch_rule": "none", "token_rule": "none"}
_ADAMW = ("adamw", "adam", "adamw_torch", "adamw_torch_fused")
_COUNTS = ("steps", "batch", "batch_size", "sequence_length", "seed", "head_size", "width", "depth",
           "base_width")  # fmt: skip
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
    """Write a recipe for a program, or as TOML.

    Args:
        program: "toml", or a key of `PROGRAMS`.
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
    texts = {of: f"{x:.6g}" if isinstance(x, float) else str(x) for of, x in known.items()}
    if left := [f"{names.get(of, of)} {value}" for of, value in texts.items()]:
        run.comments.append(f"no option here, so set by hand: {', '.join(left)}")
    if unknown:
        run.comments.append(f"not known from these runs, so its defaults hold: {', '.join(unknown)}")
    return "\n".join([*(f"# {one}" for one in (*intervals, *run.comments)), *body_lines]) + "\n"


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


@dataclass
class TargetRun:
    """The target's run: its values by setting, and what is left of them while a program takes its options."""

    program: str
    values: dict[str, Any]
    rule: str  # key of `PARAMETRIZATIONS`; "" where the runs name none
    comments: list[str] = field(default_factory=list)
    growth: float = 1.0  # width over the base width, under a rule with factors
    hidden_rate: float | None = None  # learning rate of hidden matrices, where growth is not 1

    def take(self, name: str) -> Any:
        return self.values.pop(name, None)

    def options(self, names: Mapping[str, str]) -> list[tuple[str, Any]]:
        """Take settings, and return the known ones by their options."""
        warmup = self.steps_of("warmup") if "warmup" in names else None
        taken = [(option, warmup if name == "warmup" else self.take(name)) for name, option in names.items()]
        return [(option, value) for option, value in taken if value is not None]

    def steps_of(self, name: str) -> int | None:
        """Take a number of steps that may be given as a share of all."""
        if (value := self.values.get(name)) is None or (value < 1 and "steps" not in self.values):
            return None
        share = self.take(name)
        return round(share * self.values["steps"]) if share < 1 else int(share)


def digits(value: float) -> float:
    return float(f"{value:.4g}")


def _command(head: str, form: str, options: Sequence[tuple[str, Any]]) -> list[str]:
    lines = [head, *(f"  {form.format(name, value)}".rstrip() for name, value in options)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _transformers(run: TargetRun) -> list[str]:
    """Return `TrainingArguments` of transformers 5, and for μP a model and a Trainer with its groups."""
    base, width = run.take("base_width"), None if run.growth == 1 else run.take("width")
    rate = run.values.get("learning_rate", math.nan)
    names = {
        "learning_rate": "learning_rate", "weight_decay": "weight_decay", "beta1": "adam_beta1",
        "beta2": "adam_beta2", "eps": "adam_epsilon", "grad_clip": "max_grad_norm", "steps": "max_steps",
        "seed": "seed", "warmup": "warmup_steps",
    }  # fmt: skip
    kind, final = run.values.get("schedule"), run.values.get("final_lr_fraction")
    cooldown = run.steps_of("cooldown") if kind == "wsd" else None
    form: dict[str, tuple[str, dict[str, Any]]] = {
        "constant": ("constant_with_warmup", {}),
        "linear": ("polynomial", {"lr_end": rate * final, "power": 1.0}) if final else ("linear", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": final}) if final else ("cosine", {}),
    }
    if cooldown is not None:
        form["wsd"] = "warmup_stable_decay", {"num_decay_steps": cooldown, "min_lr_ratio": final or 0.0}
    options = run.options(names)
    if kind in form:
        run.take("schedule"), run.take("final_lr_fraction")
        chosen, arguments = form[kind]
        options.append(("lr_scheduler_type", chosen))
        options += [("lr_scheduler_kwargs", arguments)] if arguments else []
    if (batch := run.take("batch")) is not None:
        size, length = run.take("batch_size"), run.values.get("sequence_length")
        sequences = size or (round(batch / length) if length else None)
        of = f"{sequences} sequences" if sequences else f"{batch} tokens"
        run.comments.append(
            f"a batch of {of} is per_device_train_batch_size × gradient_accumulation_steps × devices"
        )
    arguments_of = [f"    {name}={value!r}," for name, value in options]
    training = ["arguments = TrainingArguments(", *arguments_of, ")"]
    if run.growth == 1:
        return ["from transformers import TrainingArguments", "", *training]
    run.comments.append(f"CONFIG: the configuration of your runs at width {base:g}, with the target's depth")
    return (
        f"""\
import torch
from transformers import AutoConfig, Trainer, TrainingArguments

from mup_tpu.parametrize import from_config

grown = from_config(AutoConfig.from_pretrained("CONFIG"), width={width})
model = grown.model()  # fresh, with the rule's init and factors on logits


class MupTrainer(Trainer):
    def create_optimizer(self, model=None):
        if self.optimizer is None:
            a = self.args
            groups = grown.mup.param_groups(
                model or self.model, lr=a.learning_rate, weight_decay=a.weight_decay, eps=a.adam_epsilon
            )
            self.optimizer = torch.optim.AdamW(groups, lr=a.learning_rate, betas=(a.adam_beta1, a.adam_beta2))
        return self.optimizer

""".splitlines()
        + ["", *training]
    )


def _nanochat(run: TargetRun) -> list[str]:
    """Return the command line of nanochat's scripts/base_train.py, July 2026."""
    if run.growth != 1:
        raise ConfigError(
            "format nanochat: it has no μP, and the SP rate for it is not known from these runs"
        )
    width, depth = run.take("width"), run.take("depth")
    head = run.take("head_size")
    shape: list[tuple[str, Any]] = [] if depth is None else [("depth", depth)]
    if width is not None and depth is not None:
        # The program rounds depth × aspect ratio up to a multiple of the head size.
        shapes = [
            (size, ratio)
            for size in ([head] if head else [128, 64, 32])
            for ratio in range(max(1, int(width / depth) - 1), int(width / depth) + 2)
            if -(-depth * ratio // size) * size == width
        ]
        if not shapes:
            raise ConfigError(
                f"format nanochat: no --aspect-ratio gives width {width} at depth {depth} with heads of "
                f"{head or '128, 64 or 32'}: give a width that is a multiple of the head size"
            )
        size, ratio = min(shapes, key=lambda pair: (-pair[0], abs(depth * pair[1] - width)))
        shape += [("aspect-ratio", ratio), ("head-dim", size)]
    elif width is not None:
        run.comments.append(f"width {width} follows from --depth and --aspect-ratio: the runs name no depth")
    cooldown = run.take("cooldown")
    shape += run.options({"warmup": "warmup-steps"})
    if run.values.get("schedule") == "wsd":
        run.take("schedule")
        shape += [("warmdown-ratio", cooldown)] if cooldown is not None and cooldown < 1 else []
    if "matrix_lr" not in run.values:
        run.values["matrix_lr"] = run.take("learning_rate")
    names = {
        "matrix_lr": "matrix-lr", "embedding_lr": "embedding-lr", "unembedding_lr": "unembedding-lr",
        "scalar_lr": "scalar-lr", "weight_decay": "weight-decay", "steps": "num-iterations",
        "batch": "total-batch-size", "sequence_length": "max-seq-len", "final_lr_fraction": "final-lr-frac",
    }  # fmt: skip
    run.comments.append(
        "nanochat multiplies its rates by √(batch / 2^19) and scales weight decay by itself: these values "
        "fit if its own script ran the sweep"
    )
    head_line = "torchrun --standalone --nproc_per_node=8 -m scripts.base_train --"
    return _command(head_line, "--{}={}", run.options(names) + shape)


def _groups(run: TargetRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take AdamW's values; return them for all parameters, and for hidden matrices."""
    adamw = dict(run.options({"learning_rate": "lr", "weight_decay": "weight_decay", "eps": "eps"}))
    if {"beta1", "beta2"} <= run.values.keys():
        adamw["betas"] = run.take("beta1"), run.take("beta2")
    if run.growth == 1:
        return adamw, {}
    # A step decays by the product of both, which stays, as in mup's MuAdamW.
    factors = {"lr": 1 / run.growth, "weight_decay": run.growth}
    run.comments.append(
        "in the model's code, where there is no option: the init's standard deviation of hidden matrices × "
        f"{digits(run.growth**-0.5):g} and the logits × {digits(1 / run.growth):g} of those at the base "
        "width; attention by 1/d where heads grow in size"
    )
    return adamw, {name: digits(adamw[name] * factor) for name, factor in factors.items() if name in adamw}


def _torchtitan(run: TargetRun) -> list[str]:
    """Return options of torchtitan, August 2026; for μP its parameter groups, which are Python."""
    adamw, hidden = _groups(run)
    lines, options = list[str](), list[tuple[str, Any]]()
    if hidden:
        lines = f"""\
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

# the optimizer of your configuration function, in place of default_adamw
others = {adamw!r}
hidden = others | {hidden!r}
optimizer = OptimizersContainer.Config(
    param_groups=[
        ParamGroupConfig(
            pattern=r"^layers\..*(?<!norm\.weight)(?<!bias)$", optimizer_name="AdamW", optimizer_kwargs=hidden
        ),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=others),
    ]
)

# its command line:
""".splitlines()
    else:
        adamw |= {"betas": "{} {}".format(*adamw["betas"])} if "betas" in adamw else {}
        options = [(f"optimizer.param-groups.0.optimizer-kwargs.{name}", v) for name, v in adamw.items()]
    options += run.options({"warmup": "lr_scheduler.warmup_steps"})
    kind, kinds = run.values.get("schedule"), {"cosine": "cosine", "linear": "linear", "wsd": "sqrt"}
    if kind in kinds:
        run.take("schedule")
        options.append(("lr_scheduler.decay_type", kinds[kind]))
        if kind == "wsd" and run.values.get("cooldown", 1) < 1:
            options.append(("lr_scheduler.decay_ratio", run.take("cooldown")))
    options += run.options(
        {
            "final_lr_fraction": "lr_scheduler.min_lr_factor", "steps": "training.steps",
            "batch": "training.num_tokens_per_train_step", "sequence_length": "training.max_context_length",
            "grad_clip": "training.max_norm", "seed": "debug.seed",
        }
    )  # fmt: skip
    return lines + _command("./run_train.sh", "--{} {}", options)


def _olmo_core(run: TargetRun) -> list[str]:
    """Return the optimizer and schedule of OLMo-core, June 2026, as Python of a training script."""
    adamw, hidden = _groups(run)
    warmup, final = run.steps_of("warmup"), run.values.get("final_lr_fraction")
    kinds = {"cosine": "CosWithWarmup", "linear": "LinearWithWarmup", "constant": "ConstantWithWarmup"}
    lines, imported = [f"    {name}={value!r}," for name, value in adamw.items()], ["AdamWConfig"]
    if hidden:
        imported.append("OptimGroupOverride")
        lines += [
            "    group_overrides=[  # hidden matrices",
            f'        OptimGroupOverride(["blocks.*.w_*.weight", "blocks.*.w?.weight"], {hidden!r}),',
            "    ],",
        ]
    lines = ["optim = AdamWConfig(", *lines, ")"]
    if (kind := kinds.get(run.values.get("schedule", ""))) is not None:
        run.take("schedule")
        arguments = [f"warmup={warmup}"] if warmup is not None else []
        if final is not None and kind != "ConstantWithWarmup":
            arguments.append(f"alpha_f={run.take('final_lr_fraction')!r}")
        lines.append(f"scheduler = {kind}({', '.join(arguments)})")
        imported.append(kind)
    elif warmup is not None:
        run.values["warmup"] = warmup
    options = run.options(
        {
            "grad_clip": "train_module.max_grad_norm", "batch": "data_loader.global_batch_size",
            "sequence_length": "train_module.max_sequence_length", "seed": "init_seed",
        }
    )  # fmt: skip
    if (steps := run.take("steps")) is not None:
        options.append(("trainer.max_duration", f"{{value: {steps}, unit: steps}}"))
    lines = [f"from olmo_core.optim import {', '.join(imported)}", "", *lines]
    if options:
        lines += ["", "# overrides on the script's command line:"]
    return lines + [f"#   --{name}={shlex.quote(str(value))}" for name, value in options]


def _megatron(run: TargetRun) -> list[str]:
    """Return options of Megatron-LM's pretrain_gpt.py, August 2026, which has μP."""
    options = run.options(
        {
            "learning_rate": "lr", "weight_decay": "weight-decay", "beta1": "adam-beta1",
            "beta2": "adam-beta2", "eps": "adam-eps", "grad_clip": "clip-grad",
            "width": "hidden-size", "depth": "num-layers", "sequence_length": "seq-length", "seed": "seed",
        }
    )  # fmt: skip
    base, head = run.take("base_width"), run.values.get("head_size")
    if run.growth != 1:
        options += [("use-mup", ""), ("mup-base-hidden-size", base)]
        if head is not None:
            options.append(("mup-base-head-dim", run.take("head_size")))
        else:
            run.comments.append(
                "give --mup-base-head-dim, or attention is divided by d in place of √d at the base"
            )
        run.comments.append(
            "Megatron's μP also multiplies ε of matrices, and the rate of a readout that is not tied, by "
            f"{digits(1 / run.growth):g}, and leaves weight decay: the rate fits if Megatron ran the sweep"
        )
    options += run.options({"warmup": "lr-warmup-iters"})
    if (kind := run.values.get("schedule")) in ("cosine", "linear", "constant"):
        options.append(("lr-decay-style", run.take("schedule")))
    if kind != "constant" and "final_lr_fraction" in run.values and "lr" in dict(options):
        options.append(("min-lr", digits(run.take("final_lr_fraction") * dict(options)["lr"])))
    batch, length = run.values.get("batch"), dict(options).get("seq-length")
    size = run.values.get("batch_size") or (round(batch / length) if batch and length else None)
    if size is not None:
        run.take("batch"), run.take("batch_size")
        options.append(("global-batch-size", size))
    options += run.options({"steps": "train-iters"})
    return _command("torchrun --nproc_per_node=8 pretrain_gpt.py", "--{} {}", options)


PROGRAMS: Mapping[str, Callable[[TargetRun], list[str]]] = {
    "transformers": _transformers,
    "nanochat": _nanochat,
    "torchtitan": _torchtitan,
    "olmo-core": _olmo_core,
    "megatron": _megatron,
}
