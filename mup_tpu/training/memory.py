"""How much memory a pack needs, estimated before it is made, so that one that does not fit is split instead
of dying.

Counted in numbers a token and layer that autograd keeps for the backward pass, after the account of
Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) without dropout; tests hold it to measured peaks, and
for XLA to what the TPUs' compilers need (`benchmarks/tpu_memory.csv`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from mup_tpu.attention import choose_form
from mup_tpu.config import Trial
from mup_tpu.devices import Device, Way
from mup_tpu.devices.base import ONE_DEVICE, MeshShape
from mup_tpu.errors import PackTooLarge, reason
from mup_tpu.model import parameter_shapes
from mup_tpu.training.optimizer import state_slots

_VECTORS_PER_LAYER = {"loop": 34, "vmap": 57}
"""Vectors of the model's width a token and layer. 18 are kept: both norms' inputs and outputs (4), queries,
keys, values and their products (5), a residual sum (1), the MLP's hidden layer behind GELU and, before it or
as GELU's slope, what its gradient needs (8); the rest is what gradients on the way back and the allocator
were measured to take beside them: under vmap 34 are alive at once, and malloc holds half as much again."""

_SCORES_PER_LAYER = {"loop": 0.5, "vmap": 4}
"""Numbers for each pair of tokens and head where attention is matrix products: under vmap those of logits,
masked and softmax that are alive at once (measured); in turns the softmax, of pairs that see each other.
torch's fused kernels keep none: in turns those of bf16, and, counted all the same, of float32 on a GPU or
through torch.compile."""

_LOGITS = 4
"""Numbers for each token and vocabulary entry: logits, log-softmax, and the gradients of both."""

_XLA_VECTORS = {"matmul": 15.6, "recomputed": 11.5}
"""XLA frees and fuses: vectors of the model's width a token and layer by the form of attention, as the
compilers for TPU v4 and v5e need them. This and what follows: of least largest error over the table, 18 %."""

_XLA_SCORES = {"matmul": 0.0, "recomputed": 0.26}
"""Numbers for each pair of tokens and head, a layer. Whole matrices come and go in the others' room."""

_XLA_LOGITS = 2.3
"""Numbers for each token and vocabulary entry."""

_XLA_BF16 = 0.6
"""Share that is left of what a layer keeps where products are in bf16, which XLA stores as such."""


def estimate_pack_bytes(
    trial: Trial,
    vocab_size: int,
    members: int,
    way: Way,
    mesh: MeshShape = ONE_DEVICE,
    by_xla: bool = False,
) -> int:
    """Peak memory of training a pack of so many trials like this one, in bytes on each device, without what
    the process has.

    Args:
        trial: any of them; they share their shape.
        vocab_size: tokens of the vocabulary.
        members: how many.
        way: "loop" needs the gradients and activations of one member at a time, "vmap" those of all.
        mesh: how many ways members and batches are split over devices.
        by_xla: whether XLA compiles the step.
    """
    m, d = trial.model, trial.data
    members = math.ceil(members / mesh.trial)
    number = 8 if trial.train.precision == "float64" else 4
    parameters = sum(math.prod(s) for s in parameter_shapes(m, vocab_size, d.sequence_length).values())
    tokens = math.ceil(d.batch_size / mesh.data) * d.sequence_length
    copies = 1 + len(state_slots(trial.optimizer))
    if by_xla and way == "vmap":
        form = choose_form(True, False, d.sequence_length)
        a_layer = _XLA_VECTORS[form] * m.width + _XLA_SCORES[form] * m.heads * d.sequence_length
        share = _XLA_BF16 if trial.train.precision == "bf16" else 1.0
        at_once = tokens * (share * m.depth * a_layer + _XLA_LOGITS * vocab_size)
        # Gradients come as what layers keep goes.
        return int(number * members * (copies * parameters + max(at_once, parameters)))
    kept: float = m.depth * tokens * _VECTORS_PER_LAYER[way] * m.width
    if way == "vmap" or trial.train.precision != "bf16":
        kept += m.depth * tokens * _SCORES_PER_LAYER[way] * m.heads * d.sequence_length
    kept += tokens * _LOGITS * vocab_size
    # bf16 saves nothing here: norms, softmax and loss stay float32, and casts keep both copies.
    alive = members if way == "vmap" else 1
    return int(number * (members * copies * parameters + alive * (parameters + kept)))


def check_fits(trial: Trial, vocab_size: int, members: int, device: Device, way: Way) -> None:
    """Fail before a pack is made that would not fit in what is free now; a single trial is tried in any case.

    Raises:
        PackTooLarge: it is estimated not to fit.
    """

    def needed(members: int) -> int:
        by_xla = device.torch_device.type == "xla"
        return estimate_pack_bytes(trial, vocab_size, members, way, device.mesh, by_xla)

    # Asked for a single trial too: on a CPU it hands back what a pack that was too large left.
    free = device.free_memory_bytes()
    if members == 1 or needed(members) <= free:
        return
    fits = members
    while fits > 1 and needed(fits) > free:
        fits -= 1
    each = " on each device" if device.mesh != ONE_DEVICE else ""
    raise PackTooLarge(
        f"{members} trials of width {trial.model.width} need about {_size(needed(members))}{each}, "
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
