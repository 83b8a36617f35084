#!/usr/bin/env python3
"""Rehearse a Ray cluster of several hosts, and their accidents, on one Linux machine.

    .venv/bin/python scripts/hosts/rehearse.py                    # all of it
    .venv/bin/python scripts/hosts/rehearse.py token killed       # some

Hosts are namespaces (host.py) with an address and a cable each, which share a bucket and nothing else
(cluster.py). When this process ends, however it does, the kernel ends all of them.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster import BIN, CLOUD, HEAD, Cluster, checkpointed, hosts_of, losses
from host import OWN, Failed, check, until
from ports import check_ports

NO_NAMESPACES = 3
"""Exit code where this machine allows none."""


def check_table(cluster: Cluster, name: str) -> None:
    """Each trial is stored once, with the very loss that it has in the first sweep of this rehearsal."""
    found = losses(name)
    cluster.table = cluster.table or found
    check(found == cluster.table, f"losses of {name} are {found}, not {cluster.table}")


def token(cluster: Cluster) -> str:
    """Who has no token, or another, is told so and starts nothing."""
    sweep = ["sweep", "/tmp/home/sweep.toml", "--address", HEAD, "--results", "s3://hosts/token"]
    homes = {"without a token": "/tmp/nobody", "with another token": "/tmp/other"}
    cluster.head.run("mkdir", "-p", *(f"{home}/.ray" for home in homes.values()))
    cluster.head.write("../other/.ray/auth_token", secrets.token_hex(32))
    for who, home in homes.items():
        code = cluster.driver("token", *sweep, HOME=home).wait(240)
        said = cluster.said("token.log")
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        check(
            code == 2 and len(errors) == 1 and "token" in errors[0], f"a driver {who}: {code}, {said[-800:]}"
        )
        check("Traceback" not in said, f"a driver {who} is shown a traceback: {said[-800:]}")
    join = [BIN / "ray", "start", f"--address={HEAD}", "--num-cpus=1"]
    code, said = cluster.workers["worker-1"].run(*join, HOME="/tmp/nobody", RAY_AUTH_MODE="token")
    check(code != 0 and "oken" in said, f"a node without a token: {code}, {said[-800:]}")
    return "a driver without the token or with another ends with a sentence, a node without it does not join"


def ports(cluster: Cluster) -> str:
    """Who listens where while both workers train, and whom it asks for a token."""
    with cluster.sweep("ports"):
        said = check_ports([cluster.head, *cluster.workers.values()])
    check_table(cluster, "ports")
    return said


def both(cluster: Cluster) -> str:
    """Nothing happens: both workers train."""
    with cluster.sweep("both"):
        pass
    check_table(cluster, "both")
    hosts = sorted(hosts_of("both"))
    check(hosts == ["worker-1", "worker-2"], f"logs are of {hosts}")
    return "each of two workers trained; rows, checkpoints and logs are in the bucket"


def blink(cluster: Cluster) -> str:
    """A worker's cable is out for 15 s."""
    with cluster.sweep("blink"):
        cluster.workers["worker-1"].cable("down")
        time.sleep(15)
        cluster.workers["worker-1"].cable("up")
        began = time.monotonic()
    check_table(cluster, "blink")
    again, seconds = cluster.said("blink.log").count("a pack of"), time.monotonic() - began
    return (
        f"no trial was lost, {again} packs went on from a checkpoint; the sweep ended {seconds:.0f} s later"
    )


def lost(cluster: Cluster) -> str:
    """A worker's cable is out until Ray gives the worker up; then it is back, and joins again."""
    name = "worker-1"
    with cluster.sweep("lost"):
        began = time.monotonic()
        cluster.workers[name].cable("down")
        until("the lost worker is given up", lambda: "tried again" in cluster.said("lost.log"), 400)
        given_up = time.monotonic() - began
        cluster.workers[name].cable("up")
        began = time.monotonic()
        until("its Ray ends when it hears that", lambda: cluster.rays[name].poll() is not None, 400)
        ended = time.monotonic() - began
        cluster.complete()
    check_table(cluster, "lost")
    check("on worker-1 (" in cluster.said("lost.log"), "the driver does not say which host was lost")
    return (
        f"given up after {given_up:.0f} s, its pack went on elsewhere; back, its Ray ended in {ended:.0f} s"
    )


def killed(cluster: Cluster) -> str:
    """A worker's power is cut."""
    with cluster.sweep("killed"):
        began = time.monotonic()
        cluster.cut_power("worker-2")
        until("the lost worker is given up", lambda: "tried again" in cluster.said("killed.log"), 400)
        given_up = time.monotonic() - began
    check_table(cluster, "killed")
    check("on worker-2 (" in cluster.said("killed.log"), "the driver does not say which host was lost")
    check("goes on" in hosts_of("killed")["worker-1"], "its pack did not go on from its checkpoint")
    return f"given up after {given_up:.0f} s; its pack went on elsewhere from its checkpoint"


def search(cluster: Cluster) -> str:
    """A search, and a worker's power is cut."""
    options = ["--num-samples", "4", "--scheduler", "none", "--evaluations", "20"]
    with cluster.training("search", "search", *options):
        cluster.cut_power("worker-2")
    check(len(losses("search")) == 4, "trials are missing")
    check("goes on" in hosts_of("search")["worker-1"], "its trial did not go on from its checkpoint")
    check(not checkpointed("search"), "checkpoints are left")
    return "4 of 4 trials; the lost worker's went on elsewhere from its checkpoint"


REHEARSALS = {f.__name__: f for f in (token, ports, both, blink, lost, killed, search)}


def rehearse(names: list[str], logs: Path, steps: int) -> int:
    """Run some, and print a line for each; how many failed."""
    os.environ |= CLOUD
    began, failed = time.monotonic(), 0
    cluster = Cluster(logs, steps)
    print(f"cluster: up in {time.monotonic() - began:.0f} s", flush=True)
    for name in names:
        began = time.monotonic()
        try:
            said = REHEARSALS[name](cluster)
        except (Failed, subprocess.TimeoutExpired) as error:
            failed += 1
            said = f"FAILED: {error}"
        print(f"{name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    return failed


def in_namespaces(logs: Path) -> int:
    """This script in namespaces of its own, which the kernel ends with this process."""
    own = ["setpriv", "--pdeathsig", "KILL", "unshare", "--user", "--map-root-user", *OWN[1:]]
    tried = subprocess.run([*own, "true"], capture_output=True, text=True)
    if tried.returncode:
        why = (tried.stderr.strip() or "no reason given").splitlines()[-1]
        print(f"error: this machine allows no namespaces: {why}", file=sys.stderr)
        return NO_NAMESPACES
    again = [sys.executable, __file__, "--inside", *sys.argv[1:], "--logs", str(logs)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with subprocess.Popen([*own, *again], start_new_session=True) as inside:
        try:
            return inside.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            inside.kill()


def main() -> int:
    """Rehearse what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *REHEARSALS], help="which; all by default")
    parser.add_argument("--steps", type=int, default=2000, help="of each trial")
    parser.add_argument("--logs", type=Path, help="folder of all that hosts say; a temporary one by default")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        try:
            return min(1, rehearse(options.names or list(REHEARSALS), options.logs, options.steps))
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if options.logs is None:
        with tempfile.TemporaryDirectory(prefix="mup_tpu-hosts-") as logs:
            return in_namespaces(Path(logs))
    options.logs.mkdir(parents=True, exist_ok=True)
    return in_namespaces(options.logs)


if __name__ == "__main__":
    sys.exit(main())
