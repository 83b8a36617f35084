"""A pack: K trials of one shape that train together on the same batches, in one process.

Members never touch: one member's NaN leaves the others bit-identical, and a member's result does not depend
on who shares its pack. Parameters and optimizer state are held stacked along a leading member axis in either
way of stepping, so that checkpoints do not know which way made them.

Shapes: K members, B sequences, T tokens, N evaluation batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from mup_tpu.config import Trial
from mup_tpu.devices import Device, Way
from mup_tpu.errors import ConfigError
from mup_tpu.model import (
    build_skeleton,
    forward_factors,
    init_parameters,
    parameter_scalings,
    parameter_shapes,
)
from mup_tpu.training.optimizer import MemberOptimizer, StackedOptimizer, State, clip_factors, state_slots

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Pack:
    """K trials in training.

    Args:
        trials: the members; all of one `Trial.pack_key()`.
        vocab_size: tokens of the vocabulary.
        device: where it runs.
        way: "loop" or "vmap"; None takes the device's.
        compile: put the step through torch.compile (slow to start, worth it on accelerators).

    Raises:
        ConfigError: the trials are not of one shape.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        vocab_size: int,
        device: Device,
        way: Way | None = None,
        compile: bool = False,
    ) -> None:
        if len({trial.pack_key() for trial in trials}) != 1:
            raise ConfigError("the trials of a pack must share shape, data, update rule, steps and precision")
        self.trials = list(trials)
        self.vocab_size = vocab_size
        self.device = device
        self.way: Way = way or device.way
        # Copies of the last member fill the mesh; they train unseen, and nothing that is returned holds them.
        self._padded = [*trials, *[trials[-1]] * (-len(trials) % device.mesh.trial)]
        self.live = [True] * len(trials)
        self.steps_done = 0
        first = trials[0]
        sequence_length = first.data.sequence_length
        self._skeleton = build_skeleton(
            first.model,
            vocab_size,
            sequence_length,
            attention="matmul" if self.way == "vmap" else "fused",
            plain_norms=device.torch_device.type == "xla",
        )
        self.shapes = parameter_shapes(first.model, vocab_size, sequence_length)
        self.scalings = [
            parameter_scalings(t.model, t.optimizer.optimizer, vocab_size, sequence_length)
            for t in self._padded
        ]
        fresh = [
            init_parameters(t.model, t.train.seed, self.shapes, s)
            for t, s in zip(trials, self.scalings, strict=False)
        ]
        self._dtype = _DTYPES[first.train.precision]
        factors = [forward_factors(t.model) for t in self._padded]
        self.parameters = {name: self._place(torch.stack([f[name] for f in fresh])) for name in self.shapes}
        self.buffers = {name: self._place(_tensor([f[name] for f in factors])) for name in factors[0]}
        self.state: State = {
            slot: {name: self._place(torch.zeros(len(trials), *shape)) for name, shape in self.shapes.items()}
            for slot in state_slots(first.optimizer)
        }
        limits = [t.optimizer.grad_clip or math.inf for t in self._padded]
        self._clip_limits_K = self._place(_tensor(limits))
        self._compile = torch.compile if compile else lambda f, **_: f
        self._set_up_step()

    def _place(self, tensor_K: Tensor) -> Tensor:
        """A stacked tensor on the device, padded to the mesh by copies of its last member."""
        missing = len(self._padded) - len(tensor_K)
        if missing:
            tensor_K = torch.cat([tensor_K, tensor_K[-1:].expand(missing, *tensor_K.shape[1:])])
        return self.device.place_members(tensor_K.to(self._dtype))

    def _set_up_step(self) -> None:
        """Views, optimizers and programs over the stack as it is now."""
        if self.way == "loop":
            self._member_loss = self._compile(self._loss, dynamic=False)
            self._leaves = [
                {name: p[k].detach().requires_grad_() for name, p in self.parameters.items()}
                for k in range(len(self.trials))
            ]
            self._member_buffers = [
                {name: b[k] for name, b in self.buffers.items()} for k in range(len(self.trials))
            ]
            self._optimizers = [
                MemberOptimizer(
                    trial,
                    self._leaves[k],
                    self.scalings[k],
                    {
                        slot: {name: t[k] for name, t in tensors.items()}
                        for slot, tensors in self.state.items()
                    },
                    self.steps_done,
                )
                for k, trial in enumerate(self.trials)
            ]
        else:
            self._optimizer = StackedOptimizer(self._padded, self.scalings, self._place)
            on_parts = self.device.on_parts
            members = (0, 0, None)
            self._gradients_and_losses = self._compile(
                on_parts(vmap(grad_and_value(self._loss), in_dims=members))
            )
            self._losses = self._compile(on_parts(vmap(self._loss, in_dims=members)))

    def _loss(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], tokens_BT1: Tensor) -> Tensor:
        """Mean cross-entropy in nat per token of one member."""
        bf16 = self.trials[0].train.precision == "bf16"
        kind = self.device.torch_device.type
        context = torch.autocast(kind, torch.bfloat16) if bf16 else contextlib.nullcontext()
        with context:
            logits_BTV = functional_call(
                self._skeleton, parameters | buffers, (tokens_BT1[:, :-1],), tie_weights=True
            )
        logits_BTV = logits_BTV.float() if bf16 else logits_BTV
        return functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten())

    def step(self, tokens_BT1: Tensor) -> Tensor:
        """Train every live member on one batch; return their losses_K before the update (nan where ended).

        On the device, and with the padding of a mesh: for `read`.
        """
        if self.way == "loop":
            losses_K = torch.full_like(self._clip_limits_K, math.nan)
            for k in self._live_members():
                leaves = self._leaves[k]
                loss = self._member_loss(leaves, self._member_buffers[k], tokens_BT1)
                loss.backward()
                if self.trials[k].optimizer.grad_clip:
                    torch.nn.utils.clip_grad_norm_(list(leaves.values()), self.trials[k].optimizer.grad_clip)
                self._optimizers[k].update(self.steps_done)
                losses_K[k] = loss.detach()
        else:
            gradients, losses_K = self._gradients_and_losses(self.parameters, self.buffers, tokens_BT1)
            with torch.no_grad():
                factors_K = clip_factors(gradients, self._clip_limits_K)
                for g in gradients.values():
                    g.mul_(factors_K.view((-1,) + (1,) * (g.dim() - 1)))
                self._optimizer.update(self.parameters, gradients, self.state, self.steps_done)
        self.device.end_step()
        self.steps_done += 1
        return losses_K

    @torch.no_grad()
    def evaluate(self, tokens_NBT1: Sequence[Tensor]) -> Tensor:
        """Mean loss_K over N batches, without training (nan where ended); for `read`, as `step`'s."""
        if self.way == "vmap":
            total_K = torch.zeros_like(self._clip_limits_K)
            for tokens_BT1 in tokens_NBT1:
                total_K = total_K + self._losses(self.parameters, self.buffers, tokens_BT1)
                self.device.end_step()
            return total_K / len(tokens_NBT1)
        losses_K = torch.full_like(self._clip_limits_K, math.nan)
        for k in self._live_members():
            losses = [self._member_loss(self._leaves[k], self._member_buffers[k], t) for t in tokens_NBT1]
            losses_K[k] = torch.stack(losses).mean()
        return losses_K

    def read(self, tensor_K: Tensor) -> Tensor:
        """A stacked tensor of the device on the CPU, without padding."""
        return self.device.read(tensor_K)[: len(self.trials)]

    def _live_members(self) -> list[int]:
        return [k for k, live in enumerate(self.live) if live]

    def end(self, member: int) -> None:
        """Train this member no further; the others go on as if it had never been there."""
        self.live[member] = False

    def member_parameters(self, member: int) -> dict[str, Tensor]:
        """One member's weights by name, on the CPU."""
        return {name: self.read(p)[member] for name, p in self.parameters.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint must hold, by name: parameters and optimizer state, stacked, on the CPU.

        It does not know the mesh: what one device wrote, eight can go on with.
        """
        return {
            f"{kind}/{name}": self.read(tensor)
            for kind, tensors in {"parameters": self.parameters, **self.state}.items()
            for name, tensor in tensors.items()
        }

    def load_tensors(self, tensors: dict[str, Tensor], steps_done: int) -> None:
        """Go on from what `tensors` returned after `steps_done` steps."""
        for kind, own in {"parameters": self.parameters, **self.state}.items():
            own |= {name: self._place(tensors[f"{kind}/{name}"]) for name in own}
        self.steps_done = steps_done
        self._set_up_step()
