"""The command that begins a study: init."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.config.paths import File
from mup_tpu.errors import ConfigError, reason

Kind = Literal["sweep", "search", "ladder", "study"]
_COMMANDS = {
    "sweep": "mup-tpu sweep {} --dry-run",
    "ladder": "mup-tpu sweep {} --dry-run",
    "search": "mup-tpu search {}",
    "study": "mup-tpu sweep {} --until-settled",
}


def init(kind: Annotated[Kind, tyro.conf.Positional] = "sweep", out: File | None = None) -> None:
    """Write a first TOML file; it runs as it is, and its comments name the choices.

    Args:
        kind: Sweep of one hyperparameter along a scale, search of several with Ray Tune, ladder: a sweep
            along a scale of several fields that grow together, or study: a sweep of your own training.
        out: The file; by default KIND.toml here. An existing file is never overwritten.
    """
    path = Path(f"{kind}.toml") if out is None else out
    text = (
        importlib.resources.files("mup_tpu").joinpath("templates", f"{kind}.toml").read_text(encoding="utf-8")
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace(f" {kind}.toml ", f" {path} "))
    except FileExistsError:
        raise ConfigError(f"out {str(path)!r} is there already: give another --out") from None
    except OSError as error:
        raise ConfigError(f"out {str(path)!r} cannot be written: {reason(error)}") from None
    Console().print(f"wrote {path}; next: {_COMMANDS[kind].format(path)}")
