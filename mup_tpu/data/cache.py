"""The token cache: a corpus is tokenised once, then memory-mapped, and named by its fingerprint."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.markup import escape

from mup_tpu.config import DataConfig
from mup_tpu.data.corpus import (
    DOCUMENT_CHARACTERS,
    Tokenizer,
    grouped,
    identity,
    is_held_out,
    load_tokenizer,
    make_tokenizer,
    read_documents,
    source_files,
)
from mup_tpu.errors import DataError, raised_as
from mup_tpu.files import Folder, cache_root, checksum, partial, short_hash

FORMAT = 1  # version in the fingerprint: tokens made by another rule are other data

SPLITS = ("train", "validation")

TOKENIZER_FILE = "tokenizer.json"

# Size of the local files of a corpus up to which all their bytes are hashed in each command
HASHED_BYTES = 2**26

# Characters of the documents that are tokenised together, about; a kill loses no more
CHUNK_CHARACTERS = 2**22


@dataclass(frozen=True)
class TokenCache:
    """A tokenised corpus on disk."""

    fingerprint: str
    tokens: dict[str, np.ndarray]  # By split, the separator after each document; memory-mapped
    tokenizer: Tokenizer
    meta: dict[str, Any]  # Name, vocabulary, documents and tokens a split


def fingerprint(config: DataConfig, progress: bool = False) -> str:
    """Return the name of the tokens: 16 hex digits of text, tokenizer and split, wherever the text lies.

    The whole text must be read, so the cache is made on the way, and the answer is kept beside it. Local
    files are known again by path, size, time of change and, up to HASHED_BYTES, content; a data set of the
    hub by its name.
    """
    return _known(config) or _build(config, progress)


def load_cache(config: DataConfig, progress: bool = True) -> TokenCache:
    """Return the tokens of a corpus, from the cache or made now."""
    folder = token_folder(fingerprint(config, progress))
    if folder.exists() and not _is_whole(folder):
        warnings.warn(f"token cache {folder} is damaged; making it again", stacklevel=2)
        shutil.rmtree(folder)
    if not folder.exists():
        folder = token_folder(_build(config, progress))
    meta = json.loads((folder / "meta.json").read_text())
    tokens = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in SPLITS}
    tokenizer = folder / TOKENIZER_FILE
    content = tokenizer.read_text(encoding="utf-8") if tokenizer.exists() else None
    return TokenCache(folder.name, tokens, load_tokenizer(content, meta.get("separator", 0)), meta)


def token_folder(fingerprint: str) -> Path:
    return cache_root() / "tokens" / fingerprint


def _build(config: DataConfig, progress: bool) -> str:
    """Make the tokens of a corpus and return its fingerprint; after a kill, the next call goes on.

    Chunks of documents are tokenised one after the other, each by all threads of the tokenizer, and then
    joined. A second builder waits for the first.
    """
    key = _key(config)
    work = cache_root() / "partial" / key
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{work}.lock"), Console(stderr=True, quiet=not progress).status("") as status:
            known = _known(config)
            if known and token_folder(known).exists():
                return known
            what = escape(f"tokenising {config.corpus} ({config.tokenizer})")
            status.update(what)
            work.mkdir(exist_ok=True)
            held_out = config.validation_fraction
            training = (d.text for d in read_documents(config) if not is_held_out(d, held_out))
            tokenizer = make_tokenizer(config, training)
            texts, counts = hashlib.sha256(), dict.fromkeys(SPLITS, 0)
            chunks: dict[str, list[Path]] = {split: [] for split in SPLITS}
            read = grouped(read_documents(config), lambda document: len(document.text), CHUNK_CHARACTERS)
            for documents in read:
                by_split: dict[str, list[str]] = {split: [] for split in SPLITS}
                for document in documents:
                    by_split[SPLITS[is_held_out(document, held_out)]].append(document.text)
                    texts.update(hashlib.sha256(document.text.encode()).digest() + document.split.encode())
                for split, of_split in by_split.items():
                    chunk = work / f"{split}-{len(chunks[split]):06}"
                    chunks[split].append(_tokenise_chunk(chunk, of_split, tokenizer))
                    counts[split] += len(of_split)
                status.update(f"{what}: {sum(counts.values()):,} documents")
            tokens = [*identity(config, tokenizer), held_out.hex(), DOCUMENT_CHARACTERS]
            words = [FORMAT, texts.hexdigest(), tokens]
            name = short_hash(json.dumps(words))
            if not token_folder(name).exists():
                path = Path(config.corpus)
                dataset = path.name if path.exists() else config.corpus
                _join(chunks, counts, tokenizer, dataset, token_folder(name))
            Folder(cache_root() / "fingerprints").write(key, name.encode())
            shutil.rmtree(work)
            return name
    except OSError as error:
        raise DataError(
            f"token cache {cache_root()} cannot be written: {error.strerror}; set MUP_TPU_CACHE"
        ) from None


def _tokenise_chunk(file: Path, texts: list[str], tokenizer: Tokenizer) -> Path:
    """Write the tokens of documents, unless a killed build has, and return their file.

    A hash of texts and tokenizer is added to the name.
    """
    content = b"\0".join([(tokenizer.to_json() or "").encode(), *(text.encode() for text in texts)])
    file = file.with_name(f"{file.name}-{short_hash(content)}")
    if not file.exists():
        separator = np.array([tokenizer.separator])
        parts = [part for tokens in tokenizer.encode(texts) for part in (tokens, separator)]
        with partial(file) as made:
            np.concatenate(parts or [separator[:0]]).astype(token_type(tokenizer.vocab_size)).tofile(made)
            made.replace(file)
    return file


def _join(
    chunks: dict[str, list[Path]], documents: dict[str, int], tokenizer: Tokenizer, dataset: str, folder: Path
) -> None:
    dtype = token_type(tokenizer.vocab_size)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with partial(folder, folder=True) as made:
        meta: dict[str, Any] = {"dataset": dataset, "vocab_size": tokenizer.vocab_size}
        meta |= {"separator": tokenizer.separator, "sha256": {}}
        for split in SPLITS:
            size = sum(chunk.stat().st_size for chunk in chunks[split]) // dtype.itemsize
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
            with (made / f"{split}.npy").open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for chunk in chunks[split]:
                    file.write(chunk.read_bytes())
            meta[split] = {"documents": documents[split], "tokens": size}
            meta["sha256"][f"{split}.npy"] = checksum(made / f"{split}.npy")
        content = tokenizer.to_json()
        if content is not None:
            (made / TOKENIZER_FILE).write_text(content, encoding="utf-8")
            meta["sha256"][TOKENIZER_FILE] = checksum(made / TOKENIZER_FILE)
        (made / "meta.json").write_text(json.dumps(meta, indent=1))
        made.rename(folder)


def token_type(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    kinds: tuple[type[np.unsignedinteger], ...] = (np.uint8, np.uint16, np.uint32)
    return next(np.dtype(kind) for kind in kinds if vocab_size <= np.iinfo(kind).max + 1)


def _is_whole(folder: Path) -> bool:
    try:
        sums = json.loads((folder / "meta.json").read_text())["sha256"]
        return all(checksum(folder / file) == expected for file, expected in sums.items())
    except (OSError, ValueError, KeyError):
        return False


def _known(config: DataConfig) -> str | None:
    note = cache_root() / "fingerprints" / _key(config)
    return note.read_text() if note.exists() else None


def _key(config: DataConfig) -> str:
    files = source_files(config.corpus)
    where = [config.corpus == "sotu", Path(config.corpus).is_file()] if files else [config.corpus]
    text = [*where, _stats(files), _content(files), config.text_column, config.max_documents]
    tokenizer: list[Any] = [config.tokenizer, config.vocab_size if config.tokenizer == "bpe" else None]
    if Path(config.tokenizer).is_dir():
        parts = sorted(file for file in Path(config.tokenizer).iterdir() if file.is_file())
        tokenizer = [_stats(parts), _content(parts)]
    key = [FORMAT, text, tokenizer, config.validation_fraction.hex(), DOCUMENT_CHARACTERS]
    return short_hash(json.dumps(key))


def _stats(files: list[Path]) -> list[tuple[str, int, int]]:
    return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _content(files: list[Path]) -> str:
    """Hash the bytes of files, unless they are large.

    A text whose size and time of change are kept (rsync --times, a restored backup) is another text.
    """
    digest = hashlib.sha256()
    if sum(file.stat().st_size for file in files) <= HASHED_BYTES:
        for file in files:
            with raised_as(DataError, f"corpus file {file} cannot be read"), file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
