"""A study of a plain loop of PyTorch: ten of its lines report, save, and go on after a kill.

python examples/torch_study.py FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import mup_tpu as mt
from mup_tpu.parametrize import parametrize


def build(width):
    """A network of any width."""
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def train(trial, report):
    """Learn a sine; return the mean error of the last ten batches."""
    torch.manual_seed(trial.seed)
    mup = parametrize(build, width=trial.width, base_width=16)
    model = mup.init_(build(trial.width))
    optimizer = torch.optim.AdamW(mup.param_groups(model, lr=trial.learning_rate))
    file = Path(report.folder, "state.pt")
    if report.resume_step:
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for step in range(report.resume_step + 1, trial.steps + 1):
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1000 * trial.seed + step))
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        saved = report.ending or step % (trial.steps // 4) == 0
        if saved:  # to another name first: a kill leaves the old file or the new one
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{file}.new")
            os.replace(f"{file}.new", file)
        report(step=step, steps=trial.steps, loss=losses[-1], saved=saved)
        dies = trial.learning_rate == 2**-5 and trial.width == 32 and not report.resume_step
        if dies and step == trial.steps * 5 // 8:  # as by a lost machine
            os.kill(os.getpid(), signal.SIGKILL)
    return sum(losses[-10:]) / 10


def study_in(folder, steps=80):
    """Widths 16 to 64 by seven learning rates."""
    return mt.Study(
        folder, scale={"width": [16, 32, 64]}, tune={"learning_rate": mt.octaves(-9, -3)},
        settings={"steps": steps},
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/torch_study.py FOLDER")
    study = study_in(sys.argv[1])
    study.run(train)
    print(study.verdict())
    print(study.predict(width=256))
