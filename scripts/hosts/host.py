"""A machine of its own, made of Linux namespaces: its network, processes, name, home, /tmp and shared memory.

The disk below can only be read. The kernel ends it with the process that made it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
ROOT = Path(__file__).resolve().parents[2]
OWN = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
ENVIRONMENT = {"HOME": "/tmp/home", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Failed(Exception):
    """The rehearsal found what should not be."""


def check(true: bool, what: str) -> None:
    """Fail with a sentence where something is not so."""
    if not true:
        raise Failed(what)


def sh(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True)


def until(what: str, true: Callable[[], Any], seconds: float = 240) -> Any:
    """Wait until something is so, and return what it is."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > deadline:
            raise Failed(f"not in {seconds:g} s: {what}")
        time.sleep(0.2)
    return found


class Host:
    """A machine: making one switches it on."""

    def __init__(self, name: str, number: int, logs: Path) -> None:
        self.name, self.address, self._logs, self._link = name, f"{NETWORK}.{number}", logs, f"to-{name}"
        own = "mount -t tmpfs own /tmp && mount -t tmpfs own /dev/shm"
        if ROOT.is_relative_to("/tmp"):  # where its own /tmp would hide the checkout
            kept = shlex.quote(str(ROOT))
            own = f"mount --bind {kept} /mnt && {own} && mkdir -p {kept} && mount --move /mnt {kept}"
        own += " && mount -o remount,bind,ro /"
        boot = f"hostname {name} && {own} && mkdir -m 700 -p /tmp/home/.ray && ip link set lo up"
        init = ["sh", "-ec", f"{boot} && echo up && exec sleep infinity"]
        log = logs / f"{name}.log"
        with log.open("w") as file:
            self._machine = subprocess.Popen([*OWN, *init], stdout=subprocess.PIPE, stderr=file, text=True)
        assert self._machine.stdout
        if self._machine.stdout.readline() != "up\n":
            raise Failed(f"{name} does not start: {log.read_text()}")
        children = Path(f"/proc/{self._machine.pid}/task/{self._machine.pid}/children")
        self._init = int(children.read_text())
        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(self._init)]
        sh("ip", "link", "add", self._link, *cable)
        sh("ip", "link", "set", self._link, "master", "switch", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def start(self, log: str, *words: object, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command; what it says goes to a log."""
        enter = ["nsenter", "--target", str(self._init), "--net", "--mount", "--pid", "--uts"]
        with (self._logs / log).open("w") as file:
            return subprocess.Popen(
                [*enter, *map(str, words)],
                env=os.environ | ENVIRONMENT | environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def run(self, *words: object, **environment: str) -> tuple[int, str]:
        """Exit code of a command, and what it said."""
        log = f"{self.name}-command.log"
        code = self.start(log, *words, **environment).wait(240)
        return code, (self._logs / log).read_text()

    def write(self, path: str, text: str) -> None:
        """Write a file in its home, for its user alone."""
        file = Path(f"/proc/{self._init}/root/tmp/home", path)
        file.touch(0o600)
        file.write_text(text)

    def cable(self, state: str) -> None:
        """Pull its cable ("down"), or put it back ("up")."""
        sh("ip", "link", "set", self._link, state)

    def cut_power(self) -> None:
        """End all of it at once."""
        os.kill(self._init, signal.SIGKILL)
        self._machine.wait()
