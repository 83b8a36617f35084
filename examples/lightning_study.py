"""A study of a LightningModule: trials report, save, and go on after a kill.

    python examples/lightning_study.py FOLDER

Needs `pip install lightning`. The first attempt of one trial is killed half-way, as by a lost machine.
"""

import os
import signal
import sys

import lightning
import torch
from lightning_module import Regression
from torch.utils.data import DataLoader, TensorDataset

import mup_tpu as mt
from mup_tpu.study.callbacks import for_lightning


class Kill(lightning.Callback):
    """Kill this process after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, index):
        """Kill before a batch, when the callbacks of the last one have run."""
        if trainer.global_step > self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(trial, report):
    """Train the example's regression at the trial's width; return the last batch's error."""
    torch.manual_seed(trial.seed)
    module = Regression(trial.width, trial.learning_rate, base_width=16)
    inputs = torch.randn(trial.steps * 64, 8, generator=torch.Generator().manual_seed(trial.seed))
    callback = for_lightning(report, save_every=trial.steps // 4)
    dies = trial.learning_rate == 2**-5 and trial.width == 32 and not report.resume_step
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=trial.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=5,
        callbacks=[callback, *([Kill(trial.steps // 2)] if dies else [])],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(inputs), batch_size=64), ckpt_path=callback.checkpoint)
    return trainer.callback_metrics["loss"].item()


def study_in(folder, steps=60):
    """Widths 16 to 64 by seven learning rates."""
    return mt.Study(
        folder, scale={"width": [16, 32, 64]}, tune={"learning_rate": mt.octaves(-9, -3)},
        settings={"steps": steps},
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/lightning_study.py FOLDER")
    study = study_in(sys.argv[1])
    study.run(train)
    print(study.verdict())
    print(study.predict(width=256))
