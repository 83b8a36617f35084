"""Callbacks that report to a study from the Trainer of transformers and from Lightning.

Each reports losses and steps, saves once more when the machine is taken away, and names the checkpoint that
an earlier attempt left. The packages are imported when a callback is made.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

from mup_tpu.study.report import Report, damaged

# Losses as modules log them, where `training_step` returns none
_LOGGED = ("train_loss", "train/loss", "loss", "train_loss_step", "train/loss_step", "loss_step")


def for_transformers(report: Report) -> Any:
    """Make a `TrainerCallback`; its `checkpoint` is what `Trainer.train(resume_from_checkpoint=...)` takes.

    The Trainer's `output_dir` must be `report.folder`, and its `save_strategy` not "no".
    """
    from transformers import TrainerCallback

    class TransformersCallback(TrainerCallback):  # type: ignore[misc]
        # The Trainer writes its state last.
        checkpoint = _newest(report, r"checkpoint-(\d+)", "trainer_state.json")

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if report.ending:
                control.should_save = control.should_log = True  # `on_save` then ends the function
                control.should_evaluate = False  # which would come first, and may take minutes
            else:
                report(step=state.global_step, steps=state.max_steps)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if not report.ending:  # an evaluation cannot save
                report(step=state.global_step, steps=state.max_steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                report(step=state.global_step, loss=logs["loss"], steps=state.max_steps)

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            report(step=state.global_step, steps=state.max_steps, saved=True)

    return TransformersCallback()


def for_lightning(report: Report, save_every: int = 1000) -> Any:
    """Make a Lightning `Callback` for a local folder; `Trainer.fit(ckpt_path=...)` takes its `checkpoint`.

    A step is one of an optimizer, as `Trainer.global_step` counts.
    """
    from lightning import Callback

    folder = Path(report.folder)

    class LightningCallback(Callback):  # type: ignore[misc]
        checkpoint = _newest(report, r"step-(\d+)\.ckpt")
        step = report.resume_step

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            before, self.step = self.step, trainer.global_step
            steps = trainer.estimated_stepping_batches  # -1 or inf where nobody knows
            if not 0 < steps < math.inf or len(trainer.optimizers) > 1:
                steps = 0

            def has_passed(every: int) -> bool:  # several optimizers make several steps per batch
                return every > 0 and self.step // every > before // every

            loss = None
            if has_passed(trainer.log_every_n_steps) or before < self.step == steps:
                loss = self.loss(trainer, outputs)
            saved = report.ending or has_passed(save_every)
            if saved:
                trainer.save_checkpoint(folder / f"step-{self.step}.ckpt")
            report(step=self.step, loss=loss, steps=int(steps), saved=saved)
            for other in folder.glob("step-*.ckpt") if saved else ():
                if other.name != f"step-{self.step}.ckpt":
                    with contextlib.suppress(OSError):
                        other.unlink()

        def on_validation_batch_end(self, trainer: Any, *more: Any) -> None:
            if not report.ending:  # if it is, the next training batch saves a checkpoint
                report(step=trainer.global_step)

        def loss(self, trainer: Any, outputs: Any) -> float | None:
            value = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if value is not None:  # Lightning has divided it
                return float(value) * int(trainer.accumulate_grad_batches)
            known = trainer.callback_metrics
            return next((float(known[name]) for name in _LOGGED if name in known), None)

    return LightningCallback()


def _newest(report: Report, pattern: str, last: str = "") -> str | None:
    """Return the newest whole checkpoint of an earlier attempt, from whose step the report then goes on.

    Step and existence of a checkpoint are those of the folder, not of the last report: a Trainer may remove
    an old checkpoint before it says that it has saved. A checkpoint without its file `last` was not finished.
    """
    names = (re.fullmatch(pattern, path.name) for path in Path(report.folder).glob("*"))
    for step, name in sorted(((int(name[1]), name[0]) for name in names if name), reverse=True):
        checkpoint = Path(report.folder, name)
        if last and not (checkpoint / last).is_file():
            print(f"{checkpoint} has no {last}: it is not used")
        elif (file := damaged(checkpoint)) is not None:
            print(f"{file} is damaged: {checkpoint.name} is not used")
        else:
            report.resume_at(step)
            return str(checkpoint)
    report.resume_at(0)
    return None
