"""Packs: which trials train together; the reports, parts and ends of a pack as a job."""

import pickle
import shutil

import pytest

from mup_tpu.config import RunOptions, Sweep, Trial
from mup_tpu.errors import DataError
from mup_tpu.jobs.driver import Finished, JobContext, Preparing, Refused, TooLarge, perform
from mup_tpu.jobs.pack_job import PackJob, largest_pack, make_packs, missing_trials
from mup_tpu.training import pack_key
from mup_tpu.training.record import PackProgress

ONE_THREAD = RunOptions(threads=1, log_every=5)


def test_a_pack_says_what_it_waits_for_then_reports_then_ends_with_rows_alone(tiny):
    job = PackJob([tiny.replace(steps=20, seed=seed) for seed in range(2)], ONE_THREAD)
    *reports, ended = perform(pickle.loads(pickle.dumps(job)), JobContext())
    words = [event.doing for event in reports if isinstance(event, Preparing)]
    assert words[-2:] == ["initialising parameters", "first steps"]
    assert [event.step for event in reports if isinstance(event, PackProgress)] == [5, 10, 15, 20]
    assert isinstance(ended, Finished) and not ended.preempted
    assert [row["status"] for row in ended.result.rows] == ["finished"] * 2
    assert ended.result.pack is None


def test_data_are_loaded_once_by_a_worker(tiny):
    here = JobContext()
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
    *_, ended = perform(wide, JobContext())
    assert isinstance(ended, TooLarge) and ended.fits == 1
    assert "2 trials of 26.4T parameters need about" in ended.reason
    (one,) = {len(part.trials) for part in wide.split(ended.fits)}
    *_, failed = perform(wide.split(ended.fits)[0], JobContext())
    assert one == 1 and "allocate memory" in failed.reason
    vanished = shutil.copytree(tiny.data.corpus, tmp_path / "vanished")
    other = tiny.replace(corpus=str(vanished), data_seed=1)
    shutil.rmtree(vanished)
    *_, ended = perform(PackJob([other], ONE_THREAD), JobContext())
    assert (
        isinstance(ended, Refused) and isinstance(ended.error, DataError) and "vanished" in str(ended.error)
    )


SWEEP = Sweep(
    "x",
    Trial(),
    scale={"width": (64, 128)},
    tune={"learning_rate": tuple(2.0**-e for e in range(4, 11))},
    num_seeds=2,
)


def test_trials_without_a_result_are_missing():
    names = {trial.trial_id("data"): trial for trial in SWEEP.trials()}
    missing = missing_trials([*names.values()] * 2, [*names][::3], lambda trial: trial.trial_id("data"))
    assert missing == [trial for name, trial in names.items() if name not in [*names][::3]]


@pytest.mark.parametrize(
    ("workers", "pack_size", "most"), [(1, 0, 8), (2, 0, 8), (5, 0, 8), (2, 1, 1), (1, 28, 28)]
)
def test_every_trial_is_in_one_pack_of_its_shape(workers, pack_size, most):
    trials = SWEEP.trials()
    packs = make_packs(trials, workers, "loop", pack_size=pack_size)
    assert sorted(t.trial_id("d") for p in packs for t in p) == sorted(t.trial_id("d") for t in trials)
    assert all(len({pack_key(t) for t in pack}) == 1 for pack in packs)
    assert max(map(len, packs)) == most or (pack_size == 0 and max(map(len, packs)) < most)


def test_workers_get_equal_shares_and_wide_packs_go_first_behind_one_that_ends_soon():
    packs = make_packs(SWEEP.trials(), 2, "loop")
    first, *widths = [pack[0].model.width for pack in packs]
    assert first == min(widths) and widths == sorted(widths, reverse=True)
    few = make_packs(SWEEP.trials(), 1000, "loop")
    assert few[0][0].model.width == max(widths), "where all start at once, the widest is first"
    for width in (64, 128):
        sizes = [len(pack) for pack in packs if pack[0].model.width == width]
        assert len(sizes) % 2 == 0 and max(sizes) - min(sizes) <= 1
    rates = [trial.optimizer.learning_rate for trial in packs[0]]
    assert max(rates) / min(rates) >= 8, "a pack mixes learning rates"


def test_packs_fill_a_gpu_and_wide_trials_train_alone():
    """The wider the trials and the slower the GPU, the fewer fill it; of an unknown GPU nothing is known."""
    trial = Trial().replace(batch_size=16, sequence_length=512, precision="bf16", head_size=64, depth=2)

    def members(gpu, **changes):
        return largest_pack(trial.replace(**changes), "vmap", gpu)

    of_width = [members("NVIDIA H100 80GB HBM3", width=w) for w in (64, 256, 768, 2048)]
    assert of_width == sorted(of_width, reverse=True) and of_width[0] == 32 and of_width[-1] == 1
    assert 1 < members("NVIDIA H100 80GB HBM3", width=768) <= 4, "eight bring an eighth more than one"
    assert members("NVIDIA L4", width=256) < members("NVIDIA H100 80GB HBM3", width=256)
    assert members("NVIDIA H100 80GB HBM3", width=768, precision="float32") == 1
    assert members("NVIDIA H100 80GB HBM3", width=768, depth=24) == members(
        "NVIDIA H100 80GB HBM3", width=768
    )
    assert members("NVIDIA GTX 1080", width=64) == members("", width=2048) == 16
    packs = make_packs([trial.replace(width=2048, seed=s) for s in range(3)], 1, "vmap", gpu="NVIDIA H100")
    assert [len(pack) for pack in packs] == [1, 1, 1]
    assert largest_pack(trial, "loop", "NVIDIA H100") == 8
