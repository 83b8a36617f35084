"""The meter, held to hand arithmetic on a clock of its own, and the model's arithmetic to torch's counter."""

import dataclasses
import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mup_tpu.config import RunOptions
from mup_tpu.devices import get_device
from mup_tpu.devices.base import MeshShape
from mup_tpu.devices.peak import peak_flops
from mup_tpu.training.loop import PackRun
from mup_tpu.training.pack import Pack
from mup_tpu.training.record import HORIZON_S, Meter, PackProgress, Rates


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("tied", [True, False])
def test_arithmetic_of_a_token_is_what_torch_counts(tied, tiny, dataset):
    """Matrix products of one real step of stock attention, forward and backward."""
    trial = tiny.replace(tied=tied, width=64, depth=3)
    pack = Pack([trial], dataset.vocab_size, get_device("cpu"), execution="vmap")
    with FlopCounterMode(display=False) as counter:
        pack.step(torch.from_numpy(dataset.train_batch(0)))
    ours = pack.declaration.flops_per_token(dataset.vocab_size, trial.data.sequence_length)
    assert counter.get_total_flops() / dataset.tokens_per_step == pytest.approx(ours, rel=1e-9)


def waited(devices, waiting, working):
    """A clock, and a meter that has waited for input and then worked, in seconds."""
    clock = Clock()
    meter = Meter(tokens_per_step=100, flops_per_token=1e6, devices=devices, peak_flops=1e9, clock=clock)
    with meter.waiting():
        clock.now += waiting
    clock.now += working
    return clock, meter


def test_rates_count_live_members_alone_and_forget_old_laps():
    clock, meter = waited(devices=2, waiting=1.0, working=9.0)
    assert meter.lap(steps=20, live_members=4) == 10.0
    first = meter.rates(steps_left=30)
    assert first.tokens_per_second == first.overall_tokens_per_second == pytest.approx(20 * 4 * 100 / 10)
    assert first.mfu == pytest.approx(800 * 1e6 / 2e9)
    assert (first.input_wait, first.seconds_left) == (pytest.approx(0.1), pytest.approx(15.0))
    clock.now += HORIZON_S
    meter.lap(steps=30, live_members=1)
    second = meter.rates(steps_left=0)
    old = math.exp(-1)
    assert second.tokens_per_second == pytest.approx(100 * (30 + 80 * old) / (HORIZON_S + 10 * old))
    assert second.overall_tokens_per_second == pytest.approx(100 * 110 / (HORIZON_S + 10))
    assert meter.overall().tokens_per_second == second.overall_tokens_per_second
    assert second.tokens == 100 * 110
    assert meter.overall().input_wait == pytest.approx(1 / (HORIZON_S + 10))


def test_compiling_counts_in_the_overall_rates_alone():
    """A GPU compiles for half a minute: ten steps later the report estimated hours."""
    clock, meter = waited(devices=1, waiting=2.0, working=28.0)
    meter.prepared(steps=2, live_members=1)
    clock.now += 0.5
    assert meter.lap(steps=12, live_members=1) == 30.5
    rates = meter.rates(steps_left=40)
    assert (rates.tokens_per_second, rates.seconds_left) == (pytest.approx(2000), pytest.approx(2.0))
    assert (rates.input_wait, rates.mfu) == (0, pytest.approx(2.0))
    assert rates.overall_tokens_per_second == pytest.approx(1200 / 30.5)
    clock.now += 0.5
    meter.lap(steps=10, live_members=1)
    assert meter.rates(steps_left=40).seconds_left == pytest.approx(2.0)
    assert meter.overall().input_wait == pytest.approx(2 / 31)


def test_a_first_chunk_that_is_all_of_a_report_has_the_overall_rates():
    """On XLA 100 steps and their compilation are one call; their rate was of the moment after it."""
    clock, meter = waited(devices=1, waiting=0.0, working=20.0)
    meter.prepared(steps=100, live_members=2)
    clock.now += 0.001
    meter.lap(steps=100, live_members=2)
    rates = meter.rates(steps_left=100)
    assert rates.tokens_per_second == rates.overall_tokens_per_second == pytest.approx(100 * 200 / 20.001)
    assert rates.seconds_left == pytest.approx(20.001)
    clock.now += 1.0
    meter.lap(steps=100, live_members=2)
    assert meter.rates(0).tokens_per_second == pytest.approx(100 * 200 / 1.0, rel=2e-3)


def test_the_peak_of_a_cpu_is_measured_once():
    cpu = get_device("cpu")
    assert peak_flops(cpu, "float32") > 1e9
    assert peak_flops(cpu, "float32") == peak_flops(cpu, "float32"), "measured once"
    on_xla = dataclasses.replace(cpu, name="xla:CPU")
    assert peak_flops(on_xla, "bf16") >= peak_flops(on_xla, "float32"), "XLA multiplies bf16 in float32"
    shared = SimpleNamespace(name="xla:CPU", torch_device=cpu.torch_device, mesh=MeshShape(trial=2, data=2))
    assert peak_flops(shared, "float32") == pytest.approx(peak_flops(on_xla, "float32") / 4)


def report(losses, statuses, mfu=0.25):
    rates = Rates(1280, 12345.6, 11111.1, 4, mfu, 0.012, 100.0)
    return PackProgress(20, 50, losses, None, (2.0**-8,) * len(losses), statuses, rates)


def test_a_line_tells_all_of_a_trial_and_the_best_of_several():
    line = str(report((2.5,), ("running",)))
    assert line == (
        "step 20/50 · loss 2.5000 · lr 2^-8 · 100 s left · 12,346 tokens/s (11,111 overall, 3,086 a device)"
        " · MFU 25.0% · input wait 1.2%"
    )
    several = str(report((math.nan, 2.5, 2.4), ("diverged", "running", "running"), math.nan))
    assert several.startswith(
        "step 20/50 · loss 2.4000 · lr 2^-8 · best of 2 running of 3 · 100 s left · 12,346"
    )
    assert "MFU" not in several
    assert str(Rates(0, 10.0, 10.0, 1, math.nan, 0.0, 0.0)) == "10 tokens/s · input wait 0.0%"
    assert "loss" not in str(report((math.nan,), ("diverged",)))


def test_a_pack_logs_a_line_every_log_point_and_a_summary_at_the_end(tiny, dataset, caplog):
    with caplog.at_level(logging.INFO, "mup_tpu"):
        PackRun([tiny, tiny.replace(seed=1)], dataset, RunOptions(log_every=15)).finish()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("mup_tpu.training")]
    assert re.fullmatch(r"a pack of 2 of 34688 parameters, \w{16}, starts its 30 steps on cpu", lines[0])
    assert [line.partition(" · ")[0] for line in lines[1:-1]] == ["step 15/30", "step 30/30"]
    assert lines[-1].startswith("2 finished · best loss ")
