"""Compile packs by a TPU's compiler on a machine without TPUs: memory, collectives, and whether they fit.

One process, this module's `main`, has the installed stack write the program: TorchTPU, with a chip a pack,
or torch_xla. Another compiles it: torch and jax do not meet in one process.

    python -m mup_tpu.tpu.compiler PROGRAM TOPOLOGY DEVICES FOLDER

PROGRAM is HLO text, dumped by XLA before optimisation, or TorchTPU's StableHLO (`train --xla-dump`). libtpu
writes the program of each stage to FOLDER, the last as *.after_codegen.txt; seconds and bytes are printed as
JSON. HLO needs jax 0.7.1, for its private parts, and the libtpu that torch_xla pins; StableHLO needs jax
0.10.2 and libtpu 0.0.52.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mup_tpu.config import Trial
from mup_tpu.config.values import counted
from mup_tpu.devices.peak import TpuType
from mup_tpu.errors import ConfigError
from mup_tpu.files import scratch_folder

STEPS = 100  # steps of the compiled chunk; they are a loop in the program
_TIMEOUT_S = 1800.0  # longest time of each process
_TOOL = Path(__file__).parents[2] / "tools" / "tpu_on_cpu"  # a device "tpu" without a TPU

_VOCAB_SIZE = 4096
# Most bytes of output, mainly losses, that may lie outside of the memory of arguments
_LARGEST_LOSS = 64 * 2**10

# Part of a compiled program's text
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@dataclass(frozen=True)
class Compiled:
    """A program compiled for a TPU; memory is of one chip."""

    seconds: float  # Time of compilation on this machine
    argument_bytes: int  # Parameters, optimizer state and batches
    output_bytes: int
    temp_bytes: int  # Peak of a step's memory beside its arguments
    alias_bytes: int  # Outputs written over arguments
    text: str  # The compiled program

    @property
    def needed_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def collectives(self) -> Counter[str]:
        return Counter(_COLLECTIVE.findall(self.text))


@dataclass(frozen=True)
class Case:
    """A pack to compile, and the collectives that its program may have."""

    name: str
    trial: Trial
    members: Callable[[int], int]  # Number of members, from the number of devices
    mesh: str  # Mesh, with `{n}` for the number of devices
    collectives: Counter[str]


_NARROW = Trial().replace(width=64, depth=2, sequence_length=128, batch_size=16, grad_clip=1.0)
_LONG = _NARROW.replace(width=512, sequence_length=1024, batch_size=8, precision="bf16")
_MUON = _NARROW.replace(optimizer="muon")
CASES = (
    Case("trials apart", _NARROW, lambda devices: 2 * devices, "trial={n},data=1", Counter()),
    Case("a trial's batches split", _NARROW, lambda _: 1, "trial=1,data={n}", Counter({"all-reduce": 1})),
    Case("long sequences, wide, bf16", _LONG, lambda devices: devices, "trial={n},data=1", Counter()),
    Case("trials apart, Muon", _MUON, lambda devices: 2 * devices, "trial={n},data=1", Counter()),
)


def check(tpu: TpuType) -> Iterator[tuple[Case, Compiled, list[str]]]:
    if stack() == "tpu":
        tpu = replace(tpu, devices=1)
    for case in CASES:
        trials = [case.trial.replace(seed=seed) for seed in range(case.members(tpu.devices))]
        program = trace_pack(trials, _VOCAB_SIZE, tpu.devices, case.mesh.format(n=tpu.devices))
        compiled = compile_program(program, tpu)
        yield case, compiled, list(faults(case, compiled, tpu))


def faults(case: Case, compiled: Compiled, tpu: TpuType) -> Iterator[str]:
    """Yield the faults of a program, a sentence each."""
    expected = case.collectives if tpu.devices > 1 else Counter()
    if compiled.collectives != expected:
        yield f"passes data between chips by {listed(compiled.collectives)}, not by {listed(expected)}"
    memory = tpu.generation.device_hbm_bytes
    if compiled.needed_bytes > memory:
        needed = f"{compiled.needed_bytes / 2**30:.1f} GiB"
        yield f"needs {needed}, and a device of {tpu.accelerator_type} has {memory / 2**30:.0f} GiB"
    copied = compiled.output_bytes - compiled.alias_bytes
    if copied > _LARGEST_LOSS + 0.02 * compiled.output_bytes:
        yield f"copies {copied} of {compiled.output_bytes} bytes of results, instead of updating in place"


def listed(collectives: Counter[str]) -> str:
    return counted(sorted(collectives.items())) or "nothing"


def stack() -> Literal["tpu", "xla"]:
    """Return the device whose programs are compiled here; TorchTPU and torch_xla fit no common torch."""
    return "tpu" if importlib.util.find_spec("torch_tpu") else "xla"


def trace_pack(
    trials: Sequence[Trial], vocab_size: int, devices: int, mesh: str = "auto", split_over: int = 1
) -> str:
    """Return the program of a chunk of a pack's training, as torch_xla or TorchTPU hands it over to XLA.

    `mesh` and `split_over` are as in `RunOptions`.

    Raises:
        ConfigError: a package is missing, or the stack refuses the pack.
    """
    device = stack()
    _check_installed(device)
    with scratch_folder() as folder:
        pack = {
            "trials": [t.flat() for t in trials], "vocab_size": vocab_size, "mesh": mesh,
            "device": device, "folder": str(folder / "programs"), "split_over": split_over,
        }  # fmt: skip
        environment = os.environ | _module_path()
        code = "from mup_tpu.tpu.compiler import main; main()"
        if device == "tpu":
            environment["PYTHONPATH"] += f"{os.pathsep}{_TOOL}"
            environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # for the CPU, it never runs
            code, names = f"import tpu_on_cpu; {code}", "programs/*.mlir"
        else:
            environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
            environment["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
            names = "*.before_optimizations.txt"
        (folder / "pack.json").write_text(json.dumps(pack))
        with (folder / "pack.json").open() as stdin, (folder / "errors").open("w") as errors:
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, stdin=stdin, stderr=errors, stdout=errors, env=environment)
            try:
                return _wait_for_program(folder, names, process)
            finally:  # the program need not run, nor XLA's CPU compiler
                process.kill()
                process.wait()


def _wait_for_program(folder: Path, names: str, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        for path in folder.glob(names):
            text = path.read_text()
            # A program of XLA is whole once it ends with a brace; TorchTPU renames a whole one.
            if "while(" in text and (path.suffix == ".mlir" or text.rstrip().endswith("}")):
                return text
        if has_ended:
            why = _last_error((folder / "errors").read_text())
            raise ConfigError(f"the pack's program could not be made: {why}")
        time.sleep(0.2)
    raise ConfigError(f"the pack's program was not made within {_TIMEOUT_S:.0f} s")


def compile_program(program: str, tpu: TpuType) -> Compiled:
    """Compile a program that `trace_pack` made for the same number of devices."""
    with scratch_folder() as folder:
        source = folder / "program.txt"
        source.write_text(program)
        command = [sys.executable, "-m", "mup_tpu.tpu.compiler"]
        command += [str(source), tpu.topology, str(tpu.devices), str(folder)]
        options: dict[str, Any] = {"capture_output": True, "text": True, "env": os.environ | _module_path()}
        result = subprocess.run(command, timeout=_TIMEOUT_S, **options)
        if result.returncode:
            why = _last_error(result.stderr)
            raise ConfigError(f"libtpu does not compile the pack for {tpu.topology}: {why}")
        (last,) = folder.glob("*.after_codegen.txt")
        return Compiled(**json.loads(result.stdout.splitlines()[-1]), text=last.read_text())


def _check_installed(device: str) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigError("libtpu compiles for TPUs on Linux x86-64 alone")
    extra = "tpu-on-cpu" if device == "tpu" else "xla-compiler"
    for package in ("lammps-jax-pjrt-cpu" if device == "tpu" else "torch_xla", "libtpu", "jax"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            message = f"{package} is not installed: pip install '.[{extra}]'"
            raise ConfigError(f"to compile for TPUs, {message}") from None


def _module_path() -> dict[str, str]:
    # This package comes first on the path of modules, and the working folder is not on it.
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, places)), "PYTHONSAFEPATH": "1"}


def _last_error(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["no word of why"])[-1]


def main() -> None:
    """Train one chunk of a pack on tokens that are all 0: its program is written (`trace_pack`)."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mup_tpu.devices import get_device
    from mup_tpu.training.pack import Pack

    order = json.load(sys.stdin)
    trials = [Trial().replace(**fields) for fields in order["trials"]]
    data = trials[0].data
    if order["device"] == "tpu":
        from mup_tpu.tpu.torchtpu import dump_programs

        dump_programs(order["folder"])
    places = len(trials), data.batch_size, order["mesh"], order["split_over"]
    device = get_device(order["device"]).arrange(*places)
    # Tensors of TorchTPU need no values here and take no memory: a pack may be wider than this machine.
    with FakeTensorMode() if order["device"] == "tpu" else contextlib.nullcontext():
        pack = Pack(trials, order["vocab_size"], device)
        tokens_SBT1 = torch.zeros(STEPS, data.batch_size, data.sequence_length + 1, dtype=torch.int64)
        pack.train(device.place_stack(tokens_SBT1, "data", STEPS), STEPS)


def compile_text(program: str, topology: str, count: int) -> dict[str, float]:
    """Compile a program for the first devices of a topology; return sizes and seconds."""
    # No search for a TPU, no request to a cloud's metadata, no log, no lock against another libtpu.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0", "TPU_LOG_DIR": "disabled", "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }  # fmt: skip
    import numpy as np
    from jax.experimental import topologies
    from jaxlib import _jax, xla_client

    # Cores of v4 and v5p work as one device, "megacore".
    more: dict[str, Any] = {"chip_config_name": "megacore"} if topology.startswith(("v4", "v5p")) else {}
    if topology.endswith(":1x1"):  # a host has four chips by default
        more["chips_per_host_bounds"] = (1, 1, 1)
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more)
    devices: list[Any] = described.devices[:count]
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = 1
    options.num_partitions = build.num_partitions = count
    build.use_spmd_partitioning = count > 1
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in devices]]))
    module = _stablehlo(program)
    began = time.perf_counter()
    executable = devices[0].client.compile(
        module, executable_devices=_jax.DeviceList(tuple(devices)), compile_options=options
    )
    seconds = time.perf_counter() - began
    sizes = executable.get_compiled_memory_stats()
    kinds = ("argument", "output", "temp", "alias")
    sizes_by_kind = {f"{kind}_bytes": getattr(sizes, f"{kind}_size_in_bytes") for kind in kinds}
    return {"seconds": seconds, **sizes_by_kind}


def _stablehlo(program: str) -> Any:
    """Convert the program for libtpu's client; donated buffers are lost on the way, and marked again."""
    from jax._src.interpreters import mlir
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir

    if not program.startswith("HloModule"):
        with mlir.make_ir_context():
            return ir.Module.parse(program)  # jax 0.10 takes a module
    proto = _jax.hlo_module_from_text(program).as_serialized_hlo_module_proto()
    converted = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(proto))
    donated = donated_parameters(program)
    with mlir.make_ir_context():
        module: Any = ir.Module.parse(converted)
        functions = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations}
        main = functions["main"]
        count = len(ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).inputs)
        given: Any = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else [{}] * count
        marked: list[Any] = []
        for i, attributes in enumerate(given):
            entries = {entry.name: entry.attr for entry in attributes}
            if i in donated:
                entries["jax.buffer_donor"] = ir.BoolAttr.get(True)
            marked.append(ir.DictAttr.get(entries))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(marked)
        return mlir.module_to_bytecode(module)


def donated_parameters(program: str) -> set[int]:
    # Parameters that the program may write its results over, by number
    header = program.partition("\n")[0]
    donors = re.search(r"buffer_donor=\{ (.*?) \}(?:,|$)", header)
    return {int(number) for number in re.findall(r"\((\d+), \{\}\)", donors[1])} if donors else set()


if __name__ == "__main__":
    path, name, chips, folder = sys.argv[1:]
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    print(json.dumps(compile_text(Path(path).read_text(), name, int(chips))))
