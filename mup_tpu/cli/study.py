"""Commands about studies: a sweep of somebody's own training, ask and tell."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from mup_tpu.cli.console import Console
from mup_tpu.cli.replay import where_
from mup_tpu.config.paths import Where
from mup_tpu.config.values import as_number, parse_seconds
from mup_tpu.errors import ConfigError

if TYPE_CHECKING:
    from mup_tpu.study import Study


@dataclass(frozen=True)
class StudyOptions:
    """Options of a training of one's own."""

    trainer: str | None = None
    """Own training in place of our networks: my_package.my_module:train, or a command line with {names} of
    the file, which prints the loss last; by default the file's trainer."""
    workers: int | None = None
    """Trials of a --trainer at once on this machine; by default one a GPU, or one a core."""
    timeout: str | None = None
    """Longest time of a trial of a --trainer, as 90s, 30m or 2h; a longer one has failed."""
    resources: tuple[str, ...] = ()
    """Ray's resources for a trial of a --trainer: CPU=2 GPU=1."""

    def amounts(self) -> dict[str, float] | None:
        """Resources as numbers; None if none are given."""
        amounts = {}
        for text in self.resources:
            name, _, written = text.partition("=")
            if (amount := as_number(written)) is None:
                raise ConfigError(f"resources {text!r} is not NAME=NUMBER; write for example GPU=1")
            amounts[name] = amount
        return amounts or None


def ask(
    path: Where,
    count: Annotated[int | None, tyro.conf.Positional] = None,
    json: bool = False,
    until_settled: bool = False,
    patience: str = "24h",
    where: tuple[str, ...] = (),
    all: bool = False,
) -> None:
    """Give trials of a study to run elsewhere, each trial once; `mup-tpu tell` takes their losses.

    Args:
        path: Results folder (or fsspec URL) of a study, or its TOML file.
        count: Most trials to give; by default one.
        json: Print a JSON object a line, with the trial's id and values.
        until_settled: Choose runs where they decide, in place of the grid's order.
        patience: Time after which an untold trial may be given again, as 90s, 30m or 24h.
        where: Former option, now of `mup-tpu where`.
        all: Former option, now of `mup-tpu where`.
    """
    if where or all or (count is None and not _is_study(path)):
        note = "note: `mup-tpu where` now sets the rows that a verdict uses"
        Console(stderr=True).print(note, style="yellow")
        where_(path, where, all)
        return
    study = _study(path)
    trials = study.ask(
        1 if count is None else count,
        until_settled=until_settled,
        patience=parse_seconds("patience", patience),
    )
    for trial in trials:
        values = {"id": trial.id, **trial.values}
        words = " ".join(f"{name}={value}" for name, value in values.items())
        print(json_format.dumps(values) if json else words)
    if not trials:
        nothing = "nothing to give: all missing trials are given already, or no verdict is open"
        Console(stderr=True).print(nothing)


def tell(
    path: Where,
    trial_id: Annotated[str, tyro.conf.Positional],
    loss: Annotated[str | None, tyro.conf.Positional] = None,
    failed: str | None = None,
) -> None:
    """Store the loss of a trial that `mup-tpu ask` gave.

    Args:
        path: Results folder (or fsspec URL) of the study, or its TOML file.
        trial_id: The trial's id.
        loss: Loss of the trial; nan or inf if it diverged.
        failed: Reason why it has no loss; it may be given again.
    """
    value = None if loss is None else as_number(loss)
    if loss is not None and value is None:
        raise ConfigError(f"loss {loss!r} is not a number")
    trial = _study(path).tell(trial_id, value, failed=failed)
    said = f"loss {value:g}" if value is not None else f"failed: {failed}"
    Console().print(f"{trial}: {said}")


def _study(path: str) -> Study:
    from mup_tpu.study import Study
    from mup_tpu.study.toml import load_study

    return load_study(path)[0] if path.endswith(".toml") else Study.load(path)


def _is_study(path: str) -> bool:
    from mup_tpu.store import results_folder
    from mup_tpu.study.study import FILE

    return path.endswith(".toml") or FILE in results_folder(path).names()
