"""The token cache: a corpus tokenised once, memory-mapped ever after, named by its fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mup_tpu.config import DataConfig
from mup_tpu.data.corpus import DOCUMENT_CHARACTERS, Document, is_held_out, read_documents, source_files
from mup_tpu.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from mup_tpu.errors import DataError
from mup_tpu.files import checksum

FORMAT = 1
"""Part of the fingerprint: tokens made by another rule are other data."""

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class TokenCache:
    """A tokenised corpus on disk."""

    fingerprint: str
    tokens: dict[str, np.ndarray]
    """Split -> tokens of its documents, a document separator (0) after each; memory-mapped."""
    tokenizer: Tokenizer
    meta: dict[str, Any]
    """Name, documents and tokens a split, bytes per token, unigram entropy in nat per token."""


def cache_root() -> Path:
    """Where token caches lie: $MUP_TPU_CACHE, or ~/.cache/mup_tpu."""
    return Path(os.environ.get("MUP_TPU_CACHE") or Path.home() / ".cache" / "mup_tpu")


def fingerprint(config: DataConfig) -> str:
    """16 hex digits that name the tokens: the text, the tokenizer and the split, not where the text lies.

    Reading and hashing the whole text takes long for a large corpus, so the answer is kept beside the cache,
    keyed by each file's path, size and time of change.

    Raises:
        DataError: the corpus cannot be read.
    """
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in source_files(config.corpus)]
    key = _hash([FORMAT, config.corpus == "sotu", stats, _recipe(config)])
    note = cache_root() / "fingerprints" / key
    if note.exists():
        return note.read_text()
    return _remember(key, _content_fingerprint(config, read_documents(config.corpus)))


def load_cache(config: DataConfig, progress: bool = True) -> TokenCache:
    """The tokens of a corpus, from the cache or made now.

    Args:
        config: corpus, tokenizer and split.
        progress: show what is being made (on standard error).

    Raises:
        DataError: the corpus cannot be used, or the cache folder cannot be written.
    """
    name = fingerprint(config)
    folder = cache_root() / "tokens" / name
    if folder.exists() and not _is_whole(folder):
        warnings.warn(f"token cache {folder} is damaged; making it again", stacklevel=2)
        shutil.rmtree(folder)
    if not folder.exists():
        with Console(stderr=True, quiet=not progress).status(
            f"tokenising {config.corpus} ({config.tokenizer})"
        ):
            _build(config, name, folder)
    meta = json.loads((folder / "meta.json").read_text())
    tokens = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in SPLITS}
    return TokenCache(name, tokens, load_tokenizer(config, folder), meta)


def _build(config: DataConfig, name: str, folder: Path) -> None:
    """Make a cache folder and rename it into place; of two builders the first wins."""
    documents = read_documents(config.corpus)
    split = {
        "train": [d for d in documents if not is_held_out(d, config.validation_fraction)],
        "validation": [d for d in documents if is_held_out(d, config.validation_fraction)],
    }
    tokenizer = make_tokenizer(config, [d.text for d in split["train"]])
    dtype = (
        np.uint8
        if tokenizer.vocab_size <= 2**8
        else np.uint16
        if tokenizer.vocab_size <= 2**16
        else np.uint32
    )
    partial = folder.parent / f".partial-{uuid.uuid4().hex}"
    try:
        partial.mkdir(parents=True)
        meta: dict[str, Any] = {"dataset": _name(config), "vocab_size": tokenizer.vocab_size, "sha256": {}}
        counts = np.zeros(tokenizer.vocab_size, np.int64)
        for key, members in split.items():
            encoded = tokenizer.encode([d.text for d in members])
            separator = np.zeros(1, dtype)
            tokens = np.concatenate(
                [part for e in encoded for part in (e.astype(dtype), separator)] or [separator[:0]]
            )
            np.save(partial / f"{key}.npy", tokens)
            meta[key] = {"documents": len(members), "tokens": len(tokens)}
            meta["sha256"][f"{key}.npy"] = checksum(partial / f"{key}.npy")
            counts += np.bincount(tokens, minlength=tokenizer.vocab_size)
        share = counts[counts > 0] / max(1, counts.sum())
        meta["unigram_entropy"] = float(-(share * np.log(share)).sum())
        meta["bytes_per_token"] = sum(len(d.text.encode()) for d in documents) / max(1, int(counts.sum()))
        tokenizer.save(partial)
        (partial / "meta.json").write_text(json.dumps(meta, indent=1))
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    except OSError as error:
        raise DataError(
            f"token cache {folder} cannot be written: {error.strerror}; set MUP_TPU_CACHE"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        sums = json.loads((folder / "meta.json").read_text())["sha256"]
        return all(checksum(folder / file) == expected for file, expected in sums.items())
    except (OSError, ValueError, KeyError):
        return False


def _content_fingerprint(config: DataConfig, documents: list[Document]) -> str:
    texts = hashlib.sha256()
    for document in documents:
        texts.update(hashlib.sha256(document.text.encode()).digest())
    return _hash([FORMAT, texts.hexdigest(), _recipe(config)])


def _recipe(config: DataConfig) -> list[Any]:
    vocabulary = config.vocab_size if config.tokenizer == "bpe" else 256
    return [config.tokenizer, vocabulary, config.validation_fraction.hex(), DOCUMENT_CHARACTERS]


def _remember(key: str, value: str) -> str:
    folder = cache_root() / "fingerprints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".partial-{uuid.uuid4().hex}"
        partial.write_text(value)
        partial.rename(folder / key)
    except OSError as error:
        raise DataError(
            f"cache folder {folder} cannot be written: {error.strerror}; set MUP_TPU_CACHE"
        ) from None
    return value


def _name(config: DataConfig) -> str:
    return config.corpus if config.corpus == "sotu" else Path(config.corpus).name


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
