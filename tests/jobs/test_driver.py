"""The scheduler, with a pool that has no processes: every way that a job, a worker or a run can end."""

import os
import signal

import pytest

from mup_tpu.errors import DataError, PackTooLarge, Preempted
from mup_tpu.jobs import driver
from mup_tpu.jobs.driver import (
    Ended,
    Failed,
    Finished,
    Heartbeats,
    Job,
    JobContext,
    Lost,
    Pool,
    Preparing,
    Request,
    Split,
    Started,
    Worker,
    perform,
    run_jobs,
)

LIMIT = 5.0
DIES, HANGS = Lost("its process died"), (None,) * 99
# The system may have been short of memory, or somebody killed the process by hand; or the system says so.
KILLED, KILLED_FOR_MEMORY = (Lost("its process died", why) for why in ("perhaps", "surely"))


class Scripted(Job):
    """Yields the events of a script, None for a silent second; an exception is raised there.

    Args:
        name: for sentences.
        scripts: one an attempt; the last one holds for all further ones.
        parts: jobs that it can be split into.
        members: trials.
    """

    def __init__(self, name, *scripts, parts=(), members=1):
        self.members, self.fits = members, []
        self.name, self.scripts, self.parts, self.attempts = name, scripts or ((1, 2),), parts, 0

    def __repr__(self):
        return self.name

    __str__ = __repr__

    def split(self, fits):
        self.fits.append(fits)
        return self.parts

    def run(self, here):
        script = self.scripts[min(self.attempts, len(self.scripts) - 1)]
        self.attempts += 1
        for event in script:
            if isinstance(event, Exception):
                raise event
            answer = yield event
            if isinstance(event, Request):
                yield f"heard {answer}"
        return f"{self.name}'s result"


class Numbered(Worker):
    def __init__(self, number):
        self.number, self.events, self.is_terminated, self.answer = number, None, False, None
        self.until_checkpoint = 3
        self.where = f" on host {number}"


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


class ScriptedPool(Pool):
    """Workers without processes. Each call of `hear` lasts a second, and each busy worker says one thing."""

    passes_sigterm_on = True
    waits_for = "warming up"

    def __init__(self, clock, count=2):
        self.clock, self.count = clock, count
        self.idle, self.busy, self.started, self.ended, self.wanted = [], [], [], [], []
        self.on_hand = lambda worker: None

    def __exit__(self, *error):
        """Nothing to end."""

    def fill(self, wanted):
        assert len(self.started) < 50, "jobs are tried again without end"
        self.wanted.append(wanted)
        while len(self.idle) + len(self.busy) < min(wanted, self.count):
            self.idle.append(Numbered(len(self.started)))
            self.started.append(self.idle[-1])

    @property
    def has_room(self):
        return bool(self.idle)

    def hand(self, job):
        worker = self.idle.pop(0)
        worker.events = perform(job, JobContext())
        self.busy.append(worker)
        self.on_hand(worker)
        return worker

    def hear(self):
        self.clock.now += 1.0
        assert self.clock.now < 10_000, "the run does not end"
        for worker in list(self.busy):
            event, worker.answer = worker.events.send(worker.answer), None
            if worker.is_terminated and not isinstance(event, Ended):
                worker.until_checkpoint -= 1
                if not worker.until_checkpoint:
                    event = Finished("preempted", preempted=True)
            if event is None:
                continue
            if isinstance(event, Ended) and not isinstance(event, Lost):
                self.busy.remove(worker)
                self.idle.append(worker)
            yield worker, event

    def end(self, worker):
        self.busy.remove(worker)
        self.ended.append(worker)

    def answer(self, worker, answer):
        worker.answer = answer

    def terminate(self, worker):
        worker.is_terminated = True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(driver, "time", clock)
    return clock


@pytest.fixture
def pool(clock):
    return ScriptedPool(clock)


def ends(events):
    """The last event of each job, and how often each was started."""
    last, starts = {}, {}
    for job, event in events:
        last[job.name] = event
        starts[job.name] = starts.get(job.name, 0) + isinstance(event, Started)
    return last, starts


def test_each_job_starts_reports_and_ends_and_workers_are_used_again(pool):
    jobs = [Scripted(name) for name in "abcde"]
    events = list(run_jobs(jobs, pool, LIMIT))
    for job in jobs:
        own = [event for j, event in events if j is job]
        assert own == [Started(), Preparing("warming up"), 1, 2, Finished(f"{job}'s result")]
    assert [job for job, event in events if event == Started()] == jobs, "in their order"
    assert len(pool.started) == 2 and not pool.ended and not pool.busy
    assert pool.wanted[0] == 5 and pool.wanted[-1] == 1, "no more workers than jobs"


def test_a_job_waits_for_the_answer_to_its_question_and_the_question_is_a_sign_of_life(pool, clock):
    """The driver takes longer over it than the heartbeat."""

    def decide(job, request):
        clock.now += 2 * LIMIT
        return f"{request.points} of {job}"

    asking = Scripted("a", (1, Request("step 7"), 2))
    events = [e for job, e in run_jobs([asking, Scripted("b")], pool, LIMIT, decide) if job is asking]
    assert events[2:] == [1, "heard step 7 of a", 2, Finished("a's result")]
    assert not pool.ended


def test_new_jobs_are_made_when_a_worker_is_free_for_them(pool):
    """As in a search, where each depends on the results before it."""
    ended = []

    class Proposals:
        def __len__(self):
            return 9  # at most

        def __iter__(self):
            for number in range(5):
                assert number < 2 or len(ended) >= number - 1, "it was made before a worker was free"
                yield Scripted(f"{number}", (DIES,) if number == 4 else (1,) * (number + 1))

    for job, event in run_jobs(Proposals(), pool, LIMIT):
        if isinstance(event, Ended):
            ended.append((job.name, event))
    last = dict(ended)
    assert sorted(last) == ["0", "1", "2", "3", "4"]
    assert last["4"].reason.endswith(" died, the last of 3 attempts")
    assert pool.wanted[0] == 9


DONE, HALVES = Finished("a's result"), [Scripted("a1"), Scripted("a2")]
DIED, HUNG = "its process died", "hung on host 0: no report within the heartbeat of 5 s"
IN_HALVES = Split(HALVES, "its process died, as when memory is short")


@pytest.mark.parametrize(
    ("scripts", "members", "starts", "end", "again"),
    [
        (((1, DIES), (1, 2)), 1, 2, DONE, DIED),
        (((DIES,),), 1, 3, "died, the last of 3 attempts", DIED),
        (((1, *HANGS), (1, 2)), 1, 2, DONE, HUNG),
        ((HANGS,), 1, 3, "no report within the heartbeat of 5 s, the last of 3 attempts", HUNG),
        (((PackTooLarge("too large", 1),),), 1, 1, Failed("too large"), None),
        (((1, ValueError("no such luck")),), 1, 1, Failed("ValueError: no such luck"), None),
        (((1, KILLED_FOR_MEMORY),), 1, 3, "its process died, the last of 3 attempts", DIED),
        (((1, KILLED),), 1, 3, "its process died, the last of 3 attempts", DIED),
        (((1, KILLED_FOR_MEMORY),), 5, 1, IN_HALVES, None),
        (((1, KILLED),), 5, 2, IN_HALVES, DIED),
        (((1, KILLED), (1, DIES), (1,)), 2, 3, DONE, DIED),
    ],
)
def test_a_job_ends_after_its_attempts_and_the_others_go_on(
    scripts, members, starts, end, again, pool, caplog
):
    """Alone, whole or in halves: after one kill for memory, or the second of unknown cause."""
    job = Scripted("a", *scripts, parts=HALVES if members > 1 else (), members=members)
    last, started = ends(run_jobs([job, Scripted("b", tuple(range(30)))], pool, LIMIT))
    assert started["a"] == starts and last["b"] == Finished("b's result"), "who reports is not hung"
    if isinstance(end, str):
        assert isinstance(last["a"], Failed) and last["a"].reason.endswith(end)
    else:
        assert last["a"] == end
    assert (f"a is tried again ({again})" in caplog.text) if again else "tried again" not in caplog.text
    if end == IN_HALVES:
        assert job.fits == [members // 2]
        assert all(last[half.name] == Finished(f"{half.name}'s result") for half in HALVES)


def test_silence_counts_from_the_last_report_and_only_while_the_driver_listens(clock):
    beats = Heartbeats(limit=1.0)
    beats.heard("quiet")
    for pause in (60.0, 60.0, 0.2, 0.2):
        clock.now += pause
        assert beats.hung() == [], "one look counts a third of the limit at most"
    beats.heard("lively")
    clock.now += 0.3
    assert beats.hung() == ["quiet"]
    beats.forget("quiet")
    clock.now += 0.3
    assert beats.hung() == []


def test_time_in_which_the_driver_was_away_is_no_silence(pool, clock):
    """It was suspended with its workers, or stored rows. One worker says nothing for seconds around that."""
    jobs = [Scripted("a", tuple(range(20))), Scripted("b", ("report", *HANGS[:4]) * 4)]
    for _, event in run_jobs(jobs, pool, 3 * LIMIT):
        if event == 7:
            clock.now += 1000.0
    assert not pool.ended


def test_a_job_that_lost_its_worker_and_parts_of_one_too_large_come_before_all_that_wait(clock):
    halves = [Scripted("a1", (DIES,), (1,)), Scripted("a2", (PackTooLarge("still", 1),))]
    halves[1].parts = [Scripted("a21"), Scripted("a22")]
    whole = Scripted("a", (PackTooLarge("too large", 1),), parts=halves)
    events = list(run_jobs([whole, Scripted("b")], ScriptedPool(clock, count=1), LIMIT))
    names = [job.name for job, event in events if event == Started()]
    assert names == ["a", "a1", "a1", "a2", "a21", "a22", "b"]
    assert (whole, Split(halves, "too large")) in events


def test_an_error_that_the_user_can_mend_ends_the_run_and_all_workers_that_are_busy(pool):
    endless = Scripted("b", range(10**9))
    with pytest.raises(DataError, match="no corpus"):
        list(run_jobs([Scripted("a", (1, DataError("no corpus"))), endless], pool, LIMIT))
    assert [worker.number for worker in pool.ended] == [1]


def test_who_stops_listening_ends_busy_workers_and_has_the_old_handler_back(pool):
    before = signal.getsignal(signal.SIGTERM)
    events = run_jobs([Scripted("a", range(10**9)), Scripted("b", range(10**9)), Scripted("c")], pool, LIMIT)
    next(events)
    assert signal.getsignal(signal.SIGTERM) != before
    while not all(worker.events for worker in pool.started[:2]) or len(pool.busy) < 2:
        next(events)
    events.close()
    assert len(pool.ended) == 2 and not pool.busy
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_is_passed_on_and_what_finished_comes_before_what_was_preempted(pool):
    """The caller may stop at the first that was preempted."""
    running, nearly_done = Scripted("a", range(10**9)), Scripted("b", (1,))
    waiting, seen = Scripted("c"), []
    with pytest.raises(Preempted, match="the same command goes on"):
        for job, event in run_jobs([running, nearly_done, waiting], pool, LIMIT):
            seen.append((job.name, event))
            if seen[-1] == ("b", 1):
                os.kill(os.getpid(), signal.SIGTERM)
    assert pool.started[0].is_terminated and pool.started[1].is_terminated
    assert ("c", Started()) not in seen
    finished = [(name, event.preempted) for name, event in seen if isinstance(event, Finished)]
    assert finished == [("b", False), ("a", True)]


def test_after_sigterm_a_lost_worker_s_job_is_left_for_the_same_command(pool, caplog):
    """At its third attempt, too: it has not failed."""
    job, seen = Scripted("a", (DIES,)), []

    def die(worker):
        if job.attempts == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # before the driver knows that this worker is busy

    pool.on_hand = die
    with pytest.raises(Preempted):
        seen.extend(event for _, event in run_jobs([job], pool, LIMIT))
    assert job.attempts == 3 and pool.started[-1].is_terminated
    assert caplog.text.count("tried again") == 2 and not [e for e in seen if isinstance(e, Failed)]


def test_jobs_wait_for_a_pool_that_has_no_room_for_now(clock):
    class Growing(ScriptedPool):
        def hear(self):
            self.count = int(self.clock.now) // 3
            yield from super().hear()

    pool = Growing(clock, count=0)
    last, _ = ends(run_jobs([Scripted("a"), Scripted("b")], pool, LIMIT))
    assert set(last.values()) == {Finished("a's result"), Finished("b's result")}
    assert pool.wanted[:3] == [2, 2, 2]
