"""Text to tokens: bytes, or a byte-level BPE trained on the corpus itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from mup_tpu.config import DataConfig


class Tokenizer(Protocol):
    """What the token cache asks of a tokenizer; token 0 stands between documents."""

    vocab_size: int

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each text."""

    def decode(self, tokens: np.ndarray) -> str:
        """Text of tokens."""

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` needs, if anything."""


class ByteTokenizer:
    """UTF-8 bytes; byte 0, which no text holds, stands between documents."""

    vocab_size = 256

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of bytes; a character cut in two is shown as U+FFFD."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing to save."""


class BpeTokenizer:
    """Byte-level BPE (Radford et al. 2019, section 2.2), by the `tokenizers` library."""

    FILE = "tokenizer.json"

    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()  # type: ignore[attr-defined]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Learn merges from texts; deterministic."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> BpeTokenizer:
        """One that was saved."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(folder / cls.FILE)))

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each text."""
        return [np.asarray(e.ids, np.uint32) for e in self._tokenizer.encode_batch(texts)]  # type: ignore[attr-defined]

    def decode(self, tokens: np.ndarray) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(np.asarray(tokens).tolist())  # type: ignore[attr-defined]

    def save(self, folder: Path) -> None:
        """Write tokenizer.json."""
        self._tokenizer.save(str(folder / self.FILE))  # type: ignore[attr-defined]


def make_tokenizer(config: DataConfig, training_texts: list[str]) -> Tokenizer:
    """The tokenizer of a configuration; a BPE sees the training documents alone."""
    return (
        ByteTokenizer()
        if config.tokenizer == "bytes"
        else BpeTokenizer.train(training_texts, config.vocab_size)
    )


def load_tokenizer(config: DataConfig, folder: Path) -> Tokenizer:
    """The tokenizer that was saved with a token cache."""
    return ByteTokenizer() if config.tokenizer == "bytes" else BpeTokenizer.load(folder)
