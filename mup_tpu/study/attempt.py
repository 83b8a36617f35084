"""Attempt at a trial: a training function in a process of its own, and the end of all that it started.

The process is forked from one that has imported the function's modules. Each trial finds memory, seeds and
devices as the first one did, and a function that dies, hangs or leaves processes behind harms no other.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mup_tpu.errors import first_line
from mup_tpu.internals.multiprocessing import allow_children
from mup_tpu.jobs.job import Preparing, WorkerLost
from mup_tpu.study.report import Ending, Report, Reported, Stopped, number

Function = Callable[[Any, Report], Any]

_ALIVE_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_GRACE_S = 10.0
"""Seconds from SIGTERM in which a function may report once more, and so keep its checkpoint."""
_MOST_OUTPUT = 2**20
"""Bytes of a trial's output that are kept: its end."""


@dataclass(frozen=True)
class Outcome:
    """End of an attempt."""

    status: str
    """"finished", "diverged", "stopped", "failed" or "preempted"."""
    loss: float
    reason: str | None = None
    points: tuple[tuple[int, float], ...] = ()
    """Reported losses by step."""
    step: int = 0
    """Last step that was reported."""
    seconds: float = math.nan
    """Time that the attempt took."""
    modules: tuple[str, ...] = ()
    """Modules that the function imported."""


class Attempt:
    """A function that runs in its own process.

    Args:
        function: called with the trial and its report; returns the loss.
        trial: its first argument.
        make_report: maker of its second argument, from a function that takes reports.
        output: descriptor of the file that its printed output is appended to; None drops it.
    """

    def __init__(
        self,
        function: Function,
        trial: Any,
        make_report: Callable[[Callable[[Reported], None]], Report],
        output: int | None,
    ) -> None:
        self._output = output
        self._connection, theirs = multiprocessing.Pipe()
        life, self._life = os.pipe()
        self._guardian = _fork(lambda: _guard(life, self._life))
        os.close(life)
        os.setpgid(self._guardian, self._guardian)

        def child() -> NoReturn:
            os.setpgid(0, self._guardian)
            os.close(self._life)
            self._connection.close()
            _run(function, trial, make_report, theirs, output)

        self._process = _fork(child)
        theirs.close()

    def events(
        self, timeout: float, is_ending: Callable[[], bool]
    ) -> Iterator[Reported | Preparing | Outcome]:
        """Reports as they come, and at last the outcome.

        Args:
            timeout: seconds after which the function is ended.
            is_ending: whether the machine is being taken away.

        Raises:
            WorkerLost: a signal has killed the process.
        """
        began = spoke = time.monotonic()
        has_reported, told = False, None
        while True:
            if self._connection.poll(_LOOK_EVERY_S):
                with contextlib.suppress(EOFError, OSError):
                    event = self._connection.recv()
                    yield event
                    if isinstance(event, Outcome):
                        return
                    has_reported = True
                    continue
            now = time.monotonic()
            if (outcome := self._cut_short()) is not None:
                yield outcome
                return
            if now - began > timeout:
                yield Outcome("failed", math.nan, f"no result within the time-out of {timeout:g} s")
                return
            if told is None and is_ending():
                told = now
                os.kill(self._process, signal.SIGTERM)
            if told is not None and now - told > _GRACE_S:
                yield Outcome("preempted", math.nan)
                return
            if not has_reported and now - spoke > _ALIVE_EVERY_S:
                spoke = now
                yield Preparing("running, without a report yet")

    def _cut_short(self) -> Outcome | None:
        """Outcome of a process that has ended without one; None while it runs or has more to say."""
        code = self._exit_code()
        if code is None or self._connection.poll():
            return None
        if code < 0:
            raise WorkerLost(f"its process was killed by signal {-code}")
        return Outcome("failed", math.nan, f"its process ended with exit code {code} and no result")

    def _exit_code(self) -> int | None:
        if self._process:
            pid, status = os.waitpid(self._process, os.WNOHANG)
            if pid:
                self._process, self._code = 0, os.waitstatus_to_exitcode(status)
        return None if self._process else self._code

    def end(self) -> None:
        """Kill the process and all of its group, and cut its output to size."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guardian, signal.SIGKILL)
        for pid in (self._guardian, self._process):
            if pid:
                os.waitpid(pid, 0)
        os.close(self._life)
        self._connection.close()
        if self._output is not None:
            with contextlib.suppress(OSError):
                _cut(self._output)


def _fork(child: Callable[[], NoReturn]) -> int:
    """Fork this process, which may have threads that wait; the child ends with the function.

    SIGTERM is blocked in the child until it has a handler of its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
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


def _guard(life: int, theirs: int) -> NoReturn:
    """Lead a process group, and kill it once the holder of the pipe's other end, `theirs`, has died."""
    os.close(theirs)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os.read(life, 1)
    os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _run(
    function: Function,
    trial: Any,
    make_report: Callable[[Callable[[Reported], None]], Report],
    connection: Connection,
    output: int | None,
) -> NoReturn:
    """Call the function in this process, send its outcome, and end."""
    allow_children()
    _redirect(output)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report: Report | None = None
    before = {*sys.modules}
    outcome: tuple[str, float, str | None]
    try:
        report = made = make_report(connection.send)
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(made, "ending", True))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        loss = number("the returned loss", function(trial, report))
        outcome = ("finished", loss, None) if math.isfinite(loss) else ("diverged", math.inf, None)
    except Stopped as stop:
        outcome = ("stopped", made.curve.points[-1][1], str(stop))
    except BaseException as error:
        if isinstance(error, Ending) or (report is not None and report.ending):
            outcome = ("preempted", math.nan, None)
        else:
            traceback.print_exc()
            outcome = ("failed", math.nan, first_line(error))
    points, step = ((), 0) if report is None else (tuple(report.curve.points), report.step)
    sys.stdout.flush()
    sys.stderr.flush()
    status, loss, reason = outcome
    modules = tuple(name for name in sys.modules if name not in before)
    connection.send(Outcome(status, loss, reason, points, step, modules=modules))
    os._exit(0)


def _redirect(output: int | None) -> None:
    """Append printed output of this process to a file."""
    out = os.open(os.devnull, os.O_WRONLY) if output is None else output
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (for the life of the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _cut(output: int) -> None:
    """Keep the end of a long output."""
    size = os.fstat(output).st_size
    if size > _MOST_OUTPUT:
        end = os.pread(output, _MOST_OUTPUT, size - _MOST_OUTPUT)
        os.ftruncate(output, 0)
        os.write(output, b"[...]\n" + end)
