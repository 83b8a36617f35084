"""The command that begins a study: init."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.cli.output import write_new
from mup_tpu.config.paths import File

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
    template = importlib.resources.files("mup_tpu").joinpath("templates", f"{kind}.toml")
    text = template.read_text(encoding="utf-8")
    write_new(path, text.replace(f" {kind}.toml ", f" {path} "))
    Console().print(f"wrote {path}; next: {_COMMANDS[kind].format(path)}")
