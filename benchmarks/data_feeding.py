"""Feeding a trainer: sequential shards, random access to many small files, and the token cache.

    python benchmarks/data_feeding.py --out benchmarks/data_feeding.csv

Each reads the embedded corpus, from this machine's disk and over an HTTP server (a process of its own) that
answers after 20 ms on a line of 50 MB/s. Samples/s is how fast batches of 16 can be taken. Input wait is the
share of its time that a trainer stands waiting, with batches prefetched as in training. A step takes it 17 ms
for 16 × 128 bytes (119 000 tokens/s, as fast as two cores train width 64), and 11 ms for 16 × 1024 BPE
tokens, which is GPT-2 (124 M parameters) at the peak of a host of four TPU v4 chips.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import tyro
from rich.console import Console
from slow_server import SlowServer

from mup_tpu.config import DataConfig
from mup_tpu.data import load, prefetch
from mup_tpu.data.batches import ShardDataset
from mup_tpu.data.shards import ShardFolder, prepare

BATCH = 16
FILES = 2000
"""Small files that are written, and read at random."""

TrainBatch = Callable[[int], np.ndarray]
OpenData = Callable[[], TrainBatch]


class SmallFiles:
    """A file a sequence, read in random order by several threads: what shards are there to avoid."""

    def __init__(self, url: str, readers: int) -> None:
        self._fs, self._root = fsspec.url_to_fs(url)
        self._pool = ThreadPoolExecutor(readers)

    def train_batch(self, step: int) -> np.ndarray:
        """Sequences of random files."""
        chosen = np.random.default_rng(step).integers(FILES, size=BATCH)
        return np.stack(list(self._pool.map(self._sequence, chosen))).astype(np.int64)

    def _sequence(self, number: int) -> np.ndarray:
        return np.load(io.BytesIO(self._fs.cat_file(f"{self._root}/{number:06}.npy")))


@dataclass(frozen=True)
class Case:
    """A kind of tokens, and a trainer of them."""

    tokenizer: str
    sequence_length: int
    shard_samples: int
    step_ms: float


CASES = (Case("bytes", 128, 4096, 17.0), Case("bpe", 1024, 256, 11.0))


def main(
    seconds: float = 3.0,
    latency_ms: float = 20.0,
    megabytes_per_s: float = 50.0,
    out: Path | None = None,
) -> None:
    """Measure all of them.

    Args:
        seconds: How long each is measured.
        latency_ms: Of the server.
        megabytes_per_s: Of the line to the server.
        out: CSV file for the table.
    """
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            config = DataConfig(
                tokenizer=case.tokenizer, sequence_length=case.sequence_length, batch_size=BATCH
            )
            prepare(config, scratch, case.shard_samples, progress=False)
            write_small_files(folder)
            with server(folder, latency_ms / 1e3, megabytes_per_s * 1e6) as url:
                for way, place, readers, open_data in ways(config, scratch, url):
                    row = dataclasses.asdict(case) | {"way": way, "place": place, "readers": readers}
                    rows.append(row | measure(open_data, seconds, case.step_ms / 1e3))
                    Console().print(rows[-1])
    table = pd.DataFrame(rows)
    Console().print(table.to_string(index=False))
    if out is not None:
        table.round(4).to_csv(out, index=False)


def ways(config: DataConfig, folder: str, url: str) -> Iterator[tuple[str, str, int, OpenData]]:
    """Compared sources: name, place of the data, reading threads, and a function that opens it."""
    yield "token cache", "disk", 1, lambda: load(config).train_batch
    for place, corpus in (("disk", folder), ("server", url)):
        shards = dataclasses.replace(config, corpus=corpus)
        for readers in (1, 2, 4, 8):
            yield "shards", place, readers, partial(open_shards, shards, readers)
        for readers in (1, 4, 16):
            yield "small files", place, readers, partial(open_small_files, corpus, readers)


def open_shards(config: DataConfig, readers: int) -> TrainBatch:
    return ShardDataset(config, readers=readers).train_batch


def open_small_files(url: str, readers: int) -> TrainBatch:
    return SmallFiles(url, readers).train_batch


def write_small_files(folder: Path) -> None:
    """The first sequences of the shards, a file each."""
    shards = ShardFolder(str(folder))
    sequences = (s for shard in shards.index.train.shards for s in shards.samples(shard))
    for number, sequence in enumerate(itertools.islice(sequences, FILES)):
        np.save(folder / f"{number:06}.npy", sequence)


def measure(open_data: OpenData, seconds: float, step_s: float) -> dict[str, float]:
    """Time to the first batch, batches as fast as they come, and what a trainer waits for prefetched ones."""
    began = time.perf_counter()
    train_batch = open_data()
    train_batch(0)
    first = time.perf_counter() - began
    began, step = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step += 1
        train_batch(step)
    rate = step * BATCH / (time.perf_counter() - began)

    waited = 0.0
    with prefetch(train_batch, step, step + round(seconds / step_s) + 2) as batches:
        next(batches)
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            time.sleep(step_s)  # an accelerator at work leaves the host free
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
    return {"first_batch_s": first, "samples_per_s": rate, "input_wait": waited / passed}


@contextmanager
def server(folder: Path, latency: float, bandwidth: float) -> Iterator[str]:
    """A slow server in a process of its own, so that it takes no time from the reader's interpreter."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(folder, latency, bandwidth, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        here.send("stop")
        process.join()


def serve(folder: Path, latency: float, bandwidth: float, pipe: Connection) -> None:
    """Serve until told to stop."""
    with SlowServer(folder, latency, bandwidth).running() as running:
        pipe.send(running.url)
        pipe.recv()


if __name__ == "__main__":
    tyro.cli(main)
