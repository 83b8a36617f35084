"""Names and numbers on a line of a log: `val loss 2.68`, `'eval_loss': 2.91`, `step:10/200`, a table's row.

What a name means follows from its words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _ranks(*groups: str) -> dict[str, int]:
    return {word: rank for rank, group in enumerate(groups) for word in group.split()}


# The loss of the first split is taken.
SPLITS = {
    "val": _words("val valid validate validation eval evaluate evaluating evaluation dev heldout holdout"),
    "test": _words("test testing"),
    "train": _words("train training trn"),
}
_SPLIT_WORDS = frozenset().union(*SPLITS.values())
_AVERAGES = _words("avg average mean running smooth smoothed ema macro micro step")
FILLERS = _AVERAGES | _words(  # They make no other loss of a loss.
    "after are at by current dataset epoch final for in info initial is last metric metrics now of on per "
    "reached result results score set the token value was with"
)
_OLD = _words("best min minimum lowest from improved improvement previous prev old decreased")
_NO_LOSS = _OLD | _words(
    "acc accuracy aux auxiliary balance balancing coef coeff delta diff every expected freq frequency grad "
    "imbalance interval limit lr max mem memory norm patience percent perplexity ppl py rate ratio router "
    "samples scale scaler std stderr target threshold time tol var weight weights z zloss"
)
_TOKENS = _words("nonpadding nontarget target")
_MEASURES = _ranks("", "ce nll xent entropy", "bpb bpc bits", "mse rmse mae cost")
STEPS = _ranks("step", "iter iteration itr it update updates steps", "batch")
_NO_STEP = _words(
    "acc accum accumulation decay every gradient inner interval log micro mini number per save skipped time "
    "warmup"
)
_LENGTHS = _words("steps iters iterations"), _words("total max num n optimization")
_OTHER_RATES = _words("base min final end decay warmup")

_DIGITS = r"[+-]?(?:\d{1,3}(?:,\d{3})+(?![\d.,])|\d+(?:[.,]\d+)?|\.\d+)(?:[eE][+-]?\d+)?(?![.,]?\d)"
NUMBER = re.compile(rf"(?<![\w.,])(?:[+-]?(?:nan|inf|infinity)(?!\w)|{_DIGITS})", re.I)
UNIT = re.compile(r"\s?%|[A-Za-z_µ]\w*(?:/s\b)?|\.(?=[^\s.])|\s*(?:-+>|=+>|→)")
_OF = re.compile(r"(?:it)?\s*/\s*(\d[\d,]*)(?:it\b)?(?![\w.]*/)")  # the second half of "10/200"
_COUNTED = re.compile(r"\s+(?:steps?|iter\w*|epochs?|batch(?:es)?|updates|tokens)\b(?!\s*[\d/])", re.I)
# "loss 100 2.3", "loss[100] = 2.3"
_INDEX = re.compile(r"(?::\s*|\s+|\]\s*[:=]\s*)[+-]?(?:\d|nan|inf)", re.I)
_SECTION = re.compile(r"([\w/.-]+)[\"']?\s*:\s*\{")  # of nested JSON
_DATE, _TIME = r"\d{2,4}([-/])\d{2}\1\d{2,4}[T ]?", r"(?:\d+:)?\d{1,2}:\d{2}(?:[.,]\d+)?Z?(?![\w:])"
_DAY = r"\d{2}[-/]\d{2}[T ](?=\d{2}:\d{2}:)"
_TIMES = re.compile(rf"(?<![\w.,])(?:{_DATE}|{_DAY}|(?=\d+:))(?:{_TIME})?")
_WRAPPER = re.compile(r"(?:(?:torch|np|numpy|jnp|jax)\.)?(?:tensor|[Aa]rray|DeviceArray|b?float\d*)\(\s*$")
_IN_BRACKETS = re.compile(r"[(\[]([^()\[\]]{0,40})[)\]]$")  # a unit, or the split: "loss (val)"
# "Time 0.1 (0.2)  Loss 2.8 (2.7)": meters of torch's examples
_MEAN = re.compile(rf"\s*\(\s*({NUMBER.pattern})\s*\)")
_BETWEEN = " \t:=~≈→\"'[>-–."  # between a name and its number
_CUTS = re.compile(r"[|,;:={}\[\]()\t│┃•·<>\"'`!]+|\s+[-–—]+\s+|\s{2,}|\.\s|\.{3,}")  # between names
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+|\d+")
_LONGEST_NAME, _LONGEST_ROW = 200, 2000
_EDGES = " \t|│┃"  # of a table's row
_CELLS = tuple(map(re.compile, (r"\s*[|│┃]\s*", r"\s*,\s*", r"\s*;\s*", r"\t+", r"\s{2,}", r"\s+")))
_CELL = re.compile(r"\d|^\W*$|^(nan|none|null|inf)$", re.I)


class Name(NamedTuple):
    """A name, and what its words say."""

    text: str = ""
    words: frozenset[str] = frozenset()  # without those of the split
    split: str = ""
    kind: str = ""  # "loss", "step", "steps" (of the whole training), "epoch", "rate" or ""
    rank: int = 0  # among names of steps, or of losses: the lowest is taken
    is_old: bool = False  # an earlier value
    is_average: bool = False

    @property
    def is_blank(self) -> bool:
        return not self.kind and not self.words - FILLERS


@functools.lru_cache(4096)
def name_of(text: str) -> Name:
    text = re.sub("(?i)(val|valid|test|eval|train)loss", r"\1_loss", text.strip(" -*#/\\_."))
    in_order = plain(text)
    if not in_order:
        return Name()
    words, last = {*in_order}, {*plain(text.split()[-1])}
    *_, end = [word for word in in_order if word not in _SPLIT_WORDS] or in_order  # "iter (train)"
    measures = [0 for word in words if word.endswith(("loss", "losses"))]
    measures += [_MEASURES[word] for word in words & {*_MEASURES} if word != "entropy" or "cross" in words]
    # "train_loss_step" is a loss, "loss at step" a step.
    end = "" if any("loss" in word for word in last) or words & _NO_STEP else end
    is_rate = "lr" in (in_order[0], in_order[-1]) or "lr" in last or {"learning", "rate"} <= words
    kind, rank = "", 0
    if end in _LENGTHS[0] and words & _LENGTHS[1]:
        kind = "steps"
    elif end in STEPS:
        kind, rank = "step", STEPS[end]
    elif end in ("epoch", "ep"):
        kind = "epoch"
    elif is_rate and not words & _OTHER_RATES:
        kind = "rate"
    elif measures and "per" in words and words & {"token", "tokens"} and not (words & _NO_LOSS) - _TOKENS:
        # A loss beside its mean per token is a sum, as T5X logs them.
        kind, rank, words = "loss", min(measures) - 1, words - _TOKENS
    elif measures and not words & _NO_LOSS:
        kind, rank = "loss", min(measures)
    split = next((split for split, names in SPLITS.items() if words & names), "")
    rest = frozenset(words - _SPLIT_WORDS)
    return Name(text, rest, split, kind, rank, bool(words & _OLD), bool(words & _AVERAGES))


def value(number: str) -> float:
    return float(number.replace(",", "." if number.count(",") == 1 else ""))


def plain(text: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(text)]


class Pair(NamedTuple):
    """A name and its number."""

    name: Name
    context: Name  # words before it that are no name of a number
    number: str  # as written
    of: int | None = None  # 200 in "10/200"
    unit: str = ""
    is_first: bool = False  # on the line, or in brackets: "[100] loss=2.3"
    is_set: bool = True  # by a colon, an equals sign or a table

    @property
    def whole(self) -> int | None:
        digits = self.number.replace(",", "")
        return int(digits) if digits.isdecimal() and len(digits) < 16 and self.unit in ("", "it") else None

    @property
    def is_value(self) -> bool:
        return self.of is None and self.unit.lower() in ("", "nat", "nats", "bpb")


@functools.lru_cache(4096)
def _before(text: str) -> tuple[Name, list[Name], bool, bool]:
    """Return the name at the end of a text, and the words before it.

    The third value says whether a bracket opens between them, the fourth whether a colon or an equals sign
    follows.
    """
    is_set = bool(re.search("[:=]", text[len(text.rstrip(_BETWEEN)) :]))
    if text.rstrip()[-1:] in [*"/*+^"]:  # "learning_rate / 10"
        return Name(), [], False, False
    text = _WRAPPER.sub("", text.rstrip(_BETWEEN)).rstrip(_BETWEEN)
    text = _IN_BRACKETS.sub(lambda unit: f" {unit[1]}" if name_of(unit[1]).split else "", text).rstrip(
        _BETWEEN
    )
    *others, name = _CUTS.split(text)
    opens = bool(name) and text[: -len(name)].endswith("(")
    return name_of(name), [name_of(other) for other in others if other.strip()], opens, is_set


def read_pairs(line: str) -> Iterator[Pair]:
    """Yield the names and numbers of a line."""
    line, end, context, pending = _TIMES.sub("\t", line), 0, Name(), Name()
    has_meters = len(_MEAN.findall(line)) > 1
    top = Name()  # section of nested JSON that has a split
    for match in NUMBER.finditer(line):
        start, number = match.span()[0], match[0]
        if start < end:  # the second half of "10/200"
            continue
        before, is_first = line[max(end, start - _LONGEST_NAME) : start], end == 0
        name, others, opens, is_set = _before(before)
        for other in others:
            context = other if other.split or other.is_old else context
        for section in _SECTION.findall(before):
            top = name_of(section) if name_of(section).split else top
            context = context if top == Name() else name_of(f"{top.text} {section}")
        if is_first and others and not name.text and {line.lstrip()[0], before.rstrip()[-1]} <= {*_EDGES}:
            name = others[-1]  # a row of two cells
        if name.is_blank and not name.split:  # "loss at step 100 is 2.3", "'val_loss' reached 2.3"
            name = pending if pending.kind else others[-1] if name.text and others else name
        end = match.end()
        is_whole = number.replace(",", "").isdecimal()
        of = _OF.match(line, end) if is_whole else None
        pending = others[-1] if opens and others else Name()  # "lr (group 0): 0.001"
        is_index = name.kind == "loss" and is_whole and not is_set and _INDEX.match(line, end)
        if is_index:
            name, pending = name_of("step"), name
        if counted := _COUNTED.match(line, end) if is_whole and not of else None:
            name, pending, end = name_of(counted[0]), name, counted.end()  # "loss after 100 steps: 2.3"
        elif name.kind in ("step", "epoch"):
            rest = name_of(name.text.rpartition(" ")[0])
            pending = pending if pending.text or rest.kind == name.kind else rest
        unit = None if of or is_index else UNIT.match(line, end)
        is_bar = bool(of or (unit and "%" in unit[0])) and name.is_blank  # "eval: 100%|███| 8/8"
        if (name.kind in ("step", "epoch") or is_bar) and (name.split or name.is_old):
            context = name
        if unit and unit[0].strip()[0] in "-=→":
            pending = name  # "loss 2.4 -> 2.3"
        is_first |= before.endswith("[") and line[end : end + 1] == "]"
        if has_meters and {name.split, context.split} & {"val", "test"} and (mean := _MEAN.match(line, end)):
            number = mean[1]  # of all batches up to this one
        total = int(of[1].replace(",", "")) if of else None
        yield Pair(name, context, number, total, unit[0] if unit else "", is_first, is_set)
        end = of.end() if of else unit.end() if unit and unit[0][0] != "." else end


Header = tuple[re.Pattern[str], list[Name]]  # what cuts the cells of a table, and their names


def header(line: str) -> Header | None:
    for cut in _CELLS if len(line) < _LONGEST_ROW else ():
        cells = cut.split(line.strip(_EDGES))
        names = [name_of(cell) for cell in cells if len(cell) < _LONGEST_NAME]
        is_header = 1 < len(cells) == len([name for name in names if name.text])
        if is_header and any(name.kind == "loss" for name in names):
            return cut, names
    return None


def row(line: str, below: Header) -> list[Pair]:
    """Return the names and numbers of a table's row; none where the line is no row below the header."""
    cut, names = below
    cells = cut.split(line[:_LONGEST_ROW].strip(_EDGES))
    if len(cells) != len(names) or not all(_CELL.search(cell) for cell in cells):
        return []
    named = [(name, cell) for name, cell in zip(names, cells, strict=True) if NUMBER.fullmatch(cell)]
    is_row = any(name.kind == "loss" for name, _ in named)
    return [Pair(name, Name(), cell, is_first=cell is cells[0]) for name, cell in named if is_row]
