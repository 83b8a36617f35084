"""Progress of a search: a live table on a terminal, a line for each event in a log file."""

from __future__ import annotations

from typing import Any

from ray import tune
from rich.console import Console
from rich.live import Live

from mup_tpu.config.columns import write
from mup_tpu.config.table import Table

KEY = "_key"
"""Key of a proposal's number in its configuration."""

_SHOWN = 20


def point_of(config: dict[str, Any]) -> dict[str, float]:
    """Hyperparameters of a proposal, without its number."""
    return {name: value for name, value in config.items() if name != KEY}


class LiveCallback(tune.Callback):
    """Callback without a state: Tune pickles its callbacks for a restore that is never done here."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class SearchProgress(LiveCallback):
    """Table of trials with node, hyperparameters, step and loss, and the best trial so far."""

    def __init__(self, console: Console, total: int, before: int) -> None:
        self._console, self._total, self._ended = console, total, before
        self._rows: dict[str, dict[str, Any]] = {}
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> SearchProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Show a start; before the first result the worker imports torch, reads text and compiles."""
        self._update(trial, "starting")

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Show a trial's last loss."""
        self._update(trial, "running", result)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Count a trial that has ended."""
        self._ended += 1
        self._update(trial, "ended", trial.last_result)
        self._line(trial, "ended")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Count a trial that has failed."""
        self._ended += 1
        self._update(trial, "failed", trial.last_result)
        self._line(trial, "failed")

    def best(self) -> dict[str, Any] | None:
        """Trial of least loss so far."""
        known = [row for row in self._rows.values() if row["loss"] is not None]
        return min(known, key=lambda row: row["loss"]) if known else None

    def _update(self, trial: Any, status: str, result: dict[str, Any] | None = None) -> None:
        row = self._rows.setdefault(trial.trial_id, {"loss": None, "step": 0, "node": ""})
        point = " ".join(f"{name} {write(name, value)}" for name, value in point_of(trial.config).items())
        row |= {"trial": str(trial.config.get(KEY, "")), "status": status, "point": point}
        if result:
            row["loss"] = result.get("loss", row["loss"])
            row["step"] = result.get("train_step", row["step"])
            row["node"] = result.get("hostname", row["node"])
        if self._live is not None:
            self._live.update(self._table())

    def _line(self, trial: Any, status: str) -> None:
        if self._live is not None:
            return
        row, best = self._rows[trial.trial_id], self.best()
        loss = f"loss {row['loss']:.4f}" if row["loss"] is not None else "no loss"
        found = f", best {best['loss']:.4f} ({best['point']})" if best else ""
        self._console.print(
            f"trial {row['trial']} {status} at step {row['step']}: {loss}, {row['point']}; "
            f"{self._ended} of {self._total} ended{found}"
        )

    def _table(self) -> Table:
        best = self.best()
        title = f"{self._ended} of {self._total} ended"
        if best is not None:
            title += f" · best {best['loss']:.4f} at {best['point']}"
        rows = []
        for row in list(self._rows.values())[-_SHOWN:]:
            loss = f"{row['loss']:.4f}" if row["loss"] is not None else ""
            rows.append((row["trial"], row["status"], row["node"], str(row["step"]), loss, row["point"]))
        headings = ("trial", "status", "node", "step", "loss", "hyperparameters")
        return Table(headings, rows, title, left=("status", "node", "hyperparameters"))
