"""Peak arithmetic of a device, for the share of it that training uses."""

from __future__ import annotations

import functools
import math
import os
import re
import time

import torch

from mup_tpu.devices.base import Device
from mup_tpu.devices.tpus import known_generation

# TFLOP/s of dense matrix products in bfloat16 and in float32 (torch's default, not TF32), from NVIDIA's data
# sheets; by words of torch's name of the device, the first that fits.
_GPUS: dict[str, tuple[float, float]] = {
    "H200": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
}

_SIDE = 1024
_REPEATS = 5


def peak_flops(device: Device, precision: str) -> float:
    """Peak FLOP/s of one of a device's parts (a chip, or all threads of the process on a CPU).

    From the maker's table on accelerators, measured on a CPU; nan if unknown.
    """
    kind = device.torch_device.type
    if kind == "cuda":
        return gpu_peak_flops(device.name, precision) or math.nan
    if device.name == "xla:TPU" and precision != "float64":
        return tpu_peak_flops(os.environ.get("TPU_ACCELERATOR_TYPE", ""))
    if device.name == "xla:CPU":
        # On a CPU without bfloat16 XLA multiplies in float32; torch's emulation is far slower.
        dtypes = ("bf16", "float32") if precision == "bf16" else (precision,)
        peak = max(cpu_peak_flops(dtype, torch.get_num_threads()) for dtype in dtypes)
        return peak / (device.mesh.trial * device.mesh.data)
    return cpu_peak_flops(precision, torch.get_num_threads()) if kind == "cpu" else math.nan


def gpu_peak_flops(name: str, precision: str) -> float | None:
    """Peak FLOP/s of one GPU by words of its name; None if unknown."""
    words = re.compile(r"\b(" + "|".join(_GPUS) + r")\b").search(name)
    if words is None or precision == "float64":
        return None
    return 1e12 * _GPUS[words[1]][precision != "bf16"]


def tpu_peak_flops(accelerator_type: str) -> float:
    """Peak FLOP/s of one XLA device of a TPU type such as v4-16; nan if unknown."""
    known = known_generation(accelerator_type)
    return known.device_flops if known else math.nan


@functools.cache
def cpu_peak_flops(precision: str, threads: int) -> float:
    """FLOP/s of a large matrix product on torch's threads, the best of five: 0.1 s, then kept."""
    dtype = {"bf16": torch.bfloat16, "float64": torch.float64}.get(precision, torch.float32)
    a = torch.ones(_SIDE, _SIDE, dtype=dtype)
    # One thread's own time: other processes that share its core at this moment do not lower the peak.
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds = []
    for _ in range(1 + _REPEATS):
        began = clock()
        a @ a
        seconds.append(clock() - began)
    return 2 * _SIDE**3 / min(seconds[1:])
