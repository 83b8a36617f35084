"""Tables of named columns in standard form: one way for our rows and for anybody's.

A fault stops with one sentence, which names column and value; an oddity becomes a note, which every output
repeats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence, Sized
from dataclasses import asdict, fields, replace

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import (
    Columns,
    Usual,
    distinct,
    list_of,
    means,
    plain_name,
    rough_numbers,
    short_name,
)
from mup_tpu.analysis.ingest.table_values import Reading, States, meanings, numbers, plain_sizes, state_of
from mup_tpu.analysis.ingest.tables import (
    at_logged_steps,
    history_of,
    last_steps,
    require_one_length,
    without_early_ends,
)
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import (
    DIVERGED,
    ENDS,
    FINISHED,
    REFUSED,
    STOPPED,
    UNFINISHED,
    RunTable,
    each_of,
    meets,
    no_column,
    power,
    run_key,
)
from mup_tpu.config import on_one_line
from mup_tpu.config.columns import CONFIGURED, label
from mup_tpu.errors import TableError, given
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

MERGE_OCTAVES = 0.02  # distance below which two learning rates are one: they differ by rounding
_NEEDED = ("scale", "value", "loss", "loss_error", "step")
_MOST_RULES = 8  # most values of a column that is compared; one with more names runs
_DIVERGED = 1e100  # loss from which a run counts as diverged: squares of larger ones overflow
_FAR_ABOVE, _FAR_RISE = 1.5, 2.0
"""A run blew up if it has 1.5 times the loss at the smallest values, and twice their rise over the best."""
# Columns of a run's cost, with their units; the first that a table has is taken
_COSTS = {"wall_time_s": "s", "flops": "FLOP"}


def standard_form(
    table: pd.DataFrame, columns: Columns, reading: Reading, fixed: Iterable[str], notes: list[Reason]
) -> RunTable:
    """Check rows of runs, or of steps of runs, and bring them into standard form; notes are added to a list.

    `columns` are all named; `fixed` are columns that have one value, except along the axes.
    """
    chance = reading.chance
    _require_columns(table, columns)
    table, ended = _with_a_result(table, columns, reading.states, notes)
    for condition in reading.only:
        refused = (ended == FINISHED) & ~meets(table, condition)[0]
        ended = ended.mask(refused, REFUSED)
        notes.append(Reason.of("refused by conditions", count=int(refused.sum()), conditions=str(condition)))

    rows = _named(table, columns, ended, notes)
    _require_one_kind(table, columns, fixed)
    rows, columns, converted = reading.unit.convert(rows, columns)
    notes += [] if converted is None else [converted]
    _require_in_range(rows, columns)

    runs = at_logged_steps(rows)
    is_lost = (runs["ended"] != FINISHED) | runs["loss"].isna() | (runs["loss"].abs() >= _DIVERGED)
    if chance is not None:
        is_lost |= runs["loss"] >= (-chance if columns.maximized else chance)
    values = each_of("value", runs)
    with np.errstate(divide="ignore"):  # a value of 0 has x = -inf
        logs = {name.replace("value", "x"): np.log2(runs[name]) for name in values}
    refused = runs["ended"] == REFUSED
    stopped = refused | (runs["ended"] == STOPPED)
    runs = runs.assign(loss=runs["loss"].mask(is_lost, np.inf), stopped=stopped, refused=refused, **logs)
    # Values of a random search in several hyperparameters lie close to others and differ in the rest.
    merged = runs if columns.tuned_beside else _merged(runs, notes)
    runs = _distinct(merged, table, columns, notes)
    last, is_ours = last_steps(runs), {"trial_id", "config"} <= set(table)
    by_step, runs = runs if len(last) < len(runs) else None, last
    if by_step is not None:
        runs = without_early_ends(runs, {columns.step: runs["step"]}, notes)
        runs = require_one_length(runs, columns.step, notes)
    elif not is_ours:
        runs = without_early_ends(runs, _counters(table, columns, runs.index), notes)
    history = None if by_step is None else history_of(runs, by_step)
    if chance is None and not columns.maximized:
        runs = _without_blown_up(runs, notes)
    if not is_ours and not columns.maximized:
        runs = _without_sentinels(runs, notes)
    notes += _other_settings(table, runs, columns) + _oddities(runs, columns)
    scale, tuned = short_name(columns.scale), short_name(columns.hyperparameter)
    is_zero = (runs[[*values, *each_of("scale", runs)]] == 0).any(axis=1)
    kept = runs.drop(columns=["ended", *values, "step"])
    return RunTable(
        kept[~is_zero].reset_index(drop=True),
        tuple(notes),
        replace(columns, scale=scale, hyperparameter=tuned) if scale != tuned else columns,
        reading.name or "table",
        cost_column(table, columns)[1],
        history=history,
        chance=math.nan if chance is None else chance,
    )


def _counters(table: pd.DataFrame, columns: Columns, rows: pd.Index) -> dict[str, pd.Series]:
    used = {*columns.scales, *columns.tuned, columns.seed, columns.loss}
    names = [name for name in map(str, table) if means(name) in ("step", "counter") and name not in used]
    counts = {name: rough_numbers(table[name].loc[rows]) for name in names}
    return {name: count for name, count in counts.items() if count.nunique() > 1}


_REPEATED = 3  # points with one loss to the last digit, from which it stands for a failure


def _without_sentinels(runs: pd.DataFrame, notes: list[Reason]) -> pd.DataFrame:
    """Leave out runs whose loss no run can have: 0 or less where others are above, or one for many points."""
    known = runs[np.isfinite(runs["loss"])]
    losses = known["loss"]
    point = [*each_of("scale", runs), *each_of("x", runs), "loss"]
    points = known.drop_duplicates(point)["loss"].value_counts()
    least = 0.5 * float(losses.median())
    lost = (losses <= 0) & (losses[losses > 0].min() > least) if least > 0 else losses.isna()
    if len(points) > 1 and points.iloc[0] >= _REPEATED * points.iloc[1]:
        is_repeated = losses == points.index[0]
        lost |= is_repeated & (is_repeated.sum() >= _REPEATED) & (known["scale"][is_repeated].nunique() > 1)
    if not lost.any():
        return runs
    values = list_of([f"{loss:g}" for loss in sorted(losses[lost].unique())])
    notes.append(Reason.of("sentinels left out", count=int(lost.sum()), values=values))
    return runs.drop(index=losses.index[lost])


def _without_blown_up(runs: pd.DataFrame, notes: list[Reason]) -> pd.DataFrame:
    """Count runs as diverged whose finite losses lie far above those at the scales' smallest values.

    Those have hardly learned, so that their loss bounds that of guessing from below.
    """
    blown_up, sizes = pd.Series(False, runs.index), each_of("scale", runs)
    for _, of_rule in runs[np.isfinite(runs["loss"]) & np.isfinite(runs["x"])].groupby("compared"):
        is_least = of_rule["x"] == of_rule.groupby(sizes)["x"].transform("min")
        level = float(of_rule.loc[is_least].groupby(sizes)["loss"].median().max())
        best, loss = float(of_rule["loss"].min()), of_rule["loss"]
        if best > 0:
            blown_up |= (loss > _FAR_ABOVE * level) & (loss - best > _FAR_RISE * (level - best))
    if not blown_up.any():
        return runs
    notes.append(Reason.of("blown up", count=int(blown_up.sum()), least=float(runs["loss"][blown_up].min())))
    return runs.assign(loss=runs["loss"].mask(blown_up, np.inf))


_FLAG = re.compile(
    r"(is_|has_)?((?P<lost>diverged|exploded|blew_up|blown_up|is_nan|nan)|converged"
    r"|(?P<failed>failed|crashed|oom|exit_?code|exit_status|return_?code)|success|successful|succeeded)"
)
_NO = ("false", "0", "0.0", "no", "n", "", "nan", "none", "<na>")


def _with_a_result(
    table: pd.DataFrame, columns: Columns, states: States, notes: list[Reason]
) -> tuple[pd.DataFrame, pd.Series]:
    """Select runs that say something of their trial; return how each ended."""
    column, ended = columns.status, pd.Series(FINISHED, index=table.index, dtype=ENDS)

    def leave_out(is_out: pd.Series, states: pd.Series) -> None:
        nonlocal table, ended
        if is_out.any():
            counts = states[is_out].astype(str).value_counts()
            notes.append(Reason.of("states left out", counts={str(s): int(n) for s, n in counts.items()}))
            table, ended = table[~is_out], ended[~is_out]

    if isinstance(column, Usual) and column not in table:  # trackers export it as State
        column = next((c for c in table.columns if str(c).lower() in ("status", "state")), "")
    if column in table and table[column].notna().any():
        ended = meanings(table[column], states).astype(ENDS)
        leave_out(ended == UNFINISHED, table[column])
    elif columns.loss in table and table[columns.loss].dtype.kind not in "iufb":
        leave_out(table[columns.loss].map(state_of) == UNFINISHED, table[columns.loss])
    for name in map(str, table):
        flag = _FLAG.fullmatch(plain_name(name))
        if flag is None or name in columns.along:
            continue
        is_set = ~table[name].astype(str).str.strip().str.lower().isin(_NO)
        is_lost = (is_set if flag["lost"] or flag["failed"] else ~is_set) & (ended == FINISHED)
        if flag["failed"] or "succe" in flag[0]:  # nothing is known of such a run
            leave_out(is_lost, f"{name}=" + table[name].astype(str))
        else:
            ended = ended.astype(object).mask(is_lost, DIVERGED).astype(ENDS)
    metrics = [name for name in table if means(name) == "loss"]
    if len(metrics) < 2 or columns.step in table:
        return table, ended
    # A run that diverged has some metric, such as its training loss; a run that has none lost its summary.
    is_lost = table[metrics].isna().all(axis=1) & (ended == FINISHED)
    if not is_lost.any() or is_lost.all():
        return table, ended
    notes.append(Reason.of("runs without a metric", count=int(is_lost.sum())))
    return table[~is_lost], ended[~is_lost]


def _named(table: pd.DataFrame, columns: Columns, ended: pd.Series, notes: list[Reason]) -> pd.DataFrame:
    missing = pd.Series(np.nan, index=table.index)
    is_size = columns.params not in table and means(columns.scale) == "size"
    params = columns.scale if is_size else columns.params

    def known(part: str, column: str) -> pd.Series:
        return _numbers(table, part, column, notes) if column in table else missing

    return pd.DataFrame(
        {
            "compared": _names(table, columns.parametrization, "all").astype(str),
            **{name: known("scale", column) for name, column in _numbered("scale", columns.scales)},
            **{name: known("value", column) for name, column in _numbered("value", columns.tuned)},
            "loss": known("loss", columns.loss),
            "seed": _names(table, columns.seed, 0),
            "ended": ended,
            "loss_error": known("loss_error", columns.loss_error),
            "step": known("step", columns.step),
            "params": known("params", params),
            "tokens": known("tokens", columns.tokens),
            "cost": known("cost", cost_column(table, columns)[0]),
            "purchase": known("purchase", columns.purchase).fillna(0),
            **({"trial_id": table["trial_id"]} if "trial_id" in table else {}),
        },
        copy=False,
    )


def _numbered(part: str, columns: Sequence[str]) -> list[tuple[str, str]]:
    return [(part + f"{i}" * (i > 1), column) for i, column in enumerate(columns, start=1)]


def _names(table: pd.DataFrame, column: str, default: object) -> pd.Series:
    values = table[column] if column in table else pd.Series(default, index=table.index)
    empty = values.isna()
    if empty.all():
        return pd.Series(default, index=table.index)
    if empty.any():
        raise TableError(f"{column} is empty in row {values.index[empty][0]}{_more(values.index[empty])}")
    return values.map(str) if values.dtype == object else values


def _numbers(table: pd.DataFrame, part: str, column: str, notes: list[Reason]) -> pd.Series:
    hint = "; leave it empty, or inf, where a run diverged" if part == "loss" else ""
    try:
        is_size = part in ("scale", "params", "tokens")
        values = numbers(plain_sizes(table[column]) if is_size else table[column], column, hint, table)
        if part == "purchase":
            bad = values.index[values.notna() & ~((values >= 0) & (values % 1 == 0) & (values < 2**31))]
            if len(bad):
                first = f"row {bad[0]} has {values[bad[0]]:g}"
                raise TableError(f"{column} must be whole and 0 or more, but {first}")
    except TableError as error:
        if part in _NEEDED:
            raise
        notes.append(Reason.of("column not used", error=str(error)))
        return pd.Series(np.nan, index=table.index)
    return values


def _require_in_range(rows: pd.DataFrame, columns: Columns) -> None:
    if not (rows["ended"] == FINISHED).any():
        raise TableError("table has no finished run")
    plain = " (are these log2 values? the column takes plain ones)"
    limits = [(columns.loss, "loss", rows["loss"] != -np.inf, "above -inf", "")]
    scales, values = _numbered("scale", columns.scales), _numbered("value", columns.tuned)
    for part, column in (*scales, *values):
        hint = plain if part.startswith("value") else ""
        least = (rows[part] >= 0, "0 or more")
        if part.startswith("scale") and (means(column) in ("width", "depth", "size") or len(scales) > 1):
            least = (rows[part] > 0, "above 0")
        limits += [(column, part, *least, hint), (column, part, np.isfinite(rows[part]), "finite", hint)]
    for column, part, is_allowed, allowed, hint in limits:
        bad = rows.loc[~is_allowed, part]
        if len(bad):
            raise TableError(
                f"{column} must be {allowed}, but row {bad.index[0]} has {bad.iloc[0]:g}{_more(bad)}{hint}"
            )
    for part, column in (*values, *scales):
        if (rows[part] == 0).all():
            raise TableError(f"{column} is 0 in every run: give runs above 0 to fit")


def _merged(runs: pd.DataFrame, notes: list[Reason]) -> pd.DataFrame:
    """Make values that differ by rounding one, unless a run has both."""
    values = np.sort(runs["x"].unique())
    merged: dict[float, float] = {}
    current = -np.inf
    for value in values[np.isfinite(values)].tolist():
        if value - current > MERGE_OCTAVES:
            current = value
        else:
            merged[value] = current
    if not merged:
        return runs
    x = runs["x"].map(merged).fillna(runs["x"])
    same = [x, *(runs[column] for column in ("compared", "scale", "seed", "step"))]
    if (runs["x"].groupby(same, dropna=False).nunique() > 1).any():
        return runs
    notes.append(Reason.of("values merged", count=len(merged), octaves=MERGE_OCTAVES))
    return runs.assign(x=x)


def _distinct(runs: pd.DataFrame, table: pd.DataFrame, columns: Columns, notes: list[Reason]) -> pd.DataFrame:
    """Drop identical repeats; a run with two losses is an error."""
    names = run_key(runs)
    key = [*names, "step"]
    if runs["seed"].is_unique:
        return runs
    doubled = runs[runs.duplicated([name for name in key if distinct(runs[name]) != 1] or key, keep=False)]
    if doubled.empty:
        return runs
    clashing = doubled[doubled.groupby(key, dropna=False)["loss"].transform("nunique") > 1]
    if len(clashing):
        first = clashing.iloc[0]
        differ = _differences(table, clashing.index[(clashing[names] == first[names]).all(axis=1)], columns)
        of_names = bool(re.fullmatch(r"(\S+ \(a name a run\)(, )?)*", differ))
        if of_names and columns.seed not in table and runs["step"].isna().all():
            notes.append(Reason.of("repeats are seeds"))
            return runs.assign(seed=runs.groupby(names).cumcount())
        raise TableError(
            f"two runs of {first['compared']}, scale {first['scale']:g}, {power(first['x'])}, seed "
            f"{first['seed']} have different losses{_more(clashing.groupby(key, dropna=False).groups)}; they "
            f"differ in {differ or 'nothing but their loss: give the column of the seed, or drop one'}"
        )
    notes.append(Reason.of("duplicates dropped", count=int(runs.duplicated(key).sum())))
    return runs.drop_duplicates(key)


def _oddities(runs: pd.DataFrame, columns: Columns) -> list[Reason]:
    notes = []
    if stopped := int((runs["ended"] == STOPPED).sum()):
        notes.append(Reason.of("runs stopped early", count=stopped))
    if diverged := int((np.isinf(runs["loss"]) & ~runs["stopped"]).sum()):
        notes.append(Reason.of("runs diverged", count=diverged))
    for part, column in (*_numbered("value", columns.tuned), *_numbered("scale", columns.scales)):
        if count := int((runs[part] == 0).sum()):
            notes.append(Reason.of("runs at 0", count=count, column=column))
    if columns.tuned_beside:
        return notes
    at_zero = runs["value"] == 0
    cell = [name for name in run_key(runs)[:-1] if distinct(runs[name]) > 1]
    kept, by = runs[~at_zero] if at_zero.any() else runs, [*cell, "stopped"][: len(cell) or 1]
    seeds = kept.groupby(by, sort=False).size()
    if seeds.nunique() > 1:
        notes.append(Reason.of("unequal seeds", least=int(seeds.min()), most=int(seeds.max())))
    return notes


def _require_columns(table: pd.DataFrame, columns: Columns) -> None:
    needed = (*columns.scales, *columns.tuned, columns.loss)
    named = [getattr(columns, f.name) for f in fields(columns) if f.name not in ("unit", "loss_name")]
    chosen = [name for name in named if isinstance(name, str) and not isinstance(name, Usual)]
    if missing := [c for c in dict.fromkeys((*needed, *chosen)) if c and c not in table]:
        varying = [name for name in map(str, table) if not means(name) and distinct(table[name]) > 1]
        whole = [name for name in varying if table[name].dtype.kind in "iu"]
        numeric = [name for name in varying if table[name].dtype.kind == "f"]
        size, tuned = next(iter(whole), None), next(iter(numeric), None)
        hints = {
            Columns.scale: f"{given('scale', size)} names the scale",
            Columns.hyperparameter: f"{given('hyperparameter', tuned)} names the hyperparameter",
        }
        if columns.loss in missing and numeric:
            hints[columns.loss] = f"{given('loss', numeric[0])} takes it for the loss"
        hint = ", ".join(hints[column] for column in missing if column in hints)
        raise TableError(no_column(table, *missing) + (f"; {hint}" if hint else ""))
    if len(set(needed)) < len(needed):
        raise TableError(f"scale, hyperparameter and loss must be different columns, not {', '.join(needed)}")


def _require_one_kind(table: pd.DataFrame, columns: Columns, fixed: Iterable[str]) -> None:
    axes = {*columns.scales, *columns.tuned, columns.parametrization, columns.seed, *columns.along}
    for column in dict.fromkeys(fixed):
        if column not in table or column in axes:
            continue
        known = table[column]
        unique = (known.dropna().map(str) if known.dtype == object else known).unique()
        distinct = unique[pd.notna(unique)]
        if len(distinct) > 1:
            values = ", ".join(map(on_one_line, sorted(distinct)[:4]))
            follows = table[column].map(str).groupby(table[columns.scale]).nunique().max() == 1
            one = given("where", f"{column}={distinct[0]}")
            other = ""
            if follows:
                other = f"{given('along', column)} if it grows with {columns.scale} as meant, or "
            elif known.dtype.kind == "O":
                other = f"{given('parametrization', column)} to compare them, or "
            elif _TUNED.search(plain_name(column)):
                tuned = given("hyperparameter", f"{columns.hyperparameter},{column}")
                other = f"{tuned} if it is tuned too, or "
            raise TableError(
                f"table mixes several {label(column)}s (column {column!r}: {values}); give {other}{one}"
            )


# Names of columns with which runs of different scales may differ in more than the scale
_CONFOUNDING = re.compile(
    r"^d$|(^|_)(steps|iters|iterations|epochs?|tokens|batch|batch_size|bs|seq_len|sequence_length|context|commit|git|"
    r"sha|version|tokenizer|vocab|vocab_size|dataset|data|corpus|warmup|schedule)(_|$)"
)

# Names of hyperparameters that a search tunes beside the first
_TUNED = re.compile(
    r"(^|_)(wd|weight_decay|beta_?[12]|eps|dropout|momentum|init_std|init_scale|warmup|batch_size|bs)$"
)


def _other_settings(table: pd.DataFrame, runs: pd.DataFrame, columns: Columns) -> list[Reason]:
    """Return notes on rules and settings that vary inside a cell.

    Of others' tables also on lengths, batches and commits that change with the scale, or inside one.
    """
    cells, varying, confounding = [runs[name] for name in run_key(runs)[:-1]], list[Reason](), list[Reason]()
    is_ours = {"trial_id", "config"} <= set(table)
    rows = table if len(runs) == len(table) else table.loc[runs.index]
    for column in _settings(table, columns):
        kind, values, name = table[column].dtype.kind, rows[column], plain_name(column)
        if distinct(values) < 2 and not values.hasnans:
            continue
        is_tuned = kind in "iuf" and _TUNED.search(name)
        is_confounding = is_tuned or (_CONFOUNDING.search(name) and means(column) != "step")
        texts = values.map(str)
        unique = texts.unique()
        is_rule = {text.lower() for text in unique} <= {*PARAMETRIZATIONS} or kind == "b"
        is_setting = (is_rule or (column in CONFIGURED and kind not in "iu")) and len(unique) <= _MOST_RULES
        if is_setting and texts.groupby(cells).nunique().max() > 1:
            varying.append(Reason.of("varies inside cells", name=column, listed=sorted(unique)))
        known = texts[values.notna()]
        if is_ours or not is_confounding or known.nunique() < 2:
            continue
        by_scale = known.groupby(runs["scale"])
        if len(columns.scales) == 1 and by_scale.nunique().max() == 1:
            pairs = ", ".join(f"{scale:g}: {value}" for scale, value in by_scale.first().head(3).items())
            confounding.append(Reason.of("confounded", name=column, pairs=pairs))
        else:
            listed, tune = sorted(known.unique()), f"{columns.hyperparameter},{column}" if is_tuned else ""
            mixed = {"name": column, "listed": list_of(listed, 4), "first": listed[0], "tune": tune}
            confounding.append(Reason.of("mixed", **mixed))
    return [*varying, *confounding]


def _differences(table: pd.DataFrame, rows: pd.Index, columns: Columns) -> str:
    """Return settings in which rows of one cell and seed differ, each with its option; "" for none."""
    shown = []
    for column in _settings(table, columns):
        if table.loc[rows, column].map(str).nunique() < 2:
            continue
        if table[column].dtype.kind in "iuf":
            one, *others = [f"{value:g}" for value in table.loc[rows, column].unique()]
            options = (
                f"{given('where', f'{column}={one}')} holds it, {given('seed', column)} takes it for "
                f"replicates, a prediction with {given('scale', f'{columns.scale},{column}')} fits both"
            )
            shown.append(f"{column} ({', '.join([one, *others][:4])}: {options})")
        else:
            first, *others = sorted(table[column].map(str).unique())
            listed = ", ".join(map(repr, [first, *others][:4]))
            options = (
                f"{listed}: {given('parametrization', column)} compares them, "
                f"{given('where', f'{column}={first}')} takes one"
            )
            shown.append(f"{column} ({options if len(others) < _MOST_RULES else 'a name a run'})")
    return ", ".join(shown)


def _settings(table: pd.DataFrame, columns: Columns) -> list[str]:
    """Return other columns that may tell runs apart: text, whole numbers, and numbers of few values."""
    plain, lists = {*asdict(columns).values()}, (columns.along, columns.scales, columns.tuned)
    named = {name for name in plain if isinstance(name, str)}.union(*lists)
    is_ours = {"trial_id", "config"} <= set(table)
    return [
        column
        for column, kind in ((str(name), dtype.kind) for name, dtype in table.dtypes.items())
        if column not in named
        and (column in CONFIGURED if is_ours else means(column) != "loss")
        and kind not in "cmM"
        and (kind != "f" or table[column].nunique() <= _MOST_RULES or _TUNED.search(plain_name(column)))
    ]


def cost_column(table: pd.DataFrame, columns: Columns) -> tuple[str, str]:
    if columns.cost:
        return columns.cost, _COSTS.get(columns.cost, columns.cost)
    return next(((column, unit) for column, unit in _COSTS.items() if column in table), ("", ""))


def _more(rows: Sized) -> str:
    return f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
