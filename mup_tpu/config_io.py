"""Configuration from TOML and from plain nested values, every key and type checked."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from mup_tpu.config import Sweep, Trial, parse_learning_rate, unknown_key
from mup_tpu.errors import ConfigError

T = TypeVar("T")


def load_trial(path: str | Path) -> Trial:
    """A trial from a TOML file with tables [model], [data], [optimizer], [train].

    Raises:
        ConfigError: no such file, not TOML, an unknown key or a value that is not allowed.
    """
    return from_dict(Trial, read_toml(path), str(path))


def load_sweep(path: str | Path) -> Sweep:
    """A sweep from a TOML file: its own keys at the top, the shared trial under [base.model] and so on.

    Raises:
        ConfigError: as `load_trial`.
    """
    return from_dict(Sweep, read_toml(path), str(path))


def from_dict(cls: type[T], values: dict[str, Any], where: str = "configuration") -> T:
    """A config dataclass from plain nested values, checked.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a wrong type or a value not allowed.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {values!r} is not a table of keys")
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ConfigError(f"{where}: {unknown_key(key, hints)}")
    try:
        return cls(**{key: _convert(hints[key], value, f"{where}: {key}") for key, value in values.items()})
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the field type `hint`, or a ConfigError that starts with `where`."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, where)
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} {value!r} is not a list")
        return tuple(_convert(typing.get_args(hint)[0], item, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} {value!r} is not a table of keys")
        inner = typing.get_args(hint)[1]
        return {key: _convert(inner, item, f"{where}: {key}") for key, item in value.items()}
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(
                f"{where} {value!r} is not one of {', '.join(map(repr, typing.get_args(hint)))}"
            )
        return value
    if hint is float:
        if isinstance(value, bool):
            raise ConfigError(f"{where} {value!r} is not a number")
        return _number(value, where)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} {value!r} is not {_TYPE_NAMES.get(hint, hint.__name__)}")
    return value


_TYPE_NAMES = {int: "a whole number", str: "text", bool: "true or false"}


def _number(value: Any, where: str) -> float:
    if isinstance(value, str) and "learning_rate" in where:
        return parse_learning_rate(value)
    if not isinstance(value, int | float):
        raise ConfigError(f"{where} {value!r} is not a number")
    return float(value)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not valid TOML: {error}") from None
