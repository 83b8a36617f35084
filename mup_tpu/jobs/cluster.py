"""Ray cluster of a sweep or search: connection or start, room for packs, and the pool of actors.

An actor answers `ready` once it has a place on the cluster, and streams a job's events from `run`. Actors are
kept, so torch is imported and warmed up once. Lost ones are replaced, and new nodes get more.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray import _raylet
from ray.util import get_placement_group, remove_placement_group
from rich.console import Console
from rich.text import Text

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError, Preempted, first_line, raised_as
from mup_tpu.jobs.driver import (
    Ended,
    Failed,
    Finished,
    Job,
    JobContext,
    Lost,
    Pool,
    Refused,
    Request,
    Worker,
    perform,
)
from mup_tpu.jobs.this_machine import find_cluster, threads_per_pack
from mup_tpu.training.process import handling, host_log

# Module with a function `slots` for a device whose hosts Ray describes by labels. It is imported by this
# name, at first use, since the room of TPUs stands above this one.
ROOMS = {"xla": "mup_tpu.tpu.hosts", "tpu": "mup_tpu.tpu.hosts"}

_LOOK_EVERY_S = 5.0
_FAILED_STARTS = 3  # failed starts in a row that end the run


@dataclass(frozen=True)
class Slots:
    """Room for packs on a cluster."""

    count: int  # packs at once
    needs: dict[str, Any]  # Ray options of an actor; each runs one pack at a time
    execution: str  # "vmap" on accelerators, "loop" on CPUs, by the workers' device
    environment: dict[str, str]  # environment of an actor
    prepare: Callable[[], None] | None = None  # a worker calls it before it imports torch
    actor: type | None = None  # class of the actors, if it is not `HostActor`
    arguments: tuple[Any, ...] = ()  # arguments of this class, after the folder of logs

    @property
    def key(self) -> tuple[Any, ...]:
        """Return needs for comparison, without the strategy: Ray's strategies for one node are unequal."""
        needs = {name: need for name, need in self.needs.items() if name != "scheduling_strategy"}
        return needs, self.environment, self.prepare, self.actor, self.arguments


@contextlib.contextmanager
def ray_cluster(address: str, console: Console | None = None) -> Iterator[None]:
    """Connect to the cluster at an address, or start one of this machine only ("local").

    An existing connection is used. The console shows a notice, since a start takes many seconds.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The scheduler reports lost workers; Ray would print tracebacks of their last events.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray's coming default; silences its warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    doing = Text("starting Ray" if address == "local" else f"joining the Ray cluster at {address}")

    def preempt(number: int, frame: object) -> None:
        raise Preempted(
            "ended by SIGTERM; checkpoints and stored trials are kept, and the same command goes on"
        )

    with contextlib.ExitStack() as at_end:
        with (console or Console(quiet=True)).status(doing):
            at_end.enter_context(started_here() if address == "local" else _joined(address))
        at_end.enter_context(handling({signal.SIGTERM: preempt}))  # Ray's own handler prints a C++ stack
        yield


@contextlib.contextmanager
def started_here(**options: Any) -> Iterator[None]:
    """Start Ray on this machine, with options of `ray.init`.

    It gets a token for this run alone, unless the user has disabled tokens. Ray lets all users write to its
    folder, so that it lies in one that only this user can enter; a socket's path must be short.
    """
    tokens = os.environ.get("RAY_AUTH_MODE") != "disabled"
    with (
        tempfile.TemporaryDirectory(prefix="mup_tpu_", dir="/tmp", ignore_cleanup_errors=True) as folder,  # noqa: S108
        authenticated("token", secrets.token_hex(32)) if tokens else contextlib.nullcontext(),
        _connected(
            "Ray does not start on this machine", address="local", include_dashboard=False,
            _temp_dir=f"{folder}/r", **options,
        ),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """Join a cluster; if the cluster asks for a token, give the user's."""
    import mup_tpu

    address = find_cluster(address)
    modes = ("disabled", "token") if has_token() else ("disabled",)
    nobody = f"no Ray cluster answers at address {address!r}"
    with raised_as(ConfigError, nobody, (ray.exceptions.RayError,)):
        mode = next((mode for mode in modes if takes(address, mode)), None)
    if mode is None:
        why = (
            "refuses the token in RAY_AUTH_TOKEN or ~/.ray/auth_token: put that of the cluster there"
            if has_token()
            else "asks for a token, and there is none here: put it into RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
        raise ConfigError(f"the Ray cluster at {address} {why}")
    # The cluster's workers run the driver's code, not their installed version.
    code = {"py_modules": [mup_tpu]}
    why = f"the Ray cluster at {address} cannot be joined"
    with authenticated(mode), _connected(why, address=address, runtime_env=code):
        yield


# Private parts of Ray, as they are in Ray 2.50 to 2.60. A process reads `RAY_AUTH_MODE` and the token only
# when it imports ray. `Config` and `AuthenticationTokenLoader` read them again; 2.50 has no tokens.
# `GcsClient` greets a cluster in milliseconds: `ray.init` tries a refused token for minutes, and a driver
# that sends a token to a cluster without tokens is taken in, but loses its actors.
_library: Any = _raylet
_REFUSED: Any = getattr(ray.exceptions, "AuthenticationError", ())


@contextlib.contextmanager
def authenticated(mode: str, token: str = "") -> Iterator[None]:
    """Have Ray authenticate by a mode, "token" or "disabled", in the block; without a token by the user's."""
    changed = {"RAY_AUTH_MODE": mode} | ({"RAY_AUTH_TOKEN": token} if token else {})
    before = {name: os.environ.pop(name, None) for name in changed}
    os.environ.update(changed)
    _read_again()
    try:
        yield
    finally:
        for name in changed:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})
        _read_again()


def _read_again() -> None:
    _library.Config.initialize("")
    if hasattr(_library, "AuthenticationTokenLoader"):
        _library.AuthenticationTokenLoader.instance().reset_cache()


def has_token() -> bool:
    loader = getattr(_library, "AuthenticationTokenLoader", None)
    return loader is not None and bool(loader.instance().has_token(ignore_auth_mode=True))


def takes(address: str, mode: str) -> bool:
    """Return whether a cluster takes a driver of a mode, with the user's token if it is "token".

    Raises:
        RayError: no cluster answers.
    """
    stderr = os.dup(2)
    with authenticated(mode), open(os.devnull, "wb") as nowhere:  # Ray's library prints a warning
        os.dup2(nowhere.fileno(), 2)
        try:
            _library.GcsClient(address=address)
            return True
        except _REFUSED:
            return False
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


@contextlib.contextmanager
def _connected(why_not: str, **options: Any) -> Iterator[None]:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray has no class for most errors of a start
        ray.shutdown()
        versions = re.findall(r"(?:Ray|Python): (\S+)", str(error))
        raise ConfigError(
            f"{why_not}: it has Ray {versions[0]} and Python {versions[1]}, and this process Ray "
            f"{versions[2]} and Python {versions[3]}"
            if len(versions) == 4
            else f"{why_not}: {first_line(error)}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def nodes_with(resource: str) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]


def threads(trials: int) -> int:
    cores = [node["Resources"]["CPU"] for node in nodes_with("CPU")]
    return threads_per_pack(trials, int(min(cores)), len(cores)) if cores else 1


def slots(options: RunOptions) -> Slots:
    """Return the room for packs on the connected cluster."""
    on_xla = options.device == "xla"
    on_tpus = options.device == "tpu" or (on_xla and os.environ.get("PJRT_DEVICE") != "CPU")
    have, threads_each = ray.cluster_resources(), max(1, options.threads)
    environment = {"OMP_NUM_THREADS": str(threads_each), "TOKENIZERS_PARALLELISM": "false"}
    if on_xla:
        environment |= {n: os.environ[n] for n in ("PJRT_DEVICE", "CPU_NUM_DEVICES") if n in os.environ}
    if on_tpus:
        room = importlib.import_module(ROOMS[options.device]).slots(options, environment)
    elif options.device == "cuda" or (options.device == "auto" and have.get("GPU", 0) >= 1):
        count = int(min(have.get("GPU", 0), have.get("CPU", 0)))
        room = Slots(count, {"num_cpus": 1, "num_gpus": 1}, "vmap", environment)
    else:
        execution = "vmap" if on_xla else "loop"
        count = int(have.get("CPU", 0) // threads_each)
        room = Slots(count, {"num_cpus": threads_each}, execution, environment)
    if room.count < 1:
        hint = "; PJRT_DEVICE=CPU runs XLA without TPUs" if on_xla else ""
        amounts = _amounts(have, ("CPU", "GPU", "TPU"))
        raise ConfigError(f"one pack asks for {room.needs}, but the Ray cluster has {amounts}{hint}")
    return room


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)


def slots_with(resources: Mapping[str, float]) -> Slots:
    """Return the room for jobs that each ask for resources, by default one CPU."""
    needed = {"CPU": 1.0} | dict(resources)
    nodes = [node["Resources"] for node in nodes_with("CPU")]
    count = sum(int(min(node.get(name, 0) / amount for name, amount in needed.items())) for node in nodes)
    if count < 1:
        available = _amounts(ray.cluster_resources(), needed)
        wanted = f"one trial asks for {_amounts(needed, needed)}, and no node has that"
        raise ConfigError(f"{wanted}; the Ray cluster has {available}")
    others = {name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")}
    needs = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0), "resources": others}
    prepare = importlib.import_module(ROOMS["xla"]).take_chips if needed.get("TPU") else None
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, int(needed["CPU"]))))}
    return Slots(count, needs, "loop", environment, prepare)


class HostActor:
    """Actor that runs jobs one after another in its process, after `prepare`, which comes before torch."""

    def __init__(self, results: str | None, prepare: Callable[[], None] | None = None) -> None:
        self._results = results
        self._leads, self._follows = JobContext(), JobContext(writes=False)
        if prepare is not None:
            prepare()

    def ready(self) -> str:
        return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"

    def run(self, job: Job | None, answer: Any = None) -> Iterator[Any]:
        """Run a job, yielding its events up to a question; without a job, go on with the answer to it."""
        with host_log(self._results, capture_warnings=True):
            if job is not None:
                self._events = perform(job, self._leads)
            event = None
            while not isinstance(event, Ended | Request):
                event, answer = self._events.send(answer), None
                yield event

    def follow(self, job: Job) -> Any:
        with host_log(self._results, capture_warnings=True):
            *_, ended = perform(job, self._follows)
        return ended if not isinstance(ended, Finished) else None


def reservation(name: str) -> str:
    return f"mup-tpu-{name}"


def end_actor(actor: Any) -> None:
    ray.kill(actor)
    with contextlib.suppress(ValueError):  # the actor has no placement group
        # Its name is known before the actor has answered.
        remove_placement_group(get_placement_group(reservation(actor._actor_id.hex())))


class _Actor(Worker):
    """Actor with a place on the cluster."""

    def __init__(self, actor: Any, host: str) -> None:
        self.actor, self.where = actor, f" on {host}"


class RayActors(Pool[_Actor]):
    """Actors on the connected cluster, which get jobs once they have a place there.

    An actor that replaces a lost node's may wait long for its place. `look` finds the room, anew as nodes
    come and go, and raises ConfigError if there is none. The actors' logs lie in `results`. `at_most` limits
    actors that start; it may change between two runs of jobs.
    """

    def __init__(
        self, look: Callable[[], Slots], results: str | None = None, at_most: int = sys.maxsize
    ) -> None:
        self._look, self._looked_at = look, time.monotonic()
        self.at_most = at_most
        self._count = (room := look()).count
        actor: Any = ray.remote(room.actor or HostActor)
        self._remote = actor.options(runtime_env={"env_vars": room.environment}, **room.needs)
        self._arguments = (results, *(room.arguments if room.actor else (room.prepare,)))
        self._failed_starts = 0
        self._starting: dict[Any, Any] = {}  # reference to the host's name -> actor
        self._idle: list[_Actor] = []
        self._busy: dict[Any, _Actor] = {}  # stream of events -> actor

    def __exit__(self, *error: object) -> None:
        started = [worker.actor for worker in (*self._idle, *self._busy.values())]
        for actor in [*self._starting.values(), *started]:
            end_actor(actor)

    def fill(self, wanted: int) -> None:
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            try:
                self._count = self._look().count
            except ConfigError:
                self._count = 0
            self._looked_at = time.monotonic()
        have = len(self._starting) + len(self._idle) + len(self._busy)
        for _ in range(min(self._count, self.at_most, wanted) - have):
            actor: Any = self._remote.remote(*self._arguments)
            self._starting[actor.ready.remote()] = actor

    @property
    def has_room(self) -> bool:
        return bool(self._idle)

    def hand(self, job: Job) -> _Actor:
        worker = self._idle.pop()
        self._stream(worker, job)
        return worker

    def _stream(self, worker: _Actor, *arguments: Any) -> None:
        self._busy[worker.actor.run.options(num_returns="streaming").remote(*arguments)] = worker

    def answer(self, worker: _Actor, answer: Any) -> None:
        self._forget(worker)  # its stream ended with the question
        self._stream(worker, None, answer)

    def _forget(self, worker: _Actor) -> None:
        self._busy = {stream: w for stream, w in self._busy.items() if w is not worker}

    def hear(self) -> Iterator[tuple[_Actor, Any]]:
        for stream in self._wait():
            worker = self._busy[stream]
            try:
                event = ray.get(next(stream))
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
                event = Lost(f"its process{worker.where} died: {first_line(error)}", _for_memory(error))
            except ray.exceptions.RayTaskError as error:  # such as a job that cannot be unpickled
                event = Failed(first_line(error.cause or error))
            if isinstance(event, Refused):  # other hosts may not have this error
                event = Failed(first_line(event.error))
            if isinstance(event, Ended) and not isinstance(event, Lost):
                self._idle.append(self._busy.pop(stream))
            yield worker, event

    def _wait(self) -> list[Any]:
        """Return streams with an event; actors that have a place on the cluster become idle."""
        references = [*self._busy, *self._starting]
        if not references:  # no node has room at present
            time.sleep(1.0)
            return []
        ray.wait(references, num_returns=1, timeout=1.0)
        # All ready ones: an actor that is not read would seem silent.
        ready: list[Any] = ray.wait(references, num_returns=len(references), timeout=0)[0]
        for reference in [reference for reference in ready if reference in self._starting]:
            actor = self._starting.pop(reference)
            try:
                self._idle.append(_Actor(actor, ray.get(reference)))
                self._failed_starts = 0
            except ray.exceptions.RayError as error:
                end_actor(actor)
                self._failed_starts += 1
                if self._failed_starts >= _FAILED_STARTS:
                    raise ConfigError(f"workers do not start: {first_line(error)}") from None
        return [reference for reference in ready if reference in self._busy]

    def end(self, worker: _Actor) -> None:
        self._forget(worker)
        end_actor(worker.actor)
        self._looked_at = -math.inf


def _for_memory(error: Exception) -> Literal["no", "perhaps", "surely"]:
    if "running low on memory" in str(error):  # Ray itself killed the worker
        return "surely"
    return "no" if "its node has died" in str(error) else "perhaps"
