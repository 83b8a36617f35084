"""Progress of a search: a live table on a terminal, a line for each event in a log file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from mup_tpu.config.columns import write
from mup_tpu.config.search import Search
from mup_tpu.config.table import Table
from mup_tpu.store import Store
from mup_tpu.tuning.found import found_in
from mup_tpu.tuning.search_log import SearchLog

_SHOWN = 20
"""Rows of the table."""


class SearchProgress:
    """Table of trials with hyperparameters, step and loss, and the best finished trial of the store."""

    def __init__(self, console: Console, search: Search, store: Store, total: int, log: SearchLog) -> None:
        self._console, self._search, self._total, self._log = console, search, total, log
        self._ended = len(log.ended)
        self._rows: dict[int, dict[str, Any]] = {}
        self._best: tuple[float, str] | None = None
        finished = store.results().query("status == 'finished'").sort_values("loss")
        if len(finished):
            best = found_in(finished.to_dict("records")[0], str(store.folder))
            self._best = best.loss, self._words(best.trial.flat())
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> SearchProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def update(self, keys: Sequence[int], status: str, step: int = 0, loss: float | None = None) -> None:
        """Show the state of proposals; a loss stays until the next one."""
        for key in keys:
            row = self._rows.setdefault(key, {"loss": None, "step": 0})
            row |= {"status": status, "step": max(step, row["step"])}
            row["loss"] = row["loss"] if loss is None else loss
        if self._live is not None:
            self._live.update(self._table())

    def ended(self, key: int, row: Mapping[Any, Any]) -> None:
        """Count a proposal whose row is stored, and note the best finished one."""
        self._ended += 1
        loss, step, status = float(row["loss"]), int(row["steps_done"]), row["status"]
        if status == "finished" and (self._best is None or loss < self._best[0]):
            self._best = loss, self._point(key)
        self.update([key], status, step, loss)
        best = f", best {self._best[0]:.4f} ({self._best[1]})" if self._best else ""
        self._line(
            f"trial {key} {status} at step {step}: loss {loss:.4f}, {self._point(key)}; "
            f"{self._ended} of {self._total} ended{best}"
        )

    def refused(self, key: int, reason: str) -> None:
        """Count a proposal that is not allowed."""
        self._ended += 1
        self.update([key], "refused")
        self._line(f"trial {key} is left out: {reason}; {self._ended} of {self._total} ended")

    def _line(self, text: str) -> None:
        if self._live is None:
            self._console.print(text)

    def _point(self, key: int) -> str:
        return self._words(self._log.proposals[key])

    def _words(self, values: Mapping[str, Any]) -> str:
        return " ".join(f"{name} {write(name, values[name])}" for name in self._search.space)

    def _table(self) -> Table:
        title = f"{self._ended} of {self._total} ended"
        if self._best is not None:
            title += f" · best {self._best[0]:.4f} at {self._best[1]}"
        rows = []
        for key, row in list(self._rows.items())[-_SHOWN:]:
            loss = f"{row['loss']:.4f}" if row["loss"] is not None else ""
            rows.append((str(key), row["status"], str(row["step"]), loss, self._point(key)))
        headings = ("trial", "status", "step", "loss", "hyperparameters")
        return Table(headings, rows, title, left=("status", "hyperparameters"))
