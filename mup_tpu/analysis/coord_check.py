"""Stored tables of coordinate checks: their settings, their scale, and the exponents of layers' sizes."""

from __future__ import annotations

import pandas as pd

from mup_tpu.analysis.diagnosis import Exponent, exponents
from mup_tpu.config.columns import label
from mup_tpu.errors import TableError

COLUMNS = ("parametrization", "seed", "step", "layer", "quantity", "rms")


def by_setting(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    if "setting" not in table:
        return {"coord_check": table}
    return {str(name): part for name, part in table.groupby("setting", sort=False)}


def scale_of(table: pd.DataFrame) -> str:
    """Return the column that holds the scale, which is the only one besides results and settings."""
    others = [str(column) for column in table if column not in (*COLUMNS, "setting")]
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
    if missing := [column for column in COLUMNS if column not in table]:
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
