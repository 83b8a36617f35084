"""Room for packs on this machine, processes forked from a server that has imported torch, and Ray's address.

Importing torch takes seconds. This module does not, so the server can start first.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.errors import ConfigError, reason
from mup_tpu.internals.processes import cores, ensure_server, fork, memory_left

# Modules that the server imports for packs
PACK_MODULES = ("mup_tpu.jobs.preload",)

_STARTS = 3  # tries to start a process

_PAUSE_S = 0.5  # seconds until a dead server is known to be dead

# Measured: memory of torch's imports, which forked processes share, and of a small pack.
SERVER_MB, PACK_MB = 400, 250

CAN_FORK = "forkserver" in multiprocessing.get_all_start_methods()


def workers_that_fit(wanted: int, server_mb: float, worker_mb: float, what: str) -> int:
    """Return how many workers fit the memory that is free here, at most the wanted number.

    All workers share the memory of their imports, `server_mb`; each needs `worker_mb` besides.
    """
    free_mb = min(psutil.virtual_memory().available, memory_left()) / 1e6
    if free_mb < server_mb + worker_mb:
        raise ConfigError(
            f"memory: {free_mb:.0f} MB are free here, and {what} needs about {server_mb + worker_mb:.0f} MB; "
            "end other processes"
        )
    return max(1, min(wanted, int((free_mb - server_mb) / worker_mb)))


def threads_per_pack(trials: int, cores: int, hosts: int = 1) -> int:
    """Return CPU threads of a pack, such that this number of trials uses every core (`cores` a host).

    One thread each if there are trials for all cores: two packs of one thread are faster than one of two
    (measured: 119 k against 105 k tokens/s at width 64, 14.0 k against 12.6 k at width 256, on 2 cores).
    """
    return max(1, cores // math.ceil(trials / hosts))


def killed_for_memory() -> int:
    """Count processes that Linux has killed on this machine because memory was short; 0 elsewhere."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def device_kind(options: RunOptions) -> str:
    """Return the device of packs; torch is imported only for "auto" on a machine with a GPU."""
    if options.device != "auto":
        return options.device
    if not gpus_of_the_machine():
        return "cpu"
    from mup_tpu.devices.base import why_no_gpu

    return "cuda" if why_no_gpu() is None else "cpu"


def gpus_of_the_machine() -> int:
    """Count GPUs by NVIDIA's management library, which comes with the driver; no torch is imported."""
    count = ctypes.c_uint(0)
    with contextlib.suppress(OSError):  # no driver
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return count.value


def unused_gpus(options: RunOptions) -> str:
    """Explain why torch cannot use GPUs of this machine; "" if it can, or the user hid them."""
    if options.device != "auto" or "CUDA_VISIBLE_DEVICES" in os.environ or not gpus_of_the_machine():
        return ""
    from mup_tpu.devices.base import why_no_gpu

    if (why := why_no_gpu()) is None:
        return ""
    return f"training on the CPU, as torch sees no GPU here ({why or 'reason unknown'})"


def execution(options: RunOptions) -> str:
    if options.execution != "auto":
        return options.execution
    if device_kind(options) == "cpu":
        return "loop"
    from mup_tpu.devices import get_device

    return get_device(options.device).execution


def visible_gpus() -> list[dict[str, str]]:
    """Return the environment by which a process sees one GPU, for each GPU of this process.

    CUDA counts the GPUs of a container from 0, and shows those that CUDA_VISIBLE_DEVICES names before the
    first that is not there.
    """
    indices = list(map(str, range(gpus_of_the_machine())))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = indices if named is None or not indices else [name.strip() for name in named.split(",")]
    known = itertools.takewhile(lambda name: name in indices or name.startswith(("GPU-", "MIG-")), names)
    return [{"CUDA_VISIBLE_DEVICES": name} for name in known]


def gpu(options: RunOptions) -> str:
    """Return the name of a GPU that packs train on; "" on other devices."""
    if device_kind(options) in ("cpu", "tpu", "xla"):
        return ""
    from mup_tpu.devices import get_device

    device = get_device(options.device)
    return device.name if device.torch_device.type == "cuda" else ""


def gpus(options: RunOptions) -> list[dict[str, str]]:
    return visible_gpus() if gpu(options) else []


def room(trials: int, options: RunOptions) -> tuple[int, int]:
    """Return packs at once on this machine, and CPU threads of each, for this number of trials."""
    if not CAN_FORK:
        return 1, options.threads or cores()
    if device_kind(options) != "cpu":  # a GPU trains one pack at a time
        packs = max(1, min(len(gpus(options)), trials))
        return packs, options.threads or max(1, cores() // packs)
    threads = options.threads or threads_per_pack(trials, cores())
    packs = workers_that_fit(max(1, cores() // threads), SERVER_MB, PACK_MB, "training")
    return packs, threads


def start_server(trials: int, where: SweepOptions, options: RunOptions) -> None:
    """Start the server if a sweep of this many trials would use it, without waiting for its imports."""
    if where.address is not None or options.device in ("tpu", "xla") or not CAN_FORK:
        return
    # On a machine with GPUs, this process imports torch at the same time to look for them.
    if (options.device != "cpu" and gpus_of_the_machine()) or room(trials, options)[0] > 1:
        ensure_server(PACK_MODULES)


def start_process(
    target: Callable[..., None], arguments: tuple[Any, ...], preload: Sequence[str] = PACK_MODULES
) -> BaseProcess:
    """Fork a process from the server, which ends with this process; a new server imports `preload`."""
    for attempt in range(_STARTS):
        if attempt:
            time.sleep(_PAUSE_S)
        ensure_server(preload)
        try:
            return fork(target, arguments)
        except (EOFError, OSError) as error:  # the server has died; the next one may not
            why = reason(error)
    raise ConfigError(
        f"the server that processes are forked from died at each of {_STARTS} starts ({why}); is memory "
        "short on this machine?"
    )


_CONNECT_S = 5.0  # seconds that a host has to accept a connection


def find_cluster(address: str) -> str:
    """Return the address of a Ray cluster once something listens there; Ray itself would try for minutes.

    "auto" is `RAY_ADDRESS`, or the cluster that `ray start` has last started on this machine.
    """
    if address == "auto":
        note = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")  # noqa: S108 (Ray's place)
        try:
            address = os.environ.get("RAY_ADDRESS") or note.read_text().strip()
        except OSError:
            raise ConfigError(
                "address 'auto' finds no Ray cluster on this machine; start one with `ray start --head`"
            ) from None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise ConfigError(
            f"address {address!r} is not allowed: write local, auto or HOST:PORT, as 10.0.0.1:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at address {address!r}: {reason(error)}") from None
    return address
