"""Prepared shards: equal, complete, plain WebDataset files, the same bytes however they came about."""

import hashlib
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data import cache, corpus, shards
from mup_tpu.data.shards import ShardFolder
from mup_tpu.errors import ConfigError, DataError
from mup_tpu.files import Folder

prepare = partial(shards.prepare, shard_samples=1500, progress=False)


@pytest.fixture
def prepared(shards):
    """The folder, and its index."""
    return shards, ShardFolder(str(shards)).index


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def times(paths):
    return {path: path.stat().st_mtime_ns for path in paths}


def test_shards_hold_every_sequence_once_and_as_many_each(prepared, text):
    folder, index = prepared
    for name, tokens in cache.load_cache(text).tokens.items():
        split = getattr(index, name)
        arrays = [ShardFolder(str(folder)).samples(shard) for shard in split.shards]
        assert {len(a) for a in arrays} == {split.samples_per_shard}
        blocks = (len(tokens) - 1) // 32
        expected = [tokens[i * 32 : i * 32 + 33].tobytes() for i in range(blocks)]
        assert {s.tobytes() for a in arrays for s in a} <= set(expected)
        assert blocks - split.samples < len(split.shards)  # what does not divide is left out
    assert len(index.train.shards) + len(index.validation.shards) > 8, "more than are written at a time"


def test_plain_webdataset_reads_them_and_sha256sum_checks_them(prepared):
    import webdataset as wds

    folder, index = prepared
    files = [str(folder / shard.name) for shard in index.validation.shards]
    samples = list(wds.WebDataset(files, shardshuffle=False).decode())
    own = [s for shard in index.validation.shards for s in ShardFolder(str(folder)).samples(shard)]
    assert np.array_equal([sample["npy"] for sample in samples], own)
    sums = "\n".join(path.read_text() for path in sorted(folder.glob("*.sha256")))
    check = ["sha256sum", "--check"]
    subprocess.run(check, input=sums, text=True, cwd=folder, check=True, capture_output=True)
    for shard in index.train.shards:
        assert hashlib.sha256((folder / shard.name).read_bytes()).hexdigest() == shard.sha256


def test_an_interrupted_call_goes_on_and_ends_with_the_same_bytes(prepared, text, tmp_path, monkeypatch):
    """On a disk, and at a URL in one go."""
    folder, index = prepared
    prepare(text, "memory://shards/here")
    memory = fsspec.filesystem("memory")
    files = {path.rsplit("/", 1)[1]: memory.cat(path) for path in memory.find("/shards/here")}
    assert files == contents(folder)
    out, write, sums = tmp_path / "out", Folder.write, []

    def interrupted(self, name, content):
        if len(sums) >= 3:
            raise KeyboardInterrupt
        write(self, name, content)
        sums.extend([name] if name.endswith(".sha256") else [])

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(text, str(out))
    kept = times(path for path in out.glob("*.tar") if path.with_name(f"{path.name}.sha256").exists())
    assert 3 <= len(kept) < len(index.train.shards) + len(index.validation.shards)
    with pytest.raises(DataError, match="not yet wholly"):
        ShardFolder(str(out))
    assert prepare(text, str(out)) == index
    assert times(kept) == kept, "finished shards were not made again"
    assert contents(out) == files


def test_tokenising_goes_on_after_a_kill(text, tmp_path, monkeypatch):
    """Chunks that are done are not tokenised again, and chunks leave no trace in the tokens."""
    whole, encode, calls = cache.load_cache(text), corpus.ByteTokenizer.encode, []

    def counted(self, texts):
        calls.append(texts)
        if len(calls) == 8:  # the fourth chunk, its second split
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(corpus.ByteTokenizer, "encode", counted)
    monkeypatch.setenv("MUP_TPU_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "CHUNK_CHARACTERS", 20_000)
    with pytest.raises(KeyboardInterrupt):
        cache.load_cache(text, progress=False)
    documents = cache.read_documents(text)
    chunks = len(list(cache.grouped(documents, lambda document: len(document.text), 20_000)))
    again = cache.load_cache(text, progress=False)
    assert len(calls) - 8 == 2 * (chunks - 3) - 1
    assert chunks > 6 and again.fingerprint == whole.fingerprint and again.meta == whole.meta
    assert np.array_equal(again.tokens["train"], whole.tokens["train"])
    assert not list((tmp_path / "partial").glob("*/*"))


def test_another_corpus_is_not_mixed_in_and_the_same_is_not_written_again(prepared, text):
    folder, index = prepared
    before = times(folder.iterdir())
    assert prepare(text, str(folder)) == index
    with pytest.raises(DataError, match="holds other shards .*give these a folder of their own"):
        prepare(text, str(folder), shard_samples=1000)
    assert times(folder.iterdir()) == before


def test_what_cannot_be_prepared(text, shards, tmp_path):
    (tmp_path / "file").write_text("")
    long = replace(text, sequence_length=999_999)
    for config, out, more, sentence in (
        (text, tmp_path / "file" / "out", {}, "shards cannot be written to .*: Not a directory"),
        (text, "nope://out", {}, "shards cannot be written to nope://out: "),
        (DataConfig(corpus=str(shards)), tmp_path / "o", {}, "is prepared already"),
        (long, tmp_path / "o", {}, "in its train split, below one sequence: sequence_length 999999"),
        (text, tmp_path / "o", {"shard_samples": 0}, "shard_samples 0 is not allowed: it must be 1 or more"),
    ):
        with pytest.raises((DataError, ConfigError), match=sentence):
            prepare(config, str(out), **more)


def test_a_shard_that_is_corrupted_on_its_way_is_read_again(prepared, monkeypatch):
    folder = ShardFolder(str(prepared[0]))
    reads, read = [], folder._read

    def corrupt_once(name, size=None):
        reads.append(name)
        return b"\0" * size if len(reads) == 1 else read(name, size)

    monkeypatch.setattr(folder, "_read", corrupt_once)
    assert len(folder.samples(folder.index.train.shards[0])) == folder.index.train.samples_per_shard
    assert len(reads) == 2
