"""Compile a program with libtpu: python -m mup_tpu.tpu.libtpu PROGRAM TOPOLOGY DEVICES FOLDER

PROGRAM is HLO text, dumped by XLA before optimisation, or TorchTPU's StableHLO (`train --xla-dump`). libtpu
writes the program of each stage to FOLDER; the memory of each buffer comes early, the last stage is
*.after_codegen.txt. Prints seconds and sizes as JSON. HLO needs jax 0.7.1, for its private parts,
and the libtpu that torch_xla pins; StableHLO needs jax 0.10.2 and libtpu 0.0.52. No TPU, and no torch in this
process.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

# For libtpu: no search for a TPU, no request to a cloud's metadata, no log, no lock against another libtpu.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0", "TPU_LOG_DIR": "disabled", "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


def compile_text(program: str, topology: str, count: int) -> dict[str, float]:
    """Compile a program for the first devices of a topology; return sizes and seconds."""
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
    return {
        "seconds": seconds,
        **{f"{kind}_bytes": getattr(sizes, f"{kind}_size_in_bytes") for kind in kinds},
    }


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
