"""Options of commands, none of them part of a trial; and types of options that name files and folders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from mup_tpu.config.toml import parse_value
from mup_tpu.config.values import (
    Real,
    described,
    option,
    parse_limit,
    parse_pairs,
    parse_price,
    require_above_zero,
    require_valid,
)
from mup_tpu.errors import ConfigError, given


def _path(text: str) -> str:
    if not text:
        raise ConfigError("a path '' is not allowed: it must name a file or folder")
    return text


def _local(text: str) -> Path:
    if "://" in text:
        raise ConfigError(f"a path {text!r} is not allowed: it must be local, not a URL")
    return Path(_path(text))


FolderName = Annotated[str, option("PATH", str, _path)]  # local folder or file, or its fsspec URL

File = Annotated[Path, option("PATH", Path, _local)]  # local file or folder

Where = Annotated[FolderName, tyro.conf.Positional]  # positional path

Several = Annotated[tuple[FolderName, ...], tyro.conf.Positional]  # positional paths, one at least

Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]  # values of an option that may be given several times

# Names with commas between them
Names = Annotated[
    tuple[str, ...],
    option("NAME,NAME", tuple, lambda text: tuple(name for name in text.split(",") if name), ",".join),
]

# Name of a tracker's package, and of the extra that installs it
TrackerName = Literal["tensorboard", "wandb"]

# Name of a kind of device, and of its module in `mup_tpu.devices`
DeviceName = Literal["cpu", "cuda", "tpu", "xla"]
DEVICES: tuple[str, ...] = get_args(DeviceName)


@dataclass(frozen=True)
class RunOptions:
    """Options for running a trial; none changes its result beyond float reassociation."""

    device: Literal["auto", DeviceName] = "auto"
    """Device to train on; "auto" takes a CUDA GPU if there is one. TPUs are "tpu" through TorchTPU, and "xla"
    through torch_xla."""
    mesh: Annotated[str, tyro.conf.Suppress] = "auto"
    """Split of a pack over XLA devices: trial=4,data=2 splits its members 4 ways and each batch 2 ways."""
    placement: Literal["host", "chip", "slice"] = "host"
    """TPU resources reserved for one pack on a Ray cluster: a host's chips, one chip, or a slice of hosts."""
    execution: Annotated[Literal["auto", "loop", "vmap"], tyro.conf.Suppress] = "auto"
    """Members of a pack train in turns ("loop", the CPU's default) or stacked as one program ("vmap", TPUs'
    only way)."""
    micro_batches: int = described(1, least=1)
    """Parts of a batch, computed in turn before one update to save memory. Sums are taken in another order;
    bf16 rounds each part's gradient."""
    split_over: int = described(1, least=1)
    """Processes, a GPU each, that a trial too wide for one is split over (docs/gpu.md); on XLA, devices."""
    threads: int = described(0, least=0, most=1024)
    """CPU threads of one pack; 0 shares the cores between the packs that run at once."""
    log_every: Annotated[int, tyro.conf.Suppress] = described(10, above=0)
    """Steps between points of the training curve, log lines and checks for divergence."""
    eval_every: int = described(0, least=0)
    """Steps between evaluations on held-out text; 0 evaluates at the end only."""
    checkpoint_every: int = described(0, least=0)
    """Steps between checkpoints, written while training goes on; 0 writes none."""
    price: str | None = None
    """Price of an hour of each worker, such as a GPU, as 2.5/h; costs are then money too."""
    mix: bool = False
    """Add runs of this device to a results folder that holds runs of another kind of device."""

    def __post_init__(self) -> None:
        require_valid(self)
        parse_price(self.price)
        if self.execution == "loop" and self.device in ("tpu", "xla"):
            raise ConfigError(f"execution 'loop' is for CPUs and GPUs: device {self.device!r} stacks members")
        in_turns = self.device != "tpu" and self.execution != "vmap"
        if self.split_over > 1 and self.device != "xla" and not in_turns:
            raise ConfigError(
                f"{given('split_over', self.split_over)} works on device xla, and on cpu and cuda where "
                "members train in turns"
            )

    def require_parts(self, batch_size: int, devices: int = 1) -> None:
        """Refuse more parts of a batch than it has sequences on each device."""
        most = batch_size // devices
        if self.micro_batches > most:
            each = f" on each of {devices} devices" if devices > 1 else ""
            raise ConfigError(
                f"micro_batches {self.micro_batches} is not allowed: batch_size {batch_size} has {most} "
                f"sequences{each} to split, so at most {most}"
            )


@dataclass(frozen=True)
class SweepOptions:
    """Place where the packs of a sweep run."""

    address: str | None = None
    """Run packs on Ray: "local" on this machine, where each GPU then has packs of its own; or on a cluster,
    "auto" or host:port."""
    pack_size: int = described(0, least=0)
    """Most trials that train together in one process; 0 chooses for the device."""
    heartbeat: Real = described(600.0, above=0)
    """Seconds without a report (a log line; on XLA devices an evaluation) after which a pack counts as hung:
    its process is ended, and the pack is tried again. A pack in the command's own process is not watched."""
    track: tuple[TrackerName, ...] = ()
    """Trackers that get stored trials, and each further trial at its end (docs/sweeps.md, Trackers)."""

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(frozen=True)
class SequenceOptions:
    """Options of a sequence, which runs what decides the verdict in place of the whole grid."""

    until_settled: bool = False
    """Start at the smallest scale, and run batch after batch until each verdict is settled or not worth its
    expected cost."""
    budget: str | None = None
    """Longest time of this call (--until-settled), as 90s, 30m or 2h; run the same command to
    continue."""

    def __post_init__(self) -> None:
        require_valid(self)
        if self.budget is not None and not self.until_settled:
            raise ConfigError(f"{given('budget', self.budget)} needs {given('until_settled')}")
        parse_limit("budget", self.budget)


@dataclass(frozen=True)
class TransferOptions:
    """Scale of a transfer, and its trials there."""

    at: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Fields at the target, FIELD=VALUE: --at width=1024, or --at width=512 depth=8. Steps and batch size may
    be given too where the sweep has another scale."""
    num_seeds: int = 1
    """Seeds of each trial."""
    compare: Names | None = None
    """Parametrizations at the target. By default the only one of a sweep, else mup, and for a search mup,sp.
    A sweep gives each its own predicted optimum, a search the same hyperparameters."""

    def __post_init__(self) -> None:
        require_above_zero("num_seeds", self.num_seeds)

    def values(self, read: Callable[[str, str], Any]) -> dict[str, Any]:
        """Return the values at the target by name; `read` converts the text of a name's value."""
        texts = [part for one in self.at for part in one.split(",")]
        fields = parse_pairs("at", texts, "FIELD=VALUE; write for example depth=8")
        if not fields:
            raise ConfigError(f"transfer needs a target, such as {given('at', 'width=1024')}")
        return {name: read(name, value) for name, value in fields.items()}

    def split(self, scale: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields that grow, and other changes: steps and batch size if `scale` lacks them."""
        fields = self.values(partial(parse_value, option="at"))
        changes = {n: v for n, v in fields.items() if n in ("steps", "batch_size") and n not in scale}
        if len(changes) == len(fields):
            return fields, {}
        return {n: v for n, v in fields.items() if n not in changes}, changes

    def rules(self, stored: Sequence[str], path: str) -> tuple[str, ...]:
        """Return the compared values at the target: by default the only one of a folder, else mup."""
        rules = dict.fromkeys(self.compare or (stored if len(stored) == 1 else ("mup",)))
        if lacking := next((rule for rule in rules if rule not in stored), None):
            raise ConfigError(
                f"results folder {path} has no trial of {lacking}: give {given('compare', stored[0])}"
            )
        return tuple(rules)
