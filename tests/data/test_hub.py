"""Data sets of a hub: a small server that answers as the Hugging Face hub does, and its real client."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

SHA = "a" * 40
FILE = b"".join(json.dumps({"text": f"Row {i}."}).encode() + b"\n" for i in range(5000))
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
    """One data set, owner/small, of one file: train.jsonl."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = self.path.split("?")[0]
        if path == "/":
            self.send(200, b"a hub")
        elif path.startswith("/api/datasets/owner/small/tree/"):
            file = {"type": "file", "path": "train.jsonl", "size": len(FILE), "oid": "0" * 40}
            self.send(200, json.dumps([file]).encode())
        elif path.startswith("/api/datasets/owner/small"):
            self.send(200, json.dumps({"id": "owner/small", "sha": SHA, "siblings": []}).encode())
        elif path == f"/datasets/owner/small/resolve/{SHA}/train.jsonl":
            first, last = 0, len(FILE) - 1
            if asked := self.headers.get("Range"):
                begin, _, end = asked.removeprefix("bytes=").partition("-")
                first, last = int(begin), min(int(end or last), last)
            headers = {
                "ETag": '"0"',
                "X-Repo-Commit": SHA,
                "Content-Range": f"bytes {first}-{last}/{len(FILE)}",
            }
            self.send(206 if asked else 200, FILE[first : last + 1], headers)
        elif path.startswith("/datasets/owner/small/resolve/"):
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

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


@pytest.mark.slow
def test_data_sets_are_streamed_downloaded_and_missed(environment):
    asked = [["owner/small", 3], ["owner/small", 0], ["owner/absent", 0], ["owner/small/nosuch", 0]]
    result = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(asked)],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    streamed, whole, absent, nosuch = map(json.loads, result.stdout.splitlines())
    assert streamed == ["Row 0.", "Row 1.", "Row 2."]
    assert whole == [f"Row {i}." for i in range(5000)]
    assert absent.startswith(
        "corpus 'owner/absent' is neither a local file or folder nor on http://127.0.0.1"
    )
    assert nosuch.startswith("corpus 'owner/small/nosuch' cannot be loaded: BuilderConfig 'nosuch' not found")
