"""The command `train`; torch is imported when it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mup_tpu.cli.console import Console
from mup_tpu.config import RunOptions, Trial
from mup_tpu.config.paths import File
from mup_tpu.config.toml import load_trial
from mup_tpu.errors import ConfigError
from mup_tpu.tuning.single import Kept, train_one


@dataclass(frozen=True)
class TrainOptions:
    """Source and length of one trial, and its report."""

    config: File | None = None
    """TOML file with [model], [data], [optimizer], [train], in place of options of the trial."""
    continue_to: int | None = None
    """Number of steps in place of the trial's; training goes on from the checkpoint in --checkpoints. For
    schedules constant and wsd."""
    xla_report: bool = False
    """Report XLA's compilations, executions and transfers (--device xla)."""

    def check(self, run: RunOptions, kept: Kept) -> None:
        """Refuse options that lack others."""
        if self.xla_report and run.device != "xla":
            raise ConfigError(f"--xla-report needs --device xla, not {run.device}")
        if kept.export_best and not (kept.export and kept.checkpoints and run.eval_every):
            raise ConfigError("--export-best needs --export, --checkpoints and --eval-every")
        if self.continue_to is not None and kept.checkpoints is None:
            raise ConfigError("--continue-to needs --checkpoints, to go on from")

    def source(self, trial: Trial) -> Trial:
        """Trial of the TOML file or of the options; ConfigError where both were given."""
        if self.config is None:
            return trial
        if trial != Trial():
            raise ConfigError(
                f"--config {self.config} and options of the trial were both given; change the file instead"
            )
        return load_trial(self.config)


def train(
    trial: Trial = Trial(),
    run: RunOptions = RunOptions(),
    kept: Kept = Kept(),
    options: TrainOptions = TrainOptions(),
) -> None:
    """Train one trial and print its loss.

    Args:
        trial: Trial to train.
        run: How the trial is run.
        kept: Files and folders for row, checkpoints, model and profile.
        options: Source and length of the trial, and its report.
    """
    options.check(run, kept)
    trial, shorter = options.source(trial), None
    run.require_parts(trial.data.batch_size)
    if options.continue_to is not None:
        from mup_tpu.training.trials import longer

        shorter, trial = trial, longer(trial, options.continue_to)
    console = Console()
    trained = train_one(trial, run, kept, console, shorter)
    row, rates = trained.row, trained.result.rates
    loss = f"loss {row['loss']:.4f} nat/token ({row['loss_kind']})"
    console.print(
        f"{row['status']}: {loss if math.isfinite(row['loss']) else row['reason']}, width {row['width']}, "
        f"{row['params']:,} parameters, {row['tokens']:,} tokens, {row['wall_time_s']:.1f} s · {rates}"
    )
    if options.xla_report:
        _print_xla_report(console, row, rates.input_wait if rates else 0.0)
    if trained.exported is not None:
        which = f" of {trained.checkpoint}," if trained.checkpoint else ""
        console.print(f"exported a stock model{which} to {trained.exported}")


def _print_xla_report(console: Console, row: dict[str, Any], input_wait: float) -> None:
    from mup_tpu.tpu import xla

    counts = xla.report()
    share = counts["compile_s"] / row["wall_time_s"]
    rate = row["tokens"] / row["wall_time_s"]
    stops = ": each stops the device" if counts["fallbacks"] else ""
    for line in (
        f"XLA compiled {counts['compilations']:.0f} programs in {counts['compile_s']:.1f} s ({share:.0%} of "
        "the run); expected: two for the first steps, one each for evaluation and start-up",
        f"{counts['executions']:.0f} executions for {row['steps_done']} steps; expected: one a step, and the "
        "evaluations",
        f"{counts['transfers_to_host']:.0f} transfers to the host: losses, read at evaluations",
        f"{counts['fallbacks']:.0f} operations that XLA lacks ran on the host{stops}",
        f"input wait {input_wait:.1%}; {rate:,.0f} tokens/s with compilation counted",
    ):
        console.print(line)
