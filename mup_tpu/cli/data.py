"""Commands about data: prepare shards, look at a corpus or at prepared shards."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.panel import Panel

from mup_tpu.cli.console import Console
from mup_tpu.config import DataConfig
from mup_tpu.config.options import Folder


def prepare(out: Folder, data: DataConfig = DataConfig(), shard_samples: int = 4096) -> None:
    """Write a corpus as tokenised shards that training streams.

    `mup-tpu train --corpus OUT` trains on them. Shards are WebDataset tar files with an index. After a kill,
    run the same command to continue; it ends with the same bytes.

    Args:
        out: Folder or fsspec URL to write to (gs://, s3://).
        data: Text, tokenizer and sequence length; batch size and data seed are not used.
        shard_samples: Largest number of sequences in a shard.
    """
    from mup_tpu.data.shards import prepare as prepare_shards

    index = prepare_shards(data, out, shard_samples)
    console = Console()
    for name, split in (("training", index.train), ("held-out", index.validation)):
        size = sum(shard.size for shard in split.shards) / 2**20
        console.print(
            f"{name}: {len(split.shards):,} shards of {split.samples_per_shard:,} sequences, {size:,.1f} MiB"
        )
    console.print(
        f"train on them with: mup-tpu train --corpus {out} --sequence-length {index.sequence_length}"
    )


def inspect(data: DataConfig = DataConfig(), texts: int = 3) -> None:
    """Describe a corpus or prepared shards, and show held-out text.

    Args:
        data: Corpus or prepared shards; a corpus is tokenised on first use.
        texts: Held-out sequences to show, decoded.
    """
    from mup_tpu.data import cache, shards

    console = Console()
    about: dict[str, Any]
    folder = shards.ShardFolder(data.corpus) if shards.is_prepared(data.corpus) else None
    if folder is not None:
        about, tokenizer = dataclasses.asdict(folder.index), folder.tokenizer
        held_out = list(folder.samples(folder.index.validation.shards[0])[:texts])
    else:
        tokens = cache.load_cache(data)
        about, tokenizer = {**tokens.meta, "fingerprint": tokens.fingerprint}, tokens.tokenizer
        whole, length = tokens.tokens["validation"], data.sequence_length
        held_out = [whole[i : i + length] for i in range(0, min(texts * length, len(whole)), length)]
    entropy = about["unigram_entropy"]
    lines = {
        "corpus": about["dataset"],
        "fingerprint": about["fingerprint"],
        "tokens": f"{about['vocab_size']:,} different, {about['bytes_per_token']:.3f} bytes each",
        "unigram entropy": f"{entropy:.4f} nat/token: the loss of a model that knows frequencies alone",
    }
    for name, split in (("training", about["train"]), ("held-out", about["validation"])):
        lines[name] = f"{split['documents']:,} documents, {split['tokens']:,} tokens"
        if "shards" in split:
            count, each = len(split["shards"]), split["samples_per_shard"]
            lines[name] += f"; {count:,} shards of {each:,} sequences"
    if "sequence_length" in about:
        lines["sequence length"] = str(about["sequence_length"])
    for subject, line in lines.items():
        console.print(f"{subject:>16}  {line}")
    for sequence in held_out:
        console.print(Panel(tokenizer.decode(sequence)))
