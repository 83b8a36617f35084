"""Batches streamed from prepared shards, each read whole and once an epoch, ahead of its use.

The order of the samples is a function of (data seed, epoch, hosts, host) and of the index alone. In an epoch
the shards are permuted and dealt to the hosts; a host permutes the samples of SHUFFLE_SHARDS of its own
together, which is the shuffle buffer. So the sample at any step is known without reading what came before it:
resuming reads the shards of that step and nothing else. How many threads read changes nothing.

Shapes: N batches, B sequences, T tokens.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mup_tpu.config import DataConfig
from mup_tpu.data.shard_folder import ShardFolder
from mup_tpu.errors import ConfigError, DataError

SHUFFLE_SHARDS = 4
"""Shards whose samples are permuted together. Part of the order of the batches: not to be changed."""

READERS = 4
"""Shards of one host that are read at a time."""


@dataclass(frozen=True)
class World:
    """Number of the hosts that read one stream together, and index of this host."""

    hosts: int = 1
    host: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.host < self.hosts:
            raise ConfigError(f"host {self.host} is not one of {self.hosts} hosts, counted from 0")


class ShardDataset:
    """Batches of prepared shards, for one host.

    Args:
        config: batch size (of all hosts together), data seed, and the sequence length they were prepared for.
        world: the hosts that read together. Each gets as many samples an epoch, of shards of its own; what
            does not divide is left out, other shards in every epoch.

    Raises:
        DataError: the shards are of another sequence length, fewer than hosts, or shorter than one batch, or
            cannot be read.
    """

    def __init__(self, config: DataConfig, world: World = World(), readers: int = READERS) -> None:
        folder = ShardFolder(config.corpus)
        index = folder.index
        self.config = config
        self.world = world
        self.name = index.dataset
        self.fingerprint = index.fingerprint
        self.vocab_size = index.vocab_size
        self.tokenizer = folder.tokenizer
        self.tokens_per_step = config.batch_size * config.sequence_length
        if config.sequence_length != index.sequence_length:
            raise DataError(
                f"sequence_length {config.sequence_length} is not that of the shards in {folder.url}: "
                f"{index.sequence_length}; use that, or prepare others"
            )
        if config.batch_size % world.hosts:
            raise DataError(f"batch_size {config.batch_size} does not divide over {world.hosts} hosts")
        shards = len(index.train.shards)
        if shards < world.hosts:
            raise DataError(
                f"{folder.url} has {shards} training shards, fewer than the {world.hosts} hosts: "
                f"prepare with --shard-samples {index.train.samples // world.hosts} or less"
            )
        self._batch = config.batch_size // world.hosts
        self._shards = shards // world.hosts
        self._batches = self._shards * index.train.samples_per_shard // self._batch
        if not self._batches:
            raise DataError(
                f"{folder.url} is shorter than one batch: {index.train.samples} training sequences for "
                f"{world.hosts} hosts, but batch_size {config.batch_size}"
            )
        self.meta = {
            "unigram_entropy": index.unigram_entropy,
            "bytes_per_token": index.bytes_per_token,
            "train": {"tokens": self._batches * self.tokens_per_step},
        }
        self._index = index
        self._train = _Reader(lambda i: folder.samples(index.train.shards[i]), readers)
        self._held_out = lru_cache(lambda i: folder.samples(index.validation.shards[i]))

    def train_batch(self, step: int) -> np.ndarray:
        """Tokens (B / hosts, T + 1) of a step, int64. An epoch ends with its last whole batch.

        Raises:
            DataError: a shard is missing, corrupted, or cannot be read after all retries.
        """
        epoch, batch = divmod(step, self._batches)
        places = range(batch * self._batch, (batch + 1) * self._batch)
        size = SHUFFLE_SHARDS * self._index.train.samples_per_shard
        now = [self._buffer(epoch, number) for number in range(places[0] // size, places[-1] // size + 1)]
        following = self._buffer(epoch, places[-1] // size + 1) or self._buffer(epoch + 1, 0)
        self._train.hold([shard for shards in [*now, following] for shard in shards])
        return np.stack([self._sample(epoch, place) for place in places]).astype(np.int64)

    def validation_batches(self, count: int) -> np.ndarray:
        """Held-out tokens (N, B / hosts, T + 1), int64, the same ones always.

        The first of the held-out shards, so that few need be read: sequences were dealt to them at random.
        Fewer than `count` batches where the held-out text is shorter; where it does not fill one batch, one
        batch of fewer sequences.
        """
        hosts, host = self.world.hosts, self.world.host
        per_shard, samples = self._index.validation.samples_per_shard, self._index.validation.samples
        b = min(self.config.batch_size, samples) // hosts
        if not b:
            raise DataError(
                f"{self.config.corpus} has {samples} held-out sequences, fewer than {hosts} hosts"
            )
        n = min(count, samples // (b * hosts))
        chosen = [self._held_out(i // per_shard)[i % per_shard] for i in range(n * b * hosts)]
        return np.stack(chosen).astype(np.int64).reshape(n, hosts, b, -1)[:, host]

    def _buffer(self, epoch: int, number: int) -> list[int]:
        """The shards that this host shuffles together; none after an epoch's last."""
        order = _permutation(len(self._index.train.shards), self.config.data_seed, epoch)
        own = order[self.world.host :: self.world.hosts][: self._shards]
        return own[number * SHUFFLE_SHARDS : (number + 1) * SHUFFLE_SHARDS].tolist()

    def _sample(self, epoch: int, place: int) -> np.ndarray:
        """The sequence at a place of an epoch of this host."""
        per_shard = self._index.train.samples_per_shard
        number, position = divmod(place, SHUFFLE_SHARDS * per_shard)
        shards = self._buffer(epoch, number)
        # Never 0 where the key of the shards' order ends: a seed is the same with zeros after it.
        key = (self.config.data_seed, epoch, 1 + self.world.host, number)
        shard, row = divmod(int(_permutation(len(shards) * per_shard, *key)[position]), per_shard)
        return self._train.get(shards[shard])[row]


_Asked = queue.SimpleQueue[tuple[int, Future[np.ndarray]] | None]


@lru_cache(maxsize=16)
def _permutation(size: int, *key: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).permutation(size)


class _Reader:
    """Shards read ahead by threads, held while they are asked for.

    The threads are no executor's: at its exit Python would wait for one that still tries a server long gone.
    """

    def __init__(self, read: Callable[[int], np.ndarray], threads: int) -> None:
        self._asked: _Asked = queue.SimpleQueue()
        self._held: dict[int, Future[np.ndarray]] = {}
        for _ in range(threads):
            threading.Thread(target=_serve, args=(self._asked, read), name="shards", daemon=True).start()
            weakref.finalize(self, self._asked.put, None)

    def hold(self, shards: Iterable[int]) -> None:
        """Begin to read those of these shards that are not held yet, in this order, and drop all others."""
        wanted = dict.fromkeys(shards)
        for shard in [shard for shard in self._held if shard not in wanted]:
            self._held.pop(shard).cancel()
        for shard in wanted:
            if shard not in self._held:
                self._held[shard] = Future()
                self._asked.put((shard, self._held[shard]))

    def get(self, shard: int) -> np.ndarray:
        """A shard that is held, once it has been read."""
        return self._held[shard].result()


def _serve(asked: _Asked, read: Callable[[int], np.ndarray]) -> None:
    """Read the shards that are asked for, until the reader is gone."""
    while (job := asked.get()) is not None:
        shard, future = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(read(shard))
        except Exception as error:
            future.set_exception(error)
