"""Tables of results and how their runs were made, and several sweeps beside each other, by way of growing."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pandas as pd

from mup_tpu.analysis.ingest.table_columns import Columns
from mup_tpu.analysis.load import named_loss
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.run_table import of_status, ranked, varied
from mup_tpu.analysis.verdict import AT_LEAST, Decision
from mup_tpu.config import Trial
from mup_tpu.config.columns import CONFIGURED, Table, configured, label, write, write_scale
from mup_tpu.config.values import counted
from mup_tpu.words.names import exponent, heading, number, plain, power, rule_name, signed
from mup_tpu.words.reasons import because
from mup_tpu.words.verdicts import status

if TYPE_CHECKING:
    from mup_tpu.analysis.referee import Comparison, Ruling

_BEST = 10  # number of trials in the table of a search
_MADE = (
    "dataset", "data_fingerprint", "tokens", *(column for column in CONFIGURED if column != "corpus"),
    "device", "versions", "git_commit",
)  # fmt: skip
# Settings that are shown although they are the defaults
_ALWAYS = (
    "architecture", "width", "depth", "parametrization", "sequence_length", "batch_size", "optimizer", "lr",
    "steps_planned", "schedule", "loss_kind", "precision",
)  # fmt: skip
_MOST_VALUES = 8  # most values of a column that are written one by one


def optima_table(result: TransferResult, columns: Columns, title: str) -> Table:
    digits = ".4f" if columns.unit == "nat" or max(abs(o.loss) for o in result.optima) > 0.1 else ".4g"
    headings = (*map(label, columns.scales), "optimum", "95 % interval", columns.loss_name, "status")
    rows = [
        (
            *(write_scale(name, size) for name, size in zip(columns.scales, o.sizes, strict=True)),
            power(o.x, ".2f") if o.is_bracketed else "-",
            "-" if math.isnan(o.low) else f"{plain(o.low)} to {plain(o.high)}",
            f"{columns.metric(o.loss):{digits}}" if math.isfinite(o.loss) else "-",
            status(o, columns.unit),
        )
        for o in result.optima
    ]
    return Table(headings, rows, title)


def regret_table(result: TransferResult, columns: Columns, title: str) -> Table:
    headings = ("tuned at", "trained at", f"regret ({columns.unit})", "95 %", "of the gain")
    rows = []
    for r in result.regrets:
        known = r.status in ("estimated", AT_LEAST)
        rows.append(
            (
                write_scale(columns.scale, r.source),
                write_scale(columns.scale, r.target),
                f"{'≥ ' if r.status == AT_LEAST else ''}{r.value:.4f}" if known else r.status,
                f"{r.low:.4f} to {number(r.high, 4)}" if known else "-",
                f"{r.relative:.0%}" if math.isfinite(r.relative) else "-",
            )
        )
    return Table(headings, rows, title)


def trials_table(runs: pd.DataFrame) -> Table:
    """Return a table of the best finished trials of a search, with the hyperparameters that were searched."""
    trials, searched = ranked(runs), varied(runs)
    finished = of_status(trials, "finished")
    rows = [
        [str(trial["trial_id"]), f"{trial['loss']:.4f}", *(write(c, trial[c]) for c in searched)]
        for trial in finished.head(_BEST).to_dict("records")
    ]
    return Table(["trial", heading(*named_loss(runs.get("versions", ()))), *map(label, searched)], rows)


def slopes_table(
    part: pd.DataFrame, rules: Sequence[str], quantities: Collection[str] | None = None, title: str = "Slopes"
) -> Table:
    """Return exponents of layers' sizes, a row per layer, a column per rule and quantity."""
    from mup_tpu.analysis.diagnosis import layer_exponents  # most tables are of sweeps

    fitted = {
        key: f"{number(fit.value, 2)} ± {number(fit.high - fit.value, 2)}"
        for key, fit in layer_exponents(part).items()
    }
    measured = [q for q in dict.fromkeys(part["quantity"]) if quantities is None or q in quantities]
    keys = [(rule, q) for rule in rules for q in measured if any(key[:2] == (rule, q) for key in fitted)]
    rows = [[of, *(fitted.get((*key, of), "-") for key in keys)] for of in dict.fromkeys(part["layer"])]
    headings = ["layer", *(f"{rule_name(rule)} {quantity}" for rule, quantity in keys)]
    return Table(headings, rows, title, left=("layer",))


def conclusions(kept: dict[Any, Any], setting: str) -> dict[str, tuple[Any, ...]]:
    """Return of each rule of a setting whether it passed its coordinate check, and what the check said."""
    rules = kept.get(setting, {}).get("rules", {})
    return {n: (of["passes"], *filter(None, (of["sentence"], of["laziness"]))) for n, of in rules.items()}


def how_made(source: pd.DataFrame) -> Table:
    """Return a table of the number of runs, and the settings that vary or are not the defaults."""
    made = [("runs", str(len(source)))]
    if "status" in source:
        made.append(("ended", counted(source["status"].value_counts().items())))
    if "wall_time_s" in source:
        made.append(("training time, all runs", f"{source['wall_time_s'].sum() / 60:.1f} min"))
    defaults = {field: value for field, value in configured(Trial()).items() if field not in _ALWAYS}
    for column in _MADE:
        if column in source:
            values = sorted(source[column].dropna().unique().tolist())
            if values and not (column in defaults and values == [defaults[column]]):
                made.append((label(column), _written(column, values)))
    return Table(("setting", "value"), [*made, ("all other settings", "the defaults")])


def _written(column: str, values: list[Any]) -> str:
    if len(values) > _MOST_VALUES and isinstance(values[0], int | float):
        return f"{len(values)} values, {_readable(column, values[0])} to {_readable(column, values[-1])}"
    return ", ".join(dict.fromkeys(_readable(column, v) for v in values))


def _readable(column: str, value: Any) -> str:
    if column == "versions":
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # not written by this program
            return ", ".join(f"{package} {number}" for package, number in json.loads(value).items())
        return str(value)
    return rule_name(value) if column == "parametrization" else write(column, value)


# Columns of the tables on a page, where a link leads to the intervals of each sweep
ON_A_PAGE = ("stored rule", "from, to", "α", "by hand", "regret", "verdict", "hours", "sweep")
_IN_A_TERMINAL = ("sweep", "rule", "from, to", "α (95 %)", "regret (nat, 95 %)", "verdict")


def ruling_tables(comparison: Comparison, headings: Sequence[str] = _IN_A_TERMINAL) -> list[Table]:
    """Return a table for each way of growing, with a row for each rule of a sweep."""
    common, tables = common_setting(comparison), []
    for way, rulings in groupby(comparison.rulings, lambda r: label(r.columns.scale)):
        rows = [[_cells(r, common)[heading] for heading in headings] for r in rulings]
        tables.append(Table(headings, rows, way, left=("rule", "verdict", "sweep"), whole=("verdict",)))
    return tables


def _cells(r: Ruling, common: tuple[str, str, str]) -> dict[str, str]:
    cost = bounded = "not known" if r.regret is None else r.regret.status
    if r.regret is not None and math.isfinite(r.regret.value):
        cost = f"{r.regret.value:.3f}"
        bounded = f"{cost} ({number(r.regret.low, 3)} to {number(r.regret.high, 3)})"
    labels = zip(map(label, r.setting), map(label, common), strict=True)
    differs = [of_row for of_row, of_most in labels if of_row != of_most]
    alpha = exponent(r.drift.alpha, r.drift.low, r.drift.high)
    by_hand = "–" if math.isnan(r.parabola) else signed(r.parabola) + " ≠" * r.parts_from_parabola
    is_no_power_law = r.decision == Decision.DRIFTS and not r.drift.has_moved  # its regret alone shows it
    return {
        "rule": ", ".join([rule_name(r.rule, r.columns.parametrization), *differs]),
        "stored rule": ", ".join([r.rule, *differs]),
        "from, to": span(r, "–"),
        "α": alpha.replace("-", "−"),
        "α (95 %)": alpha,
        "by hand": by_hand,
        "regret": cost,
        "regret (nat, 95 %)": bounded,
        "verdict": r.decision + " (no power law)" * is_no_power_law,
        "hours": f"{r.hours:.2f}",
        "sweep": r.sweep,
    }


def left_out(comparison: Comparison) -> list[str]:
    """Return the folders without a ruling, those of one reason together with it."""
    reasons = {folder: because(why).partition(";")[0] for folder, why in comparison.left_out.items()}
    return [
        f"{', '.join(folder for folder in reasons if reasons[folder] == why)} ({why})"
        for why in dict.fromkeys(reasons.values())
    ]


def verdict_counts(comparison: Comparison) -> str:
    counts = Counter(r.decision for r in comparison.rulings)
    return ", ".join(f"{counts[v]} {v}" for v in Decision if v in counts)


def common_setting(comparison: Comparison) -> tuple[str, str, str]:
    return Counter(r.setting for r in comparison.rulings).most_common(1)[0][0]


def span(ruling: Ruling, to: str = " to ") -> str:
    ends = (ruling.result.optima[end].scale for end in (0, -1))
    return to.join(write_scale(ruling.columns.scale, at) for at in ends)
