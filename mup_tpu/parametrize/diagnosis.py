"""A coordinate check in words: the first layer that grows, and the factor that it likely lacks.

A layer that grows makes all layers behind it grow, so only the first one is named. Its factors are compared
with μP's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.coord_check import GROWS, grows, slopes
from mup_tpu.parametrize.module import ModuleParametrization


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


def sentences(
    table: pd.DataFrame, scaled: Mapping[str, ModuleParametrization], mup: ModuleParametrization
) -> tuple[list[str], dict[str, Growing]]:
    """Conclusions of a coordinate check, a sentence or two a rule, and the layer that grows under a rule.

    Factors are those at the largest width.
    """
    last, widest, found = int(table["step"].max()), int(table["width"].max()), list[str]()
    growing = dict[str, Growing]()
    for rule, own in scaled.items():
        part = table[table["parametrization"] == rule]
        if not np.isfinite(part["rms"]).all():
            width = int(part[~np.isfinite(part["rms"])]["width"].min())
            lost = part[~np.isfinite(part["rms"])].iloc[0]
            growing[rule] = Growing(lost["layer"], lost["quantity"], int(lost["step"]), math.inf, math.inf)
            found.append(f"{rule}: width {width} diverges within {last} steps; check with a smaller lr")
            continue
        at_init, after = _exponents(part, 0), _exponents(part, last)
        if first := next((row for row in at_init if grows(row)), None):
            step, when, lacks = 0, "at init", _lacking(first["layer"], own, mup, ("init", "logits"))
        elif first := next((row for row in after if grows(row)), None):
            step, when = last, f"after {last} steps"
            lacks = _lacking(first["layer"], own, mup)
        else:
            found.append(f"{rule}: {_flat(after)}")
            found += [f"{rule}: {said}" for row in after if (said := _shrinks(row, own, mup, widest))][:1]
            continue
        why = f"{lacks} at width {widest}" if lacks else _elsewhere(part, own, mup, widest)
        found.append(f"{rule}: the first layer that grows is {_named(first, own)} {when}: {why}")
        growing[rule] = Growing(first["layer"], first["quantity"], step, first["slope"], first["low"])
    return found, growing


def _exponents(table: pd.DataFrame, step: int) -> list[dict[Any, Any]]:
    """Exponents at one step, layers in the order of the forward pass."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(table["layer"]))}
    rows: list[dict[Any, Any]] = slopes(table, step).dropna(subset="slope").to_dict("records")
    return sorted(rows, key=lambda row: order[row["layer"]])


def _flat(rows: list[dict[Any, Any]]) -> str:
    top = max(rows, key=lambda row: row["slope"])
    return (
        f"no layer grows with width (most of all the {top['quantity']} of {top['layer']}, ∝ "
        f"width^{top['slope']:.2f}); if a wide model diverges all the same, the width is not the reason: "
        "look at the base's learning rate and warm-up, at depth, at attention logits and Adam's ε, which a "
        "few steps do not show"
    )


def _elsewhere(
    table: pd.DataFrame, own: ModuleParametrization, mup: ModuleParametrization, widest: int
) -> str:
    """Reason why a layer with μP's factors grows: another layer, or the forward pass."""
    for layer in dict.fromkeys(table["layer"]):
        if lacks := _lacking(layer, own, mup):
            return f"its own factors are μP's, but {layer} has others: {lacks} at width {widest}"
    return (
        "all factors are μP's, so look at its forward pass (a sum over the width in place of a mean, "
        "attention by 1/√d with a growing head size) and at weights that init_ did not see"
    )


def _shrinks(
    row: Mapping[Any, Any], own: ModuleParametrization, mup: ModuleParametrization, widest: int
) -> str | None:
    """Sentence about a layer that learns less at larger widths, as its learning rate is below μP's."""
    if row["quantity"] != "update" or row["slope"] > -GROWS or row["high"] > 0:
        return None
    lacks = _lacking(row["layer"], own, mup, ("learning rate",), too_small=True)
    return lacks and f"{_named(row, own)}, so that it stops learning: {lacks} at width {widest}"


def _named(row: Mapping[Any, Any], own: ModuleParametrization) -> str:
    parameter = own.matrix_of(row["layer"])
    role = f" ({own.parameters[parameter].role.replace('_', ' ')})" if parameter else ""
    return f"{row['layer']}{role}, {row['quantity']} ∝ width^{row['slope']:.2f}"


def _lacking(
    layer: str,
    own: ModuleParametrization,
    mup: ModuleParametrization,
    kinds: tuple[str, ...] = ("logits", "learning rate", "init"),
    too_small: bool = False,
) -> str | None:
    """First factor of a layer that is larger than μP's (or smaller), with both values."""
    parameter = own.matrix_of(layer)
    logits, mup_logits = (
        {f.module: f.factor for f in of.forward if f.place == "input"}.get(layer, 1.0) for of in (own, mup)
    )
    factors = {"logits": (logits, mup_logits)}
    if parameter:
        scaling, mup_scaling = (of.scalings[parameter] for of in (own, mup))
        drawn, mup_drawn = (of.init_ratios()[parameter] for of in (own, mup))
        factors["init"] = (mup_scaling.init * drawn / mup_drawn, mup_scaling.init)
        factors["learning rate"] = (scaling.learning_rate, mup_scaling.learning_rate)
    for kind in kinds:
        ours, theirs = factors.get(kind, (1.0, 1.0))
        if not math.isclose(ours, theirs, rel_tol=1e-3) and (ours < theirs) == too_small:
            said = {"logits": "outputs are", "init": "init σ is", "learning rate": "learning rate is"}[kind]
            return f"its {said} × {ours:.3g}, where μP has × {theirs:.3g}"
    return None
