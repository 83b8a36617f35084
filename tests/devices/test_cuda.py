"""Steps on CUDA, by torch's own allocator, graphs and compiler over a GPU that computes nothing."""

import itertools
import json
from pathlib import Path

import pytest

from mup_tpu.models import ARCHITECTURES
from mup_tpu.optimizers import UPDATE_RULES

PROGRAM = Path(__file__).with_name("cuda_program.py")


@pytest.fixture
def run(hollow_gpu, monkeypatch):
    """What the program printed, its last line; steps are not compiled unless asked for."""

    def run(*words: object, compiled: bool = False):
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", str(int(not compiled)))
        return json.loads(hollow_gpu(PROGRAM, *words).splitlines()[-1])

    return run


NAMES = [f"{architecture}/{rule}" for architecture in ARCHITECTURES for rule in UPDATE_RULES]
FEW = [f"{architecture}/{rule}" for architecture, rule in zip(itertools.cycle(ARCHITECTURES), UPDATE_RULES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "names"),
    [("bf16", FEW), *(pytest.param(p, NAMES, marks=pytest.mark.nightly) for p in ("bf16", "float32"))],
)
def test_steps_of_every_update_rule_and_architecture_are_captured(precision, names, run):
    printed = run("steps", precision, *names)
    assert printed["logged"] == []
    assert all(found["kernels"] > 100 for found in printed["found"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_every_update_rule_and_architecture_are_compiled(name, precision, run):
    """For an H100, by inductor, Triton and ptxas; each has fewer kernels than before."""
    printed = run("steps", precision, name, compiled=True)
    assert printed["logged"] == []
    assert printed["found"][name]["kernels"] < run("steps", precision, name)["found"][name]["kernels"] / 2


def test_captures_go_on_after_graphs_have_gone_and_after_one_has_failed(run):
    """While another thread copies batches to the GPU."""
    printed = run("recorder")
    assert printed["found"] == {"stream is the caller's": True}
    (message,) = printed["logged"]
    assert message.startswith("steps are called one by one, since recording them failed: CUDA error")
