"""Arguments of a training function: its trial, and its report (curve, sign of life).

Without numpy and pandas: each trial is a fork of a process with these imports, and pays for its pages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mup_tpu.config import shown
from mup_tpu.config.grid import Value
from mup_tpu.errors import reason
from mup_tpu.files import Folder, short_hash

_SEND_EVERY_S = 0.2
_MOST_POINTS = 1000
_RESUME = "resume.json"


class StudyTrial:
    """Values of one run of a study, as attributes: `trial.width`, `trial.learning_rate`, `trial.seed`."""

    def __init__(self, study: str, values: Mapping[str, Value]) -> None:
        vars(self).update(_study=study, _values=dict(values))

    @property
    def values(self) -> dict[str, Value]:
        return dict(self._values)

    @functools.cached_property
    def id(self) -> str:
        """Name of 16 hex digits for the study and the values; 256 and 256.0 are one value."""
        values = {  # 1 and 1.0 are one number, True and 1 are not
            name: [type(value).__name__, str(value)]
            if isinstance(value, bool | str)
            else ["number", float(value).hex()]
            for name, value in self._values.items()
        }
        content = {"study": self._study, "values": values}
        return short_hash(json.dumps(content, sort_keys=True, separators=(",", ":")))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as pickle asks for, before there are values
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            names = ", ".join(self._values)
            raise AttributeError(f"trial has no {name!r}; it has {names}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"trial cannot be changed: {name!r} was set")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StudyTrial) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Trial({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


@dataclass(frozen=True)
class Reported:
    """State of a running trial."""

    step: int
    steps: int  # steps of the whole trial; 0 where they are not known
    loss: float

    @staticmethod
    def note(reports: Sequence[Reported]) -> str:
        last = max(reports, key=lambda report: report.step)
        of = f"/{last.steps}" if last.steps else ""
        loss = f", loss {last.loss:.3f}" if math.isfinite(last.loss) else ""
        return f"step {last.step}{of}{loss}"


class Ending(BaseException):
    """The machine is being taken away."""


@dataclass
class Curve:
    """Reported losses by step; a curve with many points loses every second one."""

    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1  # reports for each point that is kept
    seen: int = 0

    def add(self, step: int, loss: float) -> None:
        """Add a report; the newest of a stride replaces the ones before.

        Later points come from an attempt that got further than its last checkpoint.
        """
        if self.points and self.seen % self.stride:
            self.points.pop()
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self.points.append((step, loss))
        self.seen += 1
        if len(self.points) > _MOST_POINTS:
            self.points, self.stride = self.points[1::2], 2 * self.stride


class Report:
    """`report(step=..., loss=...)`: a point of the trial's learning curve, and a sign of life.

    The trial's folder is kept until it has a result. `send` takes reports for the driver, with `sends_all`
    each loss, also those of an earlier attempt.
    """

    def __init__(self, folder: str, send: Callable[[Reported], None], sends_all: bool = False) -> None:
        self._folder, self._send, self._sent_at = Folder(folder), send, -math.inf
        self._sends_all = sends_all
        self.folder: Path | str = Path(folder) if self._folder.is_local else folder
        """Folder for checkpoints; it outlives a killed attempt."""
        self.ending = False  # whether the machine is being taken away: save and report once more
        self._was_ending = False
        self.resume_step = 0
        """Step of the last report with `saved=True` by an earlier attempt; 0 starts from the beginning."""
        self.curve = Curve()
        self.step = 0
        with contextlib.suppress(FileNotFoundError):
            content = self._folder.read(_RESUME)
            try:
                saved = json.loads(content)
                points = [(_whole("step", step), float(loss)) for step, loss in saved["points"]]
                curve = Curve(points, _whole("stride", saved["stride"]) or 1, _whole("seen", saved["seen"]))
                self.resume_step = self.step = _whole("step", saved["step"])
                self.curve = curve
                for step, loss in points if sends_all else ():
                    send(Reported(step, 0, loss))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                print(f"{folder}/{_RESUME} cannot be read ({reason(error)}): the trial starts anew")

    def resume_at(self, step: int) -> None:
        """Go on from the step of a checkpoint that was found in `folder`, 0 to start anew."""
        if step != self.resume_step:
            newest = (
                f"its newest whole checkpoint is of step {step}" if step else "no checkpoint in it is whole"
            )
            how = "goes on from there" if step else "starts anew"
            print(f"{self.folder}: step {self.resume_step} was reported, and {newest}: the trial {how}")
            self.resume_step = self.step = step
            self.curve.points = [point for point in self.curve.points if point[0] <= step]

    def __call__(self, step: int, loss: float | None = None, *, steps: int = 0, saved: bool = False) -> None:
        """Report that a step is done.

        Args:
            step: number of the step, from 1 on.
            loss: training loss since the last report; None is a sign of life alone.
            steps: steps of the whole trial, for the time left.
            saved: whether `folder` now holds all that going on from this step needs.
        """
        self.step, steps = _whole("step", step), _whole("steps", steps)
        value = math.nan if loss is None else number("loss", loss)
        if loss is not None:
            self.curve.add(self.step, value)
        if saved:
            self._folder.write(_RESUME, json.dumps({"step": self.step, **asdict(self.curve)}).encode())
        now = time.monotonic()
        if now - self._sent_at >= _SEND_EVERY_S or (self._sends_all and loss is not None):
            self._send(Reported(self.step, steps, value))
            self._sent_at = now
        # The signal may come after the function has looked at `ending` and before it is here: a report that
        # saved nothing ends the function only if `ending` was set before the last report returned.
        if self.ending and (saved or self._was_ending):
            raise Ending
        self._was_ending = self.ending


def damaged(checkpoint: Path) -> Path | None:
    """Return a file of a checkpoint that was cut short, as its format says; None if there is none.

    Recognized are JSON, safetensors, and archives of torch and numpy.
    """
    files = [checkpoint] if checkpoint.is_file() else sorted(f for f in checkpoint.rglob("*") if f.is_file())
    return next((file for file in files if not _is_whole(file)), None)


def _is_whole(file: Path) -> bool:
    with file.open("rb") as opened:
        head, size = opened.read(8), file.stat().st_size
        match file.suffix:
            case ".json":  # a value, or one on each line
                content = file.read_bytes()
                for parts in ([content], content.splitlines()):
                    with contextlib.suppress(ValueError, RecursionError):
                        return bool([json.loads(part) for part in parts])
                return False
            case ".safetensors":  # bytes of a header of JSON, the header, the numbers
                begin = 8 + int.from_bytes(head, "little")
                try:
                    header: Any = json.loads(opened.read(begin - 8)) if begin <= size else None
                    ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
                except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
                    return False
                return size == begin + max(ends, default=0)
            case ".pt" | ".pth" | ".ckpt" | ".npz" | ".bin":
                return head != b"" and (not head.startswith(b"PK\x03\x04") or zipfile.is_zipfile(file))
    return True  # files that were being written often have another suffix


def number(what: str, value: Any) -> float:
    """Return a number of Python's, numpy's or a tensor's as a float; TypeError if it is none."""
    text = shown(value).replace("\n", " ")[:60]
    if hasattr(value, "item") and callable(value.item):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # of many numbers
            raise TypeError(f"{what} {text} is not one number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} {text} is {type(value).__name__}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise TypeError(f"{what} {text} is too large for a number of 64 bits") from None


def _whole(what: str, value: Any) -> int:
    whole = number(what, value)
    if not 0 <= whole < 2**63 or whole % 1:
        raise TypeError(f"{what} {whole:g} is not a whole number from 0 to 2^63 - 1")
    return int(whole)
