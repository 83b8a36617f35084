"""Configuration from TOML and from plain nested values, every key and value checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mup_tpu.config.sweep import Axis, Design, Ladder, Search, Sweep
from mup_tpu.config.trial import PARTS, Trial, part_of_field
from mup_tpu.config.values import (
    TYPE_NAMES,
    as_word,
    format_learning_rate,
    parse_number,
    require_value,
    shown,
    typed_fields,
    unknown_key,
)
from mup_tpu.errors import ConfigError, raised_as
from mup_tpu.files import read_local

T = TypeVar("T")

MOST_BYTES = 2**20  # largest TOML file that is read

# Most dots in a key: Python's parser needs memory that grows with the square of a key's parts
MOST_DOTS = 100


# Command that takes the file of each kind
_COMMANDS = {
    "trial": "mup-tpu train --config",
    "sweep": "mup-tpu sweep",
    "study": "mup-tpu sweep",
    "search": "mup-tpu search",
}


def kind_of(values: Collection[str]) -> str:
    """Return the kind of a TOML file by its top keys: "trial", "sweep", "study" or "search"."""
    if "space" in values:
        return "search"
    if not _STUDY_KEYS.isdisjoint(values):
        return "study"
    return "sweep" if "experiment" in values else "trial"


_STUDY_KEYS = {"trainer", "settings", "loss", "config"}


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


def load_sweep(path: str | Path) -> Sweep:
    """Read a sweep from a TOML file: its keys at the top, the shared trial under [base.model] and so on.

    Axes are `scale = {depth = [2, 4, 8]}`, `tune = {weight_decay = [0, 0.01]}`, `compare = {tied = [...]}`;
    `tune` may hold several hyperparameters, whose points `design` chooses. A ladder is a `[[ladder]]` table
    for each point, with `measured_by` at the top.
    """
    return sweep_of(_read_kind(path, "sweep"), str(path))


def load_search(path: str | Path) -> Search:
    """Read a search from a TOML file: experiment, [base.model] and so on, [space.NAME] with its domain."""
    return from_dict(Search, _read_kind(path, "search"), str(path))


def sweep_of(values: dict[str, Any], where: str) -> Sweep:
    """Read a sweep from the values of a TOML file."""
    values = dict(values)
    values.pop("target", None)  # of a plan (`tuning.plan.planned_of`)
    points, measured_by, design = (values.pop(name, None) for name in ("ladder", "measured_by", "design"))
    given = {name: values.pop(name) for name in ("scale", "tune", "compare") if name in values}
    sweep = from_dict(Sweep, values, where)
    with _named(where):
        axes: dict[str, Any] = {}
        if isinstance(tuned := given.get("tune"), dict) and len(tuned) > 1:
            each = tuple(_axis({name: value}, "tune") for name, value in given.pop("tune").items())
            axes["tune"] = Design(each) if design is None else Design(each, design)
        elif design is not None:
            raise ConfigError(f"design {shown(design)} needs a tune with several hyperparameters")
        axes |= {name: _axis(value, name) for name, value in given.items()}
        if points is not None:
            if "scale" in axes:
                raise ConfigError("scale and ladder were both given: a sweep grows along one")
            if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
                raise ConfigError(
                    f"ladder {shown(points)} is not tables of fields: write [[ladder]] above each point"
                )
            read = tuple({n: _point(n, value, "ladder") for n, value in p.items()} for p in points)
            axes["scale"] = Ladder(read) if measured_by is None else Ladder(read, measured_by)
        elif measured_by is not None:
            raise ConfigError(f"measured_by {shown(measured_by)} needs a [[ladder]]")
        return dataclasses.replace(sweep, **axes)


# Field of each axis of the command line, where its values are given alone
_DEFAULT_FIELDS = {"scale": "width", "tune": "learning_rate", "compare": "parametrization"}


def parse_axis(text: str, option: str) -> Axis:
    """Read an axis from the command line: `depth=2,4,8`, or values of width, rate or rule alone: `64,128`."""
    if "=" not in text and text not in part_of_field():
        text = f"{_DEFAULT_FIELDS[option]}={text}"
    name, values = split_axis(text, option)
    return _axis({name: [parse_value(name, value, option) for value in values]}, option)


def split_axis(text: str, option: str) -> tuple[str, list[str]]:
    """Split `depth=2,4,8` into the name and its values; each name is the field's, or somebody's own."""
    name, _, values = text.partition("=")
    if not (written := [value for value in values.split(",") if value]):
        raise ConfigError(f"{option} {text} has no values; write for example {name.strip() or 'depth'}=2,4,8")
    return name.strip(), written


def parse_value(name: str, text: str, option: str) -> Any:
    """Read a value of a trial's field from the command line."""
    hint = _field_hint(name, option)
    try:
        if hint is int:
            return int(text)
        if hint is bool:
            return {"true": True, "false": False}[text.strip().lower()]
    except (ValueError, KeyError):
        raise ConfigError(f"{option}: {name} {shown(text)} is not {TYPE_NAMES[hint]}") from None
    return parse_number(text, f"{option}: {name}") if hint is float else text.strip()


def _field_hint(name: str, where: str) -> Any:
    hints = {f.name: hint for part in PARTS.values() for f, hint in typed_fields(part)}
    if name not in hints:
        raise ConfigError(f"{where}: {unknown_key(name, hints)}")
    return hints[name]


def _axis(values: Any, where: str) -> Axis:
    if not isinstance(values, dict) or len(values) != 1:
        raise ConfigError(
            f"{where} {shown(values)} is not one field with its values, such as {{depth = [2, 4, 8]}}; "
            "fields that change together are a [[ladder]]"
        )
    ((name, points),) = values.items()
    _field_hint(name, where)
    if not isinstance(points, list):
        raise ConfigError(f"{where}: {name} {shown(points)} is not a list")
    return Axis(name, tuple(_point(name, value, where) for value in points))


def _point(name: str, value: Any, where: str) -> Any:
    hint = _field_hint(name, where)
    read = _read(hint, value, f"{where}: {name}")
    require_value(f"{where}: {name}", read, hint)
    return read


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
    read = {
        key: _read(fields[key][1], value, f"{where}: {key}", f"{table}.{key}".strip("."))
        for key, value in values.items()
    }
    with _named(where):
        return cls(**read)


def _misplaced(key: str, table: str, has_base: bool) -> str:
    """Return a sentence on a key that belongs to another table; "" if no table has it."""
    before, _, part = table.rpartition(".")
    outer = before if part in PARTS else table or ("base" if has_base else "")
    if home := part_of_field().get(key):
        return f"{key} belongs to [{f'{outer}.{home}'.strip('.')}]" + (f", not to [{table}]" if table else "")
    if part in PARTS and outer and key in {f.name for f, _ in typed_fields(Sweep)}:
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
    if hint is float and isinstance(value, str):
        return parse_number(value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    return value


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the values of a TOML file."""
    with raised_as(ConfigError, f"configuration {path} cannot be read"):
        content = read_local(path, MOST_BYTES)
    with raised_as(ConfigError, f"configuration {path} is not valid TOML", (ValueError, RecursionError)):
        text = content.decode("utf-8").replace("\r\n", "\n")
        # Before tomllib, which takes memory by the square of a key's parts.
        words = re.split(r"[\n=,\[\]{}#]+", text.replace(" ", "").replace("\t", ""))
        if any(
            word.count(".") > MOST_DOTS and len(re.findall(r"[^.]\.", word)) > MOST_DOTS for word in words
        ):
            raise ValueError(f"it has a key of over {MOST_DOTS} parts")
        return tomllib.loads(text)


def write_sweep(sweep: Sweep) -> str:
    """Write a sweep as TOML for `load_sweep`; fields at their defaults are left out."""
    lines = [f"experiment = {_toml(sweep.experiment)}", f"num_seeds = {sweep.num_seeds}"]
    for name in ("parametrizations", "widths", "learning_rates"):
        if (values := getattr(sweep, name)) is not None:
            if name == "learning_rates":  # as powers, where they are exact
                powers = [(value, format_learning_rate(value)) for value in values]
                values = tuple(text if parse_number(text) == value else value for value, text in powers)
            lines.append(f"{name} = {_toml(values)}")
    for name in ("scale", "tune", "compare"):
        if isinstance(axis := getattr(sweep, name), Axis):
            lines.append(f"{name} = {{{axis.field} = {_toml(axis.values)}}}")
    if isinstance(sweep.tune, Design):
        lines.append(f"tune = {_toml({axis.field: axis.values for axis in sweep.tune.axes})}")
        lines.append(f"design = {_toml(sweep.tune.kind)}")
    if isinstance(sweep.scale, Ladder):
        lines.append(f"measured_by = {_toml(sweep.scale.measured_by)}")
        for point in sweep.scale.points:
            lines += ["", "[[ladder]]", *(f"{name} = {_toml(value)}" for name, value in point.items())]
    return "\n".join(lines) + "\n" + write_trial(sweep.base, "base.")


def write_trial(trial: Trial, above: str = "") -> str:
    """Write a trial as TOML for `load_trial`; `above` begins the names of its tables."""
    lines = list[str]()
    for part, cls in PARTS.items():
        values, defaults = vars(getattr(trial, part)), vars(cls())
        changed = [f"{name} = {_toml(value)}" for name, value in values.items() if value != defaults[name]]
        lines += ["", f"[{above}{part}]", *changed] if changed else []
    return "".join(f"{line}\n" for line in lines)


def write_values(values: Mapping[str, Any]) -> str:
    """Write keys with their values as TOML, a line each; tables within them in braces."""
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
