"""Trainers of a study, functions or programs with a trial's values in their words, and the job of a trial.

A program may have a configuration file, YAML, TOML or JSON, of which each trial gets a copy with its values.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import tomli_w
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mup_tpu.config import shown
from mup_tpu.config.grid import ORDERS
from mup_tpu.config.values import on_one_line
from mup_tpu.errors import ConfigError, first_line, raised_as, reason
from mup_tpu.files import MOST_BYTES_OF_CONFIG, Folder, read_local, short_hash
from mup_tpu.jobs.driver import Job, JobContext, Preparing
from mup_tpu.logs import TrainingLog
from mup_tpu.study.attempt import Attempt, Function, FunctionAttempt, Outcome, Output, ProgramAttempt
from mup_tpu.study.report import StudyTrial
from mup_tpu.training.process import handling

if TYPE_CHECKING:
    from mup_tpu.study.grid import StudyGrid


_NAME = r"[\w.]+:[\w.]+"


def find_trainer(
    train: Any, grid: StudyGrid, loss: str | None = None, config: str | None = None
) -> Function | Program:
    """Find the trainer of a study: a function itself, `package.module:function`, or a command line.

    `loss` and `config` are for a command line.
    """
    if isinstance(train, str) and not re.fullmatch(_NAME, train.strip()):
        return Program(train, grid, loss, config)
    if (given := "loss" if loss else "config" if config else None) is not None:
        raise ConfigError(f"{given} is for a command line; a function returns its loss and gets its values")
    if isinstance(train, str):
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


def fingerprint(train: Function | Program) -> str | None:
    """Hash the code of a trainer without its comments: a function's module, or a program's words and files.

    Returns None where the code cannot be read.
    """
    if isinstance(train, Program):
        config = [train.config.path] if train.config else []
        files = [Path(word) for word in [*train.words, *config] if os.path.isfile(word)]
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


def pickled(function: Function | Program, by_value: bool) -> bytes:
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


_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}")


def _names_in(texts: Sequence[str]) -> Iterator[str]:
    return (name for text in texts for name in _FIELD.findall(text) if name)


def fill_in(text: str, values: Mapping[str, Any]) -> str:
    """Replace each `{name}` that has a value by it, and `{{` and `}}` by braces."""

    def value_of(match: re.Match[str]) -> str:
        if (name := match[1]) is None:
            return match[0][0]
        value = values.get(name, match[0])
        return repr(value) if isinstance(value, float) else str(value)

    return _FIELD.sub(value_of, text)


class Program:
    """A training program that runs without a shell, and whose output tells its loss.

    In each word of the command line `{name}` becomes the trial's value, `{folder}` its folder for
    checkpoints, `{id}` its id, and `{config}` the path of its own copy of the configuration `config`.
    """

    def __init__(
        self, line: str, grid: StudyGrid, loss: str | None = None, config: str | None = None
    ) -> None:
        TrainingLog(loss)  # raises for a pattern that names no loss
        self.loss = loss
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"trainer {line!r} is not a command line: {reason(error)}") from None
        if not self.words:
            raise ConfigError("trainer is empty: write my_package.my_module:train, or a command line")
        if "{" not in self.words[0] and shutil.which(self.words[0]) is None:
            raise ConfigError(f"trainer: there is no program {self.words[0]!r} here")
        given = {*_names_in(self.words)}
        names = {*grid.columns, "seed", "folder", "id", "config"}
        for name in sorted(given - names):
            raise ConfigError(f"trainer: {{{name}}} is not one of {', '.join(sorted(names))}")
        if ("config" in given) != (config is not None):
            missing = "config is missing" if config is None else "the command line has no {config}"
            raise ConfigError(f'trainer: {missing}: config = "base.yaml" and {{config}} belong together')
        self.config = None if config is None else ConfigFile(config)
        self._in_config: list[str] = []
        if self.config is not None:
            # The work of a plan's sizes orders them, and sets nothing.
            self._in_config = [name for name in grid.columns if name not in {*given, *ORDERS}]
            given |= {*_names_in([value for value in grid.settings.values() if isinstance(value, str)])}
            if "seed" not in given and self.config.has("seed"):
                self._in_config.append("seed")
        # A program that never gets a value would train the same run again and again.
        varied: dict[str, Sequence[Any]] = {**grid.tuned, "seed": range(grid.num_seeds)}
        varied |= dict.fromkeys(grid.compared[0], grid.compared)
        for name in [name for name, values in varied.items() if len(values) > 1]:
            if name not in given and name not in self._in_config:
                raise ConfigError(f"trainer: the command line has no {{{name}}}, by which trials differ")
        if len(grid.points) > 1 and given.isdisjoint(grid.points[0]) and not self._in_config:
            raise ConfigError(f"trainer: the command line has no {{{grid.measure}}}: all sizes would be one")

    def command(self, trial: StudyTrial, folder: str, copy: Path) -> list[str]:
        values = {**trial.values, "folder": folder, "id": trial.id, "config": str(copy)}
        if self.config is not None:
            filled = {k: fill_in(v, values) if isinstance(v, str) else v for k, v in trial.values.items()}
            self.config.write(copy, {name: filled[name] for name in self._in_config})
        return [fill_in(word, values) for word in self.words]


@dataclass(eq=False)
class FunctionJob(Job):
    """Job of one trial of a study."""

    payload: bytes  # the pickled function
    trial: StudyTrial
    shown: Collection[str]  # names of values in lines of progress
    shorter: Sequence[str]  # ids of finished trials from whose checkpoints this one may go on
    folder: str  # folder or fsspec URL of the study
    threads: int  # CPU threads for libraries of the function
    timeout: float  # seconds after which the trial counts as failed
    asks: bool  # whether the driver is asked at each loss if the trial stops

    def __post_init__(self) -> None:
        self.trials = [self.trial]
        self.values = " ".join(f"{name} {on_one_line(self.trial.values[name])}" for name in self.shown)

    def __str__(self) -> str:
        return str(self.trial)

    def was_preempted(self, result: Outcome) -> bool:
        return result.status == "preempted"

    def run(self, here: JobContext) -> Generator[Any, None, Outcome]:
        """Run the function or program in a process of its own, and pass its reports on."""
        yield Preparing("importing the trainer")
        added = here.once("threads", self._set_threads)
        function = here.once(self.payload, self._load)
        results = Folder(self.folder)
        folder = results / "work" / self.trial.id
        if folder.is_local:
            os.makedirs(folder.path, exist_ok=True)
        if not folder.names():
            work = results / "work"
            if begun := next((name for name in self.shorter if (work / name).names()), None):
                work.copy(begun, self.trial.id)
        name = f"output/{self.trial.id}.txt"
        attempt: Attempt
        with contextlib.ExitStack() as at_end:
            if isinstance(function, Program):
                if results.is_local:
                    place = Path(results.path, "output")
                    place.mkdir(exist_ok=True)
                else:
                    place = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
                suffix = Path(function.config.path).suffix if function.config else ""
                words = function.command(self.trial, folder.path, place / f"{self.trial.id}{suffix}")
                if "PYTHONUNBUFFERED" not in os.environ:  # else lines come in blocks of 8 kB
                    added = {**added, "PYTHONUNBUFFERED": "1"}
                gpu = {n: os.environ[n] for n in ("CUDA_VISIBLE_DEVICES",) if n in os.environ}
                title = " ".join(f"{name}={value}" for name, value in {**gpu, **added}.items())
                output = Output(self.folder, name, f"$ {title} {shlex.join(words)}\n")
                attempt = ProgramAttempt(
                    output, self.trial, folder.path, self.asks, words, added, function.loss
                )
            else:
                output = Output(self.folder, name)
                attempt = FunctionAttempt(output, self.trial, folder.path, self.asks, function, here.private)
            signals: list[int] = []
            handlers = {signal.SIGTERM: lambda number, frame: signals.append(number)}
            with handling(handlers if here.handles_sigterm else {}):
                return (yield from attempt.run(self.timeout, lambda: bool(signals)))

    def _set_threads(self) -> dict[str, str]:
        """Set the threads of libraries, before they are imported, where the user has set none."""
        if "OMP_NUM_THREADS" in os.environ:  # the others follow it
            return {}
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        added = {name: str(self.threads) for name in names if name not in os.environ}
        os.environ.update(added)
        return added

    def _load(self) -> Any:
        try:
            return cloudpickle.loads(self.payload)
        except Exception as error:
            raise ConfigError(f"trainer cannot be imported by a worker: {first_line(error)}") from None


class ConfigFile:
    """A configuration in a file, to be copied with other values under dotted names such as `optim.lr`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._content, self._suffix = b"", Path(path).suffix.lower()
        if self._suffix not in _FORMATS:
            raise ConfigError(f"config {path!r} is not a file *.yaml, *.yml, *.toml or *.json")
        with raised_as(ConfigError, f"config {path} cannot be read"):
            self._content = read_local(path, MOST_BYTES_OF_CONFIG)
        if not isinstance(self._read(), Mapping):
            raise ConfigError(f"config {path} holds no names with values")

    def _read(self) -> Any:
        with raised_as(
            ConfigError, f"config {self.path} cannot be read", (ValueError, YAMLError, RecursionError)
        ):
            return _FORMATS[self._suffix][0](self._content.decode("utf-8-sig"))

    def has(self, name: str) -> bool:
        part = self._read()
        for key in name.split("."):
            if not isinstance(part, Mapping) or key not in part:
                return False
            part = part[key]
        return True

    def write(self, target: Path, values: Mapping[str, Any]) -> None:
        """Write a copy with the values under their names; a part of a name may be the index of a list."""
        content = self._read()
        for name, value in values.items():
            part, (*parents, last) = content, name.split(".")
            for key in parents:
                place = self._place(part, key, name)
                if isinstance(part, dict) and part.get(place) is None:
                    part[place] = {}
                part = part[place]
            part[self._place(part, last, name)] = value
        target.write_text(_FORMATS[self._suffix][1](content), encoding="utf-8")

    def _place(self, part: Any, key: str, name: str) -> str | int:
        if isinstance(part, list) and key.isdigit() and int(key) < len(part):
            return int(key)
        if isinstance(part, dict):
            return key
        raise ConfigError(f"config {self.path}: {name} cannot be set in {shown(part)}")


def _yaml() -> YAML:
    yaml = YAML(pure=True)  # keeps comments, order, and numbers as they were written
    yaml.preserve_quotes = True
    yaml.width = 2**20  # columns: no line is broken
    # Loaders of YAML 1.1 read `1e-05` as text.
    yaml.representer.add_representer(float, _as_float)
    return yaml


def _as_float(representer: Any, value: float) -> Any:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


def _write_yaml(content: Any) -> str:
    with io.StringIO() as file:
        _yaml().dump(content, file)
        return file.getvalue()


_FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".yaml": (lambda text: _yaml().load(text), _write_yaml),
    ".yml": (lambda text: _yaml().load(text), _write_yaml),
    ".toml": (tomllib.loads, tomli_w.dumps),
    ".json": (json.loads, lambda content: json.dumps(content, indent=2)),
}
