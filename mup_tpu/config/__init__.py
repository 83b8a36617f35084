"""Configuration: frozen dataclasses, read from TOML or the command line."""

from mup_tpu.config.options import RunOptions, SweepOptions
from mup_tpu.config.sweep import MOST_TRIALS, Axis, Ladder, Sweep
from mup_tpu.config.trial import (
    PARTS,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    Trial,
    current_names,
    field_column,
    is_field,
)
from mup_tpu.config.values import (
    TYPE_NAMES,
    LearningRate,
    as_word,
    described,
    format_learning_rate,
    parse_learning_rate,
    require_above_zero,
    require_name,
    require_positive,
    require_valid,
    shown,
    unknown_key,
)

__all__ = [
    "MOST_TRIALS",
    "PARTS",
    "TYPE_NAMES",
    "Axis",
    "DataConfig",
    "Ladder",
    "LearningRate",
    "ModelConfig",
    "OptimizerConfig",
    "RunOptions",
    "Sweep",
    "SweepOptions",
    "TrainConfig",
    "Trial",
    "as_word",
    "current_names",
    "described",
    "field_column",
    "is_field",
    "format_learning_rate",
    "parse_learning_rate",
    "require_above_zero",
    "require_name",
    "require_positive",
    "require_valid",
    "shown",
    "unknown_key",
]
