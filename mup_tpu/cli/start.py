"""The command that begins a study: init."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mup_tpu.cli.console import console as make_console
from mup_tpu.errors import ConfigError, reason

Kind = Literal["sweep", "search", "ladder"]
_COMMANDS = {
    "sweep": "mup-tpu sweep {} --dry-run",
    "ladder": "mup-tpu sweep {} --dry-run",
    "search": "mup-tpu search {}",
}


def init(kind: Annotated[Kind, tyro.conf.Positional] = "sweep", out: Path | None = None) -> None:
    """Write a TOML file to begin with, which runs as it is and says what there is to change.

    Args:
        kind: A sweep of one hyperparameter along a scale, a search of several with Ray Tune, or a ladder, a
            sweep along which several fields grow together.
        out: The file; by default KIND.toml here. One that is there is never overwritten.
    """
    path = Path(f"{kind}.toml") if out is None else out
    text = importlib.resources.files("mup_tpu").joinpath("templates", f"{kind}.toml").read_text()
    try:
        with path.open("x") as file:
            file.write(text.replace(f" {kind}.toml ", f" {path} "))
    except FileExistsError:
        raise ConfigError(f"out {str(path)!r} is there already: give another --out") from None
    except OSError as error:
        raise ConfigError(f"out {str(path)!r} cannot be written: {reason(error)}") from None
    console = make_console()
    console.print(f"wrote {path}; next: {_COMMANDS[kind].format(path)}", highlight=False, soft_wrap=True)
