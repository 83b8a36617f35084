"""Server that processes are forked from: deaths of it while it starts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import ray

from mup_tpu.errors import ConfigError
from mup_tpu.jobs import this_machine
from mup_tpu.jobs.cluster import ray_cluster
from mup_tpu.jobs.this_machine import check_answers, find_cluster

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


LONG_PLACE = """
import os
from mup_tpu.jobs.this_machine import start_process
process = start_process(os._exit, (7,), ())
process.join(60)
print(process.exitcode)
"""


def test_a_long_path_of_temporary_files_does_not_keep_processes_from_starting(tmp_path):
    """A socket's path has at most 107 characters."""
    long = tmp_path / ("temporary-" + "x" * 60)
    long.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LONG_PLACE],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "7", done.stderr


@pytest.fixture
def note(tmp_path, monkeypatch):
    """Place of the file in which `ray start` notes its address."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_auto_is_the_environment_s_address_or_the_one_that_this_user_noted(note, monkeypatch):
    note.write_text("127.0.0.1:6379\n")
    assert find_cluster("auto") == "127.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:6379")
    assert find_cluster("auto") == "10.0.0.3:6379"
    assert find_cluster("10.0.0.4:6379") == "10.0.0.4:6379"


@pytest.mark.parametrize("there", ["a link", "a pipe", "a folder", "another user's file"])
def test_auto_follows_no_link_no_pipe_no_folder_and_no_other_user(there, note, tmp_path):
    if there == "a link":
        (tmp_path / "theirs").write_text("192.0.2.7:6379")
        note.symlink_to(tmp_path / "theirs")
    elif there == "a pipe":
        os.mkfifo(note)
    elif there == "a folder":
        note.mkdir()
    elif os.getuid() == 0:
        note.write_text("192.0.2.7:6379")
        os.chown(note, 65534, 65534)
    else:
        pytest.skip("files are given away by a superuser")
    with pytest.raises(ConfigError, match="'auto' finds no Ray cluster of this user .*another user's"):
        find_cluster("auto")


@contextlib.contextmanager
def listening(answer):
    """Port of a server that answers with some bytes, or never for None, and what it heard."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    heard.append((connection, connection.recv(65536)))
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], heard


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_does_not_answer_as_a_cluster_is_one_sentence_and_hears_no_token(answer, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-of-this-user" * 3)
    with (
        listening(answer) as (port, heard),
        pytest.raises(ConfigError, match=f"no Ray cluster answers at address '127.0.0.1:{port}'"),
        ray_cluster(f"127.0.0.1:{port}"),
    ):
        pass
    assert heard and not any(b"secret" in words for _, words in heard)


def test_a_port_on_which_nobody_listens_and_one_that_cannot_be_are_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for wrong in (port, 99999):
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at address '127.0.0.1:{wrong}'"):
            check_answers(f"127.0.0.1:{wrong}")


@pytest.mark.parametrize("address", ["head", "10.0.0.1", "head:port", ":6379"])
def test_an_address_of_another_form_does_not_go_to_ray(address):
    with pytest.raises(ConfigError, match=f"address '{address}' is not allowed: write auto, HOST:PORT"):
        check_answers(address)


@pytest.mark.slow
@pytest.mark.parametrize("ray_", [True])
def test_a_cluster_answers(ray_, local_ray):
    check_answers(ray.get_runtime_context().gcs_address)
