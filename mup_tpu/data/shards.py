"""Prepared shards: a tokenised corpus as WebDataset tar files and an index, anywhere fsspec reaches.

    index.json                contents and checksums; written last
    tokenizer.json            the tokenizer, unless its tokens are bytes
    train-000000.tar          samples, equally many in every shard: KEY.npy has the T + 1 tokens of a sequence
    train-000000.tar.sha256   checksum for `sha256sum --check`; written when its shard is whole
    validation-000000.tar     held-out samples

Sequences overlap by one token, so that every token is a target once. They are dealt to the shards in a fixed
random order, so that each shard is a sample of the whole corpus. Files may come from anybody: the result of a
read is the tokens of the index, or an error of one sentence. A shard is read by the places at which the
writer puts its tokens, so that nothing in it is parsed.

Shapes: T tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import random
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.progress import track

from mup_tpu.config import DataConfig
from mup_tpu.config.toml import from_dict
from mup_tpu.config.values import About, require_count, require_valid
from mup_tpu.data.cache import SPLITS, TOKENIZER_FILE, TokenCache, load_cache, token_type
from mup_tpu.data.corpus import Tokenizer, load_tokenizer
from mup_tpu.errors import ConfigError, DataError, raised_as, reason
from mup_tpu.files import Folder, short_hash

FORMAT = 1  # version in the fingerprint: shards of another format give other batches

INDEX = "index.json"

MAX_SHARD_BYTES = 2**34  # largest shard: eight are held in memory at a time

ATTEMPTS = 10  # tries of a read; with their pauses they take about a minute and a half

FIRST_PAUSE = 0.25  # seconds before the second try; doubled for each further one

DEADLINE_S = 300.0  # seconds after which a read is not tried again

_UNSIZED = 2**23  # assumed bytes of a file without a size in the index, for its deadline

TAR_BLOCK = 512
_FROM_0, _FROM_1 = ({"about": About(least=least)} for least in (0, 1))

_log = logging.getLogger(__name__)


def is_prepared(corpus: str) -> bool:
    return "://" in corpus or os.path.isfile(os.path.join(corpus, INDEX))


@dataclass(frozen=True)
class Shard:
    """One tar file of samples."""

    name: str
    size: int = field(metadata=_FROM_1)  # Bytes
    sha256: str

    def __post_init__(self) -> None:
        require_valid(self)
        if not self.name or "/" in self.name or "\\" in self.name or self.name in (".", ".."):
            raise ValueError(f"shard {self.name!r} is no file of the folder")
        if self.size > MAX_SHARD_BYTES:
            raise ValueError(f"shard {self.name} has {self.size} bytes, more than {MAX_SHARD_BYTES}")


@dataclass(frozen=True)
class ShardedSplit:
    """Shards of one split, with equal numbers of samples."""

    documents: int = field(metadata=_FROM_0)
    tokens: int = field(metadata=_FROM_0)  # Tokens of the corpus, with the rest that fills no shard
    samples_per_shard: int = field(metadata=_FROM_1)
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        require_valid(self)
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise ValueError("a shard is named twice")

    @property
    def samples(self) -> int:
        return self.samples_per_shard * len(self.shards)


@dataclass(frozen=True)
class ShardIndex:
    """Content of index.json."""

    dataset: str
    fingerprint: str  # Hash of tokens, sequence length and order of sequences in shards
    sequence_length: int = field(metadata=_FROM_1)
    vocab_size: int = field(metadata=_FROM_1)
    separator: int = field(metadata=_FROM_0)
    tokenizer_sha256: str | None  # Checksum of tokenizer.json; None if tokens are bytes
    train: ShardedSplit
    validation: ShardedSplit

    def __post_init__(self) -> None:
        require_valid(self)
        if self.vocab_size > 2**32 or self.separator >= self.vocab_size:
            raise ValueError(f"vocab_size {self.vocab_size} with separator {self.separator}")
        size = sample_bytes(self.sequence_length, self.vocab_size)
        for split in (self.train, self.validation):
            for shard in split.shards:
                if shard.size < size * split.samples_per_shard:
                    raise ValueError(
                        f"shard {shard.name} has {shard.size} bytes, too few for {split.samples_per_shard} "
                        f"samples of sequence_length {self.sequence_length}"
                    )

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, content: bytes, where: str, whole: bool = True) -> ShardIndex:
        """Read an index from the bytes of index.json; a `whole` one must name shards."""
        try:
            values = json.loads(content)
            if values.pop("format", None) != FORMAT:
                raise DataError(f"{where} is of another version of the format; prepare the shards again")
            index = from_dict(cls, values, "index")
            for split in SPLITS:
                if whole and not getattr(index, split).shards:
                    raise ValueError(f"it names no {split} shards")
            return index
        except (ConfigError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{where} is not the index of prepared shards: {error}") from None


def npy_header(length: int, vocab_size: int) -> bytes:
    """Return the header of a NumPy file of tokens, which all samples share."""
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(token_type(vocab_size))
    header = {"descr": descr, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(head, header)
    return head.getvalue()


def sample_bytes(sequence_length: int, vocab_size: int) -> int:
    # A header of the tar file, and the NumPy file in whole blocks.
    tokens = (sequence_length + 1) * token_type(vocab_size).itemsize
    file = len(npy_header(sequence_length + 1, vocab_size)) + tokens
    return TAR_BLOCK + -(-file // TAR_BLOCK) * TAR_BLOCK


class ShardFolder:
    """A folder or URL of prepared shards, read with retries, every file checked against the index."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with raised_as(DataError, f"{self.url} cannot be reached", (ImportError, OSError)):
            self._folder = Folder(self.url)
        try:
            self.index = ShardIndex.from_json(self._read(INDEX), f"{self.url}/{INDEX}")
        except FileNotFoundError:
            raise DataError(
                f"{self.url} holds no {INDEX}: it is not (or not yet wholly) prepared; "
                f"write it with: mup-tpu data prepare --out {self.url}"
            ) from None
        sha256 = self.index.tokenizer_sha256
        content = None if sha256 is None else self._read_checked(TOKENIZER_FILE, sha256)
        try:
            tokenizer = load_tokenizer(None if content is None else content.decode(), self.index.separator)
        except Exception as error:  # the library has no class for its errors
            why = str(error).partition("\n")[0]
            raise DataError(f"{self.url}/{TOKENIZER_FILE} is not a tokenizer: {why}") from None
        if tokenizer.vocab_size != self.index.vocab_size:
            raise DataError(
                f"{self.url}/{INDEX} does not fit its shards: vocab_size {self.index.vocab_size}, but the "
                f"tokenizer has {tokenizer.vocab_size} tokens"
            )
        self.tokenizer: Tokenizer = tokenizer

    def samples(self, shard: Shard) -> np.ndarray:
        """Read the sequences of a shard (samples_per_shard, T + 1)."""
        index = self.index
        split = index.train if shard in index.train.shards else index.validation
        content = self._read_checked(shard.name, shard.sha256, shard.size)
        try:
            return unpack(content, split.samples_per_shard, index.sequence_length + 1, index.vocab_size)
        except ValueError as error:
            raise DataError(
                f"shard {self.url}/{shard.name} does not match its index: {error}; prepare again"
            ) from None

    def _read_checked(self, name: str, sha256: str, size: int | None = None) -> bytes:
        try:
            for _ in range(2):  # a transfer may have caused a wrong checksum
                content = self._read(name, size or _UNSIZED)
                digest = hashlib.sha256(content).hexdigest()
                if digest == sha256 and size in (None, len(content)):
                    return content
        except FileNotFoundError:
            raise DataError(
                f"shard {self.url}/{name} is missing, but the index names it; prepare again"
            ) from None
        expected = f"{size} bytes with sha256 {sha256[:12]}" if size else sha256[:12]
        raise DataError(
            f"shard {self.url}/{name} is corrupted: its {len(content)} bytes have sha256 {digest[:12]}, the "
            f"index says {expected}; copy it again"
        )

    def _read(self, name: str, size: int = _UNSIZED) -> bytes:
        """Read a file; try again after dropped connections, timeouts and answers such as 503."""
        began = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._folder.read(name, size=size)
            except FileNotFoundError:
                raise
            except OSError as error:
                why = reason(error)
                if self._folder.is_local or isinstance(error, PermissionError):
                    raise DataError(f"{self.url}/{name} cannot be read: {why}") from None
            _log.warning("reading %s/%s failed, try %d of %d: %s", self.url, name, attempt, ATTEMPTS, why)
            if attempt == ATTEMPTS or time.monotonic() - began > DEADLINE_S:
                raise DataError(f"{self.url}/{name} cannot be read after {attempt} tries: {why}")
            # Random pauses: many hosts may have lost the server at once.
            time.sleep(FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1))
        raise AssertionError("the last try returns or raises")


def unpack(content: bytes, samples: int, length: int, vocab_size: int) -> np.ndarray:
    """Return the sequences in a tar file (samples, length)."""
    kind, head = token_type(vocab_size), np.frombuffer(npy_header(length, vocab_size), np.uint8)
    size = sample_bytes(length - 1, vocab_size)
    files = np.frombuffer(content, np.uint8, samples * size).reshape(samples, size)[:, TAR_BLOCK:]
    if (files[:, : len(head)] != head).any():
        raise ValueError(f"it does not hold {samples} arrays of {length} tokens as {kind}")
    tokens = files[:, len(head) : len(head) + length * kind.itemsize]
    sequences = np.ascontiguousarray(tokens).view(kind)
    if sequences.max() >= vocab_size:
        raise ValueError(f"it holds token {sequences.max()}, outside a vocabulary of {vocab_size}")
    return sequences


_PLAN = "preparing.json"

_WRITERS = 8  # shards that are written at a time: a bucket takes long to answer


def prepare(config: DataConfig, out: str, shard_samples: int = 4096, progress: bool = True) -> ShardIndex:
    """Write a corpus as shards of at most some sequences, to a folder or fsspec URL.

    A call after a kill goes on, and ends with the same bytes.
    """
    require_count("shard_samples", shard_samples)
    if is_prepared(config.corpus):
        raise DataError(f"corpus {config.corpus!r} is prepared already; give its text")
    cache = load_cache(config, progress)
    counts, plan = _plan(config, cache, shard_samples)
    with raised_as(DataError, f"shards cannot be written to {out}"):
        folder = Folder(out)
        names = set(folder.names())
        for name in (INDEX, _PLAN):
            if name not in names:
                continue
            index = ShardIndex.from_json(folder.read(name), f"{folder}/{name}", whole=name == INDEX)
            if index.fingerprint != plan.fingerprint:
                raise DataError(
                    f"{folder} holds other shards (of {index.dataset!r}); give these a folder of their own"
                )
            if name == INDEX:
                return index
        folder.write(_PLAN, plan.to_json().encode())
        content = cache.tokenizer.to_json()
        if content is not None:
            folder.write(TOKENIZER_FILE, content.encode())

        order = {}
        for i, split in enumerate(SPLITS):
            key = np.random.SeedSequence([int(plan.fingerprint, 16), i])
            sequences = (len(cache.tokens[split]) - 1) // config.sequence_length
            order[split] = np.random.Generator(np.random.Philox(key)).permutation(sequences)

        def make(split: str, number: int) -> Shard:
            name = f"{split}-{number:06}.tar"
            if {name, f"{name}.sha256"} <= names:  # by an earlier call: the checksum is written last
                digest = folder.read(f"{name}.sha256").decode().split()[0]
                return Shard(name, folder.size(name), digest)
            each = getattr(plan, split).samples_per_shard
            samples = range(number * each, (number + 1) * each)
            content = _tar(cache.tokens[split], samples, order[split], plan)
            shard = Shard(name, len(content), hashlib.sha256(content).hexdigest())
            folder.write(name, content)
            folder.write(f"{name}.sha256", f"{shard.sha256}  {name}\n".encode())
            return shard

        jobs = [(split, number) for split in SPLITS for number in range(counts[split])]
        console = Console(stderr=True)
        with ThreadPoolExecutor(_WRITERS) as threads:
            made = threads.map(make, *zip(*jobs, strict=True))
            shards = [*track(made, "writing shards", len(jobs), console=console, disable=not progress)]
        splits = {}
        for split in SPLITS:
            of_split = tuple(shard for shard in shards if shard.name.startswith(split))
            splits[split] = dataclasses.replace(getattr(plan, split), shards=of_split)
        index = dataclasses.replace(plan, **splits)
        folder.write(INDEX, index.to_json().encode())
        folder.remove(_PLAN)
    return index


def _plan(config: DataConfig, cache: TokenCache, shard_samples: int) -> tuple[dict[str, int], ShardIndex]:
    most = MAX_SHARD_BYTES // sample_bytes(config.sequence_length, cache.tokenizer.vocab_size)
    layout = {}
    for split, tokens in cache.tokens.items():
        sequences = (len(tokens) - 1) // config.sequence_length
        if sequences < 1:
            raise DataError(
                f"corpus {config.corpus!r} has {len(tokens)} tokens in its {split} split, below one "
                f"sequence: sequence_length {config.sequence_length}; use another validation_fraction "
                f"than {config.validation_fraction}"
            )
        count = -(-sequences // shard_samples)
        layout[split] = (count, sequences // count)
        if sequences // count > most:
            raise ConfigError(
                f"shard_samples {shard_samples} is not allowed: a shard is held in memory whole, at most "
                f"{MAX_SHARD_BYTES // 2**30} GiB, which is {most:,} samples"
            )
    recipe = [FORMAT, cache.fingerprint, config.sequence_length, layout]
    content = cache.tokenizer.to_json()
    plan = ShardIndex(
        dataset=cache.meta["dataset"],
        fingerprint=short_hash(json.dumps(recipe)),
        sequence_length=config.sequence_length,
        vocab_size=cache.tokenizer.vocab_size,
        separator=cache.tokenizer.separator,
        tokenizer_sha256=None if content is None else hashlib.sha256(content.encode()).hexdigest(),
        **{
            split: ShardedSplit(**cache.meta[split], samples_per_shard=samples, shards=())
            for split, (_, samples) in layout.items()
        },
    )
    return {split: count for split, (count, _) in layout.items()}, plan


def _tar(tokens: np.ndarray, samples: range, order: np.ndarray, plan: ShardIndex) -> bytes:
    """Return the tar file of some samples: the same bytes for the same tokens."""
    length, out = plan.sequence_length, io.BytesIO()
    head = npy_header(length + 1, plan.vocab_size)
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            start = int(order[sample]) * length
            content = head + tokens[start : start + length + 1].tobytes()
            member = tarfile.TarInfo(f"{sample:09}.npy")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()
