"""The coordinate check: sizes of each layer's activations and of their updates along a scale.

Yang et al. 2022 (Tensor Programs V), appendix D.1: after a few steps, no coordinate of any activation should
grow with width. The size is the root mean square of a module's output on a fixed batch, or of its change
since init. Along the depth, layers of one kind are taken together, and blocks are measured too: their
addition to the residual stream, and their distance from their linearization (Dey et al. 2025,
arXiv:2505.01618, section 6 and figures 6 and 7).

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from mup_tpu import data
from mup_tpu.config import Axis, Trial
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.models import Declaration, Forms, architecture_of, training_flops
from mup_tpu.training.pack import Pack

CELL = ("setting", "parametrization", "seed")
"""Columns that, with the scale's, name a trained trial."""
_FEWEST = 3
"""Points of the scale that a check has however long they take."""


def measure(
    trial: Trial,
    scale: Axis,
    parametrizations: Sequence[str],
    num_seeds: int,
    stored: pd.DataFrame | None = None,
    say: Callable[[str, float], None] = lambda pack, share: None,
    seconds: float = math.inf,
) -> Iterator[pd.DataFrame]:
    """Train each (point of the scale, parametrization, seed), measuring before each step and at the end.

    Args:
        trial: trial to train, with its steps; the scale's field, parametrization and seed are replaced. The
            probe is the first held-out batch.
        scale: axis of growth. Its smallest value is the base, if the trial has none.
        parametrizations: keys of `mup_tpu.rules.parametrization.PARAMETRIZATIONS`.
        num_seeds: seeds from 0.
        stored: earlier measurements, which are not repeated.
        say: told the name of each pack and the share of all work that is done.
        seconds: time within which a further point must be expected to end, once three are measured.

    Yields:
        All measurements so far, stored ones first, at the start and after each point and parametrization.
        Tidy table: setting (id of the trial without scale, parametrization and seed), parametrization,
        optimizer, tied, the scale's column, seed, step, layer, quantity, rms. Steps count updates. Quantities
        are "activation" and "update", the change since init; along the depth also "linearization", a block's
        relative distance from its linearization.

    Raises:
        ConfigError: a trial does not grow along the scale.
        StoreError: another table is stored, or trials of the same optimizer and tying with other settings.
    """
    trial = _with_base(trial, scale)
    setting = _setting(trial, scale)
    table = stored if stored is not None else pd.DataFrame()
    if len(table):
        _check_stored(table, trial, scale, setting)
    yield table
    packs = _missing(trial, scale, parametrizations, num_seeds, table)
    total, done, last_rate, began = sum(pack.flop for pack in packs), 0.0, 0.0, time.monotonic()
    for value, group in itertools.groupby(packs, lambda pack: pack.value):
        point, point_began = [*group], time.monotonic()
        wanted = sum(pack.flop for pack in point)
        is_late = last_rate and point_began - began + wanted * last_rate > seconds
        if is_late and table[table["setting"] == setting][scale.column].nunique() >= _FEWEST:
            return
        for pack in point:

            def told(share: float, pack: _Missing = pack, done: float = done) -> None:
                name = f"{scale.field} {pack.value}, {pack.parametrization}"
                say(name, (done + share * pack.flop) / total)

            measured = _measure_pack(pack.members, trial.train.steps, scale.field == "depth", told)
            about = {
                "setting": setting,
                "parametrization": pack.parametrization,
                "optimizer": trial.optimizer.optimizer,
                "tied": trial.model.tied,
                scale.column: value,
            }
            table = pd.concat([table, pd.DataFrame([about | p for p in measured])], ignore_index=True)
            yield table
            done += pack.flop
        last_rate = (time.monotonic() - point_began) / wanted


@dataclass(frozen=True)
class _Missing:
    """Trials of one point and parametrization that are not measured yet."""

    value: Any
    parametrization: str
    members: list[Trial]
    flop: float


def _missing(
    trial: Trial, scale: Axis, parametrizations: Sequence[str], num_seeds: int, stored: pd.DataFrame
) -> list[_Missing]:
    vocab_size, setting = data.load(trial.data).vocab_size, _setting(trial, scale)
    done = set(zip(*(stored[c] for c in (*CELL, scale.column)), strict=True)) if len(stored) else set()
    found = []
    for point, rule in itertools.product(scale.points, parametrizations):
        (value,) = point.values()
        members = [
            trial.replace(**point, parametrization=rule, seed=seed)
            for seed in range(num_seeds)
            if (setting, rule, seed, value) not in done
        ]
        if members:
            flop = len(members) * training_flops(members[0], vocab_size)
            found.append(_Missing(value, rule, members, flop))
    return found


def _with_base(trial: Trial, scale: Axis) -> Trial:
    """The trial with a base along the scale: without one, no rule would count growth."""
    if scale.field == "seed" or not scale.is_numeric:
        raise ConfigError(
            f"scale {scale.field} of a coordinate check is no axis of growth; take a number of a trial, such "
            "as width, depth or batch_size"
        )
    base = f"base_{scale.field}"
    return trial.replace(**{base: scale.points[0][scale.field]}) if trial.flat().get(base) == 0 else trial


def _setting(trial: Trial, scale: Axis) -> str:
    """Id of the settings that the measurements of one check share."""
    usual = trial.model.base_width if scale.field == "width" else Trial().flat()[scale.field]
    alike = trial.replace(**{scale.field: usual}, parametrization="mup", seed=0)
    return alike.trial_id(data.load(trial.data).fingerprint)


def _check_stored(table: pd.DataFrame, trial: Trial, scale: Axis, setting: str) -> None:
    if not {*CELL, "optimizer", "tied"} <= set(table):
        raise StoreError("the stored table is no coordinate check; give another --results")
    if scale.column not in table:
        raise StoreError(
            f"a coordinate check along another scale than {scale.field} is stored there; give another "
            "--results"
        )
    same = (table["optimizer"] == trial.optimizer.optimizer) & (table["tied"] == trial.model.tied)
    if not (table[same]["setting"] == setting).all():
        raise StoreError(
            f"a coordinate check of {trial.optimizer.optimizer}, tied {trial.model.tied}, but with other "
            "options is stored there; give another --results"
        )


def _measure_pack(
    members: list[Trial], steps: int, by_kind: bool, told: Callable[[float], None]
) -> list[dict]:
    """Measurements of one pack; `told` hears the share of its steps that is done."""
    dataset = data.load(members[0].data)
    probe_BT = torch.from_numpy(dataset.validation_batches(1))[0, :, :-1]
    pack = Pack(members, dataset.vocab_size, get_device("cpu"), "loop")
    probed = _Probed(pack, probe_BT, by_kind)
    rows: list[dict] = []

    def note(member: Trial, step: int, layer: str, quantity: str, rms: float) -> None:
        about = {"seed": member.train.seed, "step": step, "layer": layer, "quantity": quantity}
        rows.append(about | {"rms": rms})

    start = [probed.activations(k) for k in range(len(members))]
    expansions = [probed.expansion(k) for k in range(len(members))] if by_kind else []
    for step in range(steps + 1):
        told(step / (steps + 1))
        if step:
            pack.step(torch.from_numpy(dataset.train_batch(step - 1)))
        for k, member in enumerate(members):
            now = probed.activations(k)
            for layer, names in probed.layers.items():
                note(member, step, layer, "activation", _rms(now[n] for n in names))
                if step:
                    note(member, step, layer, "update", _rms(now[n] - start[k][n] for n in names))
            if step and by_kind:
                distance = probed.distance_from_linearization(k, expansions[k])
                note(member, step, "block", "linearization", distance)
    return rows


def _kinds(declaration: Declaration) -> dict[str, list[str]]:
    """Layers along the depth: each kind in all blocks together, and the stream after the last block."""
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
    """Name of a block's addition to the residual stream."""
    return f"block {block}"


def _rms(tensors: Iterable[Tensor]) -> float:
    """Root mean square of tensors of one size taken together."""
    squares = [t.double().square().mean() for t in tensors]
    return float(torch.stack(squares).mean().sqrt())


@dataclass(frozen=True)
class _Expansion:
    """Point of a member's linearization: parameters and inputs of its blocks at one step."""

    parameters: dict[str, Tensor]
    inputs: list[tuple[Any, ...]]
    """Arguments of each block; the first is the stream."""


class _Probed:
    """A pack's network with a forward hook on each declared probe; `by_kind` measures blocks too."""

    def __init__(self, pack: Pack, probe_BT: Tensor, by_kind: bool) -> None:
        self._pack, self._probe_BT = pack, probe_BT
        first, declaration = pack.trials[0], pack.declaration
        self._network = architecture_of(first.model).network(
            first.model,
            pack.vocab_size,
            first.data.sequence_length,
            # Fused attention has no derivative in forward mode.
            Forms("matmul" if by_kind else "fused", scaled_branches=pack.forms.scaled_branches),
        )
        self._outputs: dict[str, Tensor] = {}
        self._called: dict[int, tuple[Any, ...]] = {}
        for label, module in declaration.probes.items():
            self._network.get_submodule(module).register_forward_hook(self._keep(label))
        self.layers = {name: [name] for name in (*declaration.probes, "logits")}
        """Layer of the table -> names of its activations."""
        if by_kind:
            self.layers = _kinds(declaration)
            for i, module in enumerate(declaration.blocks):
                self._network.get_submodule(module).register_forward_hook(self._keep_block(i))

    def _keep(self, name: str) -> Callable:
        return lambda module, inputs, output: self._outputs.__setitem__(name, output.detach())

    def _keep_block(self, block: int) -> Callable:
        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self._called[block] = inputs
            self._outputs[_added(block)] = output.detach() - inputs[0]

        return keep

    @torch.no_grad()
    def activations(self, member: int) -> dict[str, Tensor]:
        """Output of each probe of a member's network, in order from input to logits."""
        pack = self._pack
        values = pack.member_parameters(member) | {name: b[member] for name, b in pack.buffers.items()}
        logits = functional_call(self._network, values, (self._probe_BT,), tie_weights=True)
        return self._outputs | {"logits": logits}

    def expansion(self, member: int) -> _Expansion:
        self.activations(member)
        parameters = {name: p.clone() for name, p in self._pack.member_parameters(member).items()}
        return _Expansion(parameters, [self._called[i] for i in range(len(self._pack.declaration.blocks))])

    def distance_from_linearization(self, member: int, around: _Expansion) -> float:
        """Distance of a member's blocks from their linearization in their parameters: |f - g| / |g|.

        f is a block's addition to a fixed stream, as a function of its parameters, and g the first-order
        expansion of f; both norms are over all blocks.
        """
        parameters = self._pack.member_parameters(member)
        off, linear = [], []
        for block, inputs in zip(self._pack.declaration.blocks, around.inputs, strict=True):
            before, after = _under(around.parameters, block), _under(parameters, block)
            change = {name: after[name] - before[name] for name in before}
            added = self._added_by(block, inputs)
            value, slope = jvp(added, (before,), (change,))
            linear.append((value + slope).detach())
            off.append(added(after).detach() - linear[-1])
        return _rms(off) / _rms(linear)

    def _added_by(self, name: str, inputs: tuple[Any, ...]) -> Callable[[dict[str, Tensor]], Tensor]:
        """A block's addition to a given stream, as a function of its parameters."""
        block = self._network.get_submodule(name)
        return lambda parameters: functional_call(block, parameters, inputs) - inputs[0]


def _under(parameters: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{module}."): p for name, p in parameters.items() if name.startswith(f"{module}.")
    }
