"""Coordinate check of a module: size of each layer's output, and of its change, along the width.

Yang et al. 2022 (Tensor Programs V), appendix D.1. `mup_tpu.plots.coordinate_check_figure` draws it,
`mup_tpu.analysis.coord_check.slopes` fits exponents, and `diagnosis` puts them into words.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.diagnosis import Growing, sentences
from mup_tpu.parametrize.module import ModuleParametrization
from mup_tpu.parametrize.rules import parametrize
from mup_tpu.parametrize.survey import Build

_FEWEST = 3
"""Fewest widths of a check that is cut short."""

OPTIMIZERS: Mapping[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class CoordinateCheck:
    """Measurements of a coordinate check, and its conclusions."""

    table: pd.DataFrame = field(repr=False)
    """Columns parametrization, width, seed, step (number of updates), layer, quantity ("activation", or
    "update" since init) and rms. A layer is the end of a submodule's name with the numbers in it."""
    sentences: tuple[str, ...]
    """A sentence a rule: the layer that grows first and the factor that it likely lacks; or none grows."""
    growing: Mapping[str, Growing]
    """First growing layer of each rule that has one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rules = dict.fromkeys(self.table["parametrization"])
        return {
            "passes": {rule: rule not in self.growing for rule in rules},
            "growing": {rule: asdict(layer) for rule, layer in self.growing.items()},
            "widths": sorted(map(int, self.table["width"].unique())),
            "seeds": int(self.table["seed"].nunique()),
            "sentences": list(self.sentences),
        }


def coord_check(
    build: Build,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    widths: Sequence[int],
    base_width: int,
    lr: float,
    rules: Sequence[str] = ("mup", "sp"),
    optimizer: str = "adamw",
    steps: int = 4,
    seeds: int = 2,
    probes: Sequence[str] = (),
    seconds: float = math.inf,
    update: Callable[[str, float], None] = lambda doing, share: None,
    **options: Any,
) -> CoordinateCheck:
    """Train a module of several widths for a few steps on one batch, and measure its layers.

    Args:
        build: as in `parametrize`; without dropout, which would count as change.
        batch: batch for training and measuring.
        loss: function of a module and the batch; a scalar.
        widths: at least two; three octaves and more show an exponent well.
        base_width: width of the tuning.
        lr: learning rate at the base, as in your training or somewhat more.
        rules: keys of `mup_tpu.rules.parametrization.PARAMETRIZATIONS`.
        optimizer: "adamw" or "sgd".
        steps: number of updates.
        seeds: number of seeds of the init, from 0.
        probes: patterns of submodules to measure; by default submodules with a matrix of their own, and
            members of nn.ModuleLists.
        seconds: time after which no further seed, and beyond three widths no larger one, is begun.
        update: function that takes the present work and the share that is done, for a bar.
        options: depth, base_depth, roles, branches, by_hand and delta_width of `parametrize`.

    Raises:
        ConfigError: as `parametrize`, or a readout's module is never called.
    """
    if len(set(widths)) < 2:
        raise ConfigError(f"widths {list(widths)} are fewer than two, so that nothing can be seen to grow")
    training, began = _Training(batch, loss, optimizer, lr, steps, probes), time.monotonic()
    options |= {"base_width": base_width, "optimizer": optimizer}
    rows: list[dict[str, Any]] = []
    there: list[int] = []
    scaled: dict[tuple[str, int], ModuleParametrization] = {}
    todo = [(seed, width) for seed in range(seeds) for width in sorted(set(widths))]
    for done, (seed, width) in enumerate(todo):
        if time.monotonic() - began > seconds and len(there) >= _FEWEST:
            break
        for rule in rules:
            update(f"{rule}, width {width}, seed {seed}", done / len(todo))
            if (rule, width) not in scaled:
                scaled[rule, width] = parametrize(build, width=width, rule=rule, **options)
            own = scaled[rule, width]
            size = (width,) if options.get("depth") is None else (width, options["depth"])
            about = {"parametrization": rule, "width": width, "seed": seed}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                rows += [about | row for row in training.measure(own, own.init_(build(*size)))]
        there += [width] if seed == 0 else []
    table = pd.DataFrame(rows)
    mup = parametrize(build, width=max(there), **options)
    said, growing = sentences(table, {rule: scaled[rule, max(there)] for rule in rules}, mup)
    labels = _labels(list(dict.fromkeys(table["layer"])))
    return CoordinateCheck(table.assign(layer=table["layer"].map(labels)), tuple(said), growing)


def assert_mup(
    build: Build,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    base_width: int,
    widths: Sequence[int] = (),
    lr: float = 2**-7,
    **options: Any,
) -> CoordinateCheck:
    """Assert in a test that no layer of a module grows with width under μP; returns the check.

    Args:
        build: as in `parametrize`.
        batch: as in `coord_check`.
        loss: as in `coord_check`.
        base_width: width of the tuning.
        widths: by default 1, 2, 4, 8 and 16 times the base width.
        lr: learning rate at the base.
        options: others of `coord_check`, such as `rules` in place of ("mup",), and of `parametrize`.

    Raises:
        AssertionError: a layer grows: its exponent is above 0.2, and its 95 % interval above 0.
    """
    widths = widths or [base_width * 2**k for k in range(5)]
    options = dict[str, Any](rules=("mup",), seeds=3) | options
    check = coord_check(build, batch, loss, widths=widths, base_width=base_width, lr=lr, **options)
    if check.growing:
        raise AssertionError("\n".join(check.sentences))
    return check


@dataclass(frozen=True)
class _Training:
    """A few steps on one batch, and the submodules to measure."""

    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: str
    lr: float
    steps: int
    probes: Sequence[str]

    def measure(self, scaled: ModuleParametrization, module: nn.Module) -> list[dict[str, Any]]:
        optimizer = OPTIMIZERS[self.optimizer](scaled.param_groups(module, lr=self.lr))
        outputs: dict[str, Tensor] = {}
        for name in _probed(module, self.probes):
            module.get_submodule(name).register_forward_hook(_keep(outputs, name))
        readouts, called = {f.module: f.factor for f in scaled.forward if f.place == "input"}, set[str]()
        for name in readouts:
            module.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
        start: dict[str, Tensor] = {}
        rows = []
        for step in range(self.steps + 1):
            now = self.loss(module, self.batch)
            if not step:
                _require_called(readouts, called)
                start |= outputs
            for layer, output in outputs.items():
                rows.append(_row(step, layer, "activation", output))
                if step:
                    rows.append(_row(step, layer, "update", output - start[layer]))
            if step < self.steps:
                optimizer.zero_grad()
                now.backward()
                optimizer.step()
        return rows


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Short labels of submodules for legends: "mlp.c_proj 0" for "transformer.h.0.mlp.c_proj"."""
    parts = {name: [part for part in name.split(".") if not part.isdecimal()] for name in names}
    labels: dict[str, str] = {}
    for name in names:
        numbers = "".join(f" {part}" for part in name.split(".") if part.isdecimal())
        own = parts[name] or [name]
        alike = [other for other in {tuple(p) for p in parts.values()} if other and other != tuple(own)]
        size = next(
            (i for i in range(1, len(own)) if all(p[-i:] != tuple(own[-i:]) for p in alike)), len(own)
        )
        labels[name] = ".".join(own[-size:]) + numbers
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


def _row(step: int, layer: str, quantity: str, values: Tensor) -> dict[str, Any]:
    rms = values.double().square().mean().sqrt()
    return {"step": step, "layer": layer, "quantity": quantity, "rms": float(rms)}


def _probed(module: nn.Module, probes: Sequence[str]) -> list[str]:
    """Submodules to measure, in the order in which they are registered."""
    members = {
        f"{name}.{i}".removeprefix(".")
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList)
        for i in range(len(part))
    }
    matrices = {
        name for name, part in module.named_modules() if any(p.dim() >= 2 for p in part.parameters(False))
    }
    names = [name for name, part in module.named_modules() if name and not isinstance(part, nn.ModuleList)]
    if not probes:
        return [name for name in names if name in members | matrices]
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in probes)]
    if not chosen:
        raise ConfigError(f"probes {list(probes)} match no submodule; there are {', '.join(names[:8])} ...")
    return chosen


def _keep(outputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Hook that keeps a module's first output; outputs are in the order of the last calls."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        while not isinstance(output, Tensor):
            output = next(iter(output.values() if isinstance(output, Mapping) else output))
        outputs.pop(name, None)
        outputs[name] = output.detach().clone()

    return keep


def _require_called(readouts: Mapping[str, float], called: set[str]) -> None:
    """Refuse a forward pass that bypasses a module with a factor, as F.linear with its weight does."""
    for name, factor in readouts.items():
        if name not in called:
            raise ConfigError(
                f"the readout {name!r} is not called as a module, so that its logits are not multiplied by "
                f"{factor:g}; call it, or multiply them in your code and say by_hand=[{name!r}]"
            )
