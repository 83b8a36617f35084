"""Programs that take recipes: their options, and under μP their parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mup_tpu.errors import ConfigError


@dataclass
class TargetRun:
    """The target's run: its values by setting, and what is left of them while a program takes its options."""

    program: str
    values: dict[str, Any]
    rule: str  # key of `PARAMETRIZATIONS`; "" where the runs name none
    comments: list[str] = field(default_factory=list)
    growth: float = 1.0  # width over the base width, under a rule with factors
    hidden_rate: float | None = (
        None  # learning rate of hidden matrices, where growth is not 1 and it is known
    )

    def take(self, name: str) -> Any:
        return self.values.pop(name, None)

    def options(self, names: Mapping[str, str]) -> list[tuple[str, Any]]:
        taken = [(option, self.take(name)) for name, option in names.items()]
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
    rate, warmup = run.values.get("learning_rate", math.nan), run.steps_of("warmup")
    names = {
        "learning_rate": "learning_rate", "weight_decay": "weight_decay", "beta1": "adam_beta1",
        "beta2": "adam_beta2", "eps": "adam_epsilon", "grad_clip": "max_grad_norm", "steps": "max_steps",
        "seed": "seed",
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
    options = run.options(names) + ([("warmup_steps", warmup)] if warmup is not None else [])
    if kind in form:
        run.take("schedule"), run.take("final_lr_fraction")
        chosen, arguments = form[kind]
        options += [("lr_scheduler_type", chosen)] + (
            [("lr_scheduler_kwargs", arguments)] if arguments else []
        )
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
    shape: list[tuple[str, Any]] = [("depth", depth)] if depth is not None else []
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
    warmup, cooldown = run.steps_of("warmup"), run.take("cooldown")
    shape += [("warmup-steps", warmup)] if warmup is not None else []
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
    if (warmup := run.steps_of("warmup")) is not None:
        options.append(("lr_scheduler.warmup_steps", warmup))
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
    lines = [f"    {name}={value!r}," for name, value in adamw.items()]
    if hidden:
        lines += [
            "    group_overrides=[  # hidden matrices",
            f'        OptimGroupOverride(["blocks.*.w_*.weight", "blocks.*.w?.weight"], {hidden!r}),',
            "    ],",
        ]
    lines = ["optim = AdamWConfig(", *lines, ")"]
    imported = ["AdamWConfig", *(["OptimGroupOverride"] if hidden else [])]
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
    head = [f"from olmo_core.optim import {', '.join(imported)}", "", *lines]
    overrides = [
        f"--{name}='{value}'" if " " in f"{value}" else f"--{name}={value}" for name, value in options
    ]
    return [*head, *(["", "# overrides on the script's command line:"] if overrides else []),
            *(f"#   {one}" for one in overrides)]  # fmt: skip


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
    if (warmup := run.steps_of("warmup")) is not None:
        options.append(("lr-warmup-iters", warmup))
    if (kind := run.values.get("schedule")) in ("cosine", "linear", "constant"):
        options.append(("lr-decay-style", run.take("schedule")))
    if kind != "constant" and "final_lr_fraction" in run.values and "lr" in dict(options):
        options.append(("min-lr", digits(run.take("final_lr_fraction") * dict(options)["lr"])))
    batch, length = run.values.get("batch"), dict(options).get("seq-length")
    if (
        size := run.values.get("batch_size") or (round(batch / length) if batch and length else None)
    ) is not None:
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
