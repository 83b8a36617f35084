"""Prepared shards: equal, complete, plain WebDataset files, the same bytes however they came about."""

import hashlib
import subprocess
from pathlib import Path

import fsspec
import numpy as np
import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data.cache import load_cache
from mup_tpu.data.shards import ShardFolder, prepare
from mup_tpu.errors import ConfigError, DataError
from mup_tpu.files import Folder


@pytest.fixture(scope="module")
def config(corpus):
    return DataConfig(corpus=str(corpus), sequence_length=64, validation_fraction=0.2)


@pytest.fixture(scope="module")
def prepared(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder, prepare(config, str(folder), shard_samples=600, progress=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_shards_hold_every_sequence_once_and_as_many_each(prepared, config):
    folder, index = prepared
    cache = load_cache(config)
    for name in ("train", "validation"):
        split, tokens = getattr(index, name), np.asarray(cache.tokens[name])
        arrays = [ShardFolder(str(folder)).samples(shard) for shard in split.shards]
        assert {len(a) for a in arrays} == {split.samples_per_shard}
        sequences = {s.tobytes() for a in arrays for s in a}
        blocks = (len(tokens) - 1) // 64
        expected = [tokens[i * 64 : i * 64 + 65].tobytes() for i in range(blocks)]
        assert sequences <= set(expected)
        assert blocks - split.samples < len(split.shards)  # what does not divide is left out
    assert len(index.train.shards) > 8


def test_plain_webdataset_reads_them_and_sha256sum_checks_them(prepared):
    import webdataset as wds

    folder, index = prepared
    files = [str(folder / shard.name) for shard in index.validation.shards]
    samples = list(wds.WebDataset(files, shardshuffle=False).decode())
    own = [s for shard in index.validation.shards for s in ShardFolder(str(folder)).samples(shard)]
    assert np.array_equal([sample["npy"] for sample in samples], own)
    sums = "\n".join(path.read_text() for path in sorted(folder.glob("*.sha256")))
    subprocess.run(
        ["sha256sum", "--check"], input=sums, text=True, cwd=folder, check=True, capture_output=True
    )
    for shard in index.train.shards:
        assert hashlib.sha256((folder / shard.name).read_bytes()).hexdigest() == shard.sha256


def test_the_same_bytes_from_one_process_to_a_url(prepared, config):
    folder, _ = prepared
    prepare(config, "memory://shards/here", shard_samples=600, progress=False)
    files = fsspec.filesystem("memory").find("/shards/here")
    assert {path.rsplit("/", 1)[1]: fsspec.filesystem("memory").cat(path) for path in files} == contents(
        folder
    )


def test_an_interrupted_call_goes_on_and_ends_with_the_same_bytes(prepared, config, tmp_path, monkeypatch):
    folder, index = prepared
    out, write, sums = tmp_path / "out", Folder.write, []

    def interrupted(self, name, content):
        if len(sums) >= 3:
            raise KeyboardInterrupt
        write(self, name, content)
        sums.extend([name] if name.endswith(".sha256") else [])

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, str(out), shard_samples=600, progress=False)
    kept = {p: p.stat().st_mtime_ns for p in out.glob("*.tar") if p.with_name(p.name + ".sha256").exists()}
    assert 3 <= len(kept) < len(index.train.shards) + len(index.validation.shards)
    with pytest.raises(DataError, match="not yet wholly"):
        ShardFolder(str(out))
    assert prepare(config, str(out), shard_samples=600, progress=False) == index
    assert {p: p.stat().st_mtime_ns for p in kept} == kept  # finished shards were not made again
    assert contents(out) == contents(folder)


def test_tokenising_goes_on_after_a_kill(config, tmp_path, monkeypatch):
    """Chunks that are done are not tokenised again, and chunks leave no trace in the tokens."""
    from mup_tpu.data import cache, corpus

    whole = load_cache(config)
    encode = corpus.ByteTokenizer.encode
    calls = []

    def counted(self, texts):
        calls.append(texts)
        if len(calls) == 8:  # the fourth chunk, its second split
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(corpus.ByteTokenizer, "encode", counted)
    monkeypatch.setenv("MUP_TPU_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "CHUNK_CHARACTERS", 20_000)
    with pytest.raises(KeyboardInterrupt):
        load_cache(config, progress=False)
    documents = cache.read_documents(config)
    chunks = len(list(cache.grouped(documents, lambda document: len(document.text), 20_000)))
    again = load_cache(config, progress=False)
    assert len(calls) - 8 == 2 * (chunks - 3)
    assert chunks > 6 and again.fingerprint == whole.fingerprint and again.meta == whole.meta
    assert np.array_equal(again.tokens["train"], whole.tokens["train"])
    assert not list((tmp_path / "partial").glob("*/*.npz"))


def test_another_corpus_is_not_mixed_in_and_the_same_is_not_written_again(prepared, config):
    folder, index = prepared
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert prepare(config, str(folder), shard_samples=600, progress=False) == index
    with pytest.raises(DataError, match="holds other shards .*give these a folder of their own"):
        prepare(config, str(folder), shard_samples=500, progress=False)
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_what_cannot_be_prepared(config, prepared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="shards cannot be written to .*: Not a directory"):
        prepare(config, str(tmp_path / "file" / "out"), progress=False)
    with pytest.raises(DataError, match="is prepared already"):
        prepare(DataConfig(corpus=str(prepared[0])), str(tmp_path / "out"), progress=False)
    with pytest.raises(DataError, match="in its train split, below one sequence: sequence_length 999999"):
        prepare(
            DataConfig(corpus=config.corpus, sequence_length=999_999), str(tmp_path / "o"), progress=False
        )
    with pytest.raises(ConfigError, match="shard_samples 0 is not allowed: it must be 1 or more"):
        prepare(config, str(tmp_path / "out"), shard_samples=0)
    with pytest.raises(DataError, match="shards cannot be written to nope://out: "):
        prepare(config, "nope://out", progress=False)


def test_a_shard_that_is_corrupted_on_its_way_is_read_again(prepared, monkeypatch):
    shards = ShardFolder(str(prepared[0]))
    reads, read = [], shards._read

    def corrupt_once(name, size=None):
        reads.append(name)
        return b"\0" * size if len(reads) == 1 else read(name, size)

    monkeypatch.setattr(shards, "_read", corrupt_once)
    assert len(shards.samples(shards.index.train.shards[0])) == shards.index.train.samples_per_shard
    assert len(reads) == 2
