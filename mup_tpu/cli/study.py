"""Commands about studies, sweeps of one's own training: init, ask and tell."""

from __future__ import annotations

import importlib.resources
import json as json_format
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mup_tpu.cli.console import Console, write_new
from mup_tpu.config import Grid, RunOptions, SweepOptions
from mup_tpu.config.options import File, Where
from mup_tpu.config.values import as_number, on_one_line, parse_pairs, parse_seconds
from mup_tpu.errors import ConfigError

if TYPE_CHECKING:
    from mup_tpu.study.study import Study

Kind = Literal["sweep", "search", "ladder", "study"]
# Command that takes the file of each kind
_NEXT = {
    "sweep": "mup-tpu sweep {} --dry-run",
    "ladder": "mup-tpu sweep {} --dry-run",
    "search": "mup-tpu search {}",
    "study": "mup-tpu sweep {} --until-settled",
}


@dataclass(frozen=True)
class StudyOptions:
    """Options of a study of one's own training."""

    trainer: str | None = None
    """Training in place of our networks: my_package.my_module:train, or a command line with {names} of the
    file, whose output tells the loss; by default the file's trainer."""
    loss: str | None = None
    """Loss in the output of a --trainer: the text before the number, or a regular expression with one group;
    by default it is recognised."""
    workers: int | None = None
    """Trials of a --trainer that run at once on this machine; by default one per GPU, or one per core."""
    timeout: str | None = None
    """Longest time of a trial of a --trainer, as 90s, 30m or 2h; a longer one has failed."""
    resources: tuple[str, ...] = ()
    """Ray's resources for a trial of a --trainer: CPU=2 GPU=1."""

    def amounts(self) -> dict[str, float] | None:
        form = "NAME=NUMBER; write for example GPU=1"
        given = parse_pairs("resources", self.resources, form)
        amounts = {name: as_number(text) for name, text in given.items()}
        if None in amounts.values():
            raise ConfigError(f"resources {' '.join(self.resources)!r} is not {form}")
        return {name: amount for name, amount in amounts.items() if amount is not None} or None

    def load(
        self, file: Path, results: str | None, grid: Mapping[str, Any] | None = None
    ) -> tuple[Study, str]:
        """Open the study of a file, with the trainer of these options, or else of the file."""
        from mup_tpu.study.study import load_study

        study, trainer = load_study(file, results, self.loss, grid)
        if (trainer := self.trainer or trainer) is None:
            raise ConfigError("trainer is missing: give --trainer, or set it in the file")
        return study, trainer

    def run(
        self, study: Study, trainer: str, where: SweepOptions, price: str | None, **options: Any
    ) -> Counter[str]:
        """Run a study with these options; those of its sequence are given too."""
        study.loss = self.loss or study.loss
        return study.run(
            trainer, workers=self.workers, timeout=self.timeout, heartbeat=where.heartbeat,
            address=where.address, resources=self.amounts(), track=where.track, price=price,
            console=Console(), **options,
        )  # fmt: skip


def refuse_options_of_networks(run: RunOptions, where: SweepOptions) -> None:
    """Refuse options that somebody's own training does not follow."""
    default = vars(RunOptions()) | vars(SweepOptions())
    given = [name for name, value in (vars(run) | vars(where)).items() if value != default[name]]
    if unused := [name for name in given if name not in ("heartbeat", "address", "track", "price")]:
        raise ConfigError(f"{', '.join(unused)}: a study's training is yours, and sets that itself")


def init(kind: Annotated[Kind, tyro.conf.Positional] = "sweep", out: File | None = None) -> None:
    """Write a first TOML file, which runs as it is.

    Its comments explain the choices.

    Args:
        kind: Sweep of one hyperparameter along a scale, search of several with Ray Tune, ladder: a sweep
            along a scale of several fields that grow together, or study: a sweep of your own training.
        out: The file; by default KIND.toml here. An existing file is never overwritten.
    """
    path = Path(f"{kind}.toml") if out is None else out
    template = importlib.resources.files("mup_tpu").joinpath("templates", f"{kind}.toml")
    text = template.read_text(encoding="utf-8")
    write_new(path, text.replace(f" {kind}.toml ", f" {path} "))
    Console().print(f"wrote {path}; next: {_NEXT[kind].format(path)}")


def ask(
    path: Where,
    count: Annotated[int, tyro.conf.Positional] = 1,
    until_settled: bool = False,
    patience: str = "24h",
    json: bool = False,
) -> None:
    """Print trials of a study to run elsewhere, each trial once.

    `mup-tpu tell` takes their losses.

    Args:
        path: Results folder (or fsspec URL) of a study, or its TOML file.
        count: Most trials to print.
        until_settled: Choose the runs that decide the verdict, in place of the grid's order.
        patience: Lease of a trial, as 90s, 30m or 24h; afterwards it may be printed again.
        json: Print a JSON object per line, with the trial's id and values.
    """
    lease_s = parse_seconds("patience", patience)
    trials = _study(path).ask(count, until_settled=until_settled, patience=lease_s)
    for trial in trials:
        values = {"id": trial.id, **trial.values}
        words = " ".join(f"{name}={on_one_line(value)}" for name, value in values.items())
        print(json_format.dumps(values) if json else words)
    if not trials:
        Console(stderr=True).print("no trial: all missing trials are leased, or no verdict is open")


def tell(
    path: Where,
    trial_id: Annotated[str, tyro.conf.Positional],
    loss: Annotated[str | None, tyro.conf.Positional] = None,
    failed: str | None = None,
) -> None:
    """Store the loss of a trial that `mup-tpu ask` printed.

    Args:
        path: Results folder (or fsspec URL) of the study, or its TOML file.
        trial_id: The trial's id.
        loss: Loss of the trial; nan or inf if it diverged.
        failed: Reason why it has no loss; the trial may then be asked for again.
    """
    value = None if loss is None else as_number(loss)
    if loss is not None and value is None:
        raise ConfigError(f"loss {loss!r} is not a number")
    trial = _study(path).tell(trial_id, value, failed=failed)
    outcome = f"loss {value:g}" if value is not None else f"failed: {failed}"
    Console().print(f"{trial}: {outcome}")


def _study(path: str) -> Study:
    from mup_tpu.study.study import Study, load_study

    if not path.endswith(".toml"):
        return Study.load(path)
    study, _ = load_study(path)
    keep_plan(study.grid, study.folder)
    return study


def keep_plan(grid: Grid[Any], folder: str) -> None:
    from mup_tpu.tuning.plan import planned_of

    if grid.target is not None:
        planned_of(grid).keep(folder)
