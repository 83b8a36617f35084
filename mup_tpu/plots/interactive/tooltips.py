"""Tooltips of points: heading, losses, and the runs behind them, as HTML."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.words.names import powers_in_html

_RUNS = 6
"""Most runs that a tooltip names one by one."""


def about(*lines: str) -> str:
    """HTML of a tooltip; its first line is a heading."""
    head, *rest = (powers_in_html(line) for line in lines if line)
    return "<br>".join([f"<b>{head}</b>", *rest])


def loss_text(loss: float, error: float | None = None) -> str:
    """A loss with its standard error, to the six digits that float32 carries."""
    return f"loss {loss:.6g}" + ("" if error is None else f" ± {error:.2g}")


def run_lines(runs: pd.DataFrame) -> list[str]:
    """A line a run: seed, loss, and trial where known."""
    lines = []
    for run in runs.sort_values("seed").head(_RUNS).to_dict("records"):
        loss = "stopped early" if run.get("stopped") else "diverged"
        if np.isfinite(run["loss"]):
            loss = loss_text(run["loss"])
        lines.append(", ".join([f"seed {_name(run['seed'])}: {loss}", *_trial(run)]))
    if len(runs) > _RUNS:
        lines.append(f"and {len(runs) - _RUNS} more")
    return lines


def run_names(runs: pd.DataFrame) -> str:
    """Runs of a mean, in one line."""
    named = runs.sort_values("seed").head(_RUNS).to_dict("records")
    more = ", …" if len(runs) > _RUNS else ""
    runs_of = "; ".join(", ".join([f"seed {_name(run['seed'])}", *_trial(run)]) for run in named)
    return runs_of + more


def _name(seed: Any) -> str:
    return seed if isinstance(seed, str) else f"{seed:g}"


def _trial(run: dict[Any, Any]) -> list[str]:
    """Name of a run's trial, where known."""
    return [f"trial {run['trial_id']}"] if pd.notna(run.get("trial_id")) and run["trial_id"] != "" else []
