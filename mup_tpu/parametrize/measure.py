"""What a check measures while modules of one size train: layers, parameters and attention.

Modules train on one batch, and the same batch shows the size of each layer's output (root mean square) and of
its change since init, as in mup's own check (Yang et al. 2022, Tensor Programs V, appendix D.1). Along the
depth, each block's addition to the residual stream is a layer too, and blocks' distance from their
linearization is measured (Dey et al. 2025, arXiv:2505.01618, section 6 and figures 6 and 7).

Of a parameter these are the optimizer's settings, the size of init and gradient, and the **effect** of an
update: the change of the loss to first order, |⟨gradient, update⟩|. In μP no effect follows the width,
whatever the optimizer and however factors are split among init, learning rate and forward pass (Yang &
Littwin 2023, arXiv:2308.01814; Yang et al. 2023, arXiv:2310.17813, Condition 1).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mup_tpu.analysis.diagnosis import Mend
from mup_tpu.errors import ConfigError, first_line
from mup_tpu.parametrize.roles import unwrapped

Loss = Callable[[nn.Module, Any], Tensor]  # Function of a module and the batch; a scalar

# A gradient below this many units in the last place of the largest one beside it is rounding, as its terms
# cancel. The gradient of a key bias is an example, since a softmax does not change with it.
_ROUNDING = 8

# Least number of sizes, however long they take: two give no interval of an exponent.
_FEWEST = 3

Trained = tuple[nn.Module, Sequence[Any]]  # A module as it is trained, and its optimizers

Progress = Callable[[str, float], None]  # The present work, and the share of all work that is done


def measure_sizes(
    scale: str,
    sizes: Sequence[Any],
    start: Callable[[Any], list[TrainedModule]],
    steps: int,
    say: Progress,
    seconds: float = float("inf"),
    doing: str = "",
) -> pd.DataFrame:
    """Train at each size, and return a row a measurement: scale's column, seed, step, layer, quantity, rms.

    `start` makes a module for each seed of a size. Once three sizes are measured, a further one must be
    expected to end within `seconds`. `doing` stands before the size in reports of progress.
    """
    costs = [float(size) ** 2 for size in sizes]
    rows: list[dict[str, Any]] = []
    done, seconds_a_cost, began = 0.0, 0.0, time.monotonic()
    for i, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        size_began = time.monotonic()
        if i >= _FEWEST and size_began - began + cost * seconds_a_cost > seconds:
            break

        def on_progress(share: float, size: Any = size, done: float = done, cost: float = cost) -> None:
            say(f"{doing}{scale} {size}", (done + share * cost) / sum(costs))

        rows += [{scale: size, **row} for row in _measurements(start(size), steps, on_progress)]
        done += cost
        seconds_a_cost = (time.monotonic() - size_began) / cost
    return pd.DataFrame(rows)


def _measurements(
    modules: Sequence[TrainedModule], steps: int, on_progress: Callable[[float], None]
) -> Iterator[dict[str, Any]]:
    """Yield sizes before each step and after the last; `on_progress` receives the share of steps done."""
    start = [module.outputs() for module in modules]
    for step in range(steps + 1):
        on_progress(step / (steps + 1))
        for seed, module in enumerate(modules):
            if step:
                module.step(step - 1)
            sizes: dict[tuple[str, str], float] = {}
            for layer, output in (module.outputs() if step else start[seed]).items():
                sizes[layer, "activation"] = _rms(output)
                if step:
                    sizes[layer, "update"] = _rms(output - start[seed][layer])
            sizes |= module.others(step, step == steps)
            for (layer, quantity), rms in sizes.items():
                yield {"seed": seed, "step": step, "layer": layer, "quantity": quantity, "rms": rms}


class TrainedModule:
    """A module of one size and seed that trains on one batch.

    `required` has submodules that the forward pass must call, with the sentence for one that it does not.
    `mends` are applied with the growth m. `by_block` measures what blocks add to the residual stream, and
    their distance from their linearization.
    """

    def __init__(
        self,
        trained: Trained,
        loss: Loss,
        batch: Any,
        required: Mapping[str, str] = {},
        mends: Sequence[Mend] = (),
        m: float = 1.0,
        by_block: bool = False,
    ) -> None:
        (self._module, self._optimizers), self._loss, self._batch = trained, loss, batch
        self._required, self._by_block = dict(required), by_block
        self._blocks: dict[str, tuple[nn.Module, Any, Any, dict[str, Tensor]]] = {}
        """Of each block: module, arguments and weights at init, around which it is expanded."""
        self._outputs: dict[str, Tensor] = {}
        self._inputs: dict[str, float] = {}
        self._order: dict[str, int] = {}
        self._attention = Products(self._module)
        self._rows: dict[tuple[str, str], float] = {}
        self._step_factors: dict[str, float] = {}
        for mend in mends:
            self._apply(mend, m)
        parts = [(unwrapped(path), part) for path, part in self._module.named_modules()]
        lists = {name for name, part in parts if isinstance(part, nn.ModuleList)}
        for name, part in parts:
            if isinstance(part, nn.ModuleList):
                continue
            parent, _, number = name.rpartition(".")
            is_block = parent in lists and number.isdecimal()
            is_measured = not name or is_block or any(p.dim() >= 2 for p in part.parameters(False))
            hook = functools.partial(self._keep, name, is_measured, is_block)
            part.register_forward_hook(hook, with_kwargs=True)

    def _apply(self, mend: Mend, m: float) -> None:
        """Change the module as it would be without a suspected cause."""
        factors = {name: m**power for name, power in mend.powers.items()}
        if mend.kind == "step":
            for name, factor in factors.items():
                self._step_factors[name] = self._step_factors.get(name, 1.0) * factor
        elif mend.kind == "float32":
            self._module.float()
        elif mend.kind == "epsilon":
            for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
                group["eps"] = 1e-9 * group.get("eps", 1.0)
        elif mend.kind == "init":
            for name, p in self._module.named_parameters():
                p.data.mul_(factors.get(unwrapped(name), 1.0))
        else:
            for name, part in self._module.named_modules():
                if (factor := factors.get(unwrapped(name), 1.0)) != 1:
                    hook: Callable[..., Any] = functools.partial(_scaled, factor)
                    if mend.kind == "output":
                        part.register_forward_hook(lambda module, inputs, out, hook=hook: hook(out))
                    else:
                        part.register_forward_pre_hook(lambda module, inputs, hook=hook: hook(inputs))

    def _keep(
        self, name: str, is_measured: bool, is_block: bool, module: nn.Module, inputs: Any, named_inputs: Any,
        out: Any,
    ) -> None:  # fmt: skip
        self._attention.layer = name
        self._required.pop(name, None)
        self._order.setdefault(name, len(self._order))
        given = _first_tensor(inputs) if any(True for _ in module.parameters(False)) else None
        if given is not None and given.is_floating_point():  # norms' inputs show factors behind embeddings
            self._inputs[name] = _rms(given)
        if is_measured and (output := _first_tensor(out)) is not None:
            self._outputs.pop(name, None)  # keeps the order of the last calls
            self._outputs[name] = _whole(output.detach()).clone()
            stream = _first_tensor(inputs)
            if is_block and self._by_block and stream is not None and stream.shape == output.shape:
                self._outputs[f"{name}.added"] = _whole(output.detach() - stream.detach())
                if name not in self._blocks:
                    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
                    self._blocks[name] = (module, _detached(inputs), _detached(named_inputs), weights)

    def outputs(self) -> dict[str, Tensor]:
        """Evaluate the loss; return outputs by layer, in the order of the forward pass."""
        # A compiled module runs as it is written, so that hooks are called and each operation is seen.
        with _uncompiled(), self._attention:
            try:
                self._value = self._loss(self._module, self._batch)
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
                raise ConfigError(
                    f"loss(module, batch) fails ({first_line(error)}); it must "
                    "return the loss of a module that build made on the batch"
                ) from error
        value = self._value
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ConfigError("loss(module, batch) must return one number with a gradient, as a tensor")
        for sentence in self._required.values():
            raise ConfigError(sentence)
        return dict(self._outputs)

    def step(self, number: int) -> None:
        self._module.zero_grad()
        self._value.backward()
        named = {unwrapped(name): p for name, p in self._module.named_parameters()}
        before = {name: _whole(p.detach()).clone() for name, p in named.items()}
        gradients = {n: _whole(p.grad).clone() for n, p in named.items() if p.grad is not None}
        for optimizer in self._optimizers:
            try:
                with _uncompiled(), _Float32Products():
                    optimizer.step()
            except (TypeError, RuntimeError, AttributeError) as error:
                raise ConfigError(
                    f"step() of {type(optimizer).__name__} fails ({first_line(error)}); a check needs an "
                    "optimizer that steps by the gradients, without evaluating the loss again"
                ) from error
        for name, factor in self._step_factors.items():
            whole = before[name]
            named[name].data.sub_(whole).mul_(factor).add_(whole)
        self._rows = self._measured(named, before, gradients, number)

    def _measured(
        self,
        named: Mapping[str, nn.Parameter],
        before: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        number: int,
    ) -> dict[tuple[str, str], float]:
        """Return what one step shows of each parameter."""
        groups = {
            id(p): g for optimizer in self._optimizers for g in optimizer.param_groups for p in g["params"]
        }
        rows: dict[tuple[str, str], float] = {}
        largest: dict[str, float] = {}  # module -> largest gradient of its parameters; "" -> of all
        for name, parameter in named.items():
            change = _real((_whole(parameter.detach()) - before[name]).to(before[name].dtype))
            rows[name, "size"] = _rms(change)
            if group := groups.get(id(parameter)):
                lr = float(group.get("lr", rows[name, "size"])) * self._step_factors.get(name, 1.0)
                rows[name, "learning rate"] = lr
                rows[name, "decay"] = lr * float(group.get("weight_decay") or 0.0)
            if number == 0:
                rows[name, "init"] = _rms(before[name])
            gradient = gradients.get(name)
            rows[name, "gradient"] = size = 0.0 if gradient is None else _rms(gradient)
            # Entries with one sign: a sum in single precision loses nothing that an exponent shows.
            rows[name, "effect"] = 0.0 if gradient is None else abs(float(_real(gradient) @ change))
            for of in {name.rpartition(".")[0], ""}:
                largest[of] = max(largest.get(of, 0.0), size)
        for name, parameter in named.items():
            of = name.rpartition(".")[0]
            beside = largest[of] if rows[name, "gradient"] < largest[of] else largest[""]
            rounding = torch.finfo(parameter.dtype).eps if beside is largest[of] else torch.finfo().eps
            if rows[name, "gradient"] < _ROUNDING * rounding * beside:
                rows[name, "gradient"] = rows[name, "effect"] = 0.0
        clipped = [_whole(p.grad) for p in named.values() if p.grad is not None]
        if gradients and clipped:
            whole = [torch.cat([g.flatten() for g in of]).norm() for of in (gradients.values(), clipped)]
            rows["", "clipping"] = float(whole[1] / whole[0]) if whole[0] else 1.0
        return rows

    def others(self, step: int, is_last: bool) -> dict[tuple[str, str], float]:
        """Return further measurements after so many updates, by (layer, quantity)."""
        rows = dict(self._rows)
        if step and is_last and (distance := self._distance()) is not None:
            rows["blocks", "linearization"] = distance
        rows |= {(layer, "attention"): rms for layer, rms in self._attention.sizes.items()}
        if not step:
            rows |= {(layer, "head size"): d for layer, d in self._attention.head_sizes.items()}
            rows |= {(name, "read out"): 1.0 for name in self._attention.read_out}
            rows |= {(name, "input"): rms for name, rms in self._inputs.items()}
            rows |= {(name, "order"): i for name, i in self._order.items()}
        return rows

    def _distance(self) -> float | None:
        """Return the distance of blocks from their linearization in parameters, |f - g| / |g|.

        f is a block's addition to a fixed stream, as a function of its parameters, and g the first-order
        expansion of f around the init; both norms are over all blocks. None where an operation of a block has
        no derivative in forward mode.
        """
        off, linear = [], []
        for block, inputs, named_inputs, before in self._blocks.values():
            after = {name: p.detach() for name, p in block.named_parameters()}
            change = {name: after[name] - p for name, p in before.items()}

            def added(weights: Any, block: nn.Module = block, inputs: Any = inputs,
                      named: Any = named_inputs) -> Tensor:  # fmt: skip
                output = _first_tensor(functional_call(block, weights, inputs, named))
                assert output is not None
                return output - inputs[0]

            # Fused attention has no derivative in forward mode.
            with contextlib.suppress(NotImplementedError), sdpa_kernel(SDPBackend.MATH):
                value, slope = jvp(added, (before,), (change,))[:2]
                linear.append((value + slope).detach().double())
                off.append(added(after).detach().double() - linear[-1])
        if not linear:
            return None
        off_norm, norm = (torch.stack([t.square().mean() for t in of]).mean().sqrt() for of in (off, linear))
        return float(off_norm) / float(norm)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    # Nothing is compiled where Dynamo is not imported, which takes seconds.
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


class _Float32Products(TorchFunctionMode):
    """Muon orthogonalizes in bfloat16, which CPUs compute ten times as slowly; float32 says the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args[1:], *(kwargs or {}).values()]
        is_cast = func is Tensor.to and any(value is torch.bfloat16 for value in given)
        if (
            (is_cast or func is Tensor.bfloat16)
            and args[0].dtype == torch.float32
            and args[0].device.type == "cpu"
        ):
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor that is sharded over processes
        return 0


class Products(TorchDispatchMode):
    """Measures attention logits, whatever the module calls its fields, and sees embeddings that read out.

    It sees torch's operations: the fused ones of scaled_dot_product_attention with their arguments, a softmax
    (of a product of two activations, or of other logits), and products with an embedding's matrix.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._tables = {
            address: unwrapped(f"{name}.weight")
            for name, part in module.named_modules()
            if isinstance(part, nn.Embedding) and (address := _address(part.weight))
        }
        self.read_out: set[str] = set()  # Embeddings whose matrix gives logits
        self.layer = ""  # Module whose forward pass ended last
        self.sizes: dict[str, float] = {}  # Standard deviation of the logits, by layer
        self.head_sizes: dict[str, int] = {}
        self._product, self._added = (0, 0), torch.zeros(())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm") and isinstance(args[-1], Tensor):
            self.read_out |= {self._tables.get(_address(args[-1]), "")} - {""}
        if name in ("bmm", "baddbmm"):
            self._product = (result.numel(), args[-2].shape[-1])
            # ALiBi's slopes or a mask are added to the product, and are no logits of queries and keys.
            added = (
                args[0].detach() * (kwargs or {}).get("beta", 1)
                if name == "baddbmm"
                else result.new_zeros(())
            )
            self._added = added.expand(result.shape)
        elif name in ("_softmax", "_safe_softmax"):
            seen, is_product = args[0].detach().float().flatten(), args[0].numel() == self._product[0]
            logits = seen - self._added.flatten() if is_product else seen
            self._record(logits[seen > -1e4], self._product[1] if is_product else 0)
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            queries, keys = (tensor.detach().float() for tensor in args[:2])
            if queries.shape[1] != keys.shape[1]:
                keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
            size = queries.shape[-1]
            self._record(queries @ keys.mT * ((kwargs or {}).get("scale") or size**-0.5), size)
        return result

    def _record(self, logits: Tensor, head_size: int) -> None:
        layer = self.layer.rpartition(".")[0] or self.layer
        self.sizes[layer] = _rms(logits - logits.mean())
        if head_size:
            self.head_sizes[layer] = head_size


def _whole(tensor: Tensor) -> Tensor:
    # FSDP2 and tensor parallelism split a tensor over processes; each measures the whole.
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()


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


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {name: _detached(of) for name, of in value.items()}
    return tuple(map(_detached, value)) if type(value) is tuple else value


def _scaled(factor: float, value: Any) -> Any:
    """Multiply the first floating tensor among results, and keep what is around it."""
    if isinstance(value, Tensor):
        return value * factor
    if isinstance(value, tuple | list) and value:
        return type(value)([_scaled(factor, value[0]), *value[1:]])
    raise ConfigError("a factor cannot be tried here")
