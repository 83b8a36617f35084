"""Workers that hang: real processes that are stopped in mid-pack, on this machine and on Ray."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from rich.console import Console

from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.config.search import SearchOptions
from mup_tpu.errors import ConfigError
from mup_tpu.jobs import heartbeat, local_packs
from mup_tpu.jobs.heartbeat import Heartbeats
from mup_tpu.store import load_runs
from mup_tpu.training.report import PackFailure, PackResult, PackStarted, Report
from mup_tpu.tuning.sweep import run_sweep

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes as Linux shows them")


def workers_of(pid: int) -> list[psutil.Process]:
    """Processes that pack workers of a driver run in: forked from its server, which is its child."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.ppid() != pid and "forkserver" in " ".join(child.cmdline())]


def test_the_heartbeat_is_that_of_a_search_and_no_negative_number():
    assert SweepOptions().heartbeat == SearchOptions().heartbeat == 600
    for value, allowed in ((0.0, "above 0"), (-1.0, "above 0"), (float("nan"), "a finite number")):
        with pytest.raises(ConfigError, match=f"heartbeat {value} is not allowed: it must be {allowed}"):
            SweepOptions(heartbeat=value)


def test_silence_counts_from_the_last_report_and_only_while_the_driver_listens(monkeypatch):
    monkeypatch.setattr(heartbeat, "_LONGEST_LOOK_S", 0.2)
    beats = Heartbeats(limit=1.0)
    beats.heard("quiet")
    beats.heard("lively")
    time.sleep(1.5)
    assert beats.hung() == [], "the driver was elsewhere"
    for _ in range(7):
        time.sleep(0.2)
        beats.heard("lively")
        hung = beats.hung()
    assert hung == ["quiet"]
    assert "no report within the heartbeat of 1 s" in beats.lost().reason
    beats.forget("quiet")
    assert beats.hung() == []


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("ray", [False, True])
def test_a_worker_that_hangs_is_ended_and_its_pack_goes_on_from_its_checkpoint(
    ray, local_ray, tiny, tmp_path, caplog, patience
):
    base = tiny.replace(steps=800)
    sweep = Sweep("hangs", base, widths=(32,), learning_rates=(0.003, 0.01), parametrizations=("mup",))
    stopped = []

    def stop_one():
        """Once each that has begun has a checkpoint to go on from: on a busy machine one ends before the
        other begins.
        """
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            begun = [log for log in tmp_path.glob("logs/*") if "goes on from step" in log.read_text()]
            kept = {file.parents[1] for file in tmp_path.glob("checkpoints/*/step-*/meta.json")}
            if len(kept) >= len(begun) > 0:
                break
            time.sleep(0.05)
        stopped.append(psutil.Process(int(begun[0].stem.rpartition("-")[2])))
        stopped[0].send_signal(signal.SIGSTOP)

    thread = threading.Thread(target=stop_one)
    thread.start()
    limit = (30 if ray else 15) * patience  # on Ray a worker imports torch once it has a pack
    options = SweepOptions(ray=ray, pack_size=1, heartbeat=limit)
    run = RunOptions(threads=1, checkpoint_every=50)
    outcome = run_sweep(sweep, str(tmp_path), options, run, Console(quiet=True))
    thread.join()
    assert outcome == {"finished": 2}
    runs = load_runs(tmp_path)
    assert len(runs) == 2 and runs["trial_id"].is_unique
    assert not psutil.wait_procs(stopped, timeout=60)[1], "the process that hung is still there"
    where = r" on \S+ \([\d.]+\)" if ray else ""
    sentence = rf"is tried again \(hung{where}: no report within the heartbeat of {limit} s\)"
    assert re.search(sentence, caplog.text)
    begun = [line for log in tmp_path.glob("logs/*") for line in log.read_text().splitlines()]
    begun = [line for line in begun if "goes on from step" in line]
    assert sum("goes on from step 0 " not in line for line in begun) == 1, "it began anew"


@pytest.mark.slow
@LINUX
def test_a_pack_that_hangs_three_times_is_failed_with_the_reason_and_the_others_end(tiny, patience):
    packs = [[tiny.replace(steps=10**6)], [tiny.replace(steps=300, seed=1)]]
    options, last, attempts, hung, limit = RunOptions(threads=1), {}, 0, 0, 7 * patience
    for index, event in local_packs.run_packs(packs, options, 2, lambda pack: None, None, heartbeat=limit):
        last[index] = event
        attempts += index == 0 and isinstance(event, PackStarted)
        if index == 0 and isinstance(event, Report) and isinstance(last[1], PackResult) and hung < attempts:
            hung += 1
            for process in workers_of(os.getpid()):
                process.send_signal(signal.SIGSTOP)
    assert attempts == 3
    assert isinstance(last[0], PackFailure)
    assert last[0].reason == f"hung: no report within the heartbeat of {limit} s, the last of 3 attempts"
    assert last[1].rows[0]["status"] == "finished"


@pytest.mark.slow
@LINUX
def test_a_sweep_that_was_suspended_as_a_whole_does_not_take_its_workers_for_hung(tiny, tmp_path, patience):
    """As Ctrl-Z and `fg` do: driver and workers are stopped for longer than the heartbeat."""
    results, script, limit = tmp_path / "results", tmp_path / "sweep.py", 10 * patience
    script.write_text(
        "import json, sys\nfrom rich.console import Console\nfrom mup_tpu.config import *\n"
        "from mup_tpu.config.toml import from_dict\nfrom mup_tpu.tuning.sweep import run_sweep\n"
        f"base = from_dict(Trial, json.loads({json.dumps(tiny.replace(steps=1000).to_dict())!r}))\n"
        "sweep = Sweep('x', base, widths=(32,), learning_rates=(0.003, 0.01), parametrizations=('mup',))\n"
        f"options = SweepOptions(heartbeat={limit}, pack_size=1)\n"
        "run_sweep(sweep, sys.argv[1], options, RunOptions(threads=1), Console())\n"
    )
    command = [sys.executable, str(script), str(results)]
    driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while sum("step " in log.read_text() for log in results.glob("logs/*")) < 2:
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(driver.pid, signal.SIGSTOP)
    time.sleep(limit + 2)
    os.killpg(driver.pid, signal.SIGCONT)
    _, errors = driver.communicate(timeout=240)
    assert driver.returncode == 0, errors
    assert "hung" not in errors
    assert load_runs(results)["status"].tolist() == ["finished"] * 2
    assert len(list(results.glob("logs/*"))) == 2, "a pack was tried again in another process"
