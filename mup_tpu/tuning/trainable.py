"""Trial of a search for Ray Tune. Only its worker imports torch, so that the driver starts soon."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any

from ray import tune

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.config.search import Search, SearchOptions
from mup_tpu.errors import StoreError
from mup_tpu.training.process import host_log
from mup_tpu.training.report import PackResult
from mup_tpu.tuning.search_progress import KEY, point_of

if TYPE_CHECKING:
    from mup_tpu.training.loop import PackRun

RESULT = "loss"
"""Name of the value to minimise."""

_LAST_BREATH_S = 30


def checkpoints_of(folder: str, key: int) -> str:
    """Folder or fsspec URL of a proposal's checkpoints."""
    return f"{folder}/checkpoints/search-{key}"


class TrialTrainable(tune.Trainable):
    """Trial for Tune: each step trains to the next evaluation; the training loop writes checkpoints."""

    def setup(  # type: ignore[override]
        self,
        config: dict[str, Any],
        search: Search,
        options: SearchOptions,
        run: RunOptions,
        folder: str,
        environment: dict[str, str],
        prepare: Callable[[], None] | None,
    ) -> None:
        """Begin, or go on from the trial's checkpoint, with the environment of a pack's worker."""
        os.environ |= environment
        if prepare is not None:
            prepare()
        self._search, self._options, self._run_options, self._folder = search, options, run, folder
        self._thread = ThreadPool(1)  # the process can end while the thread hangs
        self._run: PackRun | None = None
        self._logging = contextlib.ExitStack()
        self._logging.enter_context(host_log(folder, capture_warnings=True))
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another trial in the same process, without new imports."""
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        from mup_tpu.training.loop import PackRun

        trial = self._search.trial(point_of(config))
        every = max(1, trial.train.steps // self._options.evaluations)
        run = replace(self._run_options, eval_every=every, checkpoint_every=every)
        run = replace(run, threads=run.threads or 1)
        folder = checkpoints_of(self._folder, config[KEY])
        dataset = data.load(trial.data, progress=False)
        self._chance = math.log(dataset.vocab_size)
        self._run = PackRun([trial], dataset, run, folder)
        self._events = self._run.steps()

    def step(self) -> dict[str, Any]:
        """Train to the next evaluation or to the end.

        Raises:
            TimeoutError: the step took longer than the heartbeat.
        """
        try:
            return self._thread.apply_async(self._advance).get(timeout=self._options.heartbeat)
        except multiprocessing.TimeoutError:
            self._run = None  # no checkpoint, as the thread hangs
            raise TimeoutError from None

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Empty checkpoint: the training loop writes its own, and `setup` goes on from them."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Do nothing: see `save_checkpoint`."""

    def cleanup(self) -> None:
        """Checkpoint the trial, as Ctrl-C may have ended the search; a hanging one has none."""
        if self._run is not None:
            with contextlib.suppress(multiprocessing.TimeoutError, StoreError):
                self._thread.apply_async(self._run.save).get(timeout=_LAST_BREATH_S)
        self._logging.close()

    def _advance(self) -> dict[str, Any]:
        for event in self._events:
            if isinstance(event, PackResult):
                return self._report(event, done=True)
            if event.validation_losses is not None and event.statuses[0] == "running":
                assert self._run is not None
                return self._report(self._run.so_far(), done=False)
        raise AssertionError("a pack always ends with its result")

    def _report(self, result: PackResult, done: bool) -> dict[str, Any]:
        row = result.rows[0]
        share = 100 * row["steps_done"] // row["steps_planned"] if not done else 100
        worst = 2 * self._chance  # a number for diverged trials: searchers and schedulers need one
        loss = min(row["loss"], worst) if math.isfinite(row["loss"]) else worst
        return {
            RESULT: loss,
            "share": max(1, share),
            "train_step": row["steps_done"],
            "done": done,
            "row": json.dumps(row),
            "curves": json.dumps(result.curves),
        }
