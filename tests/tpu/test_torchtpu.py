"""Packs by TorchTPU, with values: XLA's CPU plugin in place of a chip, in another environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tpu_trials import STEPS, trials

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.training.loop import PackRun, run_to_end

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tpu_python():
    """Python with torch_tpu: scripts/test-tpu makes its environment, .venv-tpu, beside the default one."""
    python = ROOT / ".venv-tpu/bin/python"
    if not python.exists():
        pytest.skip("TorchTPU has an environment of its own, which scripts/test-tpu makes")
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "precision", "within"),
    [
        ("gpt2", "float32", 1e-5),
        pytest.param("llama", "float32", 1e-5, marks=pytest.mark.nightly),
        pytest.param("gpt2", "bf16", 0.05, marks=pytest.mark.nightly),
    ],
)
def test_losses_are_the_cpu_s_and_a_resumed_pack_s_bit_for_bit(
    tpu_python, corpus, tmp_path, architecture, precision, within
):
    paths = [str(ROOT), *(str(ROOT / part) for part in ("tests/tpu", "tools/tpu_on_cpu"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [
        tpu_python,
        Path(__file__).with_name("tpu_program.py"),
        architecture,
        precision,
        corpus,
        tmp_path,
    ]
    ended = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    members = trials(str(corpus), architecture, "float32")
    on_cpu = PackRun(members, data.load(members[0].data), RunOptions(device="cpu", threads=1, log_every=1))
    run_to_end(on_cpu.steps())
    assert seen["device"] == "tpu:CPU"
    assert len(seen["losses"]) == STEPS
    for mine, theirs in zip(seen["losses"], on_cpu.records.losses_SK.tolist(), strict=True):
        assert mine == pytest.approx(theirs, abs=within)
    assert seen["begun"] == STEPS // 2
    assert seen["resumed"] == seen["losses"], "bit for bit"
    assert seen["counts"]["compilations"] == 2, "one for the steps, one for evaluations"
    assert seen["counts"]["executions"] == 4, "two chunks, two evaluations"
