"""Tables of any shape as rows of runs: columns for values or curves, settings in names, rows of steps."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import (
    ROUNDING,
    Columns,
    Usual,
    is_configured,
    list_of,
    means,
    plain_name,
    rough_numbers,
    rows_of_both,
)
from mup_tpu.analysis.ingest.table_values import SIZE, numbers, plain_size, plain_sizes
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import each_of, power, run_key
from mup_tpu.config import parse_number, shown
from mup_tpu.errors import ConfigError, TableError, given
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

NUMBER = r"[0-9]+\^-?[0-9.]+|[0-9]*[.,]?[0-9]+(?:e[+-]?[0-9]+)?"
# Meaning of a setting -> axis of a table
AXES = {"width": "scale", "depth": "scale", "size": "scale", "lr": "hyperparameter"}

# Meaning of a letter before a number, as in w64-l2-s0
_SHORT = {"w": "width", "d": "width", "l": "depth", "s": "seed", "h": "width"}
_SETTING = re.compile(rf"(?P<name>[a-z][a-z_/.]*?)\s*[-_=: ]?\s*(?P<number>{NUMBER})(?![0-9])", re.IGNORECASE)
# Width and depth, as in 3072x12
_SHAPE = re.compile(r"(?<![0-9a-z.])(?P<width>[0-9]{2,5})x(?P<depth>[0-9]{1,3})(?![0-9a-z])", re.IGNORECASE)

# Parameters, as in pythia-70m
_SIZE_IN_NAME = re.compile(r"(?<![0-9a-z.])([0-9]+(?:[._][0-9]+)?[mb])(?![0-9a-z])", re.IGNORECASE)

# Usual columns of a run's name, the likeliest first
_NAMES = ("run", "name", "run_name", "trial_name", "experiment_name", "display_name", "run_id", "tag",
          "file", "model")  # fmt: skip

_HEADING = re.compile(rf"(?P<before>.*?)(?P<number>{NUMBER})(?P<after>[^0-9]*)", re.IGNORECASE)
_CURVE = re.compile(r"(?P<run>.+) - (?P<metric>\S.*)")
# Suffixes of columns that Weights & Biases exports beside a curve: extremes of a group of steps
_EXTREMES = ("__MIN", "__MAX")


def as_rows(table: pd.DataFrame, columns: Columns, notes: list[Reason]) -> pd.DataFrame:
    """Gather the losses of a table of any shape in one column."""
    if any(means(name) == "loss" for name in table) or columns.loss in table:
        return table
    if (long := _long(table)) is not None:
        return long
    if (curves := _curves(table, notes)) is not None:
        return curves
    if (headings := _headings(table, columns)) is None:
        return table
    axis, values = headings
    named = getattr(columns, axis)
    kept = [name for name in table if name not in values]
    values_C = pd.Series(numbers(plain_sizes(pd.Series([*values.values()])), named).to_numpy(), [*values])
    rows = table.melt(kept, [*values], "heading", columns.loss)
    rows[named] = rows.pop("heading").map(values_C).astype("float64")
    notes.append(Reason.of("losses in columns", names=[*values], column=named))
    empty = rows[columns.loss].isna()
    if empty.any():
        notes.append(Reason.of("empty cells", count=int(empty.sum())))
    return rows[~empty].reset_index(drop=True)


def _long(table: pd.DataFrame) -> pd.DataFrame | None:
    """Make columns of the metrics of a table with a row per metric; None for another table."""
    plain = {plain_name(name): name for name in table}
    metric = next((plain[word] for word in ("metric", "tag", "key", "variable") if word in plain), None)
    if metric is None or "value" not in plain or "loss" not in set(map(means, table[metric].unique())):
        return None
    others = [name for name in table if name not in (metric, plain["value"]) and not table[name].isna().all()]
    wide = table.pivot_table(plain["value"], others, metric, aggfunc="last", sort=False)
    return wide.reset_index().rename_axis(columns=None)


def _headings(table: pd.DataFrame, columns: Columns) -> tuple[str, dict[str, str]] | None:
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in map(str, table):
        if match := _HEADING.fullmatch(name.strip()):
            groups.setdefault((match["before"], match["after"]), {})[name] = match["number"]
    (before, after), values = max(groups.items(), key=lambda group: len(group[1]), default=(("", ""), {}))
    sizes = {name: name for name in map(str, table) if SIZE.fullmatch(name.strip())}  # 130M, 1.3B
    if len(sizes) > len(values):
        return "scale", sizes
    if len(values) < 2:
        return None
    others = [name for name in table if name not in values]
    known = {axis for name in others if (axis := AXES.get(means(name)))}
    known |= {axis for axis in ("scale", "hyperparameter") if getattr(columns, axis) in others}
    meanings = [meaning_at_end(re.sub(r"[\s=:]+", "_", text)) for text in (before, after)]
    named_axes = {AXES[what] for what in meanings if what in AXES}
    missing = {"scale", "hyperparameter"} - known
    if not missing and "seed" in meanings:
        return "seed", values
    if len(named_axes) == 1 and named_axes <= missing and len(missing) == 1:
        return named_axes.pop(), values
    if not named_axes and before.strip() == after.strip(" *x×") == "":
        if len(missing) == 1:
            return missing.pop(), values
        raise TableError(
            f"table has a column for each of {list_of(values)}, but no heading names these values or the "
            f"rows: name the column of the rows {columns.scale} or {columns.hyperparameter}"
        )
    return None


def _curves(table: pd.DataFrame, notes: list[Reason]) -> pd.DataFrame | None:
    """Make rows by run and step of columns of curves (`NAME - val/loss`); None without such columns."""
    curves = {str(name): _CURVE.fullmatch(str(name)) for name in table if not str(name).endswith(_EXTREMES)}
    losses = {name: match for name, match in curves.items() if match and means(match["metric"]) == "loss"}
    steps = [name for name in table if means(name) == "step"]
    if not losses or not steps:
        return None
    metrics = {match["metric"] for match in losses.values()}
    if len(metrics) > 1:
        raise TableError(f"table holds curves of {list_of(sorted(metrics))}: export the curves of one loss")
    by_column = {name: settings(match["run"]) for name, match in losses.items()}
    if nameless := [c for c, in_name in by_column.items() if {*AXES.values()} - {*map(AXES.get, in_name)}]:
        raise TableError(
            f"table holds curves of {len(losses)} runs whose names do not say width and learning rate "
            f"({list_of(nameless, 2)}): export the table of runs in their place, or read the project itself "
            "as wandb:ENTITY/PROJECT"
        )
    rows = [
        pd.DataFrame({**in_name, "step": table[steps[0]], "loss": table[name]}).dropna(subset=["loss"])
        for name, in_name in by_column.items()
    ]
    notes.append(Reason.of("curves in columns", count=len(losses), metric=metrics.pop()))
    return pd.concat(rows, ignore_index=True)


def settings(run: str) -> dict[str, Any]:
    """Read the settings in a run's name, by meaning: `d_model: 64, lr: 0.01` or `w64-lr2^-8-s0`."""
    values: dict[str, Any] = {}
    for match in _SETTING.finditer(run):
        what = meaning_at_end(match["name"])
        if what in (*AXES, "seed") and what not in values:
            with contextlib.suppress(ConfigError):
                values[what] = parse_number(match["number"])
    if (size := _SIZE_IN_NAME.search(run)) and "width" not in values:
        values.setdefault("size", float(plain_size(size[1])))
    if (shape := _SHAPE.search(run)) and "width" not in values:
        values = {"width": float(shape["width"]), "depth": float(shape["depth"])} | values
    rules = {word for word in re.split(r"[^a-z]+", run.lower()) if word in PARAMETRIZATIONS}
    return values | ({"parametrization": rules.pop()} if len(rules) == 1 else {})


def meaning_at_end(text: str) -> str:
    # Of a name or its end: `sp_w` means w.
    words = [word for word in re.split(r"[-_/. ]+", text) if word]
    names = ["_".join(words[i:]) for i in range(len(words))]
    return next((what for name in names if (what := means(name) or _SHORT.get(name.lower(), ""))), "")


def with_settings(table: pd.DataFrame, columns: Columns, notes: list[Reason]) -> pd.DataFrame:
    """Add the settings that only the names of runs have as columns."""
    empty = [name for name in table if len(table) and means(name) in AXES and table[name].isna().all()]
    known = {means(name) for name in table if name not in empty} - {""}
    known |= {what for what, axis in AXES.items() if getattr(columns, axis) in {*table} - {*empty}}
    known |= {"parametrization"} if columns.parametrization in table else set()
    texts_only = [str(name) for name in table if table[name].dtype.kind not in "iufb"]
    plain = {plain_name(name): name for name in reversed(texts_only)}
    names = [plain[name_of_run] for name_of_run in _NAMES if name_of_run in plain]
    table = _with_set_rates(table, names, columns, notes)
    for name in names:
        if "lr" in known and known & {"width", "depth", "size"}:
            break
        texts = table[name].astype(str)
        by_text = {text: settings(text) for text in texts.unique()}
        new = [what for what in next(iter(by_text.values()), {}) if what not in known]
        new = [what for what in new if all(what in in_name for in_name in by_text.values())]
        if set(new) & set(AXES):
            table = table.drop(columns=empty, errors="ignore").assign(
                **{what: [by_text[text][what] for text in texts] for what in new}
            )
            notes.append(Reason.of("settings in names", settings=new, name=name, example=texts.iloc[0]))
            known |= {*new}
    return table


def _with_set_rates(
    table: pd.DataFrame, names: list[str], columns: Columns, notes: list[Reason]
) -> pd.DataFrame:
    # A table's only column of rates may log a schedule. The rates that were set replace its values: those in
    # the names of the runs, or the peak of each run's schedule.
    logged = [str(name) for name in table if means(name) == "lr"]
    is_chosen = columns.hyperparameter in table and not isinstance(columns.hyperparameter, Usual)
    is_set = len(logged) == 1 and is_configured(logged[0])  # names round it
    if len(logged) != 1 or not names or is_chosen or is_set:
        return table
    rate = rough_numbers(table[logged[0]])
    for name in names:
        by_text = {text: settings(text).get("lr") for text in table[name].astype(str).unique()}
        if not all(by_text.values()):  # Ray Tune's names round small rates to 0
            continue
        named = table[name].astype(str).map(by_text).astype(float)
        share = (rate / named).dropna()
        if (share - 1).abs().max() < ROUNDING:  # names round
            return table
        if share.max() > 1 + ROUNDING:
            raise TableError(
                f"column {logged[0]} and the names of the runs (column {name}) may both be the learning rate "
                f"({rows_of_both(rate, named)}): give {given('hyperparameter', logged[0])}"
            )
        example = table[name].iloc[0]
        notes.append(Reason.of("settings in names", settings=["lr"], name=name, example=example))
        return table.assign(**{logged[0]: named})
    steps = next((rough_numbers(table[name]) for name in table if means(name) == "step"), None)
    by_run = pd.DataFrame({"run": table[names[0]], "step": steps, "rate": rate}).dropna()
    if steps is None or (by_run.groupby("run")["rate"].nunique() > 1).mean() <= 0.5:
        return table
    length = float(by_run["step"].max())
    peaks = {
        run: set_rate(of["step"].to_numpy(), of["rate"].to_numpy(), length)
        for run, of in by_run.groupby("run")
    }
    if lost := next((run for run, peak in peaks.items() if peak is None), None):
        raise TableError(
            f"{logged[0]} of run {shown(str(lost))} logs a schedule of an unknown form, so the rate that was "
            "set is not known: name the runs such as width64-lr0.001"
        )
    first = by_run.loc[by_run.groupby("run")["rate"].idxmax(), "step"].min()
    notes.append(Reason.of("peak of a schedule", name=logged[0], step=f"{first:g}"))
    return table.assign(**{logged[0]: table[names[0]].map(peaks)})


_FITS = 0.01  # relative error of a schedule's values, which logs round
# Share of the decay that is left, by the share of the steps that are done
_DECAYS = (lambda u: 1 - u, lambda u: (1 + np.cos(np.pi * u)) / 2)


def set_rate(steps: np.ndarray, rates: np.ndarray, length: float | None) -> float | None:
    """Return the peak of the schedule with these values at these steps; None if none fits.

    A schedule rises in a straight line, and decays linearly or as a cosine; logs may begin after its peak.
    """
    order = np.argsort(steps)
    steps, rates = steps[order], rates[order]
    highest, top = float(rates.max()), int(rates.argmax())
    is_flat = np.isclose(rates[top:], highest, rtol=1e-3).sum() > 1
    length = max(float(steps[-1]), length or 0.0)
    if len(rates) < 2 or is_flat or highest <= 0:
        return highest if highest > 0 else None
    # A warm-up may end before the first step of the log; only a round peak shows that there was none.
    begins = np.linspace(steps[top - 1] if top else 0.0, steps[top], 101).tolist()
    peaks = []
    for begin, decay, end in itertools.product(begins, _DECAYS, (0.0, 0.01, 0.1, None)):
        left = decay((steps[top:] - begin) / max(length - begin, 1.0))
        columns = np.column_stack([left, 1 - left]) if end is None else (end + (1 - end) * left)[:, None]
        if len(left) <= columns.shape[1]:
            continue
        fitted, *_ = np.linalg.lstsq(columns, rates[top:])
        peak, misses = float(fitted[0]), np.abs(columns @ fitted - rates[top:])
        if top:
            misses = np.append(misses, abs(peak * steps[top - 1] / max(begin, 1e-9) - rates[top - 1]))
        if misses.max() < _FITS * peak:
            if not top and not begin and _is_round(peak):
                return peak
            peaks.append((float(misses.max()), peak))
    if peaks and max(p for _, p in peaks) < (1 + ROUNDING) * min(p for _, p in peaks):
        return min(peaks)[1]
    return highest if top or steps[0] <= ROUNDING * length else None


def _is_round(rate: float) -> bool:
    # A person may have set it: it has two digits, or is a power of √2.
    octaves = 2 * math.log2(rate)
    return math.isclose(rate, float(f"{rate:.1e}"), rel_tol=2e-3) or abs(octaves - round(octaves)) < 6e-3


def at_logged_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Select steps at which some run has a loss; at others an empty held-out loss is no divergence."""
    if rows["step"].isna().all():
        return rows
    is_logged = rows["loss"].notna().groupby(rows["step"]).transform("any")
    return rows[is_logged.fillna(True).astype(bool)] if is_logged.any() else rows


def last_steps(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each run."""
    if runs["step"].isna().all():
        return runs
    return runs.sort_values("step").groupby(run_key(runs), as_index=False).tail(1).sort_index()


def history_of(runs: pd.DataFrame, by_step: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by step of these runs."""
    key = run_key(runs)
    is_kept = pd.MultiIndex.from_frame(by_step[key]).isin(pd.MultiIndex.from_frame(runs[key]))
    is_kept &= np.isfinite(by_step["x"]) & (by_step["scale"] > 0)
    return by_step.loc[is_kept, [*key, "step", "loss"]].sort_values([*key, "step"], ignore_index=True)


_WHOLE = 0.9  # share of its peers' steps from which a run counts as finished


def without_early_ends(
    runs: pd.DataFrame, counters: Mapping[str, pd.Series], notes: list[Reason]
) -> pd.DataFrame:
    """Count runs that ended before their peers as stopped, if several ended at one rung; else leave them out.

    Peers are the other runs of a scale. A scheduler such as ASHA stops runs for being behind, at a few rungs.
    """
    groups = [runs[name] for name in ("compared", *each_of("scale", runs))]
    is_finite = np.isfinite(runs["loss"]) & (runs["x"] > -np.inf)
    for name, counts in counters.items():
        shared = counts.where(is_finite & (counts.map(counts[is_finite].value_counts()) > 1))
        most = shared.groupby(groups).transform("max")
        early, longer = is_finite & (counts < _WHOLE * most), is_finite & (_WHOLE * counts > most)
        if not early.any() and not longer.any():
            continue
        best = runs["loss"].where(is_finite & (counts >= _WHOLE * most)).groupby(groups).transform("min")
        if (runs["loss"] < best)[early].any():  # it counts something else, such as a setting
            continue
        ends = counts[early | longer]
        shown = {"name": name, "count": len(ends), "most": f"{most.max():g}"}
        shown["listed"] = list_of([f"{end:g}" for end in sorted(ends.unique())], 4)
        if 2 * ends.nunique() > len(ends):
            notes.append(Reason.of("ended at odd steps", **shown))
            return runs[~(early | longer)]
        notes.append(Reason.of("ended early", **shown))
        return runs.assign(loss=runs["loss"].mask(early, np.inf), stopped=runs["stopped"] | early)
    return runs


def require_one_length(runs: pd.DataFrame, column: str, notes: list[Reason]) -> pd.DataFrame:
    """Leave out runs that end at another step than most, with a note; an error where most end at none."""
    is_finite = np.isfinite(runs["loss"])
    ends = runs.loc[is_finite, "step"].value_counts()
    if len(ends) < 2:
        return runs
    if 2 * ends.iloc[0] <= ends.sum():
        raise TableError(
            f"runs end at different steps (column {column!r}: {ends.index.min():g} to "
            f"{ends.index.max():g}), and most at no single one; compare runs of one length"
        )
    is_cut = is_finite & (runs["step"] != ends.index[0])
    cut = [
        f"{run.compared} {run.scale:g} at {power(run.x)} (step {run.step:g})".removeprefix("all ")
        for run in runs[is_cut].itertuples()
    ]
    notes.append(Reason.of("other last step", step=float(ends.index[0]), runs=cut))
    return runs[~is_cut]
