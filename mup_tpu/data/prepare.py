"""Writer of prepared shards, whose format `shards.py` describes.

Sequences overlap by one token, so that every token is a target once. They are dealt to the shards in a fixed
random order, so that each shard is a sample of the whole corpus.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from rich.console import Console
from rich.progress import track

from mup_tpu.config import DataConfig
from mup_tpu.config.fields import require_count
from mup_tpu.data.cache import SPLITS, TOKENIZER_FILE, TokenCache, load_cache
from mup_tpu.data.shards import (
    FORMAT,
    INDEX,
    MAX_SHARD_BYTES,
    Shard,
    ShardIndex,
    Split,
    is_prepared,
    npy_header,
    sample_bytes,
)
from mup_tpu.errors import ConfigError, DataError, raised_as
from mup_tpu.files import Folder, short_hash

_PLAN = "preparing.json"

_WRITERS = 8  # shards that are written at a time: a bucket takes long to answer


def prepare(config: DataConfig, out: str, shard_samples: int = 4096, progress: bool = True) -> ShardIndex:
    """Write a corpus as shards; a call after a kill goes on, and ends with the same bytes.

    Args:
        config: corpus, tokenizer, held-out share and sequence length.
        out: folder or fsspec URL.
        shard_samples: most sequences a shard.
        progress: show progress on standard error.

    Raises:
        ConfigError: shard_samples is not above 0 or makes shards too large to be read.
        DataError: the corpus cannot be used or is shorter than one sequence a split, or `out` cannot be
            written or holds other shards.
    """
    require_count("shard_samples", shard_samples)
    if is_prepared(config.corpus):
        raise DataError(f"corpus {config.corpus!r} is prepared already; give its text")
    cache = load_cache(config, progress)
    counts, plan = _plan(config, cache, shard_samples)
    with raised_as(DataError, f"shards cannot be written to {out}"):
        folder = Folder(out)
        folder.remove_leftovers()
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
            bar = track(made, "writing shards", len(jobs), console=console, disable=not progress)
            shards = dict(zip(jobs, bar, strict=True))
        splits = {}
        for split in SPLITS:
            of_split = tuple(shards[split, number] for number in range(counts[split]))
            splits[split] = dataclasses.replace(getattr(plan, split), shards=of_split)
        index = dataclasses.replace(plan, **splits)
        folder.write(INDEX, index.to_json().encode())
        folder.remove(_PLAN)
    return index


def _plan(config: DataConfig, cache: TokenCache, shard_samples: int) -> tuple[dict[str, int], ShardIndex]:
    """Return the number of shards of each split, and the index without shards."""
    most = MAX_SHARD_BYTES // sample_bytes(config.sequence_length, cache.tokenizer.vocab_size)
    layout = {}
    for split, tokens in cache.tokens.items():
        sequences = (len(tokens) - 1) // config.sequence_length
        if sequences < 1:
            raise DataError(
                f"corpus {config.corpus!r} has {len(tokens)} tokens in its {split} split, below one "
                f"sequence: sequence_length {config.sequence_length}; use more text or another "
                f"validation_fraction than {config.validation_fraction}"
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
        unigram_entropy=cache.meta["unigram_entropy"],
        bytes_per_token=cache.meta["bytes_per_token"],
        **{
            split: Split(**cache.meta[split], samples_per_shard=samples, shards=())
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
