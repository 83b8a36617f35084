"""Batches: a function of (data seed, step) alone, every block once an epoch; prefetching changes nothing."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from mup_tpu.data import load, prefetch
from mup_tpu.data.batches import ShardDataset
from mup_tpu.data.shards import ShardFolder


@pytest.fixture(params=["cache", "shards"])
def config(request, text, streamed):
    return text if request.param == "cache" else streamed


def test_a_batch_is_a_function_of_seed_and_step_alone(config, streamed):
    first = load(config)
    second = ShardDataset(config, readers=1) if config == streamed else load(config)
    in_order = [first.train_batch(step) for step in range(40)]
    for step in (39, 3, 20, 3):
        assert np.array_equal(second.train_batch(step), in_order[step])
    assert in_order[0].shape == (24, 33) and in_order[0].dtype == np.int64
    assert not np.array_equal(in_order[0], in_order[1])
    assert not np.array_equal(load(replace(config, data_seed=1)).train_batch(0), in_order[0])


def test_every_block_is_seen_once_an_epoch_and_epochs_differ(text):
    dataset = load(text)
    blocks = dataset._blocks
    starts = [[dataset._start(epoch * blocks + i) for i in range(blocks)] for epoch in range(8)]
    for epoch_starts in starts:
        assert len(set(epoch_starts)) == blocks
        assert set(np.diff(sorted(epoch_starts))) == {32}
        assert max(epoch_starts) + 33 <= len(dataset._train)
    assert len({tuple(s) for s in starts}) == 8
    assert len({s[0] % 32 for s in starts}) > 1


def test_a_batch_across_two_epochs_has_inputs_and_targets_of_its_blocks(text):
    dataset = load(text)
    step = dataset._blocks // 24  # its last sequences belong to the next epoch
    starts = [dataset._start(step * 24 + i) for i in range(24)]
    assert np.array_equal(dataset.train_batch(step), [dataset._train[start : start + 33] for start in starts])


def test_held_out_batches_are_fixed_spread_and_do_not_overlap(config, text):
    dataset, whole = load(config), load(text)._validation
    blocks = (len(whole) - 1) // 32
    place = {whole[32 * i : 32 * i + 33].tobytes(): i for i in range(blocks)}
    batches = dataset.validation_batches(4)
    assert batches.shape == (4, 24, 33) and batches.dtype == np.int64
    assert np.array_equal(load(replace(config, data_seed=5)).validation_batches(4), batches)
    places = [place[sequence.tobytes()] for sequence in batches.reshape(-1, 33).astype(whole.dtype)]
    assert len(set(places)) == 96 and max(places) > 0.9 * blocks
    if config != text:
        blocks = ShardFolder(config.corpus).index.validation.samples
    assert len(dataset.validation_batches(10_000)) == blocks // 24, "as many as there are"


@pytest.mark.parametrize("depth", [{}, {"depth": 3}], ids=["default", "3"])
def test_prefetch_keeps_the_order_and_runs_ahead_by_its_depth_and_no_further(depth):
    asked, most = [], 2 + depth.get("depth", 2)

    def make(step: int) -> np.ndarray:
        asked.append(step)
        return np.array(step)

    with prefetch(make, 5, 100, **depth) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(asked) < most and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(asked) == most  # one taken, `depth` waiting, one in hand
        assert [int(batch) for batch in batches] == [*range(6, 100)]


def test_errors_reach_the_step_that_needs_the_batch_and_the_thread_ends():
    def make(step: int) -> np.ndarray:
        if step == 2:
            raise RuntimeError("shard is gone")
        return np.array(step)

    with prefetch(make, 0, 10) as batches, pytest.raises(RuntimeError, match="shard is gone"):
        list(batches)
    with prefetch(lambda step: np.array(step), 0, 10**9) as batches:
        next(batches)
    threads = [t for t in threading.enumerate() if t.name == "prefetch"]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
