"""What a check measures while modules of one width train: layers, parameters and attention.

Of a parameter these are the optimizer's settings, the size of init and gradient, and the **effect** of an
update: the change of the loss to first order, |⟨gradient, update⟩|. In μP no effect follows the width,
whatever the optimizer and however factors are split among init, learning rate and forward pass (Yang &
Littwin 2023, arXiv:2308.01814; Yang et al. 2023, arXiv:2310.17813, Condition 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mup_tpu.errors import ConfigError, first_line
from mup_tpu.parametrize.roles import unwrapped
from mup_tpu.training.coord_check import Subject

Loss = Callable[[nn.Module, Any], Tensor]  # Function of a module and the batch; a scalar

# Gradients smaller than the largest by this are sums that cancel, such as of biases of keys, to which a
# softmax is blind.
_ROUNDING = 1e-9

Trained = tuple[nn.Module, Sequence[torch.optim.Optimizer]]  # A module as it is trained, and its optimizers


class TrainedModules(Subject):
    """Modules of one width that train on one batch, one per seed.

    `required` has submodules that the forward pass must call, with the sentence for one that it does not.
    """

    def __init__(self, trained: Sequence[Trained], loss: Loss, batch: Any, required: Mapping[str, str] = {}):
        self.seeds = range(len(trained))
        self._trained, self._loss, self._batch, self._required = trained, loss, batch, dict(required)
        self._losses: list[Tensor] = []
        self._kept: list[dict[str, Tensor]] = [{} for _ in trained]
        self._inputs: list[dict[str, float]] = [{} for _ in trained]
        self._order: list[dict[str, int]] = [{} for _ in trained]
        self._attention = [AttentionLogits() for _ in trained]
        self._rows: list[dict[tuple[str, str], float]] = [{} for _ in trained]
        for k, (module, _) in enumerate(trained):
            lists = {unwrapped(n) for n, part in module.named_modules() if isinstance(part, nn.ModuleList)}
            for path, part in module.named_modules():
                if isinstance(part, nn.ModuleList):
                    continue
                name = unwrapped(path)
                is_block = name.rpartition(".")[0] in lists and name.rpartition(".")[2].isdecimal()
                has_matrix = any(p.dim() >= 2 for p in part.parameters(False))
                is_measured = not name or is_block or has_matrix
                part.register_forward_hook(functools.partial(self._keep, k, name, is_measured))

    def _keep(self, k: int, name: str, is_measured: bool, module: nn.Module, inputs: Any, out: Any) -> None:
        self._attention[k].layer = name
        self._required.pop(name, None)
        self._order[k].setdefault(name, len(self._order[k]))
        given = _first_tensor(inputs) if any(True for _ in module.parameters(False)) else None
        if given is not None and given.is_floating_point():  # norms' inputs show factors behind embeddings
            self._inputs[k][name] = _rms(given)
        if is_measured and (output := _first_tensor(out)) is not None:
            self._kept[k].pop(name, None)  # in the order of the last calls
            self._kept[k][name] = _whole(output.detach()).clone()

    def outputs(self) -> list[dict[str, list[Tensor]]]:
        self._losses = []
        for k, (module, _) in enumerate(self._trained):
            # A compiled module runs as it is written, so that hooks are called and each operation is seen.
            with torch.compiler.set_stance("force_eager"), self._attention[k]:
                try:
                    loss = self._loss(module, self._batch)
                except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
                    raise ConfigError(
                        f"loss(module, batch) fails ({type(error).__name__}: {first_line(error)}); it must "
                        "return the loss of a module that build made on the batch"
                    ) from error
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ConfigError("loss(module, batch) must return one number with a gradient, as a tensor")
            self._losses.append(loss)
        for sentence in self._required.values():
            raise ConfigError(sentence)
        return [{name: [output] for name, output in kept.items()} for kept in self._kept]

    def step(self, number: int) -> None:
        for k, (module, optimizers) in enumerate(self._trained):
            module.zero_grad()
            self._losses[k].backward()
            named = {unwrapped(name): p for name, p in module.named_parameters()}
            before = {name: _whole(p.detach()).clone() for name, p in named.items()}
            gradients = {n: _whole(p.grad).clone() for n, p in named.items() if p.grad is not None}
            for optimizer in optimizers:
                optimizer.step()
            groups = {
                id(p): g for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]
            }
            rows = self._rows[k] = {}
            for name, parameter in named.items():
                change = (_whole(parameter.detach()) - before[name]).flatten()
                if group := groups.get(id(parameter)):
                    lr = float(group["lr"])
                    rows[name, "learning rate"] = lr
                    rows[name, "decay"] = lr * float(group.get("weight_decay") or 0.0)
                if number == 0:
                    rows[name, "init"] = _rms(before[name])
                rows[name, "size"] = _rms(change)
                gradient = gradients.get(name)
                rows[name, "gradient"] = 0.0 if gradient is None else _rms(gradient)
                # Entries with one sign: a sum in single precision loses nothing that an exponent shows.
                rows[name, "effect"] = 0.0 if gradient is None else abs(float(gradient.flatten() @ change))
            largest = max((rows[name, "gradient"] for name in named), default=0.0)
            for name in named:
                if rows[name, "gradient"] < _ROUNDING * largest:
                    rows[name, "gradient"] = rows[name, "effect"] = 0.0
            clipped = [_whole(p.grad) for p in named.values() if p.grad is not None]
            if gradients and clipped:
                whole = [torch.cat([g.flatten() for g in of]).norm() for of in (gradients.values(), clipped)]
                rows["", "clipping"] = float(whole[1] / whole[0]) if whole[0] else 1.0

    def others(self, model: int, step: int) -> dict[tuple[str, str], float]:
        rows = dict(self._rows[model])
        rows |= {(layer, "attention"): rms for layer, rms in self._attention[model].sizes.items()}
        if not step:
            rows |= {(layer, "head size"): d for layer, d in self._attention[model].head_sizes.items()}
            rows |= {(name, "input"): rms for name, rms in self._inputs[model].items()}
            rows |= {(name, "order"): i for name, i in self._order[model].items()}
        return rows


class AttentionLogits(TorchDispatchMode):
    """Measures attention logits, whatever the module calls its fields: what softmax gets from a product.

    It sees torch's operations: the fused ones of scaled_dot_product_attention with their arguments, and a
    softmax of a product of two activations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = ""  # Module whose forward pass ended last
        self.sizes: dict[str, float] = {}  # Standard deviation of the logits, by layer
        self.head_sizes: dict[str, int] = {}
        self._product = (0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("bmm", "baddbmm"):
            self._product = (result.numel(), args[-2].shape[-1])
        elif name in ("_softmax", "_safe_softmax") and args[0].numel() == self._product[0]:
            self._record(args[0].detach().float(), self._product[1])
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            queries, keys = (tensor.detach().float() for tensor in args[:2])
            if queries.shape[1] != keys.shape[1]:
                keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
            size = queries.shape[-1]
            self._record(queries @ keys.mT * ((kwargs or {}).get("scale") or size**-0.5), size)
        return result

    def _record(self, logits: Tensor, head_size: int) -> None:
        seen = logits[logits > -1e4]  # masked ones are at -inf or at the type's least number
        layer = self.layer.rpartition(".")[0] or self.layer
        self.sizes[layer], self.head_sizes[layer] = _rms(seen - seen.mean()), head_size


def _whole(tensor: Tensor) -> Tensor:
    # All processes have the whole of what FSDP2 or tensor parallelism split.
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _rms(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_whole(tensor.detach()))) / max(1, tensor.numel()) ** 0.5


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor with axes among results; a loss has none."""
    waiting = [value]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Tensor) and value.dim():
            return value
        if isinstance(value, Mapping | tuple | list):
            waiting = [*(value.values() if isinstance(value, Mapping) else value), *waiting]
    return None
