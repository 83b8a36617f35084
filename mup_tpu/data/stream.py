"""Batches streamed from prepared shards, each read whole and once an epoch, ahead of its use.

The order of the samples depends on (data seed, epoch, hosts, host) and the index alone. In an epoch the
shards are permuted and dealt to the hosts. The shuffle buffer of a host is SHUFFLE_SHARDS of its shards,
whose samples are permuted together. So the sample at any step is known without reading earlier ones, and
resuming reads the shards of that step alone. The number of reading threads changes nothing.

Shapes: N batches, B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mup_tpu.config import DataConfig
from mup_tpu.data.ahead import Threads
from mup_tpu.data.batches import TokenDataset
from mup_tpu.data.shard_folder import ShardFolder
from mup_tpu.errors import ConfigError, DataError

SHUFFLE_SHARDS = 4
"""Shards whose samples are permuted together. Another number would change the order of all batches."""

READERS = 4
"""Shards that one host reads at a time."""


@dataclass(frozen=True)
class World:
    """Hosts that read one stream together: their number, and the index of this host."""

    hosts: int = 1
    host: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.host < self.hosts:
            raise ConfigError(f"host {self.host} is not one of {self.hosts} hosts, counted from 0")


class ShardDataset(TokenDataset):
    """Batches of prepared shards, for one host.

    The batch size is of all hosts together. Each host gets equally many samples an epoch, from shards of its
    own; a rest of the shards is left out, another one in every epoch.
    """

    def __init__(self, config: DataConfig, world: World = World(), readers: int = READERS) -> None:
        folder = ShardFolder(config.corpus)
        index = folder.index
        super().__init__(config, index.dataset, index.fingerprint, folder.tokenizer)
        self.world = world
        if config.sequence_length != index.sequence_length:
            raise DataError(
                f"sequence_length {config.sequence_length} is not the {index.sequence_length} of the shards "
                f"in {folder.url}: use {index.sequence_length}, or prepare other shards"
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
        """Tokens (B / hosts, T + 1) of a step, int64; an epoch ends with its last whole batch."""
        epoch, batch = divmod(step, self._batches)
        places = range(batch * self._batch, (batch + 1) * self._batch)
        size = SHUFFLE_SHARDS * self._index.train.samples_per_shard
        now = [self._buffer(epoch, number) for number in range(places[0] // size, places[-1] // size + 1)]
        following = self._buffer(epoch, places[-1] // size + 1) or self._buffer(epoch + 1, 0)
        self._train.hold([shard for shards in [*now, following] for shard in shards])
        return np.stack([self._sample(epoch, place) for place in places]).astype(np.int64)

    def validation_batches(self, count: int) -> np.ndarray:
        """Held-out tokens (N, B / hosts, T + 1), int64, the same in each call.

        They are the first held-out shards, so that few are read: the sequences in them are random. Short
        held-out text gives fewer than `count` batches, and at least one, of fewer sequences if need be.
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
        """Shards that this host shuffles together; none after the last of an epoch."""
        order = _permutation(len(self._index.train.shards), self.config.data_seed, epoch)
        own = order[self.world.host :: self.world.hosts][: self._shards]
        return own[number * SHUFFLE_SHARDS : (number + 1) * SHUFFLE_SHARDS].tolist()

    def _sample(self, epoch: int, place: int) -> np.ndarray:
        """The sequence at a place of an epoch of this host."""
        per_shard = self._index.train.samples_per_shard
        number, position = divmod(place, SHUFFLE_SHARDS * per_shard)
        shards = self._buffer(epoch, number)
        # The third entry is never 0: a seed with zeros after it is the same seed as the shards' order has.
        key = (self.config.data_seed, epoch, 1 + self.world.host, number)
        shard, row = divmod(int(_permutation(len(shards) * per_shard, *key)[position]), per_shard)
        return self._train.get(shards[shard])[row]


@lru_cache(maxsize=16)
def _permutation(size: int, *key: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).permutation(size)


class _Reader:
    """Shards that threads read ahead."""

    def __init__(self, read: Callable[[int], np.ndarray], threads: int) -> None:
        self._threads = Threads(read, threads, "shards")
        self._held: dict[int, Future[np.ndarray]] = {}

    def hold(self, shards: Iterable[int]) -> None:
        """Begin to read new shards, in this order, and drop all shards that are not named."""
        wanted = dict.fromkeys(shards)
        for shard in [shard for shard in self._held if shard not in wanted]:
            self._held.pop(shard).cancel()
        for shard in wanted:
            if shard not in self._held:
                self._held[shard] = self._threads.ask(shard)

    def get(self, shard: int) -> np.ndarray:
        """Samples of a held shard; waits until it has been read."""
        return self._held[shard].result()
