"""Shards whose checksums hold but which are not what their index says: one sentence, and bounded memory."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data.batches import ShardDataset
from mup_tpu.data.prepare import prepare
from mup_tpu.data.shards import ShardFolder, ShardIndex, unpack
from mup_tpu.errors import DataError

LENGTH, SAMPLES, VOCABULARY = 32, 400, 600


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    config = DataConfig(
        corpus=str(corpus),
        tokenizer="bpe",
        vocab_size=VOCABULARY,
        sequence_length=LENGTH,
        validation_fraction=0.2,
    )
    prepare(config, str(folder), shard_samples=SAMPLES, workers=1, progress=False)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


def read_first(folder) -> np.ndarray:
    """The first training shard, as training and `data inspect --verify` read it."""
    config = DataConfig(corpus=str(folder), sequence_length=LENGTH, batch_size=4)
    shards = ShardDataset(config)._index.train.shards
    return ShardFolder(str(folder)).samples(shards[0])


def rewrite_index(folder, change) -> None:
    index = json.loads((folder / "index.json").read_text())
    changed = change(index)
    (folder / "index.json").write_text(json.dumps(index if changed is None else changed))


def put_shard(folder, content: bytes) -> None:
    """In the place of the first training shard, as the index says; zeros may follow what a tar file holds."""
    content = content.ljust(1024 * SAMPLES, b"\0")
    (folder / "train-000000.tar").write_bytes(content)
    told = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_index(folder, lambda index: index["train"]["shards"][0].update(told))


def members(folder) -> list[tuple[str, bytes]]:
    with tarfile.open(folder / "train-000000.tar") as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def tar_of(files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def npy(array) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def of_kind(kind: bytes, name="000000000.npy") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def header(text: str, version=(1, 0), tokens=b"\0" * 2 * (LENGTH + 1)) -> bytes:
    text = text.ljust(117) + "\n"
    size = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + text.encode("latin1") + tokens


def sparse(files) -> bytes:
    """A member of GNU's old sparse kind that says it is 1 TiB of zeros."""
    info = tarfile.TarInfo("000000000.npy")
    info.type = tarfile.GNUTYPE_SPARSE
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[483:495] = b"\x80" + (2**40).to_bytes(11, "big")
    raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + 8 * 32 + sum(raw[156:]))
    return bytes(raw) + tar_of(files)


def of_size(size: bytes) -> bytes:
    raw = bytearray(tarfile.TarInfo("000000000.npy").tobuf(tarfile.GNU_FORMAT))
    raw[124:136] = size
    raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + 8 * 32 + sum(raw[156:]))
    return bytes(raw) + b"\0" * 1024


def pax(headers, files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("000000000.npy")
        info.pax_headers = headers
        tar.addfile(info)
    return out.getvalue()[: 3 * 512] + tar_of(files)


def every(change):
    """A shard each of whose samples is another."""
    return lambda files: tar_of([(name, change(np.load(io.BytesIO(c)))) for name, c in files])


def first(content: bytes):
    """A shard whose first sample is another."""
    return lambda files: tar_of([(files[0][0], content), *files[1:]])


OK = "{'descr': '<u2', 'fortran_order': False, 'shape': (%s,), }"
SHARDS = {
    "gzip": lambda files: gzip.compress(tar_of(files), 1),
    "bzip2": lambda files: bz2.compress(tar_of(files), 1),
    "xz": lambda files: lzma.compress(tar_of(files), preset=0),
    "empty": lambda files: b"",
    "no tar": lambda files: os.urandom(4096),
    "text": lambda files: b"once upon a time " * 1000,
    "cut in a sample": lambda files: tar_of([(n, c * 9) for n, c in files])[: 1024 * SAMPLES + 700],
    "cut between samples": lambda files: tar_of([(n, c * 9) for n, c in files])[: 1536 * SAMPLES],
    "no samples": lambda files: tar_of([]),
    "zeros alone": lambda files: b"\0" * 10240,
    "a folder": lambda files: tar_of([(of_kind(tarfile.DIRTYPE), b""), *files]),
    "a link": lambda files: tar_of([(of_kind(tarfile.SYMTYPE), b""), *files[1:]]),
    "a hard link": lambda files: tar_of([(of_kind(tarfile.LNKTYPE), b""), *files[1:]]),
    "a named pipe": lambda files: tar_of([(of_kind(tarfile.FIFOTYPE), b""), *files[1:]]),
    "sparse": sparse,
    "sparse by pax": lambda files: pax(
        {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(2**40),
         "GNU.sparse.numblocks": "1", "GNU.sparse.map": f"{2**40},0"}, files[1:],
    ),
    "size by pax": lambda files: pax({"size": str(2**62)}, files[1:]),
    "a size of 8 GiB": lambda files: of_size(b"77777777777\0"),
    "a size below 0": lambda files: of_size(b"\xff" * 12),
    "a size that is none": lambda files: of_size(b"xxxxxxxxxxx\0"),
    "one sample fewer": lambda files: tar_of(files[1:]),
    "one sample more": lambda files: tar_of([*files, ("000999999.npy", files[0][1])]),
    "other names": lambda files: tar_of([(n.replace("npy", "txt"), c) for n, c in files]),
    "float64": every(lambda a: npy(a.astype(np.float64))),
    "int64": every(lambda a: npy(a.astype(np.int64))),
    "big-endian": every(lambda a: npy(a.astype(">u2"))),
    "bytes": every(lambda a: npy(a.astype(np.uint8))),
    "complex": every(lambda a: npy(a.astype(complex))),
    "records": every(lambda a: npy(np.zeros(LENGTH + 1, [("a", "u1"), ("b", "u1")]))),
    "text samples": every(lambda a: npy(a.astype("U3"))),
    "pickles": every(lambda a: npy(np.array([print] * len(a), dtype=object))),
    "two axes": every(lambda a: npy(a[None])),
    "no axis": every(lambda a: npy(a[0])),
    "shorter sequences": every(lambda a: npy(a[:-1])),
    "longer sequences": every(lambda a: npy(np.append(a, a[:1]))),
    "empty sequences": every(lambda a: npy(a[:0])),
    "one shorter sequence": lambda files: tar_of([(files[0][0], npy(np.zeros(9, np.uint16))), *files[1:]]),
    "tokens beyond the vocabulary": every(lambda a: npy(a + np.uint16(500))),
    "an empty sample": first(b""),
    "no array": first(b"once upon a time"),
    "a header alone": first(b"\x93NUMPY\x01\x00"),
    "a header that never ends": first(b"\x93NUMPY\x01\x00\xff\xff{"),
    "a header of code": first(header("__import__('os').system('true')")),
    "a header of brackets": first(header("(" * 5000)),
    "a header of bytes": first(header("\xff\x00\x81")),
    "10^12 tokens": first(header(OK % 10**12)),
    "-1 tokens": first(header(OK % -1)),
    "tokens after the end": first(header(OK % (LENGTH + 1), tokens=b"\0" * 99)),
    "tokens missing": first(header(OK % (LENGTH + 1), tokens=b"")),
    "version 9": first(header(OK % (LENGTH + 1), version=(9, 0))),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(prepared):
    return members(prepared)


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_not_what_its_index_says_is_refused(name, files):
    """As `ShardFolder` unpacks what it has read."""
    assert unpack(tar_of(files), len(files), LENGTH + 1, VOCABULARY).shape == (len(files), LENGTH + 1)
    content = SHARDS[name](files).ljust(1024 * len(files), b"\0")
    with pytest.raises(ValueError) as caught:
        unpack(content, len(files), LENGTH + 1, VOCABULARY)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_shard_that_is_not_what_its_index_says_is_one_sentence(files, folder):
    put_shard(folder, SHARDS["one sample fewer"](files))
    with pytest.raises(
        DataError, match=r"train-000000\.tar does not match its index: it holds 393 samples"
    ) as caught:
        read_first(folder)
    assert "\n" not in str(caught.value)


def test_a_shard_of_the_same_samples_is_read_whatever_tar_wrote_it(folder):
    expected = read_first(folder)
    spaced = (OK % (LENGTH + 1)).replace("False,", "False ,")
    put_shard(folder, tar_of([(name, header(spaced, tokens=c[-66:])) for name, c in members(folder)]))
    assert np.array_equal(read_first(folder), expected)


@pytest.mark.parametrize("what", ["gzip", "sparse", "10^12 tokens"])
def test_a_small_shard_that_unpacks_to_gigabytes_is_never_unpacked(what, folder):
    """In a process that may not have more than 1 GiB beyond what it has imported."""
    if what == "gzip":
        zeros = gzip.compress(b"\0" * 2**26, 9)
        bomb = gzip.compress(of_size(b"77777777777\0")[:512], 9) + zeros * 32  # members of one gzip: 2 GiB
        put_shard(folder, bomb)
    else:
        put_shard(folder, SHARDS[what](members(folder)))
    assert (folder / "train-000000.tar").stat().st_size < 6 * 2**20
    code = (
        "import resource, sys\nfrom mup_tpu.data.shards import ShardFolder\n"
        "used = next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmData'))\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1024 * used + 2**30,) * 2)\n"
        "shards = ShardFolder(sys.argv[1])\nshards.samples(shards.index.train.shards[0])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert "DataError: shard" in ended.stderr and "does not match its index" in ended.stderr, ended.stderr


def in_train(**values):
    return lambda index: index["train"].update(values)


def in_shard(**values):
    return lambda index: index["train"]["shards"][0].update(values)


def top(**values):
    return lambda index: index.update(values)


INDEXES = {
    "a list": lambda index: [index],
    "a number": lambda index: 7,
    "null": lambda index: [None],
    "no train": lambda index: index.pop("train") and None,
    "train a list": top(train=[1]),
    "train null": top(train=None),
    "one key more": top(extra=1),
    "length text": top(sequence_length="32"),
    "length 0": top(sequence_length=0),
    "length below 0": top(sequence_length=-3),
    "length 10^30": top(sequence_length=10**30),
    "length a float": top(sequence_length=32.5),
    "length true": top(sequence_length=True),
    "vocabulary 0": top(vocab_size=0),
    "vocabulary 10^30": top(vocab_size=10**30),
    "vocabulary text": top(vocab_size="many"),
    "separator outside": top(separator=600),
    "separator text": top(separator="\n"),
    "entropy nan": top(unigram_entropy=float("nan")),
    "entropy infinite": top(unigram_entropy=float("inf")),
    "entropy text": top(unigram_entropy="high"),
    "bytes a token null": top(bytes_per_token=None),
    "dataset a list": top(dataset=["a"]),
    "fingerprint null": top(fingerprint=None),
    "tokenizer a number": top(tokenizer_sha256=5),
    "samples 0": in_train(samples_per_shard=0),
    "samples below 0": in_train(samples_per_shard=-1),
    "samples 10^15": in_train(samples_per_shard=10**15),
    "samples text": in_train(samples_per_shard="400"),
    "documents a float": in_train(documents=1.5),
    "no shards": in_train(shards=[]),
    "shards null": in_train(shards=None),
    "shards numbers": in_train(shards=[1, 2]),
    "shards a table": in_train(shards={"a": 1}),
    "a shard twice": lambda index: index["train"]["shards"].append(index["train"]["shards"][0]),
    "a shard elsewhere": in_shard(name="../../../etc/passwd"),
    "a shard at the root": in_shard(name="/etc/passwd"),
    "a shard without a name": in_shard(name=""),
    "a shard of no name": in_shard(name=None),
    "size below 0": in_shard(size=-1),
    "size text": in_shard(size="big"),
    "size 10^18": in_shard(size=10**18),
    "sha256 null": in_shard(sha256=None),
}


INDEXES_OF_OTHER_FILES = {
    "another vocabulary": top(vocab_size=700),
    "another size": in_shard(size=10**6),
    "a shard that is not there": in_shard(name="train-000009.tar"),
    "another checksum": in_shard(sha256="0" * 64),
    "another length": top(sequence_length=16),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_says_what_cannot_be_is_one_sentence(name, prepared):
    index = json.loads((prepared / "index.json").read_text())
    changed = INDEXES[name](index)
    content = json.dumps(index if changed is None else changed).encode()
    with pytest.raises(DataError) as caught:
        ShardIndex.from_json(content, "the/index.json")
    assert "the/index.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", INDEXES_OF_OTHER_FILES)
def test_an_index_of_other_files_is_one_sentence(name, folder):
    rewrite_index(folder, INDEXES_OF_OTHER_FILES[name])
    with pytest.raises(DataError) as caught:
        read_first(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe\x00", b"1" * 5000, b""])
def test_an_index_that_is_no_json_is_one_sentence(content):
    with pytest.raises(DataError, match="is not the index of prepared shards"):
        ShardIndex.from_json(content, "the/index.json")


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"[1]", b'{"version": "1.0", "model": {}}'])
def test_a_tokenizer_that_is_none_is_one_sentence(content, folder):
    (folder / "tokenizer.json").write_bytes(content)
    rewrite_index(folder, top(tokenizer_sha256=hashlib.sha256(content).hexdigest()))
    with pytest.raises(DataError, match="tokenizer.json is not a tokenizer"):
        ShardFolder(str(folder))


@pytest.mark.parametrize("file", ["index.json", "tokenizer.json", "train-000000.tar"])
def test_a_named_pipe_in_the_place_of_a_file_is_one_sentence(file, folder):
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(DataError, match=f"{file} is not a file"):
        read_first(folder)
