"""Emulators of two clouds' buckets on this machine: moto of s3://, gcp-storage-emulator of gs://.

Endpoint and credentials reach our code as they would a user's: by the environment variables that s3fs and
gcsfs read.
"""

import contextlib
import os
import socket
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import fsspec
import pytest

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # gcsfs would ask over gRPC, which nobody answers

BUCKET = "my-bucket"
OTHER_CLIENT = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1", "NO_GCE_CHECK": "true"}
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Cloud:
    """A server that speaks one protocol."""

    scheme: str
    endpoint: str

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Variables of a process that reaches it, or something in front of it."""
        at = endpoint or self.endpoint
        ours = {"AWS_ENDPOINT_URL": at} if self.scheme == "s3" else {"STORAGE_EMULATOR_HOST": at}
        return KEYS | OTHER_CLIENT | ours

    @contextlib.contextmanager
    def reached(self, endpoint: str = "", **more: str) -> Iterator[None]:
        """File systems that are opened in this process reach it, or something in front of it."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (self.environment(endpoint) | more).items():
                patch.setenv(name, value)
            forget_file_systems()
            try:
                yield
            finally:
                forget_file_systems()

    def url(self, bucket: str = BUCKET) -> str:
        """A folder that nobody has used yet."""
        return f"{self.scheme}://{bucket}/{uuid.uuid4().hex}"

    def put(self, url: str, content: bytes) -> None:
        """Write an object, not by our file system: as another machine would."""
        bucket, _, key = url.partition("://")[2].partition("/")
        if self.scheme == "s3":
            address, method = f"{self.endpoint}/{bucket}/{urllib.parse.quote(key)}", "PUT"
        else:
            query = urllib.parse.urlencode({"uploadType": "media", "name": key})
            address, method = f"{self.endpoint}/upload/storage/v1/b/{bucket}/o?{query}", "POST"
        header = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(address, content, header, method=method)
        urllib.request.urlopen(request, timeout=30).close()


def forget_file_systems() -> None:
    for scheme in ("s3", "gs"):
        fsspec.get_filesystem_class(scheme).clear_instance_cache()


@pytest.fixture(scope="session")
def moto() -> Iterator[Cloud]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    cloud = Cloud("s3", f"http://{host}:{port}")
    urllib.request.urlopen(urllib.request.Request(f"{cloud.endpoint}/{BUCKET}", method="PUT")).close()
    yield cloud
    server.stop()


@pytest.fixture(scope="session")
def gcs_emulator() -> Iterator[Cloud]:
    from gcp_storage_emulator.server import create_server

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    yield Cloud("gs", f"http://127.0.0.1:{port}")
    server.stop()


@pytest.fixture(scope="module", params=["moto", "gcs_emulator"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """Each of the clouds, reached by this process."""
    found = request.getfixturevalue(request.param)
    with found.reached():
        yield found


@pytest.fixture
def s3(moto: Cloud) -> Iterator[Cloud]:
    """One cloud for whatever sees a bucket through `Folder` alone: sweeps and searches."""
    with moto.reached():
        yield moto
