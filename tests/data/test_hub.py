"""Data sets of a hub: a small server that answers as the Hugging Face hub does, and its real client."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

SHA = "a" * 40
FILE = b"".join(json.dumps({"text": f"Row {i}."}).encode() + b"\n" for i in range(5000))
CARD = b"""---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - split: train
    path: train.jsonl
---
"""
DATA_SETS = {
    "owner/small": {"train.jsonl": FILE},
    "Salesforce/wikitext": {"train.jsonl": FILE, "README.md": CARD},
}
READ = """
import json, sys
from mup_tpu.config import DataConfig
from mup_tpu.data.corpus import read_documents
from mup_tpu.errors import DataError
for corpus, limit in json.loads(sys.argv[1]):
    try:
        print(json.dumps([d.text for d in read_documents(DataConfig(corpus=corpus, max_documents=limit))]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    """Data sets of a file train.jsonl each: one without a card, and one whose card declares a configuration.

    A name without an owner is redirected, as the hub does; the client refuses such a name before it asks.
    """

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = self.path.split("?")[0]
        if path == "/":
            return self.send(200, b"a hub")
        name = next((name for name in DATA_SETS if f"/{name}/" in f"{path}/"), None)
        if name is None:
            old = re.fullmatch(r"(?:/api)?/datasets/wikitext(/.*)?", path)
            target = path.replace("/wikitext", "/Salesforce/wikitext", 1)
            return self.send(307, b"", {"Location": target}) if old else self.missing("RepoNotFound")
        files = DATA_SETS[name]
        if path.startswith(f"/api/datasets/{name}/tree/"):
            entries = [
                {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                for file, content in files.items()
            ]
            return self.send(200, json.dumps(entries).encode())
        if path.startswith(f"/api/datasets/{name}"):
            siblings = [{"rfilename": file} for file in files]
            return self.send(200, json.dumps({"id": name, "sha": SHA, "siblings": siblings}).encode())
        file = path.rpartition("/")[2]
        if not path.startswith(f"/datasets/{name}/resolve/") or file not in files:
            return self.missing("EntryNotFound")
        content = files[file]
        first, last = 0, len(content) - 1
        if part := self.headers.get("Range"):
            begin, _, end = part.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
        headers = {
            "ETag": '"0"',
            "X-Repo-Commit": SHA,
            "Content-Range": f"bytes {first}-{last}/{len(content)}",
        }
        return self.send(206 if part else 200, content[first : last + 1], headers)

    def missing(self, code):
        self.send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": SHA})

    def send(self, code, content, headers=()):
        self.send_response(code)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def environment(tmp_path):
    """The environment of a process for which this hub is the hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    yield os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.nightly
def test_data_sets_are_streamed_downloaded_and_missed(environment):
    """Names with and without an owner: the hub's data set wikitext once had none."""
    cases = [
        ["owner/small", 3],
        ["owner/small", 0],
        ["Salesforce/wikitext/wikitext-2-raw-v1", 3],
        ["wikitext/wikitext-2-raw-v1", 3],
        ["owner/absent", 0],
        ["absent", 0],
        ["owner/small/nosuch", 0],
    ]
    result = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(cases)],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    streamed, whole, wikitext, old, absent, one_word, nosuch = map(json.loads, result.stdout.splitlines())
    assert streamed == wikitext == old == ["Row 0.", "Row 1.", "Row 2."]
    assert whole == [f"Row {i}." for i in range(5000)]
    sentence = "is neither a local file or folder nor on http://127.0.0.1"
    assert absent.startswith(f"corpus 'owner/absent' {sentence}")
    assert one_word.startswith(f"corpus 'absent' {sentence}")
    assert one_word.endswith("; data sets of the hub have names as owner/name")
    assert nosuch.startswith("corpus 'owner/small/nosuch' cannot be loaded: BuilderConfig 'nosuch' not found")
