"""Text to batches: corpus -> tokenizer -> token cache -> batches, or -> prepared shards -> batches."""

from mup_tpu.config import DataConfig
from mup_tpu.data.batches import CachedDataset, ShardDataset, TokenDataset, prefetch
from mup_tpu.data.cache import load_cache
from mup_tpu.data.shards import is_prepared

__all__ = ["TokenDataset", "load", "prefetch"]


def load(config: DataConfig, progress: bool = True) -> TokenDataset:
    """Return the batches of a configuration: streamed from prepared shards, else from the token cache.

    A corpus is tokenised on first use.
    """
    if is_prepared(config.corpus):
        return ShardDataset(config)
    return CachedDataset(config, load_cache(config, progress))
