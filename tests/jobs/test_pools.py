"""Each pool for real, with jobs that need no torch: ends of jobs, and workers that die or hang."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from light_jobs import Asks, Count, Sees
from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.errors import DataError
from mup_tpu.jobs import this_machine
from mup_tpu.jobs.driver import Failed, Finished, Split, run_jobs
from mup_tpu.jobs.pools import Forked, InProcess, Pools

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="ends processes as Linux has them")
LONG = 600.0


@pytest.fixture(scope="module")
def opened():
    """Opens a pool of two workers, or of this process; the one on Ray stays open, for its processes start
    slowly.
    """
    with contextlib.ExitStack() as until_the_end:

        @functools.cache
        def on_ray():
            from mup_tpu.jobs.cluster import RayActors, slots

            pool = RayActors(lambda: slots(RunOptions(threads=1)))
            return until_the_end.enter_context(pool)

        @contextlib.contextmanager
        def opened(kind):
            if kind == "ray":
                yield on_ray()
            else:
                with Forked(2, None, preload=()) if kind == "forked" else InProcess(None) as pool:
                    yield pool

        yield opened


KINDS = [("in_process", False), ("forked", False), ("ray", True)]
EVERY = pytest.mark.parametrize(("kind", "ray"), KINDS, ids=str)
WITH_PROCESSES = pytest.mark.parametrize(("kind", "ray"), KINDS[1:], ids=str)


def lasts(jobs, pool, limit=LONG, on_event=lambda job, event: None):
    """The last event of each job, parts included, by name."""
    last = {}
    for job, event in run_jobs(jobs, pool, limit):
        last[job.name] = event
        on_event(job, event)
    return last


def gone(pids):
    """Whether processes end in time: Ray takes a moment, and a zombie waits for its parent."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        states = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                states.append(psutil.Process(pid).status())
        if set(states) <= {psutil.STATUS_ZOMBIE}:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("ray", [None, "local"])
def test_a_pool_stays_while_the_same_is_asked_for(ray, local_ray, tmp_path):
    """Purchases of a sequence differ in their number of trials. The first test here, for the pool on Ray that
    others share takes all cores.
    """
    with contextlib.closing(Pools(SweepOptions(address=ray), str(tmp_path), Console(quiet=True))) as pools:
        places = [pools.place(trials, RunOptions(threads=1, device="cpu")) for trials in (4, 9)]
        assert places[0].pool is places[1].pool
        for number, place in enumerate(places):
            lasts([Count(tmp_path, str(number))], place.pool)
        assert Count(tmp_path, "0").pids() == Count(tmp_path, "1").pids(), "a run started workers anew"
        if ray:  # each purchase has a limit of its own
            limited = pools.place(6, RunOptions(threads=1, device="cpu"), at_most=1)
            assert limited.pool is places[0].pool and limited.workers == limited.pool.at_most == 1
        other = pools.place(4, RunOptions(threads=2, device="cpu"))
        assert other.pool is not places[0].pool


@EVERY
def test_jobs_end_each_in_its_way_and_the_others_go_on(opened, kind, ray, local_ray, tmp_path):
    """Answers reach the job that asked, also after its worker has died.

    What the user can mend ends the run, but not on a cluster, where hosts differ.
    """
    jobs = [Count(tmp_path, name, then=name) for name in ("raise", "too large", "")]
    jobs[-1].name = "fine"
    asking = [Asks(tmp_path, "a"), Asks(tmp_path, "b", then="" if kind == "in_process" else "dies later")]
    refused = [Count(tmp_path, "refuse", then="refuse"), Count(tmp_path, "after")]
    with opened(kind) as pool:
        events = run_jobs([*jobs, *asking], pool, LONG, lambda job, request: {job.name, request.points})
        last = {job.name: event for job, event in events}
        if kind == "ray":
            last |= lasts(refused, pool)
            assert last["refuse"] == Failed("DataError: corpus 'x' is not there")
            assert last["after"] == Finished("after from 0")
        else:
            with pytest.raises(DataError, match="corpus 'x' is not there"):
                lasts(refused[:1], pool)
    assert last["raise"] == Failed("ValueError: no such luck")
    assert isinstance(last["too large"], Split) and last["too large"].reason == "2 trials need too much"
    for name in ("fine", "too large0", "too large1"):
        assert last[name] == Finished(f"{name} from 0")
    assert last["a"] == Finished(({"a", 1}, {"a", 2})) and last["b"] == Finished(({"b", 1}, {"b", 2}))
    assert len(asking[1].pids()) == (1 if kind == "in_process" else 2)
    pids = {pid for job in jobs for pid in job.pids()}
    assert (pids == {os.getpid()}) == (kind == "in_process")


# On Ray nightly: there answers reach a job whose worker has died, and a search goes on without a node.
@LINUX
@pytest.mark.parametrize(
    ("kind", "ray"), [("forked", False), pytest.param("ray", True, marks=pytest.mark.nightly)], ids=str
)
def test_a_worker_that_dies_or_hangs_at_work_or_idle_is_replaced_and_its_job_goes_on(
    opened, kind, ray, local_ray, tmp_path, patience, caplog
):
    """Kill -9 and SIGSTOP, from within; the heartbeat is long enough for a new worker to start."""
    hows = ("die", "hang", "die always")[: 2 if kind == "ray" else 3]  # Ray takes seconds to start a worker
    jobs = [Count(tmp_path, how, then=how) for how in hows]
    with opened(kind) as pool:
        last = lasts(jobs, pool, limit=(5.0 if kind == "ray" else 3.0) * patience)
        first, second = Count(tmp_path, "first"), Count(tmp_path, "second")
        last |= lasts([first], pool)
        os.kill(first.pids()[0], signal.SIGKILL)  # while it is idle
        assert gone(first.pids())
        last |= lasts([second, Count(tmp_path, "third")], pool)
    ends = {"die": 2, "hang": 2, "first": 0, "second": 0, "third": 0}
    assert {name: last[name] for name in ends} == {n: Finished(f"{n} from {k}") for n, k in ends.items()}
    assert [len(job.pids()) for job in jobs] == [2, 2, 3][: len(jobs)]
    assert "job hang is tried again (hung" in caplog.text and "job die is tried again (its" in caplog.text
    if kind == "forked":
        reason = last["die always"].reason
        assert "its process died (exit code -9)" in reason and "last of 3 attempts" in reason
    assert gone(jobs[1].pids()[:1]), "the process that hung is still there"


@WITH_PROCESSES
def test_workers_that_ran_into_a_caller_who_stopped_listening_are_gone(
    opened, kind, ray, local_ray, tmp_path
):
    jobs = [Count(tmp_path, name, then="wait") for name in "ab"]
    with opened(kind) as pool:
        events = run_jobs(jobs, pool, LONG)
        while not all(job.pids() for job in jobs):
            next(events)
        events.close()
        assert gone([pid for job in jobs for pid in job.pids()])
        assert lasts([Count(tmp_path, "c")], pool)["c"] == Finished("c from 0"), "the pool is open"


@LINUX
def test_each_process_sees_one_gpu_and_the_one_that_replaces_it_the_same(tmp_path):
    parts, own = [{"CUDA_VISIBLE_DEVICES": name} for name in ("2", "GPU-8a")], dict(os.environ)
    with Forked(2, None, preload=(), parts=parts) as pool:
        both = lasts(
            [Sees(tmp_path, "a", then="wait"), Sees(tmp_path, "b", then="die")], pool, LONG, _go(tmp_path)
        )
        assert {ended.result for ended in both.values()} == {"2", "GPU-8a"}
        again = lasts([Sees(tmp_path, name) for name in "cdef"], pool)
        assert {ended.result for ended in again.values()} == {"2", "GPU-8a"}
        assert len({pid for name in "cdef" for pid in Sees(tmp_path, name).pids()}) == 2
    assert dict(os.environ) == own


def _go(folder):
    """Let a waiting job end once another has ended."""

    def on_event(job, event):
        if isinstance(event, Finished):
            (folder / "go").touch()

    return on_event


GPUS = """
import os, sys
from mup_tpu.config import RunOptions
from mup_tpu.jobs import this_machine
options = RunOptions(threads=1)
for visible in sys.argv[1:]:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible != "all":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    names = [part["CUDA_VISIBLE_DEVICES"] for part in this_machine.gpus(options)]
    print(*names, this_machine.device_kind(options), this_machine.room(8, options)[0])
"""


def test_gpus_of_this_machine_are_those_that_cuda_may_see(hollow_gpu):
    """And a machine whose GPUs are hidden trains on its cores."""
    found = hollow_gpu("-c", GPUS, "all", "2, 0", "GPU-8a", "1,7,2", gpus=3).splitlines()
    assert found == ["0 1 2 cuda 3", "2 0 cuda 2", "GPU-8a cuda 1", "1 cuda 1"]
    packs = this_machine.room(8, RunOptions(device="cpu", threads=1))[0]
    assert hollow_gpu("-c", GPUS, "-1", gpus=3, visible="-1") == f"cpu {packs}\n"
    assert this_machine.gpus(RunOptions(device="cpu")) == []


@LINUX
def test_a_driver_that_is_killed_leaves_no_worker(tmp_path):
    script = (
        "import sys\nfrom light_jobs import Count\nfrom mup_tpu.jobs.driver import run_jobs\nfrom "
        "mup_tpu.jobs.pools import Forked\nwith Forked(2, None, preload=()) as pool:\n    "
        "list(run_jobs([Count(sys.argv[1], name, then='wait') for name in 'ab'], pool, 600.0))\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    jobs = [Count(tmp_path, name) for name in "ab"]
    deadline = time.monotonic() + 240
    while not all(job.pids() for job in jobs):
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    assert gone([pid for job in jobs for pid in job.pids()])


def test_a_job_that_a_process_cannot_import_has_failed_with_the_reason(opened, tmp_path):
    class Unknown(Count):
        """Whose module the process would look for in vain."""

    Unknown.__module__, Unknown.__qualname__ = "light_jobs", "Unknown"
    sys.modules["light_jobs"].Unknown = Unknown
    try:
        with opened("forked") as pool:
            last = lasts([Unknown(tmp_path, "a"), Count(tmp_path, "b")], pool)
    finally:
        del sys.modules["light_jobs"].Unknown
    assert "Unknown" in last["a"].reason and last["b"] == Finished("b from 0")


HUNGRY = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from light_jobs import Hungry
from mup_tpu.jobs.driver import Ended, Split, run_jobs
from mup_tpu.jobs.pools import Forked
with Forked(1, None, preload=()) as pool:
    for _, event in run_jobs([Hungry("abcd", 150)], pool, 600.0):
        if isinstance(event, Split | Ended):
            print(vars(event).get("result") or event.reason.split(":")[0])
"""


@LINUX
def test_a_worker_that_linux_kills_for_memory_has_smaller_packs_the_next_time(limited_group):
    """Under a real limit of 500 MB, jobs of 600, 300 and 300."""
    done = subprocess.run([sys.executable, "-c", HUNGRY, limited_group(500)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    killed = "its process died (exit code -9), as when memory is short"
    assert done.stdout.splitlines() == [killed, "ab", "cd"]
