"""Silence of workers, and a real pack whose process is stopped."""

import re
import signal
import sys
import threading
import time

import psutil
import pytest
from rich.console import Console

from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.errors import ConfigError
from mup_tpu.jobs.heartbeat import Heartbeats
from mup_tpu.store import load_runs
from mup_tpu.tuning.sweep import run_sweep

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes as Linux shows them")


def test_the_heartbeat_is_above_0():
    assert SweepOptions().heartbeat == 600
    for value, allowed in ((0.0, "above 0"), (-1.0, "above 0"), (float("nan"), "a finite number")):
        with pytest.raises(ConfigError, match=f"heartbeat {value} is not allowed: it must be {allowed}"):
            SweepOptions(heartbeat=value)


def test_silence_counts_from_the_last_report_and_only_while_the_driver_listens():
    beats = Heartbeats(limit=1.0)
    beats.heard("quiet")
    beats.heard("lively")
    for _ in range(2):
        time.sleep(1.2)
        assert beats.hung() == [], "the driver was elsewhere, for longer than the limit"
    hung: list[str] = []
    for _ in range(100):  # a longer pause, as a busy machine makes it, does not count
        if hung:
            break
        time.sleep(0.2)
        beats.heard("lively")
        hung = beats.hung()
    assert hung == ["quiet"]
    assert beats.sentence == "no report within the heartbeat of 1 s"
    beats.forget("quiet")
    assert beats.hung() == []


@pytest.mark.nightly
@LINUX
def test_a_worker_that_hangs_is_ended_and_its_pack_goes_on_from_its_checkpoint(
    tiny, tmp_path, caplog, patience
):
    """Daily, light jobs hang in each pool (tests/jobs/test_pools.py)."""
    base = tiny.replace(steps=800)
    sweep = Sweep("hangs", base, widths=(32,), learning_rates=(0.003, 0.01), parametrizations=("mup",))
    stopped = []

    def stop_one():
        """Stop a worker once each one that has begun has a checkpoint.

        On a busy machine one pack ends before the other begins.
        """
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            begun = [log for log in tmp_path.glob("logs/*") if " on cpu" in log.read_text()]
            kept = {file.parents[1] for file in tmp_path.glob("checkpoints/*/step-*/meta.json")}
            if len(kept) >= len(begun) > 0:
                break
            time.sleep(0.05)
        stopped.append(psutil.Process(int(begun[0].stem.rpartition("-")[2])))
        stopped[0].send_signal(signal.SIGSTOP)

    thread = threading.Thread(target=stop_one)
    thread.start()
    limit = 6 * patience
    options = SweepOptions(pack_size=1, heartbeat=limit)
    run = RunOptions(threads=1, checkpoint_every=50)
    outcome = run_sweep(sweep, str(tmp_path), options, run, Console(quiet=True))
    thread.join()
    assert outcome == {"finished": 2}
    runs = load_runs(tmp_path)
    assert len(runs) == 2 and runs["trial_id"].is_unique
    assert not psutil.wait_procs(stopped, timeout=60)[1], "the process that hung is still there"
    sentence = rf"is tried again \(hung: no report within the heartbeat of {limit} s\)"
    assert re.search(sentence, caplog.text)
    begun = [line for log in tmp_path.glob("logs/*") for line in log.read_text().splitlines()]
    assert sum(" goes on from step " in line for line in begun) == 1, "it began anew"
