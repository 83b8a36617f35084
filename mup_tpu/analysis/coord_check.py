"""Slopes of the coordinate check: growth of each layer's activations and updates along a scale.

Yang et al. 2022 (Tensor Programs V), appendix D.1: in μP no slope in width is much above 0. Dey et al. 2025
(arXiv:2505.01618, section 6): along the depth, no block may come closer to its linearization either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from mup_tpu.config.columns import label
from mup_tpu.errors import TableError

COLUMNS = ("parametrization", "seed", "step", "layer", "quantity", "rms")

SIZES = ("activation", "update")  # quantities that are sizes; none may grow with the scale
LINEARIZATION = "linearization"  # quantity of the distance of blocks from their linearization

GROWS = 0.2  # exponent from which a layer grows: one that lacks a factor of μP has about 1/2 or 1

# Exponent of depth below which blocks turn lazy: half the −1/2 that branches scaled by 1/√depth have (Dey
# et al., figure 6)
LAZY = -0.25


def by_setting(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    if not {"optimizer", "tied"} <= set(table):
        return {"coord_check": table}
    settings = zip(table["optimizer"], table["tied"], strict=True)
    names = [f"{optimizer}_{'tied' if tied else 'untied'}" for optimizer, tied in settings]
    return {str(name): part for name, part in table.groupby(names)}


def scale_of(table: pd.DataFrame) -> str:
    """Return the column that holds the scale, which is the only one besides results and settings."""
    others = [str(c) for c in table if c not in (*COLUMNS, "setting", "optimizer", "tied")]
    if "width" in others or not others:
        others = ["width"]
    if len(others) > 1:
        raise TableError(f"coordinate-check table has several scales: {', '.join(map(repr, others))}")
    return others[0]


def slopes(table: pd.DataFrame, step: int | None = None) -> pd.DataFrame:
    """Fit the exponent of rms in the scale, layer by layer, at one step (the last by default), over all
    seeds.

    Returns a row a (parametrization, quantity, layer): slope with its 95 % interval, from log2 rms against
    log2 scale; a layer that is 0 everywhere has slope nan.

    Raises:
        TableError: a column is missing, or there are fewer than two points of the scale.
    """
    scale = scale_of(table)
    missing = [column for column in (COLUMNS[0], scale, *COLUMNS[1:]) if column not in table]
    if missing:
        raise TableError(f"coordinate-check table has no column {', '.join(map(repr, missing))}")
    if table[scale].nunique() < 2:
        raise TableError(
            f"coordinate check needs at least 2 {label(scale)}s, the table has {table[scale].nunique()}"
        )
    at = table[table["step"] == (table["step"].max() if step is None else step)]
    layers = {layer: i for i, layer in enumerate(dict.fromkeys(table["layer"]))}
    rows = []
    for (parametrization, quantity, layer), group in at.groupby(["parametrization", "quantity", "layer"]):
        usable = group[np.isfinite(group["rms"]) & (group["rms"] > 0)]
        fit = {"slope": np.nan, "low": np.nan, "high": np.nan}
        if usable[scale].nunique() >= 2 and len(usable) > 2:
            (slope, _), covariance = np.polyfit(np.log2(usable[scale]), np.log2(usable["rms"]), 1, cov=True)
            error = np.sqrt(covariance[0, 0])
            reach = stdtrit(len(usable) - 2, 0.975) * error
            fit = {"slope": slope, "low": slope - reach, "high": slope + reach}
        rows.append({"parametrization": parametrization, "quantity": quantity, "layer": layer, **fit})
    rows.sort(key=lambda fit: (fit["parametrization"], fit["quantity"], layers[fit["layer"]]))
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Slope:
    """Exponent of a layer's size in the scale, with its 95 % interval."""

    quantity: str
    layer: str
    value: float
    low: float
    high: float

    @property
    def grows(self) -> bool:
        return self.value > GROWS and self.low > 0

    @property
    def is_lazy(self) -> bool | None:
        # None where the interval leaves it open
        return True if self.high < LAZY else None if self.low < LAZY else False


@dataclass(frozen=True)
class Conclusion:
    """Result of a coordinate check of one parametrization after the last step."""

    parametrization: str
    fastest: Slope | None  # Fastest growing activation or update
    passes: bool  # Whether no activation and no update grows
    linearization: tuple[Slope, ...]  # Distance of each kind of block from its linearization, along the depth


def conclusions(table: pd.DataFrame) -> list[Conclusion]:
    """Return which parametrizations pass by the slopes after the last step, in the table's order."""
    fits = slopes(table).dropna(subset="slope")
    results = []
    for parametrization in dict.fromkeys(fits["parametrization"]):
        part = fits[fits["parametrization"] == parametrization]
        columns = ("quantity", "layer", "slope", "low", "high")
        of_rule = [Slope(*row) for row in part[[*columns]].itertuples(index=False)]
        sizes = [slope for slope in of_rule if slope.quantity in SIZES]
        fastest = max(sizes, key=lambda slope: slope.value, default=None)
        lazy = tuple(slope for slope in of_rule if slope.quantity == LINEARIZATION)
        results.append(Conclusion(parametrization, fastest, not any(s.grows for s in sizes), lazy))
    return results
