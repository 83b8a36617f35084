"""Configuration: frozen dataclasses, read from TOML or the command line."""

from mup_tpu.config.options import (
    DEVICES,
    DryRunOptions,
    RunOptions,
    SearchOptions,
    SequenceOptions,
    SweepOptions,
)
from mup_tpu.config.sweep import MOST_TRIALS, Axis, Design, Domain, Ladder, Search, Sweep
from mup_tpu.config.trial import (
    PARTS,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    Trial,
    field_column,
)
from mup_tpu.config.values import (
    LearningRate,
    format_learning_rate,
    on_one_line,
    parse_number,
    require_above_zero,
    shown,
    unknown_key,
)

__all__ = [
    "DEVICES", "MOST_TRIALS", "PARTS", "Axis", "DataConfig", "Design", "Domain", "DryRunOptions", "Ladder",
    "LearningRate", "ModelConfig", "OptimizerConfig", "RunOptions", "Search", "SearchOptions",
    "SequenceOptions", "Sweep", "SweepOptions", "TrainConfig", "Trial", "field_column",
    "format_learning_rate", "on_one_line", "parse_number", "require_above_zero", "shown", "unknown_key",
]  # fmt: skip
