"""How much memory a pack needs, estimated before it is made, so that one that does not fit is split instead
of dying.

Counted in numbers a token and layer that autograd keeps for the backward pass, which the architecture
declares, after the account of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) without dropout. Tests
hold it to measured peaks, and for XLA to what the TPUs' compilers need (`benchmarks/tpu_memory.csv`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from mup_tpu.config import Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.devices import Device, Execution
from mup_tpu.devices.base import ONE_DEVICE, MeshShape
from mup_tpu.errors import PackTooLarge, reason
from mup_tpu.models import declare
from mup_tpu.models.attention import choose_form
from mup_tpu.models.blocks import SCANNED_FROM
from mup_tpu.training.optimizer import state_slots

_IN_PIECES = 1.1
"""What malloc holds of what comes and goes, over what is used: up to 1.15 in processes (measured)."""
_SCANNED_VECTORS = 3.5
"""Vectors of the model's width that a block of a loop keeps a token."""


def estimate_pack_bytes(
    trial: Trial,
    vocab_size: int,
    members: int,
    execution: Execution,
    mesh: MeshShape = ONE_DEVICE,
    by_xla: bool = False,
    micro_batches: int = 1,
) -> int:
    """Peak memory of training a pack of so many trials like this one, in bytes on each device, without what
    the process has.

    Args:
        trial: any of them; they share their shape.
        vocab_size: tokens of the vocabulary.
        members: how many.
        execution: "loop" needs the gradients and activations of one member at a time, "vmap" those of all.
        mesh: how many ways members and batches are split over devices.
        by_xla: whether XLA compiles the step.
        micro_batches: parts that a batch goes through the network in.
    """
    d, declaration = trial.data, declare(trial.model, vocab_size, trial.data.sequence_length)
    kept = declaration.activations
    members = math.ceil(members / mesh.trial)
    number = 8 if trial.train.precision == "float64" else 4
    tokens = math.ceil(d.batch_size / mesh.data / micro_batches) * d.sequence_length
    state = sum(
        declaration.parameters[name].size
        for names in state_slots(trial, declaration.parameters).values()
        for name in names
    )
    held = declaration.total + state
    bf16 = trial.train.precision == "bf16"
    pairs = declaration.heads * d.sequence_length
    sums = declaration.total if micro_batches > 1 else 0  # of gradients, beside those of a part
    if by_xla and execution == "vmap":
        form = choose_form(True, False, d.sequence_length)
        a_layer = kept.xla_vectors[form] * declaration.width + kept.xla_scores[form] * pairs
        share = kept.xla_bf16 if bf16 else 1.0
        if declaration.layers >= SCANNED_FROM:
            # A block keeps what it read, and the loop has all blocks' parameters stacked.
            kept_by_layers = declaration.layers * _SCANNED_VECTORS * declaration.width
            at_once = tokens * (kept_by_layers + kept.xla_logits * vocab_size) + declaration.total
        else:
            at_once = tokens * (share * declaration.layers * a_layer + kept.xla_logits * vocab_size)
        # Gradients come as what layers keep goes.
        return int(number * members * (held + sums + max(at_once, declaration.total)))
    a_layer = kept.vectors[execution] * declaration.width
    # torch's fused kernels keep no scores: in turns those of bf16, and, counted all the same, of float32 on a
    # GPU or through torch.compile. bf16 saves nothing else here: norms, softmax and loss stay float32, and
    # casts keep both copies.
    if execution == "vmap" or not bf16:
        a_layer += kept.scores[execution] * pairs
    at_once = _IN_PIECES * tokens * (declaration.layers * a_layer + kept.logits * vocab_size)
    if micro_batches > 1:
        # Sums that stay from part to part lie between what comes and goes, and malloc holds more (measured).
        at_once *= 1.3 if execution == "loop" else 1.1
    alive = members if execution == "vmap" else 1
    return int(number * (members * held + alive * (sums + declaration.total + at_once)))


def check_fits(
    trial: Trial,
    vocab_size: int,
    members: int,
    device: Device,
    execution: Execution,
    micro_batches: int = 1,
) -> None:
    """Fail before a pack is made that would not fit in what is free now; a single trial is tried in any case.

    Raises:
        PackTooLarge: it is estimated not to fit.
    """

    def needed(members: int) -> int:
        by_xla = device.torch_device.type == "xla"
        return estimate_pack_bytes(trial, vocab_size, members, execution, device.mesh, by_xla, micro_batches)

    # Asked for a single trial too: on a CPU it hands back what a pack that was too large left.
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
        f"{_size(needed(members))}{each}, "
        f"and {_size(free)} are free on {device.name}",
        fits,
    )


@contextlib.contextmanager
def half_fits(members: int) -> Iterator[None]:
    """Running out of memory in here says that half of a pack might fit.

    Raises:
        PackTooLarge: in place of the out-of-memory errors of torch, CUDA and XLA, where there are members to
            split.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if members == 1 or not (isinstance(error, MemoryError) or any(s in str(error) for s in _SIGNS)):
            raise
        raise PackTooLarge(f"{members} trials ran out of memory ({reason(error)})", members // 2) from None


# A thread that cannot start found no room for its stack, or too many others.
_SIGNS = ("out of memory", "allocate memory", "RESOURCE_EXHAUSTED", "start new thread")


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
