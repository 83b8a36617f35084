"""Streaming: order by (seed, epoch) alone, exact resume, and a server's faults."""

import functools
import hashlib
import logging
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from slow_server import SlowServer

from mup_tpu import files
from mup_tpu.config import DataConfig, RunOptions
from mup_tpu.data import batches, load
from mup_tpu.data import shards as reader
from mup_tpu.data.shards import ShardFolder, prepare
from mup_tpu.errors import DataError


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(reader, "FIRST_PAUSE", 0.001)


def epoch_of(dataset, epoch=0):
    """All sequences of an epoch, in order, a row each."""
    steps = range(epoch * dataset._batches, (epoch + 1) * dataset._batches)
    return np.concatenate([dataset.train_batch(step) for step in steps])


def test_batches_of_today_are_those_of_stored_results(tmp_path):
    """Text, tokens and order are made here, so that the bytes are the same everywhere."""
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(" ".join(str(i * j) for j in range(200)))
    text = DataConfig(corpus=str(tmp_path), sequence_length=16, validation_fraction=0.2)
    prepare(text, "memory://fixed", shard_samples=40, progress=False)
    dataset = load(DataConfig(corpus="memory://fixed", sequence_length=16, batch_size=8))
    batches = np.concatenate([dataset.train_batch(step) for step in range(60)])
    assert hashlib.sha256(batches.tobytes()).hexdigest()[:12] == "3985eeecfb7a"


def test_an_epoch_is_every_sequence_at_most_once_and_epochs_differ(streamed, shards):
    dataset, folder = load(streamed), ShardFolder(str(shards))
    samples = np.concatenate([folder.samples(shard) for shard in folder.index.train.shards]).astype(np.int64)
    first, second, whole = epoch_of(dataset), epoch_of(dataset, 1), Counter(map(bytes, samples))
    for epoch in (first, second):
        assert whole.total() - len(epoch) < 24
        assert Counter(map(bytes, epoch)) <= whole  # text repeats itself, so count
    assert not np.array_equal(first, second)


def test_shards_that_do_not_fit(streamed):
    with pytest.raises(DataError, match="sequence_length 64 is not the 32 of the shards in .*: use 32"):
        load(DataConfig(corpus=streamed.corpus, sequence_length=64))
    with pytest.raises(DataError, match="is shorter than one batch"):
        load(DataConfig(corpus=streamed.corpus, sequence_length=32, batch_size=10**6))
    with pytest.raises(DataError, match="memory://nowhere holds no index.json"):
        load(DataConfig(corpus="memory://nowhere"))


def test_resuming_reads_the_shards_of_its_step_and_nothing_before(streamed, shards):
    with SlowServer(shards).running() as server:
        remote = replace(streamed, corpus=server.url)
        last = load(streamed)._batches - 1
        batch = load(remote).train_batch(last)
        # Those of the step, and the next, which are read ahead.
        assert sum(name.startswith("train") for name in server.asked) <= 2 * batches.SHUFFLE_SHARDS
    assert np.array_equal(batch, load(streamed).train_batch(last))


def trained(tiny, corpus):
    from mup_tpu.training.loop import PackRun

    trial = tiny.replace(corpus=corpus, sequence_length=32, batch_size=24, steps=20)
    result = PackRun([trial], load(trial.data), RunOptions(log_every=1)).finish()
    return result.rows[0], [point["loss"] for point in result.curves]


def test_training_over_a_bad_server_ends_with_the_very_losses_of_the_local_folder(tiny, shards, caplog):
    """Latency, a narrow line, dropped connections and 503s: retried, and not one sample moves."""
    faults = ["503", "drop", "503", ""]
    server = SlowServer(shards, 0.01, 20e6, fault=lambda name, before: faults[before] if before < 4 else "")
    local = trained(tiny, str(shards))
    with caplog.at_level(logging.WARNING), server.running():
        remote = trained(tiny, server.url)
    assert remote[1] == local[1] and remote[0]["loss"] == local[0]["loss"]
    assert remote[0]["trial_id"] == local[0]["trial_id"]
    assert server.asked["index.json"] == 4 and f"try 3 of {reader.ATTEMPTS}" in caplog.text


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(streamed, shards, monkeypatch):
    """Silence has a limit of its own, which each byte puts off: what holds is the floor and the deadline."""
    monkeypatch.setattr(reader, "DEADLINE_S", 1.5)
    for name, value in (("UNANSWERED_S", 0.9), ("MIN_RATE", 2**30)):
        monkeypatch.setattr(files, name, value)
    server = SlowServer(shards, fault=lambda name, before: "trickle" if name.endswith("tar") else "")
    with server.running():
        dataset = load(replace(streamed, corpus=server.url))
        with pytest.raises(DataError, match=r"train-\d+\.tar cannot be read after 2 tries: no answer"):
            dataset.train_batch(0)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
@pytest.mark.parametrize("where", ["folder", "server"])
def test_a_damaged_or_missing_shard_is_named(damage, where, streamed, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "copy")
    file = folder / "train-000002.tar"
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content[:-512] if damage == "truncate" else content[:999] + b"\x01" + content[1000:])
    with SlowServer(folder).running() as server:
        corpus = server.url if where == "server" else str(folder)
        dataset = load(replace(streamed, corpus=corpus))
        sentence = (
            "is missing, but the index names it" if damage == "remove" else "is corrupted: its .* bytes have"
        )
        with pytest.raises(DataError, match=rf"{corpus}/train-000002\.tar {sentence}"):
            epoch_of(dataset)


def test_the_next_shards_are_read_while_the_present_ones_are_used(streamed, shards):
    with SlowServer(shards).running() as server:
        dataset = load(replace(streamed, corpus=server.url))
        dataset.train_batch(0)
        for future in dataset._train.kept.values():
            future.result()
        read = sum(server.asked[shard.name] for shard in dataset._index.train.shards)
        assert read == 2 * batches.SHUFFLE_SHARDS
        first_of_next = batches.SHUFFLE_SHARDS * 1500 // 24 - 1
        functools.reduce(lambda _, step: dataset.train_batch(step), range(first_of_next), None)
        assert sum(server.asked[shard.name] for shard in dataset._index.train.shards) == read
