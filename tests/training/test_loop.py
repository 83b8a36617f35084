"""The training loop on real text: what it reports, what it stores, and how it ends."""

import functools
import math
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from mup_tpu.config import RunOptions
from mup_tpu.training.loop import PackRun
from mup_tpu.training.pack import Pack
from mup_tpu.training.record import PackProgress

on_device = functools.partial(RunOptions, device=os.environ.get("MUP_TPU_TEST_DEVICE", "cpu"))


def run(trials, dataset, **options):
    checkpoints = options.pop("checkpoints", None)
    return PackRun(trials, dataset, on_device(**options), checkpoints).finish()


def unigram_loss(dataset, held_out):
    """Held-out loss of the best model that ignores context: byte frequencies of 200 training batches."""
    train = np.concatenate([dataset.train_batch(step).ravel() for step in range(200)])
    frequencies = (np.bincount(train, minlength=dataset.vocab_size) + 1) / (len(train) + dataset.vocab_size)
    return -np.log(frequencies[held_out[..., 1:].numpy()]).mean()


def test_training_learns_and_the_row_tells_the_loss_on_held_out_text(tiny, dataset):
    trial = tiny.replace(steps=200, learning_rate=0.02, eval_batches=16)
    result = run([trial], dataset)
    row = result.rows[0]
    held_out = torch.from_numpy(dataset.validation_batches(trial.train.eval_batches))
    device = result.pack.device
    placed = device.place_stack(held_out, "data", len(held_out))
    assert row["loss"] == pytest.approx(result.pack.evaluate(placed)[0].item())
    untrained = Pack([trial], dataset.vocab_size, device).evaluate(placed)[0].item()
    assert untrained == pytest.approx(math.log(256), abs=0.3)
    assert row["loss"] < unigram_loss(dataset, held_out) - 0.1, "it learns more than the bytes' frequencies"
    assert (row["status"], row["steps_done"], row["tokens"]) == ("finished", 200, 200 * 4 * 32)
    assert row["trial_id"] == trial.trial_id(dataset.fingerprint)


def test_a_row_names_the_commit_and_whether_the_code_differs_from_it(tiny, dataset):
    def git(*words):
        done = subprocess.run(["git", "-C", Path(__file__).parent, *words], capture_output=True, text=True)
        return done.stdout.strip()

    changed = "+" if git("status", "--porcelain", "-uno") else ""
    assert run([tiny.replace(steps=1)], dataset).rows[0]["git_commit"] == git("rev-parse", "HEAD") + changed


def test_train_mean_is_the_mean_of_every_steps_loss(tiny, dataset):
    trial = tiny.replace(loss_kind="train_mean", steps=8)
    result = run([trial], dataset)
    device = result.pack.device
    pack = Pack([trial], dataset.vocab_size, device)
    batches = [torch.from_numpy(dataset.train_batch(step))[None] for step in range(8)]
    losses = [pack.train(device.place_stack(batch, "data", 1), 1).item() for batch in batches]
    assert result.rows[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_curves_hold_means_of_chunks_and_evaluations_and_reports_come_at_both(tiny, dataset):
    """On TPUs at evaluations alone: a log point would stop the device."""
    *reports, result = PackRun([tiny], dataset, on_device(log_every=12, eval_every=10)).steps()
    train = [(p["step"], p["tokens"]) for p in result.curves if p["split"] == "train"]
    assert train == [(12, 12 * 128), (24, 24 * 128), (30, 30 * 128)]
    held_out = [p for p in result.curves if p["split"] == "validation"]
    assert [p["step"] for p in held_out] == [10, 20, 30]
    assert held_out[-1]["loss"] == result.rows[0]["loss"]
    every = [10, 20, 30] if on_device().device == "tpu" else [10, 12, 20, 24, 30]
    assert [report.step for report in reports] == every
    assert all(r.rates.tokens_per_second > 0 and r.statuses == ("running",) for r in reports)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_divergence_is_a_result_and_ends_that_member_alone(execution, tiny, dataset):
    tiny = tiny.replace(steps=12)
    wild = tiny.replace(learning_rate=1e30, grad_clip=0.0)
    alone = run([tiny], dataset, execution=execution).rows[0]
    result = run([wild, tiny], dataset, execution=execution)
    assert result.rows[0]["status"] == "diverged" and result.rows[0]["loss"] == math.inf
    assert 0 < result.rows[0]["steps_done"] < 10
    assert "not finite" in result.rows[0]["reason"]
    assert result.rows[1]["loss"] == pytest.approx(alone["loss"], rel=0 if execution == "loop" else 1e-3)


def test_when_all_have_diverged_the_pack_ends(tiny, dataset):
    wild = [tiny.replace(learning_rate=1e30, grad_clip=0.0, seed=s) for s in range(2)]
    result = run(wild, dataset, eval_every=5)
    assert [row["status"] for row in result.rows] == ["diverged"] * 2
    assert result.pack.steps_done == 5, "the pack trained on after nobody was left"


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "execution"), [("adamw", "vmap"), ("muon", "loop")])
def test_killed_run_goes_on_from_its_checkpoint_to_the_same_rows(
    execution, optimizer, tiny, dataset, tmp_path
):
    base = tiny.replace(optimizer=optimizer, steps=18)
    settings = ({}, {"learning_rate": 0.003, "seed": 3}, {"learning_rate": 1e30, "grad_clip": 0.0})
    trials = [base.replace(**fields) for fields in settings]
    whole = run(trials, dataset, execution=execution, eval_every=8)
    options = on_device(execution=execution, eval_every=8, checkpoint_every=7)
    for event in PackRun(trials, dataset, options, tmp_path).steps():
        if isinstance(event, PackProgress) and event.step == 16:
            break  # the generator is dropped here, as in a kill: nothing after step 14's checkpoint is kept
    *reports, resumed = PackRun(trials, dataset, options, tmp_path).steps()
    assert [report.step for report in reports] == [16, 18], "it did not go on from step 14"
    for ours, theirs in zip(resumed.rows, whole.rows, strict=True):
        different = {k for k in ours if ours[k] != theirs[k]} - {"wall_time_s", "finished_at"}
        assert not different, different
    assert resumed.curves == whole.curves


def test_checkpoints_of_other_trials_are_not_taken(tiny, dataset, tmp_path):
    trial = tiny.replace(steps=8)
    run([trial], dataset, checkpoint_every=4, checkpoints=tmp_path)
    other = PackRun([trial.replace(seed=9)], dataset, on_device(), tmp_path)
    assert other.pack.steps_done == 0


def test_a_preempted_run_checkpoints_at_once_and_goes_on_to_the_same_loss(tiny, dataset, tmp_path):
    trial, options = tiny.replace(steps=12), on_device(eval_every=7)
    first = PackRun([trial], dataset, options, tmp_path)
    for event in first.steps():
        if isinstance(event, PackProgress) and event.step == 7:
            first.preempt()
    (row,) = event.rows
    assert (row["status"], row["steps_done"]) == ("preempted", 7)
    second = PackRun([trial], dataset, options, tmp_path)
    assert second.pack.steps_done == 7
    assert second.finish().rows[0]["loss"] == run([trial], dataset, eval_every=7).rows[0]["loss"]


@pytest.mark.parametrize("loss_kind", ["validation_final", "train_mean"])
def test_a_run_that_is_preempted_while_it_waits_for_its_first_batch_ends_at_step_0(loss_kind, tiny, dataset):
    come = threading.Event()

    class Late:
        """The dataset, whose training batches do not come."""

        def __getattr__(self, name):
            return getattr(dataset, name)

        def train_batch(self, step):
            come.wait()
            return dataset.train_batch(step)

    waits = PackRun([tiny.replace(loss_kind=loss_kind)], Late(), on_device())
    threading.Timer(0.5, waits.preempt).start()
    row = waits.finish().rows[0]
    come.set()
    assert (row["status"], row["steps_done"]) == ("preempted", 0)
    assert math.isnan(row["loss"])
