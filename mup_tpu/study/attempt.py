"""One attempt at a trial: a training function in a process of its own, and the end of all that it started.

    worker ── keeper ── function ── its own processes

The keeper is forked once a worker, after the function's modules were imported, and forks the function for
each trial: a trial finds memory, seeds and devices as the first one did. The keeper adopts orphans of its
descendants, so it can end what a trial leaves behind in whatever process group or session. It ends with its
worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import json
import math
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from mup_tpu.config.values import on_one_line
from mup_tpu.errors import StoreError, first_line, raised_as
from mup_tpu.files import Folder
from mup_tpu.internals.processes import allow_children
from mup_tpu.jobs.driver import Preparing, WorkerLost
from mup_tpu.study.report import Ending, Report, Reported, number

Function = Callable[[Any, Report], Any]

_ALIVE_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_GRACE_S = 10.0  # seconds from SIGTERM in which a function may report once more, and so keep its checkpoint
_SIGTERM_APART_S = 2.0
"""Seconds between the SIGTERM of a function and of its worker, where a batch system sends it to both."""
_END_WITHIN_S = 60.0  # seconds in which a keeper ends a trial's processes; then it counts as lost
_MOST_OUTPUT = 2**20
"""Bytes of a trial's output that are kept: its end. While the trial runs there may be twice as many."""
_LONGEST_MESSAGE, _READ_AT_ONCE = 2**22, 2**16
_LAST_LINES, _LONGEST_LINE = 3, 200  # of the output, in the reason of a failure
_TERMINATE, _END, _ENDED = "terminate", "end", "ended"


@dataclass(frozen=True)
class Outcome:
    """End of an attempt."""

    status: str  # "finished", "diverged", "failed" or "preempted"
    loss: float
    reason: str | None = None
    points: tuple[tuple[int, float], ...] = ()  # reported losses by step
    step: int = 0  # last step that was reported
    seconds: float = math.nan  # time that the attempt took
    modules: tuple[str, ...] = ()  # modules that the function imported

    @classmethod
    def of(cls, loss: float) -> Outcome:
        return cls("finished", loss) if math.isfinite(loss) else cls("diverged", math.inf)


@dataclass(frozen=True)
class Call:
    """Arguments of one attempt, sent to a keeper."""

    trial: Any
    make_report: Callable[[Callable[[Reported], None]], Report]
    """Maker of the function's second argument, from a function that takes reports."""
    results: str  # folder with the study's results
    output: str | None  # file in it for the printed output; None drops that


class ProgramFailed(RuntimeError):
    """A trainer's program failed: a traceback of ours would say nothing about it."""


class Keeper:
    """Process that calls a training function, each time in a new process forked from it."""

    def __init__(self, function: Function) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        ours = self._connection
        self._pid = _fork(lambda: _keep(theirs, ours, function))
        theirs.close()
        self.is_lost = False

    def run(
        self, call: Call, timeout: float, is_ending: Callable[[], bool]
    ) -> Generator[Reported | Preparing, None, Outcome]:
        """Call the function, yield its reports, and return the outcome; its processes have ended then.

        The function is ended after `timeout` seconds; `is_ending` says whether the machine is taken away.
        """
        began = time.monotonic()
        try:
            self._connection.send(call)
            outcome = yield from self._events(timeout, is_ending)
        except (EOFError, OSError):
            raise WorkerLost("the process that its function was forked from was killed") from None
        finally:
            self._end()
        return replace(outcome, seconds=time.monotonic() - began)

    def _events(
        self, timeout: float, is_ending: Callable[[], bool]
    ) -> Generator[Reported | Preparing, None, Outcome]:
        began = spoke = time.monotonic()
        has_reported, terminated_at = False, math.inf
        while True:
            event = self._connection.recv() if self._connection.poll(_LOOK_EVERY_S) else None
            now = time.monotonic()
            match event:
                case Exception():
                    raise event
                case Outcome(status="preempted") if terminated_at == math.inf:
                    while not is_ending() and time.monotonic() < now + _SIGTERM_APART_S:
                        time.sleep(_LOOK_EVERY_S)
                    if not is_ending():
                        raise WorkerLost("its process got a SIGTERM of its own")
                    return event
                case Outcome():
                    return event
                case Reported():
                    has_reported = True
                    yield event
            if now - began > timeout:
                return Outcome("failed", math.nan, f"no result within the time-out of {timeout:g} s")
            if terminated_at == math.inf and is_ending():
                terminated_at = now
                self._connection.send(_TERMINATE)
            if now - terminated_at > _GRACE_S:
                return Outcome("preempted", math.nan)
            if not has_reported and now - spoke > _ALIVE_EVERY_S:
                spoke = now
                yield Preparing("running, without a report yet")

    def _end(self) -> None:
        """End the trial's processes; afterwards the keeper waits for the next call, or is lost."""
        try:
            self._connection.send(_END)
            deadline = time.monotonic() + _END_WITHIN_S
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                if self._connection.recv() == _ENDED:
                    return
        except (EOFError, OSError):
            pass
        self.is_lost = True
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _fork(child: Callable[[], NoReturn]) -> int:
    """Fork this process, which may have threads that wait; the child ends with the function.

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
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        child()
    finally:
        os._exit(1)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Linux's sys/prctl.h


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc().prctl(option, value, 0, 0, 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # a keeper loads it once for all of its functions


def _keep(connection: Connection, of_worker: Connection, function: Function) -> NoReturn:
    of_worker.close()
    os.setpgid(0, 0)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the worker says when a trial ends
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        while True:
            call = connection.recv()
            if call != _END:  # a call that was given up before it came
                try:
                    modules = _Attempt(connection, function, call).run()
                except StoreError as error:
                    connection.send(error)
                    while connection.recv() != _END:
                        pass
                    modules = ()
                connection.send(_ENDED)
                # The next trial finds them imported: torch's compiler takes seconds.
                for name in modules:
                    with contextlib.suppress(BaseException):
                        importlib.import_module(name)
    finally:  # the worker has ended
        os._exit(0)


class _Attempt:
    """A function's process, as its keeper sees it.

    The process may close, tear or flood any of its pipes, so nothing here waits for it.
    """

    def __init__(self, connection: Connection, function: Function, call: Call) -> None:
        self._worker, self._modules, self._line = connection, tuple[str, ...](), b""
        self._call, self._tail, self._file = call, b"", call.output
        self._output: TextIOWrapper | None = None
        self._messages, sends = os.pipe()
        self._printed, prints = os.pipe()

        def child() -> NoReturn:
            os.setpgid(0, 0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            connection.close()
            for descriptor in (self._messages, self._printed):
                os.close(descriptor)
            _run(function, call, sends, prints)

        self._process = _fork(child)
        os.close(sends)
        os.close(prints)
        self._open = {self._messages, self._printed}

    def run(self) -> tuple[str, ...]:
        """Pass messages on until the worker ends the attempt; return modules that the function imported."""
        try:
            has_ended = False
            while True:
                ready = select.select([self._worker.fileno(), *self._open], [], [], _LOOK_EVERY_S / 2)[0]
                if self._printed in ready:
                    self._print()
                if self._messages in ready:
                    has_ended |= self._pass_messages()
                if self._worker.fileno() in ready:
                    command = self._worker.recv()
                    if command == _END:
                        return self._modules
                    os.kill(self._process, signal.SIGTERM)
                if not has_ended and not self._open & {*ready} and (how := self._how_it_ended()) is not None:
                    has_ended = True
                    self._send(how)
        finally:
            self._end_processes()
            self._print_rest()
            for descriptor in (self._messages, self._printed):
                os.close(descriptor)
            if self._output is not None:
                self._cut(_MOST_OUTPUT)
                self._output.close()

    def _read(self, pipe: int) -> bytes:
        part = os.read(pipe, _READ_AT_ONCE)
        if not part:
            self._open.discard(pipe)
        return part

    def _print_rest(self) -> None:
        # Processes that the function has started may print without end.
        for _ in range(_MOST_OUTPUT // _READ_AT_ONCE):
            if self._printed not in self._open or not select.select([self._printed], [], [], 0)[0]:
                break
            self._print()

    def _print(self) -> None:
        part = self._read(self._printed)
        self._tail = (self._tail + part)[-_LAST_LINES * _LONGEST_LINE :]
        if part and self._output is None and self._file is not None:
            name, self._file = self._file, None
            with raised_as(StoreError, f"{self._call.results}/{name} cannot be opened"):
                self._output = Folder(self._call.results).append_to(name)
        if self._output is not None:
            with contextlib.suppress(OSError):  # a full disk ends no trial
                os.write(self._output.fileno(), part)
                self._cut(2 * _MOST_OUTPUT)

    def _cut(self, most: int) -> None:
        """Keep the end of an output that has more bytes than `most`."""
        assert self._output is not None
        output = self._output.fileno()
        with contextlib.suppress(OSError):
            if (size := os.fstat(output).st_size) > most:
                end = os.pread(output, _MOST_OUTPUT, size - _MOST_OUTPUT)
                os.ftruncate(output, 0)
                os.write(output, b"[...]\n" + end)

    def _pass_messages(self) -> bool:
        """Pass whole messages on; return whether the outcome is among them."""
        *lines, self._line = (self._line + self._read(self._messages)).split(b"\n")
        if len(self._line) > _LONGEST_MESSAGE:
            lines, self._line = [b"too long"], b""
        for line in lines:
            event = _parse(line)
            self._send(event)
            if isinstance(event, Outcome):
                self._modules = event.modules
                self._open.discard(self._messages)
                return True
        return False

    def _send(self, event: Reported | Outcome | WorkerLost) -> None:
        """Send an event to the worker; the reason of a failure ends in the last lines of the output."""
        if isinstance(event, Outcome) and event.status == "failed":
            self._print_rest()
            lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines()]
            last = [line for line in lines if line and line not in str(event.reason)][-_LAST_LINES:]
            reason = f"{event.reason}; output: {' | '.join(map(on_one_line, last))}" if last else event.reason
            if self._output is not None:
                reason = f"{reason} ({self._call.output})"
            event = replace(event, reason=reason)
        self._worker.send(event)

    def _how_it_ended(self) -> Outcome | WorkerLost | None:
        ended = os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_code != os.CLD_EXITED:
            return WorkerLost(f"its process was killed by signal {ended.si_status}")
        reason = f"its process ended with exit code {ended.si_status} and no result"
        return Outcome("failed", math.nan, reason)

    def _end_processes(self) -> None:
        """Kill the function's process, its group, and all other descendants of this keeper."""
        for kill, target in ((os.killpg, self._process), (os.kill, self._process)):
            with contextlib.suppress(OSError):
                kill(target, signal.SIGKILL)
        os.waitpid(self._process, 0)
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    for child in psutil.Process().children():
                        with contextlib.suppress(psutil.Error):
                            child.kill()
                    time.sleep(0.005)


def _parse(line: bytes) -> Reported | Outcome:
    try:
        match json.loads(line):
            case {"report": fields}:
                return Reported(**fields)
            case {"outcome": fields}:
                points = tuple((step, loss) for step, loss in fields["points"])
                return Outcome(**{**fields, "points": points, "modules": tuple(fields["modules"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return Outcome("failed", math.nan, "its process wrote to a pipe of mup_tpu, which cannot be read now")


def _run(function: Function, call: Call, sends: int, prints: int) -> NoReturn:
    """Call the function in this process, send its outcome, and end."""
    allow_children()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, prints), (2, prints)):
        os.dup2(source, target)
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
        report = made = call.make_report(lambda reported: send(report=vars(reported)))
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(made, "ending", True))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        outcome = Outcome.of(number("the returned loss", function(call.trial, report)))
    except ProgramFailed as error:
        outcome = Outcome("failed", math.nan, str(error))
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
    # From the end: a look at all names would copy the pages that this process shares with its keeper.
    modules = (*itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - before)),)[::-1]
    text = outcome.reason and outcome.reason.encode(errors="backslashreplace").decode()
    send(outcome=vars(replace(outcome, reason=text, modules=modules)))
    os._exit(0)
