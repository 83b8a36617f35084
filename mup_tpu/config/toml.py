"""Configuration from TOML and from plain nested values, every key and value checked."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mup_tpu.config.sweep import Search, Sweep
from mup_tpu.config.trial import PARTS, Trial, field_type, part_of_field
from mup_tpu.config.values import (
    TYPE_NAMES,
    as_kind,
    as_word,
    format_learning_rate,
    parse_number,
    shown,
    typed_fields,
    unknown_key,
)
from mup_tpu.errors import ConfigError, raised_as
from mup_tpu.files import MOST_BYTES_OF_CONFIG, read_local

T = TypeVar("T")


# Command that takes the file of each kind
_COMMANDS = {
    "trial": "mup-tpu train --config",
    "sweep": "mup-tpu sweep",
    "study": "mup-tpu sweep",
    "search": "mup-tpu search",
}


def kind_of(values: Collection[str]) -> str:
    """Return the kind of a TOML file by its top keys: "trial", "sweep", "search", or anyone's "study"."""
    if not _STUDY_KEYS.isdisjoint(values):
        return "study"
    if "space" in values:
        return "search"
    return "trial" if {"experiment", "scale", "tune"}.isdisjoint(values) else "sweep"


_STUDY_KEYS = {"trainer", "settings", "loss", "config", "continued"}
_NOT_OF_SWEEPS = {*_STUDY_KEYS, "space", "search"}
# Keys of a sweep of our networks, which alone has a base, and of a study
_KEYS = (
    "experiment", "scale", "measured_by", "tune", "design", "compare", "num_seeds", "target",
    "base", "trainer", "loss", "config", "settings", "continued", "space", "search",
)  # fmt: skip


def _read_kind(path: str | Path, kind: str) -> dict[str, Any]:
    values = read_toml(path)
    given = kind_of(values)
    if given not in (kind, "trial"):  # a file that lacks its experiment looks like a trial
        raise ConfigError(
            f"{path} is the file of a {given}, not of a {kind}: `{_COMMANDS[given]} {path}` takes it"
        )
    return values


def load_trial(path: str | Path) -> Trial:
    """Read a trial from a TOML file with tables [model], [data], [optimizer], [train]."""
    return from_dict(Trial, _read_kind(path, "trial"), str(path))


def read_grid(path: str | Path, kind: str) -> dict[str, Any]:
    """Read the keys of a file of a sweep of our networks, or of a study.

    Axes are `scale = {depth = [2, 4, 8]}`, `tune = {weight_decay = [0, 0.01]}`, `compare = {tied = [...]}`;
    `tune` may hold several hyperparameters, whose points `design` chooses. A scale of several names has a
    `[[scale]]` table for each point, which `measured_by` places.
    """
    values = read_toml(path) if kind == "study" else _read_kind(path, kind)
    with raised_as(ConfigError, str(path), (ConfigError,)):
        for key, value in values.items():
            if key not in _KEYS:
                hint = "; names of your own go into [settings]" if kind == "study" else ""
                raise ConfigError((not hint and _misplaced(key, "", True)) or unknown_key(key, _KEYS) + hint)
            if (key == "base" and kind == "study") or (key in _NOT_OF_SWEEPS and kind == "sweep"):
                raise ConfigError(f"{key} is not for the file of a {kind}")
            if key in _TEXTS and not isinstance(value, str):
                raise ConfigError(f"{key} {shown(value)} is not text")
        return {"experiment": Path(path).stem} | values


_TEXTS = ("experiment", "measured_by", "design", "trainer", "loss", "config", "continued")


def load_sweep(path: str | Path) -> Sweep:
    """Read a sweep from a TOML file, whose shared trial is under [base.model] and so on."""
    values = read_grid(path, "sweep")
    base = from_dict(Trial, values.pop("base", {}), f"{path}: base", "base")
    with raised_as(ConfigError, str(path), (ConfigError,)):
        return Sweep(**values, base=base)


def load_search(path: str | Path) -> Search:
    """Read a search from a TOML file: experiment, [base.model] and so on, [space.NAME] with its domain."""
    return from_dict(Search, _read_kind(path, "search"), str(path))


# Field of each axis of the command line, where its values are given alone
_DEFAULT_FIELDS = {"scale": "width", "tune": "learning_rate", "compare": "parametrization"}


def parse_axis(text: str, option: str) -> dict[str, list[Any]]:
    """Read an axis from the command line: `depth=2,4,8`, or values of width, rate or rule alone: `64,128`."""
    if "=" not in text and text not in part_of_field():
        text = f"{_DEFAULT_FIELDS[option]}={text}"
    name, values = split_axis(text, option)
    return {name: [parse_value(name, value, option) for value in values]}


def replace_axis(old: Any, text: str, option: str) -> dict[str, list[Any]]:
    """Replace the values of one name in an axis of a study; they get the type of the file's values."""
    if not isinstance(old, dict) or not all(isinstance(values, list) for values in old.values()):
        raise ConfigError(f"{option} {text}: the file has no {option} with a name's values: change it there")
    if "=" not in text and len(old) == 1:
        text = f"{next(iter(old))}={text}"
    name, values = split_axis(text, option)
    if name not in old:
        raise ConfigError(f"{option}: {unknown_key(name, old)}")

    def typed(value: str) -> Any:
        if any(isinstance(one, str) for one in old[name]):
            return value  # such as 2^-8
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        number = parse_number(value, f"{option}: {name}")
        is_whole = all(isinstance(one, int) for one in old[name]) and number % 1 == 0
        return next((one for one in old[name] if one == number), int(number) if is_whole else number)

    return {**old, name: [typed(value) for value in values]}


def split_axis(text: str, option: str) -> tuple[str, list[str]]:
    """Split `depth=2,4,8` into the name and its values; each name is the field's, or somebody's own."""
    name, _, values = text.partition("=")
    if not (written := [value for value in values.split(",") if value]):
        raise ConfigError(f"{option} {text} has no values; write for example {name.strip() or 'depth'}=2,4,8")
    return name.strip(), written


def parse_value(name: str, text: str, option: str) -> Any:
    """Read a value of a trial's field from the command line."""
    hint = field_type(name, option)
    try:
        if hint is int:
            return int(text)
        if hint is bool:
            return {"true": True, "false": False}[text.strip().lower()]
    except (ValueError, KeyError):
        raise ConfigError(f"{option}: {name} {shown(text)} is not {TYPE_NAMES[hint]}") from None
    return parse_number(text, f"{option}: {name}") if hint is float else text.strip()


def from_dict(cls: type[T], values: Any, where: str = "configuration", table: str = "") -> T:
    """Build a config dataclass from plain nested values, and check every key and value.

    Errors begin with `where`. `table` is the table of the file that holds the values, such as "base.model".
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {shown(values)} is not a table of keys")
    fields = {f.name: (f, hint) for f, hint in typed_fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"{where}: {_misplaced(key, table, 'base' in fields) or unknown_key(key, fields)}"
            )
    for f, _ in fields.values():
        has_default = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if not has_default and f.name not in values:
            raise ConfigError(f"{where}: {f.name} is missing")
    inner = {key: (f"{where}: {key}", f"{table}.{key}".strip(".")) for key in values}
    read = {key: _read(fields[key][1], value, *inner[key]) for key, value in values.items()}
    with raised_as(ConfigError, where, (ConfigError,)):
        return cls(**read)


def _misplaced(key: str, table: str, has_base: bool) -> str:
    before, _, part = table.rpartition(".")
    outer = before if part in PARTS else table or ("base" if has_base else "")
    if home := part_of_field().get(key):
        return f"{key} belongs to [{f'{outer}.{home}'.strip('.')}]" + (f", not to [{table}]" if table else "")
    if part in PARTS and outer and key in _KEYS:
        return f"{key} belongs to the top of the file, above the first [table]"
    return ""


def _read(hint: Any, value: Any, where: str, table: str = "") -> Any:
    """Convert a plain value into a field's type: tables become dataclasses, lists tuples, powers floats.

    A value that cannot be of the type stays as it is, and a later check refuses it.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, where, table)
    if origin in (typing.Union, types.UnionType):  # T | None
        return _read(next(kind for kind in inner if kind is not type(None)), value, where, table)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _read(inner[1], item, f"{where}: {as_word(key)}") for key, item in value.items()}
    return as_kind(hint, value, where)


def read_toml(path: str | Path) -> dict[str, Any]:
    with raised_as(ConfigError, f"configuration {path} cannot be read"):
        content = read_local(path, MOST_BYTES_OF_CONFIG)
    with raised_as(ConfigError, f"configuration {path} is not valid TOML", (ValueError, RecursionError)):
        return tomllib.loads(content.decode("utf-8").replace("\r\n", "\n"))


def write_sweep(sweep: Sweep) -> str:
    """Write a sweep as TOML for `load_sweep`; fields at their defaults are left out."""
    keys: dict[str, Any] = {"experiment": sweep.experiment, "num_seeds": sweep.num_seeds}
    keys |= {n: value for n in ("measured_by", "design") if (value := getattr(sweep, n)) is not None}
    if sweep.scale is not None:
        keys["scale"] = sweep.points
    if sweep.tune is not None:
        keys["tune"] = {name: [_power(name, v) for v in values] for name, values in sweep.tuned.items()}
    if sweep.compare is not None:
        keys["compare"] = {name: [point[name] for point in sweep.compared] for name in sweep.compared[0]}
    return f"{write_grid(keys)}{write_trial(sweep.base, 'base.')}"


def _power(name: str, value: float) -> float | str:
    text = format_learning_rate(value) if name == "learning_rate" else ""
    return text if text and parse_number(text) == value else value  # a power, where that is exact


def write_grid(keys: Mapping[str, Any]) -> str:
    """Write keys of a file of `read_grid`, the points of a scale of several names as [[scale]] tables."""
    keys, tables = dict(keys), ""
    if (points := keys.get("scale")) and len(points[0]) > 1:
        del keys["scale"]
        tables = "".join(f"\n[[scale]]\n{write_values(point)}" for point in points)
    elif points:
        keys["scale"] = {name: [point[name] for point in points] for name in points[0]}
    return write_values(keys) + tables


def write_trial(trial: Trial, above: str = "") -> str:
    """Write a trial as TOML for `load_trial`; `above` begins the names of its tables."""
    lines = list[str]()
    for part, cls in PARTS.items():
        values, defaults = vars(getattr(trial, part)), vars(cls())
        changed = [f"{name} = {_toml(value)}" for name, value in values.items() if value != defaults[name]]
        lines += ["", f"[{above}{part}]", *changed] if changed else []
    return "".join(f"{line}\n" for line in lines)


def write_values(values: Mapping[str, Any]) -> str:
    return "".join(f"{_key(name)} = {_toml(value)}\n" for name, value in values.items())


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False)


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {_toml(one)}' for name, one in value.items())}}}"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)
