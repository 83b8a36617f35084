"""Ray cluster of a sweep or search: connection or start, and room for packs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.text import Text

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError, Preempted, first_line
from mup_tpu.files.leftovers import folder_of_this_process
from mup_tpu.internals.ray import alone_on_this_machine, safe_job
from mup_tpu.jobs.address import check_answers, find
from mup_tpu.jobs.this_machine import threads_per_pack
from mup_tpu.training.process import handling

# Module with a function `slots` for a device whose hosts Ray describes by labels. It is imported by this
# name, at first use, since the room of TPUs stands above this one.
ROOMS = {"xla": "mup_tpu.tpu.hosts"}

_STARTS = 3  # tries to start Ray on this machine


@dataclass(frozen=True)
class Slots:
    """Room for packs on a cluster."""

    count: int
    """Packs at once."""
    needs: dict[str, Any]
    """Ray options of an actor; each runs one pack at a time."""
    execution: str
    """"vmap" on accelerators, "loop" on CPUs, by the workers' device."""
    environment: dict[str, str]
    """Environment of an actor."""
    prepare: Callable[[], None] | None = None
    """Function that a worker calls first, before it imports torch."""
    actor: type | None = None
    """Class of the actors, if it is not `HostActor`."""
    arguments: tuple[Any, ...] = ()
    """Arguments of this class, after the folder of logs."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Return needs for comparison, without the strategy: Ray's strategies for one node are unequal."""
        needs = {name: need for name, need in self.needs.items() if name != "scheduling_strategy"}
        return needs, self.environment, self.prepare, self.actor, self.arguments


@contextlib.contextmanager
def ray_cluster(address: str | None, console: Console | None = None) -> Iterator[None]:
    """Connect to the cluster at an address, or start one of this machine only (None).

    An existing connection is used. The console shows a notice, since a start takes many seconds.

    Raises:
        ConfigError: no cluster answers at the address.
        Preempted: SIGTERM came while the connection was open.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The scheduler reports lost workers; Ray would print tracebacks of their last events.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray's coming default; silences its warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    doing = Text("starting Ray" if address is None else f"joining the Ray cluster at {address}")
    with (console or Console(quiet=True)).status(doing):
        _connect(address)
    try:
        with handling({signal.SIGTERM: _preempt}):  # Ray's own handler prints a C++ stack
            yield
    finally:
        ray.shutdown()


def _preempt(number: int, frame: object) -> None:
    raise Preempted("ended by SIGTERM; checkpoints and stored trials are kept, and the same command goes on")


def _connect(address: str | None) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    common["job_config"] = safe_job()
    if address is None:
        start_here(**common)
        return
    import mup_tpu

    address = find(address)
    check_answers(address)
    try:
        # The cluster's workers run the driver's code, not their installed version.
        ray.init(address=address, runtime_env={"py_modules": [mup_tpu]}, **common)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        # Something listens, so the token is most likely missing; Ray mentions that only in warnings.
        raise ConfigError(
            f"no Ray cluster answers at address {address!r}: {first_line(error)}; if it asks for a token "
            "(Ray warns of that), put the token into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None


def start_here(**options: Any) -> None:
    """Start a cluster that other machines cannot reach, with options of `ray.init`."""
    _keep_token_private()
    # Ray lets all users write to its folder, so that it lies in one that only this user can enter.
    options["_temp_dir"] = str(folder_of_this_process() / "r")
    with alone_on_this_machine():
        start_patiently(lambda: ray.init(address="local", include_dashboard=False, **options))


def _keep_token_private() -> None:
    """Make the drivers' token readable by this user only; Ray makes it readable by all."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return
    # Ray reports a home without write permission, or none.
    with contextlib.suppress(OSError, RuntimeError):
        token = Path.home() / ".ray" / "auth_token"
        token.parent.mkdir(exist_ok=True)
        token.touch(0o600)  # Ray writes a token into an empty file
        token.chmod(0o600)


def start_patiently(start: Callable[[], Any]) -> None:
    """Start a node; on a busy machine, where Ray's half minute is too short, try again.

    Raises:
        ConfigError: several tries were too slow.
    """
    for _ in range(_STARTS):
        try:
            start()
            return
        except Exception as error:  # Ray has no class for this error
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    raise ConfigError(f"Ray did not start on this machine in {_STARTS} tries: it is too busy")


def nodes_with(resource: str) -> list[dict[str, Any]]:
    """Return the live nodes of the connected cluster that have a resource."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]


def threads(trials: int) -> int:
    """Return the CPU threads of a pack, such that this number of trials uses every core of the cluster."""
    cores = [node["Resources"]["CPU"] for node in nodes_with("CPU")]
    return threads_per_pack(trials, int(min(cores)), len(cores)) if cores else 1


def slots(options: RunOptions) -> Slots:
    """Return the room for packs on the connected cluster.

    Raises:
        ConfigError: the cluster has less than one pack needs, or TPU hosts that cannot be used.
    """
    on_tpus = options.device == "xla" and os.environ.get("PJRT_DEVICE") != "CPU"
    have, threads_each = ray.cluster_resources(), max(1, options.threads)
    environment = {"OMP_NUM_THREADS": str(threads_each), "TOKENIZERS_PARALLELISM": "false"}
    if options.device == "xla":
        environment |= {n: os.environ[n] for n in ("PJRT_DEVICE", "CPU_NUM_DEVICES") if n in os.environ}
    if on_tpus:
        room = importlib.import_module(ROOMS[options.device]).slots(options, environment)
    elif options.device == "cuda" or (options.device == "auto" and have.get("GPU", 0) >= 1):
        count = int(min(have.get("GPU", 0), have.get("CPU", 0)))
        room = Slots(count, {"num_cpus": 1, "num_gpus": 1}, "vmap", environment)
    else:
        execution = "vmap" if options.device == "xla" else "loop"
        count = int(have.get("CPU", 0) // threads_each)
        room = Slots(count, {"num_cpus": threads_each}, execution, environment)
    if room.count < 1:
        hint = "; PJRT_DEVICE=CPU runs XLA without TPUs" if on_tpus else ""
        amounts = _amounts(have, ("CPU", "GPU", "TPU"))
        raise ConfigError(f"one pack asks for {room.needs}, but the Ray cluster has {amounts}{hint}")
    return room


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)


def slots_with(resources: Mapping[str, float]) -> Slots:
    """Return the room for jobs that each ask for resources, by default one CPU.

    Raises:
        ConfigError: no node has the resources of one job.
    """
    needed = {"CPU": 1.0} | dict(resources)
    nodes = [node["Resources"] for node in nodes_with("CPU")]
    count = sum(int(min(node.get(name, 0) / amount for name, amount in needed.items())) for node in nodes)
    if count < 1:
        available = _amounts(ray.cluster_resources(), needed)
        raise ConfigError(
            f"one trial asks for {_amounts(needed, needed)}, and no node has that; the Ray cluster has "
            f"{available}"
        )
    others = {name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")}
    needs = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0), "resources": others}
    prepare = importlib.import_module(ROOMS["xla"]).take_chips if needed.get("TPU") else None
    environment = {"OMP_NUM_THREADS": str(max(1, int(needed["CPU"])))}
    return Slots(count, needs, "loop", environment, prepare)
