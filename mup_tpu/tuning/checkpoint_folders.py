"""Folders of packs' checkpoints, beside the rows: kept until every trial of the pack has its row.

Checkpoints for longer runs (`--continue-to`) are kept for good.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection
from typing import Any

from mup_tpu.config import RunOptions, Trial
from mup_tpu.files import Folder, short_hash


class CheckpointFolders:
    """Folders of checkpoints, named by all trials of a pack: drivers may pack the same trials differently."""

    def __init__(self, results: Folder, trial_id: Callable[[Trial], str], run: RunOptions) -> None:
        self.root = results / "checkpoints"
        self._root = self.root if run.checkpoint_every else None
        self._trial_id = trial_id

    def of(self, pack: list[Trial]) -> str | None:
        """Folder of a pack; None if packs are not checkpointed."""
        return str(self._root / self._name(pack)) if self._root else None

    def _name(self, pack: list[Trial]) -> str:
        first, *others = map(self._trial_id, pack)
        if not others:
            return first
        return f"{first}-{short_hash(' '.join([first, *others]))[:8]}"

    def remove(self, pack: list[Trial]) -> None:
        """Remove the checkpoints of a pack whose rows are stored."""
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
        own = {self._trial_id(trial) for trial in trials}.intersection(done)
        with contextlib.suppress(OSError):
            names = [name for name in self._root.names() if name.partition("-")[0] in own]
            for name in names:
                if self._trial_ids(name) <= done:
                    self._remove(name)
            if self._root.is_local:
                os.rmdir(self._root.path)  # succeeds only on an empty folder; a bucket has none

    def _trial_ids(self, name: str) -> set[str]:
        """Names of a pack's trials; none without a whole checkpoint."""
        assert self._root is not None
        for step in (self._root / name).names():
            with contextlib.suppress(KeyError, TypeError):
                return set(self._meta(name, step)["trial_ids"])
        return set()

    def _meta(self, name: str, step: str) -> dict[str, Any]:
        """Metadata of a checkpoint; empty if it is damaged."""
        assert self._root is not None
        with contextlib.suppress(OSError, ValueError):
            meta = json.loads(self._root.read(f"{name}/{step}/meta.json"))
            return meta if isinstance(meta, dict) else {}
        return {}
