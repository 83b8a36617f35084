"""Memory of a pack, estimated beforehand: a pack that does not fit is split.

The estimate is the state, the logits, and vectors that a layer keeps for the backward pass. Most packs need
half to twice as much (`tests/training/measured`): a pack that fails for want of memory is halved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from mup_tpu.config import Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.devices import Device, Execution
from mup_tpu.devices.base import ONE_DEVICE, MeshShape
from mup_tpu.errors import DeviceFailed, PackTooLarge, reason
from mup_tpu.models import declare
from mup_tpu.models.layers import rows_at_once
from mup_tpu.training.members import state_slots

# Vectors of the model's width that a layer keeps per token, by the kind of the torch device, as measured
_KEPT = {"cpu": 40.0, "cuda": 22.0, "xla": 12.0, "tpu": 10.0}
_LOGITS = 3.0  # numbers per token and vocabulary entry: logits, log-softmax, and a gradient
_GATHERED = 4.0  # copies, in each process, of the largest part of a split trial

# A thread that cannot start has no room for its stack, or there are too many threads. CUDA's libraries say
# that an allocation failed (CUBLAS_STATUS_ALLOC_FAILED).
_SIGNS = ("out of memory", "allocate memory", "RESOURCE_EXHAUSTED", "start new thread", "ALLOC_FAILED")

# Beginnings of errors of CUDA and its libraries, as torch and Triton word them
_FAILURES = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ")


def estimate_pack_bytes(
    trial: Trial,
    vocab_size: int,
    members: int,
    execution: Execution,
    mesh: MeshShape = ONE_DEVICE,
    kind: str = "cpu",
    micro_batches: int = 1,
    shards: int = 1,
) -> int:
    """Estimate the peak memory of training a pack, in bytes on each device, beside the process's own.

    `trial` is any of the pack, and `kind` the type of the torch device: "cpu", "cuda", "xla" or "tpu".
    `shards` are the processes that a single trial is split over.
    """
    data = trial.data
    declaration = declare(trial.model, vocab_size, data.sequence_length)
    total, width, layers = declaration.total, declaration.width, declaration.layers
    members = math.ceil(members / mesh.trial)  # members on each device
    training = (
        members if execution == "vmap" else 1
    )  # members that have gradients and activations at the same time
    tokens = math.ceil(data.batch_size / mesh.data / shards / micro_batches) * data.sequence_length
    slots = state_slots(trial, declaration.parameters).values()
    state = (total + sum(declaration.parameters[name].size for names in slots for name in names)) / shards
    if shards > 1:
        first = declaration.blocks[0]
        block = sum(p.size for name, p in declaration.parameters.items() if name.startswith(first))
        state += _GATHERED * max(block, total - layers * block)
    gradients = total / shards * (2 if micro_batches > 1 else 1)  # micro-batches also need their sum
    rows = min(tokens, rows_at_once(vocab_size)) if kind == "cpu" else tokens  # tokens with logits in memory
    activations = tokens * layers * _KEPT[kind] * width + _LOGITS * vocab_size * rows
    numbers = members * state + training * (gradients + activations)
    return int(numbers * (8 if trial.train.precision == "float64" else 4))


def check_fits(
    trial: Trial, vocab_size: int, members: int, device: Device, execution: Execution, micro_batches: int = 1
) -> None:
    """Check that a pack of several trials fits into free memory; a single trial is always tried."""

    def needed(members: int) -> int:
        kind = device.torch_device.type
        return estimate_pack_bytes(trial, vocab_size, members, execution, device.mesh, kind, micro_batches)

    # A single trial needs this call too: on a CPU it frees the memory of a failed pack.
    free = device.free_memory_bytes()
    if members == 1 or needed(members) <= free:
        return
    fits = members
    while fits > 1 and needed(fits) > free:
        fits -= 1
    size = declare(trial.model, vocab_size, trial.data.sequence_length).total
    each = " on each device" if device.mesh != ONE_DEVICE else ""
    raise PackTooLarge(
        f"{members} trials of {write_scale('params', size)} parameters need about "
        f"{_size(needed(members))}{each}, and {_size(free)} are free on {device.name}",
        fits,
    )


@contextlib.contextmanager
def device_errors(members: int) -> Iterator[None]:
    """Convert errors of the device in the block.

    Raises:
        PackTooLarge: torch, CUDA or XLA ran out of memory; half of the pack may fit.
        DeviceFailed: a GPU has failed. CUDA then refuses all further calls of this process.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        message = reason(error)
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _SIGNS):
            trials = f"{members} trials" if members > 1 else "a trial"
            hint = "" if members > 1 else "; --micro-batches may help"
            why = message.partition(" Of the allocated memory")[0].rstrip(
                "."
            )  # the rest are options of torch
            raise PackTooLarge(f"{trials} ran out of memory ({why}){hint}", members // 2) from None
        if any(sign in message for sign in _FAILURES):
            raise DeviceFailed(f"the GPU failed ({message})") from None
        raise


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
