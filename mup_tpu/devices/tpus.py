"""TPU generations: peak arithmetic and memory by type, as Google Cloud and Ray write it (v4-16, v5litepod-8).

Source: Google Cloud's page of each version. Without torch, for drivers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class TpuGeneration:
    """One chip of a generation."""

    peak_tflops: float
    """Dense matrix products in bfloat16, and in float32 by XLA's default precision, TFLOP/s."""
    hbm_gib: int
    """High-bandwidth memory, GiB."""
    devices: int = 1
    """XLA devices: 2 up to v3, one a core, each with half of the memory."""

    @property
    def device_flops(self) -> float:
        """Peak FLOP/s of one XLA device."""
        return 1e12 * self.peak_tflops / self.devices

    @property
    def device_hbm_bytes(self) -> int:
        """High-bandwidth memory of one XLA device, bytes."""
        return self.hbm_gib * 2**30 // self.devices


GENERATIONS = {
    "v2": TpuGeneration(45.0, 16, devices=2),
    "v3": TpuGeneration(123.0, 32, devices=2),
    "v4": TpuGeneration(275.0, 32),
    "v5litepod": TpuGeneration(197.0, 16),
    "v5e": TpuGeneration(197.0, 16),
    "v5p": TpuGeneration(459.0, 95),
    "v6e": TpuGeneration(918.0, 32),
}


def generation(accelerator_type: str) -> TpuGeneration:
    """The generation of a type such as v4-16."""
    if (found := known_generation(accelerator_type)) is None:
        raise ConfigError(
            f"TPU type {accelerator_type!r} is not known; it begins with one of {', '.join(GENERATIONS)}"
        )
    return found


def known_generation(accelerator_type: str) -> TpuGeneration | None:
    """The generation of a type; None if it is unknown."""
    return GENERATIONS.get(accelerator_type.partition("-")[0])


def device_files() -> list[Path]:
    """Files through which a process reaches its chips: /dev/accel* up to v4, /dev/vfio/* after."""
    return sorted([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")])
