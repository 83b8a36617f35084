"""Text to tokens: bytes, a byte-level BPE trained on the corpus itself, or a pretrained tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mup_tpu.config import DataConfig
from mup_tpu.data.corpus import hub_answers, hub_endpoint, only_cached
from mup_tpu.errors import DataError, reason


class ByteTokenizer:
    """UTF-8 bytes."""

    vocab_size = 256
    separator = 0  # Token that ends each document: byte 0 is in no text

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        # A character cut in two is shown as U+FFFD.
        return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_json(self) -> None:
        """Return None, all that `load_tokenizer` needs beside the separator."""

    def stock(self) -> Any:
        """Return a byte-level BPE without merges: each byte is one token.

        Byte 0 is U+0000 in place of the alphabet's U+0100: a special token is looked for in texts, and a text
        may contain U+0100.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # ByteLevel's alphabet (Radford et al. 2019): printable bytes as they are, all others from U+0100 on.
        printable = [b for b in range(256) if not (b <= 0x20 or 0x7F <= b <= 0xA0 or b == 0xAD)]
        others = [b for b in range(256) if b not in printable]
        letters = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        separator = "\0"
        vocabulary = {letter: b for letter, b in letters.items() if b} | {separator: 0}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([separator])
        return tokenizer


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library: byte-level BPE (Radford et al. 2019, 2.2) or another."""

    def __init__(self, tokenizer: Any, separator: int) -> None:
        self._tokenizer = tokenizer
        self.separator = separator
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
        """Train a BPE on texts; deterministic."""
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
        return cls(tokenizer, separator=0)

    @classmethod
    def pretrained(cls, name: str) -> SubwordTokenizer:
        """Load a tokenizer of the hub or of a local folder by transformers' AutoTokenizer."""
        from transformers import AutoTokenizer

        local = Path(name).is_dir()
        online = not local and hub_answers()
        try:
            with contextlib.nullcontext() if online else only_cached():
                loaded = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # transformers raises errors of any kind for broken or missing files
            if local or online:
                raise DataError(f"tokenizer {name!r} cannot be loaded: {reason(error)}") from None
            raise DataError(
                f"tokenizer {name!r} is neither 'bytes', 'bpe' nor a local folder, and the Hugging Face hub "
                f"is unreachable ({hub_endpoint()}): use 'bytes', 'bpe', a folder that holds a tokenizer, or "
                "one that is in HF_HOME already"
            ) from None
        if not loaded.is_fast:
            raise DataError(f"tokenizer {name!r} cannot be run by the `tokenizers` library; convert it first")
        ends = (loaded.eos_token_id, loaded.sep_token_id, loaded.bos_token_id)
        separator = next((token for token in ends if token is not None), None)
        if separator is None:
            raise DataError(f"tokenizer {name!r} has no end-of-text token; set its eos_token")
        tokenizer = loaded.backend_tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, separator)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.asarray(e.ids, np.uint32) for e in encoded]

    def decode(self, tokens: np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(tokens).tolist())

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    def stock(self) -> Any:
        """Return the library's tokenizer without tokens around a text, as in training."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.to_json())
        tokenizer.post_processor = None
        return tokenizer


Tokenizer = ByteTokenizer | SubwordTokenizer


def make_tokenizer(config: DataConfig, training_texts: Iterable[str]) -> Tokenizer:
    """Make the tokenizer of a configuration; a BPE is trained on the training documents alone."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "bpe":
        return SubwordTokenizer.train(training_texts, config.vocab_size)
    return SubwordTokenizer.pretrained(config.tokenizer)


def load_tokenizer(content: str | None, separator: int) -> Tokenizer:
    if content is None:
        return ByteTokenizer()
    from tokenizers import Tokenizer as LibraryTokenizer

    return SubwordTokenizer(LibraryTokenizer.from_str(content), separator)


def save_stock(tokenizer: Tokenizer, sequence_length: int, folder: Path) -> None:
    """Write files for transformers' AutoTokenizer; all special tokens are the one that ends a document.

    `save_pretrained` will not do: transformers 5 writes the name of a class that transformers 4 lacks.
    """
    stock = tokenizer.stock()
    stock.save(str(folder / "tokenizer.json"))
    ends = stock.id_to_token(tokenizer.separator)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ends,
        "eos_token": ends,
        "pad_token": ends,
        "padding_side": "left",  # else padding would stand between a text and its continuation
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def identity(config: DataConfig, tokenizer: Tokenizer) -> list[Any]:
    """Return what decides the tokens of a text; the name of the tokenizer's folder is not part of it."""
    if config.tokenizer == "bytes":
        return ["bytes", 256]
    if config.tokenizer == "bpe":
        return ["bpe", config.vocab_size]
    content = (tokenizer.to_json() or "").encode()
    return [hashlib.sha256(content).hexdigest(), tokenizer.separator]
