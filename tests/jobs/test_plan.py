"""Missing trials, and their packs."""

from mup_tpu.config import Sweep, Trial
from mup_tpu.jobs.plan import largest_pack, make_packs, missing_trials
from mup_tpu.training.trials import pack_key

SWEEP = Sweep(
    "x", Trial(), widths=(64, 128), learning_rates=tuple(2.0**-e for e in range(4, 11)), num_seeds=2
)


def test_trials_without_a_result_are_missing():
    trials = SWEEP.trials()
    done = {trial.trial_id("data") for trial in trials[::3]}
    missing = missing_trials(trials + trials, done, lambda trial: trial.trial_id("data"))
    assert {t.trial_id("data") for t in missing} == {t.trial_id("data") for t in trials} - done
    assert len(missing) == len(trials) - len(done)


def test_every_trial_is_in_one_pack_of_its_shape():
    trials = SWEEP.trials()
    for workers in (1, 2, 5):
        packs = make_packs(trials, workers, "loop")
        assert sorted(t.trial_id("d") for p in packs for t in p) == sorted(t.trial_id("d") for t in trials)
        assert all(len({pack_key(t) for t in pack}) == 1 for pack in packs)
        assert all(len(pack) <= 8 for pack in packs)


def test_workers_get_equal_shares_and_wide_packs_go_first_behind_one_that_ends_soon():
    packs = make_packs(SWEEP.trials(), 2, "loop")
    first, *widths = [pack[0].model.width for pack in packs]
    assert first == min(widths) and widths == sorted(widths, reverse=True)
    few = make_packs(SWEEP.trials(), 1000, "loop")
    assert few[0][0].model.width == max(widths), "where all start at once, the widest is first"
    for width in (64, 128):
        sizes = [len(pack) for pack in packs if pack[0].model.width == width]
        assert len(sizes) % 2 == 0 and max(sizes) - min(sizes) <= 1


def test_a_pack_mixes_learning_rates():
    pack = make_packs(SWEEP.trials(), 2, "loop")[0]
    rates = [t.optimizer.learning_rate for t in pack]
    assert max(rates) / min(rates) >= 8


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


def test_pack_size_is_obeyed():
    assert {len(pack) for pack in make_packs(SWEEP.trials(), 2, "vmap", pack_size=1)} == {1}
    assert len(make_packs(SWEEP.trials(), 1, "vmap", pack_size=28)) == 2
