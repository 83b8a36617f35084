"""One attempt at a trial: the process of a training function or program, and the end of all that it started.

    driver ── worker ── function or program ── its own processes

The worker forks the process of each trial after it has imported the function's modules, so that a trial
finds memory, seeds and devices as the first one did. The worker adopts orphans of its descendants: it can end
what a trial leaves behind in whatever process group or session.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import math
import os
import select
import signal
import sys
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import TextIOWrapper
from typing import Any, ClassVar, NoReturn

import psutil

from mup_tpu.config.values import on_one_line
from mup_tpu.errors import MupTpuError, StoreError, first_line, raised_as, reason
from mup_tpu.files import Folder
from mup_tpu.internals.processes import allow_children, end_descendants
from mup_tpu.jobs.driver import Preparing, Request, WorkerLost
from mup_tpu.logs import Logged, LossUnknown, TrainingLog
from mup_tpu.study.report import Curve, Ending, Report, Reported, StudyTrial, number

Function = Callable[[Any, Report], Any]

_ALIVE_EVERY_S, _REPORT_EVERY_S = 1.0, 0.2
_LOOK_EVERY_S = 0.1
_GRACE_S = 10.0  # seconds from SIGTERM in which a trial may save once more
_SIGTERM_APART_S = 2.0
"""Seconds between the SIGTERM of a trial and of its worker, where a batch system sends it to both."""
_REST_S = 3.0  # seconds for the output of a program that has ended, which its children may keep open
_MOST_OUTPUT = 2**20
"""Bytes of a trial's output that are kept: its end. While the trial runs there may be twice as many."""
_LONGEST_MESSAGE, _READ_AT_ONCE = 2**22, 2**16
_LAST_LINES, _LONGEST_LINE = 3, 200  # of the output, in the reason of a failure


@dataclass(frozen=True)
class Outcome:
    """End of an attempt."""

    status: str  # "finished", "diverged", "stopped", "failed" or "preempted"
    loss: float
    reason: str | None = None
    points: tuple[tuple[int, float], ...] = ()  # reported losses by step
    step: int = 0  # last step that was reported
    seconds: float = math.nan  # time that the attempt took
    modules: tuple[str, ...] = ()  # modules that the function imported
    logged: Logged | None = None  # line of a program's output that holds the loss
    lacks_loss: bool = False  # whether a program ended well, and its output tells no loss
    learning_rate: float | None = None  # the highest in a program's output

    @classmethod
    def of(cls, loss: float, **more: Any) -> Outcome:
        is_finite = math.isfinite(loss)
        return cls("finished" if is_finite else "diverged", loss if is_finite else math.inf, **more)


class Output:
    """Printed output of a trial, of which the last MiB is kept as a file or object of the results folder."""

    def __init__(self, results: str, name: str, title: str = "") -> None:
        self._folder, self._name = Folder(results), name
        # An object of a bucket cannot grow: it is written once, at the end.
        self._keeps = _LAST_LINES * _LONGEST_LINE if self._folder.is_local else _MOST_OUTPUT
        self._tail, self._title = b"", title.encode(errors="replace")
        self._file: TextIOWrapper | None = None
        self._append(self._title)

    def write(self, part: bytes) -> None:
        self._tail = (self._tail + part)[-self._keeps :]
        self._append(part)

    def _append(self, part: bytes) -> None:
        if not part or not self._folder.is_local:
            return
        if self._file is None:
            with raised_as(StoreError, f"{self._folder}/{self._name} cannot be opened"):
                self._file = self._folder.append_to(self._name)
        with contextlib.suppress(OSError):  # a full disk ends no trial
            os.write(self._file.fileno(), part)
            self._cut(2 * _MOST_OUTPUT)

    def _cut(self, most: int) -> None:
        assert self._file is not None
        descriptor = self._file.fileno()
        with contextlib.suppress(OSError):
            if (size := os.fstat(descriptor).st_size) > most:
                end = os.pread(descriptor, _MOST_OUTPUT, size - _MOST_OUTPUT)
                os.ftruncate(descriptor, 0)
                os.write(descriptor, b"[...]\n" + end)

    def explain(self, failure: str) -> str:
        text = self._tail[-_LAST_LINES * _LONGEST_LINE :].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        last = [line for line in lines if line and line not in failure][-_LAST_LINES:]
        text = f"{failure}; output: {' | '.join(map(on_one_line, last))}" if last else failure
        return f"{text} ({self._name})" if self._tail or self._title else text

    def close(self) -> None:
        if self._file is not None:
            self._cut(_MOST_OUTPUT)
            self._file.close()
        elif (self._title or self._tail) and not self._folder.is_local:
            with contextlib.suppress(OSError):
                self._folder.write(self._name, self._title + self._tail)


@dataclass(eq=False)
class Attempt(ABC):
    """A trial's process, as its worker sees it.

    The process may close, tear or flood any of its pipes, so nothing here waits for it.
    """

    doing: ClassVar[str]  # work of a process that has not reported yet
    is_alive_without_reports: ClassVar[bool] = (
        False  # whether silence after a report is no sign that it hangs
    )
    _has_launchers: ClassVar[bool] = False  # whether its work may run below other processes than its own

    output: Output
    trial: StudyTrial
    folder: str  # for checkpoints
    asks: bool  # whether the driver is asked at each loss if the trial stops

    def __post_init__(self) -> None:
        # What the process sends through each open pipe, and the reader of it
        self._readers: dict[int, Callable[[bytes], Iterable[Reported | Outcome]]] = {}
        self._pid = 0

    @abstractmethod
    def _start(self) -> None:
        """Start the process in a new process group."""

    @abstractmethod
    def _ended(self, code: int, is_terminated: bool) -> Outcome: ...

    @abstractmethod
    def _points(self) -> list[tuple[int, float]]: ...

    def _terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)

    def _printed(self, part: bytes) -> Iterable[Reported | Outcome]:
        self.output.write(part)
        return ()

    def _pipe(self, reader: Callable[[bytes], Iterable[Reported | Outcome]]) -> int:
        ours, theirs = os.pipe()
        self._readers[ours] = reader
        return theirs

    def run(
        self, timeout: float, is_ending: Callable[[], bool]
    ) -> Generator[Reported | Preparing | Request, Any, Outcome]:
        """Run the process to its end, and yield its reports; all its processes have ended then.

        It is ended after `timeout` seconds; `is_ending` says whether the machine is taken away.
        """
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        began = time.monotonic()
        pipes: tuple[int, ...] = ()
        try:
            self._start()
            pipes = (*self._readers,)
            outcome = yield from self._events(began, timeout, is_ending)
            if outcome.status == "failed":
                self._read_rest()
                outcome = replace(outcome, reason=self.output.explain(outcome.reason or ""))
        finally:
            self._end_processes()
            self._read_rest()
            for pipe in pipes:
                os.close(pipe)
            self.output.close()
        # The next trial finds them imported: torch's compiler takes seconds.
        for name in outcome.modules:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        return replace(outcome, seconds=time.monotonic() - began, modules=())

    def _events(
        self, began: float, timeout: float, is_ending: Callable[[], bool]
    ) -> Generator[Reported | Preparing | Request, Any, Outcome]:
        reported, yielded_at, terminated_at, exited_at = None, began, math.inf, math.inf
        asked_at = 0  # last step that the driver was asked about
        outcome: Outcome | None = None
        while outcome is None:
            look_s = _LOOK_EVERY_S if self._readers else _LOOK_EVERY_S / 10
            ready = select.select([*self._readers], [], [], look_s)[0]
            latest = None
            for event in itertools.chain.from_iterable(map(self._read, ready)):
                if isinstance(event, Outcome):
                    outcome = event
                else:
                    latest = reported = event
            now = time.monotonic()
            new = []
            if latest is not None and outcome is None and self.asks:
                new = [(step, loss) for step, loss in self._points() if step > asked_at]
            if latest is not None and new:
                asked_at, yielded_at = new[-1][0], now
                steps = latest.steps or self.trial.values.get("steps", 0)
                whole = int(steps) if isinstance(steps, int | float) else 0
                if (yield Request({self.trial.id: new}, whole)):
                    why, points = f"stopped by the search at step {asked_at}", tuple(self._points())
                    return Outcome("stopped", new[-1][1], why, points=points, step=asked_at)
            elif latest is not None and (
                now - yielded_at >= _REPORT_EVERY_S or not self.is_alive_without_reports
            ):
                yielded_at = now
                yield latest
            elif now - yielded_at > _ALIVE_EVERY_S and (reported is None or self.is_alive_without_reports):
                yielded_at = now
                yield reported or Preparing(self.doing)
            if outcome is None and (ended := _exited(self._pid)) is not None:
                exited_at = min(exited_at, now)
                if not ready or now - exited_at > _REST_S:
                    outcome = self._outcome_of(ended, terminated_at < math.inf or is_ending())
            if outcome is None and now - began > timeout:
                return Outcome("failed", math.nan, f"no result within the time-out of {timeout:g} s")
            if terminated_at == math.inf and is_ending():
                terminated_at = now
                self._terminate()
            if outcome is None and now - terminated_at > _GRACE_S:
                return Outcome("preempted", math.nan)
        if outcome.status == "preempted" and terminated_at == math.inf:
            deadline = time.monotonic() + _SIGTERM_APART_S
            while not is_ending() and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S)
            if not is_ending():
                raise WorkerLost("its process got a SIGTERM of its own")
        return outcome

    def _outcome_of(self, ended: os.waitid_result, is_terminated: bool) -> Outcome:
        if ended.si_code == os.CLD_EXITED:
            return self._ended(ended.si_status, is_terminated)
        if ended.si_status == signal.SIGTERM:
            return Outcome("preempted", math.nan)
        raise WorkerLost(f"its process was killed by signal {ended.si_status}")

    def _read(self, pipe: int) -> Iterable[Reported | Outcome]:
        part = os.read(pipe, _READ_AT_ONCE)
        reader = self._readers[pipe] if part else self._readers.pop(pipe)
        return reader(part)

    def _read_rest(self) -> None:
        # Processes that the trial has started may print without end.
        for _ in range(_MOST_OUTPUT // _READ_AT_ONCE):
            if not (ready := select.select([*self._readers], [], [], 0)[0]):
                break
            for pipe in ready:
                _ = [*self._read(pipe)]

    def _end_processes(self) -> None:
        """Kill the trial's process, its group, and all other descendants of this worker."""
        if self._pid == 0:
            return
        if self._has_launchers and _exited(self._pid) is None:
            end_descendants(os.getpid())
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    for child in psutil.Process().children():
                        with contextlib.suppress(psutil.Error):
                            child.kill()
                    time.sleep(0.005)


@dataclass(eq=False)
class FunctionAttempt(Attempt):
    """A call of a training function, in a process forked from the worker."""

    doing = "running, without a report yet"

    function: Function
    private: Sequence[int]  # descriptors of the worker that the process closes

    def __post_init__(self) -> None:
        super().__post_init__()
        self._line, self._curve = b"", Curve()

    def _start(self) -> None:
        sends, prints = self._pipe(self._messages), self._pipe(self._printed)
        ours = (*self._readers, *self.private)

        def child() -> NoReturn:
            for descriptor in ours:
                os.close(descriptor)
            self._call(sends, prints)

        self._pid = _fork(child)
        os.close(sends)
        os.close(prints)

    def _points(self) -> list[tuple[int, float]]:
        return [*self._curve.points]

    def _messages(self, part: bytes) -> Iterator[Reported | Outcome]:
        *lines, self._line = (self._line + part).split(b"\n")
        if len(self._line) > _LONGEST_MESSAGE:
            lines, self._line = [b"too long"], b""
        for line in lines:
            try:
                match json.loads(line):
                    case {"report": fields}:
                        reported = Reported(**fields)
                        if not math.isnan(reported.loss):
                            self._curve.add(reported.step, reported.loss)
                        yield reported
                        continue
                    case {"outcome": fields}:
                        points = tuple((step, loss) for step, loss in fields["points"])
                        yield Outcome(**{**fields, "points": points, "modules": tuple(fields["modules"])})
                        return
            except (ValueError, TypeError, KeyError, RecursionError):
                pass
            why = "its process wrote to a pipe of mup_tpu, which cannot be read now"
            yield Outcome("failed", math.nan, why)
            return

    def _ended(self, code: int, is_terminated: bool) -> Outcome:
        return Outcome("failed", math.nan, f"its process ended with exit code {code} and no result")

    def _call(self, sends: int, prints: int) -> NoReturn:
        """Call the function in this process, send its outcome, and end."""
        allow_children()
        _redirect(prints)
        os.close(prints)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (for the life of the process)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115

        def send(**message: Any) -> None:
            left = json.dumps(message).encode() + b"\n"
            while left:
                left = left[os.write(sends, left) :]

        report: Report | None = None
        before = len(sys.modules)
        try:
            report = made = Report(self.folder, lambda reported: send(report=vars(reported)), self.asks)
            signal.signal(signal.SIGTERM, lambda number, frame: setattr(made, "ending", True))
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            outcome = Outcome.of(number("the returned loss", self.function(self.trial, report)))
        except BaseException as error:
            if isinstance(error, Ending) or (report is not None and report.ending):
                outcome = Outcome("preempted", math.nan)
            else:
                with contextlib.suppress(Exception):
                    traceback.print_exc()
                outcome = Outcome("failed", math.nan, first_line(error))
        for stream in (sys.stdout, sys.stderr):  # the function may have closed or replaced them
            with contextlib.suppress(Exception):
                stream.flush()
        if report is not None:
            outcome = replace(outcome, points=tuple(report.curve.points), step=report.step)
        # From the end: a look at all names would copy the pages that this process shares with its worker.
        modules = (*itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - before)),)[::-1]
        text = outcome.reason and outcome.reason.encode(errors="backslashreplace").decode()
        send(outcome=vars(replace(outcome, reason=text, modules=modules)))
        os._exit(0)


@dataclass(eq=False)
class ProgramAttempt(Attempt):
    """A run of a program, whose output tells the loss."""

    doing = "running, no loss in its output yet"
    is_alive_without_reports = _has_launchers = True

    words: list[str]  # the command line
    added: Mapping[str, str]  # environment beside the worker's
    loss: str | None  # as for TrainingLog

    def __post_init__(self) -> None:
        super().__post_init__()
        self._log = TrainingLog(self.loss)

    def _start(self) -> None:
        prints = self._pipe(self._printed)

        def child() -> NoReturn:
            _redirect(prints)
            # Dispositions that are ignored here would be ignored there too.
            for changed in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
                signal.signal(changed, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            try:
                os.execvpe(self.words[0], self.words, {**os.environ, **self.added})
            except OSError as error:
                os.write(2, f"{self.words[0]} cannot be started: {reason(error)}\n".encode())
            os._exit(127)

        self._pid = _fork(child)
        os.close(prints)

    def _terminate(self) -> None:
        os.killpg(self._pid, signal.SIGTERM)  # to the whole group: a shell script passes no signal on

    def _printed(self, part: bytes) -> Iterator[Reported | Outcome]:
        self.output.write(part)
        logged = self._log.read(part)
        if self._log.is_diverged:
            yield self._with_curve(Outcome("diverged", math.inf))
        elif logged:
            yield Reported(self._log.steps_done or 0, self._log.steps or 0, logged[-1].loss)

    def _ended(self, code: int, is_terminated: bool) -> Outcome:
        if is_terminated:  # its last loss is not the one of a whole training
            return Outcome("preempted", math.nan)
        self._log.close()
        if self._log.is_diverged:
            return self._with_curve(Outcome("diverged", math.inf))
        if code:
            return Outcome("failed", math.nan, f"{self.words[0]} ended with exit code {code}")
        if not self._log.is_validated and (metrics := self._metrics()) is not None:
            self._log = metrics
        try:
            logged = self._log.result()
        except LossUnknown as error:
            return Outcome("failed", math.nan, str(error), lacks_loss=True)
        return self._with_curve(Outcome.of(logged.loss, logged=logged))

    def _points(self) -> list[tuple[int, float]]:
        return self._log.curve()

    def _metrics(self) -> TrainingLog | None:
        """Read the metrics that the program has written into its folder; None if its output tells as much."""
        if "://" in self.folder or not os.listdir(self.folder):
            return None
        from mup_tpu.analysis.ingest.readers import metrics_of  # pandas, which most programs need not

        with contextlib.suppress(MupTpuError):  # such as no package that reads them
            metrics = metrics_of(self.folder, self.loss)
            if metrics is not None and (metrics.is_validated or not self._log.curves()):
                return metrics
        return None

    def _with_curve(self, outcome: Outcome) -> Outcome:
        log = self._log
        points, step = tuple(log.curve()), log.steps_done or 0
        return replace(outcome, points=points, step=step, learning_rate=log.learning_rate)


def _exited(pid: int) -> os.waitid_result | None:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _fork(child: Callable[[], NoReturn]) -> int:
    """Fork this process, which may have threads that wait, into a new process group; it ends with this one.

    SIGTERM is blocked in the child until it sets a handler.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any thread
        pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child has done so, and has begun another program
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        child()
    finally:
        os._exit(1)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Linux's sys/prctl.h


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _redirect(prints: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, prints), (2, prints)):
        os.dup2(source, target)
