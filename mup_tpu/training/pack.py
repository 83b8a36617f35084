"""A pack: K trials of one shape that train together on the same batches, in one process.

Members are independent: one member's NaN leaves the others bit-identical, and a member's result does not
depend on the rest of its pack. Both executions hold parameters and optimizer state stacked along a leading
member axis, so their checkpoints are the same. Ended members leave the stack once half of it has ended: a
stacked step computes every row, live or not, and each size of the stack is another program to compile.

Shapes: K members, R rows of the stack (remaining members and padding), S steps, B sequences, T tokens, N
evaluation batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mup_tpu.config import Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.devices import Device, Execution
from mup_tpu.devices.base import BY_XLA, ONE_DEVICE, MeshShape
from mup_tpu.errors import ConfigError, DeviceFailed, PackTooLarge, reason
from mup_tpu.models import Declaration, Forms, architecture_of, declare, forward_factors, parameter_scalings
from mup_tpu.models.attention import choose_form
from mup_tpu.models.layers import rows_at_once
from mup_tpu.models.networks import init_parameters
from mup_tpu.training import pack_key
from mup_tpu.training.members import InTurns, Members, Stacked, State, member_loss, state_slots

EXECUTIONS: Mapping[Execution, type[Members]] = {"loop": InTurns, "vmap": Stacked}

# Torch's compiler pays for a pack on a GPU if it saves more time than it takes. The rule looks at no clock,
# so that a pack trains alike each time. Seconds of a step without the compiler are those of one H100 in bf16
# (benchmarks/gpu_peers.csv); other GPUs and precisions are a guess.
_COMPILATION_S = 40.0  # seconds of a compilation: 28 to 42 were measured on 16 cores
_SAVED = 0.5  # share of a step that compilation saves: 0.68 was measured at width 64
_LAYER_S = 0.65e-3  # seconds of the launches of a layer
_NUMBER_S = 0.29e-9  # seconds a token, layer and unit of the width
_LOGIT_S = 0.05e-9  # seconds a token and entry of the vocabulary


def plain_step_s(declaration: Declaration, vocab_size: int, tokens: int) -> float:
    # Seconds of an uncompiled step on the tokens of all members together
    a_token = _NUMBER_S * declaration.width * declaration.layers + _LOGIT_S * vocab_size
    return _LAYER_S * declaration.layers + a_token * tokens


def compilation_pays(declaration: Declaration, vocab_size: int, tokens: int, steps: int) -> bool:
    return _SAVED * steps * plain_step_s(declaration, vocab_size, tokens) > _COMPILATION_S


class Pack:
    """K trials in training."""

    def __init__(
        self,
        trials: Sequence[Trial],  # trials with the same `pack_key`
        vocab_size: int,
        device: Device,
        execution: Execution | None = None,  # None takes the execution of the device
        compile: bool = False,  # whether a GPU compiles its traced step even where that does not pay
        micro_batches: int = 1,  # parts of a batch that go through the network one after another
        forms: Mapping[str, Any] = {},  # fields of `Forms` in place of this device's fast ones
    ) -> None:
        if len({pack_key(trial) for trial in trials}) != 1:
            raise ConfigError("the trials of a pack must share shape, data, update rule, steps and precision")
        self._execution = EXECUTIONS[execution or device.execution]
        kind, is_stacked = device.torch_device.type, self._execution.is_stacked
        is_folded, length = is_stacked and kind == "cuda", trials[0].data.sequence_length
        fast: dict[str, Any] = {
            "attention": "folded" if is_folded else choose_form(is_stacked, length),
            "one_pass_norms": kind in BY_XLA,
            "gathered": kind == "cpu" and not is_stacked,
            "vmapped": is_stacked,
        }
        self._compile = compile
        fast_forms, in_parts = Forms(**(fast | dict(forms))), kind not in BY_XLA
        self._declare(trials, vocab_size, device, micro_batches, fast_forms, in_parts)
        first, shapes = trials[0], self.declaration.shapes
        stacked = {name: torch.empty(len(trials), *shape) for name, shape in shapes.items()}
        for k, trial in enumerate(trials):
            # Each member's own declaration: starts may differ (readout_zero_init).
            parameters = declare(trial.model, vocab_size, length).parameters
            fresh = init_parameters(parameters, self.scalings[k], trial.model.init_std, trial.train.seed)
            for name, p in fresh.items():
                stacked[name][k] = p
        slots, count = state_slots(first, self.declaration.parameters).items(), len(trials)
        state = {slot: {n: torch.zeros(count, *shapes[n]) for n in names} for slot, names in slots}
        self._stack(range(len(trials)), {"parameters": stacked, **state})

    def _declare(
        self,
        trials: Sequence[Trial],
        vocab_size: int,
        device: Device,
        micro_batches: int,
        forms: Forms,
        in_parts: bool,
    ) -> None:
        first, length = trials[0], trials[0].data.sequence_length
        self.trials, self.vocab_size, self.device, self.forms = list(trials), vocab_size, device, forms
        self.live, self.steps_done, self._micro_batches = [True] * len(trials), 0, micro_batches
        self.network = architecture_of(first.model).network(first.model, vocab_size, length, forms)
        self.declaration = declare(first.model, vocab_size, length)
        self.scalings = [parameter_scalings(trial, vocab_size, length) for trial in trials]
        precision = first.train.precision
        self._dtype = torch.float64 if precision == "float64" else torch.float32
        self._loss = member_loss(self.network, vocab_size, precision, device.torch_device, in_parts)

    @property
    def _tensors(self) -> State:
        return {"parameters": self.parameters, **self.state}

    def _stack(self, members: Sequence[int], tensors: State) -> None:
        self.members = list(members)
        # Copies of the last member fill the mesh; they train, and results leave them out.
        self._rows = self.members + [self.members[-1]] * (-len(self.members) % self.device.mesh.trial)
        trials = [self.trials[k] for k in self._rows]
        factors = [forward_factors(trial) for trial in trials]
        self.parameters, *state = map(self._place, tensors.values())
        self.state: State = dict(zip([*tensors][1:], state, strict=True))
        self.buffers = self._place(
            {name: torch.tensor([f[name] for f in factors], dtype=torch.float64) for name in factors[0]}
        )
        compiles = self._compile
        if not compiles and self._execution.is_stacked and self.device.torch_device.type == "cuda":
            first, steps = trials[0], trials[0].train.steps - self.steps_done
            tokens = len(trials) * first.data.batch_size * first.data.sequence_length
            compiles = compilation_pays(self.declaration, self.vocab_size, tokens, steps)
        self._running = self._execution(
            self.device, self._loss, self.declaration.parameters, compiles,
            self._micro_batches, trials, [self.scalings[k] for k in self._rows], self.parameters, self.state,
            self.buffers, self.steps_done,
        )  # fmt: skip

    @property
    def compiles(self) -> bool:
        return self._running.compile or self.device.torch_device.type in BY_XLA

    def _place(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        placed = {}
        for name, tensor in tensors.items():
            missing = len(self._rows) - len(tensor)
            if missing:
                tensor = torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
            placed[name] = self.device.place_members(tensor.to(self._dtype))
        return placed

    def train(self, tokens_SBT1: Tensor, steps: int) -> Tensor:
        """Train every live member on the first `steps` batches of a stack (`Device.place_stack`).

        Returns:
            losses_SR before each update, for `read`; entries after the first `steps` are meaningless.
        """
        numbers = range(self.steps_done, self.steps_done + steps)
        losses_SR = self._running.train(tokens_SBT1, numbers, self._live_rows())
        self.steps_done += steps
        self.device.end_step()
        return losses_SR

    def step(self, tokens_BT1: Tensor) -> Tensor:
        return self.train(tokens_BT1[None], 1)[0]

    @torch.no_grad()
    def evaluate(self, tokens_NBT1: Tensor) -> Tensor:
        """Return mean losses_R over N batches (`Device.place_stack`), without training; for `read`."""
        return self._running.evaluate(tokens_NBT1, self._live_rows())

    def longest_chunk(self, batch_bytes: int) -> int:
        return self.device.longest_chunk(batch_bytes) if self._execution.is_stacked else 1

    def read(self, losses_R: Tensor) -> Tensor:
        """Read losses (..., R) as (..., K) on the CPU: nan for members that have left the stack."""
        losses_K = torch.full((*losses_R.shape[:-1], len(self.trials)), math.nan, dtype=losses_R.dtype)
        losses_K[..., self.members] = self.device.read(losses_R)[..., : len(self.members)]
        return losses_K

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        return self.device.read(tensor)[: len(self.members)]

    def _live_rows(self) -> list[int]:
        return [r for r, k in enumerate(self.members) if self.live[k]]

    def end(self, *members: int) -> None:
        """Train these members no further, without effect on the others."""
        for k in members:
            self.live[k] = False
        rows = self._live_rows()
        if 0 < 2 * len(rows) <= len(self.members) and len(rows) + self.device.mesh.trial <= len(self._rows):
            kinds = self._tensors.items()
            remaining = {kind: {n: self._on_cpu(t)[rows] for n, t in of.items()} for kind, of in kinds}
            self._stack([self.members[r] for r in rows], remaining)

    def agree(self, stops: bool) -> bool:
        return stops

    def leave(self) -> None: ...

    def member_parameters(self, member: int) -> dict[str, Tensor]:
        row = self.members.index(member)
        return {name: self._on_cpu(p)[row] for name, p in self.parameters.items()}

    def tensors(self) -> dict[str, Tensor]:
        kinds = self._tensors.items()
        return {f"{kind}/{n}": self._on_cpu(t) for kind, tensors in kinds for n, t in tensors.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], members: Sequence[int], steps_done: int) -> None:
        self.steps_done = steps_done
        by_kind = {k: {n: tensors[f"{k}/{n}"] for n in names} for k, names in self._tensors.items()}
        self._stack(members, by_kind)


# Memory of a pack, estimated beforehand: a pack that does not fit is split. The estimate is the state, the
# logits, and vectors that a layer keeps for the backward pass. Most packs need half to twice as much
# (`tests/training/measured`): a pack that fails for want of memory is halved.

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
    training = members if execution == "vmap" else 1  # with gradients and activations at the same time
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
            why = message.partition(" Of the allocated memory")[0].rstrip(".")  # then options of torch
            raise PackTooLarge(f"{trials} ran out of memory ({why}){hint}", members // 2) from None
        if any(sign in message for sign in _FAILURES):
            raise DeviceFailed(f"the GPU failed ({message})") from None
        raise


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
