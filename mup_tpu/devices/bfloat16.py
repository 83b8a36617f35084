"""Units that multiply bfloat16: whether a device has them, without torch for CPUs and TPUs."""

from __future__ import annotations

import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_units(cpuinfo: Path | None = None) -> tuple[str, ...] | None:
    """Instructions by which the CPU multiplies bfloat16; None if the system does not say.

    Without them torch emulates such products, and precision bf16 is far slower than float32.
    """
    path = cpuinfo or CPUINFO
    if not path.exists():
        return None
    flags = set(path.read_text().split())
    return tuple(name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in flags)


def units(device: str) -> tuple[bool, str]:
    """Whether the device "cpu", "cuda" or "xla" has units for bfloat16, and the finding in words."""
    if device == "xla":
        is_tpu = os.environ.get("PJRT_DEVICE") != "CPU"
        return is_tpu, "TPUs multiply bfloat16" if is_tpu else "XLA's CPU client is no TPU"
    if device == "cpu":
        found = ", ".join(cpu_units() or ())
        return bool(found), f"this CPU has {found}" if found else "this CPU shows no units for bfloat16"
    import torch

    from mup_tpu.devices.gpus import why_no_gpu

    if why_no_gpu() is not None:
        return False, "torch sees no GPU here"
    has = torch.cuda.get_device_capability() >= (8, 0)
    return has, f"{torch.cuda.get_device_name()} has {'' if has else 'no '}units for bfloat16"
