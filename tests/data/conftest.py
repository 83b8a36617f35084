"""One text and its prepared shards, which tests of batches, of shards and of servers read."""

import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data.shards import prepare


@pytest.fixture(scope="session")
def text(corpus):
    return DataConfig(corpus=str(corpus), sequence_length=32, batch_size=24, validation_fraction=0.2)


@pytest.fixture(scope="session")
def shards(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    prepare(text, str(folder), shard_samples=1500, progress=False)
    return folder


@pytest.fixture
def streamed(shards):
    """Batches of `text`, from its shards."""
    return DataConfig(corpus=str(shards), sequence_length=32, batch_size=24)
