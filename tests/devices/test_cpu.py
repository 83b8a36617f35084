import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from mup_tpu.devices import base, get_device
from mup_tpu.errors import ConfigError
from mup_tpu.internals import processes
from mup_tpu.internals.processes import cores, memory_left
from mup_tpu.jobs import this_machine
from mup_tpu.store import load_runs


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries give back as they see fit")
def test_memory_that_was_kept_for_the_next_step_is_handed_back_before_free_memory_is_read():
    # Anew, since trials that were split in this process have glibc return what is freed.
    device, process = base.create.__wrapped__(), psutil.Process()
    device.free_memory_bytes()
    tensors = [torch.ones(16 * 2**20 // 4) for _ in range(12)]
    held = process.memory_info().rss
    del tensors
    kept = process.memory_info().rss
    assert held - kept < 16 * 2**20
    device.free_memory_bytes()
    # CI's process once kept 48 of them. Why is not known; a heap of an arena beside the main one has 64.
    assert kept - process.memory_info().rss > (12 * 16 - 64) * 2**20


@pytest.mark.parametrize(("threads", "free"), [(2, 100), (6, 200)])
def test_a_pack_gets_the_memory_of_the_cores_that_it_uses(threads, free, monkeypatch):
    """Of 800 bytes on 8 cores and 200 left by a group of 4 of them, a core has 50."""
    monkeypatch.setattr(base.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(base.os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(base.psutil, "virtual_memory", lambda: SimpleNamespace(available=800))
    monkeypatch.setattr(base, "memory_left", lambda: 200)
    monkeypatch.setattr(base.torch, "get_num_threads", lambda: threads)
    assert get_device("cpu").free_memory_bytes() == free


def test_an_interrupt_takes_effect_after_each_step():
    assert get_device("cpu").longest_chunk(batch_bytes=1) == 1


V1 = "30 1 0:30 / {at} rw - cgroup cgroup rw,memory\n31 1 0:31 / /elsewhere rw - cgroup cgroup rw,cpu\n"
V2 = "30 1 0:30 {root} {at} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
NO_LIMIT = 9223372036854771712  # as version 1 writes it


def process_in(tmp_path, mounts, cgroup, groups):
    """Folder of a process as in /proc, and its groups: path -> {file: content}."""
    at = tmp_path / "groups"
    for path, files in groups.items():
        (at / path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (at / path / name).write_text(f"{content}\n")
    (tmp_path / "mountinfo").write_text(mounts.replace("{at}", str(at)))
    (tmp_path / "cgroup").write_text(cgroup)
    return tmp_path


def v1(limit, used, cache=0):
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def v2(limit, used, cache=0, high="max"):
    stat = f"anon {used}\ninactive_file {cache}\nactive_file 0"
    return {"memory.max": limit, "memory.high": high, "memory.current": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("mounts", "cgroup", "groups", "expected"),
    [
        (V1, "4:memory:/job/step\n1:cpu:/",
         {"": v1(NO_LIMIT, 9), "job": v1(900, 300), "job/step": v1(700, 50)}, 600),
        (V1, "4:memory:/job\n", {"": v1(1000, 900), "job": v1(NO_LIMIT, 300)}, 100),
        (V1, "4:memory:/job\n", {"job": v1(1000, 900, cache=800)}, 900),
        # Slurm and systemd nest groups of version 2; the root has no files.
        (V2, "0::/system.slice/job_7/step_0\n",
         {"system.slice/job_7": v2(500, 100), "system.slice/job_7/step_0": v2("max", 100)}, 400),
        (V2, "0::/user.slice/run.scope\n",
         {"user.slice": v2("max", 8), "user.slice/run.scope": v2(900, 100, 50)}, 850),
        (V2, "0::/user.slice/run.scope\n", {"user.slice/run.scope": v2(900, 100, high=600)}, 500),
        # A container sees its group as the root, with or without a namespace.
        (V2, "0::/\n", {"": v2(800, 100)}, 700),
        (V2.replace("{root}", "/docker"), "0::/docker\n", {"": v2(800, 300)}, 500),
        (V2.replace("{root}", "/docker"), "0::/docker/inner\n",
         {"": v2(800, 300), "inner": v2(200, 100)}, 100),
        (V2, "0::/../job\n", {"": v2(800, 300)}, float("inf")),
        (V2, "0::/job\n", {"job": v2("max", 100)}, float("inf")),
        ("", "", {}, float("inf")),
    ],
)  # fmt: skip
def test_the_smallest_of_all_limits_above_a_process_counts(tmp_path, mounts, cgroup, groups, expected):
    assert memory_left(tmp_path) == float("inf"), "no control groups"
    process = process_in(tmp_path, mounts.replace("{root}", "/"), cgroup, groups)
    assert memory_left(process) == expected


V1_CPU = "30 1 0:30 / {at} rw - cgroup cgroup rw,cpu,cpuacct\n"


def quota(microseconds, period=100_000):
    return {"cpu.cfs_quota_us": microseconds, "cpu.cfs_period_us": period}


def v2_quota(microseconds):
    return {"cpu.max": f"{microseconds} 100000"}


@pytest.mark.parametrize(
    ("mounts", "own", "groups", "expected"),
    [
        (V1_CPU, "4:cpu,cpuacct:/job\n", {"": quota(-1), "job": quota(300_000)}, 3),
        (V1_CPU, "4:cpu,cpuacct:/job\n", {"": quota(400_000, 200_000), "job": quota(-1)}, 2),
        (V1_CPU, "4:cpu,cpuacct:/job\n", {"job": quota(50_000)}, 1),
        (V1, "4:memory:/job\n", {"job": quota(100_000)}, 8),
        (V2, "0::/job/step\n", {"job": v2_quota(250_000), "job/step": v2_quota("max")}, 2),
        (V2, "0::/job\n", {"job": v2_quota(50_000)}, 1),
        (V2, "0::/job\n", {"job": v2_quota("max")}, 8),
        ("", "", {}, 8),
    ],
)  # fmt: skip
def test_a_quota_of_cores_counts_where_it_is_smaller(tmp_path, mounts, own, groups, expected, monkeypatch):
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda process: range(8), raising=False)
    assert cores(process_in(tmp_path, mounts.replace("{root}", "/"), own, groups)) == expected


def test_workers_are_as_many_as_the_memory_of_a_group_holds(monkeypatch):
    def fit(free_mb):
        monkeypatch.setattr(this_machine, "memory_left", lambda: free_mb * 1e6)
        return this_machine.workers_that_fit(4, 400, 250, "training")

    assert [fit(megabytes) for megabytes in (650, 899, 900, 1399, 1400, 10**6)] == [1, 1, 2, 3, 4, 4]
    with pytest.raises(ConfigError, match="memory: 649 MB are free here, and training needs about 650 MB"):
        fit(649)


FREE = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from mup_tpu.devices import base, get_device
print(get_device("cpu").free_memory_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_real_group_inside_a_limited_one_has_what_its_limit_leaves(limited_group):
    done = subprocess.run([sys.executable, "-c", FREE, limited_group(900)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 900 * 10**6


SWEEP_IN_A_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from mup_tpu.cli import main
main(["sweep", *sys.argv[2:]])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("megabytes", "is_enough"), [(500, False), pytest.param(900, True, marks=pytest.mark.nightly)]
)
def test_a_sweep_in_a_limited_group_trains_all_or_says_why_not(
    megabytes, is_enough, limited_group, tiny, tmp_path
):
    file = tmp_path / "sweep.toml"
    file.write_text(
        f'experiment = "small"\nscale = {{width = [32]}}\ntune = {{learning_rate = [0.003, 0.01]}}\n'
        "num_seeds = 2\n"
        f'[base.data]\ncorpus = "{tiny.data.corpus}"\n[base.train]\nsteps = 4\n'
        "[base.model]\nwidth = 32\nbase_width = 32\nhead_size = 16\n"
    )
    options = [file, "--results", tmp_path / "out"]
    command = [sys.executable, "-c", SWEEP_IN_A_GROUP, limited_group(megabytes), *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    if is_enough:
        assert set(load_runs(tmp_path / "out")["status"]) == {"finished"}, ended.stderr
    else:
        assert ended.returncode == 2 and "error: memory: " in ended.stderr, ended.stderr
