"""What a sweep would train, how long that may take and what memory it needs, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.jobs.plan import describe, make_packs, work
from mup_tpu.models import training_flops

if TYPE_CHECKING:
    from mup_tpu.devices import Execution
    from mup_tpu.tpu_compiler import Target


@dataclass(frozen=True)
class Machine:
    """Where packs would run, as far as a forecast needs it."""

    name: str
    flops: float
    """Peak FLOP/s of all of it, in the precision asked for."""
    packs: int
    """How many run at once."""
    execution: str
    devices: int = 1
    """That a pack is spread over."""
    memory_bytes: int = 0
    """Of one of these devices."""
    by_xla: bool = False


@dataclass(frozen=True)
class SizeForecast:
    """Trials of one size."""

    size: str
    """As "width 64"."""
    trials: int
    packs: int
    flops: float
    """Of a trial."""
    seconds: float
    """Of all of them, at the stated utilisation."""
    memory_bytes: int
    """Of a pack, on each device."""


def this_machine(trials: Sequence[Trial], run: RunOptions) -> Machine:
    """This machine, its peak measured where it is a CPU."""
    from mup_tpu.devices import get_device
    from mup_tpu.devices.peak import cpu_peak_flops, peak_flops
    from mup_tpu.jobs import local_packs
    from mup_tpu.jobs.this_machine import room

    device, precision = get_device(run.device), trials[0].train.precision
    execution = local_packs.execution(run)
    packs, threads = room(len(trials), run)
    if device.torch_device.type == "cpu":
        peak = cpu_peak_flops(precision, 1) * threads * packs
        return Machine(f"{packs * threads} cores here", peak, packs, execution, 1, device.free_memory_bytes())
    by_xla = device.torch_device.type == "xla"
    members = len(make_packs(trials, 1, execution)[0])
    mesh = device.arrange(members, trials[0].data.batch_size, run.mesh).mesh
    devices = mesh.trial * mesh.data
    peak = peak_flops(device, precision) * devices
    return Machine(device.name, peak, 1, execution, devices, device.free_memory_bytes(), by_xla)


def tpu(chips: Target) -> Machine:
    """A TPU of one type, each pack spread over all of it."""
    from mup_tpu.devices.tpus import generation

    kind = generation(chips.accelerator_type)
    peak = kind.device_flops * chips.devices
    return Machine(
        f"TPU {chips.accelerator_type}", peak, 1, "vmap", chips.devices, kind.device_hbm_bytes, by_xla=True
    )


def forecast(
    trials: Sequence[Trial],
    scale: Sequence[str],
    vocab_size: Callable[[Trial], int],
    machine: Machine,
    utilisation: float,
    where: SweepOptions,
    micro_batches: int = 1,
) -> list[SizeForecast]:
    """What each size of a sweep takes, the smallest first.

    Args:
        trials: what is to run.
        scale: fields that tell their sizes.
        vocab_size: of a trial's data.
        machine: where.
        utilisation: share of its peak that training reaches.
        where: the size of packs.
        micro_batches: parts that batches go through the network in.
    """
    from mup_tpu.devices.base import MeshShape
    from mup_tpu.devices.xla import choose_mesh
    from mup_tpu.training.memory import estimate_pack_bytes

    by_size: dict[str, list[list[Trial]]] = {}
    packs = make_packs(trials, machine.packs, machine.execution, where.pack_size)
    for pack in sorted(packs, key=lambda pack: work(pack[0])):
        by_size.setdefault(describe(pack[0], scale), []).append(pack)
    found = []
    for size, packs in by_size.items():
        first, most = packs[0][0], max(map(len, packs))
        mesh = MeshShape(1, 1)
        if machine.devices > 1:
            mesh = choose_mesh(machine.devices, most, first.data.batch_size)
        vocabulary = vocab_size(first)
        flops = sum(training_flops(trial, vocabulary) for pack in packs for trial in pack)
        execution: Execution = "vmap" if machine.execution == "vmap" else "loop"
        needed = estimate_pack_bytes(first, vocabulary, most, execution, mesh, machine.by_xla, micro_batches)
        count = sum(map(len, packs))
        seconds = flops / (machine.flops * utilisation)
        found.append(SizeForecast(size, count, len(packs), flops / count, seconds, needed))
    return found
