"""Job of one pack, from importing torch to its rows."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mup_tpu import data
from mup_tpu.config import RunOptions, Trial
from mup_tpu.jobs.job import Job, Preparing, Question, Surroundings
from mup_tpu.jobs.plan import describe
from mup_tpu.training.report import PackResult

FolderOf = Callable[[list[Trial]], str | None]
"""Folder or fsspec URL of a pack's checkpoints; None keeps none."""


@dataclass(frozen=True)
class Evaluated:
    """Question after an evaluation of a pack: which members train on?

    The answer names the trial_ids of members to stop; None checkpoints the pack and ends the job.
    """

    step: int
    losses: dict[str, float]
    """Loss of the rows of members that train, by trial_id, nat per token."""


class PackJob(Job):
    """A pack to train; its parts, after a split, have their own folders of checkpoints (`folder_of`).

    With `asks`, the driver decides after each evaluation which members train on. Fields of `scale` name the
    pack's size in sentences.
    """

    def __init__(
        self,
        trials: list[Trial],
        options: RunOptions,
        folder_of: FolderOf = lambda pack: None,
        asks: bool = False,
        scale: Sequence[str] = ("width",),
    ) -> None:
        self.trials, self.options, self.checkpoints = trials, options, folder_of(trials)
        self.members, self._folder_of, self._asks, self._scale = len(trials), folder_of, asks, scale

    def __str__(self) -> str:
        count = "a trial" if self.members == 1 else f"a pack of {self.members} trials"
        return f"{count} of {describe(self.trials[0], self._scale)}"

    def __getstate__(self) -> dict[str, Any]:
        """State without `folder_of`: only the driver splits, and the function holds all data of a sweep."""
        return {**vars(self), "_folder_of": None}

    def split(self, fits: int) -> Sequence[PackJob]:
        """Parts of at most `fits` members; none of a single trial."""
        if len(self.trials) == 1:
            return ()
        count = math.ceil(len(self.trials) / fits)
        parts = [self.trials[i::count] for i in range(count)]
        return [PackJob(part, self.options, self._folder_of, self._asks, self._scale) for part in parts]

    def was_preempted(self, result: PackResult) -> bool:
        """Whether a member was."""
        return any(row["status"] == "preempted" for row in result.rows)

    def run(self, here: Surroundings) -> Generator[Any, Any, PackResult]:
        """Train the pack, and before the first report name the current work.

        The result has no tensors: their memory must be free before the next pack starts, and the store needs
        only rows and curves.

        Raises:
            PackTooLarge: the pack does not fit in memory; a part of it may.
            DeviceFailed: the GPU failed.
            DataError: the corpus cannot be used.
        """
        if "torch" not in sys.modules:
            yield Preparing("importing torch")
        from mup_tpu.training.loop import PackRun

        corpus = self.trials[0].data
        yield Preparing(data.describe_load(corpus))
        dataset = here.once(corpus, lambda: data.load(corpus, progress=here.in_driver))
        yield Preparing("initialising parameters")
        training = PackRun(self.trials, dataset, self.options, self.checkpoints, here.writes)
        yield Preparing(training.first_report_waits_for)
        with training.preemptible() if here.handles_sigterm else contextlib.nullcontext():
            for event in training.steps():
                if isinstance(event, PackResult):
                    return replace(event, pack=None)
                yield event
                if self._asks and event.validation_losses is not None:
                    rows = zip(training.so_far().rows, event.statuses, strict=True)
                    losses = {row["trial_id"]: row["loss"] for row, status in rows if status == "running"}
                    decision = yield Question(Evaluated(event.step, losses))
                    if decision is None:
                        training.save()
                        return training.so_far("preempted")
                    training.stop(decision)
        raise AssertionError("a pack ends with its result")
