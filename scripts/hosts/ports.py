"""Who listens where on the hosts of a cluster, and whom it asks for a token."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from host import Host, check

STRANGER = Path(__file__).resolve().with_name("stranger.py")
OPEN = {"monitor.py", "dashboard.py", "ray::DashboardA"}
"""Who tells anybody figures, of the autoscaler and, where Ray's dashboard is installed, of the nodes."""
EVERYWHERE = {"driver", "gcs_server", "raylet", "worker"} | OPEN
"""Processes of Ray that listen at all addresses of a host: it has no setting for another."""
REFUSED = {"401", "UNAUTHENTICATED"}


def check_ports(hosts: Sequence[Host]) -> str:
    """Fail where a host listens beyond the cluster's network that need not, or tells a stranger more than it
    must; what listens.

    Args:
        hosts: two at least.
    """
    found, asked, open_to_all = [], 0, set[str]()
    for host, stranger in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
        found.append(f"{host.name} has {_places(host)}")
        answers = _answers(host, stranger)
        asked += len(answers)
        told = {who for who, answer in answers if answer not in REFUSED}
        check(told <= OPEN, f"{host.name} refuses not who has no token: {answers}")
        open_to_all |= told
    return f"{'; '.join(found)}; of {asked} ports all but {', '.join(open_to_all)} refuse who has no token"


def _places(host: Host) -> str:
    """Processes by the address that they listen at."""
    links = {line.split("@")[0].split()[0] for line in host.run("ip", "-brief", "link")[1].splitlines()}
    check(links == {"lo", "eth0"}, f"{host.name} has other networks: {links}")
    places: dict[str, set[str]] = {}
    for who, address, _ in _listeners(host):
        places.setdefault(address, set()).add(who)
    strange = places.keys() - {host.address, "127.0.0.1", "0.0.0.0", "::1"}
    check(not strange, f"{host.name} listens at {strange}")
    more = places.get("0.0.0.0", set()) - EVERYWHERE
    check(not more, f"{host.name} listens at all of its addresses for {more}")
    names = {host.address: "its own address", "0.0.0.0": "all addresses"}
    return ", ".join(f"{' '.join(sorted(who))} at {names.get(at, at)}" for at, who in sorted(places.items()))


def _answers(host: Host, stranger: Host) -> list[tuple[str, str]]:
    """Who listens on a host for others, and what a process of another one without a token is told there."""
    others = [(who, f"{host.address}:{port}") for who, at, port in _listeners(host) if at != "127.0.0.1"]
    addresses = [address for _, address in others]
    code, said = stranger.run(sys.executable, STRANGER, *addresses, HOME="/tmp/nobody")
    told = dict(line.split() for line in said.splitlines() if line.startswith(f"{host.address}:"))
    check(code == 0 and told.keys() == set(addresses), f"a stranger ended with {code}: {said[-800:]}")
    return [(who, told[address]) for who, address in others]


def _listeners(host: Host) -> list[tuple[str, str, int]]:
    """Process, address and port of all that listens."""
    lines = host.run("ps", "axww", "-o", "pid=,args=")[1].splitlines()
    by_pid = {line.split()[0]: line.split()[1:] for line in lines}
    found = []
    for line in host.run("ss", "-ltnpH")[1].splitlines():
        address, _, port = line.split()[3].rpartition(":")
        address = address.strip("[]").removeprefix("::ffff:").replace("*", "0.0.0.0")
        name, pid = re.findall(r'"([^"]*)",pid=(\d+)', line)[0]
        found.append((_process(name, by_pid.get(pid, [])), address, int(port)))
    return found


def _process(name: str, words: list[str]) -> str:
    """Kind of a process, by its name and its command line."""
    for word, kind in (("mup_tpu", "driver"), ("ray.util.client.server", "client server")):
        if word in words:
            return kind
    if name.startswith("ray::") and not name.startswith(("ray::Dash", "ray::Runtime")):
        return "worker"
    if name.startswith("python"):
        return next((Path(word).name for word in words if word.endswith(".py")), name)
    return name
