"""Configuration: frozen dataclasses, read from TOML or the command line."""

from mup_tpu.config.options import RunOptions, SequenceOptions, SweepOptions
from mup_tpu.config.sweep import Axis, Ladder, Sweep
from mup_tpu.config.trial import (
    PARTS,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    Trial,
    current_names,
    field_column,
)
from mup_tpu.config.values import (
    LearningRate,
    format_learning_rate,
    parse_learning_rate,
    require_choices,
    require_positive,
    unknown_key,
)

__all__ = [
    "PARTS",
    "Axis",
    "DataConfig",
    "Ladder",
    "LearningRate",
    "ModelConfig",
    "OptimizerConfig",
    "RunOptions",
    "Sweep",
    "SequenceOptions",
    "SweepOptions",
    "TrainConfig",
    "Trial",
    "current_names",
    "field_column",
    "format_learning_rate",
    "parse_learning_rate",
    "require_choices",
    "require_positive",
    "unknown_key",
]
