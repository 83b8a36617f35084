"""One trial too wide for a device: its parameters, gradients and optimizer state split over processes.

By torch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277): every process has a shard of each parameter,
the whole parameters of a block while it computes that block, and a part of each batch. Factors go by a
parameter's name and whole shape, so that they are those of the unsharded trial. So are checkpoints: they load
at another number of processes.

Shapes: S steps, N evaluation batches, B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from mup_tpu.config import RunOptions, Trial
from mup_tpu.devices import Device
from mup_tpu.devices.base import return_freed_memory
from mup_tpu.errors import ConfigError, DeviceFailed, reason
from mup_tpu.internals.processes import end_with_parent, ensure_server, fork
from mup_tpu.models import Forms, forward_factors
from mup_tpu.models.networks import init_parameters
from mup_tpu.optimizers import Group, UpdateRule
from mup_tpu.training.members import InTurns, MemberOptimizer, backward_by_parts, state_slots
from mup_tpu.training.pack import Pack

# A process whose others ended waits no longer for them. The first step of a large model may take minutes.
_PATIENCE = datetime.timedelta(minutes=10)

_RANK = "MUP_TPU_SHARD"  # environment of a process that `Processes` started: its number, from 1


class ShardedPack(Pack):
    """A pack of one trial over the processes of torch's process group."""

    compiles = False

    def __init__(self, trial: Trial, vocab_size: int, device: Device, parts: int = 1) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if device.torch_device.type == "cpu":
            return_freed_memory()
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        self.members, self._execution = [0], InTurns
        self._declare([trial], vocab_size, device, parts, Forms(), in_parts=True)
        for name, value in forward_factors(trial).items():
            path, _, buffer = name.rpartition(".")
            factor = torch.tensor(value, dtype=self._dtype, device=device.torch_device)
            self.network.get_submodule(path).register_buffer(buffer, factor)
        # Nothing changes logits in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(device.torch_device.type, (self._world,))
        for name in (*self.declaration.blocks, ""):  # each process has one block's parameters whole at most
            module = self.network.get_submodule(name)
            self._draw(module, name)
            root = fully_shard(module, mesh=mesh)
        self._mesh = mesh
        with torch.no_grad():  # the first call pads and moves shards of unequal size
            self._loss({}, {}, torch.zeros(1, 2, dtype=torch.int64, device=device.torch_device))
        root.reshard()
        self._shards: dict[str, Any] = dict(self.network.named_parameters())
        self.parameters = {name: p.to_local().detach() for name, p in self._shards.items()}
        slots, parameters = state_slots(trial, self.declaration.parameters), self.parameters
        self.state = {s: {n: torch.zeros_like(parameters[n]) for n in names} for s, names in slots.items()}
        self._optimizer = self._new_optimizer()
        self._weights: dict[str, Tensor] = {}

    def _draw(self, module: nn.Module, prefix: str) -> None:
        trial, drawn = self.trials[0], dict[nn.Parameter, nn.Parameter]()
        for name, parameter in module.named_parameters(prefix):
            if parameter.is_meta:
                declared = {name: self.declaration.parameters[name]}
                fresh = init_parameters(declared, self.scalings[0], trial.model.init_std, trial.train.seed)
                drawn[parameter] = nn.Parameter(fresh[name].to(self.device.torch_device, self._dtype))
        for part in module.modules():  # a tied readout has the parameter of the embedding
            for name, old in part._parameters.items():
                if old in drawn:
                    part._parameters[name] = drawn[old]

    def _new_optimizer(self) -> _Optimizer:
        of_trial = self.trials[0], self.declaration.parameters, self.parameters, self.scalings[0], self.state
        return _Optimizer(self, *of_trial, self.steps_done)

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """Return a whole parameter, or a whole tensor that is split as the parameter, in every process."""
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.empty(self.declaration.shapes[name], device="meta")
        split = DTensor.from_local(
            shard, self._mesh, [Shard(0)], run_check=False, shape=shape.shape, stride=shape.stride()
        )
        return split.full_tensor()

    def shard(self, whole: Tensor) -> Tensor:
        parts = whole.chunk(self._world)
        return parts[self._rank] if self._rank < len(parts) else whole[:0]

    def _sum(self, *values: Tensor) -> Tensor:
        total = torch.stack(values).sum(0)
        distributed.all_reduce(total)
        return total

    def train(self, tokens_SBT1: Tensor, steps: int) -> Tensor:
        losses_S, limit = [], self.trials[0].optimizer.grad_clip
        for tokens_BT1 in tokens_SBT1[:steps]:
            loss = backward_by_parts(self._loss, ({}, {}), self.shard(tokens_BT1), self._micro_batches)
            gradients = []
            for name, p in self._shards.items():
                gradients.append(p.grad.to_local())
                self.parameters[name].grad, p.grad = gradients[-1], None
            if limit:
                norm = self._sum(*(g.square().sum() for g in gradients)).sqrt()
                torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
            self._optimizer.update(self.steps_done)
            self.steps_done += 1
            losses_S.append(self._sum(loss / self._world))
        return torch.stack(losses_S)[:, None]

    @torch.no_grad()
    def evaluate(self, tokens_NBT1: Tensor) -> Tensor:
        losses = []
        for tokens_BT1 in tokens_NBT1:
            # A process without a sequence computes one in vain, since the others need its shards.
            part, count = self.shard(tokens_BT1), len(tokens_BT1)
            loss = self._loss({}, {}, part if len(part) else tokens_BT1[:1])
            losses.append(loss * (len(part) / count))
        return self._sum(*losses)[None] / len(tokens_NBT1)

    def agree(self, stops: bool) -> bool:
        flag = torch.tensor(float(stops), device=self.device.torch_device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        return bool(flag)

    def _split(self) -> Iterator[tuple[str, str, Tensor]]:
        for kind, tensors in {"parameters": self.parameters, **self.state}.items():
            for name, tensor in tensors.items():
                yield kind, name, tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return whole tensors as an unsharded pack of one does, in the first process alone."""
        gathered = {}
        for kind, name, tensor in self._split():
            whole = self.whole(name, tensor)
            if self._rank == 0:
                gathered[f"{kind}/{name}"] = whole.cpu()[None]
        return gathered

    def load_tensors(self, tensors: Mapping[str, Tensor], members: Sequence[int], steps_done: int) -> None:
        for kind, name, tensor in self._split():
            tensor.copy_(self.shard(tensors[f"{kind}/{name}"][0]))
        self.steps_done = steps_done
        self._optimizer = self._new_optimizer()

    def leave(self) -> None:
        # Gathered in the first process, for an export, before the processes part.
        for name, shard in self.parameters.items():
            whole = self.whole(name, shard)
            if self._rank == 0:
                self._weights[name] = whole.cpu()

    def member_parameters(self, member: int) -> dict[str, Tensor]:
        return self._weights


class _Optimizer(MemberOptimizer):
    """Updates of the shards of a process; rules that need whole matrices get them one at a time."""

    def __init__(self, pack: ShardedPack, *of_member: Any) -> None:
        super().__init__(*of_member)
        self._pack = pack
        self._names = {id(leaf): name for name, leaf in pack.parameters.items()}

    def apply(self, rule: UpdateRule, group: Group, learning_rate: float) -> None:
        if rule.is_elementwise:
            super().apply(rule, group, learning_rate)
            return
        for i, leaf in enumerate(group.leaves):
            name = self._names[id(leaf)]
            shards = [leaf, *(slots[i] for slots in group.slots.values())]
            whole, *slots = (self._pack.whole(name, shard) for shard in shards)
            assert leaf.grad is not None
            whole.grad = self._pack.whole(name, leaf.grad)
            one = replace(
                group, parameters=[group.parameters[i]], leaves=[whole], updates=[group.updates[i]],
                slots={slot: [tensor] for slot, tensor in zip(group.slots, slots, strict=True)},
            )  # fmt: skip
            super().apply(rule, one, learning_rate)
            for shard, tensor in zip(shards, (whole, *slots), strict=True):
                shard.copy_(self._pack.shard(tensor))


class Processes:
    """The processes of a sharded trial: this one is the first, and has the others call `follow`."""

    def __init__(
        self,
        trials: Sequence[Trial],
        options: RunOptions,
        checkpoints: str | PathLike[str] | None,
        follow: Callable[..., None],
    ) -> None:
        shards, trial = options.split_over, trials[0]
        gpus = torch.cuda.device_count() if options.device in ("auto", "cuda") else 0
        if len(trials) > 1:
            raise ConfigError(f"split_over {shards} needs packs of one trial: add --pack-size 1")
        if trial.data.batch_size % shards:
            raise ConfigError(
                f"split_over {shards} is not allowed: it must divide batch_size {trial.data.batch_size}"
            )
        if 0 < gpus < shards:
            raise ConfigError(f"split_over {shards} is not allowed: it must be at most the GPUs here, {gpus}")
        self._rank, self._others = int(os.environ.get(_RANK, 0)), list[BaseProcess]()
        self._meeting, self._folder = os.environ.get(f"{_RANK}_AT", ""), contextlib.ExitStack()
        if self._rank:
            Path(f"{self._meeting}-{self._rank}").touch()
        else:
            self._meeting = self._folder.enter_context(tempfile.TemporaryDirectory()) + "/meeting"
            self._start_others(follow, (trials, options, checkpoints), shards)
        if gpus:
            torch.cuda.set_device(self._rank)
        elif not options.threads:
            torch.set_num_threads(max(1, torch.get_num_threads() // shards))
        with _quiet():
            distributed.init_process_group(
                "nccl" if gpus else "gloo", init_method=Path(self._meeting).as_uri(), rank=self._rank,
                world_size=shards, timeout=_PATIENCE,
            )  # fmt: skip

    def _start_others(self, follow: Callable[..., None], run: tuple[Any, ...], shards: int) -> None:
        ensure_server([follow.__module__])
        for rank in range(1, shards):
            environment = {**os.environ, _RANK: str(rank), f"{_RANK}_AT": self._meeting}
            self._others.append(fork(follow, (environment, *run)))
        for rank, other in enumerate(self._others, 1):  # the group would wait for a process that failed
            while not Path(f"{self._meeting}-{rank}").exists():
                other.join(0.05)
                if failure := other.exitcode and self.failure():
                    self.close()
                    raise failure

    def failure(self) -> DeviceFailed | None:
        """Return the error of another process that has ended; None if all of them run."""
        for rank, other in enumerate(self._others, 1):
            other.join(5)
            if other.exitcode:
                file = Path(f"{self._meeting}-{rank}.failed")
                why = file.read_text() if file.exists() else f"exit code {other.exitcode}"
                return DeviceFailed(f"process {rank + 1} of {len(self._others) + 1} failed ({why})")
        return None

    def close(self) -> None:
        """End the group, and the other processes."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for other in self._others:
            other.join(30)
            other.kill()
            other.join()
        self._folder.close()


@contextlib.contextmanager
def follower(environment: dict[str, str]) -> Iterator[None]:
    """Silence a process that `Processes` forked; it ends with the first process, which reports its error."""
    os.environ.update(environment)  # the server's is older
    end_with_parent()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first process is gone
            Path(f"{environment[f'{_RANK}_AT']}-{environment[_RANK]}.failed").write_text(reason(error))
        raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Close standard output in the block: gloo prints there how many processes it has met."""
    sys.stdout.flush()
    before, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)
