"""A pack: K trials of one shape that train together on the same batches, in one process.

Members never touch: one member's NaN leaves the others bit-identical, and a member's result does not depend
on who shares its pack. Parameters and optimizer state are held stacked along a leading member axis in either
execution, so that checkpoints are the same.

Members that have ended leave the stack once half of it would do: what is stacked is computed, wanted or not,
and each size of the stack is another program to compile.

Shapes: K members, R rows of the stack (those of K that are left, and padding), B sequences, T tokens, V
vocabulary, N evaluation batches, or B·T tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from mup_tpu.config import Trial
from mup_tpu.devices import Device, Execution
from mup_tpu.errors import ConfigError
from mup_tpu.models import (
    Forms,
    architecture_of,
    declare,
    forward_factors,
    forward_scaling,
    parameter_scalings,
)
from mup_tpu.models.attention import choose_form
from mup_tpu.models.blocks import SCANNED_FROM
from mup_tpu.models.weights import init_parameters
from mup_tpu.training.optimizer import MemberOptimizer, StackedOptimizer, State, clip_factors, state_slots
from mup_tpu.training.pack_key import pack_key

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _backward_in_this_thread() -> torch.autograd.set_multithreading_enabled:
    """XLA's own thread would hold on to a gradient for a moment after backward has returned.

    Whatever lives when a step is handed over is an output of it, so that another program would be compiled,
    on a busy host up to three times in 50 steps.
    """
    return torch.autograd.set_multithreading_enabled(False)


class Pack:
    """K trials in training.

    Args:
        trials: the members; all of one `pack_key`.
        vocab_size: tokens of the vocabulary.
        device: where it runs.
        execution: "loop" or "vmap"; None takes the device's.
        compile: put the step through torch.compile (slow to start, worth it on accelerators).
        micro_batches: parts that each batch goes through the network in, one after the other.
        scan: whether XLA has all blocks as one loop; None does from `SCANNED_FROM` blocks on.

    Raises:
        ConfigError: the trials are not of one shape.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        vocab_size: int,
        device: Device,
        execution: Execution | None = None,
        compile: bool = False,
        micro_batches: int = 1,
        scan: bool | None = None,
    ) -> None:
        if len({pack_key(trial) for trial in trials}) != 1:
            raise ConfigError("the trials of a pack must share shape, data, update rule, steps and precision")
        self.trials = list(trials)
        self.vocab_size = vocab_size
        self.device = device
        self.execution: Execution = execution or device.execution
        self.live = [True] * len(trials)
        self.steps_done = 0
        first = trials[0]
        sequence_length = first.data.sequence_length
        by_xla = device.torch_device.type == "xla" and self.execution == "vmap"
        # CPUs have forms of their own; torch.compile fuses torch's, and in bf16 ours would be too coarse.
        in_blocks = (
            device.torch_device.type == "cpu"
            and self.execution == "loop"
            and not compile
            and first.train.precision != "bf16"
        )
        self.forms = Forms(
            attention=choose_form(self.execution == "vmap", in_blocks, sequence_length),
            one_pass_norms=device.torch_device.type == "xla",
            in_blocks=in_blocks,
            vmapped=self.execution == "vmap" and not compile,
            scaled_branches=any(forward_scaling(t).residual != 1 for t in trials),
            scanned=by_xla and (first.model.depth >= SCANNED_FROM if scan is None else scan),
        )
        self._network = architecture_of(first.model).network(
            first.model, vocab_size, sequence_length, self.forms
        )
        self.declaration = declare(first.model, vocab_size, sequence_length)
        self.scalings = [parameter_scalings(t, vocab_size, sequence_length) for t in trials]
        self._dtype = _DTYPES[first.train.precision]
        self._compile = torch.compile if compile else lambda f, **_: f
        self._micro_batches = micro_batches
        parameters, shapes = self.declaration.parameters, self.declaration.shapes
        stacked = {name: torch.empty(len(trials), *shape) for name, shape in shapes.items()}
        for k, trial in enumerate(trials):
            # Members may start otherwise (readout_zero_init): each from its own declaration.
            own = declare(trial.model, vocab_size, sequence_length).parameters
            fresh = init_parameters(own, self.scalings[k], trial.model.init_std, trial.train.seed)
            for name, p in fresh.items():
                stacked[name][k] = p
        state = {
            slot: {name: torch.zeros(len(trials), *shapes[name]) for name in names}
            for slot, names in state_slots(first, parameters).items()
        }
        self._stack(range(len(trials)), stacked, state)

    def _stack(self, members: Sequence[int], parameters: Mapping[str, Tensor], state: State) -> None:
        """Place these members' stacked parameters and optimizer state, and set up the step over them."""
        self.members = list(members)
        # Copies of the last member fill the mesh; they train unseen, and nothing that is returned holds them.
        padding = [self.members[-1]] * (-len(self.members) % self.device.mesh.trial)
        self._rows = self.members + padding
        trials, scalings = [self.trials[k] for k in self._rows], [self.scalings[k] for k in self._rows]
        self.parameters = {name: self._place(p) for name, p in parameters.items()}
        self.state: State = {
            slot: {name: self._place(t) for name, t in tensors.items()} for slot, tensors in state.items()
        }
        factors = [forward_factors(t) for t in trials]
        self.buffers = {
            name: self._place(_tensor([f[name] for f in factors]))
            for name, _ in self._network.named_buffers()
        }
        self._clip_limits_R = self._place(_tensor([t.optimizer.grad_clip or math.inf for t in trials]))
        if self.execution == "loop":
            self._member_loss = self._compile(self._loss, dynamic=False)
            self._whole_member_loss = self._over_parts(self._member_loss)
            rows = range(len(self._rows))
            self._leaves = [
                {name: p[r].detach().requires_grad_() for name, p in self.parameters.items()} for r in rows
            ]
            self._member_buffers = [{name: b[r] for name, b in self.buffers.items()} for r in rows]
            self._optimizers = [
                MemberOptimizer(
                    trials[r],
                    self.declaration.parameters,
                    self._leaves[r],
                    scalings[r],
                    {
                        slot: {name: t[r] for name, t in tensors.items()}
                        for slot, tensors in self.state.items()
                    },
                    self.steps_done,
                )
                for r in rows
            ]
        else:
            self._optimizer = StackedOptimizer(trials, self.declaration.parameters, scalings, self._place)
            per_shard, by_member = self.device.per_shard, (0, 0, None)
            self._gradients_and_losses, self._losses = (
                per_shard(self._over_parts(self._compile(vmap(function, in_dims=by_member))))
                for function in (grad_and_value(self._loss), self._loss)
            )
            self._steps = self.device.repeated(self._stacked_step)
            self._evaluations = self.device.repeated(self._stacked_losses)

    def _place(self, tensor: Tensor) -> Tensor:
        """A stacked tensor on the device, padded to the mesh by copies of its last member."""
        missing = len(self._rows) - len(tensor)
        if missing:
            tensor = torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
        return self.device.place_members(tensor.to(self._dtype))

    def _loss(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], tokens_BT1: Tensor) -> Tensor:
        """Mean cross-entropy in nat per token of one member."""
        bf16 = self.trials[0].train.precision == "bf16"
        kind = self.device.torch_device.type
        context = torch.autocast(kind, torch.bfloat16) if bf16 else contextlib.nullcontext()
        with context:
            logits_BTV = functional_call(
                self._network, parameters | buffers, (tokens_BT1[:, :-1],), tie_weights=True
            )
        logits_NV, targets_N = logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten()
        logits_NV = logits_NV.float() if bf16 else logits_NV
        if kind != "xla":
            return functional.cross_entropy(logits_NV, targets_N)
        # By the targets' indices, TPU compilers gather those of all members on every chip.
        vocabulary_V = torch.arange(self.vocab_size, device=targets_N.device, dtype=targets_N.dtype)
        is_target_NV = targets_N[:, None] == vocabulary_V
        return -functional.log_softmax(logits_NV, -1).where(is_target_NV, 0.0).sum(-1).mean()

    def _parts(self, tokens_BT1: Tensor) -> Iterator[tuple[Tensor, float]]:
        """The micro-batches of a batch, each with its share of the sequences; of fewer sequences, so many."""
        for part in tokens_BT1.tensor_split(min(self._micro_batches, len(tokens_BT1))):
            yield part, len(part) / len(tokens_BT1)

    def _over_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose results are means over its last argument, a batch, by its micro-batches."""
        if self._micro_batches == 1:
            return function

        def call(*given: Any) -> Any:
            *others, tokens_BT1 = given
            means: list[Tensor] = []
            for part, share in self._parts(tokens_BT1):
                found, structure = tree_flatten(function(*others, part))
                if means:
                    for mean, value in zip(means, found, strict=True):
                        mean.add_(value, alpha=share)
                else:
                    means = [value.mul_(share) for value in found]
                del found  # or the next part's would be there beside it
            return tree_unflatten(means, structure)

        return call

    def train(self, tokens_SBT1: Tensor, steps: int) -> Tensor:
        """Train every live member on the first `steps` batches of a stack (`Device.place_stack`).

        Returns:
            losses_SR of the rows before each update, for `read`; what follows the first `steps` of them is no
            loss.
        """
        if self.execution == "vmap":
            numbers_SRX = self._optimizer.step_numbers(range(self.steps_done, self.steps_done + steps))
            losses_SR = self._steps(
                (self.parameters, self.state),
                (self.buffers, self._clip_limits_R, self._optimizer.factors_KP3),
                (
                    tokens_SBT1,
                    self.device.place_stack(numbers_SRX.to(self._dtype), "trial", len(tokens_SBT1)),
                ),
                steps,
            )
            self.steps_done += steps
        else:
            losses_SR = torch.stack([self._step_in_turns(tokens_BT1) for tokens_BT1 in tokens_SBT1[:steps]])
        self.device.end_step()
        return losses_SR

    def step(self, tokens_BT1: Tensor) -> Tensor:
        """Train every live member on one batch; return the rows' losses_R before the update, for `read`."""
        return self.train(tokens_BT1[None], 1)[0]

    def _step_in_turns(self, tokens_BT1: Tensor) -> Tensor:
        losses_R = torch.full_like(self._clip_limits_R, math.nan)
        for r in self._live_rows():
            leaves, optimizer, losses = self._leaves[r], self._optimizers[r], []
            for part, share in self._parts(tokens_BT1):
                loss = self._member_loss(leaves, self._member_buffers[r], part)
                with _backward_in_this_thread():
                    loss.backward(torch.full_like(loss, share))
                losses.append(loss.detach() * share)
                del loss  # or what its graph holds would be there beside the next part's
            if optimizer.trial.optimizer.grad_clip:
                torch.nn.utils.clip_grad_norm_(list(leaves.values()), optimizer.trial.optimizer.grad_clip)
            optimizer.update(self.steps_done)
            losses_R[r] = torch.stack(losses).sum()
        self.steps_done += 1
        return losses_R

    def _stacked_step(self, changed: Any, fixed: Any, batch: Any) -> Tensor:
        """One step of all rows, as `Device.repeated` takes it."""
        (parameters, state), (buffers, clip_limits_R, factors_RP3), (tokens_BT1, numbers_RX) = (
            changed,
            fixed,
            batch,
        )
        with _backward_in_this_thread():
            gradients, losses_R = self._gradients_and_losses(parameters, buffers, tokens_BT1)
        with torch.no_grad():
            factors_R = clip_factors(gradients, clip_limits_R)
            for g in gradients.values():
                g.mul_(factors_R.view((-1,) + (1,) * (g.dim() - 1)))
            self._optimizer.update(parameters, gradients, state, factors_RP3, numbers_RX)
        return losses_R

    def _stacked_losses(self, changed: Any, fixed: Any, batch: Any) -> Tensor:
        """Losses_R of all rows, as `Device.repeated` takes it."""
        return self._losses(*fixed, *batch)

    @torch.no_grad()
    def evaluate(self, tokens_NBT1: Tensor) -> Tensor:
        """Mean losses_R over N batches (`Device.place_stack`), without training; for `read`, as `step`'s."""
        if self.execution == "vmap":
            fixed = (self.parameters, self.buffers)
            return self._evaluations((), fixed, (tokens_NBT1,), len(tokens_NBT1)).mean(0)
        losses_R = torch.full_like(self._clip_limits_R, math.nan)
        for r in self._live_rows():
            own = self._leaves[r], self._member_buffers[r]
            losses = [self._whole_member_loss(*own, tokens_BT1) for tokens_BT1 in tokens_NBT1]
            losses_R[r] = torch.stack(losses).mean()
        return losses_R

    def read(self, losses_R: Tensor) -> Tensor:
        """Losses (..., R) as (..., K) on the CPU: nan for members that have left the stack."""
        losses_K = torch.full((*losses_R.shape[:-1], len(self.trials)), math.nan, dtype=losses_R.dtype)
        losses_K[..., self.members] = self.device.read(losses_R)[..., : len(self.members)]
        return losses_K

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        """The rows of `members`, without padding."""
        return self.device.read(tensor)[: len(self.members)]

    def _live_rows(self) -> list[int]:
        return [r for r, k in enumerate(self.members) if self.live[k]]

    def end(self, *members: int) -> None:
        """Train these members no further; the others are not affected."""
        for k in members:
            self.live[k] = False
        rows = self._live_rows()
        if 0 < 2 * len(rows) <= len(self.members) and len(rows) + self.device.mesh.trial <= len(self._rows):
            parameters, *state = (
                {name: self._on_cpu(t)[rows] for name, t in tensors.items()}
                for tensors in (self.parameters, *self.state.values())
            )
            live = [self.members[r] for r in rows]
            self._stack(live, parameters, dict(zip(self.state, state, strict=True)))

    def member_parameters(self, member: int) -> dict[str, Tensor]:
        """Weights by name, on the CPU, of a member that is still in the stack.

        Raises:
            ValueError: it has left, as members do some time after they ended.
        """
        row = self.members.index(member)
        return {name: self._on_cpu(p)[row] for name, p in self.parameters.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint must hold of `members`: parameters and optimizer state, stacked, on the CPU.

        It does not know the mesh: what one device wrote, eight can go on with.
        """
        return {
            f"{kind}/{name}": self._on_cpu(tensor)
            for kind, tensors in {"parameters": self.parameters, **self.state}.items()
            for name, tensor in tensors.items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor], members: Sequence[int], steps_done: int) -> None:
        """Go on from what `tensors` returned of these members after `steps_done` steps."""
        self.steps_done = steps_done
        parameters, *state = (
            {name: tensors[f"{kind}/{name}"] for name in names}
            for kind, names in {"parameters": self.parameters, **self.state}.items()
        )
        self._stack(members, parameters, dict(zip(self.state, state, strict=True)))
