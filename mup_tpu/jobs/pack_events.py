"""What a pack does in the process that it was handed to, from importing torch to its rows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from mup_tpu import data
from mup_tpu.config import DataConfig, RunOptions, Trial
from mup_tpu.training.report import PackPreparing, PackResult, Report


def pack_events(
    pack: list[Trial],
    load: Callable[[DataConfig], data.TokenDataset],
    options: RunOptions,
    checkpoints: str | None,
    *,
    writes: bool = True,
    preemptible: bool = False,
) -> Iterator[PackPreparing | Report | PackResult]:
    """Train a pack in this process, and say first what its first report waits for.

    Args:
        pack: its trials.
        load: makes the dataset of a configuration.
        options: how it is run.
        checkpoints: the folder or fsspec URL of its checkpoints, or None.
        writes: whether this process writes them: one alone of those that train a pack together.
        preemptible: whether SIGTERM has it checkpoint and end; in the main thread only.

    Returns:
        Its events. The last, its result, is without the pack's tensors: their memory must be free before the
        next pack's, and rows and curves are all that the store needs.

    Raises:
        PackTooLarge: the pack does not fit in memory; a part of it may.
        DataError: the corpus cannot be used.
    """
    if "torch" not in sys.modules:
        yield PackPreparing("importing torch")
    from mup_tpu.training.loop import PackRun

    yield PackPreparing(data.describe_load(pack[0].data))
    dataset = load(pack[0].data)
    yield PackPreparing("initialising parameters")
    training = PackRun(pack, dataset, options, checkpoints, writes)
    yield PackPreparing(training.first_report_waits_for)
    with training.preemptible() if preemptible else contextlib.nullcontext():
        for event in training.steps():
            yield replace(event, pack=None) if isinstance(event, PackResult) else event
