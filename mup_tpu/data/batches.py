"""Batches as a function of (data seed, step) alone.

Shapes: N batches, B sequences, T tokens; a sequence carries T + 1 tokens, inputs and targets overlapping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np

from mup_tpu.config import DataConfig
from mup_tpu.data.cache import TokenCache
from mup_tpu.data.tokenizer import Tokenizer
from mup_tpu.errors import DataError


class TokenDataset(ABC):
    """Training data of a pack, from any source: its batches depend on the step alone."""

    meta: dict[str, Any]

    def __init__(self, config: DataConfig, name: str, fingerprint: str, tokenizer: Tokenizer) -> None:
        self.config, self.name, self.fingerprint, self.tokenizer = config, name, fingerprint, tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.tokens_per_step = config.batch_size * config.sequence_length

    @abstractmethod
    def train_batch(self, step: int) -> np.ndarray:
        """Tokens (B, T + 1) of a step, int64."""

    @abstractmethod
    def validation_batches(self, count: int) -> np.ndarray:
        """Held-out tokens (N, B, T + 1), int64, in at most `count` batches, the same in each call."""


class CachedDataset(TokenDataset):
    """Batches of one tokenised corpus from the memory-mapped token cache."""

    def __init__(self, config: DataConfig, cache: TokenCache) -> None:
        super().__init__(config, cache.meta["dataset"], cache.fingerprint, cache.tokenizer)
        self.meta = cache.meta
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
                f"sequence_length {config.sequence_length}; use more text or a larger validation_fraction "
                f"than {config.validation_fraction}"
            )

    def train_batch(self, step: int) -> np.ndarray:
        """Tokens (B, T + 1) of a step, int64: every block of the corpus once an epoch, in random order.

        Each epoch has an order and an offset of its own, so that sequences differ between epochs. A batch
        that crosses the end of an epoch is filled from the next.
        """
        t, b = self.config.sequence_length, self.config.batch_size
        starts = [self._start(step * b + i) for i in range(b)]
        return np.stack([self._train[s : s + t + 1] for s in starts]).astype(np.int64)

    def _start(self, index: int) -> int:
        epoch, position = divmod(index, self._blocks)
        order, offset = _epoch(self.config.data_seed, epoch, self._blocks, self.config.sequence_length)
        return int(order[position]) * self.config.sequence_length + offset

    def validation_batches(self, count: int) -> np.ndarray:
        """Held-out tokens (N, B, T + 1), int64, the same in each call: spread evenly, without overlap.

        Short held-out text gives fewer than `count` batches, and at least one, of fewer sequences if need be.
        """
        t = self.config.sequence_length
        blocks = (len(self._validation) - 1) // t
        b = min(self.config.batch_size, blocks)
        n = min(count, blocks // b)
        chosen = np.arange(n * b) * blocks // (n * b)
        sequences = np.stack([self._validation[i * t : i * t + t + 1] for i in chosen])
        return sequences.astype(np.int64).reshape(n, b, t + 1)


@lru_cache(maxsize=4)
def _epoch(data_seed: int, epoch: int, blocks: int, sequence_length: int) -> tuple[np.ndarray, int]:
    """Order of the blocks in an epoch, and the offset of its first one."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([data_seed, epoch])))
    return generator.permutation(blocks), int(generator.integers(sequence_length))
