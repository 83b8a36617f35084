"""Tables of results, for reports and the terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from mup_tpu.analysis.coord_check import slopes
from mup_tpu.analysis.drift import exponent
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.ranking import of_status, ranked, varied
from mup_tpu.analysis.regret import AT_LEAST, Regret
from mup_tpu.analysis.transfer import TransferResult
from mup_tpu.config.columns import label, write, write_scale
from mup_tpu.config.table import Table
from mup_tpu.plots import markup
from mup_tpu.plots import name as name_of
from mup_tpu.plots.coord_check import CHECKED
from mup_tpu.report.words import number, power

_BEST = 10
"""Number of trials in the table of a search."""


def optima_table(result: TransferResult, scale: str, title: str) -> Table:
    """Optimum of each scale with its interval, the loss there, and its status."""
    headings = (label(scale), "optimum", "95 % interval", "loss", "near-optimal", "status")
    optima = [*([result.at_scale_0] if result.at_scale_0 else []), *result.optima]
    return Table(headings, [_optimum_row(o, scale) for o in optima], title)


def _optimum_row(o: Optimum, scale: str) -> tuple[str, ...]:
    return (
        write_scale(scale, o.scale),
        power(o.x, ".2f") if o.is_bracketed else "-",
        "-" if math.isnan(o.low) else f"{markup.power(o.low, '.2f')} to {markup.power(o.high, '.2f')}",
        f"{o.loss:.4f}" if math.isfinite(o.loss) else "-",
        f"2^{o.band_low:.2f} to 2^{o.band_high:.2f}" if math.isfinite(o.band_low) else "-",
        o.sentence(),
    )


def regret_table(result: TransferResult, scale: str, title: str) -> Table:
    """Regret of each pair of scales: in nat with its interval, relative to the gain, as compute."""
    headings = ("tuned at", "trained at", "regret (nat)", "95 %", "of the gain", "compute share")
    return Table(headings, [_regret_row(r, scale) for r in result.regrets], title)


def _regret_row(r: Regret, scale: str) -> tuple[str, ...]:
    known = r.status in ("estimated", AT_LEAST)
    return (
        write_scale(scale, r.source),
        write_scale(scale, r.target),
        f"{'≥ ' if r.status == AT_LEAST else ''}{r.value:.4f}" if known else r.status,
        f"{r.low:.4f} to {number(r.high, 4)}" if known else "-",
        f"{r.relative:.0%}" if math.isfinite(r.relative) else "-",
        f"{r.compute_share:.0%} ({r.compute_low:.0%} to {r.compute_high:.0%})"
        if math.isfinite(r.compute_share)
        else "-",
    )


def sweeps_table(compared: pd.DataFrame, title: str = "") -> Table:
    """α, regret, best loss and verdict of sweeps, from `mup_tpu.analysis.ablations.compare`."""
    headings = ("", "α (95 %)", "regret (nat, 95 %)", "best loss, largest", "verdict")
    rows = [
        (
            name_of(row["name"]).replace(": ", ":\n"),
            exponent(row["alpha"], row["low"], row["high"]),
            _regret(row),
            number(row["best_loss"], 3),
            row["verdict"],
        )
        for row in compared.to_dict("records")
    ]
    return Table(headings, rows, title, left=("", "verdict"), whole=("", "verdict"))


def _regret(row: dict[Any, Any]) -> str:
    """Regret with its interval, or why there is none."""
    value, low, high = (number(row[column], 3) for column in ("regret", "regret_low", "regret_high"))
    if value == "-":
        return str(row["regret_status"])
    return value if "-" in (low, high) else f"{value} ({low} to {high})"


def trials_table(runs: pd.DataFrame) -> Table:
    """Best finished trials of a search, with the hyperparameters that were searched."""
    trials, searched = ranked(runs), varied(runs)
    finished = of_status(trials, "finished")
    rows = [
        [str(trial["trial_id"]), f"{trial['loss']:.4f}", *(write(c, trial[c]) for c in searched)]
        for trial in finished.head(_BEST).to_dict("records")
    ]
    return Table(["trial", "loss (nat)", *map(label, searched)], rows)


def slopes_table(
    part: pd.DataFrame, rules: Sequence[str], quantities: Collection[str] = CHECKED, title: str = "Slopes"
) -> Table:
    """Exponents of layers' sizes in a coordinate check: a row a layer, a column a rule and quantity."""
    fits: list[dict[Any, Any]] = slopes(part).to_dict("records")
    fitted = {(f["layer"], f["parametrization"], f["quantity"]): _slope(f) for f in fits}
    measured = [q for q in dict.fromkeys(part["quantity"]) if q in quantities]
    keys = [(rule, q) for rule in rules for q in measured if any(key[1:] == (rule, q) for key in fitted)]
    rows = [
        [layer, *(fitted.get((layer, *key), "-") for key in keys)] for layer in dict.fromkeys(part["layer"])
    ]
    headings = ["layer", *(f"{name_of(rule)} {quantity}" for rule, quantity in keys)]
    return Table(headings, rows, title, left=("layer",))


def _slope(fit: dict[Any, Any]) -> str:
    known = number(fit["slope"], 2)
    return known if known == "-" else f"{known} ± {number(fit['high'] - fit['slope'], 2)}"
