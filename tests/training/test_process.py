"""The log and the signal handlers of a process that trains."""

import logging
import signal
import socket
import subprocess
import sys
import threading
import warnings

import pytest

from mup_tpu.files import Folder
from mup_tpu.training import process
from mup_tpu.training.process import attached, handling, host_log


def test_handlers_hold_for_the_block_alone():
    heard = []
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(KeyError), handling({signal.SIGUSR2: lambda number, frame: heard.append(number)}):
        signal.raise_signal(signal.SIGUSR2)
        raise KeyError
    assert heard == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR2) == before


def test_another_thread_leaves_handlers_alone():
    before, inside = signal.getsignal(signal.SIGUSR2), []

    def block():
        with handling({signal.SIGUSR2: signal.SIG_IGN}):
            inside.append(signal.getsignal(signal.SIGUSR2))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert inside == [before]


@pytest.mark.parametrize("url", [None, "memory://logs/results"])
def test_the_logs_of_a_folder_hold_lines_and_warnings(url, tmp_path):
    folder = Folder(url or tmp_path)
    for pack in range(2):  # a process that trains two packs, one after the other
        with host_log(folder.path, capture_warnings=True):
            logging.getLogger("mup_tpu.training.loop").info("step 1")
            warnings.warn(f"checkpoint {pack} of {folder} is damaged", stacklevel=1)
    logs = folder / "logs"
    text = "".join(logs.read(name).decode() for name in logs.names())
    assert text.count(" step 1\n") == text.count("UserWarning: checkpoint") == 2
    assert len(logs.names()) == (2 if url else 1)
    assert all(name.startswith(f"{socket.gethostname()}-") for name in logs.names())


def test_what_a_log_warns_of_is_on_stderr_once_too(capsys):
    """As of a bucket that does not answer, where the log itself lies."""
    logger = logging.getLogger("mup_tpu.files")
    with host_log("memory://warned/results"):
        logger.info("step 1")
        logger.warning("the bucket does not answer")
    assert capsys.readouterr().err == "the bucket does not answer\n"
    with attached(logging.StreamHandler(sys.stdout), "mup_tpu"), host_log("memory://warned/results"):
        logger.warning("the bucket does not answer")
    assert capsys.readouterr() == ("the bucket does not answer\n", "")
    logs = Folder("memory://warned/results/logs")
    assert all("does not answer" in logs.read(name).decode() for name in logs.names())
    assert len(logs.names()) == 2


@pytest.mark.timeout(60)
def test_training_does_not_wait_for_a_bucket_that_is_slow_to_take_its_log(monkeypatch):
    """Lines go on while one upload is held; the parts together have all of them once, in order."""
    released, held, write = threading.Event(), [], Folder.write

    def slow(folder, name, content):
        held.append(name)
        released.wait()
        write(folder, name, content)

    monkeypatch.setattr(Folder, "write", slow)
    monkeypatch.setattr(process, "UPLOAD_EVERY_S", 0.0)
    monkeypatch.setattr(process, "_PART_LINES", 2)
    with host_log("memory://slow/results"):
        for step in range(5):
            logging.getLogger("mup_tpu").info("step %d", step)
        assert len(held) == 1, "one upload at a time"
        released.set()
    logs = Folder("memory://slow/results/logs")
    parts = sorted(logs.names(), key=lambda name: int(name.split(".")[-2]))
    lines = "".join(logs.read(name).decode() for name in parts).splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [*"01234"]


def test_training_goes_on_where_no_log_can_be_kept(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="no log is kept: .*file/x/logs cannot be written"):  # noqa: SIM117
        with host_log(str(tmp_path / "file" / "x")):
            logging.getLogger("mup_tpu").info("step 1")


LOG_ON_A_FULL_DISK = """
import logging, resource, sys
from mup_tpu.training.process import host_log
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
with host_log(sys.argv[1]):
    for step in range(3):
        logging.getLogger("mup_tpu").info("step %d", step)
"""


def test_a_log_on_a_full_disk_is_one_line_and_training_goes_on(tmp_path):
    command = [sys.executable, "-c", LOG_ON_A_FULL_DISK, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "warning: lines of the log are lost: File too large\n")
