"""The index of prepared shards, index.json, from any source: every entry is checked."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from mup_tpu.config.fields import About, require_valid
from mup_tpu.data.cache import SPLITS, token_type
from mup_tpu.errors import ConfigError, DataError

FORMAT = 1
"""Version in the fingerprint: shards of another format give other batches."""

INDEX = "index.json"

MAX_SHARD_BYTES = 2**34
"""Largest shard: eight are held in memory at a time."""

_TAR_BLOCK = 512
_FROM_0, _FROM_1 = ({"about": About(least=least)} for least in (0, 1))


@dataclass(frozen=True)
class Shard:
    """One tar file of samples."""

    name: str
    size: int = field(metadata=_FROM_1)
    """Bytes."""
    sha256: str

    def __post_init__(self) -> None:
        require_valid(self)
        if not self.name or "/" in self.name or "\\" in self.name or self.name in (".", ".."):
            raise ValueError(f"shard {self.name!r} is no file of the folder")
        if self.size > MAX_SHARD_BYTES:
            raise ValueError(f"shard {self.name} has {self.size} bytes, more than {MAX_SHARD_BYTES}")


@dataclass(frozen=True)
class Split:
    """Shards of one split, with equal numbers of samples."""

    documents: int = field(metadata=_FROM_0)
    tokens: int = field(metadata=_FROM_0)
    """Tokens of the corpus; a rest that does not fill a shard is left out."""
    samples_per_shard: int = field(metadata=_FROM_1)
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        require_valid(self)
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise ValueError("a shard is named twice")

    @property
    def samples(self) -> int:
        """Sequences in all shards."""
        return self.samples_per_shard * len(self.shards)


@dataclass(frozen=True)
class ShardIndex:
    """Content of index.json."""

    dataset: str
    fingerprint: str
    """Fingerprint of the batches: tokens, sequence length, and the order of sequences in shards."""
    sequence_length: int = field(metadata=_FROM_1)
    vocab_size: int = field(metadata=_FROM_1)
    separator: int = field(metadata=_FROM_0)
    tokenizer_sha256: str | None
    """Checksum of tokenizer.json; None if tokens are bytes."""
    unigram_entropy: float
    """Nat per token."""
    bytes_per_token: float
    train: Split
    validation: Split

    def __post_init__(self) -> None:
        require_valid(self)
        if self.vocab_size > 2**32 or self.separator >= self.vocab_size:
            raise ValueError(f"vocab_size {self.vocab_size} with separator {self.separator}")
        for split in (self.train, self.validation):
            least = sample_bytes(self.sequence_length, self.vocab_size) * split.samples_per_shard
            for shard in split.shards:
                if shard.size < least:
                    raise ValueError(
                        f"shard {shard.name} has {shard.size} bytes, too few for {split.samples_per_shard} "
                        f"samples of sequence_length {self.sequence_length}"
                    )

    def to_json(self) -> str:
        """Content of index.json."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, content: bytes, where: str, whole: bool = True) -> ShardIndex:
        """An index from the bytes of index.json; a `whole` one must name shards."""
        try:
            values = json.loads(content)
            if values.pop("format") != FORMAT:
                raise DataError(f"{where} is of another version of the format; prepare the shards again")
            for split in SPLITS:
                shards = tuple(Shard(**shard) for shard in values[split].pop("shards"))
                if whole and not shards:
                    raise ValueError(f"it names no {split} shards")
                values[split] = Split(**values[split], shards=shards)
            return cls(**values)
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{where} is not the index of prepared shards: {what}") from None


def sample_bytes(sequence_length: int, vocab_size: int) -> int:
    """Least size of a sample in its tar file: a header, and the tokens in whole blocks."""
    tokens = (sequence_length + 1) * token_type(vocab_size).itemsize
    return _TAR_BLOCK + -(-tokens // _TAR_BLOCK) * _TAR_BLOCK
