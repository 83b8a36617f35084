"""The coordinate check: sizes of each layer's activations and of their updates along a scale.

Yang et al. 2022 (Tensor Programs V), appendix D.1: after a few steps, no coordinate of any activation should
grow with width. The size is the root mean square of a module's output on a fixed batch, or of its change
since init. Along the depth, layers of one kind are taken together, and blocks are measured too: their
addition to the residual stream, and their distance from their linearization (Dey et al. 2025,
arXiv:2505.01618, section 6 and figures 6 and 7).

`measure` checks our networks by training packs, `mup_tpu.parametrize.check` anyone's module; both take their
measurements and their time from `measure_cells`.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from mup_tpu import data
from mup_tpu.config import Trial, field_column
from mup_tpu.config.grid import Axis
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.models import Declaration, Forms, architecture_of, training_flops
from mup_tpu.training.pack import Pack

CELL = ("setting", "parametrization", "seed")  # Columns that, with the scale's, name a trained trial

# A check has so many points of the scale however long they take: two give no interval of a slope.
_FEWEST = 3

Progress = Callable[[str, float], None]  # The present work, and the share of all work that is done


class Subject(ABC):
    """Models in training that a check measures: one per seed, at one point of the scale, under one rule."""

    seeds: Sequence[int]

    @abstractmethod
    def outputs(self) -> list[dict[str, list[Tensor]]]:
        """Return each model's outputs by layer, in the order of the forward pass.

        Tensors of one layer, such as those of all blocks, are measured together.
        """

    @abstractmethod
    def step(self, number: int) -> None: ...

    def others(self, model: int, step: int) -> dict[tuple[str, str], float]:
        """Return further measurements of a model after so many updates, by (layer, quantity)."""
        return {}


@dataclass(frozen=True)
class CheckedSize:
    """Trainings at one point of the scale under one rule."""

    name: str  # Name for people
    value: Any  # Point of the scale
    columns: Mapping[str, Any]  # Columns of all of its measurements
    cost: float  # Work, in any unit that all cells share
    start: Callable[[], Subject]


def measure_cells(
    cells: Sequence[CheckedSize],
    steps: int,
    table: pd.DataFrame,
    measured: Set[Any],
    say: Progress,
    seconds: float,
) -> Iterator[pd.DataFrame]:
    """Train cells, yielding all measurements so far after each.

    Once three points of the scale are `measured`, a further one must be expected to end within `seconds`.
    """
    total, done, seconds_a_cost, began = sum(cell.cost for cell in cells), 0.0, 0.0, time.monotonic()
    for value, group in itertools.groupby(cells, lambda cell: cell.value):
        point, point_began = [*group], time.monotonic()
        cost = sum(cell.cost for cell in point)
        is_late = seconds_a_cost and point_began - began + cost * seconds_a_cost > seconds
        if is_late and len(measured) >= _FEWEST:
            return
        for cell in point:

            def on_progress(share: float, cell: CheckedSize = cell, done: float = done) -> None:
                say(cell.name, (done + share * cell.cost) / total)

            rows = [{**cell.columns, **row} for row in _measurements(cell.start(), steps, on_progress)]
            table = pd.concat([table, pd.DataFrame(rows)], ignore_index=True)
            yield table
            done += cell.cost
        measured = measured | {value}
        seconds_a_cost = (time.monotonic() - point_began) / cost


def _measurements(
    subject: Subject, steps: int, on_progress: Callable[[float], None]
) -> Iterator[dict[str, Any]]:
    """Yield sizes before each step and after the last; `on_progress` receives the share of steps done."""
    start = subject.outputs()
    for step in range(steps + 1):
        on_progress(step / (steps + 1))
        if step:
            subject.step(step - 1)
        now = subject.outputs() if step else start
        for k, seed in enumerate(subject.seeds):
            sizes: dict[tuple[str, str], float] = {}
            for layer, tensors in now[k].items():
                sizes[layer, "activation"] = _rms(tensors)
                if step:
                    changes = (after - before for after, before in zip(tensors, start[k][layer], strict=True))
                    sizes[layer, "update"] = _rms(changes)
            sizes |= subject.others(k, step)
            for (layer, quantity), rms in sizes.items():
                yield {"seed": seed, "step": step, "layer": layer, "quantity": quantity, "rms": rms}


def _rms(tensors: Iterable[Tensor]) -> float:
    squares = [t.double().square().mean() for t in tensors]
    return float(torch.stack(squares).mean().sqrt())


def measure(
    trial: Trial,
    scale: Axis,
    parametrizations: Sequence[str],
    num_seeds: int,
    stored: pd.DataFrame | None = None,
    say: Progress = lambda doing, share: None,
    seconds: float = math.inf,
) -> Iterator[pd.DataFrame]:
    """Train each (point of the scale, parametrization, seed), measuring before each step and at the end.

    The scale's field, parametrization and seed of the trial are replaced; without a base, the smallest value
    of the scale is it. The probe is the first held-out batch, seeds count from 0. Measurements in `stored`
    are not repeated. A further point must be expected to end within `seconds`, once three are measured.

    Yields:
        All measurements so far, stored ones first, at the start and after each point and parametrization.
        Tidy table: setting (id of the trial without scale, parametrization and seed), parametrization,
        optimizer, tied, the scale's column, seed, step, layer, quantity, rms. Steps count updates. Quantities
        are "activation" and "update", the change since init; along the depth also "linearization", a block's
        relative distance from its linearization.
    """
    ((field, values),) = scale.items()
    if field == "seed" or any(isinstance(value, str | bool) for value in values):
        raise ConfigError(
            f"scale {field} of a coordinate check is no axis of growth; take a number of a trial, such "
            "as width, depth or batch_size"
        )
    base = f"base_{field}"
    if trial.flat().get(base) == 0:  # without a base, no rule would count growth
        trial = trial.replace(**{base: min(values)})
    fixed = trial.model.base_width if field == "width" else Trial().flat()[field]
    alike = trial.replace(**{field: fixed}, parametrization="mup", seed=0)
    dataset = data.load(trial.data)
    setting = alike.trial_id(dataset.fingerprint)
    table = stored if stored is not None else pd.DataFrame()
    column = field_column(field)
    if len(table):
        if not {*CELL, "optimizer", "tied"} <= set(table):
            raise StoreError("the stored table is no coordinate check; give another --results")
        if column not in table:
            raise StoreError(
                f"a coordinate check along another scale than {field} is stored there; give another --results"
            )
        same = (table["optimizer"] == trial.optimizer.optimizer) & (table["tied"] == trial.model.tied)
        if not (table[same]["setting"] == setting).all():
            raise StoreError(
                f"a coordinate check of {trial.optimizer.optimizer}, tied {trial.model.tied}, but with other "
                "options is stored there; give another --results"
            )
    yield table
    done = set(zip(*(table[c] for c in (*CELL, column)), strict=True)) if len(table) else set()
    cells = []
    for value, rule in itertools.product(sorted(set(values)), parametrizations):
        members = [
            trial.replace(**{field: value}, parametrization=rule, seed=seed)
            for seed in range(num_seeds)
            if (setting, rule, seed, value) not in done
        ]
        if members:
            columns = {
                "setting": setting,
                "parametrization": rule,
                "optimizer": trial.optimizer.optimizer,
                "tied": trial.model.tied,
                column: value,
            }
            cost = len(members) * training_flops(members[0], dataset.vocab_size)
            name = f"{field} {value}, {rule}"
            start = functools.partial(_PackSubject, members, by_kind=field == "depth")
            cells.append(CheckedSize(name, value, columns, cost, start))
    measured = {value for in_setting, _, _, value in done if in_setting == setting}
    yield from measure_cells(cells, trial.train.steps, table, measured, say, seconds)


class _PackSubject(Subject):
    """Members of a pack, with a forward hook on each declared probe; `by_kind` measures blocks too."""

    def __init__(self, members: Sequence[Trial], by_kind: bool) -> None:
        first = members[0]
        self.seeds = [member.train.seed for member in members]
        self._dataset = data.load(first.data)
        self._probe_BT = torch.from_numpy(self._dataset.validation_batches(1))[0, :, :-1]
        self._pack = Pack(members, self._dataset.vocab_size, get_device("cpu"), "loop")
        # Fused attention has no derivative in forward mode.
        forms = Forms("matmul" if by_kind else "fused")
        self._network = architecture_of(first.model).network(
            first.model, self._dataset.vocab_size, first.data.sequence_length, forms
        )
        declaration = self._pack.declaration
        self._blocks = declaration.blocks
        self._layers = {name: [name] for name in (*declaration.probes, "logits")}
        """Layer of the table -> names of its activations."""
        self._outputs: dict[str, Tensor] = {}
        self._inputs: dict[int, tuple[Any, ...]] = {}  # Arguments of each block, the stream first
        for label, module in declaration.probes.items():
            self._network.get_submodule(module).register_forward_hook(self._keep(label))
        self._expansions: list[tuple[dict[str, Tensor], dict[int, tuple[Any, ...]]]] = []
        if by_kind:
            self._layers = _kinds(declaration)
            for i, module in enumerate(self._blocks):
                self._network.get_submodule(module).register_forward_hook(self._keep(_added(i), i))
            for k in range(len(members)):  # parameters and blocks' inputs around which blocks are expanded
                self._activations(k)
                weights = {name: p.clone() for name, p in self._pack.member_parameters(k).items()}
                self._expansions.append((weights, dict(self._inputs)))

    def _keep(self, name: str, block: int | None = None) -> Callable:
        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if block is None:
                self._outputs[name] = output.detach()
            else:
                self._inputs[block] = inputs
                self._outputs[name] = output.detach() - inputs[0]

        return keep

    @torch.no_grad()
    def _activations(self, member: int) -> dict[str, Tensor]:
        buffers = {name: b[member] for name, b in self._pack.buffers.items()}
        values = self._pack.member_parameters(member) | buffers
        logits = functional_call(self._network, values, (self._probe_BT,), tie_weights=True)
        return self._outputs | {"logits": logits}

    def outputs(self) -> list[dict[str, list[Tensor]]]:
        activations = [self._activations(k) for k in range(len(self.seeds))]
        return [
            {layer: [of[name] for name in names] for layer, names in self._layers.items()}
            for of in activations
        ]

    def step(self, number: int) -> None:
        self._pack.step(torch.from_numpy(self._dataset.train_batch(number)))

    def others(self, model: int, step: int) -> dict[tuple[str, str], float]:
        """Return the distance of a member's blocks from their linearization in parameters, |f - g| / |g|.

        f is a block's addition to a fixed stream, as a function of its parameters, and g the first-order
        expansion of f; both norms are over all blocks.
        """
        if not step or not self._expansions:
            return {}
        weights, block_inputs = self._expansions[model]
        weights_now = self._pack.member_parameters(model)
        off, linear = [], []
        for i, name in enumerate(self._blocks):
            block, inputs = self._network.get_submodule(name), block_inputs[i]
            before, after = _under(weights, name), _under(weights_now, name)
            change = {n: after[n] - before[n] for n in before}

            def added(
                parameters: dict[str, Tensor], block: nn.Module = block, inputs: Any = inputs
            ) -> Tensor:
                return functional_call(block, parameters, inputs) - inputs[0]

            value, slope = jvp(added, (before,), (change,))[:2]
            linear.append((value + slope).detach())
            off.append(added(after).detach() - linear[-1])
        return {("block", "linearization"): _rms(off) / _rms(linear)}


def _kinds(declaration: Declaration) -> dict[str, list[str]]:
    """Return layers along the depth: each kind in all blocks together, and the stream after the last."""
    last = len(declaration.blocks) - 1
    layers: dict[str, list[str]] = {}
    for name, module in declaration.probes.items():
        block = next((i for i, b in enumerate(declaration.blocks) if f"{module}.".startswith(f"{b}.")), None)
        kind = name.removesuffix(f" {block}")
        if block is None or module not in declaration.blocks:
            layers.setdefault(kind, []).append(name)
        else:
            layers.setdefault("block", []).append(_added(block))
            if block == last:
                layers[f"last {kind}"] = [name]
    return layers | {"logits": ["logits"]}


def _added(block: int) -> str:
    return f"block {block}"  # name of the block's addition to the residual stream


def _under(parameters: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    prefix = f"{module}."
    return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
