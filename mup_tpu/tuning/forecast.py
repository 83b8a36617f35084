"""Forecast of a sweep before it runs: trials, arithmetic, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.jobs.pack_job import describe, make_packs, work
from mup_tpu.models import training_flops

if TYPE_CHECKING:
    from mup_tpu.devices import Execution
    from mup_tpu.devices.peak import TpuType


@dataclass(frozen=True)
class Machine:
    """Machine for packs, as far as a forecast needs it."""

    name: str
    flops: float
    """Peak FLOP/s of the whole machine, in the precision of the trials."""
    packs: int
    """Packs at once."""
    execution: str
    devices: int = 1
    """Devices of one pack."""
    memory_bytes: int = 0
    """Memory of one device."""
    kind: str = "cpu"
    """Type of its torch devices."""


@dataclass(frozen=True)
class SizeForecast:
    """Forecast for the trials of one size."""

    size: str
    """Name of the size, as "width 64"."""
    trials: int
    packs: int
    flops: float
    """Arithmetic of one trial."""
    seconds: float
    """Time of all trials, at the utilisation of the forecast."""
    memory_bytes: int
    """Memory of a pack on each device."""


def this_machine(trials: Sequence[Trial], run: RunOptions) -> Machine:
    """Return this machine; the peak of a CPU is measured."""
    from mup_tpu.devices import get_device
    from mup_tpu.devices.peak import cpu_peak_flops, peak_flops
    from mup_tpu.jobs import this_machine as here

    device, precision = get_device(run.device), trials[0].train.precision
    execution = here.execution(run)
    packs, threads = here.room(len(trials), run)
    if device.torch_device.type == "cpu":
        peak = cpu_peak_flops(precision, 1) * threads * packs
        return Machine(f"{packs * threads} cores here", peak, packs, execution, 1, device.free_memory_bytes())
    kind = device.torch_device.type
    members = len(make_packs(trials, 1, execution, gpu=here.gpu(run))[0])
    mesh = device.arrange(members, trials[0].data.batch_size, run.mesh).mesh
    devices = mesh.trial * mesh.data
    peak = peak_flops(device, precision) * devices * packs
    name = device.name if packs == 1 else f"{packs} × {device.name}"
    return Machine(name, peak, packs, execution, devices, device.free_memory_bytes(), kind)


def tpu(kind: TpuType) -> Machine:
    """Describe a TPU of one type; each pack is spread over all chips."""
    chip = kind.generation
    peak = chip.device_flops * kind.devices
    return Machine(
        f"TPU {kind.accelerator_type}", peak, 1, "vmap", kind.devices, chip.device_hbm_bytes, "xla"
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
    """Forecast each size of a sweep, the smallest first."""
    from mup_tpu.devices.base import MeshShape, choose_mesh
    from mup_tpu.training.memory import estimate_pack_bytes

    by_size: dict[str, list[list[Trial]]] = {}
    gpu = machine.name if machine.kind == "cuda" else ""
    packs = make_packs(trials, machine.packs, machine.execution, where.pack_size, gpu)
    for pack in sorted(packs, key=lambda pack: work(pack[0])):
        by_size.setdefault(describe(pack[0], scale), []).append(pack)
    forecasts = []
    for size, packs in by_size.items():
        first, most = packs[0][0], max(map(len, packs))
        mesh = MeshShape(1, 1)
        if machine.devices > 1:
            mesh = choose_mesh(machine.devices, most, first.data.batch_size)
        vocabulary = vocab_size(first)
        flops = sum(training_flops(trial, vocabulary) for pack in packs for trial in pack)
        execution: Execution = "vmap" if machine.execution == "vmap" else "loop"
        needed = estimate_pack_bytes(first, vocabulary, most, execution, mesh, machine.kind, micro_batches)
        count = sum(map(len, packs))
        seconds = flops / (machine.flops * utilisation)
        forecasts.append(SizeForecast(size, count, len(packs), flops / count, seconds, needed))
    return forecasts
