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
from mup_tpu.models import declare
from mup_tpu.tpu import torchtpu
from mup_tpu.tpu.torchtpu import Chunks, report
from mup_tpu.training.loop import PackRun

ROOT = Path(__file__).parents[2]


def test_chunks_of_any_length_are_one_program_and_change_what_single_steps_change(monkeypatch):
    """On the CPU, as traced: the compiler's part is TorchTPU's, below."""
    programs = []

    def as_traced(graph, given, donated):
        programs.append(list(donated))
        return graph

    def step(changed, fixed, batch):
        changed["w"].mul_(fixed[0]).add_(batch[0])
        changed["count"] += 1
        return changed["w"].sum() + batch[1]

    monkeypatch.setattr(torchtpu, "compiled", as_traced)
    stacks = (torch.arange(15.0).view(5, 3), torch.arange(5.0))
    chunks, counted = Chunks(step), report()
    mine, theirs = ({"w": torch.ones(3), "count": torch.zeros(())} for _ in range(2))
    for steps in (5, 2, 4):
        losses = chunks(mine, (torch.tensor(0.5),), stacks, steps)
        assert torch.equal(losses[:steps], one_by_one(step)(theirs, (torch.tensor(0.5),), stacks, steps))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert programs == [[1, 2]], "the second and third argument are written over"
    assert report()["executions"] - counted["executions"] == 3
    shorter = tuple(stack[:2] for stack in stacks)
    losses = chunks(mine, (torch.tensor(0.5),), shorter, 2)
    assert torch.equal(losses, one_by_one(step)(theirs, (torch.tensor(0.5),), shorter, 2))
    assert len(programs) == 2, "one for each shape"


def test_without_torch_tpu_the_device_is_a_sentence():
    if importlib.util.find_spec("torch_tpu"):
        pytest.skip("torch_tpu is installed here")
    with pytest.raises(ConfigError, match="^device 'tpu' is not available: torch_tpu cannot be imported"):
        get_device("tpu")


@pytest.fixture(scope="module")
def run():
    """Run Python with torch_tpu: scripts/test-tpu makes its environment, .venv-tpu."""
    python = ROOT / ".venv-tpu/bin/python"
    if not python.exists():
        pytest.skip("TorchTPU has an environment of its own, which scripts/test-tpu makes")
    paths = [str(ROOT), *(str(ROOT / part) for part in ("tests/tpu", "tools/tpu_on_cpu"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

    def run(*words):
        ended = subprocess.run([python, *map(str, words)], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    return run


@pytest.mark.nightly
def test_a_command_without_a_tpu_ends_in_a_sentence(run):
    printed = run("-c", WITHOUT_A_TPU).splitlines()[-2:]
    assert printed == [
        "error: device 'tpu' found no TPU here: run on a TPU VM, or take another --device",
        "2",
    ]


WITHOUT_A_TPU = """
import sys
from mup_tpu.cli import main
sys.stderr = sys.stdout
try:
    main(["train", "--device", "tpu", "--steps", "2"])
except SystemExit as end:
    print(end.code)
"""


def on_cpu(members):
    pack = PackRun(members, data.load(members[0].data), RunOptions(device="cpu", threads=1, log_every=1))
    return pack.finish().rows, pack.records.losses_SK.tolist()


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
    run, corpus, tmp_path, architecture, precision, within, topologies
):
    program = Path(__file__).with_name("tpu_program.py")
    seen = json.loads(run(program, architecture, precision, corpus, tmp_path).splitlines()[-1])
    members = trials(str(corpus), architecture, "float32")
    _, losses = on_cpu(members)
    assert seen["device"] == "tpu:CPU"
    assert len(seen["losses"]) == STEPS
    for mine, theirs in zip(seen["losses"], losses, strict=True):
        assert mine == pytest.approx(theirs, abs=within)
    assert seen["begun"] == STEPS // 2
    assert seen["resumed"] == seen["losses"], "bit for bit"
    assert seen["counts"]["compilations"] == 2, "one for the steps, one for evaluations"
    assert seen["counts"]["executions"] == 4, "two chunks, two evaluations"
    saved = 3 * len(declare(members[0].model, 256, 16).parameters)  # by AdamW, with its two moments
    assert seen["counts"]["transfers_to_host"] == 4 + saved, "losses of each of them, and a checkpoint"
    steps = max((tmp_path / "programs").iterdir(), key=lambda path: path.stat().st_size)
    assert "stablehlo.while" in steps.read_text()
    for topology in topologies:  # by the compiler of TPUs that are not here
        printed = run("-m", "mup_tpu.tpu.compiler", steps, topology, 1, tmp_path / "compiled")
        sizes = json.loads(printed.splitlines()[-1])
        assert sizes["argument_bytes"] > sizes["alias_bytes"] > 0.9 * sizes["output_bytes"] > 0, "in place"


@pytest.mark.nightly
def test_each_chip_of_a_ray_cluster_trains_packs_of_its_own(run, corpus, tmp_path):
    """Two hosts, of two chips and of one, as nodes of this machine."""
    seen = json.loads(run(Path(__file__).with_name("tpu_ray_program.py"), corpus, tmp_path).splitlines()[-1])
    assert seen["outcome"] == {"finished": 3}
    chips = {(worker["node"], worker["TPU_VISIBLE_CHIPS"]) for worker in seen["seen"]}
    assert len(chips) == 3 and len({node for node, _ in chips}) == 2
    assert {worker["TPU_CHIPS_PER_PROCESS_BOUNDS"] for worker in seen["seen"]} == {"1,1,1"}
    assert set(seen["devices"]) == {"tpu:CPU"}
    base = trials(str(corpus), "gpt2", "float32")[1]
    rows, _ = on_cpu([base.replace(learning_rate=rate) for rate in (0.003, 0.01, 0.02)])
    assert seen["losses"] == pytest.approx([row["loss"] for row in rows], abs=1e-5)


@pytest.mark.nightly
def test_doctor_compiles_packs_for_tpus_that_are_not_here(run):
    printed = run("-c", DOCTOR)
    for kind in ("v4-8", "v5litepod-8", "v6e-8", "v7-8"):
        assert f"{kind}  trials apart: compiled in" in printed
    assert printed.count("exchanged: nothing") == 4
    assert printed.rstrip().endswith("no problems")


DOCTOR = """
from mup_tpu.cli import main
from mup_tpu.tpu import compiler
compiler.CASES = compiler.CASES[:1]
for kind in ("v4-8", "v5litepod-8", "v6e-8", "v7-8"):
    main(["doctor", "--tpu", kind])
"""
