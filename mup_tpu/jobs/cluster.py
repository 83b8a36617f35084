"""The Ray cluster a sweep or search runs on: joining or starting it, and how many packs it holds at once."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter, ray_constants
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.text import Text

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError, first_line
from mup_tpu.files.leftovers import folder_of_this_process
from mup_tpu.jobs.plan import threads_per_pack
from mup_tpu.jobs.tpu_hosts import (
    SliceKind,
    bounds,
    chips_of_a_pack,
    kind_of_most_chips,
    nodes_with,
    tpu_hosts,
)

_LONGEST_FOLDER = 40
"""Characters of the path of a folder in which Ray can make its sockets, whose paths have 107 at most."""

_STARTS = 3
"""Tries to start Ray on this machine."""


@dataclass(frozen=True)
class Slots:
    """Room for packs on a cluster."""

    count: int
    """Packs at once."""
    needs: dict[str, Any]
    """Ray options of the actor of one."""
    execution: str
    """"vmap" on accelerators, "loop" on CPUs: the workers' device decides, which the driver need not have."""
    environment: dict[str, str]
    """Environment of an actor."""
    slice: SliceKind | None = None
    """What an actor reserves for itself, where a pack has a TPU slice of several hosts."""

    def for_tune(self) -> dict[str, float]:
        """The needs as Ray Tune writes them."""
        plain = {"cpu": self.needs["num_cpus"], "gpu": self.needs.get("num_gpus", 0)}
        return {name: n for name, n in plain.items() if n} | self.needs.get("resources", {})


@contextlib.contextmanager
def ray_cluster(address: str | None, console: Console | None = None) -> Iterator[None]:
    """A connection to a cluster, or a cluster of this machine alone; one that is there already is used.

    Args:
        address: of the cluster to join; None starts one.
        console: says on a terminal that it starts, which takes many seconds; None says nothing.

    Raises:
        ConfigError: no cluster answers at the address.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers that are lost are dealt with; Ray would print a traceback of what they had left to say.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray's coming default; silences its warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    doing = Text("starting Ray" if address is None else f"joining the Ray cluster at {address}")
    with (console or Console(quiet=True)).status(doing):
        _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        start_here(**common)
        return
    import mup_tpu

    check_reachable(address)
    try:
        # The cluster's workers run the driver's code, whatever they have installed.
        ray.init(address=address, runtime_env={"py_modules": [mup_tpu]}, **common)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        # It listens, so that a token is what is most likely missing, which Ray says in warnings alone.
        raise ConfigError(
            f"no Ray cluster answers at address {address!r}: {first_line(error)}; if it asks for a token "
            "(Ray warns of that), it is that of ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None


def start_here(**options: Any) -> None:
    """Start a cluster of this machine alone, which nobody reaches from another.

    Args:
        options: of `ray.init`.
    """
    _keep_token_private()
    # As on macOS and Windows: Ray listens on this machine alone where it does not expect others to join. Its
    # option for a node's address does not do: of 127.0.0.1 it makes the address that others reach.
    folder = folder_of_this_process()
    if len(str(folder)) <= _LONGEST_FOLDER:
        options["_temp_dir"] = str(folder)
    can_have_more_nodes, parameters = ray_constants.ENABLE_RAY_CLUSTER, parameter.RayParams
    ray_constants.ENABLE_RAY_CLUSTER = False
    # Two processes less, for which `ray.init` has no option: the autoscaler of one machine has nothing to do,
    # and nobody reads what workers print.
    fewer: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
    parameter.RayParams = partial(parameters, **fewer)  # type: ignore
    try:
        start_patiently(lambda: ray.init(address="local", include_dashboard=False, **options))
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = can_have_more_nodes
        parameter.RayParams = parameters  # type: ignore


def _keep_token_private() -> None:
    """Have the token that lets a driver connect readable by this user alone: Ray makes it readable by all."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return
    token = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # a home that cannot be written to: Ray has the last word on that
        token.parent.mkdir(exist_ok=True)
        token.touch(0o600)  # empty, Ray takes it for none, and writes one into it
        token.chmod(0o600)


def start_patiently(start: Callable[[], Any]) -> None:
    """Call what starts a node until it is up in the half minute that Ray gives it: a machine may be busy.

    Raises:
        ConfigError: it was not in several tries.
    """
    for _ in range(_STARTS):
        try:
            start()
            return
        except Exception as error:  # Ray has no class for it
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    raise ConfigError(f"Ray did not start on this machine in {_STARTS} tries: it is too busy")


def check_reachable(address: str) -> None:
    """Fail in seconds where nobody listens: Ray itself tries for minutes.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ConfigError(f"no Ray cluster answers at address {address!r}: {error}") from None


def threads(trials: int) -> int:
    """CPU threads of a pack such that so many trials use every core of the connected cluster's nodes."""
    cores = [node["Resources"]["CPU"] for node in nodes_with("CPU")]
    return threads_per_pack(trials, int(min(cores)), len(cores)) if cores else 1


def slots(options: RunOptions) -> Slots:
    """How many packs run at once on the connected cluster, and what each asks Ray for.

    Raises:
        ConfigError: the cluster has less than one pack needs, or TPU hosts that cannot be used.
    """
    threads_each = max(1, options.threads)
    environment = {"OMP_NUM_THREADS": str(threads_each), "TOKENIZERS_PARALLELISM": "false"}
    have = ray.cluster_resources()
    on_tpus = options.device == "xla" and os.environ.get("PJRT_DEVICE") != "CPU"
    kind = None
    if on_tpus and options.placement == "slice":
        kind, count = kind_of_most_chips()
        # The actor itself does little and stays beside the driver, safe from what happens to a slice.
        beside = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        needs: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": beside}
    elif on_tpus:
        hosts = tpu_hosts()
        chips = 1 if options.placement == "chip" else chips_of_a_pack(hosts)
        needs = {"num_cpus": 1, "resources": {"TPU": chips}}
        count = int(sum(host["Resources"]["TPU"] // chips for host in hosts))
        environment |= bounds(chips)
    elif options.device == "cuda" or (options.device == "auto" and have.get("GPU", 0) >= 1):
        needs = {"num_cpus": 1, "num_gpus": 1}
        count = int(min(have.get("GPU", 0), have.get("CPU", 0)))
    else:
        needs = {"num_cpus": threads_each}
        count = int(have.get("CPU", 0) // threads_each)
    if count < 1:
        there = ", ".join(f"{name} {have.get(name, 0):g}" for name in ("CPU", "GPU", "TPU"))
        hint = "; PJRT_DEVICE=CPU runs XLA without TPUs" if on_tpus else ""
        raise ConfigError(f"one pack asks for {needs}, but the Ray cluster has {there}{hint}")
    if options.device == "xla":
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
            if name in os.environ:
                environment[name] = os.environ[name]
    execution = "vmap" if options.device == "xla" or "num_gpus" in needs else "loop"
    return Slots(count, needs, execution, environment, kind)
