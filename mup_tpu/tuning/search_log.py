"""Log of a search, beside the store: proposals and their ends.

In a local folder the log is search.jsonl, a line for each event. In a bucket, where nothing can be appended,
it is search/00000000.json and so on, an object for each event.

A resumed search replays the log into a new algorithm with the same seed. Tune's own state on disk is never
read: it is pickled.
"""

from __future__ import annotations

import json
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mup_tpu.config.options import SearchOptions
from mup_tpu.config.sweep import Search
from mup_tpu.config.toml import stored_trial
from mup_tpu.config.values import shown
from mup_tpu.errors import ConfigError, StoreError, raised_as, reason
from mup_tpu.files import Folder, open_own, patiently
from mup_tpu.store import LOG_FILE, LOG_OBJECTS

_AT_ONCE = 16  # objects of a log to read in parallel


class SearchLog:
    """Proposals and their ends; each event is written to the disk or bucket at once."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._writer = folder, uuid.uuid4().hex
        self.events: list[dict[str, Any]] = []
        self.error: StoreError | None = None
        """Error after which nothing can be added."""
        self._in_line = False
        """Whether a local log ends within a line, as after a kill."""
        self.path = f"{folder}/{LOG_FILE if folder.is_local else LOG_OBJECTS}"
        misfits = (OSError, ValueError, RecursionError)
        with raised_as(StoreError, f"search log {self.path} cannot be read", misfits):
            self._read_file() if folder.is_local else self._read_objects()
        self.proposals: dict[int, dict[str, float]] = {
            e["key"]: e["point"] for e in self.events if e["event"] == "proposed"
        }
        # An end whose proposal's line is torn tells nothing.
        self.events = [e for e in self.events if e["event"] != "ended" or e["key"] in self.proposals]
        self.ended: set[int] = {e["key"] for e in self.events if e["event"] == "ended"}

    def _read_file(self) -> None:
        path = Path(self.path)
        text = path.read_bytes() if path.exists() else b""
        self._in_line = not text.endswith(b"\n") if text else False
        for number, line in enumerate(text.splitlines(), 1):
            try:
                event = json.loads(line)
            except ValueError:
                warnings.warn(f"line {number} of {path} is torn, as by a kill: left out", stacklevel=3)
                continue
            self._take(event, f"line {number}")

    def _read_objects(self) -> None:
        objects = self._folder / LOG_OBJECTS
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            names = objects.names()
            for name, content in zip(names, pool.map(objects.read, names), strict=True):
                self._take(json.loads(content), name)

    def _take(self, event: Any, where: str) -> None:
        if not _is_event(event):
            raise ValueError(f"{where} is no event of a search: {shown(event)}")
        self.events.append(event)

    def begin(self, search: Search, options: SearchOptions) -> None:
        """Log the space and the algorithm of a search, or compare them with the log."""
        for key, point in self.proposals.items():
            if set(point) != set(search.space):
                raise StoreError(
                    f"search log {self.path} cannot be read: proposal {key} does not give "
                    f"{', '.join(search.space)}"
                )
        space = {name: asdict(domain) for name, domain in search.space.items()}
        identity: dict[str, Any] = {"space": space, "algorithm": options.algorithm, "seed": options.seed}
        identity["base"] = search.base.to_dict()
        begun = next((e for e in self.events if e["event"] == "begun"), None)
        if begun is None:
            self._add({"event": "begun", **identity})
            return
        misfits = (ConfigError, TypeError, ValueError, AttributeError, KeyError)
        with raised_as(StoreError, f"search log {self.path} cannot be read: its base", misfits):
            base = stored_trial(begun["base"]).to_dict()  # new fields have their defaults
        begun = begun | {"base": base}
        for name, value in identity.items():
            if begun[name] != json.loads(json.dumps(value)):
                raise ConfigError(
                    f"{name} of the search differs from {self.path}; a search is resumed as it was begun"
                )

    def propose(self, point: dict[str, float]) -> int:
        """Log a new proposal; return its number."""
        key = len(self.proposals)
        self.proposals[key] = point
        self._add({"event": "proposed", "key": key, "point": point})
        return key

    def end(self, key: int, loss: float) -> None:
        self.ended.add(key)
        self._add({"event": "ended", "key": key, "loss": loss})

    def _add(self, event: dict[str, Any]) -> None:
        try:
            if self._folder.is_local:
                with open_own(self.path) as file:
                    file.write(("\n" if self._in_line else "") + json.dumps(event) + "\n")
                self._in_line = False
            else:
                self._create({**event, "writer": self._writer})
        except OSError as error:
            self.error = StoreError(f"search log {self.path} cannot be written: {reason(error)}")
        if self.error:
            raise self.error
        self.events.append(event)

    def _create(self, event: dict[str, Any]) -> None:
        """Write the next object; refuse if another search has written it."""
        name = f"{LOG_OBJECTS}/{len(self.events):08}.json"
        try:
            patiently(lambda: self._folder.create(name, json.dumps(event).encode()))
        except OSError as error:
            try:
                written = json.loads(self._folder.read(name))
            except FileNotFoundError:
                raise error from None
            if written["writer"] != self._writer:
                self.error = StoreError(
                    f"results folder {self._folder} is being written by another search; wait for it, "
                    "or stop it"
                )


def _is_event(event: Any) -> bool:
    match event:
        case {"event": "begun", "space": dict(), "algorithm": str(), "seed": int(), "base": dict()}:
            return True
        case {"event": "proposed", "key": int(), "point": dict(point)}:
            return all(type(value) in (int, float) for value in point.values())
        case {"event": "ended", "key": int(), "loss": int() | float()}:
            return True
    return False
