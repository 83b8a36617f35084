"""Diagnosis of a module by measured exponents: a verdict a parameter, its cause and its remedy.

A parameter follows the rule if the effect of its updates on the loss keeps its size, whatever its factors.
If not, the gradient's exponent shows what the forward pass contributes, and the rest is the optimizer's:

    effect of a parameter = gradient's excess (twice for SGD) + excess of the optimizer's step

In μP the gradient of a parameter whose outputs grow is ∝ 1/width, and so is a readout's, by its 1/m.

Exponents of several causes look alike, so each finding has a mend of its suspected cause. `tried` measures
the modules again with each, and the cause whose mend makes all flat is named.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from mup_tpu.config.columns import label
from mup_tpu.errors import TableError

# Exponents. A missing factor of μP makes ±1/2 or ±1; right models lie within -0.31 and 0.2 in three octaves.
GROWS, DIES = 0.25, -0.36

SIZES = ("activation", "update")  # quantities of layers that are sizes
LINEARIZATION = "linearization"  # quantity of the distance of blocks from their linearization

# Below this exponent of depth blocks turn lazy. Branches scaled by 1/√depth have twice it, −1/2 (Dey et al.
# 2025, arXiv:2505.01618, figure 6).
LAZY = -0.25


class Mend(NamedTuple):
    """A change that undoes a suspected cause, by powers of the width of parameters or modules."""

    kind: str  # "init" or "step" of parameters, "input" or "output" of modules, "epsilon", "float32"
    powers: Mapping[str, float] = {}


class Exponent(NamedTuple):
    """Exponent of the scale, with its 95 % interval."""

    value: float
    low: float
    high: float

    def shifted(self, by: float) -> Exponent:
        return Exponent(*(end + by for end in self))

    @property
    def verdict(self) -> str:
        if self.value > GROWS and self.low > 0.05:
            return "grows"
        if self.value < DIES and self.high < DIES / 2:
            return "dies"
        return "follows" if self.low < GROWS and self.high > DIES and self.high - self.low < 1 else "unknown"


_REMEDIES = {
    "learning rate not scaled": "divide the learning rate of hidden matrices by m (width / base width)",
    "learning rate divided twice": "divide it by m once: the module or the groups already have it",
    "learning rate grows with width": "leave it constant under Adam; × m is SGD's rule",
    "SGD's learning rate not scaled": "multiply it by m, as of all but hidden matrices under SGD",
    "Muon's learning rate has Adam's 1/m": "leave it constant: an orthogonal update does not need 1/m",
    "embedding treated as hidden": "give it the base's init and learning rate: only one of its axes grows",
    "norm or bias treated as hidden": "give norms and biases the base's learning rate",
    "readout treated as hidden": "give it the base's learning rate, since its logits are × 1/m",
    "readout's 1/m missing": "multiply the logits by 1/m (base width / width)",
    "readout's 1/m applied twice": "multiply the logits by 1/m once: the forward pass, MuReadout or the rule "
    "already does (role 'by hand')",
    "inner matrix treated as readout": "layers follow its outputs, which stay: give it σ/√m and η/m, in "
    "parametrize by roles={'its name': 'hidden'}",
    "readout's init not scaled": "keep σ with logits × 1/m, or have σ ∝ 1/m without",
    "init not scaled": "draw hidden matrices with σ ∝ 1/√fan-in",
    "init grows with width": "keep the embedding's σ at the base's",
    "init divided twice": "scale σ by 1/√m once: the module's init or the rule already does",
    "weight tied across roles": "give a tied matrix the embedding's init and rate, and the logits 1/m",
    "applied twice": "look for a factor, such as 1/m, that the forward pass applies once more",
    "forward factor grows with width": "look for a sum over the width in place of a mean, or for √width",
    "attention 1/√d": "divide attention logits by the head size, or let the number of heads grow",
    "attention divided twice": "divide attention logits by the head size once",
    "attention logits grow": "look at the scale of attention logits",
    "ε not scaled": "lower Adam's ε, or scale it by 1/m as the gradient",
    "clipping before scaling": "clip at a limit that follows the gradient's norm, or not at all",
    "Muon's learning rate not scaled": 'follow the rule of its adjust_lr_fn: none for "original", 1/√m for '
    '"match_rms_adamw"',
    "decay coupled": "multiply weight decay by m where the learning rate has 1/m, so that steps decay alike",
    "optimizer's groups made before parametrize": "make the optimizer from this module's parameters, last",
    "not trained": "it is frozen, unused, or a bias of keys, to which a softmax is blind",
    "not updated": "look at the optimizer: its step changes nothing",
    "no gradient": "look at the loss: its gradient is 0 at every parameter",
    "updates lost to rounding": "keep a float32 master copy of the weights, or round at random",
    "residual branch not scaled by depth": "multiply residual branches by base depth / depth (CompleteP)",
    "a sum over the batch": "average the loss over sequences and tokens",
    "diverges": "check with a smaller learning rate",
}


_EXACT = {"decay coupled", "not trained", "optimizer's groups made before parametrize"}

_INIT = {"init not scaled", "init divided twice", "init grows with width", "embedding treated as hidden"}

_FORWARD = {
    "readout's 1/m missing", "readout's 1/m applied twice", "readout's init not scaled", "applied twice",
    "forward factor grows with width",
}  # fmt: skip


@dataclass(frozen=True)
class GrownParameter:
    """A parameter, as its shapes at two sizes and its name show it."""

    name: str
    role: str
    shape: tuple[int, ...]  # At the smallest size
    wide: tuple[int, ...]  # At the largest size
    inputs_grow: bool
    outputs_grow: bool
    optimizer: str = "adam"  # "adam", "sgd" or "muon": how the size of its updates follows the gradient
    modules: tuple[str, ...] = ()  # Modules that hold it; several if it is tied
    is_tied: bool = False  # Whether it is embedding and readout
    trains: bool = True  # Whether it asks for a gradient
    is_low: bool = False  # Whether its numbers have less than 24 bits

    @property
    def is_hidden(self) -> bool:
        return self.inputs_grow and self.outputs_grow


@dataclass(frozen=True)
class Finding:
    """Verdict about one parameter or layer, with its cause in the field's words."""

    name: str
    role: str
    verdict: str  # "follows", "grows", "dies", "not scaled", "unknown" or "not judged"
    cause: str = ""
    evidence: str = ""  # Measured exponents on which the cause rests
    excess: float = 0.0  # Exponent beyond the rule's
    mends: tuple[Mend, ...] = field(default=(), repr=False, compare=False)

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("grows", "dies", "not scaled")

    @property
    def remedy(self) -> str:
        return _REMEDIES.get(self.cause, "")

    def __str__(self) -> str:
        role = f" ({self.role.replace('_', ' ')})" if self.role else ""
        evidence = f" ({self.evidence})" if self.evidence else ""
        verdict = f"is {self.verdict}" if self.verdict in ("unknown", "not judged") else self.verdict
        cause, remedy = self.cause or "as the rule has it", f"; {self.remedy}" if self.remedy else ""
        return f"{self.name or 'the output'}{role} {verdict}: {cause}{evidence}{remedy}"


def exponents(table: pd.DataFrame, scale: str) -> dict[tuple[str, str, int], Exponent]:
    """Fit the exponent of each (layer, quantity, step) in the scale; what is 0 somewhere has none."""
    keys = ["layer", "quantity", "step"]
    wide = table.pivot_table(index=keys, columns=[scale, "seed"], values="rms", aggfunc="first", sort=False)
    sizes = wide.to_numpy()
    usable = np.isfinite(sizes).all(1) & (sizes > 0).all(1)
    y = np.log2(sizes[usable])
    x = np.log2(wide.columns.get_level_values(0).to_numpy(dtype=float))
    # Corrections of finite width shrink as it grows, so the largest sizes count most.
    weights = 2.0 ** (x - x.max())
    weights /= weights.sum()
    dx = x - weights @ x
    spread = weights @ dx**2
    slopes = (y * weights * dx).sum(1) / spread
    rest = y - (y @ weights)[:, None] - slopes[:, None] * dx
    # Two standard errors; with few points the verdict rests on the value.
    reach = 2.0 * np.sqrt((weights * rest**2).sum(1) / max(1, len(x) - 2) / spread)
    ends = zip(slopes.tolist(), (slopes - reach).tolist(), (slopes + reach).tolist(), strict=True)
    return {key: Exponent(*fit) for key, fit in zip(wide.index[usable], ends, strict=True)}


# Columns of a stored coordinate check, beside those of its scale and setting
_CHECKED = ("parametrization", "seed", "step", "layer", "quantity", "rms")


def by_setting(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the parts of a stored coordinate check by their setting, without the table's conclusions.

    Pandas copies these, `attrs`, at each selection; they took nine tenths of the time of a figure.
    """
    rows = table.copy(deep=False)
    rows.attrs = {}
    if "setting" not in rows:
        return {"coord_check": rows}
    return {str(name): part for name, part in rows.groupby("setting", sort=False)}


def scale_of(table: pd.DataFrame) -> str:
    """Return the column that holds the scale, which is the only one besides results and settings."""
    others = [str(column) for column in table if column not in (*_CHECKED, "setting")]
    if len(others) != 1:
        scales = ", ".join(map(repr, others)) or "no column of one"
        raise TableError(f"a coordinate-check table has one scale, this one has {scales}")
    return others[0]


def layer_exponents(table: pd.DataFrame) -> dict[tuple[str, str, str], Exponent]:
    """Return the exponent of each (parametrization, quantity, layer) after the last step.

    Raises:
        TableError: a column is missing, or there are fewer than two sizes.
    """
    scale, last = scale_of(table), table["step"].max()
    if missing := [column for column in _CHECKED if column not in table]:
        raise TableError(f"coordinate-check table has no column {', '.join(map(repr, missing))}")
    if table[scale].nunique() < 2:
        raise TableError(
            f"coordinate check needs at least 2 {label(scale)}s, the table has {table[scale].nunique()}"
        )
    return {
        (str(rule), quantity, layer): fit
        for rule, part in table[table["step"] == last].groupby("parametrization", sort=False)
        for (layer, quantity, _), fit in exponents(part, scale).items()
    }


def laziness(fits: Mapping[tuple[str, str, int], Exponent], scale: str) -> str:
    """Return whether blocks come closer to their linearization along the depth; "" if not measured."""
    fit = next((fit for (_, quantity, _), fit in fits.items() if quantity == LINEARIZATION), None)
    if fit is None:
        return ""
    lazy = "turn lazy" if fit.high < LAZY else "may turn lazy" if fit.low < LAZY else "do not turn lazy"
    distance = f"distance from linearization ∝ {scale}^{fit.value:.2f}"
    return f"blocks {lazy}: {distance} (95 % {fit.low:.2f} to {fit.high:.2f})"


class Diagnosis:
    """Findings about the modules of one rule, from their measurements."""

    def __init__(
        self, table: pd.DataFrame, parameters: Sequence[GrownParameter], scale: str = "width"
    ) -> None:
        self.fits = exponents(table, scale)
        by_use = {*table.loc[table["quantity"] == "read out", "layer"]}
        parameters = [replace(p, is_tied=p.is_tied or p.name in by_use) for p in parameters]
        self.parameters = parameters
        self.scale = scale
        self._of_scale = "residual branch not scaled by depth" if scale == "depth" else "cause not known"
        self._table = table
        self._last = int(table["step"].max())
        # In the order of the forward pass
        self._layers = list(dict.fromkeys(table[table["quantity"] == "order"].sort_values("rms")["layer"]))
        self._head_sizes = {of[0]: fit.value for of, fit in self.fits.items() if of[1:] == ("head size", 0)}
        self._matrices = {module: p for p in parameters if len(p.shape) >= 2 for module in p.modules}
        # A module that holds a matrix beside other layers ends after them, wherever its matrix is used.
        holders = [m for m in self._matrices if any(f"{o}.".startswith(f"{m}." if m else "") for o in
                   self._matrices if o != m)]  # fmt: skip
        owned = {module: p for p in parameters for module in p.modules} | self._matrices
        called = [owned[of] for of in self._layers if of in owned and of not in holders]
        grown = [i for i, p in enumerate(called) if p.outputs_grow and not p.is_tied]
        # A matrix with finite outputs is no readout if growing outputs follow, be they a norm's: it holds
        # keys of few heads, or is a router, or belongs to an MLP whose inner size stays.
        last = grown[-1] if grown else 0
        self._inner = {p.name for p in called[:last] if p.inputs_grow and not p.outputs_grow}
        self._inner |= {p.name for p in parameters if p.role == "router"}
        read_out = [p for p in parameters if p.is_tied or p.role == "readout"]
        self._readouts = [p for p in read_out if p.name not in self._inner]
        self._inner_readouts = [p for p in read_out if p.role == "readout" and p.name in self._inner]
        # Parameters in front of finite outputs that other layers read, as in an autoencoder. Their effect
        # shows only after the weights behind them have aligned.
        narrow = [i for i, p in enumerate(called) if p.name in self._inner and p.role != "router"]
        self._before_narrow = {p.name for p in called[: max(narrow, default=-1) + 1]}
        self._before_narrow |= {
            p.name for p in parameters for m in p.modules
            if any(m in of.modules for of in called if of.name in self._before_narrow)
        }  # fmt: skip

    def findings(self) -> list[Finding]:
        """Return a finding a parameter, and those about layers first; the main cause comes first of all."""
        diverged = self._table[~np.isfinite(self._table["rms"])]
        if len(diverged):
            size = diverged[self.scale].min()
            return [Finding(diverged.iloc[0]["layer"], "", "grows", "diverges", f"at {self.scale} {size}")]
        structural = [f for f in map(self._structural, self.parameters) if f]
        gradients = self._table.loc[self._table["quantity"] == "gradient", "rms"]
        if structural and all(f.cause == "not trained" for f in structural) and not gradients.any():
            structural = [replace(f, verdict="unknown", cause="no gradient") for f in structural]
        forward = [f for f in (self._at_init(), self._attention()) if f]
        known = {f.name for f in structural}
        each = [self._parameter(p, bool(forward)) for p in self.parameters if p.name not in known]
        by_forward = [f for f in each if f.cause in _FORWARD]
        if all(f.role in ("norm", "bias") for f in by_forward):
            # A factor of the forward pass would reach matrices too; one vector alone shows sums that cancel.
            each = [replace(f, verdict="unknown", cause="", mends=()) if f in by_forward else f for f in each]
        wrong = [f for f in each if f.cause]
        behind = (fit for (_, quantity, step), fit in self.fits.items() if (quantity, step) == ("input", 0))
        is_known = bool(wrong or forward) or any(f.is_wrong for f in structural)
        if not is_known and any(f.value > GROWS / 2 and f.low > 0.05 for f in behind):
            # A layer beside others hides what an unscaled σ does to their sum.
            departing = filter(None, map(self._drawn, self.parameters))
            drawn = {f.name: f for f in departing if f.cause == "init not scaled"}
            each, wrong = [drawn.get(f.name, f) for f in each], [*drawn.values()]
        # What the optimizer's settings show is exact; what the forward pass does may follow from others.
        wrong.sort(key=lambda f: (f.cause in _FORWARD, not f.cause.startswith("readout's")))
        if not structural and not forward and not wrong:
            finite = (p for p in self.parameters if p in self._readouts or p.name in self._inner)
            readouts = {module for p in finite for module in p.modules}  # a factor 1/m may follow them
            for layer, quantity in itertools.product(self._layers, ("activation", "update")):
                fit = self.fits.get((layer, quantity, self._last))
                if layer not in readouts and fit and fit.value > GROWS and fit.low > 0.1:
                    evidence = f"its {quantity} after {self._last} steps {self._power(fit.value)}"
                    forward = forward or [Finding(layer, "", "grows", "cause not known", evidence)]
        first = [f for f in structural if f.is_wrong]
        rest = [f for f in structural if not f.is_wrong]
        return [*first, *forward, *wrong, *rest, *(f for f in each if not f.cause)]

    def _structural(self, p: GrownParameter) -> Finding | None:
        """Return the finding of a parameter of which no exponent can say anything."""
        rows = self._table[(self._table["layer"] == p.name) & (self._table["step"] == self._last)]
        sizes = {quantity: of["rms"] for quantity, of in rows.groupby("quantity")}
        if not p.trains:
            return Finding(p.name, p.role, "not judged", "not trained", "it needs no gradient")
        if "learning rate" not in sizes:
            cause = "optimizer's groups made before parametrize"
            return Finding(p.name, p.role, "not scaled", cause, "no optimizer has it")
        if (sizes["gradient"] == 0).mean() >= 0.5:
            return Finding(p.name, p.role, "not judged", "not trained", "its gradient is 0")
        if not sizes["size"].any():
            cause = "updates lost to rounding" if p.is_low else "not updated"
            return Finding(p.name, p.role, "unknown", cause, "no step changes it")
        if self.scale == "width" and p.shape == p.wide:
            return Finding(p.name, p.role, "not judged", "", "none of its axes grows")
        return None

    def suspects(self, findings: Sequence[Finding]) -> list[list[Finding]]:
        """Return what may cause the findings, each cause with all of its parameters, the likeliest first."""
        wrong = [f for f in findings if f.is_wrong]
        suspects: list[Finding] = []
        low, rounded = {p.name for p in self.parameters if p.is_low}, "updates lost to rounding"
        for f in wrong:
            if f.name in low and f.verdict == "dies":
                evidence = f"{f.evidence}, its numbers have less than 24 bits"
                suspects.append(replace(f, cause=rounded, evidence=evidence, mends=(Mend("float32"),)))
        if any(f.cause in {*_FORWARD, *_INIT} for f in wrong):
            verdicts = {f.verdict for f in wrong}
            suspects += [f for f in map(self._drawn, self.parameters) if f and f.verdict in verdicts]
        first = [f.cause for f in suspects]
        drawn = {(f.name, f.cause): f.mends for f in suspects}
        wrong = [replace(f, mends=f.mends + drawn.pop((f.name, f.cause), ())) for f in wrong if f.mends]
        suspects = [f for f in suspects if (f.name, f.cause) in drawn] + wrong
        # Shapes do not show the role of matrices with finite outputs: they may read out.
        if not self._readouts:
            unknown = {p.name for p in self.parameters if p.inputs_grow and not p.outputs_grow} - self._inner
            cause = "readout's 1/m missing"
            suspects += [
                replace(f, cause=cause, mends=(Mend("init", {f.name: -1.0}), Mend("step", {f.name: -1.0})))
                for f in wrong
                if f.name in unknown and f.verdict == "grows"
            ]
        causes = dict.fromkeys([*first, *(f.cause for f in suspects)])
        return [[f for f in suspects if f.cause == cause] for cause in causes]

    def _drawn(self, p: GrownParameter) -> Finding | None:
        """Return the finding of a parameter whose σ departs from the rule's power of the width."""
        drawn = self.fits.get((p.name, "init", 1))
        if drawn is None or p.shape == p.wide:
            return None
        is_readout = p in self._readouts and not p.is_tied
        by_root = p.is_hidden or p.name in self._inner
        excess = drawn.value + (0.5 if by_root else 0.0)
        if abs(excess) < 0.2:
            return None
        if is_readout and (excess > 0 or self._gradient(p) > -0.5):
            return None  # without 1/m on logits σ falls rightly
        if is_readout:
            cause = "readout's init not scaled"
        elif excess > 0:
            cause = "init not scaled" if by_root else "init grows with width"
        else:
            cause = "init divided twice" if by_root else "embedding treated as hidden"
            if len(p.shape) < 2:
                cause = "applied twice"
        verdict = "grows" if excess > 0 else "dies"
        evidence = f"σ {self._power(drawn.value)}"
        return Finding(p.name, p.role, verdict, cause, evidence, excess, (_mend("init", p.name, excess),))

    def _at_init(self) -> Finding | None:
        """Return the first tensor of the forward pass at init whose size follows the scale."""
        for i, layer in enumerate(self._layers):
            for quantity in ("input", "activation"):
                fit = self.fits.get((layer, quantity, 0))
                if fit is not None and fit.verdict in ("grows", "dies"):
                    finding = self._departing(i, quantity == "input", fit)
                    if finding is not None:
                        return finding
        return None

    def _departing(self, i: int, is_input: bool, fit: Exponent) -> Finding | None:
        """Return the finding of the i-th layer's input or output at init; None if its size may follow."""
        layer, dies, power = self._layers[i], fit.verdict == "dies", self._power(fit.value)
        p, cause = self._matrices.get(layer), _factor_cause(fit.verdict)
        is_readout = p in self._readouts and not (p and p.is_tied and layer == p.modules[0])
        is_last = is_readout or not layer or (p is not None and not p.outputs_grow)
        inside = [o for o in self._layers if o in self._matrices and o.startswith(f"{layer}.")]
        end = p or (self._matrices[inside[-1]] if inside else None)
        reads_out = is_readout or (end is not None and (end in self._readouts or end.name in self._inner))
        if dies and (is_last or self.scale != "width"):
            return None  # averages over more shrink rightly
        if not is_input and (reads_out or (dies and self._is_restored(i))):
            return None  # a factor, such as 1/m, may follow
        if p and p.shape == p.wide and self.scale == "width":
            return None  # fed by growing layers, it may see what the check does not
        side = "input" if is_input else "output"
        evidence = f"its {side} at init {power}"
        mends: tuple[Mend, ...] = (_mend(side, layer, fit.value),)
        if self.scale != "width":
            cause = self._of_scale
        elif is_input:
            before = self._layers[i - 1] if i else ""
            evidence += f", behind {before or 'the embedding'}"
            if dies and (inner := self._matrices.get(before)) in self._inner_readouts:
                p, cause = inner, "inner matrix treated as readout"
                evidence = f"the input of {layer} behind it at init {power}"
        elif is_last and p is None:
            mends = self._logits_mend(-1.0)
            if any(self._gradient(readout) > -0.5 for readout in self._readouts):
                cause = "readout's 1/m missing"
        elif p and (drawn := self._drawn(p)):
            if drawn.verdict == fit.verdict:
                return replace(drawn, evidence=f"{evidence}, {drawn.evidence}")
        elif p and is_last and self._gradient(p) > -0.5:
            cause = "readout's 1/m missing"
        name, role = (p.name, p.role) if p else (layer, "")
        return Finding(name, role, fit.verdict, cause, evidence, fit.value, mends)

    def _is_restored(self, i: int) -> bool:
        """Return whether what follows an embedding keeps its size, as by a factor of RecurrentGemma."""
        p = self._matrices.get(self._layers[i])
        inputs = (self.fits.get((layer, "input", 0)) for layer in self._layers[i + 1 :])
        fit = next(filter(None, inputs), None)
        is_embedding = p is not None and p.role == "token_embedding"
        return is_embedding and fit is not None and abs(fit.value) < GROWS / 2

    def _power(self, exponent: float) -> str:
        return f"∝ {self.scale}^{exponent:.2f}"

    def _logits_mend(self, power: float) -> tuple[Mend, ...]:
        """Return a factor on the logits: on those of each readout, or on what the module returns."""
        mends: list[Mend] = []
        for p in self._readouts:
            if p.is_tied and len(p.modules) > 1 and p.modules[-1] in self._layers:
                mends.append(Mend("input", {p.modules[-1]: power}))
            elif not p.is_tied:  # a step of SGD has the gradient, and so the factor, once more
                steps = power * (2 if p.optimizer == "sgd" else 1)
                drawn = self.fits.get((p.name, "init", 1))
                # With 1/m on logits σ is constant; torch's own falls as 1/√m.
                falls = min(0.0, drawn.value) if drawn and power < 0 else 0.0
                mends += [Mend("init", {p.name: power - falls}), Mend("step", {p.name: steps})]
        return tuple(mends) or (Mend("output", {"": power}),)

    def _attention(self) -> Finding | None:
        steps = [(layer, step) for layer, quantity, step in self.fits if quantity == "attention"]
        for layer in dict.fromkeys(layer for layer, _ in steps):
            at = min(step for of, step in steps if of == layer)
            logits = self.fits[layer, "attention", at]
            # Logits that are no product of queries and keys may have any size that stays.
            is_product, size = layer in self._head_sizes, self._head_sizes.get(layer, 0.0)
            grown = abs(size) > 0.25
            # Queries and keys are independent at init: logits ∝ √d × scale. Later they align: d × scale.
            expected = -size / 2 if grown and at == 0 else 0.0
            excess = logits.value - expected
            if grown and at and excess * size < 0:
                excess = math.copysign(max(0.0, abs(excess) - abs(size) / 2), excess)
            evidence = f"attention logits {self._power(logits.value)}, μP's {self._power(expected)}"
            if grown:
                evidence += f", head size {self._power(size)}"
            if excess > GROWS and logits.low - expected > 0:
                of_heads = "attention 1/√d" if size > 0 else "attention divided twice"
                cause = of_heads if grown else "attention logits grow"
                return Finding(layer, "attention", "grows", cause, evidence, excess)
            if excess < DIES and self.scale == "width" and is_product:
                return Finding(layer, "attention", "dies", "attention divided twice", evidence, excess)
        return None

    def _gradient(self, p: GrownParameter) -> float:
        fit = self.fits.get((p.name, "gradient", self._step(p)))
        return fit.value if fit else math.nan

    def _step(self, p: GrownParameter) -> int:
        # Behind a matrix that starts at 0, effects are ∝ 1/√width at first and flat some steps later, as
        # that matrix aligns (nanochat's), or flat at first and scattered when the training has gone on.
        steps = [step for step in range(1, self._last + 1) if (p.name, "effect", step) in self.fits]
        if steps[:1] == [1]:
            return 1
        return min(steps, key=lambda step: abs(self.fits[p.name, "effect", step].value), default=self._last)

    @property
    def steps(self) -> int:
        """Number of steps that a quick check needs: two, or all where something starts at 0."""
        late = {name for name, quantity, _ in self.fits if quantity == "effect"}
        return 2 if all((name, "effect", 1) in self.fits for name in late) else self._last

    def _parameter(self, p: GrownParameter, is_explained: bool) -> Finding:
        step = self._step(p)
        effect = self.fits.get((p.name, "effect", step))
        if effect is None:
            return Finding(p.name, p.role, "unknown", "", "its effect is 0 at some sizes")
        rate = self.fits[p.name, "learning rate", step].value
        gradient = self._gradient(p)
        forward, steps = self._split(p, effect.value, gradient)
        once, twice = (effect.shifted(n * forward + steps - effect.value) for n in (1, 2))
        # SGD's step has the gradient once more, which may hide behind a learning rate that lacks × m.
        is_hidden = p.optimizer == "sgd" and once.verdict == "follows" and min(forward, -steps) > GROWS
        effect = twice if is_hidden else once
        evidence = f"effect of updates {self._power(effect.value)}, learning rate {self._power(rate)}"
        verdict, excess = effect.verdict, effect.value
        if self.scale != "width":
            if self.scale != "depth":
                # Gradients of noise shrink as the root of what is averaged, and add up as its root.
                reach = 1.0 if p.optimizer == "sgd" else 0.5
                verdict = effect.shifted(-max(-reach, min(reach, effect.value))).verdict
                verdict = "unknown" if verdict == "dies" else verdict
            cause = "" if verdict in ("follows", "unknown") else "cause not known"
            if verdict == "grows":
                summed = self.scale != "depth" and gradient > 0.5
                cause = "a sum over the batch" if summed else self._of_scale
            return Finding(p.name, p.role, verdict, cause, evidence)
        if verdict in ("grows", "dies"):
            sign = 1 if verdict == "grows" else -1
            if steps * sign > min(GROWS, abs(effect.value) / 2):
                cause, mends = self._step_cause(p, step, rate, steps, sign)
                verdict = verdict if cause else "unknown"
                return Finding(p.name, p.role, verdict, cause, evidence, excess, mends)
            later = self.fits.get((p.name, "effect", self._last), effect)
            # Weights that are independent at init hide a gradient until they have aligned.
            after = (self.fits.get((p.name, "effect", at)) for at in range(2, self._last + 1))
            if sign < 0 and any(fit and fit.verdict == "follows" for fit in after):
                return Finding(p.name, p.role, "follows", "", evidence)
            if sign < 0 and p.name in self._before_narrow and later.value > effect.value + 0.2:
                return Finding(p.name, p.role, "unknown", "", evidence)
            if is_explained:  # a cause in front of it is known; its effect follows from that
                return Finding(p.name, p.role, verdict, "", evidence, excess)
            cause, shared, mends = self._forward_cause(p, forward, sign)
            evidence = f"{evidence}, {shared}" if shared else evidence
            return Finding(p.name, p.role, verdict, cause, evidence, excess, mends)
        decay = self.fits.get((p.name, "decay", step))
        if decay and p.is_hidden and abs(decay.value) > 0.5:
            evidence = f"learning rate × weight decay {self._power(decay.value)}"
            return Finding(p.name, p.role, "not scaled", "decay coupled", evidence)
        return Finding(p.name, p.role, verdict, "", evidence)

    def _split(self, p: GrownParameter, effect: float, gradient: float) -> tuple[float, float]:
        """Return the forward pass's and the optimizer's part of a parameter's exponent."""
        expected = -1.0
        if not p.outputs_grow and p.inputs_grow:
            # Logits with 1/m, or a learning rate with 1/m: both are right.
            rate = self.fits[p.name, "learning rate", self._step(p)].value
            is_inner = p.name in self._inner
            if (rate < -0.5 and (is_inner or gradient > -0.5)) or (is_inner and gradient > -0.75):
                expected = 0.0
        elif not p.outputs_grow:
            expected = 0.0
        forward = gradient - expected
        # SGD's step has the gradient once more.
        steps = effect - forward * (2 if p.optimizer == "sgd" else 1)
        # While a softmax's values and the gradient of its output are independent, as at init, their product
        # is ∝ √width in place of the width: what chooses learns more slowly, rightly. These are queries and
        # keys of heads that grow, and routers.
        sizes = self._head_sizes.items()
        grown = [size for layer, size in sizes if any(m.startswith(f"{layer}.") for m in p.modules)]
        slack = 1.0 if p.name in self._inner or p.role == "router" else max(grown, default=0.0)
        if forward < 0 and slack > 0.25:
            forward = min(0.0, forward + 0.75 * slack)
        return forward, steps

    def _step_cause(
        self, p: GrownParameter, step: int, rate: float, steps: float, sign: int
    ) -> tuple[str, tuple[Mend, ...]]:
        """Return the cause of what an optimizer's steps do to a parameter, and its mend."""
        size = self.fits.get((p.name, "size", step))
        clipping = self.fits.get(("", "clipping", step))
        mends = (_mend("step", p.name, steps),)
        hidden = p.is_hidden or p.name in self._inner
        from_rule = rate + 1 if hidden else rate  # of Adam's learning rate
        if p.optimizer == "adam" and abs(from_rule) > GROWS:
            mends = (_mend("step", p.name, from_rule),)
        if p.optimizer == "adam" and sign < 0 and size and size.value < rate - 0.2:
            return "ε not scaled", (Mend("epsilon"),)
        if p.optimizer == "sgd" and clipping and clipping.value * sign > 0.2:
            return "clipping before scaling", (Mend("step", {p.name: -clipping.value}),)
        if p.optimizer == "adam" and p.role in ("norm", "bias") and abs(from_rule) < GROWS:
            return "", ()  # its rate is the rule's: gradients of several steps differ
        if p.optimizer == "sgd" and sign < 0 and not p.is_hidden and rate > -0.5:
            return "SGD's learning rate not scaled", mends
        if p.optimizer == "muon" and p.is_hidden:
            cause = "Muon's learning rate not scaled"
            return ("Muon's learning rate has Adam's 1/m" if sign < 0 else cause), mends
        if sign > 0:
            is_missing = hidden and rate < 0.5
            return "learning rate not scaled" if is_missing else "learning rate grows with width", mends
        if p.is_tied:
            return "weight tied across roles", mends
        if hidden:
            return "learning rate divided twice", mends
        if p.role == "readout":
            return "readout treated as hidden", mends
        cause = "embedding treated as hidden" if len(p.shape) >= 2 else "norm or bias treated as hidden"
        return cause, mends

    def _forward_cause(
        self, p: GrownParameter, forward: float, sign: int
    ) -> tuple[str, str, tuple[Mend, ...]]:
        """Return the cause of what the forward pass does to a parameter, its readout's first."""
        of_logits = "readout's 1/m missing" if sign > 0 else "readout's 1/m applied twice"
        for readout in [p] if p in self._readouts else self._readouts:
            excess = self._gradient(readout) + 1
            shared = f"as of {readout.name}" if readout is not p else ""
            drawn = self.fits.get((readout.name, "init", 1))
            if readout is p:
                return of_logits, "", self._logits_mend(-_rounded(forward))
            if excess > 0.5 and self.fits[readout.name, "learning rate", 1].value < -0.5:
                # σ and learning rate ∝ 1/m in place of 1/m on logits
                if sign > 0 and drawn and drawn.value > -0.8:
                    mend = Mend("init", {readout.name: -1 - _rounded(drawn.value)})
                    return "readout's init not scaled", shared, (mend,)
            # A factor on logits reaches all parameters alike.
            elif excess * sign > GROWS and self._most_reached(sign) < abs(excess) + 0.4:
                return of_logits, shared, self._logits_mend(-_rounded(excess))
            if drawn and abs(excess + drawn.value - forward) < 0.25 and sign > 0 and drawn.value < -0.3:
                mend = Mend("init", {readout.name: -1 - _rounded(drawn.value)})
                return "readout's init not scaled", shared, (mend,)
        if sign > 0 and p.inputs_grow and not p.outputs_grow:  # of a role that shapes do not show
            return "learning rate not scaled", "", (_mend("step", p.name, forward),)
        mends = self._located_mend(forward) if self._readouts else self._logits_mend(-_rounded(forward))
        return _factor_cause("grows" if sign > 0 else "dies"), "", mends

    def _most_reached(self, sign: int) -> float:
        """Return the largest part of the forward pass in a matrix's exponent."""
        parts = [
            sign * self._split(p, fit.value, self._gradient(p))[0]
            for p in self.parameters
            if len(p.shape) >= 2 and (fit := self.fits.get((p.name, "effect", self._step(p))))
        ]
        return max(parts, default=0.0)

    def _located_mend(self, forward: float) -> tuple[Mend, ...]:
        """Return a factor behind the last matrix that a factor of the forward pass reaches in full.

        What is behind the factor, or around it, is reached less.
        """
        reached = {}
        for layer in self._layers:
            if (p := self._matrices.get(layer)) and (fit := self.fits.get((p.name, "effect", self._step(p)))):
                reached[layer] = abs(self._split(p, fit.value, self._gradient(p))[0] - forward) < 0.3
        if all(reached.values()) or not any(reached.values()):
            return ()
        return (_mend("output", [layer for layer, is_full in reached.items() if is_full][-1], forward),)


def tried(
    findings: Sequence[Finding],
    suspects: Sequence[Sequence[Finding]],
    measured: Callable[[Sequence[Mend]], Sequence[Finding] | None],
) -> list[Finding]:
    """Try each suspected cause by its mend, and order findings by what is left with it.

    `measured` returns the findings of a quick check with mends, or None where they cannot be applied. A cause
    whose mend makes all flat is the only one. Several that together do keep their order; else the one that
    leaves the least is first.
    """
    base = _wrongness(findings)
    flat = max(0.15 * base, 0.2)  # in a quick check, one exponent may scatter a little beyond its limit
    left: dict[int, float] = {}
    for i, of_cause in enumerate(suspects[:_MOST_TRIED]):
        result = measured(_joined(of_cause))
        if result is None:
            continue
        left[i] = _wrongness(result)
        if left[i] < min(flat, 0.9 * base):
            return _caused(findings, [of_cause], "with this mended, all is flat")
    best = [suspects[i] for i in sorted(left, key=left.__getitem__) if left[i] < 0.9 * base]
    if len(best) > 1:
        result = measured([mend for of_cause in best for mend in _joined(of_cause)])
        if result is not None and _wrongness(result) < flat:
            together = [of_cause for of_cause in suspects if of_cause in best]
            return _caused(findings, together, "with these mended, all is flat")
    order = [of_cause[0].cause for of_cause in best]
    rank = {cause: i for i, cause in enumerate(order)}
    wrong = sorted((f for f in findings if f.is_wrong), key=lambda f: rank.get(f.cause, len(rank)))
    missing = [f for of_cause in best[:1] for f in of_cause if f.cause not in {w.cause for w in wrong}]
    return [*missing, *wrong, *(f for f in findings if not f.is_wrong)]


_MOST_TRIED = 5


def _joined(findings: Sequence[Finding]) -> list[Mend]:
    return list({repr(mend): mend for f in findings for mend in f.mends}.values())


def _wrongness(findings: Sequence[Finding]) -> float:
    return sum(max(0.0, abs(f.excess) - GROWS / 2) for f in findings if f.is_wrong)


def _caused(findings: Sequence[Finding], causes: Sequence[Sequence[Finding]], outcome: str) -> list[Finding]:
    """Return findings with these causes alone; the others follow from them."""
    named = [replace(f, evidence=f"{f.evidence}; {outcome}") for of_cause in causes for f in of_cause]
    names = {f.name for f in named}
    rest = [f if f.cause in _EXACT else replace(f, cause="") for f in findings if f.name not in names]
    return [*named, *rest]


def _mend(kind: str, name: str, excess: float) -> Mend:
    return Mend(kind, {name: -_rounded(excess)})


def _rounded(power: float) -> float:
    # Factors of the width are powers of its root.
    return round(2 * power) / 2 or math.copysign(0.5, power)


def _factor_cause(verdict: str) -> str:
    return "applied twice" if verdict == "dies" else "forward factor grows with width"


def pooled_name(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def pooled(table: pd.DataFrame) -> pd.DataFrame:
    """Join the rows of all blocks, for scales that change their number: effects add, sizes are averaged."""
    keys = [c for c in table if c not in ("rms", "layer")]
    groups = table.assign(layer=table["layer"].map(pooled_name)).groupby([*keys, "layer"], sort=False)["rms"]
    joined = pd.concat([groups.mean().rename("mean"), groups.sum().rename("sum")], axis=1).reset_index()
    rms = joined["mean"].where(joined["quantity"] != "effect", joined["sum"])
    return joined.assign(rms=rms).drop(columns=["mean", "sum"])
