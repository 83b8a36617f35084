"""Configuration from TOML and from plain nested values, every key and type checked."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from mup_tpu.config import (
    PARTS,
    TYPE_NAMES,
    Axis,
    Ladder,
    Sweep,
    Trial,
    as_word,
    current_names,
    parse_learning_rate,
    shown,
    unknown_key,
)
from mup_tpu.errors import ConfigError, reason

T = TypeVar("T")


def load_trial(path: str | Path) -> Trial:
    """A trial from a TOML file with tables [model], [data], [optimizer], [train].

    Raises:
        ConfigError: no such file, not TOML, an unknown key or a value that is not allowed.
    """
    return from_dict(Trial, read_toml(path), str(path))


def load_sweep(path: str | Path) -> Sweep:
    """A sweep from a TOML file: its own keys at the top, the shared trial under [base.model] and so on.

    Axes are `scale = {depth = [2, 4, 8]}`, `tune = {weight_decay = [0, 0.01]}`, `compare = {tied = [...]}`; a
    ladder is a `[[ladder]]` table for each point, with `measured_by` at the top.

    Raises:
        ConfigError: as `load_trial`.
    """
    values = read_toml(path)
    points, measured_by = values.pop("ladder", None), values.pop("measured_by", None)
    own = {name: values.pop(name) for name in ("scale", "tune", "compare") if name in values}
    sweep = from_dict(Sweep, values, str(path))
    try:
        axes: dict[str, Any] = {name: _axis(value, name) for name, value in own.items()}
        if points is not None:
            if "scale" in axes:
                raise ConfigError("scale and ladder were both given: a sweep grows along one")
            axes["scale"] = _ladder(points, measured_by)
        elif measured_by is not None:
            raise ConfigError(f"measured_by {shown(measured_by)} is that of a ladder, and there is none")
        return dataclasses.replace(sweep, **axes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_axis(text: str, option: str) -> Axis:
    """An axis from the command line: `depth=2,4,8`, `weight_decay=0,0.01`, `learning_rate=2^-9,2^-8`.

    Args:
        text: what was given.
        option: the option, to name in errors.

    Raises:
        ConfigError: it is not FIELD=VALUE,VALUE..., or a value is not of the field's type.
    """
    name, found, values = text.partition("=")
    if not found:
        raise ConfigError(
            f"{option} {shown(text)} is not FIELD=VALUE,VALUE,...; write for example depth=2,4,8"
        )
    return _axis(
        {name.strip(): [parse_value(name.strip(), v, option) for v in values.split(",") if v]}, option
    )


def parse_value(name: str, text: str, option: str) -> Any:
    """A value of a trial's field from the command line."""
    hint = _field_hint(name, option)
    try:
        if hint is int:
            return int(text)
        if hint is bool:
            return {"true": True, "false": False}[text.strip().lower()]
    except (ValueError, KeyError):
        raise ConfigError(f"{option}: {name} {shown(text)} is not {TYPE_NAMES[hint]}") from None
    return _plain_number(text, f"{option}: {name}") if hint is float else text.strip()


def _field_hint(name: str, where: str) -> Any:
    """Type of a trial's field."""
    hints = {key: hint for part in PARTS.values() for key, hint in typing.get_type_hints(part).items()}
    if name not in hints:
        raise ConfigError(f"{where}: {unknown_key(name, hints)}")
    return hints[name]


def _axis(values: Any, where: str) -> Axis:
    if not isinstance(values, dict) or len(values) != 1:
        raise ConfigError(
            f"{where} {shown(values)} is not one field with its values, such as {{depth = [2, 4, 8]}}; "
            "fields that change together are a [[ladder]]"
        )
    ((given, points),) = values.items()
    name = current_names().get(given) or given
    hint = _field_hint(name, where)
    if not isinstance(points, list):
        raise ConfigError(f"{where}: {name} {shown(points)} is not a list")
    return Axis(name, tuple(_point(hint, value, f"{where}: {name}") for value in points))


def _ladder(points: Any, measured_by: Any) -> Ladder:
    where = "ladder"
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise ConfigError(
            f"{where} {shown(points)} is not tables of fields: write [[ladder]] above each point"
        )
    converted = tuple(
        {name: _point(_field_hint(name, where), value, f"{where}: {name}") for name, value in point.items()}
        for point in points
    )
    return Ladder(converted) if measured_by is None else Ladder(converted, measured_by)


def _point(hint: Any, value: Any, where: str) -> Any:
    """A value of a field; numbers may be written 2^-8."""
    return _plain_number(value, where) if hint is float else _convert(hint, value, where)


def _plain_number(value: Any, where: str) -> float:
    if isinstance(value, bool):
        raise ConfigError(f"{where} {shown(value)} is not a number")
    try:
        return parse_learning_rate(value)
    except ConfigError:
        raise ConfigError(
            f"{where} {shown(value)} is not a number; write 0.00390625, 3.9e-3 or 2^-8"
        ) from None


def from_dict(cls: type[T], values: dict[str, Any], where: str = "configuration") -> T:
    """A config dataclass from plain nested values, checked.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a wrong type or a value not allowed.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {shown(values)} is not a table of keys")
    hints = typing.get_type_hints(cls)
    if cls in PARTS.values():
        for former, name in current_names().items():
            if former in values and name in values:
                raise ConfigError(
                    f"{where}: {former} and {name} were both given: {former} is its former name"
                )
        values = {current_names().get(key, key): value for key, value in values.items()}
    for key in values:
        if key not in hints:
            raise ConfigError(f"{where}: {unknown_key(key, hints)}")
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if not has_default and f.name not in values:
            raise ConfigError(f"{where}: {f.name} is missing")
    return cls(**{key: _convert(hints[key], value, f"{where}: {key}") for key, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the field type `hint`, or a ConfigError that starts with `where`."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, where)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):  # T | None
        (hint,) = (inner for inner in typing.get_args(hint) if inner is not type(None))
        return _convert(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} {shown(value)} is not a list")
        return tuple(_convert(typing.get_args(hint)[0], item, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} {shown(value)} is not a table of keys")
        inner = typing.get_args(hint)[1]
        return {key: _convert(inner, item, f"{where}: {as_word(key)}") for key, item in value.items()}
    if origin is Literal:
        if not isinstance(value, str) or value not in typing.get_args(hint):
            raise ConfigError(
                f"{where} {shown(value)} is not one of {', '.join(map(repr, typing.get_args(hint)))}"
            )
        return value
    if hint is float:
        if isinstance(value, bool):
            raise ConfigError(f"{where} {shown(value)} is not a number")
        return _number(value, where)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} {shown(value)} is not {TYPE_NAMES.get(hint, hint.__name__)}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, str) and "learning_rate" in where:
        return parse_learning_rate(value)
    if not isinstance(value, int | float):
        raise ConfigError(f"{where} {shown(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where} {shown(value)} is not allowed: it must be a finite number") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration {path} is not valid TOML: {reason(error)}") from None
