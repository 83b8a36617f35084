"""A pack as a job: its reports, its parts, and its ends."""

import pickle
import shutil

from mup_tpu.config import RunOptions
from mup_tpu.errors import DataError
from mup_tpu.jobs.job import Finished, Preparing, Refused, Surroundings, TooLarge, perform
from mup_tpu.jobs.pack_job import PackJob
from mup_tpu.training.report import Report

ONE_THREAD = RunOptions(threads=1, log_every=5)


def test_a_pack_says_what_it_waits_for_then_reports_then_ends_with_rows_alone(tiny):
    job = PackJob([tiny.replace(steps=20, seed=seed) for seed in range(2)], ONE_THREAD)
    *reports, ended = perform(pickle.loads(pickle.dumps(job)), Surroundings())
    words = [event.doing for event in reports if isinstance(event, Preparing)]
    assert words[-2:] == ["initialising parameters", "first steps"]
    assert [event.step for event in reports if isinstance(event, Report)] == [5, 10, 15, 20]
    assert isinstance(ended, Finished) and not ended.preempted
    assert [row["status"] for row in ended.result.rows] == ["finished"] * 2
    assert ended.result.pack is None


def test_data_are_loaded_once_by_a_worker(tiny):
    here = Surroundings()
    for seed in range(2):
        *_, ended = perform(PackJob([tiny.replace(steps=2, seed=seed)], ONE_THREAD), here)
        assert isinstance(ended, Finished)
    assert list(here._memory) == [tiny.data]


def test_parts_of_a_pack_hold_its_members_and_have_folders_of_their_own(tiny):
    trials = [tiny.replace(seed=seed) for seed in range(7)]
    job = PackJob(trials, ONE_THREAD, lambda pack: "-".join(str(trial.train.seed) for trial in pack))
    assert job.members == 7
    parts = job.split(3)
    assert [len(part.trials) for part in parts] == [3, 2, 2]
    assert sorted(t.train.seed for part in parts for t in part.trials) == list(range(7))
    assert [part.checkpoints for part in parts] == ["0-3-6", "1-4", "2-5"]
    sent = pickle.loads(pickle.dumps(parts[0]))
    assert (sent.trials, sent.checkpoints) == (parts[0].trials, "0-3-6")


def test_a_pack_too_wide_for_any_memory_is_too_large_and_a_corpus_that_vanished_is_refused(tiny, tmp_path):
    wide = PackJob([tiny.replace(width=2**20, seed=seed) for seed in range(2)], ONE_THREAD)
    *_, ended = perform(wide, Surroundings())
    assert isinstance(ended, TooLarge) and ended.fits == 1
    assert "2 trials of 26.4 T parameters need about" in ended.reason
    (one,) = {len(part.trials) for part in wide.split(ended.fits)}
    *_, failed = perform(wide.split(ended.fits)[0], Surroundings())
    assert one == 1 and "allocate memory" in failed.reason
    vanished = shutil.copytree(tiny.data.corpus, tmp_path / "vanished")
    other = tiny.replace(corpus=str(vanished), data_seed=1)
    shutil.rmtree(vanished)
    *_, ended = perform(PackJob([other], ONE_THREAD), Surroundings())
    assert (
        isinstance(ended, Refused) and isinstance(ended.error, DataError) and "vanished" in str(ended.error)
    )
