"""Forecasts of a sweep, against sums by hand."""

import pytest

from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial
from mup_tpu.devices.peak import TPU_TYPES
from mup_tpu.tuning.sweep import MFU, Machine, forecast, machine_here, tpu

BASE = Trial().replace(
    depth=3, head_size=32, sequence_length=64, batch_size=4, steps=50, corpus="x", optimizer="adamw"
)
SWEEP = Sweep("x", BASE, scale={"width": (64, 128)}, tune={"learning_rate": (0.01, 0.02, 0.04)}, num_seeds=2)
TRIALS = SWEEP.trials()


def flops_by_hand(width: int) -> float:
    """6·N + 12·L·D·T a token (PaLM, appendix B), N = 12·L·D² and the readout of 256."""
    return (6 * (3 * 12 * width**2 + 256 * width) + 12 * 3 * width * 64) * 64 * 4 * 50


def test_arithmetic_and_time_count_the_missing_trials():
    machine = Machine("two cores", 2e11, 2, "loop", memory_bytes=2**34)
    narrow, wide = forecast(TRIALS, ("width",), lambda trial: 256, machine, SweepOptions())
    assert [narrow.size, wide.size] == ["width 64", "width 128"]
    for found, width in ((narrow, 64), (wide, 128)):
        assert found.trials == 12  # two rules, three values, two seeds
        assert found.flops == flops_by_hand(width)
        assert found.seconds == pytest.approx(12 * flops_by_hand(width) / (MFU * 2e11))
    assert wide.memory_bytes > narrow.memory_bytes > 2**20
    halved = forecast(TRIALS[::2], ("width",), lambda trial: 256, machine, SweepOptions())
    assert sum(size.trials for size in halved) == len(TRIALS) // 2


@pytest.mark.parametrize(("execution", "experts"), [("loop", 2), ("vmap", 8)])
def test_a_mixture_s_time_is_that_of_the_experts_that_are_computed(execution, experts):
    """In turns those that a token is sent to, stacked all: each is three matrices of width 64 and 256."""
    mixture = BASE.replace(architecture="moe", width=64, expert_granularity=1)
    machine = Machine("one", 1e12, 1, execution, memory_bytes=2**34)

    def time_of(trial):
        (found,) = forecast([trial], ("width",), lambda trial: 256, machine, SweepOptions())
        return found.seconds, found.flops

    (seconds, flops), all_of_them = time_of(mixture), mixture.replace(experts_per_token=8)
    assert flops == time_of(mixture)[1]
    fewer = 6 * 3 * (8 - experts) * 3 * 64 * mixture.model.expert_width * 64 * 4 * 50  # FLOP of 3 layers
    assert seconds == pytest.approx((time_of(all_of_them)[1] - fewer) / (MFU * 1e12))


def test_a_tpu_counts_all_of_its_chips_and_each_holds_its_share_of_a_pack():
    one, four = tpu(TPU_TYPES["v5litepod-1"]), tpu(TPU_TYPES["v5litepod-4"])
    assert four.flops == 4 * one.flops == 4 * 197e12  # Google Cloud's page of v5e
    assert four.memory_bytes == one.memory_bytes == 16 * 2**30
    options = SweepOptions(pack_size=8)
    small, large = (
        forecast(TRIALS, ("width",), lambda trial: 256, machine, options)[1] for machine in (four, one)
    )
    assert large.seconds == pytest.approx(4 * small.seconds)
    assert 2 < large.memory_bytes / small.memory_bytes <= 4


def test_a_trial_alone_that_does_not_fit_is_told_from_a_pack_that_would_be_split():
    def sizes(pack_size, memory_bytes):
        machine = Machine("one", 1e12, 1, "loop", memory_bytes=memory_bytes)
        return forecast(TRIALS, ("width",), lambda trial: 256, machine, SweepOptions(pack_size=pack_size))

    alone = sizes(1, 2**40)[-1].memory_bytes
    for pack_size in (1, 4):
        assert [size.fits for size in sizes(pack_size, alone)] == [True, True]
        assert [size.fits for size in sizes(pack_size, 2**20)] == [False, False]
        assert sizes(pack_size, alone - 1)[-1].memory_bytes == alone
    assert sizes(4, alone)[-1].memory_bytes > alone, "the pack would be split"
    narrow = Machine("one", 1e12, 1, "loop", memory_bytes=2**20)
    four, one = (
        forecast(TRIALS, ("width",), lambda trial: 256, narrow, SweepOptions(), RunOptions(split_over=n))[1]
        for n in (4, 1)
    )
    assert four.packs == four.trials and four.memory_bytes < one.memory_bytes


def test_processes_that_split_a_trial_share_this_machine_s_memory():
    alone, split = (machine_here(TRIALS, RunOptions(split_over=n)) for n in (1, 2))
    assert (alone.devices, split.devices, split.packs) == (1, 2, 1)
    assert split.name.startswith("2 ×") and split.memory_bytes < 0.6 * alone.memory_bytes


@pytest.mark.parametrize("tpu_type", ["v4-8", "v5litepod-8", "v6e-8"])
def test_trials_too_wide_for_a_chip_do_not_fit_however_their_pack_is_split(tpu_type):
    """Width 4096, depth 24: weights, gradients and AdamW's moments alone are 73 GiB in float32."""
    wide = BASE.replace(depth=24, width=4096, head_size=64, sequence_length=1024, batch_size=16)
    trials, machine = [wide.replace(seed=seed) for seed in range(6)], tpu(TPU_TYPES[tpu_type])
    (found,) = forecast(trials, ("width",), lambda trial: 256, machine, SweepOptions())
    assert found.memory_bytes > 4 * 4 * 24 * 12 * 4096**2 > machine.memory_bytes
    assert not found.fits


def test_torchtpu_has_a_pack_on_each_chip_and_torch_xla_one_on_all():
    each, whole = (tpu(TPU_TYPES["v4-8"], device) for device in ("tpu", "xla"))
    assert (each.packs, each.devices, whole.packs, whole.devices) == (4, 1, 1, 4)
    apart, together = (
        forecast(TRIALS, ("width",), lambda trial: 256, machine, SweepOptions())[1]
        for machine in (each, whole)
    )
    assert apart.packs == 4 * together.packs and apart.seconds == pytest.approx(together.seconds)
    assert apart.memory_bytes == pytest.approx(together.memory_bytes, rel=0.3), "three members on a chip"
