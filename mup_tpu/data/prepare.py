"""Writer of prepared shards, whose format `shards.py` describes.

Sequences overlap by one token, so that every token is a target once. They are dealt to the shards in a fixed
random order, so that each shard is a sample of the whole corpus.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import multiprocessing
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from mup_tpu.config import DataConfig
from mup_tpu.config.fields import require_count
from mup_tpu.data.cache import SPLITS, TOKENIZER_FILE, TokenCache, load_cache, token_folder
from mup_tpu.data.shards import (
    FORMAT,
    INDEX,
    MAX_SHARD_BYTES,
    Shard,
    ShardIndex,
    Split,
    is_prepared,
    sample_bytes,
)
from mup_tpu.errors import ConfigError, DataError, raised_as
from mup_tpu.files import Folder, short_hash
from mup_tpu.files.local import safe_path
from mup_tpu.internals.control_groups import cores

_PLAN = "preparing.json"


def prepare(
    config: DataConfig, out: str, shard_samples: int = 4096, workers: int = 0, progress: bool = True
) -> ShardIndex:
    """Write a corpus as shards; a call after a kill goes on, and ends with the same bytes.

    Args:
        config: corpus, tokenizer, held-out share and sequence length.
        out: folder or fsspec URL.
        shard_samples: most sequences a shard.
        workers: processes that make shards; 0 takes one a core.
        progress: show progress on standard error.

    Raises:
        ConfigError: shard_samples is not above 0 or makes shards too large to be read, or workers is below 0.
        DataError: the corpus cannot be used or is shorter than one sequence a split, or `out` cannot be
            written or holds other shards.
    """
    require_count("shard_samples", shard_samples)
    require_count("workers", workers, least=0)
    if is_prepared(config.corpus):
        raise DataError(f"corpus {config.corpus!r} is prepared already; give its text")
    cache = load_cache(config, progress)
    plan, jobs = _plan(config, cache, shard_samples)
    with raised_as(DataError, f"shards cannot be written to {out}"):
        folder = Folder(out)
        folder.remove_leftovers()
        finished = _check_out(folder, plan)
        if finished is not None:
            return finished
        folder.write(_PLAN, plan.to_json().encode())
        content = cache.tokenizer.to_json()
        if content is not None:
            folder.write(TOKENIZER_FILE, content.encode())
        made = _make_all(folder, jobs, workers or cores(), progress)
        splits = {
            name: dataclasses.replace(
                getattr(plan, name), shards=tuple(made[job.name] for job in jobs if job.split == name)
            )
            for name in SPLITS
        }
        index = dataclasses.replace(plan, **splits)
        folder.write(INDEX, index.to_json().encode())
        folder.remove(_PLAN)
    return index


@dataclass(frozen=True)
class _Job:
    """One shard to make, in any process that sees the token cache."""

    cache: Path
    seed: str
    """Fingerprint of the shards."""
    split: str
    number: int
    samples: int
    sequence_length: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:06}.tar"


def _layout(config: DataConfig, cache: TokenCache, shard_samples: int) -> dict[str, tuple[int, int]]:
    """Return the number of shards of each split, and the samples in each."""
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
    return layout


def _plan(config: DataConfig, cache: TokenCache, shard_samples: int) -> tuple[ShardIndex, list[_Job]]:
    """Return the index without shards, and the shards to make."""
    layout = _layout(config, cache, shard_samples)
    recipe = [FORMAT, cache.fingerprint, config.sequence_length, layout]
    fingerprint = short_hash(json.dumps(recipe))
    jobs = [
        _Job(token_folder(cache.fingerprint), fingerprint, split, i, samples, config.sequence_length)
        for split, (count, samples) in layout.items()
        for i in range(count)
    ]
    content = cache.tokenizer.to_json()
    plan = ShardIndex(
        dataset=cache.meta["dataset"],
        fingerprint=fingerprint,
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
    return plan, jobs


def _check_out(out: Folder, plan: ShardIndex) -> ShardIndex | None:
    """Return the index of these shards if all are there; None if some are to be made."""
    names = out.names()
    for name in (INDEX, _PLAN):
        if name in names:
            index = ShardIndex.from_json(out.read(name), f"{out}/{name}", whole=name == INDEX)
            if index.fingerprint != plan.fingerprint:
                raise DataError(
                    f"{out} holds other shards (of {index.dataset!r}); give these a folder of their own"
                )
            if name == INDEX:
                return index
    return None


def _make_all(folder: Folder, jobs: list[_Job], workers: int, progress: bool) -> dict[str, Shard]:
    """Make missing shards in processes, and write them in threads: a process lacks memory://."""
    workers = min(workers, len(jobs))
    names = set(folder.names())

    def make(job: _Job) -> Shard:
        if {job.name, f"{job.name}.sha256"} <= names:  # by an earlier call: the checksum is written last
            digest = folder.read(f"{job.name}.sha256").decode().split()[0]
            return Shard(job.name, folder.size(job.name), digest)
        content = shard_bytes(job)
        shard = Shard(job.name, len(content), hashlib.sha256(content).hexdigest())
        folder.write(job.name, content)
        folder.write(f"{job.name}.sha256", f"{shard.sha256}  {job.name}\n".encode())
        return shard

    with _in_processes(workers) as shard_bytes, ThreadPoolExecutor(workers) as threads:
        ended = as_completed([threads.submit(make, job) for job in jobs])
        console = Console(stderr=True)
        bar = track(ended, "writing shards", len(jobs), console=console, disable=not progress)
        try:
            return {shard.name: shard for shard in (future.result() for future in bar)}
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _in_processes(workers: int) -> Iterator[Callable[[_Job], bytes]]:
    """Have `_shard_bytes` run in one of several processes; a single worker is this process."""
    if workers == 1:
        yield _shard_bytes
        return
    with safe_path(), ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield lambda job: pool.submit(_shard_bytes, job).result()


def _shard_bytes(job: _Job) -> bytes:
    """Return a shard's tar file: the same bytes for the same tokens."""
    tokens = np.load(job.cache / f"{job.split}.npy", mmap_mode="r")
    t = job.sequence_length
    order = _order(job.seed, job.split, (len(tokens) - 1) // t)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        first = job.number * job.samples
        for sample in range(first, first + job.samples):
            start = int(order[sample]) * t
            content = io.BytesIO()
            np.save(content, tokens[start : start + t + 1], allow_pickle=False)
            member = tarfile.TarInfo(f"{sample:09}.npy")
            member.size = content.tell()
            content.seek(0)
            tar.addfile(member, content)
    return out.getvalue()


@lru_cache(maxsize=2)
def _order(seed: str, split: str, sequences: int) -> np.ndarray:
    key = np.random.SeedSequence([int(seed, 16), SPLITS.index(split)])
    return np.random.Generator(np.random.Philox(key)).permutation(sequences)
