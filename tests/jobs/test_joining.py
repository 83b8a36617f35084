"""Drivers join clusters that `ray start` has started: with tokens, without, with another, of another Ray."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from mup_tpu import Study
from mup_tpu.errors import ConfigError
from mup_tpu.store import load_curves, load_runs

TOKEN, OTHER = "a" * 40, "b" * 40
QUIET = Console(quiet=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Cluster:
    """Nodes of a Ray cluster by `ray start`, in a home and a folder of their own."""

    def __init__(self, mode):
        self.folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short, for the paths of sockets
        # On a busy core an agent takes longer than 15 s to answer, after which its node would end.
        patient = {"RAY_agent_register_timeout_ms": "600000"}
        self._environment = os.environ | patient | {"HOME": str(self.folder), "RAY_AUTH_MODE": mode}
        if mode == "token":
            self._environment["RAY_AUTH_TOKEN"] = TOKEN
        self._port, self.nodes = free_port(), {}
        self.address = f"127.0.0.1:{self._port}"

    def start(self, name, cores, *words):
        """Start a node, whose processes know its name as NODE."""
        command = [
            Path(sys.executable).with_name("ray"), "start", "--block", f"--num-cpus={cores}", *words,
            "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
        ]  # fmt: skip
        log = self.folder / name
        environment = self._environment | {"NODE": name}
        with log.open("w") as file:
            node = self.nodes[name] = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()
            time.sleep(0.1)

    def start_head(self, cores):
        port = f"--port={self._port}"
        client = f"--ray-client-server-port={free_port()}"
        folder = f"--temp-dir={self.folder / 'r'}"
        self.start("head", cores, "--head", port, client, folder, "--include-dashboard=false")

    def close(self):
        for node in self.nodes.values():
            end(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def end(node):
    """Kill a node with all of its processes, as a power cut does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@pytest.fixture(scope="module")
def heads():
    with contextlib.ExitStack() as at_end:
        started = {}

        def head(mode):
            """Address of a head of two cores that asks for tokens, or does not."""
            if mode not in started:
                started[mode] = at_end.enter_context(contextlib.closing(Cluster(mode)))
                started[mode].start_head(2)
            return started[mode].address

        yield head


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, and no word about tokens in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def write_token(home, token):
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(token)


def run(address, tmp_path):
    study = Study(tmp_path / "out", name="joined", scale={"width": [64]}, tune={"lr": [0.5]})
    study.run(lambda trial, report: 1 + trial.lr, address=address, console=QUIET)


def words_about_tokens():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_driver_whose_home_has_a_token_joins_clusters_with_and_without(mode, heads, home, tmp_path):
    write_token(home, TOKEN)
    run(heads(mode), tmp_path)
    assert set(load_runs(tmp_path / "out")["status"]) <= {"finished", "stopped"}
    assert not words_about_tokens(), "the next cluster may have another mode"


@pytest.mark.slow
def test_a_driver_needs_the_token_of_the_cluster(heads, home, tmp_path, monkeypatch):
    """A missing and another's token are a sentence; one in the environment goes before that of the home."""
    address = heads("token")
    with pytest.raises(
        ConfigError, match=f"the Ray cluster at {address} asks for a token, and there is none"
    ):
        run(address, tmp_path)
    write_token(home, OTHER)
    with pytest.raises(ConfigError, match=f"the Ray cluster at {address} refuses the token in RAY_AUTH"):
        run(address, tmp_path)
    assert not words_about_tokens()
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    run(address, tmp_path)
    assert set(load_runs(tmp_path / "out")["status"]) == {"finished"}
    assert words_about_tokens() == {"RAY_AUTH_TOKEN": TOKEN}


@pytest.mark.slow
def test_a_search_goes_on_when_one_of_two_nodes_is_killed(home, tmp_path):
    """In the midst of a trial there, which goes on from its checkpoint on the other node."""

    def train(trial, report):
        node = os.environ["NODE"]
        for step in range(report.resume_step + 1, 11):
            report(step=step, steps=10, loss=trial.lr + 1 / step, saved=True)
            (tmp_path / f"{trial.id}-{node}").write_text(str(step))
            while step == 5 and node == "second":  # until the kill
                time.sleep(0.1)
        return trial.lr

    def kill(node):
        while not any(path.read_text() == "5" for path in tmp_path.glob("*-second")):
            time.sleep(0.05)
        end(node)

    with contextlib.closing(Cluster("disabled")) as cluster:
        cluster.start_head(1)
        cluster.start("second", 1, f"--address={cluster.address}")
        thread = threading.Thread(target=kill, args=(cluster.nodes["second"],), daemon=True)
        thread.start()
        study = Study(
            tmp_path / "out", scale={"width": [64]}, space={"lr": {"low": 0.1, "high": 1}},
            search={"num_samples": 6, "scheduler": "none"},
        )  # fmt: skip
        outcome = study.run(train, address=cluster.address, console=QUIET)
        thread.join()
    assert outcome == {"finished": 6}
    (killed,) = (path for path in tmp_path.glob("*-second") if path.read_text() == "5")
    assert killed.with_name(killed.name.replace("second", "head")).read_text() == "10"
    curves = load_curves(tmp_path / "out").groupby("trial_id")["step"]
    assert (curves.size() == 10).all() and (curves.max() == 10).all()
