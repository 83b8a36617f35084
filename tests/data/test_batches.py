"""Batches: a function of (data seed, step) alone, every block once an epoch; prefetching changes nothing."""

import threading
import time

import numpy as np
import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data import load, prefetch


@pytest.fixture(scope="module")
def config(corpus):
    return DataConfig(corpus=str(corpus), sequence_length=64, batch_size=8, validation_fraction=0.2)


def test_a_batch_is_a_function_of_seed_and_step_alone(config):
    first, second = load(config), load(config)
    in_order = [first.train_batch(step) for step in range(30)]
    for step in (29, 3, 17, 3):
        assert np.array_equal(second.train_batch(step), in_order[step])
    assert in_order[0].shape == (8, 65) and in_order[0].dtype == np.int64
    assert not np.array_equal(in_order[0], in_order[1])
    other = load(DataConfig(**(vars(config) | {"data_seed": 1})))
    assert not np.array_equal(other.train_batch(0), in_order[0])


def test_targets_are_the_inputs_moved_by_one(config):
    dataset = load(config)
    tokens = np.asarray(dataset._train)
    sequence = dataset.train_batch(5)[3]
    found = [i for i in np.flatnonzero(tokens == sequence[0]) if np.array_equal(tokens[i : i + 65], sequence)]
    assert found


def test_every_block_is_seen_once_an_epoch_and_epochs_differ(config):
    dataset = load(config)
    blocks = dataset._blocks
    starts = [[dataset._start(epoch * blocks + i) for i in range(blocks)] for epoch in range(20)]
    for epoch_starts in starts:
        assert len(set(epoch_starts)) == blocks
        assert set(np.diff(sorted(epoch_starts))) == {64}
        assert max(epoch_starts) + 65 <= len(dataset._train)
    assert len({tuple(s) for s in starts}) == 20
    assert len({s[0] % 64 for s in starts}) > 1


def test_epoch_boundary_inside_a_batch(config):
    dataset = load(config)
    step = dataset._blocks // 8  # its last sequences belong to the next epoch
    batch = dataset.train_batch(step)
    expected = [dataset._start(step * 8 + i) for i in range(8)]
    assert np.array_equal(batch[:, 0], np.asarray(dataset._train)[expected])


def test_held_out_batches_are_fixed_spread_and_do_not_overlap(config):
    dataset = load(config)
    batches = dataset.validation_batches(4)
    assert batches.shape == (4, 8, 65)
    other = load(DataConfig(**(vars(config) | {"data_seed": 5})))
    assert np.array_equal(other.validation_batches(4), batches)
    whole = np.asarray(dataset._validation)
    flat = batches.reshape(-1, 65)
    places = [
        next(s for s in range(0, len(whole) - 64, 64) if np.array_equal(whole[s : s + 65], f)) for f in flat
    ]
    assert len(set(places)) == 32 and max(places) > 0.9 * len(whole) - 64 * len(whole) // 64 // 32


def test_as_many_held_out_batches_as_there_are(config):
    dataset = load(config)
    available = (len(dataset._validation) - 1) // 64 // 8
    assert len(dataset.validation_batches(10_000)) == available


def test_prefetched_batches_are_the_batches_in_order(config):
    dataset = load(config)
    with prefetch(dataset.train_batch, 5, 15) as batches:
        for step, batch in zip(range(5, 15), batches, strict=True):
            assert np.array_equal(batch, dataset.train_batch(step))


@pytest.mark.parametrize("depth", [{}, {"depth": 3}], ids=["default", "3"])
def test_prefetch_runs_ahead_by_its_depth_and_no_further(depth):
    asked, most = [], 2 + depth.get("depth", 2)

    def make(step: int) -> np.ndarray:
        asked.append(step)
        return np.array(step)

    with prefetch(make, 0, 100, **depth) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(asked) < most and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(asked) == most  # one taken, `depth` waiting, one in hand


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
