"""Packs of our own networks, for the runner of trials, and their checkpoints beside the rows.

Checkpoints are kept until each trial of a pack has its row; those for longer runs (`--continue-to`) for good.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mean
from typing import Any

from rich.console import Console

from mup_tpu.config import RunOptions, SweepOptions, Trial
from mup_tpu.files import Folder, short_hash
from mup_tpu.jobs.job import Failed, Finished, Pool
from mup_tpu.jobs.pack_job import PackJob, describe, make_packs, work
from mup_tpu.jobs.pools import Pools
from mup_tpu.store import Store
from mup_tpu.training.record import failed_row
from mup_tpu.training.report import PackResult, Rates
from mup_tpu.tuning.trial_runner import Rows, TrialKind, TrialRunner
from mup_tpu.tuning.trials import Corpora


class Packs(TrialKind[Trial]):
    """Trials of our networks, several of one shape a job.

    Checkpoints and logs lie beside the store; fields of `scale` tell sizes apart. With `steps_before`, trials
    go on from checkpoints of the same trials with that number of steps.
    """

    def __init__(
        self,
        store: Store,
        corpora: Corpora,
        scale: Sequence[str],
        options: SweepOptions,
        run: RunOptions,
        console: Console,
        steps_before: int | None = None,
    ) -> None:
        self._corpora, self._scale, self._steps_before = corpora, scale, steps_before
        self._options, self._run, self._console = options, run, console
        self._store = store
        self._folders = CheckpointFolders(store.folder, corpora.trial_id, run)
        self._pools = Pools(options, str(store.folder), console)
        self._began = 0.0
        self._rates: list[Rates] = []
        """Rates of each ended pack, over all of its training."""
        self.kept = "its checkpoint is kept" if run.checkpoint_every else "without --checkpoint-every"

    def __exit__(self, *error: object) -> None:
        self._pools.close()

    def trial_id(self, trial: Trial) -> str:
        return self._corpora.trial_id(trial)

    def size(self, trial: Trial) -> str:
        return describe(trial, self._scale)

    def work(self, trial: Trial) -> float:
        return work(trial)

    def jobs(self, missing: list[Trial]) -> tuple[Sequence[PackJob], Pool[Any]]:
        """Return packs of missing trials in the order of their start, and the open pool that runs them.

        Raises:
            ConfigError: an option does not fit the trials, or the device or cluster is not there.
        """
        for batch_size in {trial.data.batch_size for trial in missing}:
            self._run.require_parts(batch_size)
        place = self._pools.place(len(missing), self._run)
        packs = make_packs(missing, place.workers, place.execution, self._options.pack_size, place.gpu)
        if self._steps_before is not None:
            self._begin(packs, self._steps_before)
        self._began, self._rates = time.monotonic(), []
        return [PackJob(pack, place.run, self._folders.of, scale=self._scale) for pack in packs], place.pool

    def _begin(self, packs: Sequence[list[Trial]], steps_before: int) -> None:
        from mup_tpu.training.checkpoint import begin

        at_start = 0
        for pack in packs:
            shorter = [trial.replace(steps=steps_before) for trial in pack]
            folder = self._folders.of(pack)
            assert folder is not None
            at_start += not begin(self._folders.root, pack, shorter, self.trial_id, folder)
        if at_start:
            self._console.print(
                f"{at_start} of {len(packs)} packs have no checkpoint of {steps_before} steps or before to "
                "go on from, and train from the start"
            )

    def rows(self, job: PackJob, ended: Finished | Failed) -> Rows:
        if isinstance(ended, Finished) and ended.result.rates:
            self._rates.append(ended.result.rates)
        return rows_of_pack(job, ended, self._corpora, self._run.device)

    def stored(self, job: PackJob, rows: Sequence[Mapping[str, Any]]) -> None:
        self._folders.remove(job.trials)

    def tidy(self, trials: Sequence[Trial], stored: Callable[[], Collection[str]]) -> None:
        self._folders.remove_done(list(trials), stored)

    def summary(self) -> str:
        """Return a line about packs of all hosts: tokens, total rate, rate of a device, MFU, input wait."""
        tokens = sum(r.tokens for r in self._rates)
        rate = tokens / max(time.monotonic() - self._began, 1e-9)
        parts = [f"{tokens:,} tokens in this call, {rate:,.0f} tokens/s in all"]
        if self._rates:
            per_device = mean(r.overall_tokens_per_second / r.devices for r in self._rates)
            parts.append(f"{per_device:,.0f} a device while it trained")
            known = [r.mfu for r in self._rates if not math.isnan(r.mfu)]
            parts += [f"MFU {mean(known):.1%}"] if known else []
            waits = [r.input_wait for r in self._rates]
            parts.append(f"input wait {mean(waits):.1%}, at most {max(waits):.1%}")
        return " · ".join(parts)

    def runner(self) -> TrialRunner[Trial]:
        options = self._options
        return TrialRunner(
            self._store, self, options.heartbeat, self._run.halving, options.track, self._console
        )


def rows_of_pack(job: PackJob, ended: Finished | Failed, corpora: Corpora, device: str) -> Rows:
    """Return rows and curves of a pack; of a failed one, a row with the reason for each trial."""
    if isinstance(ended, Failed):
        outcome = {"device": device, "pack_size": len(job.trials)}
        return [failed_row(t, corpora.of(t), ended.reason, **outcome) for t in job.trials], []
    result: PackResult = ended.result
    return result.rows, result.curves


class CheckpointFolders:
    """Folders of checkpoints, named by all trials of a pack: drivers may pack the same trials differently."""

    def __init__(self, results: Folder, trial_id: Callable[[Trial], str], run: RunOptions) -> None:
        self.root = results / "checkpoints"
        self._root = self.root if run.checkpoint_every else None
        self._trial_id = trial_id

    def of(self, pack: list[Trial]) -> str | None:
        return str(self._root / self._name(pack)) if self._root else None

    def _name(self, pack: list[Trial]) -> str:
        first, *others = map(self._trial_id, pack)
        if not others:
            return first
        return f"{first}-{short_hash(' '.join([first, *others]))[:8]}"

    def remove(self, pack: list[Trial]) -> None:
        if self._root is not None:
            with contextlib.suppress(OSError):
                self._remove(self._name(pack))

    def _remove(self, name: str) -> None:
        assert self._root is not None
        steps = (self._root / name).names()
        closed = [f"{name}/{step}" for step in steps if not self._meta(name, step).get("is_open")]
        self._root.remove(*(closed if len(closed) < len(steps) else [name]))

    def remove_done(self, trials: list[Trial], stored: Callable[[], Collection[str]]) -> None:
        """Remove checkpoints of an earlier, killed call whose trials all have rows.

        A pack without the row of a trial keeps its checkpoints: another driver may be training it. `stored`
        gives the trial_ids with a row; it is called only if packs are checkpointed.
        """
        if self._root is None:
            return
        done = set(stored())
        ended = {self._trial_id(trial) for trial in trials}.intersection(done)
        with contextlib.suppress(OSError):
            names = [name for name in self._root.names() if name.partition("-")[0] in ended]
            for name in names:
                if self._trial_ids(name) <= done:
                    self._remove(name)
            if self._root.is_local:
                os.rmdir(self._root.path)  # succeeds only on an empty folder; a bucket has none

    def _trial_ids(self, name: str) -> set[str]:
        """Return the trial_ids of a pack; none without a whole checkpoint."""
        assert self._root is not None
        for step in (self._root / name).names():
            with contextlib.suppress(KeyError, TypeError):
                return set(self._meta(name, step)["trial_ids"])
        return set()

    def _meta(self, name: str, step: str) -> dict[str, Any]:
        """Return the metadata of a checkpoint; empty if it is damaged."""
        assert self._root is not None
        with contextlib.suppress(OSError, ValueError):
            meta = json.loads(self._root.read(f"{name}/{step}/meta.json"))
            return meta if isinstance(meta, dict) else {}
        return {}
