"""Packs on CUDA, by torch's own allocator, graphs and compiler over a GPU whose values the CPU computes; on a
GPU with --device cuda.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mup_tpu.models import ARCHITECTURES
from mup_tpu.optimizers import UPDATE_RULES

PROGRAM = Path(__file__).with_name("cuda_program.py")
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bf16": 2e-3}
PACKS = ["/".join(pack) for pack in itertools.product(ARCHITECTURES, UPDATE_RULES, TOLERANCE)]
DAILY = ["gpt2/adamw/bf16"]


@pytest.fixture
def on_gpu(request, monkeypatch):
    """What the program printed, its last line; steps are not compiled unless asked for."""
    is_there = request.config.getoption("--device") == "cuda"
    hollow_gpu = None if is_there else request.getfixturevalue("hollow_gpu")

    def run(*words: str, compiled: bool = False):
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", str(int(not compiled)))
        if hollow_gpu is None:
            command = [sys.executable, PROGRAM, *(word for word in words if word != "filled")]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        else:
            printed = hollow_gpu(PROGRAM, *words)
        return json.loads(printed.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "packs",
    [DAILY, *(pytest.param([pack], marks=pytest.mark.nightly) for pack in PACKS if pack not in DAILY)],
)
def test_captured_steps_train_as_members_in_turns_do_on_a_cpu(packs, on_gpu):
    """Also once most members have left the stack, whose step is then another graph."""
    printed = on_gpu("steps", *packs, "filled")
    assert printed["logged"] == []
    for pack, found in printed["found"].items():
        assert found["losses"] == pytest.approx(found["expected"], rel=TOLERANCE[pack.split("/")[2]]), pack
        assert found["recorded"] == 3, "the step, the step of a smaller stack, and the evaluation"


def test_captures_go_on_after_graphs_have_gone_and_after_one_has_failed(on_gpu):
    """While another thread copies batches to the GPU; steps that cannot be captured are called."""
    printed = on_gpu("recorder", "filled")
    found = {"stream is the caller's": True, "sums": [2 * 8 * 64], "compiled": [False, True]}
    assert printed["found"] == found
    (message,) = printed["logged"]
    assert message.startswith("steps are called one by one, since recording them failed: CUDA error")


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("name", [f"{a}/{o}" for a, o in itertools.product(ARCHITECTURES, UPDATE_RULES)])
def test_steps_of_every_update_rule_and_architecture_are_compiled(name, precision, on_gpu):
    """For an H100, by inductor, Triton and ptxas; each has less than half of its kernels then."""
    name = f"{name}/{precision}"
    compiled, plain = (on_gpu("steps", name, compiled=given) for given in (True, False))
    assert compiled["logged"] == plain["logged"] == []
    assert compiled["found"][name]["kernels"] < plain["found"][name]["kernels"] / 2


@pytest.mark.nightly
def test_all_tests_of_packs_pass_on_a_gpu(hollow_gpu, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    files = [Path(__file__).parents[1] / "training" / f"test_{name}.py" for name in ("pack", "loop")]
    hollow_gpu("-m", "pytest", "-q", "-n", "0", "--device", "hollow", *files)
