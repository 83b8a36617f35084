"""Slopes of the coordinate check: how each layer's activations and updates grow with width.

Yang et al. 2022 (Tensor Programs V), appendix D.1: in μP no slope is much above 0.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from mup_tpu.errors import TableError

COLUMNS = ("parametrization", "width", "seed", "step", "layer", "quantity", "rms")


def setting_name(optimizer: str, tied: bool) -> str:
    """What the measurements of an optimizer and a tying go by, such as "adamw_tied"."""
    return f"{optimizer}_{'tied' if tied else 'untied'}"


def by_setting(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The measurements of each optimizer and tying, by name."""
    if not {"optimizer", "tied"} <= set(table):
        return {"coord_check": table}
    names = [setting_name(*key) for key in zip(table["optimizer"], table["tied"], strict=True)]
    return {str(name): part for name, part in table.groupby(names)}


def slopes(table: pd.DataFrame, step: int | None = None) -> pd.DataFrame:
    """Exponent of rms in width, layer by layer, at one step.

    Args:
        table: tidy measurements, as `mup_tpu.training.coord_check.measure` returns.
        step: updates made; the last by default.

    Returns:
        One row a (parametrization, quantity, layer): slope with its 95 % interval, from log2 rms against log2
        width over all seeds; a layer that is 0 everywhere has slope nan.

    Raises:
        TableError: a column is missing, or there are fewer than two widths.
    """
    missing = [column for column in COLUMNS if column not in table]
    if missing:
        raise TableError(f"coordinate-check table has no column {', '.join(map(repr, missing))}")
    if table["width"].nunique() < 2:
        raise TableError(
            f"coordinate check needs at least 2 widths, the table has {table['width'].nunique()}"
        )
    at = table[table["step"] == (table["step"].max() if step is None else step)]
    layers = {layer: i for i, layer in enumerate(dict.fromkeys(table["layer"]))}
    rows = []
    for (parametrization, quantity, layer), group in at.groupby(["parametrization", "quantity", "layer"]):
        usable = group[np.isfinite(group["rms"]) & (group["rms"] > 0)]
        fit = {"slope": np.nan, "low": np.nan, "high": np.nan}
        if usable["width"].nunique() >= 2 and len(usable) > 2:
            line = stats.linregress(np.log2(usable["width"]), np.log2(usable["rms"]))
            reach = stats.t.ppf(0.975, len(usable) - 2) * line.stderr
            fit = {"slope": line.slope, "low": line.slope - reach, "high": line.slope + reach}
        rows.append({"parametrization": parametrization, "quantity": quantity, "layer": layer, **fit})
    table = pd.DataFrame(rows)
    order = table["layer"].map(layers)
    return (
        table.assign(order=order)
        .sort_values(["parametrization", "quantity", "order"], ignore_index=True)
        .drop(columns="order")
    )
