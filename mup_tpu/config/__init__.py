"""Configuration: frozen dataclasses, read from TOML or the command line."""

from mup_tpu.config.grid import Axes, Grid, octaves
from mup_tpu.config.options import (
    DEVICES,
    RunOptions,
    SequenceOptions,
    SweepOptions,
)
from mup_tpu.config.sweep import Domain, Search, SearchOptions, Sweep
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
    "DEVICES", "PARTS", "Axes", "DataConfig", "Domain", "Grid", "LearningRate",
    "ModelConfig", "OptimizerConfig", "RunOptions", "Search", "SearchOptions", "SequenceOptions", "Sweep",
    "SweepOptions", "TrainConfig", "Trial", "field_column", "format_learning_rate", "octaves", "on_one_line",
    "parse_number", "require_above_zero", "shown", "unknown_key",
]  # fmt: skip
