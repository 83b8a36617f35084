"""Coordinate check of anyone's module, and its conclusions: the layer that grows or dies, and why.

Yang et al. 2022 (Tensor Programs V), appendix D.1. Measurements are those of `mup_tpu.training.coord_check`;
`mup_tpu.plots.coordinate_check_figure` draws them, and `mup_tpu.analysis.coord_check.slopes` fits exponents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mup_tpu.analysis.coord_check import grows, slopes
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize.module import ModuleParametrization
from mup_tpu.parametrize.roles import Build
from mup_tpu.parametrize.rules import parametrize
from mup_tpu.training.coord_check import Cell, Progress, Subject, measure_cells

# Exponent below which a layer dies: one with a factor too many has about -1/2 or -1. The interval must lie
# below half of it.
DIES = -0.4

OPTIMIZERS: Mapping[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

Loss = Callable[[nn.Module, Any], Tensor]
"""Function of a module and the batch; a scalar."""


@dataclass(frozen=True)
class LayerTrend:
    """First layer of a rule that grows or dies with width."""

    layer: str
    quantity: str
    """"activation", or "update" since init."""
    step: int
    exponent: float
    """Exponent of the width; inf for a width that diverges."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end of it."""

    def __str__(self) -> str:
        grows = self.exponent > 0
        verb, end = ("grows", f"above {self.low:.2f}") if grows else ("dies", f"below {self.high:.2f}")
        return f"{self.layer} {verb}, {self.quantity} ∝ width^{self.exponent:.2f} (95 % {end})"


@dataclass(frozen=True)
class CoordinateCheck:
    """Measurements of a coordinate check, and its conclusions."""

    table: pd.DataFrame = field(repr=False)
    """Columns parametrization, width, seed, step (number of updates), layer, quantity ("activation", or
    "update" since init) and rms. A layer is the end of a submodule's name with the numbers in it."""
    sentences: tuple[str, ...]
    """A sentence a rule: the first layer that grows or dies, and the factor that is likely wrong; or none."""
    growing: Mapping[str, LayerTrend]
    """First growing layer of each rule that has one."""
    dying: Mapping[str, LayerTrend]
    """First layer that dies under each rule under which none grows."""

    @property
    def failures(self) -> dict[str, LayerTrend]:
        return {**self.growing, **self.dying}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        rules = dict.fromkeys(self.table["parametrization"])
        return {
            "passes": {rule: rule not in self.failures for rule in rules},
            "growing": {rule: asdict(layer) for rule, layer in self.growing.items()},
            "dying": {rule: asdict(layer) for rule, layer in self.dying.items()},
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
        probes: patterns of submodules to measure; by default submodules with a matrix of their own, members
            of nn.ModuleLists, and the whole module, as "output".
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
    """Assert in a test that no layer of a module grows or dies with width under μP; return the check.

    Args:
        build: as in `parametrize`.
        batch: as in `coord_check`.
        loss: as in `coord_check`.
        base_width: width of the tuning.
        widths: by default 1, 2, 4, 8 and 16 times the base width.
        lr: learning rate at the base.
        options: others of `coord_check`, such as `rules` in place of ("mup",), and of `parametrize`.

    Raises:
        AssertionError: a layer grows: its exponent is above 0.2, and its 95 % interval above 0; or it dies:
            its exponent is below -0.4, and its interval below -0.2.
    """
    widths = widths or [base_width * 2**k for k in range(5)]
    options = dict[str, Any](rules=("mup",), seeds=3) | options
    check = coord_check(build, batch, loss, widths=widths, base_width=base_width, lr=lr, **options)
    if check.failures:
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
        """Find the layer that grows or dies under each rule, with factors at the largest width."""
        widest = int(table["width"].max())
        sentences: list[str] = []
        trends: dict[str, LayerTrend] = {}
        for rule in self.rules:
            part = table[table["parametrization"] == rule]
            sentence, trend = _conclude(part, self._factors(rule, widest), self._factors("mup", widest))
            sentences.append(f"{rule}: {sentence}")
            trends |= {rule: trend} if trend else {}
        growing = {rule: trend for rule, trend in trends.items() if trend.exponent > 0}
        dying = {rule: trend for rule, trend in trends.items() if rule not in growing}
        labels = _labels(list(dict.fromkeys(table["layer"])))
        table = table.assign(layer=table["layer"].map(labels))
        return CoordinateCheck(table, tuple(sentences), growing, dying)

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
    """Keep a module's first output that is no number (such as a loss), in the order of the last calls."""
    waiting = [output]
    while waiting:
        output = waiting.pop(0)
        if isinstance(output, Tensor) and output.dim():
            kept.pop(name, None)
            kept[name] = output.detach().clone()
            return
        if isinstance(output, Mapping | tuple | list):
            waiting = [*(output.values() if isinstance(output, Mapping) else output), *waiting]


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
        ] + [""]
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
        words = parts[name] if any(parts[name]) else [name or "output"]
        alike = [other for other in {tuple(p) for p in parts.values()} if other and other != tuple(words)]
        sizes = range(1, len(words))
        unique = (i for i in sizes if all(p[-i:] != tuple(words[-i:]) for p in alike))
        labels[name] = ".".join(words[-next(unique, len(words)) :]) + numbers
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


def _conclude(
    table: pd.DataFrame, factors: ModuleParametrization, mup: ModuleParametrization
) -> tuple[str, LayerTrend | None]:
    """Return a sentence about one rule, and the first layer that grows or dies.

    Such a layer takes all layers behind it along, so only the first is reported. Its factors are compared
    with μP's.
    """
    last, widest = int(table["step"].max()), int(table["width"].max())
    diverged = table[~np.isfinite(table["rms"])]
    if len(diverged):
        first, inf = diverged.iloc[0], math.inf
        width = int(diverged["width"].min())
        sentence = f"width {width} diverges within {last} steps; check with a smaller lr"
        return sentence, LayerTrend(first["layer"], first["quantity"], int(first["step"]), inf, inf, inf)
    # A readout whose factor the caller's code applies has no logits yet: the output has them.
    by_hand = {f.module for f in factors.forward if f.parameter and f.place == "by hand"}
    exponents = {
        step: [row for row in _exponents(table, step) if row["layer"] not in by_hand] for step in (0, 1, last)
    }
    when = {0: "at init", last: f"after {last} steps"}
    for step in (0, last):
        if row := next(filter(grows, exponents[step]), None):
            kinds = ("logits", "learning rate", "init") if step else ("init", "logits")
            unlike = _unlike(row["layer"], factors, mup, kinds)
            why = f"{unlike} at width {widest}" if unlike else _why_it_grows(table, factors, mup, widest)
            sentence = f"the first layer that grows is {_named(row, factors)} {when[step]}: {why}"
            return sentence, _trend(row, step)
    readouts = {f.module for f in factors.forward if f.parameter} | {""}
    # Of right models some layers shrink in the first step, or in later ones, since narrow ones overfit the
    # batch; none in both.
    early = {(row["layer"], row["quantity"]) for row in exponents[1] if row["slope"] < DIES}
    for step in (0, last):
        for row in exponents[step]:
            is_lasting = not step or (row["layer"], row["quantity"]) in early
            if is_lasting and _dies(row, readouts):
                why = _why_it_dies(row, step, factors, mup, widest)
                sentence = f"the first layer that dies is {_named(row, factors)} {when[step]}: {why}"
                return sentence, _trend(row, step)
    top = max(exponents[last], key=lambda row: row["slope"])
    return (
        f"no layer grows with width (most of all the {top['quantity']} of {top['layer'] or 'the output'}, ∝ "
        f"width^{top['slope']:.2f}), and none dies; if a wide model diverges all the same, the width is not "
        "the reason: look at the base's learning rate and warm-up, at depth, at attention logits and Adam's "
        "ε, which a few steps do not show"
    ), None


def _trend(row: Mapping[Any, Any], step: int) -> LayerTrend:
    layer = row["layer"] or "output"
    return LayerTrend(layer, row["quantity"], step, row["slope"], row["low"], row["high"])


def _exponents(table: pd.DataFrame, step: int) -> list[dict[Any, Any]]:
    """Fit exponents at one step, layers in the order of the forward pass."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(table["layer"]))}
    rows: list[dict[Any, Any]] = slopes(table, step).dropna(subset="slope").to_dict("records")
    return sorted(rows, key=lambda row: order[row["layer"]])


def _dies(row: Mapping[Any, Any], readouts: Set[str]) -> bool:
    if row["quantity"] == "activation" and row["layer"] in readouts:
        return False  # μP's logits shrink at init, as 1/√m
    return bool(row["slope"] < DIES and row["high"] < DIES / 2)


def _why_it_grows(
    table: pd.DataFrame, factors: ModuleParametrization, mup: ModuleParametrization, widest: int
) -> str:
    """Explain why a layer with μP's factors grows: by another layer, or by the forward pass."""
    for layer in dict.fromkeys(table["layer"]):
        if lacks := _unlike(layer, factors, mup):
            return f"its own factors are μP's, but {layer} has others: {lacks} at width {widest}"
    return (
        "all factors are μP's, so look at its forward pass (a sum over the width in place of a mean, "
        "attention by 1/√d with a growing head size) and at weights that init_ did not see"
    )


def _why_it_dies(
    row: Mapping[Any, Any],
    step: int,
    factors: ModuleParametrization,
    mup: ModuleParametrization,
    widest: int,
) -> str:
    """Explain why a layer stops learning: by a factor below μP's, or by one that is applied twice."""
    kinds = ("learning rate", "logits") if step else ("init", "logits")
    if lacks := _unlike(row["layer"], factors, mup, kinds, too_small=True):
        return f"{lacks} at width {widest}"
    if not row["layer"]:
        return (
            "the last layers are right, but what the module makes of them shrinks: it seems to divide its "
            "logits by the width ratio itself, and the rule divides them again; leave out one of both (the "
            "rule's by the role 'by hand' of the readout)"
        )
    return (
        "all factors are μP's, so look for a factor that is applied twice: one that the module's own forward "
        "pass or init has already (such as 1/m before this layer), or learning rates that are divided again"
    )


def _named(row: Mapping[Any, Any], factors: ModuleParametrization) -> str:
    parameter = factors.matrix_of(row["layer"])
    role = f" ({factors.parameters[parameter].role.replace('_', ' ')})" if parameter else ""
    return f"{row['layer'] or 'the output'}{role}, {row['quantity']} ∝ width^{row['slope']:.2f}"


def _unlike(
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
