"""Types of options: files and folders (an empty name is refused), and lists of names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from mup_tpu.errors import ConfigError


def _named(kind: type) -> Any:
    """Reader of a path for tyro."""

    def read(tokens: list[str]) -> Any:
        if not tokens[0]:
            raise ConfigError("a path '' is not allowed: it must name a file or folder")
        if kind is Path and "://" in tokens[0]:
            raise ConfigError(f"a path {tokens[0]!r} is not allowed: it must be local, not a URL")
        return kind(tokens[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


Folder = Annotated[str, _named(str)]
"""Local folder or file, or its fsspec URL."""

File = Annotated[Path, _named(Path)]
"""Local file or folder."""

Where = Annotated[Folder, tyro.conf.Positional]
"""Positional path."""

Several = Annotated[tuple[Folder, ...], tyro.conf.Positional]
"""Positional paths, one at least."""

Names = Annotated[
    tuple[str, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME,NAME",
        instance_from_str=lambda tokens: tuple(name for name in tokens[0].split(",") if name),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(value)],
    ),
]
"""Names with commas between them."""
