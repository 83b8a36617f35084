"""Configuration files of training programs: YAML, TOML or JSON, copied with the values of a trial."""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mup_tpu.config import shown
from mup_tpu.errors import ConfigError, raised_as
from mup_tpu.files import MOST_BYTES_OF_CONFIG, read_local


class ConfigFile:
    """A configuration in a file, to be copied with other values under dotted names such as `optim.lr`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._content, self._suffix = b"", Path(path).suffix.lower()
        if self._suffix not in _FORMATS:
            raise ConfigError(f"config {path!r} is not a file *.yaml, *.yml, *.toml or *.json")
        with raised_as(ConfigError, f"config {path} cannot be read"):
            self._content = read_local(path, MOST_BYTES_OF_CONFIG)
        if not isinstance(self._read(), Mapping):
            raise ConfigError(f"config {path} holds no names with values")

    def _read(self) -> Any:
        with raised_as(
            ConfigError, f"config {self.path} cannot be read", (ValueError, YAMLError, RecursionError)
        ):
            return _FORMATS[self._suffix][0](self._content.decode("utf-8-sig"))

    def has(self, name: str) -> bool:
        part = self._read()
        for key in name.split("."):
            if not isinstance(part, Mapping) or key not in part:
                return False
            part = part[key]
        return True

    def write(self, target: Path, values: Mapping[str, Any]) -> None:
        """Write a copy with the values under their names; a part of a name may be the index of a list."""
        content = self._read()
        for name, value in values.items():
            part, (*parents, last) = content, name.split(".")
            for key in parents:
                place = self._place(part, key, name)
                if isinstance(part, dict) and part.get(place) is None:
                    part[place] = {}
                part = part[place]
            part[self._place(part, last, name)] = value
        target.write_text(_FORMATS[self._suffix][1](content), encoding="utf-8")

    def _place(self, part: Any, key: str, name: str) -> str | int:
        if isinstance(part, list) and key.isdigit() and int(key) < len(part):
            return int(key)
        if isinstance(part, dict):
            return key
        raise ConfigError(f"config {self.path}: {name} cannot be set in {shown(part)}")


def _yaml() -> YAML:
    yaml = YAML(pure=True)  # keeps comments, order, and numbers as they were written
    yaml.preserve_quotes = True
    yaml.width = 2**20  # columns: no line is broken
    # Loaders of YAML 1.1 read `1e-05` as text.
    yaml.representer.add_representer(float, _as_float)
    return yaml


def _as_float(representer: Any, value: float) -> Any:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


def _write_yaml(content: Any) -> str:
    with io.StringIO() as file:
        _yaml().dump(content, file)
        return file.getvalue()


_FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".yaml": (lambda text: _yaml().load(text), _write_yaml),
    ".yml": (lambda text: _yaml().load(text), _write_yaml),
    ".toml": (tomllib.loads, tomli_w.dumps),
    ".json": (json.loads, lambda content: json.dumps(content, indent=2)),
}
