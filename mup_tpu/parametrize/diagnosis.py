"""Diagnosis of a module by measured exponents: a verdict a parameter, its cause and its remedy.

A parameter follows the rule if the effect of its updates on the loss keeps its size, whatever its factors.
If not, the gradient's exponent shows what the forward pass contributes, and the rest is the optimizer's:

    effect of a parameter = gradient's excess (twice for SGD) + excess of the optimizer's step

In μP the gradient of a parameter whose outputs grow is ∝ 1/width, and so is a readout's, by its 1/m.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

# Exponents. A missing factor of μP makes ±1/2 or ±1; right models lie within -0.31 and 0.2 in three octaves.
GROWS, DIES = 0.25, -0.36


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
    "decay coupled": "multiply weight decay by m where the learning rate has 1/m, so that steps decay alike",
    "optimizer's groups made before parametrize": "make the optimizer from this module's parameters, last",
    "not trained": "its gradient is 0 at every width: frozen, unused, or a bias of keys, without effect",
    "residual branch not scaled by depth": "multiply residual branches by base depth / depth (CompleteP)",
    "a sum over the batch": "average the loss over sequences and tokens",
    "diverges": "check with a smaller learning rate",
}


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

    @property
    def is_hidden(self) -> bool:
        return self.inputs_grow and self.outputs_grow


@dataclass(frozen=True)
class Finding:
    """Verdict about one parameter or layer, with its cause in the field's words."""

    name: str
    role: str
    verdict: str  # "follows", "grows", "dies", "not scaled" or "unknown"
    cause: str = ""
    evidence: str = ""  # Measured exponents on which the cause rests

    @property
    def remedy(self) -> str:
        return _REMEDIES.get(self.cause, "")

    def __str__(self) -> str:
        role = f" ({self.role.replace('_', ' ')})" if self.role else ""
        text = f"{self.name or 'the output'}{role} {self.verdict}: {self.cause or 'as the rule has it'}"
        return (
            text
            + (f" ({self.evidence})" if self.evidence else "")
            + (f"; {self.remedy}" if self.remedy else "")
        )


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
    # Two standard errors; with few points the threshold on the value is what decides.
    reach = 2.0 * np.sqrt((weights * rest**2).sum(1) / max(1, len(x) - 2) / spread)
    ends = zip(slopes.tolist(), (slopes - reach).tolist(), (slopes + reach).tolist(), strict=True)
    return {key: Exponent(*fit) for key, fit in zip(wide.index[usable], ends, strict=True)}


class Diagnosis:
    """Findings about the modules of one rule, from their measurements."""

    def __init__(
        self, table: pd.DataFrame, parameters: Sequence[GrownParameter], scale: str = "width"
    ) -> None:
        self.fits = exponents(table, scale)
        self.parameters = parameters
        self.scale = scale
        self._of_scale = "residual branch not scaled by depth" if scale == "depth" else "cause not known"
        self._table = table
        self._last = int(table["step"].max())
        # In the order of the forward pass
        self._layers = list(dict.fromkeys(table[table["quantity"] == "order"].sort_values("rms")["layer"]))
        self._head_sizes = {
            layer: fit.value for (layer, q, step), fit in self.fits.items() if (q, step) == ("head size", 0)
        }
        self._matrices = {module: p for p in parameters if len(p.shape) >= 2 for module in p.modules}
        called = [self._matrices[layer] for layer in self._layers if layer in self._matrices]
        grown = [i for i, p in enumerate(called) if p.outputs_grow and not p.is_tied]
        # With finite outputs in front of growing ones it is no readout: keys of few heads, a router, an MLP
        # whose inner size stays.
        self._inner = {p.name for p in called[: grown[-1]] if not p.outputs_grow} if grown else set()
        self._readouts = [
            p for p in parameters if (p.is_tied or p.role == "readout") and p.name not in self._inner
        ]

    def findings(self) -> list[Finding]:
        """Return a finding a parameter, and those about layers first; the main cause comes first of all."""
        diverged = self._table[~np.isfinite(self._table["rms"])]
        if len(diverged):
            size = diverged[self.scale].min()
            return [Finding(diverged.iloc[0]["layer"], "", "grows", "diverges", f"at {self.scale} {size}")]
        structural = []
        for p in self.parameters:
            rows = self._table[self._table["layer"] == p.name]
            sizes = {quantity: of["rms"] for quantity, of in rows.groupby("quantity")}
            if "learning rate" not in sizes:
                cause = "optimizer's groups made before parametrize"
                structural.append(Finding(p.name, p.role, "not scaled", cause, "no optimizer has it"))
            elif not sizes["effect"].any():
                cause = "" if sizes["gradient"].any() else "not trained"
                structural.append(Finding(p.name, p.role, "unknown", cause))
        forward = [f for f in (self._at_init(), self._attention()) if f]
        known = {f.name for f in structural}
        each = [self._parameter(p, bool(forward)) for p in self.parameters if p.name not in known]
        wrong = [f for f in each if f.cause]
        # What the optimizer's settings show is exact; what the forward pass does may follow from others.
        wrong.sort(key=lambda f: (f.cause in _FORWARD, not f.cause.startswith("readout's")))
        if not structural and not forward and not wrong:
            readouts = {module for p in self._readouts for module in p.modules}
            for layer, quantity in itertools.product(self._layers, ("activation", "update")):
                fit = self.fits.get((layer, quantity, self._last))
                if layer not in readouts and fit and fit.value > GROWS and fit.low > 0.1:
                    evidence = f"its {quantity} after {self._last} steps ∝ {self.scale}^{fit.value:.2f}"
                    forward = forward or [Finding(layer, "", "grows", "cause not known", evidence)]
        first = [f for f in structural if f.verdict == "not scaled"]
        rest = [f for f in structural if f.verdict == "unknown"]
        return [*first, *forward, *wrong, *rest, *(f for f in each if not f.cause)]

    def _at_init(self) -> Finding | None:
        """Return the first tensor of the forward pass at init whose size follows the scale."""
        before = ""
        for layer in self._layers:
            p = self._matrices.get(layer)
            is_readout = p in self._readouts and not (p and p.is_tied and layer == p.modules[0])
            is_last = is_readout or not layer or (p is not None and not p.outputs_grow)
            entering, leaving = (self.fits.get((layer, q, 0)) for q in ("input", "activation"))
            for fit, is_input in ((entering, True), (leaving, False)):
                if fit is None or fit.verdict not in ("grows", "dies") or (is_last and fit.verdict == "dies"):
                    continue
                if self.scale != "width" and fit.verdict == "dies":  # averages over more shrink rightly
                    continue
                if is_readout and not is_input:  # its 1/m may come behind it: the output counts
                    continue
                evidence = (
                    f"{'its input' if is_input else 'its output'} at init ∝ {self.scale}^{fit.value:.2f}"
                )
                if self.scale != "width":
                    cause = self._of_scale
                elif is_input:
                    evidence += f", behind {before or 'the embedding'}"
                    cause = _factor_cause(fit.verdict)
                elif is_last and layer not in self._matrices:
                    unscaled = any(self._gradient(readout) > -0.5 for readout in self._readouts)
                    cause = "readout's 1/m missing" if unscaled else "forward factor grows with width"
                else:
                    cause = self._init_cause(p, fit, is_last)
                return Finding(p.name if p else layer, p.role if p else "", fit.verdict, cause, evidence)
            before = layer
        return None

    def _init_cause(self, p: GrownParameter | None, fit: Exponent, is_last: bool) -> str:
        drawn = self.fits.get((p.name, "init", 1)) if p else None
        if p is None or drawn is None:
            return _factor_cause(fit.verdict)
        excess = drawn.value + (0.5 if p.inputs_grow else 0.0)
        if is_last and p.name not in self._inner:
            return "readout's 1/m missing" if self._gradient(p) > -0.5 else "forward factor grows with width"
        if abs(excess) < 0.2 or (excess > 0) != (fit.value > 0):
            return _factor_cause(fit.verdict)
        if not p.inputs_grow and excess > 0:
            return "init grows with width"
        if not p.inputs_grow:
            return "weight tied across roles" if p.is_tied else "embedding treated as hidden"
        return "init not scaled" if excess > 0 else "init divided twice"

    def _attention(self) -> Finding | None:
        for (layer, quantity, step), size in self.fits.items():
            if quantity != "head size" or step:
                continue
            grown = abs(size.value) > 0.25
            at = next((s for s in range(self._last + 1) if (layer, "attention", s) in self.fits), None)
            if at is None:
                continue
            logits = self.fits[layer, "attention", at]
            # Queries and keys are independent at init: logits ∝ √d × scale. Later they align: d × scale.
            expected = -size.value / 2 if grown and at == 0 else 0.0
            excess = logits.value - expected
            if grown and at and excess * size.value < 0:
                excess = math.copysign(max(0.0, abs(excess) - abs(size.value) / 2), excess)
            evidence = (
                f"attention logits ∝ {self.scale}^{logits.value:.2f}, μP's ∝ {self.scale}^{expected:.2f}"
            )
            if grown:
                evidence += f", head size ∝ {self.scale}^{size.value:.2f}"
            if excess > GROWS and logits.low - expected > 0:
                cause = "attention 1/√d" if size.value > 0 else "attention divided twice"
                cause = cause if grown else "attention logits grow"
                return Finding(layer, "attention", "grows", cause, evidence)
            if excess < DIES and self.scale == "width":
                return Finding(layer, "attention", "dies", "attention divided twice", evidence)
        return None

    def _gradient(self, p: GrownParameter) -> float:
        step = self._step(p)
        fit = self.fits.get((p.name, "gradient", step))
        return fit.value if fit else math.nan

    def _step(self, p: GrownParameter) -> int:
        # The first with an effect at every size: behind zeros at init it is a later one
        steps = (s for s in range(1, self._last + 1) if (p.name, "effect", s) in self.fits)
        return next(steps, self._last)

    def _parameter(self, p: GrownParameter, is_explained: bool) -> Finding:
        step = self._step(p)
        effect = self.fits.get((p.name, "effect", step))
        if effect is None or (not p.inputs_grow and not p.outputs_grow and self.scale == "width"):
            return Finding(p.name, p.role, "follows" if effect else "unknown")
        rate = self.fits[p.name, "learning rate", step].value
        gradient = self._gradient(p)
        forward, steps = self._split(p, effect.value, gradient)
        once, twice = (effect.shifted(n * forward + steps - effect.value) for n in (1, 2))
        # SGD's step has the gradient once more, which may hide behind a learning rate that lacks × m.
        is_hidden = p.optimizer == "sgd" and once.verdict == "follows" and min(forward, -steps) > GROWS
        effect = twice if is_hidden else once
        evidence = (
            f"effect of updates ∝ {self.scale}^{effect.value:.2f}, learning rate ∝ {self.scale}^{rate:.2f}"
        )
        verdict = effect.verdict
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
                return Finding(p.name, p.role, verdict, self._step_cause(p, step, rate, sign), evidence)
            if is_explained:  # a cause in front of it is known; its effect follows from that
                return Finding(p.name, p.role, verdict, "", evidence)
            cause, shared = self._forward_cause(p, forward, sign)
            return Finding(p.name, p.role, verdict, cause, f"{evidence}, {shared}" if shared else evidence)
        decay = self.fits.get((p.name, "decay", step))
        if decay and p.is_hidden and abs(decay.value) > 0.5:
            evidence = f"learning rate × weight decay ∝ width^{decay.value:.2f}"
            return Finding(p.name, p.role, "not scaled", "decay coupled", evidence)
        return Finding(p.name, p.role, verdict, "", evidence)

    def _split(self, p: GrownParameter, effect: float, gradient: float) -> tuple[float, float]:
        """Return the forward pass's and the optimizer's part of a parameter's exponent."""
        expected = -1.0
        if not p.outputs_grow and p.inputs_grow:
            # Logits with 1/m, or a learning rate with 1/m: both are right.
            rate = self.fits[p.name, "learning rate", self._step(p)].value
            expected = 0.0 if p.name in self._inner or (rate < -0.5 and gradient > -0.5) else -1.0
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

    def _step_cause(self, p: GrownParameter, step: int, rate: float, sign: int) -> str:
        size = self.fits.get((p.name, "size", step))
        clipping = self.fits.get(("", "clipping", step))
        if p.optimizer == "adam" and sign < 0 and size and size.value < rate - 0.2:
            return "ε not scaled"
        if p.optimizer == "sgd" and clipping and clipping.value * sign > 0.2:
            return "clipping before scaling"
        if p.optimizer == "sgd" and sign < 0 and not p.is_hidden and rate > -0.5:
            return "SGD's learning rate not scaled"
        if p.optimizer == "muon" and p.is_hidden and sign < 0:
            return "Muon's learning rate has Adam's 1/m"
        hidden = p.is_hidden or p.name in self._inner
        if sign > 0:
            return "learning rate not scaled" if hidden and rate < 0.5 else "learning rate grows with width"
        if p.is_tied:
            return "weight tied across roles"
        if hidden:
            return "learning rate divided twice"
        if p.role == "readout":
            return "readout treated as hidden"
        return "embedding treated as hidden" if len(p.shape) >= 2 else "norm or bias treated as hidden"

    def _forward_cause(self, p: GrownParameter, forward: float, sign: int) -> tuple[str, str]:
        """Return the cause of what the forward pass does to a parameter, its readout's first."""
        of_logits = "readout's 1/m missing" if sign > 0 else "readout's 1/m applied twice"
        if p in self._readouts:
            return of_logits, ""
        for readout in self._readouts:
            excess = self._gradient(readout) + 1
            drawn = self.fits.get((readout.name, "init", 1))
            if excess > 0.5 and self.fits[readout.name, "learning rate", 1].value < -0.5:
                # σ and learning rate ∝ 1/m in place of 1/m on logits
                if sign > 0 and drawn and drawn.value > -0.8:
                    return "readout's init not scaled", f"as of {readout.name}"
            elif excess * sign > GROWS:
                return of_logits, f"as of {readout.name}"
            if drawn and abs(excess + drawn.value - forward) < 0.25 and sign > 0 and drawn.value < -0.3:
                return "readout's init not scaled", f"as of {readout.name}"
        return _factor_cause("grows" if sign > 0 else "dies"), ""


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
