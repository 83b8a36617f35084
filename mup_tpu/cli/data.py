"""The command data prepare."""

from __future__ import annotations

from mup_tpu.cli.console import Console
from mup_tpu.config import DataConfig
from mup_tpu.config.options import FolderName


def prepare(out: FolderName, data: DataConfig = DataConfig(), shard_samples: int = 4096) -> None:
    """Write a corpus as tokenised shards that training streams.

    `mup-tpu train --corpus OUT` trains on them. Shards are WebDataset tar files with an index. After a kill,
    run the same command to continue; it ends with the same bytes.

    Args:
        out: Folder or fsspec URL to write to (gs://, s3://).
        data: Text, tokenizer and sequence length; batch size and data seed are not used.
        shard_samples: Largest number of sequences in a shard.
    """
    from mup_tpu.data import shards

    index = shards.prepare(data, out, shard_samples)
    console = Console()
    for name, split in (("training", index.train), ("held-out", index.validation)):
        size = sum(shard.size for shard in split.shards) / 2**20
        console.print(
            f"{name}: {len(split.shards):,} shards of {split.samples_per_shard:,} sequences, {size:,.1f} MiB"
        )
    console.print(
        f"train on them with: mup-tpu train --corpus {out} --sequence-length {index.sequence_length}"
    )
