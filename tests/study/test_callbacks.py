"""Callbacks in ordinary trainings of Lightning and transformers, which are killed and go on.

A training ends in the middle by an exception that nobody catches. Lightning and transformers are imported by
the tests that need them.
"""

import functools
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from mup_tpu.study.callbacks import for_lightning, for_transformers
from mup_tpu.study.report import Ending, Report

BATCHES, BATCH = 20, 4
INPUTS = torch.randn(BATCHES * BATCH, 4, generator=torch.Generator().manual_seed(1))
SEEN: list[float] = []
"""Losses as the modules of Lightning computed them."""


class Killed(BaseException):
    pass


class Stream(IterableDataset):
    """Examples without a length."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return (self.make(x) for x in INPUTS)


def report_in(folder):
    return Report(str(folder), lambda reported: None)


def batches():
    return DataLoader(TensorDataset(INPUTS), batch_size=BATCH)


def stream():
    return DataLoader(Stream(lambda x: [x]), batch_size=BATCH)


# Options of the Trainer by the kind of the training; `others` names callbacks
LIGHTNING = {
    "logs_nothing": {"max_steps": 20, "log_every_n_steps": 0},
    "manual": {"max_epochs": 1},
    "returns_none": {"max_epochs": 1},
    "stream": {"max_epochs": 1},
    "without_end": {"max_epochs": -1, "others": "Stops"},
    "accumulates": {"max_epochs": 2, "accumulate_grad_batches": 2, "others": "EMAWeightAveraging"},
    "two_optimizers": {"max_epochs": 1},
    "validates": {"max_epochs": 2, "val_check_interval": 0.5, "others": "EarlyStopping"},
    "is_scheduled": {"max_epochs": 2, "limit_train_batches": 0.5, "precision": "bf16-mixed"},
}


@functools.cache
def lightning_parts():
    """Return a module of each kind, and makers of callbacks."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, kind):
            super().__init__()
            torch.manual_seed(0)
            self.kind, self.net = kind, nn.Linear(4, 1)
            self.automatic_optimization = kind not in ("manual", "two_optimizers")

        def loss(self, batch):
            loss = self.net(batch[0]).square().mean()
            SEEN.append(loss.item())
            return loss

        def training_step(self, batch, index):
            if self.automatic_optimization:
                return None if self.kind == "returns_none" and index % 3 == 0 else self.loss(batch)
            optimizers = self.optimizers()
            for optimizer in optimizers if self.kind == "two_optimizers" else [optimizers]:
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            if self.kind == "two_optimizers":
                return {"loss": loss, "index": index}
            return self.log("train/loss", loss)

        def validation_step(self, batch, index):
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self):
            if self.kind == "two_optimizers":
                return [torch.optim.SGD([p], lr=0.01) for p in self.parameters()], []
            if self.kind != "is_scheduled":
                return torch.optim.SGD(self.parameters(), lr=0.01)
            optimizer, steps = torch.optim.AdamW(self.parameters()), self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Stops(lightning.Callback):
        def on_train_batch_end(self, trainer, *more):
            trainer.should_stop = trainer.global_step >= 20

    others = {
        "Stops": Stops, "EMAWeightAveraging": EMAWeightAveraging,
        "EarlyStopping": lambda: EarlyStopping("val_loss", patience=9),
    }  # fmt: skip
    return Module, others


def fit(name, folder, on_batch=lambda report, step: None):
    """Train with Lightning; `on_batch` is called before each batch."""
    import lightning

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            on_batch(report, trainer.global_step)

    module, others = lightning_parts()
    report = report_in(folder)
    callback = for_lightning(report, save_every=5)
    options = {"log_every_n_steps": 2, **LIGHTNING[name]}
    callbacks = [callback, Watch(), *([others[options.pop("others")]()] if "others" in options else [])]
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, **options,
    )  # fmt: skip
    held_out = [batches()] if name == "validates" else []
    loader = stream() if name == "stream" else batches()
    trainer.fit(module(name), loader, *held_out, ckpt_path=callback.checkpoint)
    return report, trainer.global_step


def kill_at(step):
    def kill(report, now):
        if now >= step:
            raise Killed

    return kill


@pytest.mark.parametrize("name", LIGHTNING)
def test_a_training_of_lightning_is_killed_and_goes_on(name, tmp_path):
    SEEN.clear()
    with pytest.raises(Killed):
        fit(name, tmp_path, kill_at(8))
    report, steps = fit(name, tmp_path)
    assert report.resume_step == (6 if name == "two_optimizers" else 5), "two make two steps per batch"
    assert report.step == steps >= 15
    reported, losses = zip(*report.curve.points, strict=True) if name != "logs_nothing" else ((20,), ())
    assert sorted({*reported}) == [*reported] and len(reported) >= min(7, 20 * len(losses))
    assert all(loss in SEEN for loss in losses), "the loss of a batch as the module computed it"
    assert len([*tmp_path.glob("step-*.ckpt")]) == 1


def take_away(report, step):
    report.ending = step == 7


TRANSFORMERS = {
    "steps": {"max_steps": 20},
    "keeps_one": {"max_steps": 20, "save_total_limit": 1},
    "loads_the_best": {
        "max_steps": 20, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1,
        "load_best_model_at_end": True,
    },
    "accumulates": {"max_steps": 12, "gradient_accumulation_steps": 2},
    "epochs": {
        "num_train_epochs": 3, "per_device_train_batch_size": 16, "save_strategy": "epoch",
        "logging_strategy": "epoch", "eval_strategy": "epoch",
    },
    "stream": {"max_steps": 20},
    "saves_the_best": {
        "max_steps": 20, "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2,
        "metric_for_best_model": "loss",
    },
    "in_shares": {
        "num_train_epochs": 1, "save_steps": 0.15, "logging_steps": 0.1, "warmup_steps": 2,
        "eval_on_start": True, "logging_first_step": True,
    },
}  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        outputs = self.net(x)
        return {"loss": outputs.square().mean(), "logits": outputs}


def train(name, folder, act=lambda report, step: None, on="on_step_begin"):
    """Train with the Trainer; at the event `on`, `act` is called before the study's callback."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class First(TrainerCallback):
        pass

    setattr(First, on, lambda self, args, state, control, **more: act(report, state.global_step))
    report = report_in(folder)
    callback = for_transformers(report)
    rows = [{"x": x, "labels": x[:1]} for x in INPUTS]
    options = {"save_steps": 5, "logging_steps": 2, "per_device_train_batch_size": BATCH}
    trainer = Trainer(
        Net(),
        TrainingArguments(
            str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **options | TRANSFORMERS[name]
        ),
        train_dataset=Stream(lambda x: {"x": x, "labels": x[:1]}) if name == "stream" else rows,
        eval_dataset=rows[:8],
        callbacks=[First(), callback],
    )
    trainer.train(resume_from_checkpoint=callback.checkpoint)
    return report, trainer.state.global_step


@pytest.mark.parametrize(
    "name, on",
    [
        ("keeps_one", "on_save"), ("loads_the_best", "on_save"),
        *((name, "on_step_begin") for name in [*TRANSFORMERS][3:]),
    ],
)  # fmt: skip
def test_a_training_of_transformers_is_killed_and_goes_on(name, on, tmp_path):
    with pytest.raises(Killed):
        train(name, tmp_path, kill_at(9), on)
    saved = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    report, steps = train(name, tmp_path)
    assert report.resume_step == saved[-1] >= 4
    assert report.step == steps >= 12
    reported = [step for step, _ in report.curve.points]
    assert sorted({*reported}) == reported and reported[-1] == steps


@pytest.mark.parametrize("run, name", [(fit, "validates"), (train, "in_shares")])
def test_a_training_saves_once_more_when_the_machine_is_taken_away(run, name, tmp_path):
    with pytest.raises(Ending):
        run(name, tmp_path, take_away)
    assert report_in(tmp_path).resume_step == 8


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Folder of a training that was killed at step 12; its checkpoints are of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(Killed):
        train("steps", folder, kill_at(12))
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "spoil, path, sentence, step",
    [
        (cut, "checkpoint-10/model.safetensors", "model.safetensors is damaged", 5),
        (cut, "checkpoint-10/optimizer.pt", "optimizer.pt is damaged", 5),
        (empty, "checkpoint-10/optimizer.pt", "optimizer.pt is damaged", 5),
        (cut, "checkpoint-10/trainer_state.json", "trainer_state.json is damaged", 5),
        (Path.unlink, "checkpoint-10/trainer_state.json", "checkpoint-10 has no trainer_state.json", 5),
        (shutil.rmtree, "checkpoint-10", "its newest whole checkpoint is of step 5: the trial goes on", 5),
        (empty, "checkpoint-*/optimizer.pt", "no checkpoint in it is whole: the trial starts anew", 0),
    ],
)
def test_a_trial_goes_on_from_the_last_whole_checkpoint(
    spoil, path, sentence, step, interrupted, tmp_path, capsys
):
    folder = Path(shutil.copytree(interrupted, tmp_path / "trial"))
    for found in [*folder.glob(path)]:
        spoil(found)
    report = report_in(folder)
    checkpoint = for_transformers(report).checkpoint
    assert sentence in capsys.readouterr().out
    assert checkpoint == (str(folder / f"checkpoint-{step}") if step else None)
    assert report.resume_step == report.step == step
    assert [at for at, _ in report.curve.points] == [*range(2, step + 1, 2)]


HELD = {"step": 3, "points": [], "stride": 1, "seen": 0}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "null", "[" * 5000, *(json.dumps(HELD | more) for more in (
        {"step": float("inf")}, {"step": -3}, {"points": [[1]]}, {"points": [[1, 2.0], 3]}, {"seen": "a"},
    ))],
    ids=range(10),
)  # fmt: skip
def test_a_damaged_report_is_named_and_the_trial_starts_anew(content, tmp_path, capsys):
    report_in(tmp_path)(step=3, loss=1.0, saved=True)
    assert report_in(tmp_path).resume_step == 3
    (tmp_path / "resume.json").write_text(content)
    report = report_in(tmp_path)
    assert (report.resume_step, report.curve.points) == (0, [])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path}/resume.json cannot be read (") and "starts anew" in line
    report(step=1, loss=2.0, saved=True)
    assert report_in(tmp_path).resume_step == 1
