"""A Ray cluster of hosts that share a bucket (moto, on a host of its own) and nothing else."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from host import NETWORK, Failed, Host, sh, until

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
HEAD = f"{NETWORK}.1:6379"
BUCKET = f"http://{NETWORK}.9:5000"
WORKERS = ("worker-1", "worker-2")
STARTS = 10
"""Tries to start a node: Ray gives it 30 s, which a busy machine may not keep."""

CLOUD = {
    "AWS_ENDPOINT_URL": BUCKET, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
TRIAL = """
base.model = {width = 32, base_width = 32, head_size = 16, depth = 1}
base.data = {corpus = "s3://hosts/shards", sequence_length = 32, batch_size = 4}
base.train = {steps = STEPS, warmup = 0.2, eval_batches = 2}
"""
SWEEP = """
experiment = "hosts"
scale = {width = [32]}
tune = {learning_rate = [0.003, 0.01]}
compare = {parametrization = ["mup"]}
num_seeds = 2
"""
SEARCH = 'experiment = "hosts_search"\nspace.learning_rate = {low = 0.001, high = 0.1}'


class Cluster:
    """A head without cores, two workers of a core each, and a bucket."""

    def __init__(self, logs: Path, steps: int) -> None:
        self.logs, self.token = logs, secrets.token_hex(32)
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "add", "switch", "type", "bridge")
        sh("ip", "addr", "add", f"{NETWORK}.254/24", "dev", "switch")
        sh("ip", "link", "set", "switch", "up")
        self.bucket = Host("bucket", 9, logs)
        self.bucket.start("moto.log", BIN / "moto_server", "-H", f"{NETWORK}.9", "-p", "5000")
        until("the bucket answers", self._make_bucket)
        self.head = Host("head", 1, logs)
        self.table: dict[str, float] | None = None
        """Losses of the sweep, by trial, once it has run."""
        self.rays: dict[str, subprocess.Popen[bytes]] = {}
        self._join(self.head, "--head", "--port=6379", "--dashboard-host=127.0.0.1", "--num-cpus=0")
        self.workers: dict[str, Host] = {}
        self.complete()
        trial = TRIAL.replace("STEPS", str(steps))
        self.head.write("sweep.toml", SWEEP + trial)
        self.head.write("search.toml", SEARCH + trial)
        pages = [page.read_text().split("\n\n") for page in sorted((ROOT / "docs").glob("*.md"))]
        self.head.write("text.jsonl", "\n".join(json.dumps({"text": t}) for page in pages for t in page))
        shards = ["--corpus", "/tmp/home/text.jsonl", "--sequence-length", "32", "--out", "s3://hosts/shards"]
        self.end("prepare", self.driver("prepare", "data", "prepare", *shards))

    def _make_bucket(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(f"{BUCKET}/hosts", method="PUT"), timeout=5).close()
            return True
        return False

    def complete(self) -> None:
        """Have both workers: a new machine for one that is gone, and Ray started where it has ended."""
        for number, name in enumerate(WORKERS, start=2):
            if name not in self.workers:
                self.workers[name] = Host(name, number, self.logs)
            if name not in self.rays or self.rays[name].poll() is not None:
                self._join(self.workers[name], f"--address={HEAD}", "--num-cpus=1")

    def cut_power(self, worker: str) -> None:
        """End a worker's machine at once."""
        self.workers.pop(worker).cut_power()
        self.rays.pop(worker).wait()

    def _join(self, host: Host, *options: str) -> None:
        host.write(".ray/auth_token", self.token)
        command = [BIN / "ray", "start", "--block", "--include-log-monitor=false"]
        command += [f"--node-ip-address={host.address}", *options]
        log = f"ray-{host.name}.log"
        for _ in range(STARTS):
            ray = self.rays[host.name] = host.start(log, *command, RAY_AUTH_MODE="token", **CLOUD)
            until(f"Ray is up on {host.name}", partial(self._has_started, log, ray))
            if ray.poll() is None:
                return
        raise Failed(f"Ray does not start on {host.name}: {self.said(log)[-600:]}")

    def _has_started(self, log: str, ray: subprocess.Popen[bytes]) -> bool:
        """Whether Ray is up, or has given up."""
        return "Ray runtime started" in self.said(log) or ray.poll() is not None

    def driver(self, name: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """A command of ours on the head; its log is NAME.log."""
        return self.head.start(f"{name}.log", sys.executable, "-m", "mup_tpu", *words, **CLOUD | environment)

    def end(self, name: str, driver: subprocess.Popen[bytes]) -> None:
        """Wait for a driver, which must end well."""
        if code := driver.wait(600):
            raise Failed(f"{name} ended with {code}: {self.said(f'{name}.log')[-1500:]}")

    def said(self, log: str) -> str:
        """Text of a log so far."""
        return (self.logs / log).read_text()

    @contextlib.contextmanager
    def training(self, name: str, command: str, *options: str) -> Iterator[None]:
        """A sweep or search into s3://hosts/NAME that must end well; both workers train during the block."""
        self.complete()
        where = ["--address", HEAD, "--results", f"s3://hosts/{name}", *options]
        driver = self.driver(name, command, f"/tmp/home/{command}.toml", *where)
        try:
            begun = lambda: len(checkpointed(name)) >= 2 or driver.poll() is not None  # noqa: E731
            until(f"two packs of {name} have checkpoints", begun)
            if driver.poll() is None:
                yield
            self.end(name, driver)
        finally:
            driver.kill()

    def sweep(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A sweep of four packs."""
        return self.training(name, "sweep", "--checkpoint-every", "50", "--pack-size", "1")


def checkpointed(name: str) -> list[str]:
    """Packs that have a checkpoint now."""
    from mup_tpu.files import Folder

    folder = Folder(f"s3://hosts/{name}/checkpoints")
    return [pack for pack in folder.names() if (folder / pack).names()]


def losses(name: str) -> dict[str, float]:
    """Held-out loss of each trial; each is there once."""
    from mup_tpu.store import load_runs

    runs = load_runs(f"s3://hosts/{name}")
    if set(runs["status"]) != {"finished"} or not runs["trial_id"].is_unique:
        raise Failed(f"rows of {name}: {runs[['trial_id', 'status']].to_dict('list')}")
    return dict(zip(runs["trial_id"], runs["loss"], strict=True))


def hosts_of(name: str) -> dict[str, str]:
    """Logs of the workers of each host."""
    from mup_tpu.files import Folder

    folder, found = Folder(f"s3://hosts/{name}/logs"), dict[str, str]()
    for log in folder.names():
        host = re.sub(r"-\d+\.\d+\.log$", "", log)
        found[host] = found.get(host, "") + folder.read(log).decode()
    return found
