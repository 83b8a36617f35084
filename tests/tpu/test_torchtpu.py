"""Packs by TorchTPU, with values: XLA's CPU plugin in place of a chip, in another environment."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from tpu_trials import STEPS, trials

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.devices import get_device
from mup_tpu.devices.base import one_by_one
from mup_tpu.errors import ConfigError
from mup_tpu.tpu.torchtpu import Chunks, report
from mup_tpu.training.loop import PackRun

ROOT = Path(__file__).parents[2]


def test_chunks_of_any_length_are_one_program_and_change_what_single_steps_change(monkeypatch):
    """On the CPU, by Dynamo's own backend: the rest of the way is TorchTPU's, below."""
    programs, compiler = [], torch.compile

    def compile_here(function, backend, options, **how):
        programs.append(backend)
        return compiler(function, backend="eager", **how)

    def step(changed, fixed, batch):
        changed["w"].mul_(fixed[0]).add_(batch[0])
        changed["count"] += 1
        return changed["w"].sum() + batch[1]

    monkeypatch.setattr(torch, "compile", compile_here)
    stacks = (torch.arange(15.0).view(5, 3), torch.arange(5.0))
    chunks, counted = Chunks(step), report()
    mine, theirs = ({"w": torch.ones(3), "count": torch.zeros(())} for _ in range(2))
    for steps in (5, 2, 4):
        losses = chunks(mine, (torch.tensor(0.5),), stacks, steps)
        assert torch.equal(losses[:steps], one_by_one(step)(theirs, (torch.tensor(0.5),), stacks, steps))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert programs == ["tpu"]
    assert report()["executions"] - counted["executions"] == 3


def test_without_torch_tpu_the_device_is_a_sentence():
    if importlib.util.find_spec("torch_tpu"):
        pytest.skip("torch_tpu is installed here")
    with pytest.raises(ConfigError, match="^device 'tpu' is not available: torch_tpu cannot be imported"):
        get_device("tpu")


@pytest.fixture(scope="module")
def tpu_python():
    """Python with torch_tpu: scripts/test-tpu makes its environment, .venv-tpu, beside the default one."""
    python = ROOT / ".venv-tpu/bin/python"
    if not python.exists():
        pytest.skip("TorchTPU has an environment of its own, which scripts/test-tpu makes")
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "precision", "within", "topologies"),
    [
        ("gpt2", "float32", 1e-5, ()),
        pytest.param(
            "llama", "float32", 1e-5, ("v4:2x2x1", "v6e:1x1", "tpu7x:2x2x1"), marks=pytest.mark.nightly
        ),
        pytest.param("gpt2", "bf16", 0.05, ("v5e:1x1",), marks=pytest.mark.nightly),
    ],
)
def test_losses_are_the_cpu_s_and_a_resumed_pack_s_bit_for_bit(
    tpu_python, corpus, tmp_path, architecture, precision, within, topologies
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
    on_cpu.finish()
    assert seen["device"] == "tpu:CPU"
    assert len(seen["losses"]) == STEPS
    for mine, theirs in zip(seen["losses"], on_cpu.records.losses_SK.tolist(), strict=True):
        assert mine == pytest.approx(theirs, abs=within)
    assert seen["begun"] == STEPS // 2
    assert seen["resumed"] == seen["losses"], "bit for bit"
    assert seen["counts"]["compilations"] == 2, "one for the steps, one for evaluations"
    assert seen["counts"]["executions"] == 4, "two chunks, two evaluations"
    steps = max((tmp_path / "programs").iterdir(), key=lambda path: path.stat().st_size)
    assert "stablehlo.while" in steps.read_text()
    for topology in topologies:  # by the compiler of TPUs that are not here
        command = [tpu_python, "-m", "mup_tpu.tpu.libtpu", steps, topology, 1, tmp_path / "compiled"]
        ended = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert json.loads(ended.stdout.splitlines()[-1])["argument_bytes"] > 0
