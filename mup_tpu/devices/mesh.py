"""Mesh of devices: how a pack's members, and its batches, are split over them. Without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mup_tpu.errors import ConfigError


@dataclass(frozen=True)
class MeshShape:
    """Number of parts that members (`trial`) and batches (`data`) are split into."""

    trial: int = 1
    data: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Shape from `trial=4,data=2`."""
        match = re.fullmatch(r"trial=([1-9]\d*),data=([1-9]\d*)", text)
        if not match:
            raise ConfigError(f"mesh {text!r} is not understood; write auto, or for example trial=4,data=2")
        return cls(int(match[1]), int(match[2]))


ONE_DEVICE = MeshShape()


def choose_mesh(devices: int, members: int, batch_size: int) -> MeshShape:
    """The longest trial axis that pads members by at most a third; the remaining devices split the batch.

    Width does not matter: memory, too, is split along the trial axis. A pack that does not fit needs fewer
    members, and the data axis then takes more devices.
    """
    for trial in sorted((d for d in range(1, devices + 1) if devices % d == 0), reverse=True):
        padded = -(-members // trial) * trial
        if 3 * padded <= 4 * members and batch_size % (devices // trial) == 0:
            return MeshShape(trial, devices // trial)
    return MeshShape(devices, 1)
