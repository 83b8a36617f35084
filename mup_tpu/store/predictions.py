"""Predictions from a results folder, kept in its predictions.json with their time, rows and targets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mup_tpu.config.fields import require_valid
from mup_tpu.config.toml import from_dict
from mup_tpu.errors import ConfigError, StoreError, raised_as
from mup_tpu.files import short_hash
from mup_tpu.store.access import LOCK, read_if_there, results_folder, write_whole

FILE = "predictions.json"
_MOST_BYTES = 2**24
_TRIES = 5
"""Tries to add predictions to a bucket, where another writer may replace the file in between."""
_MISFITS = (ConfigError, ValueError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True)
class KeptPrediction:
    """A prediction of one rule's optimum at one scale."""

    made_at: str
    """ISO time."""
    rows: int
    """Number of rows behind it."""
    fingerprint: str
    """Hash of the rows' trial_ids."""
    scales: tuple[float, ...]
    """Scales of the rows."""
    compared: str
    """Name of the rule."""
    scale_column: str
    hyperparameter: str
    scale: float
    """Scale of the target."""
    x: float
    """log2 of the predicted optimum."""
    half: tuple[float, float]
    """50 % interval of x."""
    interval: tuple[float, float]
    """95 % interval of x."""
    expected_cost: float | None
    """Expected cost of taking x, nat per token; None if it was not told."""
    loss: tuple[float, float, float] | None
    """Expected loss at the optimum and its 95 % interval; None if it was not told."""

    @classmethod
    def parse(cls, found: Any) -> KeptPrediction:
        """Prediction from a JSON object; entries of later versions are left out.

        Raises:
            ConfigError, TypeError, KeyError, ValueError: it is none.
        """
        made = from_dict(cls, {f.name: found[f.name] for f in fields(cls)}, "prediction")
        require_valid(made)
        if found.get("checksum") != _checksum(found):
            raise ValueError(f"the prediction of {made.made_at} for {made.compared} was changed later")
        for name, values, count in (
            ("half", made.half, 2), ("interval", made.interval, 2), ("loss", made.loss, 3),
        ):  # fmt: skip
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has not {count} numbers")
        return made

    @property
    def _subject(self) -> tuple[Any, ...]:
        """Rows, rule and target; a second prediction of the same subject says the same."""
        return self.fingerprint, self.compared, self.scale_column, self.hyperparameter, self.scale


def _checksum(entry: Mapping[str, Any]) -> str:
    """Hash of an entry, by which a change made afterwards is noticed."""
    return short_hash(json.dumps({k: v for k, v in entry.items() if k != "checksum"}, sort_keys=True))


def fingerprint(trial_ids: Iterable[str]) -> str:
    """Hash of the rows that a prediction was made from."""
    return short_hash("\n".join(sorted(map(str, trial_ids))))


def load_predictions(path: str | os.PathLike[str]) -> tuple[KeptPrediction, ...]:
    """Predictions kept in a results folder, the oldest first."""
    folder = results_folder(path)
    said = f"results folder {folder} cannot be read: {FILE} is no list of predictions"
    content = read_if_there(folder, FILE, _MOST_BYTES)
    with raised_as(StoreError, said, _MISFITS):
        return () if content is None else tuple(KeptPrediction.parse(entry) for entry in json.loads(content))


def keep_predictions(path: str | os.PathLike[str], made: Sequence[KeptPrediction]) -> None:
    """Add predictions to a results folder, without those of the same rows, rule and target."""
    folder = results_folder(path)
    for _ in range(_TRIES):
        with folder.locked(LOCK):
            kept = list(load_predictions(path))
            known = {prediction._subject for prediction in kept}
            more = [prediction for prediction in made if prediction._subject not in known]
            if not more:
                return
            entries = [asdict(prediction) for prediction in [*kept, *more]]
            entries = [{**entry, "checksum": _checksum(entry)} for entry in entries]
            write_whole(folder, FILE, json.dumps(entries, indent=1).encode() + b"\n")
        if folder.is_local:
            return  # else another writer may have replaced them: look again
