"""Data of a sweep's trials."""

from __future__ import annotations

from collections.abc import Sequence

from mup_tpu import data
from mup_tpu.config import DataConfig, Trial


class Corpora:
    """Datasets of trials, which may differ in batches or in text; each is loaded once.

    Data of the given trials is loaded at once, so that errors come first.
    """

    def __init__(self, trials: Sequence[Trial] = ()) -> None:
        self._datasets: dict[DataConfig, data.TokenDataset] = {}
        for trial in trials:
            self.of(trial)

    def of(self, trial: Trial) -> data.TokenDataset:
        """Dataset of a trial, loaded if it is new."""
        if trial.data not in self._datasets:
            self._datasets[trial.data] = data.load(trial.data)
        return self._datasets[trial.data]

    def trial_id(self, trial: Trial) -> str:
        """Name of a trial's row."""
        return trial.trial_id(self.of(trial).fingerprint)
