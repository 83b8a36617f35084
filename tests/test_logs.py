# ruff: noqa: E501, lines of logs
"""The loss that a training's log holds, in the formats of the programs that people train with."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mup_tpu.errors import ConfigError
from mup_tpu.logs import LossUnknown, TrainingLog, read_log


@dataclass(frozen=True)
class Sample:
    """Lines in the format of a program, with numbers of our own, and what they say."""

    text: str
    loss: float
    step: int | None = None
    steps: int | None = None
    name: str | None = None
    curve: int | None = None  # points of its curve
    rate: float | None = None  # highest learning rate


SAMPLES = {
    name: Sample(**values)
    for name, values in tomllib.loads(Path(__file__).with_name("logs.toml").read_text("utf-8")).items()
}


def read(text: str, loss: str | None = None) -> TrainingLog:
    return read_log(text.encode(), loss)


@pytest.mark.parametrize("program", SAMPLES)
def test_loss_of_a_program_is_recognised(program: str) -> None:
    sample = SAMPLES[program]
    log = read(sample.text)
    result = log.result()
    assert (result.loss, result.step) == (sample.loss, result.step if sample.step is None else sample.step)
    assert result.steps == sample.steps or sample.steps is None
    assert result.name == (sample.name or result.name)
    assert sample.curve in (None, len(log.curve()))
    assert log.curve()[-1][1] == sample.loss
    assert log.learning_rate == sample.rate
    assert not log.is_diverged


AS_WRITTEN = {
    "colours": lambda text: "".join(f"\x1b[3{i % 8}m{c}\x1b[0m" for i, c in enumerate(text)).encode(),
    "Windows": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "a mark": lambda text: text.encode("utf-8-sig"),
    "ranks": lambda text: re.sub("(?m)^(?!\\Z)", "[rank0]: ", text).encode(),
    "times": lambda text: re.sub("(?m)^(?!\\Z)", "2026-11-01 10:00:00,123 INFO ", text).encode(),
    "no UTF-8": lambda text: b"\xff\xfa\xc3(\n" + text.encode("latin-1", "replace"),
    "no end": lambda text: text.rstrip("\n").encode(),
}


@pytest.mark.parametrize("how", AS_WRITTEN)
@pytest.mark.parametrize(
    "program", ["nanogpt", "nanochat", "litgpt", "a tutorial", "Megatron-LM", "XGBoost", "transformers 4"]
)
def test_loss_does_not_depend_on_how_it_is_written(how: str, program: str) -> None:
    sample = SAMPLES[program]
    result = read_log(AS_WRITTEN[how](sample.text)).result()
    assert (result.loss, result.steps) == (sample.loss, sample.steps or result.steps)
    assert sample.step in (None, result.step)
    assert "\x1b" not in result.line


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    st.sampled_from([*SAMPLES]), st.sampled_from([*AS_WRITTEN]), st.lists(st.integers(0, 4000), max_size=12)
)
def test_any_parts_of_a_log_say_the_same(program: str, how: str, cuts: list[int]) -> None:
    data = AS_WRITTEN[how](SAMPLES[program].text)
    whole, parts = TrainingLog(), TrainingLog()
    at_once = whole.read(data) + whole.close()
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    torn = [logged for i, j in itertools.pairwise(bounds) for logged in parts.read(data[i:j])] + parts.close()
    assert torn == at_once
    for name in ("steps_done", "steps", "learning_rate"):
        assert getattr(parts, name) == getattr(whole, name)
    with contextlib.suppress(LossUnknown):  # a number alone is not alone behind a time
        assert (parts.result(), parts.curve()) == (whole.result(), whole.curve())


AMBIGUOUS = [
    ("step 1 val/c4/loss 3.1 val/wiki/loss 3.4\n", ["val/c4/loss", "val/wiki/loss"]),
    ("step 1 loss_x 3.1 loss_y 3.4\n", ["loss_x", "loss_y"]),
    ("step 1 loss 3.1\nval 0.91\n", ["val", "loss"]),
    ("Img Val | Loss: 0.31 | Dice: 0.8\nVid Val | Loss: 0.72 | Dice: 0.8\n", ["0.31", "0.72"]),
    ('{"val": {"c4": {"loss": 3.1}, "wiki": {"loss": 3.4}}}\n', ["3.1", "3.4"]),
    ("nothing\n", ["recognised", "option loss"]),
    ("val: n/a\ntime 3.1\naccuracy 0.3\nloss scale: 65536.0\nbest val loss: 2.1\naux_loss=0.1\nperplexity 3.1\n", ["recognised"]),
    ("", ["recognised"]),
]  # fmt: skip


@given(st.binary(max_size=500), st.sampled_from([None, "val loss", r"loss\D+(\S+)"]))
def test_any_bytes_are_read(data: bytes, loss: str | None) -> None:
    log = read_log(data, loss)
    with contextlib.suppress(LossUnknown):
        assert log.result().loss == log.curve()[-1][1] or math.isnan(log.result().loss)


@pytest.mark.parametrize(("text", "names"), AMBIGUOUS)
def test_ambiguity_is_an_error_with_both_names(text: str, names: list[str]) -> None:
    log = read(text)
    with pytest.raises(LossUnknown) as error:
        log.result()
    assert log.curve() == []
    assert all(name in str(error.value) for name in names)


LINES = [
    ("step 1 val/c4/loss 3.1 val/wiki/loss 3.4 val/loss 3.25\n", 3.25),  # the mean beside its parts
    ("step 1 val loss 3.3151 val rounded loss 3.315\n", 3.3151),
    ("eval/loss 3.1 eval/macro_loss 3.3\n", 3.1),
    ("step 1 avg val loss 3.2\n", 3.2),
    ("val_loss: 2,3145\n", 2.3145),  # a decimal comma
    ("step 5 loss: 3.[rank1]: step 5 loss: 3.25\n", 3.25),  # two ranks at once
    ("step 5 loss: 3.5step 5 loss: 3.25\n", 3.25),
    ("loss is NaN, stopping\n", math.nan),
    ("loss: inf\n", math.inf),
    ("loss: 2\n", 2.0),
    ("0.5\n1.5\n", 1.5),
    ("train: 0.9, val: 0.1\nstep 1 loss 3.5\n", 3.5),
    ("loss (val) 2.5, loss (train) 2.4\n", 2.5),
    ("val loss [nats/token]: 2.5\ntrainloss=2.4 valloss=2.6\n", 2.6),
    ("step 1 lm loss 2.5\nThe loss of 12 men was felt.\n/lib/torch/nn/modules/loss.py:1213: UserWarning: reduction\n", 2.5),
    ('{\n  "train": {\n    "loss": 2.3,\n    "acc": 0.1\n  },\n  "eval": {\n    "loss": 2.5\n  }\n}\n', 2.5),
    ("training done\nval_loss .......... 2.5\n", 2.5),
    ("step 5 - train - loss: 2.3 - val - loss: 2.5 (best 2.4 @ 3), 100 steps/s\n", 2.5),
    ("loss: tensor([2.5], device='cuda:0')\n", 2.5),
    ("TrainOutput(global_step=4, training_loss=3.5, metrics={'train_runtime': 2.5})\n{'loss': 3.1}\n", 3.1),
    ("# learning_rate / 10\nstep 0: val loss 4.2\niter 0: loss 4.2\niter 9: loss 2.5\n", 2.5),  # evaluated untrained
    ("val loss 4.2\nval loss 2.5\n", 2.5),
    ("val_loss_every = 125\nval loss 2.75 -> 2.5\n", 2.5),
    ("Last eval loss: 2.5\n", 2.5),
    ("step 9 | loss 2.4 | lr n/a\n  [eval] step 9 | train 2.45 | dev 2.5\n", 2.5),
    ("Epoch 3/50: 100% 75/75 [00:29<00:00,  2.56it/s, Loss=2.7]\nEpoch 3: Train=2.4 Val=2.5\n", 2.5),
    ("Epoch 12/40\n  train  loss=0.8961  (kp=0.8125, acc=0.9)\n  val    loss=2.5  (kp=0.9, acc=0.9)\n", 2.5),
    ("[eval] step 1000 | val_loss 2.5 best!\nstep 1010 | loss 2.4 | avg50 2.45\n", 2.5),
    ("3 loss\nloss 4.5 of version 1.2.3 in 0.5 s\n", 4.5),
]  # fmt: skip


@pytest.mark.parametrize(("text", "loss"), LINES)
def test_loss_of_a_line(text: str, loss: float) -> None:
    log = read(text)
    assert (log.result().loss, log.learning_rate) == (pytest.approx(loss, nan_ok=True), None)


@pytest.mark.parametrize(
    ("option", "loss"),
    [
        ("val loss", 2.6831),
        ("train loss", 2.8523),
        ("loss", 2.7888),
        ("time", 645.0),
        ("mfu", 0.5),
        (r"iter \d+: loss (\S+),", 2.7888),
        ("step 100: train loss", 2.8523),
    ],
)
def test_loss_may_be_named(option: str, loss: float) -> None:
    log = read(SAMPLES["nanogpt"].text.replace("0.00%", "0.5").replace("645.82ms", "645"), option)
    assert (log.result().loss, log.curve()[-1]) == (loss, (100, loss))


@pytest.mark.parametrize("option", ["", "  ", "loss: .*", r"(\w+) loss (\S+)", "loss (.*"])
def test_a_name_that_cannot_be_meant_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="loss "):
        TrainingLog(option)


def test_a_name_that_no_line_has_is_refused() -> None:
    with pytest.raises(LossUnknown, match="no line of the output has a number after loss 'paloma'"):
        read(SAMPLES["nanogpt"].text, "paloma").result()


def test_divergence() -> None:
    log = TrainingLog()
    log.read(
        b"step 20 | train loss 3.2107\nstep 20 | val loss 3.3\nstep 40 | train loss nan\nstep 60 | train loss nan\n"
    )
    assert not log.is_diverged  # a step may be skipped by a gradient scaler
    log.read(b"step 80 | train loss nan\n")
    assert log.is_diverged
    assert not read("loss nan\nloss nan\nloss 3.1\n").is_diverged
    assert read("step 1 loss 3.1\nstep 2 loss inf\n").is_diverged
    assert read("step 1 val loss nan\nstep 1 train loss 3.1\n").is_diverged


def test_memory_is_bounded() -> None:
    log = TrainingLog()
    line = b"step %d loss %.3f lr 0.001 " + b"x" * 1000 + b"\n"
    for step in range(0, 1000, 10):
        log.read(b"".join(line % (i, 3 + i / 1e6) for i in range(step, step + 10)))
        log.read(b"\xc3" * 2_000)
        log.read(b" noise_%d_loss 3.5\n" % step)
    for _ in range(20):
        log.read(b"a" * 2**20)
    log.read(b"\nval loss 3.25\n")
    assert len(pickle.dumps(log.__dict__ | {"_decoder": None})) < 2**21
    assert log.result().loss == 3.25
    named = TrainingLog("loss")
    named.read(b"".join(b"step %d loss 3.5\n" % step for step in range(5000)))
    curve = named.curve()
    assert 250 <= len(curve) <= 1000
    assert (curve[0][0] < 20, curve[-1][0]) == (True, 4999)
    assert len(curve) == len({step for step, _ in curve})
