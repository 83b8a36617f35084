"""Architectures by name, and the factors of a trial's parameters.

An architecture is one entry of `ARCHITECTURES`; its declaration alone knows its parameters by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mup_tpu.config import ModelConfig, Trial
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError
from mup_tpu.models.architectures import GPT2, Llama, MoE
from mup_tpu.models.base import Architecture, Declaration, Forms, Parameter
from mup_tpu.optimizers import update_rule_of
from mup_tpu.rules.parametrization import (
    MODULES,
    PARAMETRIZATIONS,
    ForwardScaling,
    Scaling,
    infer_infshapes,
    scaling,
)

if TYPE_CHECKING:
    from mup.infshape import InfShape

__all__ = [
    "ARCHITECTURES", "Architecture", "Declaration", "Forms", "Parameter", "architecture_of",
    "declare", "forward_factors", "forward_scaling", "parameter_scalings", "sizes", "training_flops",
]  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture for architecture in (GPT2(), Llama(), MoE())
}


def architecture_of(config: ModelConfig) -> Architecture:
    return ARCHITECTURES[config.architecture]


@functools.lru_cache(maxsize=64)
def declare(config: ModelConfig, vocab_size: int, sequence_length: int) -> Declaration:
    """Declare an architecture's parameters, FLOPs, memory and factors at one size."""
    architecture = architecture_of(config)
    listed = architecture.counted | architecture.per_member | {"architecture"}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.name not in listed:
            raise ConfigError(
                f"{field.name} {shown(value)} can be neither counted nor packed: list it in `counted` or in "
                f"`per_member` of architecture {architecture.name!r}"
            )
    return architecture.declare(config, vocab_size, sequence_length)


@functools.lru_cache(maxsize=64)
def infshapes(config: ModelConfig, vocab_size: int, sequence_length: int) -> dict[str, InfShape]:
    """Return mup's InfShape of each parameter, by name: the axes that grow with width, and by how much.

    Axes of one matrix of a stack: mup takes the first two for outputs and inputs.
    """

    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        declared = declare(dataclasses.replace(config, width=width), vocab_size, sequence_length)
        return {name: shape[-2:] for name, shape in declared.shapes.items()}

    # A sequence length or vocabulary that equals a width does not change from base to delta.
    return infer_infshapes(shapes(config.base_width), shapes(2 * config.base_width), shapes(config.width))


def parameter_scalings(trial: Trial, vocab_size: int, sequence_length: int) -> dict[str, Scaling]:
    """Return the factors of each parameter of a trial, by name."""
    parameters = declare(trial.model, vocab_size, sequence_length).parameters
    axes, growth = infshapes(trial.model, vocab_size, sequence_length), trial.growth
    scalings = {}
    for name, parameter in parameters.items():
        rule = update_rule_of(trial.optimizer, parameter).scaled_as(trial.optimizer)
        factors = scaling(trial.model.parametrization, rule, parameter, axes[name], growth)
        factors = trial.optimizer.rules.scaling(factors, parameter, axes[name].width_mult(), growth)
        if parameter.role in MODULES[trial.optimizer.module]:
            rate = factors.learning_rate * trial.optimizer.module_lr_factor
            factors = dataclasses.replace(factors, learning_rate=rate)
        scalings[name] = factors
    return scalings


def training_flops(trial: Trial, vocab_size: int) -> float:
    """Return the arithmetic of the whole training, FLOP; see `Declaration.flops_per_token`."""
    data = trial.data
    per_token = declare(trial.model, vocab_size, data.sequence_length).flops_per_token(
        vocab_size, data.sequence_length
    )
    return per_token * trial.train.steps * data.batch_size * data.sequence_length


def sizes(trial: Trial, vocab_size: int) -> dict[str, float]:
    """Return columns of run tables that follow from a trial and its vocabulary: parameters and arithmetic."""
    declaration = declare(trial.model, vocab_size, trial.data.sequence_length)
    return {
        "params": declaration.total,
        "params_non_embedding": declaration.non_embedding,
        "params_active": declaration.active,
        "flops": training_flops(trial, vocab_size),
    }


def forward_scaling(trial: Trial) -> ForwardScaling:
    return PARAMETRIZATIONS[trial.model.parametrization].forward(trial.growth)


def forward_factors(trial: Trial) -> dict[str, float]:
    return architecture_of(trial.model).factors(trial.model, forward_scaling(trial))
