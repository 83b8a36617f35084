"""Shards whose checksums hold but which are not what their index says: one sentence, and bounded memory."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile

import numpy as np
import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data import load
from mup_tpu.data.shards import ShardFolder, ShardIndex, prepare, sample_bytes, unpack
from mup_tpu.errors import DataError

LENGTH, SAMPLES, VOCABULARY = 32, 400, 600


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    bpe = {"tokenizer": "bpe", "vocab_size": VOCABULARY}
    text = DataConfig(corpus=str(corpus), **bpe, sequence_length=LENGTH, validation_fraction=0.2)
    prepare(text, str(folder), shard_samples=SAMPLES, progress=False)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


def test_tokens_of_shards_are_those_of_their_tokenizer(prepared, corpus):
    dataset = load(DataConfig(corpus=f"file://{prepared}", sequence_length=LENGTH, batch_size=4))
    assert dataset.vocab_size == VOCABULARY
    text = dataset.tokenizer.decode(dataset.train_batch(0)[0])
    assert text in "".join(path.read_text() for path in sorted(corpus.glob("*.txt")))


def rewrite_index(folder, change) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def npy(array) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def tar_of(arrays) -> bytes:
    """A shard as `prepare` lays it out, of these files or arrays."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for i, array in enumerate(arrays):
            content = array if isinstance(array, bytes) else npy(array)
            info = tarfile.TarInfo(f"{i:09}.npy")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


TRILLION = b"\x93NUMPY\x01\0\x76\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,), }" % 10**12
SHARDS = {
    "gzip": lambda arrays: gzip.compress(tar_of(arrays), 1),
    "cut in a sample": lambda arrays: tar_of(arrays)[: 600 * SAMPLES],
    "10^12 tokens": lambda arrays: tar_of([TRILLION, *arrays[1:]]),
    "pickles": lambda arrays: tar_of([np.array([print] * len(a), dtype=object) for a in arrays]),
    "tokens beyond the vocabulary": lambda arrays: tar_of([a + np.uint16(500) for a in arrays]),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_not_what_its_index_says_is_refused(name):
    """As `ShardFolder` reads it, which has compared its length and checksum."""
    arrays = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES, LENGTH + 1)).astype(np.uint16)
    assert np.array_equal(unpack(tar_of(arrays), SAMPLES, LENGTH + 1, VOCABULARY), arrays)
    content = SHARDS[name](arrays).ljust(1024 * SAMPLES, b"\0")
    with pytest.raises(ValueError) as caught:
        unpack(content, SAMPLES, LENGTH + 1, VOCABULARY)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_sample_takes_a_block_for_its_name_and_whole_blocks_for_its_array():
    assert len(npy(np.zeros(401, np.uint16))) == 930 and sample_bytes(400, VOCABULARY) == 512 + 1024


ZEROS = b"\0" * 1024 * SAMPLES


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": len(ZEROS), "sha256": hashlib.sha256(ZEROS).hexdigest()},
         r"train-000000\.tar does not match its index: it does not hold \d+ arrays of 33 tokens"),
        ({"name": "train-000999.tar"}, r"train-000999\.tar is missing, but the index names it"),
        ({"sha256": "0" * 64}, r"train-000000\.tar is corrupted: its \d+ bytes have sha256"),
    ],
)  # fmt: skip
def test_a_shard_of_another_index_is_one_sentence(changes, sentence, folder):
    (folder / "train-000000.tar").write_bytes(ZEROS)
    rewrite_index(folder, lambda index: index["train"]["shards"][0].update(changes))
    shards = ShardFolder(str(folder))
    with pytest.raises(DataError, match=f"{folder}/{sentence}") as caught:
        shards.samples(shards.index.train.shards[0])
    assert "\n" not in str(caught.value)


INDEXES = {
    "a list": lambda index: [index],
    "no train": lambda index: index.pop("train") and None,
    "length 10^30": lambda index: index.update(sequence_length=10**30),
    "separator outside": lambda index: index.update(separator=600),
    "samples 10^15": lambda index: index["train"].update(samples_per_shard=10**15),
    "a shard elsewhere": lambda index: index["train"]["shards"][0].update(name="../../../etc/passwd"),
    "size below 0": lambda index: index["train"]["shards"][0].update(size=-1),
}


@pytest.mark.parametrize("change", [*INDEXES.values(), b"[" * 100_000, b"\xff\xfe\x00", b'{"format": 99}'])
def test_an_index_that_says_what_cannot_be_is_one_sentence(change, prepared):
    content = change
    if callable(change):
        index = json.loads((prepared / "index.json").read_text())
        changed = change(index)
        content = json.dumps(index if changed is None else changed).encode()
    with pytest.raises(DataError, match="the/index.json") as caught:
        ShardIndex.from_json(content, "the/index.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"version": "1.0", "model": {}}'])
def test_a_tokenizer_that_is_none_is_one_sentence(content, folder):
    (folder / "tokenizer.json").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    rewrite_index(folder, lambda index: index.update(tokenizer_sha256=sha256))
    with pytest.raises(DataError, match="tokenizer.json is not a tokenizer"):
        ShardFolder(str(folder))
