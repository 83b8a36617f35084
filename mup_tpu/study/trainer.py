"""Trainers of a study, functions or programs with a trial's values in their words, and the job of a trial."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import math
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from mup_tpu.config.values import as_number, on_one_line
from mup_tpu.errors import ConfigError, StoreError, first_line, reason
from mup_tpu.files import Folder, short_hash
from mup_tpu.jobs.driver import Job, Preparing, Surroundings
from mup_tpu.study.attempt import Call, Function, Keeper, Outcome, ProgramFailed
from mup_tpu.study.report import Report, Trial
from mup_tpu.training.process import handling

if TYPE_CHECKING:
    from mup_tpu.study.space import Space

_NAME = r"[\w.]+:[\w.]+"
_LONGEST_LINE = 10_000  # bytes
_REST_S = 3.0  # seconds to read what a program has left in its pipe


def find_trainer(train: Any, space: Space) -> Function:
    """Find the function of a study: itself, `package.module:function`, or a command line."""
    if isinstance(train, str):
        if not re.fullmatch(_NAME, train.strip()):
            return Program(train, space)
        train = load(train.strip(), "trainer")
    name = getattr(train, "__name__", type(train).__name__)
    if not callable(train):
        raise ConfigError(f"trainer {train!r} is not a function")
    try:
        inspect.signature(train).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"trainer {name}{inspect.signature(train)} cannot be called with a trial and its report: "
            f"{error}; write def {name}(trial, report)"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return train  # type: ignore[no-any-return]


def load(text: str, what: str) -> Any:
    """Load the object that `package.module:name` names; `what` names it in errors."""
    if not re.fullmatch(_NAME, text):
        raise ConfigError(f"{what} {text!r} is not of the form my_package.my_module:name")
    module, name = text.split(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the installed command does not
    try:
        loaded: Any = importlib.import_module(module)
    except Exception as error:  # a module raises what it likes
        raise ConfigError(f"{what} {text} cannot be imported: {first_line(error)}") from None
    for part in name.split("."):
        if not hasattr(loaded, part):
            raise ConfigError(f"{what} {text}: module {module} has no {name}")
        loaded = getattr(loaded, part)
    return loaded


def fingerprint(train: Function) -> str | None:
    """Hash the code of a trainer without its comments: a function's module, or a program's words and files.

    Returns None where the code cannot be read.
    """
    if isinstance(train, Program):
        files = [Path(word) for word in train.words if os.path.isfile(word)]
        contents = [_without_comments(path.read_bytes()) for path in files if path.stat().st_size < 2**20]
        return short_hash("\n".join([*train.words, *contents]))
    try:
        module = inspect.getmodule(train)
        source = inspect.getsource(module if getattr(module, "__file__", None) and module else train)
    except (OSError, TypeError):
        return None
    return short_hash(_without_comments(source.encode()))


def _without_comments(source: bytes) -> str:
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):  # not Python
        return short_hash(source)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    # cloudpickle sends functions under functools.cache by name, but workers lack a script's `__main__`.
    def __init__(self, file: io.BytesIO, by_value: set[str]) -> None:
        super().__init__(file)
        self._by_value = by_value

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ in self._by_value:
            return _cache_again, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _cache_again(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def pickled(function: Function, by_value: bool) -> bytes:
    """Pickle a function, of a notebook or script too; `by_value` with its module, which hosts may lack."""
    name = getattr(function, "__module__", None) or "__main__"
    includes_module = by_value and name in sys.modules
    includes_module &= name.partition(".")[0] not in ("mup_tpu", "__main__")
    try:
        if includes_module:
            cloudpickle.register_pickle_by_value(sys.modules[name])
        with io.BytesIO() as buffer:
            _Pickler(buffer, {"__main__", name} if includes_module else {"__main__"}).dump(function)
            return buffer.getvalue()
    except Exception as error:  # objects in the function raise what they like
        raise ConfigError(
            f"trainer cannot be sent to a worker: {first_line(error)}; open files, locks and connections "
            "inside the function"
        ) from None
    finally:
        if includes_module:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


class Program:
    """A training function that runs a program, without a shell.

    The result is the last line of standard output. In each word of the command line `{name}` becomes the
    trial's value, `{folder}` its folder for checkpoints, `{id}` its id.
    """

    def __init__(self, line: str, space: Space) -> None:
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"trainer {line!r} is not a command line: {reason(error)}") from None
        if not self.words:
            raise ConfigError("trainer is empty: write my_package.my_module:train, or a command line")
        if "{" not in self.words[0] and shutil.which(self.words[0]) is None:
            raise ConfigError(f"trainer: there is no program {self.words[0]!r} here")
        names = {*space.columns, "seed", "folder", "id"}
        for word in self.words:
            try:
                fields = [field for _, field, _, _ in string.Formatter().parse(word) if field is not None]
            except ValueError as error:
                raise ConfigError(
                    f"trainer: {word!r}: {reason(error)}; write {{{{ and }}}} for braces"
                ) from None
            if unknown := [field for field in fields if field not in names]:
                raise ConfigError(
                    f"trainer: {{{unknown[0]}}} in {word!r} is not one of {', '.join(sorted(names))}"
                )

    def __call__(self, trial: Trial, report: Report) -> Any:
        """Run the program; print its output as it comes."""
        values = {**trial.values, "folder": report.folder, "id": trial.id}
        texts = {k: repr(v) if isinstance(v, float) else str(v) for k, v in values.items()}
        words = [word.format(**texts) for word in self.words]
        tail = bytearray()
        try:
            # In a new process group: `kill 0` in a script means the script.
            program = subprocess.Popen(words, stdout=subprocess.PIPE, process_group=0)
        except OSError as error:
            raise ProgramFailed(f"{words[0]} cannot be started: {reason(error)}") from None
        assert program.stdout is not None
        output = program.stdout.fileno()

        def pass_on() -> None:
            while part := os.read(output, 65536):
                with contextlib.suppress(OSError):
                    os.write(1, part)
                tail[:] = (tail + part)[-_LONGEST_LINE:]

        reader = threading.Thread(target=pass_on, daemon=True)
        reader.start()
        if code := program.wait():
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise ProgramFailed(f"{words[0]} {how}")
        reader.join(_REST_S)  # processes that it leaves behind may keep its output open
        lines = bytes(tail).decode(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else ""
        if (value := as_number(last)) is None:
            shown = repr(last if len(last) <= 60 else f"{last[:57]}...") if last else "nothing"
            raise ProgramFailed(f"its last line of output is {shown}, not a number")
        return value


@dataclass(frozen=True)
class How:
    """Settings for each trial of a study."""

    folder: str  # folder or fsspec URL of the study
    threads: int = 1  # CPU threads for libraries of the function
    timeout: float = math.inf  # seconds after which a trial counts as failed


@dataclass(eq=False)
class FunctionJob(Job):
    """Job of one trial of a study."""

    payload: bytes  # the pickled function
    trial: Trial
    how: How
    shown: Collection[str]  # names of values in lines of progress
    shorter: Sequence[str] = ()  # ids of finished trials from whose checkpoints this one may go on

    def __post_init__(self) -> None:
        self.trials = [self.trial]
        self.values = " ".join(f"{name} {on_one_line(self.trial.values[name])}" for name in self.shown)

    def __str__(self) -> str:
        return str(self.trial)

    def was_preempted(self, result: Outcome) -> bool:
        return result.status == "preempted"

    def run(self, here: Surroundings) -> Generator[Any, None, Outcome]:
        """Import the function's modules, fork a process that calls it, and pass its reports on."""
        if "OMP_NUM_THREADS" not in os.environ:  # else the others follow it, and would override it
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                os.environ.setdefault(name, str(self.how.threads))
        yield Preparing("importing the trainer")
        function = here.once(self.payload, self._load)
        keepers = here.once(("keepers", self.payload), list[Keeper])
        if not keepers or keepers[-1].is_lost:
            keepers.append(Keeper(function))
        folder = Folder(self.how.folder) / "work" / self.trial.id
        if folder.is_local:
            if os.path.islink(folder.path):
                raise StoreError(f"{folder} is a link: the trial would write its checkpoints elsewhere")
            os.makedirs(folder.path, exist_ok=True)
        if not folder.names():
            work = Folder(self.how.folder) / "work"
            if begun := next((name for name in self.shorter if (work / name).names()), None):
                work.copy(begun, self.trial.id)
        report = functools.partial(Report, folder.path)
        output = f"output/{self.trial.id}.txt" if folder.is_local else None  # a bucket's objects cannot grow
        call = Call(self.trial, report, self.how.folder, output)
        signals: list[int] = []
        handlers = {signal.SIGTERM: lambda number, frame: signals.append(number)}
        with handling(handlers if here.handles_sigterm else {}):
            return (yield from keepers[-1].run(call, self.how.timeout, lambda: bool(signals)))

    def _load(self) -> Any:
        try:
            return cloudpickle.loads(self.payload)
        except Exception as error:
            raise ConfigError(f"trainer cannot be imported by a worker: {first_line(error)}") from None
