"""Values of others' tables: numbers as text, states of trackers, what a loss means, and errors of means.

A value that can be read in two ways is an error, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from mup_tpu.analysis.ingest.table_columns import (
    SCORE,
    SIZES,
    Columns,
    list_of,
    means,
    plain_name,
    rough_numbers,
)
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import DIVERGED, FINISHED, STOPPED, UNFINISHED
from mup_tpu.config import require_above_zero, shown
from mup_tpu.config.values import require_one_of
from mup_tpu.errors import TableError, given
from mup_tpu.store import Condition

# States of Weights & Biases, MLflow, Ray Tune, Optuna, Slurm and this package, by their meaning
_KNOWN = {
    FINISHED: "finished complete completed done success succeeded terminated",
    DIVERGED: "diverged",
    STOPPED: "stopped pruned early-stopped",
    UNFINISHED: "running pending queued scheduled waiting starting paused timeout timed-out failed fail "
    "failure error errored crashed killed cancelled canceled aborted interrupted preempted preempting "
    "out-of-memory oom node-fail",
}


@dataclass(frozen=True)
class States:
    """Meanings of a table's states, beside the known ones or in their place; case does not matter."""

    finished: tuple[str, ...] = ()
    diverged: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()  # States of runs that are left out: they say nothing of their trial

    def __post_init__(self) -> None:
        given = [_state(state) for f in fields(self) for state in getattr(self, f.name)]
        if twice := next((state for state in given if given.count(state) > 1), None):
            raise TableError(f"state {twice!r} was given two meanings: give it one")


def meanings(column: pd.Series, states: States) -> pd.Series:
    """Return the meaning of each run's state: finished, diverged, stopped or unfinished."""
    texts = column.astype(object).where(column.notna(), "empty").map(str)
    named = texts.map({text: _state(text) for text in texts.unique()})
    meaning = {_state(word): kind for kind, words in _KNOWN.items() for word in words.split()}
    counts = named.value_counts()
    for f in fields(states):
        for state in getattr(states, f.name):
            if _state(state) not in counts:
                raise TableError(
                    f"no row has the {column.name} {state!r} that was given as {f.name}; "
                    f"there are {list_of(map(repr, counts.index), 8)}"
                )
            meaning[_state(state)] = f.name
    unknown = [f"{state!r} ({count} rows)" for state, count in counts.items() if state not in meaning]
    if unknown:
        first = next(state for state in counts.index if state not in meaning)
        raise TableError(
            f"{column.name} has states that are not known: {list_of(unknown, 8)}; give "
            f"{given('states', f'{first}=unfinished')} (left out), or =finished or =diverged"
        )
    return named.map(meaning)


def state_of(value: object) -> str:
    """Return the meaning of a word such as OOM, or of one behind a number: `3.4 (crashed)`; "" for others."""
    remark = _REMARK.fullmatch(str(value).strip())
    state = _state(remark["words"] if remark else value)
    words = ((kind, word) for kind, of_kind in _KNOWN.items() for word in of_kind.split())
    is_longer = state.startswith  # "killed at step 300", but not "terminated early"
    return next((k for k, w in words if state == w or (k != FINISHED and is_longer(f"{w}-"))), "")


def _state(value: object) -> str:
    return re.sub(r"[\s_-]+", "-", str(value).strip().lower())


def numbers(column: pd.Series, name: str, hint: str = "", table: pd.DataFrame | None = None) -> pd.Series:
    """Read a column as floats, nan if empty; `hint` ends the error on a value that is no number.

    Commas are decimal where the whole column has them, or where another column of text has.
    """
    if column.dtype.kind in "iuf":
        return column.astype("float64")
    if pd.api.types.is_numeric_dtype(column.dtype) and column.dtype.kind not in "bc":  # nullable types
        return column.astype("Float64").astype("float64") if column.hasnans else column.astype("float64")
    cells = [*zip(column.index, column.astype(object).tolist(), strict=True)]
    read = [_read(value) for _, value in cells]
    if wrong := [cell for cell, number in zip(cells, read, strict=True) if number is None]:
        raise TableError(f"{name} must be numbers, but {_rows(wrong)}{hint}")
    plain = [number for number in read if number is not None]
    kinds: dict[str, tuple[Any, Any]] = {}  # the first cell of each kind
    for cell, (text, kind) in zip(cells, plain, strict=True):
        kinds.setdefault(kind, cell)
        if text not in ("nan", "inf", "-inf"):
            kinds.setdefault("percent" if str(cell[1]).strip().endswith("%") else "no percent", cell)
    for one, others, what in (
        ("comma", ("point", "grouped"), "decimal commas and points"),
        ("percent", ("no percent",), "percent and plain numbers"),
    ):
        if one in kinds and any(other in kinds for other in others):
            mixed = [kinds[kind] for kind in (one, *others) if kind in kinds]
            raise TableError(f"{name} mixes {what}: {_rows(mixed)}")
    with_comma = "comma" in kinds
    if "either" in kinds and not with_comma and "grouped" not in kinds:
        with_comma = table is not None and any(map(has_decimal_commas, map(table.get, table)))
        if not with_comma:
            row, value = kinds["either"]
            one, other = value.replace(",", "."), value.replace(",", "")
            raise TableError(
                f"{name} of row {row} is {value!r}, which may be {one} or {other}: write it with a point"
            )
    decimal = {"comma", "either"} if with_comma else {"comma"}
    written = [
        text.replace(".", "").replace(",", ".") if kind in decimal else text.replace(",", "")
        for text, kind in plain
    ]
    return pd.Series(list(map(float, written)), column.index, dtype="float64")


def has_decimal_commas(column: pd.Series | None) -> bool:
    if column is None or column.dtype.kind in "iufb":
        return False
    read = [_read(text) for text in column.dropna().unique() if isinstance(text, str)]
    return None not in read and "comma" in {kind for _, kind in filter(None, read)}


_UNIT = re.compile(r"(?:[(\[]\s*[x×*·]?|\s[x×*·]\s*(?=[0-9]))\s*(?P<unit>[^()\[\]\s]+)\s*[)\]]?$")
_LOG = re.compile(
    r"(?:log|ln)(?P<base>2|10|e)?_?(?P<of>[a-z_]+)|(?P<of2>[a-z_]+?)_(?:log|ln)(?P<base2>2|10|e)?"
)
_RATES = (1e-8, 20.0)  # learning rates outside are in another unit
_WORDS_OF_SIZES = {"thousands": "k", "million": "m", "millions": "m", "billion": "b", "billions": "b"}


def plain_units(table: pd.DataFrame, notes: list[Reason]) -> pd.DataFrame:
    """Apply the unit or logarithm in a heading: `LR (x1e-4)`, `params (M)` and `log10(lr)` become plain.

    Raises:
        TableError: a learning rate has a unit or a logarithm that is not known.
    """
    for name in map(str, table):
        whole = re.sub(r"\W+", "_", name.strip()).strip("_").lower()
        log = _LOG.fullmatch(whole)
        of = plain_name(log["of"] or log["of2"]) if log else ""
        if log and means(of) in ("lr", *SIZES) and of not in table:
            base = log["base"] or log["base2"] or ("e" if "ln" in whole else "")
            if not base:
                raise TableError(
                    f"{name} has a logarithm of an unknown base: call it log2_{of}, log10_{of} or ln_{of}"
                )
            exponents = numbers(table[name], name, table=table) * (-1 if name.strip()[0] in "-−" else 1)
            if (exponents.abs() <= 60).all():
                table = table.assign(**{of: (math.e if base == "e" else float(base)) ** exponents})
                notes.append(Reason.of("plain from a logarithm", of=of, base=base, name=name))
            continue
        unit, what = _UNIT.search(name.strip()), means(_UNIT.sub("", name.strip()))
        if unit is None or what not in ("lr", *SIZES):
            continue
        text = _WORDS_OF_SIZES.get(unit["unit"].lower(), unit["unit"])
        number = _read(text)
        factor = float(number[0]) if number else _PREFIXES.get(text.lower()) if what != "lr" else None
        if factor is None and what == "lr" and re.search("[0-9]", text):
            raise TableError(f"{name} has a unit that is not known, {text!r}: write plain learning rates")
        if factor is None or not math.isfinite(factor):
            continue
        values = numbers(table[name], name, table=table)
        if what == "lr":
            # Rates that were multiplied by the factor are divided by it.
            middle = float(values[values > 0].median())
            fits = [f for f in (factor, 1 / factor) if _RATES[0] <= middle * f <= _RATES[1]]
            if len(fits) != 1 and not (fits and factor < 1):
                raise TableError(
                    f"{name} may be in units of {text} or multiplied by it: write plain learning rates"
                )
            factor = fits[0]
        table = table.assign(**{name: values * factor})
        notes.append(Reason.of("unit in a heading", name=name, factor=factor))
    return table


def filled_down(sizes: pd.Series) -> pd.Series:
    """Fill the cells below the first one of a block, which spreadsheets merge."""
    known = sizes.dropna()
    is_merged = 1 < len(known) < len(sizes) and known.is_unique and sizes.notna().iloc[0]
    return sizes.ffill() if is_merged else sizes


_STATISTIC = re.compile(
    r"(mean|avg|average|std|stdev|stddev|sd|sem|stderr|median|min|max|sum|total|all|overall)\.?", re.I
)


def without_summaries(table: pd.DataFrame, names: Iterable[str], notes: list[Reason]) -> pd.DataFrame:
    """Leave out rows that summarise others, whose seed, scale or rate is a word such as mean."""
    for name in names:
        if name not in table or table[name].dtype.kind in "iufb":
            continue
        texts = table[name].astype(str).str.strip()
        is_summary = texts.map(lambda text: bool(_STATISTIC.fullmatch(str(text))))
        if is_summary.any() and not is_summary.all():
            left = table[~is_summary].infer_objects()
            numeric = pd.to_numeric(left[name], errors="coerce")
            left = left.assign(**{name: numeric}) if numeric.notna().all() else left
            words = sorted(set(texts[is_summary]))
            notes.append(Reason.of("summaries left out", name=name, words=words, count=int(is_summary.sum())))
            return left
    return table


def plain_sizes(column: pd.Series) -> pd.Series:
    """Write sizes as plain numbers: 15M, 1_3b, d512 and `256 (1.6M)` become 15e6, 1.3e9, 512 and 256."""
    if column.dtype.kind in "iufb":
        return column
    texts = column.astype(object).where(column.notna(), "")
    plain = {text: plain_size(text) for text in texts.unique() if isinstance(text, str)}
    return texts.map(lambda text: plain.get(text, text))


def plain_size(text: str) -> str:
    text = re.sub(r"\s*\([^()]*\)$", "", text.strip().lstrip("~≈ "))
    if match := SIZE.fullmatch(text):
        return repr(float(match["number"].replace("_", ".")) * _PREFIXES[match["prefix"].lower()])
    if _GROUPED.fullmatch(text):  # a size is whole
        return text.replace(",", "")
    named = re.fullmatch(r"[a-zA-Z_]{1,8}[-_= ]?([0-9]+)", text)
    return named[1] if named else text


SIZE = re.compile(r"(?P<number>[0-9]+([._][0-9]+)?)\s*(?P<prefix>[kmbgt])", re.IGNORECASE)
_PREFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _read(value: object) -> tuple[str, str] | None:
    """Return a number as it is written, and its kind; None for anything else.

    Kinds are "plain" (1234), "point" (1.5), "grouped" (1,234.5), "comma" (1.234,5), and "either" of these
    (1,234).
    """
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | float | Decimal | np.integer | np.floating):
        try:
            number = float(value)
        except OverflowError:
            return None
        return repr(number), "point" if math.isfinite(number) and number % 1 else "plain"
    if not isinstance(value, str):
        return ("nan", "plain") if value is None or value is pd.NA or value is pd.NaT else None
    text = value.strip().replace("\N{MINUS SIGN}", "-").strip("$").replace("\\times", "×")
    text = _BEST.sub("", text)
    if remark := _REMARK.fullmatch(text):
        if (state := state_of(text)) == DIVERGED:
            return "inf", "plain"
        text = remark["number"] if state == FINISHED else text
    text = re.split(r"\s*(?:->|→)\s*", text)[0]  # the first value of a schedule
    if fraction := re.fullmatch(r"([0-9.]+)/([0-9]+)", text):
        return repr(float(fraction[1]) / float(fraction[2])), "plain"
    if text.lower() in _EMPTY:
        return "nan", "plain"
    if _INFINITE.fullmatch(text):
        return ("-inf" if text.startswith("-") else "inf"), "plain"
    text = _RAISED.sub(lambda raised: f"^{raised[0].translate(_DIGITS)}", text.lstrip("~≈ "))
    text = _MARKS.sub("", text)  # footnotes, and the x of 0.7x
    if percent := text.endswith("%"):
        text = text[:-1].rstrip()
    if power := _POWER.fullmatch(text):
        return repr(float(power["factor"] or 1) * float(power["base"]) ** float(power["exponent"])), "plain"
    if _SPACED.fullmatch(text):
        text = re.sub(r"[ '\u00a0\u202f]", "", text)
    share = "e-2" if percent else ""
    if percent and "e" in text.lower():
        return None
    if _PLAIN.fullmatch(text):
        return text + share, "point" if "." in text else "plain"
    if _GROUPED.fullmatch(text):
        return text + share, "grouped" if "." in text or text.count(",") > 1 else "either"
    return (text + share, "comma") if _COMMA.fullmatch(text) else None


# What qualifies a number and changes nothing, such as its unit
_BEST = re.compile(
    r"\s*\((best|optimal|optimum|chosen|selected|default|ours|peak|max|base|final|last)\)$|(?<=nan)\s*\(.*\)$"
    r"|(?<=[0-9])\s*nats?([ /](per )?tok(en)?)?$",
    re.I,
)
# A number with words behind it: 3.4 (crashed), 3.4 [killed at step 300], 3.4 - diverged
_REMARK = re.compile(
    r"(?P<number>.*[0-9.])\s*(?:[(\[]\s*|\s[-–—:]\s|[,;]\s*)(?P<words>[a-zA-Z][^()\[\]]*)[)\]]?"
)
_EMPTY = {"", "nan", "none", "null", "na", "n/a", "<na>", "-", "–", "—"}
_INFINITE = re.compile(r"[+-]?(inf(inity)?|∞)|div(\.|erged|erges)?|[>≥]=?\s*[0-9.]+", re.IGNORECASE)
_RAISED, _DIGITS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_MARKS = re.compile(r"(?<=[0-9.])\s*[*†‡§x×]+$")
_POWER = re.compile(
    r"(?:(?P<factor>[0-9]+(\.[0-9]+)?)\s*[·×x*]\s*)?(?P<base>2|10)(?:\^|\*\*)[{(]?(?P<exponent>[+-]?[0-9]{1,2}(\.[0-9]+)?)[)}]?"
)
_PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SPACED = re.compile(r"[+-]?[1-9][0-9]{0,2}([ '\u00a0\u202f][0-9]{3})+([.,][0-9]*)?")
_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?")
_COMMA = re.compile(
    r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?|[+-]?[1-9][0-9]{0,2}((\.[0-9]{3})+,[0-9]*|(\.[0-9]{3}){2,})"
)


def _rows(wrong: list[tuple[Any, Any]]) -> str:
    more = f", and {len(wrong) - 3} more rows" if len(wrong) > 3 else ""
    return ", ".join(f"row {row} has {shown(value)}" for row, value in wrong[:3]) + more


UnitName = Literal["auto", "nat", "bit", "bpb"]
_WORDS = {"nat": "nat per token", "bit": "bits per token", "bpb": "bits per byte"}
_PERPLEXITY = re.compile(r"(^|_)(ppl|perplexity)(_|$)")
_CROSS_ENTROPY = re.compile(r"(^|_)(loss|ce|xent|nll|cross_entropy|nats?)(_|$)")
# Unit of a loss -> pattern of its column's name, in the order of trying
_UNITS = {
    "perplexity": _PERPLEXITY,
    "score": SCORE,
    "bpb": re.compile(r"(^|_)(bpb|bits_per_byte)(_|$)"),
    "bit": re.compile(r"(^|_)(bpt|bits|bits_per_token)(_|$)"),
}


def is_cross_entropy(name: str) -> bool:
    return means(name) == "loss" or bool(_CROSS_ENTROPY.search(plain_name(name)))


@dataclass(frozen=True)
class LossUnit:
    """Unit of a table's loss."""

    name: UnitName = "auto"
    """"auto" takes it from the column's name: perplexity, bits per byte (bpb), bits per token, else nat."""
    bytes_per_token: float | None = None  # Bytes of text in a token, for nat per token from bits per byte
    maximize: bool = False  # Whether higher is better, as for accuracy and PSNR

    def __post_init__(self) -> None:
        require_one_of("loss_unit", self.name, get_args(UnitName))
        if self.bytes_per_token is not None:
            require_above_zero("bytes_per_token", self.bytes_per_token)

    def convert(self, rows: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, Columns, Reason | None]:
        """Convert losses and errors to nat per token, or a score to a loss; return columns and a note."""
        column, unit = columns.loss, str(self.name)
        if unit == "auto":
            bits = re.search(r"[(\[]\s*bits?\s*(?:(?:/|per)\s*(?P<per>tok|byte|char)\w*)?\s*[)\]]", column)
            named = [unit for unit, pattern in _UNITS.items() if pattern.search(plain_name(column))]
            of_bits = "bit" if bits and bits["per"] in (None, "tok") else "bpb"
            unit = named[0] if named else of_bits if bits else "nat"
        if self.bytes_per_token is not None and unit != "bpb":
            raise TableError(
                f"{given('bytes_per_token', self.bytes_per_token)} is for a loss in bits per byte; give "
                f"{given('unit', 'bpb')} if {column} is one"
            )
        if self.maximize:
            if unit != "score" and is_cross_entropy(column):
                raise TableError(f"{column} is a loss, so lower is better: leave out {given('maximize')}")
            columns = replace(columns, unit=column, loss_name=column, maximized=True)
            return rows.assign(loss=-rows["loss"]), columns, Reason.of("maximized", name=column)
        if unit == "nat":
            if self.name == "nat" or is_cross_entropy(column):
                is_named = columns.loss_name != Columns.loss_name
                return rows, columns if is_named else replace(columns, loss_name=str(column)), None
            unknown = Reason.of("unit unknown", name=column)
            return rows, replace(columns, unit=column, loss_name=column), unknown
        if unit == "score":
            raise TableError(
                f"{column} is a score, so higher is better: give {given('maximize', True)}, or "
                f"{given('unit', 'nat')} if it is a loss"
            )
        if unit == "perplexity":
            if (bad := rows.index[~(rows["loss"].isna() | (rows["loss"] > 0))]).size:
                first = rows["loss"][bad[0]]
                raise TableError(f"perplexity {column} must be above 0, but row {bad[0]} has {first:g}")
            nat = rows.assign(loss=np.log(rows["loss"]), loss_error=rows["loss_error"] / rows["loss"])
            columns = replace(columns, loss_name=f"ln {column}")
            return nat, columns, Reason.of("perplexity converted", name=column)
        factor = math.log(2)
        if unit == "bpb":
            if self.bytes_per_token is None:
                columns = replace(columns, unit="bpb", loss_name=column)
                return rows, columns, Reason.of("bits per byte", name=column)
            factor *= self.bytes_per_token
        nat = rows.assign(loss=rows["loss"] * factor, loss_error=rows["loss_error"] * factor)
        columns = replace(columns, loss_name=f"{column} × {factor:.3g}")
        return nat, columns, Reason.of("loss converted", name=column, unit=_WORDS[unit], factor=factor)


@dataclass(frozen=True)
class Reading:
    """How a table is read: names of its columns, rows to take, and meaning of their values."""

    columns: Columns | None = None
    """Names of its columns; None takes those of a results folder's axes, and the usual names of a table."""
    where: Sequence[Condition] | None = None
    """Conditions on rows; None takes those that a results folder stores."""
    only: Sequence[Condition] = ()
    """Conditions that an optimum has to meet: runs that fail one count as lost, not as missing."""
    chance: float | None = None
    """Loss of guessing, in the unit of the losses; runs at or above it count as diverged."""
    states: States = States()  # Meaning of states of runs that are not known
    unit: LossUnit = LossUnit()  # Unit of the loss in a table; our networks' results are in nat per token
    name: str = ""  # Name of the table in titles; "" takes that of its file
    best_over: Sequence[str] = ()
    """Further columns that are tuned too: at each size and value the best run over them is taken."""

    def __post_init__(self) -> None:
        if self.chance is not None:
            require_above_zero("chance", self.chance)


_WITH_ERROR = re.compile(r"\s*([^\s(]+)\s*(?:±|\+/-|\+-|\()\s*([^\s)a-zA-Z][^\s)]*)\s*\)?")


def unit_by_perplexity(table: pd.DataFrame, column: str, unit: LossUnit) -> LossUnit:
    """Return bits for a loss that is log2 of the perplexity beside it, as fairseq writes it."""
    if unit.name != "auto" or column not in table or _PERPLEXITY.search(plain_name(column)):
        return unit
    for name in table:
        if _PERPLEXITY.search(plain_name(name)):
            ratio = rough_numbers(table[column]) / np.log2(rough_numbers(table[name]))
            if ((ratio - 1).abs() < 0.01).sum() > 0.5 * len(table):
                return replace(unit, name="bit")
    return unit


_ERROR = "err error se sem stderr std_err std_error standard_error"
_DEVIATION = "std stdev stddev sd std_dev standard_deviation"
_COUNT = "n_seeds num_seeds n_runs num_runs n_repeats replicates n_replicates"


def with_errors(table: pd.DataFrame, columns: Columns, notes: list[Reason]) -> tuple[pd.DataFrame, Columns]:
    """Find the standard error of losses; return the table and its columns.

    A standard deviation needs the number of runs, in a column beside it.
    """
    loss, error = columns.loss, columns.loss_error
    if loss not in table or error in table:
        return table, columns
    cells, parts = table[loss], {}
    if cells.dtype.kind not in "iufb":
        texts = [(row, cell) for row, cell in cells.items() if isinstance(cell, str)]
        parts = {row: m for row, cell in texts if (m := _WITH_ERROR.fullmatch(cell))}
    if parts:
        errors = pd.Series({row: m[2] for row, m in parts.items()}, dtype=object).reindex(table.index)
        means = pd.Series({row: m[1] for row, m in parts.items()}, dtype=object)
        notes.append(Reason.of("errors behind ±", name=loss))
        return table.assign(**{loss: means.reindex(table.index).fillna(cells), error: errors}), columns
    if named := _column(table, loss, _ERROR):
        notes.append(Reason.of("errors in a column", name=named, loss=loss))
        return table, replace(columns, loss_error=named)
    if (deviation := _column(table, loss, _DEVIATION)) is None:
        return table, columns
    if (count := _column(table, loss, _COUNT)) is None:
        notes.append(Reason.of("deviation without a count", name=deviation))
        return table, columns
    notes.append(Reason.of("errors from deviations", name=deviation, loss=loss, count=count))
    values = numbers(table[deviation], deviation) / np.sqrt(numbers(table[count], count))
    return table.assign(**{error: values}), columns


def _column(table: pd.DataFrame, loss: str, endings: str) -> str | None:
    names = {plain_name(name): str(name) for name in table}
    stems = (f"{plain_name(loss)}_", "loss_", "val_loss_", "")
    likely = (s + e for s in stems for e in endings.split())
    return next((names[name] for name in likely if name in names), None)
