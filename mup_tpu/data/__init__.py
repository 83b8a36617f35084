"""Text to batches: corpus -> tokenizer -> token cache -> batches."""

from mup_tpu.config import DataConfig
from mup_tpu.data.batches import TokenDataset, prefetch
from mup_tpu.data.cache import fingerprint, load_cache

__all__ = ["TokenDataset", "fingerprint", "load", "prefetch"]


def load(config: DataConfig, progress: bool = True) -> TokenDataset:
    """The batches of a configuration; the corpus is tokenised on first use.

    Raises:
        DataError: the corpus cannot be used, is shorter than one batch, or the cache cannot be written.
    """
    return TokenDataset(config, load_cache(config, progress))
