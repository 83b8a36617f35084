"""Memory of TPUs, by counting placed tensors: torch_xla 2.9 cannot ask one (pytorch/xla 9022)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mup_tpu.devices.tpus import GENERATIONS, known_generation
from mup_tpu.internals import torch_xla as private

_USABLE = 0.95
"""Share of a TPU's memory that programs can use; the runtime takes the rest."""


class Held:
    """Bytes that this process has placed on each device and not dropped."""

    def __init__(self) -> None:
        self._bytes: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._lock = threading.Lock()  # a thread of its own places batches
        self.peak = 0

    def add(self, tensor: Tensor, size: int) -> None:
        """Count a tensor of this size on each device until it is dropped."""
        with self._lock:
            self._bytes[tensor] = size
            self.peak = max(self.peak, sum(self._bytes.values()))

    def free(self) -> int:
        """Bytes left on each device."""
        with self._lock:
            return int(_USABLE * _capacity()) - sum(self._bytes.values())


HELD = Held()


def _capacity() -> int:
    """Memory of each TPU device here, bytes; of an unknown type, the least of all generations."""
    kind = os.environ.get("TPU_ACCELERATOR_TYPE")
    if kind is None:
        with contextlib.suppress(Exception):  # any failure of the request to the VM's metadata server
            kind = private.tpu_accelerator_type()
    known = known_generation(kind or "")
    return min(g.device_hbm_bytes for g in ([known] if known else GENERATIONS.values()))
