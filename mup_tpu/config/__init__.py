"""Configuration: frozen dataclasses, read from TOML or the command line."""

from mup_tpu.config.fields import (
    TYPE_NAMES,
    described,
    require_above_zero,
    require_name,
    require_valid,
)
from mup_tpu.config.options import DEVICES, DryRunOptions, RunOptions, SequenceOptions, SweepOptions
from mup_tpu.config.parts import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from mup_tpu.config.sweep import MOST_TRIALS, Axis, Ladder, Sweep
from mup_tpu.config.trial import (
    PARTS,
    Trial,
    current_names,
    field_column,
    is_field,
)
from mup_tpu.config.values import (
    LearningRate,
    Real,
    as_word,
    format_learning_rate,
    on_one_line,
    parse_number,
    shown,
    unknown_key,
)

__all__ = [
    "DEVICES",
    "MOST_TRIALS",
    "PARTS",
    "TYPE_NAMES",
    "Axis",
    "DataConfig",
    "DryRunOptions",
    "Ladder",
    "LearningRate",
    "ModelConfig",
    "OptimizerConfig",
    "Real",
    "RunOptions",
    "Sweep",
    "SequenceOptions",
    "SweepOptions",
    "TrainConfig",
    "Trial",
    "as_word",
    "current_names",
    "described",
    "field_column",
    "is_field",
    "format_learning_rate",
    "on_one_line",
    "parse_number",
    "require_above_zero",
    "require_name",
    "require_valid",
    "shown",
    "unknown_key",
]
