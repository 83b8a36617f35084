"""Tables with a row a step: the last row of a run is its result, the others are its history."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import HISTORY, RUN, power
from mup_tpu.errors import TableError


def at_logged_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of steps at which some run has a loss; at others an empty held-out loss is no divergence."""
    is_logged = rows["loss"].notna().groupby(rows["step"]).transform("any")
    return rows[is_logged.fillna(True).astype(bool)] if is_logged.any() else rows


def last_steps(runs: pd.DataFrame, column: str, notes: list[Reason]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The last row of each run, and the history of these runs.

    Finished runs that end at another step than most are left out, with a note.

    Raises:
        TableError: most runs end at no single step.
    """
    last = runs.sort_values("step").groupby(RUN, as_index=False).tail(1).sort_index()
    is_finite = np.isfinite(last["loss"])
    ends = last.loc[is_finite, "step"].value_counts()
    if len(ends) > 1:
        if 2 * ends.iloc[0] <= ends.sum():
            raise TableError(
                f"runs end at different steps (column {column!r}: {ends.index.min():g} to "
                f"{ends.index.max():g}), and most at no single one; compare runs of one length"
            )
        is_cut = is_finite & (last["step"] != ends.index[0])
        cut = [
            f"{run.compared + ' ' if run.compared != 'all' else ''}{run.scale:g} at {power(run.x)} "
            f"(step {run.step:g})"
            for run in last[is_cut].itertuples()
        ]
        notes.append(Reason.of("other last step", step=float(ends.index[0]), runs=cut))
        last = last[~is_cut]
    is_whole = pd.MultiIndex.from_frame(runs[RUN]).isin(pd.MultiIndex.from_frame(last[RUN]))
    history = runs.loc[is_whole & np.isfinite(runs["x"]), HISTORY]
    return last, history.sort_values(HISTORY[:-1], ignore_index=True)
