"""Meaning of a table's columns: the named ones, else the ones with usual names.

A guess is kept as a note, which every output repeats; where two columns may be meant, it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pandas as pd

from mup_tpu.analysis.reasons import Reason
from mup_tpu.config import on_one_line
from mup_tpu.errors import TableError, given


class Usual(str):
    """Usual name of a column: where nobody has chosen it, another name of the same meaning may be meant."""


@dataclass(frozen=True)
class Columns:
    """Names of a table's columns."""

    scale: str = Usual("width")  # Scale: a size of the model or of its training, such as width
    hyperparameter: str = Usual("lr")
    """Tuned hyperparameter, plain; it is compared on a log2 axis, where 0 is a point of its own."""
    loss: str = Usual("loss")  # Result of a run, nat per token; empty or infinite where it diverged
    loss_error: str = Usual("loss_err")  # Standard error of the loss, in a table of means; optional
    seed: str = Usual("seed")  # Replicate; optional
    parametrization: str = Usual("parametrization")  # Axis that is compared; optional
    status: str = Usual("status")  # State of a run, such as finished; optional
    step: str = Usual("step")
    """Step, in a table with a row per step; the last row is the run's result. Optional."""
    params: str = Usual("params_non_embedding")  # Parameters without embeddings; optional
    tokens: str = Usual("tokens")  # Tokens a run was trained on; optional
    cost: str = ""  # Cost of a run; optional. By default wall_time_s (s), or else flops (FLOP).
    purchase: str = Usual("purchase")  # Number of the purchase, in a sequence; optional
    along: tuple[str, ...] = ()  # Other columns that change with the scale, as on a ladder
    scales_beside: tuple[str, ...] = ()  # Scales that vary beside the first, each by itself
    tuned_beside: tuple[str, ...] = ()  # Hyperparameters that are tuned together with the first
    unit: str = "nat"  # Unit of losses and regrets: nat, or the name of a metric that is in none
    is_per_token: bool = True  # Whether nat are those of a token; a study may be of images
    maximized: bool = False  # Whether the loss is the negative of a metric that is maximized
    loss_name: str = "loss"  # Name of the loss in the words of whoever trained

    def metric(self, loss: float) -> float:
        return -loss if self.maximized else loss

    @property
    def scales(self) -> tuple[str, ...]:
        return self.scale, *self.scales_beside

    @property
    def tuned(self) -> tuple[str, ...]:
        return self.hyperparameter, *self.tuned_beside


# Usual names of columns, the likeliest first; held-out losses come before training's
_USUAL = {
    "width": "width d_model dmodel n_embd n_embed model_dim hidden_size hidden_dim embed_dim embedding_dim "
    "emb_dim d_embed d_hidden dim_model model_width dim",
    "depth": "depth n_layer n_layers num_layers num_hidden_layers layers",
    "size": "params n_params num_params num_parameters n_parameters model_size size",
    "lr": "lr learning_rate max_lr lr_max peak_lr base_lr lr_base init_lr initial_lr eta peak_learning_rate "
    "max_learning_rate base_learning_rate",
    "batch size": "batch_size batch bs global_batch_size train_batch_size per_device_train_batch_size",
    "tokens": "tokens n_tokens num_tokens train_tokens training_tokens tokens_planned",
    "seed": "seed random_seed rng_seed manual_seed run_seed replicate",
    "parametrization": "parametrization parameterization parametrisation parameterisation",
    "counter": "epoch epochs_done tokens_seen seen_tokens consumed_tokens consumed_samples samples_seen "
    "steps_done",
    "step": "step global_step iteration iter training_iteration iterations steps_done",
    "loss": "loss val_loss valid_loss validation_loss loss_val eval_loss loss_eval dev_loss final_val_loss "
    "final_loss loss_final test_loss hparam_val_loss hparam_loss best_val_loss train_loss training_loss "
    "loss_train final_train_loss val_bpb eval_bpb bpb val_ppl valid_ppl eval_ppl test_ppl ppl val_perplexity "
    "eval_perplexity test_perplexity perplexity train_ppl train_perplexity",
}
_NAMES = {what: tuple(names.split()) for what, names in _USUAL.items()}

# Scales; the first that varies is taken
SIZES = ("width", "depth", "size", "batch size", "tokens")

# Prefixes that trackers give a name; Optuna's end in _
_TRACKER = re.compile(
    r"(config|params?|parameters|hparams?|hyperparameters|summary|metrics)[/.]|(params|user_attrs)_", re.I
)
_SETTING = re.compile(r"(config|params|parameters|hparams|hyperparameters)[/._]", re.I)
# Metrics that are maximized
SCORE = re.compile(
    r"(^|_)(acc|accuracy|top1|top5|psnr|ssim|score|bleu|rouge|f1|auc|map|iou|reward|return|r2|win_rate|elo)(_|$)"
)


# Names that end in one of these words, behind words that only qualify it, mean the same
_HEADS = {
    "lr": ("lr", "learning_rate", "eta", "η"),
    "loss": ("loss", "nll", "xent", "cross_entropy", "ce", "bpb", "bits", "ppl", "perplexity"),
}
_QUALIFIERS = {
    "lr": "peak max base init initial hidden matrix muon adam adamw model main optimizer optim opt global",
    "loss": "val valid validation eval evaluation dev test train training heldout holdout held out final "
    "last best min mean avg average macro micro lm hparam global",
}


def _qualified(what: str, name: str) -> bool:
    words = [word for word in name.split("_") if word not in _QUALIFIERS[what].split()]
    return "_".join(words) in _HEADS[what]


@lru_cache(4096)
def plain_name(name: object) -> str:
    """Strip case, unit and a tracker's prefix from a name: `config/dModel (features)` becomes d_model."""
    text = str(name).strip()
    while prefix := _TRACKER.match(text):
        text = text[prefix.end() :]
    text = re.sub(r"(?<=\w)(\s*[(\[][^()\[\]]*[)\]]|\s+[x×*·]\s*[0-9]\S*)$", "", text)
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    return re.sub(r"\W+", "_", text).strip("_").lower()


def short_name(name: str) -> str:
    # For figures: `config/optim.lr` and `params_lr` become lr.
    last = re.sub(r"^(?:[\w -]+[/.])+(?=[A-Za-z_])", "", name.strip())
    name_alone = last.removeprefix("params_")
    return name_alone if any(name_alone in names for names in _NAMES.values()) else last


def means(name: object) -> str:
    """Return the meaning of a column's name: width, depth, size, lr, seed, loss …, or ""."""
    last, whole = plain_name(short_name(str(name))), plain_name(name)
    for what, names in _NAMES.items():
        is_alike = what in _HEADS and (_qualified(what, whole) or (last != "loss" and _qualified(what, last)))
        if is_alike or whole in names or (last in names and last != "loss"):
            # A setting that is called loss is the name of a function or its weight.
            return "" if what == "loss" and _SETTING.match(str(name).strip()) else what
    return ""


def _spelt(table: pd.DataFrame, name: str) -> str:
    """Return a chosen column as the table spells it: lr is learning_rate, wd is params_wd or config/wd."""
    alike = [str(column) for column in table if means(column) == means(name) != ""]
    alike = [c for c in map(str, table) if re.split(r"[/.]|^params_", c)[-1] == name] or alike
    return alike[0] if name not in table and len(alike) == 1 else name


def find_columns(table: pd.DataFrame, columns: Columns, notes: list[Reason]) -> tuple[pd.DataFrame, Columns]:
    """Guess the columns that were not named; return the table and all names."""
    defaults, earlier = Columns(), len(notes)
    names: dict[str, Any] = {"tuned_beside": tuple(_spelt(table, name) for name in columns.tuned_beside)}
    for part in ("hyperparameter", "scale", "loss", "seed", "parametrization"):
        if not isinstance(named := getattr(columns, part), Usual):
            names[part] = _spelt(table, named)
            continue
        find = {"hyperparameter": _find_rate, "scale": find_scale}.get(part)
        column = find(table, notes) if find else _find(table, part, getattr(defaults, part), notes)
        if column is None and part == "loss":
            scores = [str(name) for name in table if SCORE.search(plain_name(name))]
            if {"number", "value", "state"} <= set(table):  # Optuna's trials
                scores = ["value"]
            paths = [c for c in map(str, table) if _qualified("loss", plain_name(c.rpartition("/")[2]))]
            column = next((alike[0] for alike in (paths, scores) if len(alike) == 1), None)
        names |= {} if column is None else {part: column}
    if (
        isinstance(columns.step, Usual)
        and columns.step not in table
        and (step := _find(table, "step", "step", notes))
    ):
        keys = [key for key in names.values() if key in table and means(key) != "loss"]
        if keys and table[keys].astype(str).duplicated().any():
            names["step"] = step
    if isinstance(columns.params, Usual) and columns.params not in table:
        sizes = [c for c in table if means(c) == "size" and c not in names.values()]
        names |= {"params": str(sizes[0])} if len(sizes) == 1 else {}
    if "scale" not in names and columns.scale not in table and "hyperparameter" in names:
        used = {*names.values(), *columns.along}
        varying = [c for c in table if distinct(table[c]) > 1 and c not in used and not means(c)]
        with_digits = (c for c in varying if table[c].astype(str).str.contains("[0-9]").all())
        if all(distinct(table[name]) == len(table) for name in with_digits):  # no other column may be a size
            table, columns = table.assign(size=1.0), replace(columns, scale="size")
            notes.append(Reason.of("one size"))
    guessed = {
        part: column
        for part, column in names.items()
        if part != "tuned_beside" and column != getattr(columns, part)
    }
    # A column with the usual name that was passed over may vary: a logged learning rate, say.
    passed_over = [
        getattr(defaults, part)
        for part in ("scale", "hyperparameter")
        if part in guessed or means(getattr(columns, part)) == means(getattr(defaults, part))
    ]
    if guessed:
        meanings = {on_one_line(column): _called(part, column) for part, column in guessed.items()}
        notes.insert(earlier, Reason.of("columns guessed", meanings=meanings, fields=[*guessed]))
    return table, replace(columns, **names, along=(*columns.along, *passed_over))


def _called(part: str, column: str) -> str:
    what = means(column) if part in ("scale", "hyperparameter") else part
    return {"lr": "learning rate", "size": "number of parameters", "params": "parameters"}.get(what, what)


def find_scale(table: pd.DataFrame, notes: list[Reason]) -> str | None:
    first = None
    for what in SIZES:
        if what == "batch size":  # from here on, a size of the model that has another name may be meant
            if {"N", "D"} & set(table):  # as papers on scaling laws write parameters and tokens
                named = [name for name in ("N", "D") if name in table]
                return next((name for name in named if distinct(table[name]) > 1), named[0])
            whole = (c for c in table if not means(c) and table[c].dtype.kind in "iu")
            if any(distinct(table[c]) > 1 for c in whole):
                break
        column = _find(table, "scale", what, notes)
        if column is not None and distinct(table[column]) > 1:
            return column
        first = first or column
    return first


def _find(table: pd.DataFrame, part: str, what: str, notes: list[Reason]) -> str | None:
    """Return the likeliest column of this meaning; columns that vary come first."""
    ranked = sorted((rank, i) for i, name in enumerate(table) if (rank := _rank(name, what)) is not None)
    candidates = [(rank, table.columns[i]) for rank, i in ranked if not table.iloc[:, i].isna().all()]
    if not candidates:
        return None
    if part == "scale":
        candidates = [(rank, name) for rank, name in candidates if distinct(table[name]) > 1] or candidates
        # A column with a different value in every run was logged, not set.
        values = {name: distinct(table[name]) for _, name in candidates}
        candidates.sort(key=lambda ranked: values[ranked[1]] > 2 * min(values.values()))
    (first, column), others = candidates[0], candidates[1:]

    def is_same(name: str) -> bool:
        if part == "scale":  # it may be counted in two units
            pairs = table[[column, name]].astype(str)
            return bool(pairs[column].nunique() == pairs[name].nunique() == len(pairs.drop_duplicates()))
        away = (rough_numbers(table[column]) - rough_numbers(table[name])).abs()
        return bool((away.dropna() <= 1e-9).all())

    differ = [(rank, name) for rank, name in others if not is_same(name)]
    if part in ("scale", "loss"):
        same = [name for rank, name in differ if part != "loss" and rank[0] == first[0] or rank == first]
        called = _called(part, str(column))
        if same and first[0] != _EXACT:
            both = " and ".join(map(on_one_line, [column, same[0]]))
            raise TableError(f"columns {both} may both be the {called}: give {given(part, column)}")
        if differ:
            rest = [name for _, name in differ]
            notes.append(Reason.of("column chosen", meaning=called, name=column, others=rest, field=part))
    return str(column)


def _find_rate(table: pd.DataFrame, notes: list[Reason]) -> str | None:
    # Trackers also log the schedule's value, which may end at a tenth of the rate that was set. A configured
    # column is preferred to others, and a peak to its schedule; copies of one column do not matter.
    ranks = {str(c): rank for c in table if (rank := _rank(c, "lr")) and not table[c].isna().all()}
    values = {name: distinct(table[name]) for name in ranks}
    names = [name for name in ranks if values[name] > 1] or [*ranks]
    # A column with a different value in every run was logged, not set.
    names = [name for name in names if values[name] <= 2 * min(values[other] for other in names)]
    configured = [name for name in names if ranks[name][0] == _CONFIGURED]
    set_, logged = [n for n in names if not _LOGGED.search(n)], [n for n in names if _LOGGED.search(n)]
    names = sorted(configured or set_ or logged, key=lambda name: ranks[name])
    if not names:
        return None
    rates = {name: rough_numbers(table[name]) for name in names}
    peaks = [name for name in names if _PEAK.search(plain_name(name))]
    best = (peaks or sorted(names, key=lambda name: -round(float(rates[name].sum()), 12)))[0]
    rivals = []
    for name in names:
        # A schedule's value is at most the peak, and without one a fixed share of what was set.
        share = (rates[name] / rates[best]).dropna()
        is_fixed = share.max() - share.min() < ROUNDING * share.max()
        if name != best and not (share.max() < 1 + ROUNDING and (peaks or is_fixed)):
            rivals.append(name)
    rivals += [name for name in peaks if not _is_copy(table, name, best)]
    if rivals:
        pair = [str(name) for name in table if name in (best, rivals[0])]
        raise TableError(
            f"columns {' and '.join(map(on_one_line, pair))} may both be the learning rate "
            f"({rows_of_both(*(rates[name] for name in pair))}): give {given('hyperparameter', pair[0])}"
        )
    others = [n for n in ranks if n != best and not _is_copy(table, n, best)]
    if others:
        chosen = {"meaning": "learning rate", "name": best, "others": others}
        notes.append(Reason.of("column chosen", **chosen, field="hyperparameter"))
    return best


def rough_numbers(column: pd.Series) -> pd.Series:
    # To compare columns: nan where there is other text, and commas are decimal
    if column.dtype.kind in "iuf":
        return column.astype(float)
    return pd.to_numeric(column.astype(str).str.replace(",", "."), errors="coerce")


def _is_copy(table: pd.DataFrame, one: str, other: str) -> bool:
    ratio = rough_numbers(table[one]) / rough_numbers(table[other])
    return bool((ratio.dropna() - 1).abs().max() < ROUNDING)


def rows_of_both(one: pd.Series, other: pd.Series) -> str:
    pairs = pd.DataFrame({"one": one, "other": other}).dropna().drop_duplicates().head(3)
    return ", ".join(f"row {row}: {a:g} and {b:g}" for row, a, b in pairs.itertuples())


ROUNDING = 0.05  # relative difference of two rates that names and tables round: 9.8e-04 is 2^-10
# Names of what was logged during a run
_LOGGED = re.compile(
    r"^(train|val|eval|test|metrics?|summary|optimizer|trainer)[/.]|(^|[/._])(current|last)_"
)
_PEAK = re.compile(r"(^|_)(max|peak)(_|$)")

# Ranks of a name: in a run's configuration, the name itself, one like it
_CONFIGURED, _EXACT, _LIKE = 0, 1, 2


def _rank(name: object, what: str) -> tuple[int, int] | None:
    """Return the rank of a column of this name for a meaning, the likeliest first; None for another."""
    if means(name) != what:
        return None
    names = _NAMES[what]
    last, whole = plain_name(short_name(str(name))), plain_name(name)
    listed = [names.index(one) for one in (whole, last) if one in names]
    place = listed[0] if listed else len(names) + last.count("_") + (last.startswith("train") * 9)
    place = 2 * place + str(name).rstrip().endswith((")", "]"))  # Comet's val_loss [max] is another
    if what == "loss":
        return _LIKE if name != what else _EXACT, place
    if is_configured(name):
        return _CONFIGURED, place
    return _EXACT if name == what else _LIKE, place


def is_configured(name: object) -> bool:
    """Return whether a column is of a run's configuration, by a tracker's prefix."""
    prefix = _TRACKER.match(str(name).strip())
    return prefix is not None and (prefix[1] or prefix[2]).lower() not in ("summary", "metrics")


def distinct(column: pd.Series) -> int:
    """Return the number of values; cells that have no hash, such as lists, are compared as text."""
    try:
        return int(column.nunique())
    except TypeError:
        return int(column.astype(str).nunique())


def list_of(names: Iterable[object], most: int = 6) -> str:
    shown = [on_one_line(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
