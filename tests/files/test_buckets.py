"""Buckets of two clouds, s3:// and gs://, on emulators: shards, sweeps, searches, and all that goes wrong.

`test_folder.py` holds buckets to the contract of folders.
"""

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fsspec.registry import _registry

from mup_tpu import files
from mup_tpu.cli.doctor import check_folder
from mup_tpu.config import DataConfig
from mup_tpu.config.sweep import Domain, SearchOptions
from mup_tpu.data import load
from mup_tpu.data.shards import prepare
from mup_tpu.errors import ConfigError, DataError, StoreError
from mup_tpu.files import Folder, patiently
from mup_tpu.store import is_search
from mup_tpu.store.header import Header, create_header, read_header
from mup_tpu.tuning.search import Chooser


@pytest.fixture
def gcsfs_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs tries six times, with pauses of 31 s in all, for which it has no setting."""
    hurried = SimpleNamespace(sleep=lambda pause: asyncio.sleep(pause / 30))
    monkeypatch.setattr("gcsfs.retry.asyncio", hurried)


@pytest.fixture
def refused(outcome, caplog):
    """Check that a command of ours, which reaches a cloud, ends at once in one sentence with these parts."""

    def check(cloud: Any, words: list, *parts: str, endpoint: str = "", **more: str) -> None:
        caplog.clear()
        with cloud.reached(endpoint, **more):
            code, out, error = outcome(*words)
        assert code == 2 and error.count("error: ") == 1, out + error
        assert all(part in error for part in parts) and "Traceback" not in out + error, error
        assert "try 2 of" not in caplog.text

    return check


# Folders


def test_of_drivers_that_start_at_once_in_a_new_bucket_folder_one_begins_it(s3):
    """The emulator of gs:// takes an object that is there although it must not be; the service refuses it."""
    folder, headers = Folder(s3.url()), [Header(f"driver {number}") for number in range(4)]
    with ThreadPoolExecutor(len(headers)) as drivers:
        found = list(drivers.map(lambda mine: create_header(folder, mine), headers))
    begun = read_header(folder)
    assert begun in headers and found == [begun] * len(headers)
    assert create_header(folder, Header("late")) == begun


def test_what_others_write_is_listed_and_removed(cloud):
    """File systems keep listings, which others do not know of."""
    folder = Folder(cloud.url())
    folder.write("pack/step-1/meta.json", b"1")
    assert (folder / "pack").names() == ["step-1"] and (folder / "pack/step-1").names() == ["meta.json"]
    cloud.put(f"{folder}/pack/step-1/tensors", b"2")
    cloud.put(f"{folder}/pack/step-2/meta.json", b"2")
    assert (folder / "pack").names() == ["step-1", "step-2"]
    assert folder.read("pack/step-2/meta.json") == b"2" and folder.size("pack/step-1/tensors") == 1
    cloud.put(f"{folder}/pack/step-3/meta.json", b"3")
    folder.remove("pack")
    assert folder.names() == (folder / "pack").names() == []


def test_a_folder_made_in_the_clouds_console_holds_nothing(cloud):
    """The console writes an object of its name and a slash."""
    folder = Folder(cloud.url())
    cloud.put(f"{folder}/", b" ")
    assert folder.names() == []
    folder.write("a", b"1")
    assert folder.names() == ["a"]


def test_a_bucket_that_is_not_there_is_said_and_not_made(cloud, corpus, refused):
    name = f"mistyped-{uuid.uuid4().hex[:8]}"
    folder = Folder(cloud.url(name))
    for _ in range(2):
        with pytest.raises(OSError, match=f"there is no bucket {name}"):
            folder.write("a", b"1")
        with pytest.raises(OSError, match=f"there is no bucket {name}"), folder.writing("b") as path:
            path.write_bytes(b"1")
    assert folder.names() == []
    folder.remove("a")
    words = ["data", "prepare", "--corpus", corpus, "--out", folder]
    refused(cloud, words, str(folder), f"there is no bucket {name}")
    problem = check_folder("results folder", str(folder)).problem
    assert problem.endswith(f"cannot be read: there is no bucket {name}")
    assert not check_folder("results folder", cloud.url()).problem, "nobody has used it; the bucket is there"


# Shards


@pytest.mark.slow
def test_shards_are_prepared_to_a_bucket_and_streamed_from_it(s3, corpus, tmp_path):
    """Byte for byte those of a disk; a call after one that was killed makes what is missing."""
    text = DataConfig(corpus=str(corpus), sequence_length=32, batch_size=24, validation_fraction=0.2)
    bucket, disk = Folder(s3.url()), Folder(tmp_path)

    def objects(folder):
        index = prepare(text, str(folder), shard_samples=4000, progress=False)
        return index, {name: folder.read(name) for name in folder.names()}

    expected = objects(disk)
    assert objects(bucket) == expected
    bucket.write("preparing.json", bucket.read("index.json"))
    bucket.remove("index.json", "train-000001.tar.sha256", "validation-000000.tar")
    assert objects(bucket) == expected
    streamed, local = (
        load(DataConfig(corpus=str(folder), sequence_length=32, batch_size=24)) for folder in (bucket, disk)
    )
    assert all(np.array_equal(streamed.train_batch(step), local.train_batch(step)) for step in (100, 3))
    assert np.array_equal(streamed.validation_batches(2), local.validation_batches(2))


# Searches


def test_a_search_in_a_bucket_goes_on_and_of_two_at_once_one_is_refused(s3):
    folder = Folder(s3.url())
    assert not is_search(str(folder))

    def chooser(seed=0):
        return Chooser({"rate": Domain("uniform", 0.0, 1.0)}, SearchOptions(seed=seed), {}, folder)

    first = chooser()
    for number in range(5):
        assert first.propose() == number
        first.end(number, [(1.0, first.points[number]["rate"])])
    assert is_search(str(folder))
    second = chooser()
    assert second.points == first.points
    second.end(4, [(1.0, first.points[4]["rate"])])
    assert second.propose() == 5
    with pytest.raises(StoreError, match=f"{folder} is being written by another search"):
        first.propose()
    with pytest.raises(ConfigError, match=f"seed of the search differs from that in {folder}/search.json"):
        chooser(seed=1)


# What goes wrong


@pytest.mark.parametrize(("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")])
def test_a_bucket_whose_package_is_not_installed_says_what_to_install(
    scheme, package, extra, outcome, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails, as where it is not installed
    monkeypatch.delitem(_registry, scheme, raising=False)
    url = f"{scheme}://my-bucket/x"
    for words in (["analyze", "--runs", url], ["train", "--corpus", url]):
        code, out, error = outcome(*words)
        assert code == 2 and error.count("error: ") == 1 and "Traceback" not in out + error, error
        assert all(part in error for part in (url, f"nstall {package}", f"pip install '.[{extra}]'")), error


@contextlib.contextmanager
def server_of(handler: type[http.server.BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The address of a server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Quiet(http.server.BaseHTTPRequestHandler):
    """What answers all methods alike, by a cloud's answer, and closes the connection."""

    cloud: Any = None

    protocol_version = "HTTP/1.1"  # it asks for the body of a request that waits to send it
    log_message = lambda self, *words: None  # noqa: E731

    def do_GET(self) -> None:
        self.close_connection = True
        self.answer(int(self.headers.get("Content-Length", 0)))

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def answer(self, length: int) -> None:
        ahead = http.client.HTTPConnection(self.cloud.endpoint.removeprefix("http://"))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        ahead.request(self.command, self.path, self.rfile.read(length), headers)
        answer = ahead.getresponse()
        self.reply(answer.status, answer.getheaders(), answer.read())
        ahead.close()

    def reply(self, status: int, headers: Iterable[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def cut_above(cloud: Any, most: int, times: float) -> type[Quiet]:
    """What hands requests on to a cloud; of one with more bytes, the connection is cut in mid-upload.

    A cut request never reaches the cloud: the services drop such, but the emulator of gs:// stores it.
    """
    left = [times]

    class Proxy(Quiet):
        def answer(self, length: int) -> None:
            if length <= most or left[0] <= 0:
                return super().answer(length)
            left[0] -= 1
            self.rfile.read(most)

    Proxy.cloud = cloud
    return Proxy


def refuses(status: int, message: str) -> type[Quiet]:
    """What answers as Google's service does to an account without rights, or to an expired token."""

    class Refuses(Quiet):
        def answer(self, length: int) -> None:
            self.rfile.read(length)
            content = json.dumps({"error": {"code": status, "message": message}}).encode()
            self.reply(status, [("Content-Length", str(len(content)))], content)

    return Refuses


@contextlib.contextmanager
def without_rights(cloud: Any) -> Iterator[str]:
    """The endpoint of a cloud that refuses everything: moto as it asks for rights, of gs:// one of ours."""
    if cloud.scheme == "gs":
        message = "me@project.iam.gserviceaccount.com does not have storage.objects access"
        with server_of(refuses(403, message)) as endpoint:
            yield endpoint
        return
    try:
        reset_auth(cloud, b"0")
        yield cloud.endpoint
    finally:
        reset_auth(cloud, b"inf")


def reset_auth(cloud: Any, unchecked: bytes) -> None:
    """How many requests moto lets through before it asks for rights."""
    address, header = f"{cloud.endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(address, unchecked, header)).close()


def test_a_token_without_rights_ends_in_a_sentence(cloud, corpus, refused):
    """At once, for shards too, whose reading is otherwise tried for a minute and a half."""
    url = cloud.url()
    # S3 says no more where the answer to a request has no body.
    why = {"s3": "", "gs": "does not have storage.objects access"}[cloud.scheme]
    with without_rights(cloud) as endpoint:
        for words in (
            ["analyze", "--runs", url],
            ["train", "--corpus", corpus, "--results", url],
            ["data", "prepare", "--corpus", corpus, "--out", url],
            ["train", "--corpus", url],
        ):
            refused(cloud, words, url, why, endpoint=endpoint)


def test_who_has_no_credentials_is_told_so(moto, gcs_emulator, tmp_path, gcsfs_in_a_hurry, refused):
    """At once, for shards too. Of gs:// they are an expired token's, since the emulator asks for none."""
    unset = dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), str(tmp_path / "none"))
    unset |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    url = moto.url()
    for words in (["analyze", "--runs", url], ["train", "--corpus", url]):
        refused(moto, words, url, "Unable to locate credentials", **unset)
    url = gcs_emulator.url()
    with server_of(refuses(401, "Invalid Credentials")) as endpoint:
        refused(gcs_emulator, ["analyze", "--runs", url], url, "Invalid Credentials", endpoint=endpoint)


def test_an_upload_that_is_cut_is_tried_again(cloud):
    content = os.urandom(2_000_000)
    url = cloud.url()
    with server_of(cut_above(cloud, 500_000, times=1)) as front, cloud.reached(front):
        Folder(url).write("big", content)
    assert Folder(url).read("big") == content and Folder(url).names() == ["big"]


def test_a_bucket_that_is_away_for_some_seconds_is_waited_for(cloud, caplog, gcsfs_in_a_hurry):
    """As while a host has no network."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    url = cloud.url()
    with cloud.reached(f"http://127.0.0.1:{port}"):
        with pytest.raises(ConnectionError):
            Folder(url).write("runs/a", b"1")
        waits = threading.Thread(target=patiently, args=[lambda: Folder(url).write("runs/a", b"1")])
        waits.start()
        while waits.is_alive() and "tried again: " not in caplog.text:
            time.sleep(0.05)
        assert waits.is_alive(), "it gave up at once"
        with server_of(cut_above(cloud, 1_000, times=0), port):
            waits.join(60)
    assert Folder(url).read("runs/a") == b"1"


@pytest.mark.parametrize(
    ("cloud", "ask"),
    [
        ("moto", Folder.names),
        ("gcs_emulator", lambda folder: folder.write("a", b"1")),
        ("moto", lambda folder: folder.remove("a")),
    ],
    ids=["read", "write", "remove"],
    indirect=["cloud"],
)
def test_a_bucket_that_hangs_is_told_of_and_given_up(cloud, ask, monkeypatch, caplog, patience):
    """It takes connections and never answers; by themselves s3fs waits so for 7 minutes, or without end."""
    monkeypatch.setattr(files, "NOTICE_S", 0.1)
    monkeypatch.setattr(files, "UNANSWERED_S", 1.0 * patience)  # the warning's thread may wait for a core
    url = cloud.url()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with cloud.reached(endpoint), pytest.raises(ConnectionError, match="no answer in time"):
            ask(Folder(url))
    assert f"{url} has not answered for 0.1 s: still waiting" in caplog.text


@pytest.mark.slow
def test_uploads_that_are_always_cut_end_in_a_sentence_and_leave_nothing(cloud, corpus, gcsfs_in_a_hurry):
    folder = Folder(cloud.url())
    text = DataConfig(corpus=str(corpus))
    with (
        server_of(cut_above(cloud, 100_000, times=float("inf"))) as front,
        cloud.reached(front),
        pytest.raises(DataError, match=f"shards cannot be written to {folder}: "),
    ):
        prepare(text, str(folder), progress=False)
    there = folder.names()
    assert "preparing.json" in there, "small files came through"
    assert not [name for name in there if name.startswith(("train", "index"))], "what was cut can be seen"
    prepare(text, str(folder), progress=False)
    assert "index.json" in folder.names()
