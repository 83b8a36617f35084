"""Studies described in TOML files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_tpu.config import parse_number, unknown_key
from mup_tpu.config.toml import read_toml
from mup_tpu.errors import ConfigError
from mup_tpu.study.study import Study

_KEYS = (
    "experiment", "trainer", "scale", "ladder", "measured_by", "tune", "compare", "num_seeds", "settings",
)  # fmt: skip


def load_study(path: str | Path, results: str | None = None) -> tuple[Study, str | None]:
    """Study of a TOML file, and the trainer that it names.

    Args:
        path: file with experiment, scale (or [[ladder]] tables), tune, compare, num_seeds and [settings].
        results: results folder or fsspec URL; by default results/EXPERIMENT.

    Raises:
        ConfigError: no such file, not TOML, an unknown key, or a name or value that is not allowed.
    """
    held = read_toml(path)
    try:
        for key in held:
            if key not in _KEYS:
                raise ConfigError(f"{unknown_key(key, _KEYS)}; names of your own go into [settings]")
        if ("scale" in held) == ("ladder" in held):
            raise ConfigError("scale and [[ladder]]: give one of them")
        for key in ("experiment", "tune"):
            if key not in held:
                raise ConfigError(f"{key} is missing")
        trainer = held.get("trainer")
        for key in ("experiment", "trainer", "measured_by"):
            if key in held and not isinstance(held[key], str):
                raise ConfigError(f"{key} {held[key]!r} is not text")
        study = Study(
            results or f"results/{held['experiment']}",
            name=held["experiment"],
            scale=_with_numbers(held.get("scale", held.get("ladder"))),
            tune=_with_numbers(held["tune"]),
            compare=held.get("compare"),
            seeds=held.get("num_seeds", 1),
            settings=held.get("settings"),
            measured_by=held.get("measured_by"),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return study, trainer


def _with_numbers(axis: Any) -> Any:
    """Values of an axis with numbers in place of text such as "2^-8"."""
    if not isinstance(axis, Mapping):
        return axis
    return {
        name: [parse_number(value) if isinstance(value, str) else value for value in values]
        if isinstance(values, list)
        else values
        for name, values in axis.items()
    }
