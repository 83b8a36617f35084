"""Pool of Ray actors, one a slot of the cluster.

An actor answers `ready` once it has a place on the cluster, and streams a job's events from `run`. Actors are
kept, so torch is imported and warmed up once. Lost ones are replaced, and new nodes get more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import ray
from ray.util import get_placement_group, remove_placement_group

from mup_tpu.errors import ConfigError, first_line
from mup_tpu.internals.ray import actor_id
from mup_tpu.jobs.cluster import Slots
from mup_tpu.jobs.job import (
    Ended,
    Failed,
    Finished,
    Job,
    Lost,
    Pool,
    Question,
    Refused,
    Surroundings,
    Worker,
    perform,
)
from mup_tpu.training.process import host_log

_LOOK_EVERY_S = 5.0
_FAILED_STARTS = 3  # failed starts in a row that end the run


class HostActor:
    """Actor that runs jobs one after another in its process.

    Args:
        results: folder or fsspec URL of its log; None keeps none.
        prepare: function to call first, before a job imports torch.
    """

    def __init__(self, results: str | None, prepare: Callable[[], None] | None = None) -> None:
        self._results = results
        self._leads, self._follows = Surroundings(), Surroundings(writes=False)
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
            while not isinstance(event, Ended | Question):
                event, answer = self._events.send(answer), None
                yield event

    def follow(self, job: Job) -> Any:
        """Take part in a job that another host of a slice reports; return how it failed here, or None."""
        with host_log(self._results, capture_warnings=True):
            *_, ended = perform(job, self._follows)
        return ended if not isinstance(ended, Finished) else None


def reservation(name: str) -> str:
    """Return the name of the placement group that an actor of this id reserves, if it reserves one."""
    return f"mup-tpu-{name}"


def end_actor(actor: Any) -> None:
    """End an actor at once, and free the placement group that it reserved."""
    ray.kill(actor)
    with contextlib.suppress(ValueError):  # it has none
        remove_placement_group(get_placement_group(reservation(actor_id(actor))))


class _Actor(Worker):
    """Actor with a place on the cluster."""

    def __init__(self, actor: Any, host: str) -> None:
        self.actor, self.where = actor, f" on {host}"


class RayActors(Pool[_Actor]):
    """Actors on the connected cluster, which get jobs once they have a place there.

    An actor that replaces a lost node's may wait long for its place.

    Args:
        room: jobs at once to begin with, and an actor's needs.
        look: finds the room anew as nodes come and go; `ConfigError` means that there is none now.
        results: folder or fsspec URL of the actors' logs; None keeps none.
    """

    def __init__(self, room: Slots, look: Callable[[], Slots], results: str | None = None) -> None:
        self._room, self._look, self._looked_at = room, look, time.monotonic()
        actor: Any = ray.remote(room.actor or HostActor)
        self._remote = actor.options(runtime_env={"env_vars": room.environment}, **room.needs)
        self._arguments = (results, *(room.arguments if room.actor else (room.prepare,)))
        self._failed_starts = 0
        self._starting: dict[Any, Any] = {}
        """Reference to the host's name -> actor."""
        self._idle: list[_Actor] = []
        self._busy: dict[Any, _Actor] = {}
        """Stream of events -> actor."""

    def __exit__(self, *error: object) -> None:
        started = [worker.actor for worker in (*self._idle, *self._busy.values())]
        for actor in [*self._starting.values(), *started]:
            end_actor(actor)

    def fill(self, wanted: int) -> None:
        """Start actors in the cluster's present room, up to this number."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._room, self._looked_at = self._room_now(), time.monotonic()
        have = len(self._starting) + len(self._idle) + len(self._busy)
        for _ in range(min(self._room.count, wanted) - have):
            actor: Any = self._remote.remote(*self._arguments)
            self._starting[actor.ready.remote()] = actor

    def _room_now(self) -> Slots:
        try:
            return self._look()
        except ConfigError:
            return dataclasses.replace(self._room, count=0)

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
        """Yield events of busy actors, after waiting up to a second for one.

        Raises:
            ConfigError: actors do not start.
        """
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
        if not references:  # no node is left for now
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
        """Kill an actor, whose node may be gone."""
        self._forget(worker)
        end_actor(worker.actor)
        self._looked_at = -math.inf


def _for_memory(error: Exception) -> Literal["no", "perhaps", "surely"]:
    """Return whether the system or Ray killed an actor because memory was short, as far as its error says."""
    if "running low on memory" in str(error):  # Ray's words, where it is Ray that kills
        return "surely"
    return "no" if "its node has died" in str(error) else "perhaps"
