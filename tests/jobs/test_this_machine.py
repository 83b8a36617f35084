"""Server that processes are forked from: deaths of it while it starts."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from mup_tpu.errors import ConfigError
from mup_tpu.jobs import this_machine
from mup_tpu.jobs.cluster import ray_cluster
from mup_tpu.jobs.this_machine import find_cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes as Linux shows them")


def servers() -> Iterator[psutil.Process]:
    """Servers that this process has started."""
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and "forkserver" in " ".join(child.cmdline()):
            yield child


def test_a_server_that_is_killed_while_it_starts_is_started_again():
    this_machine.ensure_server(this_machine.PACK_MODULES)
    (server,) = servers()
    server.send_signal(signal.SIGSTOP)  # it forks nothing before it is killed
    threading.Timer(0.5, server.kill).start()
    process = this_machine.start_process(os._exit, (7,))
    process.join(60)
    assert process.exitcode == 7
    assert server not in list(servers())


def test_a_server_that_dies_at_each_start_is_one_sentence():
    ended = threading.Event()

    def kill_all():
        while not ended.wait(0.05):
            with contextlib.suppress(psutil.Error):  # it is dead already
                for server in servers():
                    server.kill()

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        time.sleep(0.5)  # an earlier server is dead by now
        with pytest.raises(ConfigError, match=r"forked from died at each of 3 starts \(.*is memory short"):
            this_machine.start_process(os._exit, (7,))
    finally:
        ended.set()
        killer.join()


@pytest.fixture
def note(tmp_path, monkeypatch):
    """Place of the file in which `ray start` notes its address."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_auto_is_the_environment_s_address_or_the_one_that_ray_start_noted(note, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        noted, given = (f"127.0.0.1:{server.getsockname()[1]}" for server in (one, two))
        note.write_text(f"{noted}\n")
        assert find_cluster("auto") == noted
        monkeypatch.setenv("RAY_ADDRESS", given)
        assert find_cluster("auto") == given
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at address '{noted}'"):
        find_cluster(noted)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("auto", "address 'auto' finds no Ray cluster on this machine"),
        ("127.0.0.1:99999", "no Ray cluster answers at address '127.0.0.1:99999'"),
        *(
            (address, f"address '{address}' is not allowed: write local, auto or HOST:PORT")
            for address in ("head", "10.0.0.1", "head:port", ":6379", "ray://10.0.0.1:10001")
        ),
    ],
)
def test_an_address_without_a_cluster_does_not_go_to_ray(address, sentence, note):
    with pytest.raises(ConfigError, match=sentence):
        find_cluster(address)


@pytest.mark.nightly
def test_a_listener_that_is_no_ray_is_one_sentence():
    """Ray gives up after 40 s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        no_ray = pytest.raises(ConfigError, match=f"no Ray cluster answers at address '{address}'")
        with no_ray, ray_cluster(address):
            pass
