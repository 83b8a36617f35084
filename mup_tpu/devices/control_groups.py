"""Memory that Linux's control groups leave: containers, batch systems and systemd set their limits there.

A process is in a group of each hierarchy, and every group from it up to the root may have a limit. Both
versions are read: version 2, and version 1's controller `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_OF_VERSION = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    "cgroup": (
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
    ),
}  # fmt: skip
"""Type of file system -> files of limits, file of the memory in use, entries of `memory.stat` for the cache
of files. The cache counts as used, but is given up when memory is asked for."""


def free_bytes(process: Path = Path("/proc/self")) -> float:
    """Least memory left under any limit from a process's groups up to the root; inf without one."""
    return min((_left(group, kind) for group, kind in _groups(process)), default=float("inf"))


def _groups(process: Path) -> Iterator[tuple[Path, str]]:
    """Folders of a process's groups and of all above them, each with its type of file system."""
    try:
        own = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return
    paths = {}
    for number, controllers, path in own:
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for fields in mounts:
        root, at, kind = fields[3], Path(fields[4]), fields[fields.index("-") + 1]
        if kind not in paths or (kind == "cgroup" and "memory" not in fields[-1].split(",")):
            continue
        own_path = PurePosixPath(paths[kind])
        # A container may see its own group alone, mounted as if it were the root.
        below = own_path.relative_to(root) if own_path.is_relative_to(root) else PurePosixPath()
        if ".." not in below.parts:
            yield from ((at / part, kind) for part in (below, *below.parents))


def _left(group: Path, kind: str) -> float:
    limits, used, cache = _OF_VERSION[kind]
    limit = min(_number(group / name) for name in limits)
    if limit == float("inf"):
        return limit
    in_cache = 0.0
    for line in _text(group / "memory.stat").splitlines():
        name, _, size = line.partition(" ")
        if name in cache and size.isdigit():
            in_cache += int(size)
    in_use = _text(group / used).strip()
    return max(0.0, limit - max(0.0, int(in_use) - in_cache)) if in_use.isdigit() else limit


def _number(file: Path) -> float:
    """A limit; inf if the file is not there, or says "max"."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else float("inf")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
