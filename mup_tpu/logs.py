"""The loss in the output of a training program, whatever program it is.

A log is read as pairs of a name and a number: `val loss 2.68`, `'eval_loss': 2.91`, `step:10/200`, or a table
with a header. What a name means follows from its words, so that no program needs an entry here:

- validation comes before test, and test before training; the last value counts, not the best;
- losses come before other measures of the fit (bits per byte, squared error), the whole before its parts;
- a number alone on the last line is the loss of a log that has no other.

`TrainingLog.result` raises `LossUnknown` where two losses could be meant; the option `loss` then names one.
Memory is bounded: long lines are cut, curves are thinned.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError

_LONGEST_LINE, _LONGEST_NAME, _SHOWN_OF_LINE = 2**14, 200, 200
_MOST_POINTS, _MOST_SERIES = 1000, 500
_DIVERGED_AFTER = 3  # readings in a row that are not finite


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VALIDATION = _words("val valid validate validation eval evaluate evaluating evaluation dev heldout holdout")
_SPLITS = {"val": _VALIDATION, "test": _words("test testing"), "train": _words("train training trn")}
_TRAIN = 2  # index in _SPLITS; the loss of the first is taken
_NAMED, _UNSURE = -1, 2  # ranks of the loss that the option names, and of a split alone: "val 0.91"
_AVERAGES = _words("avg average mean running smooth smoothed ema macro micro step")
_FILLERS = _AVERAGES | _words(  # They make no other loss of a loss.
    "after are at by current dataset epoch final for in info initial is metric metrics now of on per reached "
    "result results score set the token value was with"
)
_OLD = _words("best min minimum lowest from improved improvement previous prev old decreased")
_NO_LOSS = _OLD | _words(
    "acc accuracy aux auxiliary balance balancing coef coeff delta diff expected grad imbalance limit lr max "
    "mem memory norm patience percent perplexity ppl py rate ratio router samples scale scaler std stderr "
    "target threshold time tol var weight weights z zloss"
)
_MEASURES = {"loss": 0, "ce": 1, "nll": 1, "xent": 1, "entropy": 1, "bpb": 2, "bpc": 2, "bits": 2}
_MEASURES |= {"mse": 3, "rmse": 3, "mae": 3, "cost": 3}
_STEPS = {
    "step": 0,
    "iter": 1,
    "iteration": 1,
    "itr": 1,
    "it": 1,
    "update": 1,
    "updates": 1,
    "steps": 1,
    "batch": 2,
}
_OF_BATCHES, _BARE = 2, 3  # ranks of "10/200", and of a number that begins a line
_NO_STEP = _words(
    "acc accum accumulation decay every gradient inner interval log micro mini number per save skipped time "
    "warmup"
)

_DIGITS = r"[+-]?(?:\d{1,3}(?:,\d{3})+(?![\d.,])|\d+(?:[.,]\d+)?|\.\d+)(?:[eE][+-]?\d+)?(?![.,]?\d)"
_NUMBER = re.compile(rf"(?<![\w.,])(?:[+-]?(?:nan|inf|infinity)(?!\w)|{_DIGITS})", re.I)
_OF = re.compile(r"(?:it)?\s*/\s*(\d[\d,]*)(?:it\b)?(?![\w.]*/)")  # the second half of "10/200"
_COUNTED = re.compile(
    r"\s+(?:steps?|iter\w*|epochs?|batch(?:es)?|updates|tokens|samples)\b(?!\s*[\d/])", re.I
)
_UNIT = re.compile(r"\s?%|[A-Za-z_µ]\w*|\.(?=\S)|\]\s*[:=]")
_COLOURS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0e-\x1f\x7f]"
)
_DATE, _TIME = r"\d{2,4}([-/])\d{2}\1\d{2,4}[T ]?", r"(?:\d+:)?\d{1,2}:\d{2}(?:[.,]\d+)?Z?(?![\w:])"
_TIMES = re.compile(rf"(?<![\w.,])(?:{_DATE}|(?=\d+:))(?:{_TIME})?")
_WRAPPER = re.compile(r"(?:(?:torch|np|numpy|jnp|jax)\.)?(?:tensor|[Aa]rray|DeviceArray|b?float\d*)\(\s*$")
_IN_BRACKETS = re.compile(r"[(\[]([^()\[\]]{0,40})[)\]]$")  # a unit, or the split: "loss (val)"
_BETWEEN = " \t:=~≈\"'[>-–."  # between a name and its number
_CUTS = re.compile(r"[|,;:={}\[\]()\t│┃•·<>\"'`!]+|\s+[-–—]+\s+|\s{2,}|\.\s|\.{3,}")  # between names
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+|\d+")
_EDGES = " \t|│┃"  # of a table's row
_CELLS = tuple(map(re.compile, (r"\s*[|│┃]\s*", r"\s*,\s*", r"\s*;\s*", r"\t+", r"\s{2,}", r"\s+")))
_CELL = re.compile(r"\d|^\W*$|^(nan|none|null|inf)$", re.I)
_HEADING = re.compile(r"\s*[*=#-]{3,}|.*(?:[:{]|\.\.\.|…)\s*$")


class LossUnknown(ConfigError):
    """A log holds no loss, or several that could be meant."""


@dataclass(frozen=True)
class Logged:
    """A loss that a line of a log holds."""

    name: str  # as the program writes it
    loss: float  # may be nan or inf
    step: int | None  # step that the line names, else the last one that was named, else the epoch
    steps: int | None  # length of the training, where a line says it
    line: str  # the line without colours, its first 200 characters


class _Name(NamedTuple):
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
        return not self.kind and not self.words - _FILLERS


@functools.lru_cache(4096)
def _name(text: str) -> _Name:
    text = re.sub("(?i)(val|valid|test|eval|train)loss", r"\1_loss", text.strip(" -*#/\\_."))
    in_order = _plain(text)
    if not in_order:
        return _Name()
    words, last = {*in_order}, {*_plain(text.split()[-1])}
    measures = [_MEASURES[word] for word in words & {*_MEASURES} if word != "entropy" or "cross" in words]
    measures += [0 for word in words if word.endswith(("loss", "losses"))]
    # "train_loss_step" is a loss, "loss at step" a step.
    end = "" if any("loss" in word for word in last) or words & _NO_STEP else in_order[-1]
    is_rate = "lr" in (in_order[0], in_order[-1]) or "lr" in last or {"learning", "rate"} <= words
    kind, rank = "", 0
    if end in ("steps", "iters", "iterations") and words & {"total", "max", "num", "n", "optimization"}:
        kind = "steps"
    elif end in _STEPS:
        kind, rank = "step", _STEPS[end]
    elif end in ("epoch", "ep"):
        kind = "epoch"
    elif is_rate and not words & {"base", "min", "final", "end", "decay", "warmup"}:
        kind = "rate"
    elif measures and not words & _NO_LOSS:
        kind, rank = "loss", min(measures)
    split = next((split for split, names in _SPLITS.items() if words & names), "")
    rest = frozenset(words.difference(*_SPLITS.values()))
    return _Name(text, rest, split, kind, rank, bool(words & _OLD), bool(words & _AVERAGES))


def _value(number: str) -> float:
    return float(number.replace(",", "." if number.count(",") == 1 else ""))


def _plain(text: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(text)]


class _Pair(NamedTuple):
    """A name and its number."""

    name: _Name
    context: _Name  # words before it that are no name of a number
    number: str  # as written
    of: int | None = None  # 200 in "10/200"
    unit: str = ""
    is_first: bool = False  # on the line
    is_set: bool = True  # by a colon, an equals sign or a table

    @property
    def whole(self) -> int | None:
        digits = self.number.replace(",", "")
        return int(digits) if digits.isdecimal() and len(digits) < 16 and self.unit in ("", "it") else None

    @property
    def is_value(self) -> bool:
        return self.of is None and self.unit.lower() in ("", "nat", "nats", "bpb")


@functools.lru_cache(4096)
def _before(text: str) -> tuple[_Name, list[_Name], bool, bool]:
    """Return the name at the end of a text, the words before it, whether a bracket opens between, and whether
    a colon or an equals sign follows.
    """
    is_set = bool(re.search("[:=]", text[len(text.rstrip(_BETWEEN)) :]))
    if text.rstrip()[-1:] in [*"/*+^"]:  # "learning_rate / 10"
        return _Name(), [], False, False
    text = _WRAPPER.sub("", text.rstrip(_BETWEEN)).rstrip(_BETWEEN)
    text = _IN_BRACKETS.sub(lambda unit: unit[1] if _name(unit[1]).split else "", text).rstrip(_BETWEEN)
    *others, name = _CUTS.split(text)
    opens = bool(name) and text[: -len(name)].endswith("(")
    return _name(name), [_name(other) for other in others if other.strip()], opens, is_set


def _pairs(line: str) -> Iterator[_Pair]:
    line, end, context, pending = _TIMES.sub("\t", line), 0, _Name(), _Name()
    for match in _NUMBER.finditer(line):
        start, number = match.span()[0], match[0]
        if start < end:  # the second half of "10/200"
            continue
        before, is_first = line[max(end, start - _LONGEST_NAME) : start], end == 0
        name, others, opens, is_set = _before(before)
        for other in others:
            context = other if other.split or other.is_old else context
        if is_first and others and not name.text and {line.lstrip()[0], before.rstrip()[-1]} <= {*_EDGES}:
            name = others[-1]  # a row of two cells
        if name.is_blank and not name.split:  # "loss at step 100 is 2.3", "'val_loss' reached 2.3"
            name = pending if pending.kind else others[-1] if name.text and others else name
        end = match.end()
        is_whole = number.replace(",", "").isdecimal()
        of = _OF.match(line, end) if is_whole else None
        pending = others[-1] if opens and others else _Name()  # "lr (group 0): 0.001"
        if counted := _COUNTED.match(line, end) if is_whole and not of else None:
            name, pending, end = _name(counted[0]), name, counted.end()  # "loss after 100 steps: 2.3"
        if name.kind in ("step", "epoch"):
            pending = pending if pending.text else _name(name.text.rpartition(" ")[0])
            context = name if name.split or name.is_old else context
        unit = None if of else _UNIT.match(line, end)
        if unit and unit[0][0] == "]":
            pending = name  # "loss[100] = 2.3"
        total = int(of[1].replace(",", "")) if of else None
        yield _Pair(name, context, number, total, unit[0] if unit else "", is_first, is_set)
        end = of.end() if of else unit.end() if unit and unit[0][0] not in ".]" else end


@dataclass
class _Series:
    """Values of one name."""

    rank: tuple[int, ...]  # The loss of the lowest is taken.
    words: frozenset[str]
    last: Logged
    digits: int = 0  # of the last value, after the decimal point
    not_finite: int = 0  # readings in a row
    points: list[tuple[int, float]] = field(default_factory=list)
    readings: int = 0
    every: int = 1  # readings between two points

    def add(self, logged: Logged, number: str) -> None:
        self.last, self.digits = logged, len(re.split("[.,]", re.split("[eE]", number)[0])[-1])
        self.not_finite = 0 if math.isfinite(logged.loss) else self.not_finite + 1
        step = self.readings if logged.step is None else logged.step
        self.readings += 1
        is_again = bool(self.points) and self.points[-1][0] >= step  # another rank, or after a restart
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        if is_again or self.readings % self.every == 0:
            self.points.append((step, logged.loss))
        if len(self.points) >= _MOST_POINTS:
            self.points, self.every = self.points[::2], 2 * self.every

    def curve(self) -> list[tuple[int, float]]:
        last = (self.readings - 1 if self.last.step is None else self.last.step), self.last.loss
        return self.points if self.points[-1][0] == last[0] else [*self.points, last]


class TrainingLog:
    """Reader of a log that grows.

    Args:
        loss: the text before the number, such as "val loss", or a regular expression with one group. By
            default the loss is recognised.
    """

    def __init__(self, loss: str | None = None) -> None:
        self._option, self._pattern = loss, None if loss is None else _pattern(loss)
        self._first, self._rest = b"", ""  # bytes before the encoding is known; a line without an end
        self._decoder: codecs.IncrementalDecoder | None = None
        self._series: dict[object, _Series] = {}
        self._headers = deque[tuple[re.Pattern[str], list[_Name]]](maxlen=4)
        self._heading = _Name()
        self._alone: Logged | None = None  # number alone on the last line
        self._has_ended = False
        self._epoch: int | None = None
        self._epochs: int | None = None
        self._counter: tuple[int, int | None, int | None] = 0, None, None  # step as written, length, epoch
        self._offset = 0  # steps of earlier epochs, where they are counted within one
        self.steps_done: int | None = None
        self.steps: int | None = None
        self.learning_rate: float | None = None  # the highest

    def read(self, part: bytes) -> list[Logged]:
        """Read on, and return the losses on lines that are complete. A part may end anywhere."""
        if self._decoder is None:
            self._first += part
            if len(self._first) < 4:
                return []
            part = self._first
        return [logged for line in self._lines(part) for logged in self._read_line(line)]

    def close(self) -> list[Logged]:
        """Read the last line, which may have no end."""
        lines = [*self._lines(self._first if self._decoder is None else b"", final=True), self._rest]
        self._has_ended, self._rest = True, ""
        return [logged for line in lines for logged in self._read_line(line)]

    def result(self) -> Logged:
        """Return the last value of the loss to take."""
        return self._chosen().last

    def curve(self) -> list[tuple[int, float]]:
        """Return steps and values of the loss to take; readings are counted where no line names a step."""
        return self._chosen().curve()

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the curves of all losses that could be meant, by name."""
        return {series.last.name: series.curve() for series in self._candidates()}

    @property
    def is_diverged(self) -> bool:
        """Whether the loss to take, or that of the training, is nan or infinite and stays so."""
        watched = _meant(series for series in self._series.values() if series.rank[0] == _TRAIN)
        with contextlib.suppress(LossUnknown):
            watched = [*watched, self._chosen()]
        return any(series.not_finite >= (1 if self._has_ended else _DIVERGED_AFTER) for series in watched)

    def _candidates(self) -> list[_Series]:
        is_named = self._option is not None
        known = [one for one in self._series.values() if not is_named or one.rank[0] == _NAMED]
        # An evaluation before the first step says nothing of the training.
        trained = [one for one in known if one.rank[0] in (_NAMED, _TRAIN) or (one.last.step or 0) > 0]
        meant = _meant(trained if trained and (self.steps_done or 0) > 0 else known)
        if meant or is_named or self._alone is None:
            return meant
        alone = _Series((), frozenset(), self._alone)
        alone.add(self._alone, "")
        return [alone]

    def _chosen(self) -> _Series:
        meant = self._candidates()
        if len(meant) == 1:
            return meant[0]
        if meant:
            one, two = (f"{series.last.name!r} ({series.last.loss:g})" for series in meant[:2])
            raise LossUnknown(f"two losses could be meant, {one} and {two}: name one with the option loss")
        if self._option is not None:
            raise LossUnknown(f"no line of the output has a number after loss {shown(self._option)}")
        raise LossUnknown(
            "no line of the output has a loss that is recognised: name the text before its number with the "
            "option loss"
        )

    def _lines(self, part: bytes, final: bool = False) -> Iterator[str]:
        if self._decoder is None:
            is_marked, big, little = (
                part[:2] in (b"\xff\xfe", b"\xfe\xff"),
                part[:1] == b"\0",
                part[1:2] == b"\0",
            )
            name = "utf-16" if is_marked else "utf-16-be" if big else "utf-16-le" if little else "utf-8-sig"
            self._decoder = codecs.getincrementaldecoder(name)("replace")
        *lines, rest = re.split(r"[\r\n]", self._decoder.decode(part, final))
        for line in lines:
            yield (self._rest + line)[:_LONGEST_LINE]
            self._rest = ""
        self._rest = (self._rest + rest)[:_LONGEST_LINE]

    def _read_line(self, line: str) -> list[Logged]:
        line = _COLOURS.sub("", line)
        if not line.strip():
            return []
        pairs = self._row(line) or [*_pairs(line)]
        step = self._advance(pairs)
        rates = [_value(pair.number) for pair in pairs if pair.name.kind == "rate"]
        rates = [rate for rate in [*rates, self.learning_rate or 0.0] if 0 < rate < math.inf]
        self.learning_rate = max(rates, default=None)
        if not line[0].isspace() and step is not None and any(pair.name.kind == "step" for pair in pairs):
            self._heading = _Name()
        logged = functools.partial(Logged, step=step, steps=self.steps, line=line.strip()[:_SHOWN_OF_LINE])
        losses, named = (
            [
                self._add(rank, words, number, logged(name, _value(number)))
                for rank, words, number, name in values
            ]
            for values in (self._recognised(pairs), self._named(pairs, line))
        )
        has_words = re.search(r"[^\W\d]{2}", _NUMBER.sub("", line))
        is_alone = len(pairs) == 1 and not pairs[0].unit and not has_words
        self._alone = logged("", _value(pairs[0].number)) if is_alone else None
        if losses and not line[0].isspace():
            self._heading = _Name()
        elif not losses and _HEADING.match(line):
            heading = _name(line.strip(" *=#-:.…>[]{\"'"))
            self._heading = heading if heading.split else _Name()
        if not pairs:
            self._read_header(line)
        return losses if self._option is None else named

    def _recognised(self, pairs: list[_Pair]) -> Iterator[_Found]:
        has_loss = any(pair.name.kind == "loss" for pair in pairs)
        has_split_loss = False  # "loss train: 5.1, val: 3.3"
        is_summary = any("runtime" in pair.name.words for pair in pairs) or "metrics" in self._heading.words
        for pair in pairs:
            name, source = pair.name, pair.name
            if not name.split:
                source = pair.context if pair.context.split else self._heading
            split = [*_SPLITS].index(source.split or "train")
            if not pair.is_value or pair.context.is_old or not (pair.is_set or pair.whole is None):
                continue  # "the loss of 12 men" is a sample of a model's text
            if name.kind == "loss":
                rank = split, 0, name.rank, int(name.is_average or (is_summary and source.split == "train"))
                has_split_loss = bool(name.split)
            elif name.split and name.is_blank and pair.whole is None and (has_split_loss or not has_loss):
                rank = split, 1 if has_split_loss else _UNSURE, 0, 0
            else:
                continue
            prefix = next((f"{word} " for word in source.text.split() if _name(word).split), "")
            text = name.text if source is name else prefix + name.text
            yield rank, name.words - _FILLERS, pair.number, text

    def _named(self, pairs: list[_Pair], line: str) -> Iterator[_Found]:
        """Yield losses that the option names: by their whole name, else by the text before the number."""
        if self._option is None or self._pattern is None:
            return
        wanted = _plain(self._option)
        for name, context, written, *_ in (pair for pair in pairs if pair.is_value):
            if wanted in (_plain(name.text), _plain(f"{context.text} {name.text}")):
                yield (_NAMED, 0), frozenset(), written, name.text
        for match in self._pattern.finditer(line):
            text = (match[1] or "").strip()
            if (number := _NUMBER.match(text)) and not _UNIT.match(text, number.end()):
                yield (_NAMED, 1), frozenset(), number[0], self._option

    def _add(self, rank: tuple[int, ...], words: frozenset[str], number: str, logged: Logged) -> Logged:
        if rank[1] == 0 and not any(one.rank[1] == 0 for one in self._series.values()):
            # "train: 0.9, val: 0.1" of a configuration
            self._series = {key: one for key, one in self._series.items() if one.rank[1] != _UNSURE}
        if len(self._series) < _MOST_SERIES:
            self._series.setdefault((rank, words), _Series(rank, words, logged))
        if series := self._series.get((rank, words)):
            series.add(logged, number)
        return logged

    def _read_header(self, line: str) -> None:
        for cut in _CELLS:
            cells = cut.split(line.strip(_EDGES))
            names = [_name(cell) for cell in cells if len(cell) < _LONGEST_NAME]
            is_header = 1 < len(cells) == len([name for name in names if name.text])
            if is_header and any(name.kind == "loss" for name in names):
                self._headers.append((cut, names))
                return

    def _row(self, line: str) -> list[_Pair]:
        """Return the pairs of a row, if the line is one below a header that was read."""
        for cut, names in reversed(self._headers):
            cells = cut.split(line.strip(_EDGES))
            if len(cells) == len(names) and all(_CELL.search(cell) for cell in cells):
                row = [
                    _Pair(name, _Name(), cell, is_first=cell is cells[0])
                    for name, cell in zip(names, cells, strict=True)
                    if _NUMBER.fullmatch(cell)
                ]
                if any(pair.name.kind == "loss" for pair in row):
                    return row
        return []

    def _advance(self, pairs: list[_Pair]) -> int | None:
        """Follow the counters of steps and epochs; return the step of the line."""
        has_loss = any(pair.name.kind == "loss" or (pair.name.split and pair.name.is_blank) for pair in pairs)
        is_bar = True  # of the training, and not of a download or of a map over documents
        steps: list[tuple[int, int, _Pair]] = []
        for pair in pairs:
            name, count = pair.name, pair.whole
            is_bar &= name.is_blank or name.kind in ("epoch", "step")
            if count is None:
                continue
            if name.kind == "epoch":
                self._epoch, self._epochs = count, pair.of or self._epochs
            elif name.kind == "steps":
                self.steps = self.steps or count
            elif name.kind == "step" and (has_loss or not name.words & {"steps", "updates"}):
                steps.append((name.rank, count, pair))
            elif name.is_blank and pair.of is not None:
                # A shorter bar is of an evaluation.
                if has_loss or (is_bar and pair.of >= (self.steps or 0) / (self._epochs or 1)):
                    steps.append((_OF_BATCHES, count, pair))
            elif name.is_blank and pair.is_first and has_loss and not name.split:
                steps.append((_BARE, count, pair))
        if not steps:
            return self._epoch if self.steps_done is None else self.steps_done
        rank, count, pair = min(steps, key=lambda step: step[0])
        if {pair.name.split, pair.context.split} & {"val", "test"}:  # may count batches of the evaluation
            return self.steps_done if rank >= _OF_BATCHES else self._offset + count
        last, length, epoch = self._counter
        if self._epoch is not None and epoch is not None and self._epoch > epoch and count <= last:
            self._offset += length or last
        self._counter = count, pair.of, self._epoch
        self.steps_done = self._offset + count
        if pair.of is not None and (rank == _OF_BATCHES or self._offset):
            self.steps = pair.of * self._epochs if self._epochs else None if self._offset else pair.of
        elif pair.of is not None:
            self.steps = pair.of
        return self.steps_done


_Found = tuple[tuple[int, ...], frozenset[str], str, str]  # rank and words of a loss, its number and name


def _meant(series: Iterable[_Series]) -> list[_Series]:
    """Return the losses that could be meant: one, where it comes before all others."""
    in_order = sorted(series, key=lambda one: (one.rank, len(one.words)))
    meant = [one for one in in_order if one.rank == in_order[0].rank]
    if len(meant) > 1 and all(meant[0].words <= one.words for one in meant):
        return meant[:1]
    if len(total := [one for one in meant if "total" in one.words]) == 1:
        return total
    if meant and meant[0].rank[1] == _UNSURE and meant[0].rank[0] != _TRAIN:  # "val 0.91" may be an accuracy
        return meant + [one for one in in_order if one.rank[:2] == (_TRAIN, 0)][:1]
    exact = max(meant, key=lambda one: one.digits, default=None)  # The others may be the same, rounded.
    if exact and all(abs(one.last.loss - exact.last.loss) <= 0.51 * 10**-one.digits for one in meant):
        return [exact]
    return meant


def _pattern(loss: str) -> re.Pattern[str]:
    """Return the regular expression that the option `loss` is, or that of the number after its text."""
    if not loss.strip():
        raise ConfigError(
            f"loss {shown(loss)} is empty: write the text before the number, such as 'val loss'"
        )
    if not re.search(r"[\\*+?^$]|\[.*\]|\(.*[.|].*\)", loss):
        text = r"\s+".join(map(re.escape, loss.split()))
        return re.compile(rf"(?<![\w/]){text}[\s:=\"'(\[]*({_NUMBER.pattern})(?![\w%])", re.I)
    try:
        pattern = re.compile(loss)
    except re.error as error:
        raise ConfigError(f"loss {shown(loss)} is not a regular expression: {error}") from None
    if pattern.groups != 1:
        raise ConfigError(f"loss {shown(loss)} has {pattern.groups} groups: it needs one, around the number")
    return pattern
