"""Facts about devices: peak arithmetic, memory of TPUs, units for bfloat16.

Drivers read them too, so this module imports torch at first use only.
"""

from __future__ import annotations

import functools
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mup_tpu.config.values import require_one_of

if TYPE_CHECKING:
    from mup_tpu.devices.base import Device

# TFLOP/s of dense matrix products in bfloat16 and in float32 (torch's default, not TF32), by words of torch's
# name of the device; the first that fits. From NVIDIA's and AMD's data sheets, without sparsity, of one GPU:
# the SXM module where nothing else is named. V100 and T4 have no bfloat16; theirs are float16's.
_GPUS: dict[str, tuple[float, float]] = {
    "GB300": (2500.0, 80.0),  # NVL72: 72 GPUs have 180 PFLOP/s in bf16
    "GB200": (2500.0, 80.0),
    "B300": (2250.0, 75.0),  # HGX: 8 GPUs have 18 PFLOP/s in bf16
    "B200": (2250.0, 75.0),
    "H200 NVL": (835.5, 60.0),
    "H200": (989.0, 67.0),
    "H800 PCIe": (756.0, 51.0),
    "H800": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),  # PCIe and SXM alike
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L20": (119.5, 59.8),
    "L4": (121.0, 30.3),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10": (125.0, 31.2),
    "V100 PCIe": (112.0, 14.0),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
    "RTX 6000 Ada": (364.2, 91.1),
    "A6000": (154.8, 38.7),
    "RTX 5090": (209.5, 104.8),  # GeForce: bfloat16 accumulated in float32, as torch does
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI355X": (2516.6, 157.3),
    "MI325X": (1307.4, 163.4),
    "MI300X": (1307.4, 163.4),
    "MI250X": (383.0, 95.7),
}

_CPUINFO = Path("/proc/cpuinfo")

# Product that measures a CPU: large enough for its peak, 2 ms on a core.
_SIDE = 1024
_REPEATS = 5


@dataclass(frozen=True)
class TpuGeneration:
    """One chip of a generation."""

    peak_tflops: float  # Dense products in bfloat16, and in float32 by XLA's default precision, TFLOP/s
    hbm_gib: int  # High-bandwidth memory, GiB
    devices: int = 1  # XLA devices: 2 of v2, v3 and v7, one per core, each with half of the memory

    @property
    def device_flops(self) -> float:
        return 1e12 * self.peak_tflops / self.devices

    @property
    def device_hbm_bytes(self) -> int:
        return self.hbm_gib * 2**30 // self.devices

    @property
    def usable_bytes(self) -> int:
        return int(0.95 * self.device_hbm_bytes)  # by programs; the runtime takes the rest


# Google Cloud's page of each version; types as Google Cloud and Ray write them (v4-16, v5litepod-8).
GENERATIONS = {
    "v2": TpuGeneration(45.0, 16, devices=2),
    "v3": TpuGeneration(123.0, 32, devices=2),
    "v4": TpuGeneration(275.0, 32),
    "v5litepod": TpuGeneration(197.0, 16),
    "v5e": TpuGeneration(197.0, 16),
    "v5p": TpuGeneration(459.0, 95),
    "v6e": TpuGeneration(918.0, 32),
    "v7": TpuGeneration(2307.0, 192, devices=2),
}


@dataclass(frozen=True)
class TpuType:
    """TPU that a pack can be compiled for, or whose time is forecast."""

    accelerator_type: str
    topology: str  # Name in libtpu
    devices: int

    @property
    def generation(self) -> TpuGeneration:
        return GENERATIONS[self.accelerator_type.partition("-")[0]]


TPU_TYPES = {
    tpu.accelerator_type: tpu
    for tpu in (
        TpuType("v2-8", "v2:2x2", 8),
        TpuType("v3-8", "v3:2x2", 8),
        TpuType("v4-8", "v4:2x2x1", 4),
        TpuType("v4-16", "v4:2x2x2", 8),
        TpuType("v5litepod-1", "v5e:1x1", 1),
        TpuType("v5litepod-4", "v5e:2x2", 4),
        TpuType("v5litepod-8", "v5e:2x4", 8),
        TpuType("v5p-8", "v5p:2x2x1", 4),
        TpuType("v6e-1", "v6e:1x1", 1),
        TpuType("v6e-4", "v6e:2x2", 4),
        TpuType("v6e-8", "v6e:2x4", 8),
        TpuType("v7-8", "tpu7x:2x2x1", 8),
    )
}


def tpu_type(name: str) -> TpuType:
    name = name.replace("v5e-", "v5litepod-")  # Google Cloud uses both
    require_one_of("TPU type", name, tuple(TPU_TYPES))
    return TPU_TYPES[name]


def tpu_generation(accelerator_type: str) -> TpuGeneration | None:
    return GENERATIONS.get(accelerator_type.partition("-")[0])


def tpu_device_files() -> list[Path]:
    # /dev/accel* up to v4, /dev/vfio/* after
    return sorted([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")])


def peak_flops(device: Device, precision: str) -> float:
    """Return the peak FLOP/s of one of a device's parts (a chip, or all threads of the process on a CPU).

    From the maker's table on accelerators, measured on a CPU; nan if unknown.
    """
    import torch

    kind = device.torch_device.type
    if kind == "cuda":
        return gpu_peak_flops(device.name, precision) or math.nan
    if device.name == "xla:TPU" and precision != "float64":
        return tpu_peak_flops(os.environ.get("TPU_ACCELERATOR_TYPE", ""))
    if device.name.startswith("tpu:") and precision != "float64":
        return tpu_peak_flops(device.name.removeprefix("tpu:"))
    if device.name == "xla:CPU":
        if precision == "bf16" and not cpu_bfloat16_units():
            precision = "float32"  # XLA for CPUs multiplies bfloat16 in float32
        return cpu_peak_flops(precision, torch.get_num_threads()) / (device.mesh.trial * device.mesh.data)
    return cpu_peak_flops(precision, torch.get_num_threads()) if kind == "cpu" else math.nan


def gpu_peak_flops(name: str, precision: str) -> float | None:
    """Return the peak of a GPU by torch's name of it, or as people write it: RTX4090, h100-pcie."""
    written = f" {_words(name)} "
    known = next((known for known in _GPUS if f" {_words(known)} " in written), None)
    if known is None or precision == "float64" or " laptop " in written:
        return None
    return 1e12 * _GPUS[known][precision != "bf16"]


def _words(name: str) -> str:
    return " ".join(re.findall(r"[a-z]+|\d+", name.lower()))


def tpu_peak_flops(accelerator_type: str) -> float:
    known = tpu_generation(accelerator_type)
    return known.device_flops if known else math.nan


@functools.cache
def cpu_peak_flops(precision: str, threads: int) -> float:
    """Measure the FLOP/s of a large matrix product on torch's threads, the best of five: 0.1 s, then kept."""
    import torch

    dtype = {"bf16": torch.bfloat16, "float64": torch.float64}.get(precision, torch.float32)
    # Without units torch emulates bfloat16, a hundred times slower.
    side = _SIDE // 4 if precision == "bf16" and not cpu_bfloat16_units() else _SIDE
    a = torch.ones(side, side, dtype=dtype)
    # A thread's time: other processes that share its core at this moment do not lower the peak.
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds = []
    for _ in range(1 + _REPEATS):
        began = clock()
        a @ a
        seconds.append(clock() - began)
    return 2 * side**3 / min(seconds[1:])  # the first one warms up


def cpu_bfloat16_units() -> tuple[str, ...] | None:
    """Return the instructions by which the CPU multiplies bfloat16; None if the system does not say.

    Without them torch emulates such products, and precision bf16 is far slower than float32.
    """
    if not _CPUINFO.exists():
        return None
    flags = set(_CPUINFO.read_text().split())
    return tuple(name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in flags)


def bfloat16_units(device: str) -> tuple[bool, str]:
    """Return whether the device "cpu", "cuda", "tpu" or "xla" has units for bfloat16, and why, in words."""
    if device == "tpu":
        return True, "TPUs multiply bfloat16"
    if device == "xla":
        is_tpu = os.environ.get("PJRT_DEVICE") != "CPU"
        return is_tpu, "TPUs multiply bfloat16" if is_tpu else "XLA's CPU client is no TPU"
    if device == "cpu":
        units = ", ".join(cpu_bfloat16_units() or ())
        return bool(units), f"this CPU has {units}" if units else "this CPU shows no units for bfloat16"
    import torch

    from mup_tpu.devices.base import why_no_gpu

    if why_no_gpu() is not None:
        return False, "torch sees no GPU here"
    has = torch.cuda.get_device_capability() >= (8, 0)
    return has, f"{torch.cuda.get_device_name()} has {'' if has else 'no '}units for bfloat16"
