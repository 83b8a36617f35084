"""Memory of a pack, estimated beforehand: a pack that does not fit is split.

The estimate counts numbers that autograd keeps for the backward pass, per token and layer, by the
architecture's declaration, after Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) without dropout.
Tests compare it with measured peaks on CPUs and CUDA (`benchmarks/gpu_memory.csv`), and for XLA with the TPU
compilers' needs (`benchmarks/tpu_memory.csv`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mup_tpu.config import Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.devices import Device, Execution
from mup_tpu.devices.base import ONE_DEVICE, MeshShape
from mup_tpu.errors import DeviceFailed, PackTooLarge, reason
from mup_tpu.models import Declaration, declare
from mup_tpu.models.kernels.attention import choose_form, has_kernel
from mup_tpu.models.kernels.scans import SCANNED_FROM
from mup_tpu.training.optimizer import state_slots

_IN_PIECES = 1.1
"""Factor of malloc's memory over the size of temporary tensors: up to 1.15 in processes (measured)."""
_SCANNED_VECTORS = 3.5
"""Vectors of the model's width that a block of XLA's loop keeps, a token."""
_FROM_CUDA = 1.15
"""Factor of memory that torch's allocator takes from CUDA over what it hands out (median of 1.01 to 1.6)."""
_CUDA_GRADIENTS = {"bf16": 1.8, "float32": 1.0}
"""Float32 numbers for a parameter's gradient, by precision; bf16 has copies of weights and gradients."""
_CUDA_WEIGHTS = {"bf16": 1.5, "float32": 1.0}
"""Float32 numbers kept for a weight of attention where no fused kernel takes the heads."""
_CUDA_AT_ONCE = 3
"""Numbers for each logit of a token, or each score of one layer, at the peak."""
_CUDA_BYTES = 64 * 2**20
"""Workspaces of CUDA's libraries (measured)."""


@dataclass(frozen=True)
class _Counts:
    """Numbers in memory on each device, and an estimator of their peak for each execution."""

    trial: Trial
    vocab_size: int
    members: int
    """Members on each device."""
    mesh: MeshShape
    micro_batches: int

    @cached_property
    def declaration(self) -> Declaration:
        return declare(self.trial.model, self.vocab_size, self.trial.data.sequence_length)

    @property
    def bf16(self) -> bool:
        return self.trial.train.precision == "bf16"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        data = self.trial.data
        return math.ceil(data.batch_size / self.mesh.data / self.micro_batches) * data.sequence_length

    @property
    def pairs(self) -> int:
        """Heads times positions; times tokens, attention's scores."""
        return self.declaration.heads * self.trial.data.sequence_length

    @property
    def kept(self) -> int:
        """Parameters and optimizer state of a member."""
        parameters = self.declaration.parameters
        slots = state_slots(self.trial, parameters).values()
        return self.declaration.total + sum(parameters[name].size for names in slots for name in names)

    @property
    def sums(self) -> int:
        """Gradients summed over micro-batches, beside the gradients of one micro-batch."""
        return self.declaration.total if self.micro_batches > 1 else 0

    def _activations(self, execution: Execution, in_parts: float) -> float:
        """Count activations of a member on a CPU; micro-batches fragment malloc's memory by `in_parts`."""
        kept = self.declaration.activations
        a_layer = kept.vectors[execution] * self.declaration.width + kept.scores[execution] * self.pairs
        a_token = self.declaration.layers * a_layer + kept.logits * self.vocab_size
        at_once = _IN_PIECES * self.tokens * a_token
        return at_once * in_parts if self.micro_batches > 1 else at_once

    def in_turns(self) -> float:
        """Gradients and activations of one member at a time.

        Scores count with torch.compile too. On a CPU bf16 counts as float32: norms, softmax and loss are
        float32, and both copies of a cast are alive for a while.
        """
        at_once = self._activations("loop", in_parts=1.3)
        return self.members * self.kept + (self.sums + self.declaration.total + at_once)

    def stacked(self) -> float:
        at_once = self._activations("vmap", in_parts=1.1)
        return self.members * self.kept + self.members * (self.sums + self.declaration.total + at_once)

    def on_cuda(self, execution: Execution) -> float:
        """Count gradients and activations of all members, or of one in turns, in torch's allocator."""
        declaration, precision = self.declaration, "bf16" if self.bf16 else "float32"
        # In turns, torch pads the heads to a size that a kernel takes.
        takes_heads = execution == "loop" or has_kernel(declaration.head_size)
        is_fused = takes_heads and self.trial.train.precision != "float64"
        pairs = 0 if is_fused else self.pairs
        a_layer = declaration.activations.cuda_vectors[precision] * declaration.width
        a_layer += _CUDA_WEIGHTS[precision] * pairs
        at_once = _CUDA_AT_ONCE * max(self.vocab_size, pairs)
        evaluation = declaration.activations.cuda_evaluation * declaration.width if self.bf16 else 0.0
        activations = self.tokens * (declaration.layers * a_layer + at_once + evaluation)
        gradients = self.sums + _CUDA_GRADIENTS[precision] * declaration.total
        training = self.members if execution == "vmap" else 1
        return _FROM_CUDA * (self.members * self.kept + training * (gradients + activations))

    def stacked_by_xla(self) -> float:
        """Count as `stacked` what XLA compiles: it allocates gradients as it frees activations."""
        declaration, kept = self.declaration, self.declaration.activations
        form = choose_form(True, False, self.trial.data.sequence_length)
        if declaration.layers >= SCANNED_FROM:
            # A block keeps its input, and the loop has all blocks' parameters stacked.
            kept_by_layers = declaration.layers * _SCANNED_VECTORS * declaration.width
            at_once = self.tokens * (kept_by_layers + kept.xla_logits * self.vocab_size) + declaration.total
        else:
            a_layer = kept.xla_vectors[form] * declaration.width + kept.xla_scores[form] * self.pairs
            share = kept.xla_bf16 if self.bf16 else 1.0
            at_once = self.tokens * (share * declaration.layers * a_layer + kept.xla_logits * self.vocab_size)
        return self.members * (self.kept + self.sums + max(at_once, declaration.total))


def estimate_pack_bytes(
    trial: Trial,
    vocab_size: int,
    members: int,
    execution: Execution,
    mesh: MeshShape = ONE_DEVICE,
    kind: str = "cpu",
    micro_batches: int = 1,
) -> int:
    """Estimate the peak memory of training a pack, in bytes on each device, beside the process's own.

    `trial` is any of the pack, and `kind` the type of the torch device: "cpu", "cuda" or "xla".
    """
    counts = _Counts(trial, vocab_size, math.ceil(members / mesh.trial), mesh, micro_batches)
    if kind == "cuda":
        numbers = counts.on_cuda(execution)
    elif execution == "loop":
        numbers = counts.in_turns()
    else:
        numbers = counts.stacked_by_xla() if kind == "xla" else counts.stacked()
    size = 8 if trial.train.precision == "float64" else 4
    return int(size * numbers) + (_CUDA_BYTES if kind == "cuda" else 0)


def check_fits(
    trial: Trial, vocab_size: int, members: int, device: Device, execution: Execution, micro_batches: int = 1
) -> None:
    """Check that a pack of several trials fits into free memory; a single trial is always tried.

    Raises:
        PackTooLarge: the estimate exceeds the free memory.
    """

    def needed(members: int) -> int:
        kind = device.torch_device.type
        return estimate_pack_bytes(trial, vocab_size, members, execution, device.mesh, kind, micro_batches)

    # Asked even for a single trial: on a CPU this frees memory that a pack too large has left.
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
            )  # then come torch's own options
            raise PackTooLarge(f"{trials} ran out of memory ({why}){hint}", members // 2) from None
        if any(sign in message for sign in _FAILURES):
            raise DeviceFailed(f"the GPU failed ({message})") from None
        raise


# A thread that cannot start has no room for its stack, or there are too many threads. CUDA's libraries say
# that an allocation failed (CUBLAS_STATUS_ALLOC_FAILED).
_SIGNS = ("out of memory", "allocate memory", "RESOURCE_EXHAUSTED", "start new thread", "ALLOC_FAILED")


_FAILURES = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ")
"""Beginnings of errors of CUDA, as torch and Triton word them; those of its libraries among them."""


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
