"""A study of the Trainer of Hugging Face: trials report, save, and go on after a kill.

    python examples/hf_study.py FOLDER [STEPS]

Needs `pip install accelerate`. The first attempt of one trial is killed half-way, as by a lost machine.
"""

import os
import signal
import sys

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
from transformers import GPT2Config, Trainer, TrainingArguments

import mup_tpu as mt
from mup_tpu.parametrize import from_config
from mup_tpu.study.callbacks import for_transformers

BASE = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
)


def train(trial, report):
    """Train a GPT-2 of the trial's width on random walks (1.39 nat at best); return its last mean loss."""
    torch.manual_seed(trial.seed)
    grown = from_config(BASE, width=trial.width)
    model = grown.model()
    tokens = torch.randint(0, 4, (8 * trial.steps, 32)).cumsum(1) % 64
    callback = for_transformers(report)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(report.folder), max_steps=trial.steps, logging_steps=trial.steps // 8,
            save_steps=trial.steps // 4, save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(torch.optim.AdamW(grown.mup.param_groups(model, lr=trial.learning_rate)), None),
        callbacks=[callback],
    )  # fmt: skip
    if trial.learning_rate == 2**-5 and trial.width == 32 and not report.resume_step:
        trainer.add_callback(killing_callback(trial.steps // 2))
    trainer.train(resume_from_checkpoint=callback.checkpoint)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]


def killing_callback(step):
    """Make a callback that kills its process after a step."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_begin(self, args, state, control, **more):
            if state.global_step > step:
                os.kill(os.getpid(), signal.SIGKILL)

    return Kill()


def study_in(folder, steps=64):
    """Widths 16 to 64 by seven learning rates."""
    return mt.Study(
        folder, scale={"width": [16, 32, 64]}, tune={"learning_rate": mt.octaves(-8, -2)},
        settings={"steps": steps},
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/hf_study.py FOLDER [STEPS]")
    study = study_in(sys.argv[1], *map(int, sys.argv[2:]))
    study.run(train)
    print(study.verdict())
    print(study.predict(width=256))
