"""Batches as a function of (data seed, step) alone, from the token cache or from prepared shards.

Batches of shards are streamed, each shard read whole and once an epoch, ahead of its use. An epoch permutes
the shards, and the samples of SHUFFLE_SHARDS of them together. So the sample at any step is known without
reading earlier ones, and resuming reads the shards of that step alone.

Shapes: N batches, B sequences, T tokens; a sequence carries T + 1 tokens, inputs and targets overlapping.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from mup_tpu.config import DataConfig
from mup_tpu.data.cache import TokenCache
from mup_tpu.data.corpus import Tokenizer
from mup_tpu.data.shards import ShardFolder
from mup_tpu.errors import DataError

T = TypeVar("T")

# Shards whose samples are permuted together. Another number would change the order of all batches.
SHUFFLE_SHARDS = 4

READERS = 4  # shards that are read at a time

_POLL_S = 0.1  # seconds between two checks for a batch


class TokenDataset(ABC):
    """Training data of a pack, from any source: its batches depend on the step alone."""

    def __init__(self, config: DataConfig, name: str, fingerprint: str, tokenizer: Tokenizer) -> None:
        self.config, self.name, self.fingerprint, self.tokenizer = config, name, fingerprint, tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.tokens_per_step = config.batch_size * config.sequence_length

    @abstractmethod
    def train_batch(self, step: int) -> np.ndarray:
        """Return the tokens (B, T + 1) of a step, int64."""

    @abstractmethod
    def validation_batches(self, count: int) -> np.ndarray:
        """Return held-out tokens (N, B, T + 1), int64, the same in each call.

        Short held-out text gives fewer than `count` batches, and at least one, of fewer sequences if need be.
        """


class CachedDataset(TokenDataset):
    """Batches of one tokenised corpus from the memory-mapped token cache."""

    def __init__(self, config: DataConfig, cache: TokenCache) -> None:
        super().__init__(config, cache.meta["dataset"], cache.fingerprint, cache.tokenizer)
        self._train, self._validation = cache.tokens["train"], cache.tokens["validation"]
        # One block is left out, so that each epoch can start its blocks at another offset.
        self._blocks = (len(self._train) - 1) // config.sequence_length - 1
        if self._blocks < config.batch_size:
            raise DataError(
                f"corpus {config.corpus!r} is shorter than one batch: {len(self._train)} training tokens, "
                f"but batch_size {config.batch_size} x sequence_length {config.sequence_length} needs "
                f"{(config.batch_size + 1) * config.sequence_length + 1}"
            )
        if len(self._validation) < config.sequence_length + 1:
            raise DataError(
                f"corpus {config.corpus!r} has {len(self._validation)} held-out tokens, below one sequence: "
                f"sequence_length {config.sequence_length}; use a larger validation_fraction than "
                f"{config.validation_fraction}"
            )

    def train_batch(self, step: int) -> np.ndarray:
        # Order and offset of blocks differ between epochs, so that sequences do too.

        t, b = self.config.sequence_length, self.config.batch_size
        starts = [self._start(step * b + i) for i in range(b)]
        return np.stack([self._train[s : s + t + 1] for s in starts]).astype(np.int64)

    def _start(self, index: int) -> int:
        epoch, position = divmod(index, self._blocks)
        order, offset = _epoch(self.config.data_seed, epoch, self._blocks, self.config.sequence_length)
        return int(order[position]) * self.config.sequence_length + offset

    def validation_batches(self, count: int) -> np.ndarray:
        """Return sequences that are spread evenly, without overlap."""
        t = self.config.sequence_length
        blocks = (len(self._validation) - 1) // t
        b = min(self.config.batch_size, blocks)
        n = min(count, blocks // b)
        chosen = np.arange(n * b) * blocks // (n * b)
        sequences = np.stack([self._validation[i * t : i * t + t + 1] for i in chosen])
        return sequences.astype(np.int64).reshape(n, b, t + 1)


@functools.lru_cache(maxsize=4)
def _epoch(data_seed: int, epoch: int, blocks: int, sequence_length: int) -> tuple[np.ndarray, int]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([data_seed, epoch])))
    return generator.permutation(blocks), int(generator.integers(sequence_length))


class ShardDataset(TokenDataset):
    """Batches of prepared shards; an epoch ends with its last whole batch."""

    def __init__(self, config: DataConfig, readers: int = READERS) -> None:
        folder = ShardFolder(config.corpus)
        index = self._index = folder.index
        super().__init__(config, index.dataset, index.fingerprint, folder.tokenizer)
        if config.sequence_length != index.sequence_length:
            raise DataError(
                f"sequence_length {config.sequence_length} is not the {index.sequence_length} of the shards "
                f"in {folder.url}: use {index.sequence_length}, or prepare other shards"
            )
        self._batches = index.train.samples // config.batch_size
        if not self._batches:
            raise DataError(
                f"{folder.url} is shorter than one batch: {index.train.samples} training sequences, but "
                f"batch_size {config.batch_size}"
            )
        self._train = _Reader(lambda i: folder.samples(index.train.shards[i]), readers)
        self._held_out = functools.lru_cache(lambda i: folder.samples(index.validation.shards[i]))

    def train_batch(self, step: int) -> np.ndarray:
        (epoch, batch), b = divmod(step, self._batches), self.config.batch_size
        places = range(batch * b, (batch + 1) * b)
        per_shard = self._index.train.samples_per_shard
        size = SHUFFLE_SHARDS * per_shard
        buffers = {i: self._buffer(epoch, i) for i in range(places[0] // size, places[-1] // size + 1)}
        following = self._buffer(epoch, max(buffers) + 1) or self._buffer(epoch + 1, 0)
        self._train.keep([shard for shards in [*buffers.values(), following] for shard in shards])
        sequences = []
        for place in places:
            number, position = divmod(place, size)
            shards = buffers[number]
            # Without the 1, this would be the seed of the shards' order: NumPy ignores trailing zeros.
            order = _permutation(len(shards) * per_shard, self.config.data_seed, epoch, 1, number)
            shard, row = divmod(int(order[position]), per_shard)
            sequences.append(self._train.get(shards[shard])[row])
        return np.stack(sequences).astype(np.int64)

    def _buffer(self, epoch: int, number: int) -> list[int]:
        order = _permutation(len(self._index.train.shards), self.config.data_seed, epoch)
        return order[number * SHUFFLE_SHARDS : (number + 1) * SHUFFLE_SHARDS].tolist()

    def validation_batches(self, count: int) -> np.ndarray:
        # Those of the first shards, so that few are read: the sequences in them are random.
        per_shard, samples = self._index.validation.samples_per_shard, self._index.validation.samples
        b = min(self.config.batch_size, samples)
        n = min(count, samples // b)
        chosen = [self._held_out(i // per_shard)[i % per_shard] for i in range(n * b)]
        return np.stack(chosen).astype(np.int64).reshape(n, b, -1)


@functools.lru_cache(maxsize=16)
def _permutation(size: int, *key: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).permutation(size)


class _Reader:
    """Shards that threads read ahead, a few at a time."""

    def __init__(self, read: Callable[[int], np.ndarray], threads: int) -> None:
        self._read, self._slots = read, threading.Semaphore(threads)
        self.kept: dict[int, Future[np.ndarray]] = {}

    def keep(self, shards: Iterable[int]) -> None:
        """Start to read new shards, in this order, and drop all shards that are not named."""
        wanted = dict.fromkeys(shards)
        for shard in self.kept.keys() - wanted.keys():
            self.kept.pop(shard).cancel()
        for shard in wanted:
            if shard not in self.kept:
                future = self.kept[shard] = Future[np.ndarray]()
                # No executor: at its exit Python would wait for a thread that still tries a lost server.
                call = (future, functools.partial(self._read, shard), self._slots)
                threading.Thread(target=_settle, args=call, name="shards", daemon=True).start()

    def get(self, shard: int) -> np.ndarray:
        return self.kept[shard].result()


def _settle(future: Future[T], make: Callable[[], T], turn: contextlib.AbstractContextManager[Any]) -> None:
    with turn:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make())
            except Exception as error:
                future.set_exception(error)


@contextlib.contextmanager
def prefetch(
    make_batch: Callable[[int], T],
    start: int,
    stop: int,
    depth: int = 2,
    gives_up: Callable[[], bool] = lambda: False,
) -> Iterator[Iterator[T]]:
    """Yield the batches of steps start to stop - 1 in order, made by a thread up to `depth` ahead.

    Errors of the thread are raised where the batch is asked for. The end of the block ends the thread. Once
    `gives_up` returns true, the iterator ends without waiting for a batch; the thread, which may wait for a
    server, is left to itself.
    """
    made: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
    room, is_over = threading.Semaphore(depth + 1), threading.Event()

    def run() -> None:
        for step in range(start, stop):
            room.acquire()
            if is_over.is_set():
                return
            future = Future[T]()
            _settle(future, functools.partial(make_batch, step), contextlib.nullcontext())
            made.put(future)

    def batches() -> Iterator[T]:
        for _ in range(start, stop):
            batch: Future[T] | None = None
            while batch is None:
                with contextlib.suppress(queue.Empty):
                    batch = made.get(timeout=_POLL_S)
                if batch is None and gives_up():
                    return
            room.release()
            yield batch.result()

    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    thread.start()
    try:
        yield batches()
    finally:
        is_over.set()
        room.release()
        while thread.is_alive() and not gives_up():
            thread.join(_POLL_S)
