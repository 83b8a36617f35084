"""How trials are run; none of it is part of a trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from mup_tpu.config.values import described, parse_seconds, require_positive, require_valid, shown
from mup_tpu.errors import ConfigError

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""Of `mup_tpu.tuning.tracking.TRACKERS`."""


@dataclass(frozen=True)
class RunOptions:
    """How trials are run; none of it changes a finished trial's result beyond float reassociation."""

    device: Literal["auto", "cpu", "cuda", "xla"] = "auto"
    """Where to train; "auto" takes CUDA where there is one. "xla" is TPUs, through torch_xla."""
    mesh: str = "auto"
    """How a pack spreads over XLA devices: trial=4,data=2 splits its members 4 ways and each batch 2 ways."""
    placement: Annotated[Literal["host", "chip", "slice"], tyro.conf.arg(aliases=["--tpu-trial"])] = "host"
    """TPU resources reserved for one pack on a Ray cluster: a host's chips, one chip, or a slice of hosts."""
    execution: Annotated[Literal["auto", "loop", "vmap"], tyro.conf.arg(aliases=["--way"])] = "auto"
    """Members of a pack in turns ("loop", the CPU's default) or stacked as one program ("vmap")."""
    micro_batches: int = described(1, least=1)
    """Parts that each batch goes through the network in, one after the other, before the one update of all:
    a batch then need not fit in memory. Sums are taken in another order; bf16 rounds each part's gradient."""
    compile: bool = False
    """Put the step through torch.compile: half a minute at the start of every width."""
    threads: int = described(0, most=1024)
    """CPU threads of one pack; 0 shares the cores between the packs that run at once."""
    log_every: int = 10
    """Steps between points of the training curve and log lines (also how often divergence is looked for)."""
    eval_every: int = 0
    """Steps between evaluations on held-out text; 0 evaluates at the end alone."""
    halving: bool = False
    """Stop members half-way or at three quarters if their training loss is far behind the pack's best."""
    tuned: tyro.conf.Suppress[tuple[str, ...]] = ("learning_rate",)
    """Fields whose values halving compares; a sweep sets those of its tuned axis."""
    checkpoint_every: int = 0
    """Steps between checkpoints, written while training goes on; 0 writes none."""

    def __post_init__(self) -> None:
        require_valid(self)
        require_positive(self, "log_every")
        for name in ("threads", "eval_every", "checkpoint_every"):
            require_positive(self, name, allow_zero=True)

    def require_parts(self, batch_size: int, devices: int = 1) -> None:
        """Check that there is a sequence for each part of a batch.

        Args:
            batch_size: sequences a step.
            devices: that a batch is split over.

        Raises:
            ConfigError: there are fewer.
        """
        most = batch_size // devices
        if self.micro_batches > most:
            each = f" on each of {devices} devices" if devices > 1 else ""
            raise ConfigError(
                f"micro_batches {self.micro_batches} is not allowed: batch_size {batch_size} has {most} "
                f"sequences{each} to split, so at most {most}"
            )


@dataclass(frozen=True)
class SweepOptions:
    """Where the packs of a sweep run."""

    ray: bool = False
    """Run packs on Ray, on this machine if there is no --address: there each GPU has packs of its own."""
    address: str | None = None
    """Ray cluster to run packs on ("auto", or host:port), in place of this machine alone."""
    pack_size: int = 0
    """Most trials that train together in one process; 0 chooses for the device."""
    heartbeat: float = 600.0
    """Seconds without a report (a line of a pack's log; on XLA devices they come with evaluations) after
    which a pack counts as hung: its process is ended and it is tried again. A pack in the command's own
    process cannot be watched."""
    track: tuple[TrackerName, ...] = ()
    """Trackers to tell of every trial when it ends, and of those stored before (docs/sweeps.md, Trackers)."""

    def __post_init__(self) -> None:
        require_valid(self)
        require_positive(self, "pack_size", allow_zero=True)
        require_positive(self, "heartbeat")

    @property
    def on_ray(self) -> bool:
        """Whether Ray runs the packs: an address asks for it too."""
        return self.ray or self.address is not None


@dataclass(frozen=True)
class SequenceOptions:
    """Whether runs are bought look by look, where they decide, in place of the whole grid."""

    until_settled: bool = False
    """Start at the smallest scale, and buy batch after batch until each verdict is settled, or is not worth
    its expected cost."""
    budget: str | None = None
    """Longest time of this call with --until-settled, as 90s, 30m or 2h; the same command goes on."""

    def __post_init__(self) -> None:
        require_valid(self)
        if self.budget is not None and not self.until_settled:
            raise ConfigError(f"budget {shown(self.budget)} is of no use without until_settled: give both")
        self.seconds  # noqa: B018 (checks budget)

    @property
    def seconds(self) -> float | None:
        """The budget in seconds."""
        return None if self.budget is None else parse_seconds("budget", self.budget)


@dataclass(frozen=True)
class DryRunOptions:
    """Whether to say what would run in place of running it."""

    dry_run: bool = False
    """Say what would be trained, in which packs, and what time and memory that may take; train nothing."""
    dry_run_on: str | None = None
    """A type of TPU to say it for, such as v4-8, in place of this machine."""
    mfu: float = 0.3
    """Share of the peak arithmetic that training is taken to reach, between 0 and 1: a guess of yours."""

    def __post_init__(self) -> None:
        require_valid(self)
        if not 0 < self.mfu <= 1:
            raise ConfigError(f"mfu {self.mfu:g} is not above 0 and at most 1")
