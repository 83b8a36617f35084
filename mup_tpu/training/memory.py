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

from mup_tpu.config import Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.devices import Device, Execution
from mup_tpu.devices.base import BY_XLA, ONE_DEVICE, MeshShape
from mup_tpu.errors import DeviceFailed, PackTooLarge, reason
from mup_tpu.models import declare
from mup_tpu.models.attention import choose_form, has_kernel
from mup_tpu.models.layers import SCANNED_FROM, rows_at_once
from mup_tpu.training.members import state_slots

_IN_PIECES = 1.1  # Malloc's memory over the size of temporary tensors: up to 1.15 in processes (measured)
_TORCHTPU = 0.77  # Activations of TorchTPU's programs over torch_xla's, of newer libtpus (two packs, v5e)
_SCANNED_VECTORS = 3.5  # Vectors of the model's width that a block of XLA's loop keeps per token
_FROM_CUDA = 1.15  # Memory that torch's allocator takes from CUDA over what it hands out (1.01 to 1.6)
_CUDA_GRADIENTS = {"bf16": 1.8, "float32": 1.0}
"""Float32 numbers for a parameter's gradient, by precision; bf16 has copies of weights and gradients."""
_CUDA_WEIGHTS = {"bf16": 1.5, "float32": 1.0}
"""Float32 numbers kept for a weight of attention where no fused kernel takes the heads."""
_CUDA_AT_ONCE = 3  # Numbers for each logit of a token, or each score of one layer, at the peak
_GATHERED_BLOCKS, _GATHERED_REST = 4.0, 3.0
"""Copies of a block's parameters, and of those outside of blocks, that a process of a sharded trial has
whole: parameters, their gradients, and buffers of the exchange."""
_CUDA_BYTES = 64 * 2**20  # Workspaces of CUDA's libraries (measured)


# A thread that cannot start has no room for its stack, or there are too many threads. CUDA's libraries say
# that an allocation failed (CUBLAS_STATUS_ALLOC_FAILED).
_SIGNS = ("out of memory", "allocate memory", "RESOURCE_EXHAUSTED", "start new thread", "ALLOC_FAILED")

# Beginnings of errors of CUDA, as torch and Triton word them; those of its libraries among them.
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
    data, precision = trial.data, trial.train.precision
    declaration = declare(trial.model, vocab_size, data.sequence_length)
    kept, total = declaration.activations, declaration.total
    width, layers = declaration.width, declaration.layers
    members = math.ceil(members / mesh.trial)  # on each device
    # Of a micro-batch
    tokens = math.ceil(data.batch_size / mesh.data / shards / micro_batches) * data.sequence_length
    pairs = declaration.heads * data.sequence_length  # times tokens: attention's scores
    slots = state_slots(trial, declaration.parameters).values()
    numbers_of_slots = sum(declaration.parameters[name].size for names in slots for name in names)
    gradients, gathered = total / shards, 0.0
    if shards > 1:
        block = sum(
            p.size for name, p in declaration.parameters.items() if name.startswith(declaration.blocks[0])
        )
        gathered = _GATHERED_BLOCKS * block + _GATHERED_REST * (total - layers * block)
    state = (total + numbers_of_slots) / shards + gathered
    sums = gradients if micro_batches > 1 else 0  # gradients summed over micro-batches, beside those of one
    training = members if execution == "vmap" else 1  # members with gradients and activations at a time
    if kind == "cuda":
        dtype = "bf16" if precision == "bf16" else "float32"
        # In turns, torch pads the heads to a size that a kernel takes.
        takes_heads = execution == "loop" or has_kernel(declaration.head_size)
        pairs = 0 if takes_heads and precision != "float64" else pairs
        a_layer = kept.cuda_vectors[dtype] * width + _CUDA_WEIGHTS[dtype] * pairs
        at_once = _CUDA_AT_ONCE * max(vocab_size, pairs)
        evaluation = kept.cuda_evaluation * width if dtype == "bf16" else 0.0
        activations = tokens * (layers * a_layer + at_once + evaluation)
        kept_gradients = sums + _CUDA_GRADIENTS[dtype] * gradients
        numbers = _FROM_CUDA * (members * state + training * (kept_gradients + activations))
    elif kind in BY_XLA and execution == "vmap":
        # XLA allocates gradients as it frees activations.
        form = choose_form(True, data.sequence_length)
        if layers >= SCANNED_FROM and kind == "xla":  # TorchTPU loops over no blocks
            # A block keeps its input, and the loop has all blocks' parameters stacked.
            activations = tokens * (layers * _SCANNED_VECTORS * width + kept.xla_logits * vocab_size) + total
        else:
            a_layer = kept.xla_vectors[form] * width + kept.xla_scores[form] * pairs
            share = kept.xla_bf16 if precision == "bf16" else 1.0
            if kind == "tpu" and form == "matmul":
                share *= _TORCHTPU  # attention by rows needs as much (1 154 MiB, estimated 1 195)
            activations = tokens * (share * layers * a_layer + kept.xla_logits * vocab_size)
        numbers = members * (state + sums + max(activations, total))
    else:
        # In turns, scores count with torch.compile too. bf16 counts as float32: norms, softmax and loss are
        # float32, and both copies of a cast are alive for a while.
        a_layer = kept.vectors[execution] * width + kept.scores[execution] * pairs
        # A split trial's are gone where its gathered parameters are most.
        alive_in = 2 if shards == 1 else 0
        passing = kept.passing * width * max(0, layers - alive_in) if execution == "loop" else 0.0
        # Of a large vocabulary only some tokens' logits are in memory at once. (On GPUs too, but what is left
        # there was measured with all of them.)
        logits = kept.logits * vocab_size * min(tokens, rows_at_once(vocab_size))
        activations = tokens * (layers * a_layer - passing) + logits
        if shards == 1:  # else malloc keeps nothing
            activations *= _IN_PIECES
        if micro_batches > 1:  # which fragment malloc's memory
            activations *= 1.3 if execution == "loop" else 1.1
        numbers = members * state + training * (sums + gradients + activations)
    size = 8 if precision == "float64" else 4
    return int(size * numbers) + (_CUDA_BYTES if kind == "cuda" else 0)


def check_fits(
    trial: Trial, vocab_size: int, members: int, device: Device, execution: Execution, micro_batches: int = 1
) -> None:
    """Check that a pack of several trials fits into free memory; a single trial is always tried."""

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
            why = message.partition(" Of the allocated memory")[0].rstrip(".")  # then come torch's options
            raise PackTooLarge(f"{trials} ran out of memory ({why}){hint}", members // 2) from None
        if any(sign in message for sign in _FAILURES):
            raise DeviceFailed(f"the GPU failed ({message})") from None
        raise


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
