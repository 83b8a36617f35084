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

from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError
from mup_tpu.logs.lines import (
    FILLERS,
    NUMBER,
    SPLITS,
    STEPS,
    UNIT,
    Header,
    Name,
    Pair,
    header,
    name_of,
    plain,
    read_pairs,
    row,
    value,
)

_LONGEST_LINE, _SHOWN_OF_LINE = 2**14, 200
_MOST_POINTS, _MOST_SERIES = 1000, 500
_DIVERGED_AFTER = 3  # readings in a row that are not finite
_VAL, _TRAIN = [*SPLITS].index("val"), [*SPLITS].index("train")
_NAMED, _UNSURE = -1, 2  # ranks of the loss that the option names, and of a split alone: "val 0.91"
_OF_BATCHES, _BARE = 2, 3  # ranks of "10/200" and of a number that begins a line, after those of STEPS
_COLOURS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0e-\x1f\x7f]"
)
_HEADING = re.compile(r"\s*[*=#-]{3,}|.*(?:[:{]|\.\.\.|…)\s*$")
_Found = tuple[tuple[int, ...], frozenset[str], str, str]  # rank and words of a loss, its number and name


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
    every: int = 1  # one reading in so many becomes a point

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
        self._headers = deque[Header](maxlen=4)
        self._heading = Name()
        self._alone: Logged | None = None  # number alone on the last line
        self._has_ended = False
        self._epoch: int | None = None
        self._epochs: int | None = None
        self._counter: tuple[int, int | None, int | None] = 0, None, None  # step as written, length, epoch
        self._names_steps = False
        self._offset = 0  # steps of earlier epochs, where they are counted within one
        self.steps_done: int | None = None
        self.steps: int | None = None
        # The highest at any step; before the first step, the last that was printed
        self.learning_rate: float | None = None
        self._has_trained_rate = False
        self.rates: dict[int, float] = {}  # learning rates by step

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
        """Return steps and values of the loss to take, none where it is not known.

        Readings are counted where no line names a step.
        """
        candidates = self._candidates()
        return candidates[0].curve() if len(candidates) == 1 else []

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

    @property
    def is_validated(self) -> bool:
        """Whether it holds a loss of validation."""
        return any(one.rank[0] in (_NAMED, _VAL) for one in self._candidates() if one.rank)

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
            marks = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
            wide = "utf-16-be" if part[:1] == b"\0" else "utf-16-le" if part[1:2] == b"\0" else "utf-8-sig"
            self._decoder = codecs.getincrementaldecoder(marks.get(part[:2], wide))("replace")
        *lines, rest = re.split(r"[\r\n]", self._decoder.decode(part, final))
        for line in lines:
            yield (self._rest + line)[:_LONGEST_LINE]
            self._rest = ""
        self._rest = (self._rest + rest)[:_LONGEST_LINE]

    def _read_line(self, line: str) -> list[Logged]:
        line = _COLOURS.sub("", line)
        if not line.strip():
            return []
        rows = (row(line, below) for below in reversed(self._headers))
        pairs = next(filter(None, rows), None) or [*read_pairs(line)]
        step = self._advance(pairs)
        rates = [value(pair.number) for pair in pairs if pair.name.kind == "rate"]
        if step is not None and rates and len(self.rates) < _MOST_POINTS:
            self.rates[step] = rates[0]
        trains = step is not None or any(pair.name.kind == "loss" for pair in pairs)
        for rate in rates:
            if 0 < rate < math.inf and (trains or not self._has_trained_rate):
                # Of a configuration that is printed the last value counts: it overrides earlier ones.
                highest = max(rate, self.learning_rate or 0.0) if self._has_trained_rate else rate
                self.learning_rate, self._has_trained_rate = highest, trains
        is_indented = line[0].isspace()
        if not is_indented and step is not None and any(pair.name.kind == "step" for pair in pairs):
            self._heading = Name()
        logged = functools.partial(Logged, step=step, steps=self.steps, line=line.strip()[:_SHOWN_OF_LINE])
        losses = [
            self._add(rank, words, number, logged(name, value(number)))
            for rank, words, number, name in (*self._recognised(pairs), *self._named(pairs, line))
            if self._option is None or rank[0] in (_NAMED, _TRAIN)
        ]
        has_words = re.search(r"[^\W\d]{2}", NUMBER.sub("", line))
        is_alone = len(pairs) == 1 and not pairs[0].unit and not has_words
        self._alone = logged("", value(pairs[0].number)) if is_alone else None
        if losses and not is_indented:
            self._heading = Name()
        elif not losses and _HEADING.match(line):
            heading = name_of(line.strip(" *=#-:.…>[]{\"'"))
            self._heading = heading if heading.split else Name()
        if not pairs and (head := header(line)):
            self._headers.append(head)
        return losses

    def _recognised(self, pairs: list[Pair]) -> Iterator[_Found]:
        has_loss = any(pair.name.kind == "loss" for pair in pairs)
        has_split_loss = False  # "loss train: 5.1, val: 3.3"
        is_summary = any("runtime" in pair.name.words for pair in pairs) or "metrics" in self._heading.words
        for pair in pairs:
            name, source = pair.name, pair.name
            if not name.split:
                source = pair.context if pair.context.split else self._heading
            split = [*SPLITS].index(source.split or "train")
            if not pair.is_value or pair.context.is_old or not (pair.is_set or pair.whole is None):
                continue  # "the loss of 12 men" is a sample of a model's text
            if name.kind == "loss":
                rank = split, 0, name.rank, int(name.is_average or (is_summary and source.split == "train"))
                has_split_loss = bool(name.split)
            elif name.split and name.is_blank and pair.whole is None and (has_split_loss or not has_loss):
                rank = split, 1 if has_split_loss else _UNSURE, 0, 0
            else:
                continue
            where = {word for word in source.words - {*STEPS} if not word.isdigit()}
            before = "" if source is name else source.text  # "Img val" of "Img val | loss"
            if not where - FILLERS - name.words:
                before = next((word for word in before.split() if name_of(word).split), "")
            text = f"{before} {name.text}".strip()
            yield rank, (name.words | where) - FILLERS, pair.number, text

    def _named(self, pairs: list[Pair], line: str) -> Iterator[_Found]:
        """Yield losses that the option names: by their whole name, else by the text before the number."""
        if self._option is None or self._pattern is None:
            return
        wanted = plain(self._option)
        for name, context, written, *_ in (pair for pair in pairs if pair.is_value):
            if wanted in (plain(name.text), plain(f"{context.text} {name.text}")):
                yield (_NAMED, 0), frozenset(), written, name.text
        for match in self._pattern.finditer(line):
            text = (match[1] or "").strip()
            if (number := NUMBER.match(text)) and not UNIT.match(text, number.end()):
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

    def _advance(self, pairs: list[Pair]) -> int | None:
        """Follow the counters of steps and epochs; return the step of the line."""
        has_loss = any(pair.name.kind == "loss" or (pair.name.split and pair.name.is_blank) for pair in pairs)
        is_bar = True  # of the training, and not of a download or of a map over documents
        steps: list[tuple[int, int, Pair]] = []
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
        if rank == _BARE and self._names_steps:  # a rank or a process
            return self.steps_done
        self._names_steps |= rank < _BARE
        if {pair.name.split, pair.context.split} & {"val", "test"}:  # may count batches of the evaluation
            of_evaluation = rank >= _OF_BATCHES or (pair.name.split and pair.of is not None)
            return self.steps_done if of_evaluation else self._offset + count
        last, length, epoch = self._counter
        if epoch is not None and self._epoch is not None:
            is_next_epoch = self._epoch > epoch and count <= last
        else:  # "Train: 1 [0/100]" after "Train: 0 [99/100]"
            is_next_epoch = rank == _OF_BATCHES and length == pair.of in (last, last + 1) and count < last
        if is_next_epoch:
            self._offset += length or last
        self._counter = count, pair.of, self._epoch
        self.steps_done = self._offset + count
        if pair.of is not None and (rank == _OF_BATCHES or self._offset):
            self.steps = pair.of * self._epochs if self._epochs else None if self._offset else pair.of
        elif pair.of is not None:
            self.steps = pair.of
        elif self.steps is not None and self.steps_done > self.steps:  # was the length of something else
            self.steps = None
        return self.steps_done


def read_log(content: bytes, loss: str | None = None) -> TrainingLog:
    """Read a whole log; `loss` is the option of `TrainingLog`."""
    log = TrainingLog(loss)
    log.read(content)
    log.close()
    return log


def _meant(series: Iterable[_Series]) -> list[_Series]:
    """Return the losses that could be meant: one, where it comes before all others."""
    in_order = sorted(series, key=lambda one: (one.rank, len(one.words)))
    meant = [one for one in in_order if one.rank == in_order[0].rank]
    if len(meant) > 1 and all(meant[0].words <= one.words for one in meant):
        return meant[:1]
    if len(total := [one for one in meant if "total" in one.words]) == 1:
        return total
    trained = [one for one in in_order if one.rank[:2] == (_TRAIN, 0)][:1]
    if trained and meant[0].rank[1] == _UNSURE:
        # "val 0.91" may be an accuracy, "val 3.1" beside a loss of 3 is none.
        loss, likely = meant[0].last.loss, trained[0].last.loss
        return meant[:1] if max(1, likely / 2) < loss < 2 * likely else meant + trained
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
        return re.compile(rf"(?<![\w/]){text}[\s:=\"'(\[]*({NUMBER.pattern})(?![\w%])", re.I)
    try:
        pattern = re.compile(loss)
    except re.error as error:
        raise ConfigError(f"loss {shown(loss)} is not a regular expression: {error}") from None
    if pattern.groups != 1:
        raise ConfigError(f"loss {shown(loss)} has {pattern.groups} groups: it needs one, around the number")
    return pattern
