"""Packs on XLA: PJRT_DEVICE=CPU with one device and with four virtual ones, each in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mup_tpu.config import RunOptions
from mup_tpu.devices import get_device
from mup_tpu.devices.base import MeshShape
from mup_tpu.devices.xla import choose_mesh
from mup_tpu.errors import ConfigError
from mup_tpu.training.loop import PackRun, run_to_end

sys.path.insert(0, str(Path(__file__).parent))
from xla_program import STEPS, trials

MESHES = {"one device": (1, "auto"), "trials": (4, "auto"), "data": (4, "trial=2,data=2")}


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """What the program printed for a mesh and precision, and the compiled programs' text; run once each."""
    pytest.importorskip("torch_xla")
    done = {}

    def run_once(mesh: str, precision: str = "float32"):
        if (mesh, precision) not in done:
            devices, shape = MESHES[mesh]
            folder = tmp_path_factory.mktemp("xla")
            environment = os.environ | {
                "PJRT_DEVICE": "CPU",
                "CPU_NUM_DEVICES": str(devices),
                "XLA_FLAGS": f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text",
            }
            program = Path(__file__).with_name("xla_program.py")
            command = [sys.executable, program, shape, precision, corpus, folder / "checkpoints"]
            result = subprocess.run(
                [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=600
            )
            assert result.returncode == 0, result.stderr
            programs = [path.read_text() for path in (folder / "hlo").glob("*after_optimizations.txt")]
            done[mesh, precision] = json.loads(result.stdout.splitlines()[-1]), programs, folder
        return done[mesh, precision]

    return run_once


@pytest.fixture(scope="module")
def on_cpu(corpus):
    """The same pack on the CPU device, members in turns."""
    from mup_tpu import data

    members = trials(str(corpus), "float32")
    return run_to_end(PackRun(members, data.load(members[0].data), RunOptions(), None, None).steps())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_one_execution_and_nothing_is_compiled_or_read_after_the_second(run, mesh):
    found, _, _ = run(mesh)
    assert found["steps"]["compilations"] == 0
    # XLA counts an execution some time after its values are there, so that step 2 may count here.
    assert found["steps"]["executions"] - (STEPS - 2) in (0, 1)
    assert found["steps"]["transfers_to_host"] == 0
    assert found["second evaluation"]["compilations"] == 0
    assert found["fallbacks"] == 0
    # Another thread would now and then hold a gradient at the end of a step: another program to compile.
    assert found["backward_threads"] == ["MainThread"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_the_cpu_device_s(run, on_cpu, mesh):
    """In float32, 50 steps apart by reassociation alone; another seed is 1e-2 away."""
    found, _, _ = run(mesh)
    expected = [row["loss"] for row in on_cpu.rows]
    for evaluation in found["evaluations"]:
        assert evaluation == pytest.approx(expected, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_pack_stopped_and_resumed_ends_as_one_that_was_not(run, mesh):
    found, _, _ = run(mesh)
    assert found["rows"] == pytest.approx(found["evaluations"][0], abs=1e-6)


@pytest.mark.slow
def test_padding_fills_the_mesh_and_is_not_seen(run):
    found, _, _ = run("trials")
    assert found["mesh"] == [4, 1]
    assert len(found["rows"]) == len(found["losses"][0]) == 3


@pytest.mark.slow
def test_four_devices_checkpoint_is_gone_on_with_on_the_cpu(run, on_cpu, corpus):
    from mup_tpu import data

    _, _, folder = run("trials")
    members = trials(str(corpus), "float32")
    resumed = PackRun(members, data.load(members[0].data), RunOptions(), folder / "checkpoints", None)
    assert resumed.pack.steps_done == STEPS // 2
    losses = [row["loss"] for row in run_to_end(resumed.steps()).rows]
    assert losses == pytest.approx([row["loss"] for row in on_cpu.rows], abs=5e-5)


def collectives(programs: list[str]) -> list[str]:
    """Names of the collective operations in compiled programs that train (they hold the most text)."""
    training = max(programs, key=len)
    return re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", training)


@pytest.mark.slow
def test_trials_apart_exchange_nothing_and_batches_apart_reduce_once(run):
    assert collectives(run("trials")[1]) == []
    assert collectives(run("data")[1]) == ["all-reduce"]


@pytest.mark.slow
def test_bf16_is_near_float32_and_multiplies_matrices_alone_in_bf16(run):
    exact, _, _ = run("trials")
    rough, _, folder = run("trials", "bf16")
    # As torch_xla wrote it: XLA's CPU client takes bfloat16 apart again.
    program = max((p.read_text() for p in (folder / "hlo").glob("*before_optimizations.txt")), key=len)

    def dtypes(operation: str) -> set[str]:
        return set(re.findall(rf"= (\w+)\[[^=]*? {operation}\(", program))

    assert dtypes("dot") == {"bf16"}
    assert dtypes("exponential") == dtypes("log") == {"f32"}  # softmax and loss
    assert "bf16[" not in program.splitlines()[0]  # weights and optimizer state, in and out
    assert rough["evaluations"][0] != exact["evaluations"][0]
    assert rough["evaluations"][0] == pytest.approx(exact["evaluations"][0], abs=0.03)


@pytest.mark.parametrize(
    ("devices", "members", "batch_size", "shape"),
    [
        (4, 8, 16, MeshShape(4, 1)),
        (4, 3, 16, MeshShape(4, 1)),
        (4, 2, 16, MeshShape(2, 2)),
        (4, 1, 16, MeshShape(1, 4)),
        (8, 5, 16, MeshShape(2, 4)),
        (4, 1, 6, MeshShape(4, 1)),
        (1, 7, 5, MeshShape(1, 1)),
    ],
)
def test_the_mesh_fits_devices_members_and_batch(devices, members, batch_size, shape):
    assert choose_mesh(devices, members, batch_size) == shape


def test_a_mesh_that_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match="mesh 'four' is not understood; write auto"):
        MeshShape.parse("four")
    with pytest.raises(ConfigError, match="mesh 'trial=2,data=1' needs device 'xla'"):
        get_device("cpu").arrange(4, 16, "trial=2,data=1")
    assert get_device("cpu").arrange(4, 16, "trial=1,data=1").torch_device == torch.device("cpu")
