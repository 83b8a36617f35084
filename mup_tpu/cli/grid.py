"""Options of commands that run sweeps and searches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mup_tpu.config import DryRunOptions, LearningRate, RunOptions, SequenceOptions, Sweep, SweepOptions
from mup_tpu.config.paths import Folder
from mup_tpu.config.search import SearchOptions
from mup_tpu.config.toml import parse_axis
from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class GridOptions:
    """Axes in place of a sweep's own."""

    width: int | None = None
    """The only width to run."""
    widths: tuple[int, ...] | None = None
    """Model widths; short for --scale width=..."""
    learning_rates: tuple[LearningRate, ...] | None = None
    """Peak learning rates at the base, plain or as 2^-8; short for --tune learning_rate=..."""
    parametrizations: tuple[str, ...] | None = None
    """Parametrizations to compare; short for --compare parametrization=..."""
    scale: str | None = None
    """Another scale, any number of a trial: depth=2,4,8."""
    tune: str | None = None
    """Another hyperparameter, any number of a trial: weight_decay=0,0.01,0.1."""
    compare: str | None = None
    """Another field to compare: precision=float32,bf16."""
    num_seeds: int | None = None
    """Number of seeds of every cell, from 0."""

    def change(self, sweep: Sweep) -> Sweep:
        """Sweep with these axes in place of its own."""
        if self.width is not None and self.widths is not None:
            raise ConfigError("width and widths were both given: give one of them")
        short = {
            "scale": ("widths", self.widths if self.width is None else (self.width,)),
            "tune": ("learning_rates", self.learning_rates),
            "compare": ("parametrizations", self.parametrizations),
        }
        changes: dict[str, Any] = {} if self.num_seeds is None else {"num_seeds": self.num_seeds}
        for axis, (name, values) in short.items():
            text = getattr(self, axis)
            if text is not None or values is not None:
                changes |= {axis: None if text is None else parse_axis(text, axis), name: values}
        return dataclasses.replace(sweep, **changes)


@dataclass(frozen=True)
class SweepRun:
    """Options of a run of a sweep."""

    grid: GridOptions = GridOptions()
    """Axes in place of the sweep's own."""
    results: Folder | None = None
    """Results folder (or fsspec URL); stored trials are not run again. By default results/EXPERIMENT."""
    run: RunOptions = RunOptions()
    """Options of each trial."""
    where: SweepOptions = SweepOptions()
    """Machine or cluster of the sweep."""
    until: SequenceOptions = SequenceOptions()
    """Whether runs are bought until the verdict is settled."""
    dry: DryRunOptions = DryRunOptions()
    """Whether to print the missing runs in place of running them."""

    @property
    def is_dry(self) -> bool:
        """Whether nothing is run."""
        return self.dry.dry_run or self.dry.dry_run_on is not None


@dataclass(frozen=True)
class SearchRun:
    """Options of a run of a search."""

    results: Folder | None = None
    """Results folder (or fsspec URL); by default results/EXPERIMENT."""
    resume: bool = False
    """Go on with the search in the folder: others than ended trials go on from their checkpoints, and the
    algorithm knows all earlier losses."""
    options: SearchOptions = SearchOptions()
    """Algorithm, scheduler, limits, machine or cluster."""
    run: RunOptions = RunOptions()
    """Options of each trial."""
