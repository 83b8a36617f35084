"""Packs on XLA: PJRT_DEVICE=CPU with one device and with four virtual ones, each in a process of its own."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from xla_trials import CHUNK, STEPS, micro_batches, trials

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.devices import get_device
from mup_tpu.devices.base import MeshShape, choose_mesh
from mup_tpu.errors import ConfigError
from mup_tpu.models import ARCHITECTURES, declare
from mup_tpu.tpu.compiler import donated_parameters
from mup_tpu.training.loop import PackResult, PackRun
from mup_tpu.training.members import state_slots

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"
"""Spares LLVM's part, which takes as long as all the rest; what XLA itself makes of a program is the same."""
MESHES = {"one device": (1, "auto"), "trials": (4, "auto"), "data": (4, "trial=2,data=2")}
PROGRAMS = [
    pytest.param(mesh, name, marks=() if (mesh, name) == ("trials", "gpt2") else pytest.mark.nightly)
    for mesh in MESHES
    for name in ARCHITECTURES
]
"""GPT-2's on devices that share trials run daily; so do its micro-batches on devices that share batches."""


@pytest.fixture(scope="module")  # in one process of pytest-xdist, which starts one server
def run_program(tmp_path_factory, with_torch_xla):
    """What xla_program.py prints, in a process with so many devices."""
    command = [sys.executable, Path(__file__).with_name("xla_program.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=os.environ | {"PJRT_DEVICE": "CPU"}, **pipes)
    output = tmp_path_factory.mktemp("xla") / "output"

    def run_program(*arguments: object, devices: int, **environment: str) -> dict[str, Any]:
        environment["CPU_NUM_DEVICES"] = str(devices)
        line = json.dumps([environment, str(output), [str(a) for a in arguments]])
        print(line, file=server.stdin, flush=True)
        code = server.stdout.readline()
        assert code == "0\n", f"{code} {output.read_text()}"
        return json.loads(output.read_text().splitlines()[-1])

    yield run_program
    server.communicate()  # it ends where its input does


@pytest.fixture(scope="module")
def run(corpus, run_program, tmp_path_factory):
    """What the program printed for a mesh, precision and update rule, and the compiled programs' text; run
    once each."""

    @functools.cache
    def run_once(mesh: str, precision: str, architecture: str, optimizer: str):
        devices, shape = MESHES[mesh]
        folder = tmp_path_factory.mktemp("xla")
        flags = f"{QUICK_TO_COMPILE} --xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text"
        arguments = (shape, precision, corpus, folder / "checkpoints", architecture, optimizer)
        found = run_program(*arguments, devices=devices, XLA_FLAGS=flags)
        programs = [path.read_text() for path in (folder / "hlo").glob("*after_optimizations.txt")]
        return found, programs, folder

    def run(mesh: str, precision: str = "float32", architecture: str = "gpt2", optimizer: str = "adamw"):
        return run_once(mesh, precision, architecture, optimizer)

    return run


def precision_of(architecture: str) -> str:
    """Experts in float64: reassociation in float32 sends a token to another expert now and then."""
    return "float64" if architecture == "moe" else "float32"


def run_on_cpu(corpus: Path, architecture: str = "gpt2", optimizer: str = "adamw") -> PackResult:
    """The same pack on the CPU device, members in turns, by one thread: by two, sums have another order."""
    members = trials(str(corpus), precision_of(architecture), architecture, optimizer)
    return PackRun(members, data.load(members[0].data), RunOptions(threads=1)).finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "architecture"), [*PROGRAMS, pytest.param("trials", "gpt2 with muon", marks=pytest.mark.nightly)]
)
def test_steps_handed_over_together_are_one_program_and_one_execution_whatever_their_number(
    run, mesh, architecture
):
    """Trials apart exchange nothing, batches apart reduce once."""
    name, _, optimizer = architecture.partition(" with ")
    found, programs, _ = run(mesh, architecture=name, optimizer=optimizer or "adamw")
    assert found["first chunk"]["compilations"] == 1
    assert found["chunks"]["compilations"] == 0
    # XLA counts an execution some time after its values are there, so that the first may count here, and the
    # last not yet.
    assert abs(found["chunks"]["executions"] - (math.ceil(STEPS / CHUNK) - 1)) <= 1
    assert found["second evaluation"]["compilations"] == 0
    assert found["fallbacks"] == 0
    # Another thread would now and then hold a gradient at the end of a step: another program to compile.
    assert found["backward_threads"] == ["MainThread"]
    assert collectives(programs) == (["all-reduce"] if mesh == "data" else [])


@pytest.mark.slow
def test_micro_batches_train_as_the_batch_does_whole(run_program, tmp_path):
    """Of a batch that two devices share, each of which takes its sequences one by one; they reduce once."""
    flags = f"{QUICK_TO_COMPILE} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    found = run_program("micro", "trial=1,data=2", devices=2, XLA_FLAGS=flags)
    programs = [path.read_text() for path in tmp_path.glob("*after_optimizations.txt")]
    assert collectives(programs) == ["all-reduce"]
    whole = micro_batches(get_device("cpu").arrange(2, 4), 1)
    assert len(whole) == 8 and whole[0] != whole[4]
    assert found["losses"] == pytest.approx(whole, rel=1e-9)


@pytest.mark.nightly
def test_a_trial_split_over_devices_is_the_trial_and_its_checkpoint_goes_on_without_them(
    run_program, corpus, tmp_path
):
    found = run_program("split", corpus, tmp_path, devices=2, XLA_FLAGS=QUICK_TO_COMPILE)
    members = trials(str(corpus), "float64")[1:2]
    dataset, options = data.load(members[0].data), RunOptions(device="cpu", threads=1, log_every=1)
    whole, continued = PackRun(members, dataset, options), PackRun(members, dataset, options, tmp_path)
    assert 0.5 < found["share"] < 0.6, "half of each matrix; vectors whole"
    assert continued.pack.steps_done == STEPS // 2
    whole.finish(), continued.finish()
    losses = whole.records.losses_SK[:, 0].tolist()
    rest = continued.records.losses_SK[STEPS // 2 :, 0].tolist()
    assert found["losses"] == pytest.approx(losses, rel=1e-8)
    assert rest == pytest.approx(losses[STEPS // 2 :], rel=1e-8)


@pytest.mark.slow
def test_on_a_tpu_memory_is_the_generation_s_less_what_was_placed(run_program, corpus):
    """torch_xla cannot tell under SPMD, so that every pack failed there."""
    found = run_program("tpu", corpus, devices=2, TPU_ACCELERATOR_TYPE="v4-8")
    assert found["name"] == "xla:TPU"
    assert found["empty"] == int(0.95 * 32 * 2**30)
    on_each = found["placed"] * 4 / 3 / found["mesh"]  # three members, padded to four
    assert found["empty"] - found["free"] == pytest.approx(on_each, rel=0.1)
    assert found["cache"].startswith(os.environ["MUP_TPU_CACHE"])


@pytest.mark.slow
def test_without_a_tpu_it_is_a_sentence_unless_the_cpu_was_asked_for(run_program):
    sentence = "device 'xla' found no TPU here and would train on the CPU; set PJRT_DEVICE=CPU"
    assert run_program("refused", devices=1)["error"].startswith(sentence)


@pytest.mark.nightly
def test_a_command_without_a_tpu_ends_in_a_sentence(with_torch_xla):
    command = [sys.executable, "-m", "mup_tpu", "train", "--device", "xla"]
    environment = os.environ | {"PJRT_DEVICE": "TPU"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    sentence = "PJRT_DEVICE=TPU, but there is no TPU chip here: run on a TPU VM, or set PJRT_DEVICE=CPU"
    assert sentence in result.stderr.replace("\n", " ")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_command_reports_what_xla_did_and_dumps_its_programs(corpus, tmp_path, with_torch_xla):
    command = [
        sys.executable, "-m", "mup_tpu", "train", "--device", "xla", "--corpus", corpus, "--width", 32,
        "--base-width", 16, "--head-size", 16, "--depth", 1, "--sequence-length", 16, "--batch-size", 4,
        "--steps", 100, "--xla-dump", tmp_path / "programs",
    ]  # fmt: skip
    environment = os.environ | {"PJRT_DEVICE": "CPU", "COLUMNS": "200", "XLA_FLAGS": QUICK_TO_COMPILE}
    command = [str(word) for word in command]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    compiled, executed = re.search(
        r"XLA compiled (\d+) programs.*\n(\d+) executions for 100", result.stdout
    ).groups()
    assert int(compiled) == 2 and int(executed) in (1, 2)  # counted late
    # All steps are one chunk, which compiles too: no rate of theirs alone is known.
    printed = result.stdout + result.stderr
    rates = [int(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) tokens/s (?:·|\()", printed)]
    assert len(rates) == 3 and max(rates) < 1.5 * min(rates)
    programs = [path.read_text() for path in (tmp_path / "programs").glob("*before_optimizations.txt")]
    assert any(" while(" in text for text in programs)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "architecture"), PROGRAMS)
def test_losses_are_the_cpu_device_s(run, corpus, mesh, architecture):
    """In float32, apart by reassociation alone; another seed is 1e-2 away."""
    found, _, _ = run(mesh, precision_of(architecture), architecture)
    expected = [row["loss"] for row in run_on_cpu(corpus, architecture).rows]
    for evaluation in found["evaluations"]:
        assert evaluation == pytest.approx(expected, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["trials", *(pytest.param(mesh, marks=pytest.mark.nightly) for mesh in ("one device", "data"))]
)
def test_a_pack_stopped_and_resumed_ends_as_one_that_was_not(run, mesh):
    found, _, _ = run(mesh)
    assert found["rows"] == pytest.approx(found["evaluations"][0], abs=1e-6)
    expected = {"trials": [4, 1], "one device": [1, 1], "data": [2, 2]}[mesh]
    assert found["mesh"] == expected, "padding fills it and is not seen"
    assert len(found["rows"]) == len(found["losses"][0]) == 3


@pytest.mark.slow
def test_a_pack_is_handed_over_such_that_it_writes_over_its_state(run, corpus):
    """XLA for the CPU copies all the same; nightly, the TPUs' own compiler does not."""
    _, _, folder = run("trials")
    members = trials(str(corpus), "float32")
    parameters = declare(members[0].model, 256, members[0].data.sequence_length).parameters
    slots = state_slots(members[0], parameters).values()
    programs = (path.read_text() for path in (folder / "hlo").glob("*before_optimizations.txt"))
    donated = max(map(len, map(donated_parameters, programs)))
    assert donated >= len(parameters) + sum(map(len, slots))


@pytest.mark.slow
def test_four_devices_checkpoint_is_gone_on_with_on_the_cpu(run, corpus):
    _, _, folder = run("trials")
    members = trials(str(corpus), "float32")
    one_thread = RunOptions(threads=1)  # as `run_on_cpu`
    resumed = PackRun(members, data.load(members[0].data), one_thread, folder / "checkpoints")
    assert resumed.pack.steps_done == STEPS // 2
    losses = [row["loss"] for row in resumed.finish().rows]
    assert losses == pytest.approx([row["loss"] for row in run_on_cpu(corpus).rows], abs=5e-5)


def collectives(programs: list[str]) -> list[str]:
    """Names of the collective operations in compiled programs that train (they hold the most text)."""
    training = max(programs, key=len)
    return re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", training)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["trials", "data"])
def test_muon_s_matrix_products_stay_on_the_chip_of_their_trial(run, mesh, corpus):
    """No product of a stack is gathered or split; the losses are the CPU device's, resumed or not."""
    found, programs, _ = run(mesh, optimizer="muon")
    assert collectives(programs) == {"trials": [], "data": ["all-reduce"]}[mesh]
    expected = [row["loss"] for row in run_on_cpu(corpus, optimizer="muon").rows]
    for losses in (*found["evaluations"], found["rows"]):
        assert losses == pytest.approx(expected, abs=5e-5)


@pytest.mark.nightly
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
    ("given", "shape"),
    [
        ((4, 8, 16), (4, 1)), ((4, 3, 16), (4, 1)), ((4, 2, 16), (2, 2)), ((4, 1, 16), (1, 4)),
        ((8, 5, 16), (2, 4)), ((4, 1, 6), (4, 1)), ((1, 7, 5), (1, 1)),
    ],
)  # fmt: skip
def test_the_mesh_fits_devices_members_and_batch(given, shape):
    assert choose_mesh(*given) == MeshShape(*shape)


def test_a_mesh_that_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match="mesh 'four' is not understood; write auto"):
        MeshShape.parse("four")
    with pytest.raises(ConfigError, match="mesh 'trial=2,data=1' needs device 'xla'"):
        get_device("cpu").arrange(4, 16, "trial=2,data=1")
    assert get_device("cpu").arrange(4, 16, "trial=1,data=1").torch_device == torch.device("cpu")
