"""Callbacks that report to a study from the Trainer of transformers and from Lightning.

Each reports losses and steps, saves once more when the machine is taken away, and names the checkpoint that
an earlier attempt left. The packages are imported when a callback is made.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from mup_tpu.study.report import Report


def for_transformers(report: Report) -> Any:
    """Make a `TrainerCallback`; its `checkpoint` is what `Trainer.train(resume_from_checkpoint=...)` takes.

    The Trainer's `output_dir` must be `report.folder`, and its `save_strategy` not "no".
    """
    from transformers import TrainerCallback

    class StudyCallback(TrainerCallback):  # type: ignore[misc]
        checkpoint = f"{report.folder}/checkpoint-{report.resume_step}" if report.resume_step else None

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if report.ending:
                control.should_save = control.should_log = True  # `on_save` then ends the function
            else:
                report(step=state.global_step, steps=state.max_steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                report(step=state.global_step, loss=logs["loss"], steps=state.max_steps)

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            report(step=state.global_step, steps=state.max_steps, saved=True)

    return StudyCallback()


def for_lightning(report: Report, save_every: int = 1000) -> Any:
    """Make a Lightning `Callback` for a local folder; `Trainer.fit(ckpt_path=...)` takes its `checkpoint`."""
    from lightning import Callback

    folder = Path(report.folder)

    class StudyCallback(Callback):  # type: ignore[misc]
        checkpoint = str(folder / f"step-{report.resume_step}.ckpt") if report.resume_step else None

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            step, steps = trainer.global_step, int(trainer.estimated_stepping_batches)
            loss = None
            if step % trainer.log_every_n_steps == 0 or step == steps:
                loss = float(outputs["loss"] if isinstance(outputs, dict) else outputs)
            saved = report.ending or step % save_every == 0
            if saved:
                trainer.save_checkpoint(folder / f"step-{step}.ckpt")
            report(step=step, loss=loss, steps=steps, saved=saved)
            for other in folder.glob("step-*.ckpt") if saved else ():
                if other.name != f"step-{step}.ckpt":
                    with contextlib.suppress(OSError):
                        other.unlink()

    return StudyCallback()
