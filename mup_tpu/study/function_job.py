"""Job that runs a training function for one trial."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

from mup_tpu.errors import ConfigError, StoreError, first_line
from mup_tpu.files import Folder
from mup_tpu.jobs.job import Job, Preparing, Surroundings
from mup_tpu.study.attempt import Call, Function, Keeper, Outcome
from mup_tpu.study.report import Report
from mup_tpu.study.space import Trial
from mup_tpu.training.process import handling


def check_function(function: Any) -> None:
    """Check that a training function can be called with a trial and its report.

    Raises:
        ConfigError: it cannot be called so.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigError(f"trainer {function!r} is not a function")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"trainer {name}{inspect.signature(function)} cannot be called with a trial and its report: "
            f"{error}; write def {name}(trial, report)"
        ) from None
    except ValueError:  # a builtin without a signature
        pass


def pickled(function: Function, by_value: bool) -> bytes:
    """Pickle of a function for other processes; functions of notebooks and scripts too.

    Args:
        function: training function.
        by_value: whether to include its module, which other machines may lack.

    Raises:
        ConfigError: an object in it cannot be sent.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    along = (
        by_value and module is not None and module.__name__.partition(".")[0] not in ("mup_tpu", "__main__")
    )
    try:
        if along:
            cloudpickle.register_pickle_by_value(module)
        content: bytes = cloudpickle.dumps(function)
        return content
    except Exception as error:  # objects in the function raise what they like
        raise ConfigError(
            f"trainer cannot be sent to a worker: {first_line(error)}; open files, locks and connections "
            "inside the function"
        ) from None
    finally:
        if along:
            cloudpickle.unregister_pickle_by_value(module)


@dataclass(frozen=True)
class How:
    """Settings for each trial of a study."""

    folder: str
    """Folder or fsspec URL of the study."""
    threads: int = 1
    """CPU threads for libraries of the function."""
    timeout: float = math.inf
    """Seconds after which a trial counts as failed."""
    halving: bool = False
    """Whether trials far behind the best stop early."""

    def trial_folder(self, trial: Trial) -> str:
        """Folder of a trial's checkpoints."""
        return f"{Folder(self.folder) / 'work' / trial.id}"

    def output(self, trial: Trial) -> str | None:
        """File for a trial's printed output; None in a bucket, whose objects cannot grow."""
        return f"output/{trial.id}.txt" if Folder(self.folder).is_local else None

    def rungs(self, group: str) -> str | None:
        """Folder with losses of the trials among which halving stops those far behind."""
        return f"{Folder(self.folder) / 'rungs' / group}" if self.halving else None


class FunctionJob(Job):
    """Job of one trial of a study.

    `payload` is the pickled function; `group` names the trials among which halving stops those far behind.
    """

    def __init__(self, payload: bytes, trial: Trial, how: How, group: str) -> None:
        self.payload, self.trial, self.how, self.group = payload, trial, how, group
        self.trials = [trial]

    def __str__(self) -> str:
        return str(self.trial)

    def was_preempted(self, result: Outcome) -> bool:
        """Whether SIGTERM ended the trial."""
        return result.status == "preempted"

    def run(self, here: Surroundings) -> Generator[Any, None, Outcome]:
        """Import the function's modules, fork a process that calls it, and pass its reports on.

        Raises:
            ConfigError: the function cannot be imported here.
            StoreError: its folder or output is a link.
            WorkerLost: a signal has killed its process.
        """
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, str(self.how.threads))
        yield Preparing("importing the trainer")
        function, keepers = (
            here.once(self.payload, self._load),
            here.once(("keepers", self.payload), list[Keeper]),
        )
        if not keepers or keepers[-1].is_lost:
            keepers.append(Keeper(function))
        folder = self.how.trial_folder(self.trial)
        if Folder(folder).is_local:
            if os.path.islink(folder):
                raise StoreError(f"{folder} is a link: the trial would write its checkpoints elsewhere")
            os.makedirs(folder, exist_ok=True)
        make_report = functools.partial(Report, folder, rungs=self.how.rungs(self.group), name=self.trial.id)
        call = Call(self.trial, make_report, self.how.folder, self.how.output(self.trial))
        with _ending(here) as is_ending:
            return (yield from keepers[-1].run(call, self.how.timeout, is_ending))

    def _load(self) -> Function:
        try:
            function: Function = cloudpickle.loads(self.payload)
        except Exception as error:
            raise ConfigError(f"trainer cannot be imported by a worker: {first_line(error)}") from None
        return function


@contextlib.contextmanager
def _ending(here: Surroundings) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGTERM has come; always False where it does not reach the job."""
    came: list[int] = []
    with handling(
        {signal.SIGTERM: lambda number, frame: came.append(number)} if here.handles_sigterm else {}
    ):
        yield lambda: bool(came)
