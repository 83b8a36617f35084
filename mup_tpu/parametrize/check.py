"""Coordinate check of anyone's module, and its conclusions: the layer that grows or dies, and why.

Yang et al. 2022 (Tensor Programs V), appendix D.1. Measurements are those of `mup_tpu.training.coord_check`;
`mup_tpu.plots.coordinate_check_figure` draws them, and `mup_tpu.analysis.coord_check.slopes` fits exponents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mup_tpu.analysis.coord_check import GROWS, grows, slopes
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.module import ModuleParametrization
from mup_tpu.parametrize.roles import Build
from mup_tpu.parametrize.rules import parametrize
from mup_tpu.training.coord_check import Cell, Progress, Subject, measure_cells

OPTIMIZERS: Mapping[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

Loss = Callable[[nn.Module, Any], Tensor]
"""Function of a module and the batch; a scalar."""


@dataclass(frozen=True)
class Growing:
    """First layer of a rule that grows with width."""

    layer: str
    quantity: str
    """"activation", or "update" since init."""
    step: int
    exponent: float
    """Exponent of the width; inf for a width that diverges."""
    low: float
    """Lower end of its 95 % interval."""


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
        """Return plain values."""
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
    loss: Loss,
    *,
    widths: Sequence[int],
    lr: float,
    rules: Sequence[str] = ("mup", "sp"),
    steps: int = 4,
    seeds: int = 2,
    probes: Sequence[str] = (),
    **options: Any,
) -> CoordinateCheck:
    """Train a module of several widths for a few steps on one batch, and measure its layers.

    Args:
        build: as in `parametrize`; without dropout, which would count as change.
        batch: batch for training and measuring.
        loss: function of a module and the batch; a scalar.
        widths: at least two; three octaves and more show an exponent well.
        lr: learning rate at the base, as in your training or somewhat more.
        rules: keys of `mup_tpu.rules.parametrization.PARAMETRIZATIONS`.
        steps: number of updates.
        seeds: number of seeds of the init, from 0.
        probes: patterns of submodules to measure; by default submodules with a matrix of their own, and
            members of nn.ModuleLists.
        options: of `parametrize`, such as base_width (by default the least width), optimizer and roles.

    Raises:
        ConfigError: as `parametrize`, or a readout's module is never called.
    """
    check = ModuleCheck(build, batch, loss, widths, lr, rules, steps, seeds, probes, options)
    *_, table = check.measure()
    return check.conclude(table)


def assert_mup(
    build: Build,
    batch: Any,
    loss: Loss,
    *,
    base_width: int,
    widths: Sequence[int] = (),
    lr: float = 2**-7,
    **options: Any,
) -> CoordinateCheck:
    """Assert in a test that no layer of a module grows with width under μP; return the check.

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
class ModuleCheck:
    """A coordinate check in steps, for callers with a time limit; fields as arguments of `coord_check`."""

    build: Build
    batch: Any
    loss: Loss
    widths: Sequence[int]
    lr: float
    rules: Sequence[str]
    steps: int
    seeds: int
    probes: Sequence[str]
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(set(self.widths)) < 2:
            raise ConfigError(
                f"widths {list(self.widths)} are fewer than two, so that nothing can be seen to grow"
            )

    def measure(
        self, seconds: float = math.inf, say: Progress = lambda doing, share: None
    ) -> Iterator[pd.DataFrame]:
        """Yield all measurements so far after each width and rule, as `measure_cells`."""
        cells = []
        for width in sorted(set(self.widths)):
            for rule in self.rules:
                columns, start = {"parametrization": rule, "width": width}, self._start(rule, width)
                cells.append(Cell(f"{rule}, width {width}", width, columns, width**2, start))
        yield from measure_cells(cells, self.steps, pd.DataFrame(), set(), say, seconds)

    def conclude(self, table: pd.DataFrame) -> CoordinateCheck:
        """Find the layer that grows under each rule, with factors at the largest width that was measured."""
        widest = int(table["width"].max())
        scaled = {rule: self._factors(rule, widest) for rule in self.rules}
        sentences, growing = _conclusions(table, scaled, self._factors("mup", widest))
        labels = _labels(list(dict.fromkeys(table["layer"])))
        return CoordinateCheck(table.assign(layer=table["layer"].map(labels)), tuple(sentences), growing)

    def _factors(self, rule: str, width: int) -> ModuleParametrization:
        options = {"base_width": min(self.widths), **self.options}
        return parametrize(self.build, width=width, rule=rule, **options)

    def _start(self, rule: str, width: int) -> Callable[[], Subject]:
        size = (width,) if self.options.get("depth") is None else (width, self.options["depth"])

        def start() -> Subject:
            return _Modules(self, self._factors(rule, width), size)

        return start


class _Modules(Subject):
    """Modules of one width that train on one batch, a seed each, with a hook on each measured submodule."""

    def __init__(self, check: ModuleCheck, scaled: ModuleParametrization, size: tuple[int, ...]) -> None:
        self.seeds = range(check.seeds)
        self._check = check
        self._modules: list[nn.Module] = []
        for seed in self.seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self._modules.append(scaled.init_(check.build(*size)))
        make_optimizer = OPTIMIZERS[scaled.optimizer]
        self._optimizers = [make_optimizer(scaled.param_groups(m, lr=check.lr)) for m in self._modules]
        self._kept: list[dict[str, Tensor]] = [{} for _ in self.seeds]
        for module, kept in zip(self._modules, self._kept, strict=True):
            for name in _probed(module, check.probes):
                module.get_submodule(name).register_forward_hook(functools.partial(_keep, kept, name))
        self._losses: list[Tensor] = []
        # A forward pass that bypasses a module with a factor, as F.linear with its weight does, is refused.
        self._uncalled = {f.module: f.factor for f in scaled.forward if f.place == "input"}
        for name in self._uncalled:
            self._modules[0].get_submodule(name).register_forward_hook(functools.partial(self._called, name))

    def _called(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._uncalled.pop(name, None)

    def outputs(self) -> list[dict[str, list[Tensor]]]:
        self._losses = [self._check.loss(module, self._check.batch) for module in self._modules]
        for name, factor in self._uncalled.items():
            raise ConfigError(
                f"the readout {name!r} is not called as a module, so that its logits are not multiplied by "
                f"{factor:g}; call it, or multiply them in your code and give roles={{{name!r}: 'by hand'}}"
            )
        return [{name: [output] for name, output in kept.items()} for kept in self._kept]

    def step(self, number: int) -> None:
        for loss, optimizer in zip(self._losses, self._optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _keep(kept: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    """Keep a module's first output; outputs are in the order of the last calls."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    kept.pop(name, None)
    kept[name] = output.detach().clone()


def _probed(module: nn.Module, probes: Sequence[str]) -> list[str]:
    """Return submodules to measure, in the order in which they are registered."""
    names = [name for name, part in module.named_modules() if name and not isinstance(part, nn.ModuleList)]
    if not probes:
        parts = dict(module.named_modules())
        lists = {name for name, part in parts.items() if isinstance(part, nn.ModuleList)}
        return [
            name
            for name in names
            if name.rpartition(".")[0] in lists
            and name.rpartition(".")[2].isdecimal()
            or any(p.dim() >= 2 for p in parts[name].parameters(False))
        ]
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in probes)]
    if not chosen:
        raise ConfigError(f"probes {list(probes)} match no submodule; there are {', '.join(names[:8])} ...")
    return chosen


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Return short labels of submodules for legends: "mlp.c_proj 0" for "transformer.h.0.mlp.c_proj"."""
    parts = {name: [part for part in name.split(".") if not part.isdecimal()] for name in names}
    labels: dict[str, str] = {}
    for name in names:
        numbers = "".join(f" {part}" for part in name.split(".") if part.isdecimal())
        words = parts[name] or [name]
        alike = [other for other in {tuple(p) for p in parts.values()} if other and other != tuple(words)]
        sizes = range(1, len(words))
        unique = (i for i in sizes if all(p[-i:] != tuple(words[-i:]) for p in alike))
        labels[name] = ".".join(words[-next(unique, len(words)) :]) + numbers
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


def _conclusions(
    table: pd.DataFrame, scaled: Mapping[str, ModuleParametrization], mup: ModuleParametrization
) -> tuple[list[str], dict[str, Growing]]:
    """Return a sentence or two a rule, and the layer that grows under a rule.

    A layer that grows makes all layers behind it grow, so only the first one is reported. Its factors are
    compared with μP's.
    """
    last, widest = int(table["step"].max()), int(table["width"].max())
    sentences: list[str] = []
    growing: dict[str, Growing] = {}
    for rule, factors in scaled.items():
        part = table[table["parametrization"] == rule]
        diverged = part[~np.isfinite(part["rms"])]
        if len(diverged):
            first = diverged.iloc[0]
            growing[rule] = Growing(first["layer"], first["quantity"], int(first["step"]), math.inf, math.inf)
            width = int(diverged["width"].min())
            sentences.append(f"{rule}: width {width} diverges within {last} steps; check with a smaller lr")
            continue
        at_init, after = _exponents(part, 0), _exponents(part, last)
        if row := next(filter(grows, at_init), None):
            step, when, lacks = 0, "at init", _lacking(row["layer"], factors, mup, ("init", "logits"))
        elif row := next(filter(grows, after), None):
            step, when, lacks = last, f"after {last} steps", _lacking(row["layer"], factors, mup)
        else:
            top = max(after, key=lambda row: row["slope"])
            sentences.append(
                f"{rule}: no layer grows with width (most of all the {top['quantity']} of {top['layer']}, ∝ "
                f"width^{top['slope']:.2f}); if a wide model diverges all the same, the width is not the "
                "reason: look at the base's learning rate and warm-up, at depth, at attention logits and "
                "Adam's ε, which a few steps do not show"
            )
            shrinking = (_shrinks(row, factors, mup, widest) for row in after)
            sentences += [f"{rule}: {sentence}" for sentence in shrinking if sentence][:1]
            continue
        why = f"{lacks} at width {widest}" if lacks else _elsewhere(part, factors, mup, widest)
        sentences.append(f"{rule}: the first layer that grows is {_named(row, factors)} {when}: {why}")
        growing[rule] = Growing(row["layer"], row["quantity"], step, row["slope"], row["low"])
    return sentences, growing


def _exponents(table: pd.DataFrame, step: int) -> list[dict[Any, Any]]:
    """Fit exponents at one step, layers in the order of the forward pass."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(table["layer"]))}
    rows: list[dict[Any, Any]] = slopes(table, step).dropna(subset="slope").to_dict("records")
    return sorted(rows, key=lambda row: order[row["layer"]])


def _elsewhere(
    table: pd.DataFrame, factors: ModuleParametrization, mup: ModuleParametrization, widest: int
) -> str:
    """Explain why a layer with μP's factors grows: by another layer, or by the forward pass."""
    for layer in dict.fromkeys(table["layer"]):
        if lacks := _lacking(layer, factors, mup):
            return f"its own factors are μP's, but {layer} has others: {lacks} at width {widest}"
    return (
        "all factors are μP's, so look at its forward pass (a sum over the width in place of a mean, "
        "attention by 1/√d with a growing head size) and at weights that init_ did not see"
    )


def _shrinks(
    row: Mapping[Any, Any], factors: ModuleParametrization, mup: ModuleParametrization, widest: int
) -> str | None:
    """Describe a layer that learns less at larger widths, as its learning rate is below μP's."""
    if row["quantity"] != "update" or row["slope"] > -GROWS or row["high"] > 0:
        return None
    lacks = _lacking(row["layer"], factors, mup, ("learning rate",), too_small=True)
    return lacks and f"{_named(row, factors)}, so that it stops learning: {lacks} at width {widest}"


def _named(row: Mapping[Any, Any], factors: ModuleParametrization) -> str:
    parameter = factors.matrix_of(row["layer"])
    role = f" ({factors.parameters[parameter].role.replace('_', ' ')})" if parameter else ""
    return f"{row['layer']}{role}, {row['quantity']} ∝ width^{row['slope']:.2f}"


def _lacking(
    layer: str,
    factors: ModuleParametrization,
    mup: ModuleParametrization,
    kinds: tuple[str, ...] = ("logits", "learning rate", "init"),
    too_small: bool = False,
) -> str | None:
    """Return the first factor of a layer that is larger than μP's (or smaller), with both values."""
    parameter = factors.matrix_of(layer)
    logits, mup_logits = (
        next((f.factor for f in of.forward if f.place == "input" and f.module == layer), 1.0)
        for of in (factors, mup)
    )
    both = {"logits": (logits, mup_logits)}
    if parameter:
        scaling, mup_scaling = (of.scalings[parameter] for of in (factors, mup))
        drawn, mup_drawn = (of.init_ratios()[parameter] for of in (factors, mup))
        both["init"] = (mup_scaling.init * drawn / mup_drawn, mup_scaling.init)
        both["learning rate"] = (scaling.learning_rate, mup_scaling.learning_rate)
    names = {"logits": "outputs are", "init": "init σ is", "learning rate": "learning rate is"}
    for kind in kinds:
        ours, mups = both.get(kind, (1.0, 1.0))
        if not math.isclose(ours, mups, rel_tol=1e-3) and (ours < mups) == too_small:
            return f"its {names[kind]} × {ours:.3g}, where μP has × {mups:.3g}"
    return None
