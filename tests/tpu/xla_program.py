"""Run by test_xla.py in a process of its own: a pack on PJRT_DEVICE=CPU. Prints what came of it as JSON.

A process has one XLA client, but importing torch_xla takes as long as training. So this imports it once, and
forks for each run that stdin asks for, in a line of JSON: environment, file for what it prints, arguments:

MESH PRECISION CORPUS CHECKPOINTS ARCHITECTURE OPTIMIZER BLOCKS
tpu CORPUS
micro MESH
split CORPUS CHECKPOINTS
refused
"""

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_xla import runtime
from torch_xla._internal import tpu

from mup_tpu import data
from mup_tpu.config import RunOptions
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError
from mup_tpu.models.layers import OnePassLayerNorm, OnePassRMSNorm
from mup_tpu.tpu import xla
from mup_tpu.training.loop import PackRun
from mup_tpu.training.pack import Pack

sys.path.insert(0, str(Path(__file__).parent))
from xla_trials import CHUNK, STEPS, micro_batches, trials

NORMS = (OnePassLayerNorm, OnePassRMSNorm)


@contextlib.contextmanager
def backward_threads() -> Iterator[list[str]]:
    """Which threads gradients are computed in, as one layer of the model sees them."""
    found: list[str] = []

    class Probe(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            found.append(threading.current_thread().name)
            return gradient.clone()

    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: Probe.apply(output) if type(module) in NORMS else None
    )
    yield found
    hook.remove()


def in_parts(mesh: str) -> dict[str, Any]:
    """Losses of a pack whose batches come in two parts."""
    return {"losses": micro_batches(get_device("xla").arrange(2, 4, mesh), 2)}


def refused() -> dict[str, str]:
    """Error of a device whose kind nobody named; torch_xla chooses one when it is imported first."""
    chosen = runtime.device_type

    def choose() -> str | None:
        runtime._maybe_select_default_device()
        return chosen()

    runtime.device_type = choose
    del os.environ["PJRT_DEVICE"]
    try:
        return {"error": f"none: {get_device('xla')}"}
    except ConfigError as error:
        return {"error": str(error)}


def as_on_a_tpu(corpus: str) -> dict[str, Any]:
    """A pack placed where torch_xla says that it sees chips and has their client, which is the CPU's."""
    runtime.device_type = lambda: "TPU"
    tpu.num_available_chips = lambda: 4
    members = trials(corpus, "float32")
    dataset = data.load(members[0].data, progress=False)
    empty = get_device("xla").free_memory_bytes()
    run = PackRun(members, dataset, RunOptions(device="xla"))
    free = run.device.free_memory_bytes()
    placed = sum(t.nbytes for t in run.pack.tensors().values())
    return {
        "name": run.device.name, "empty": empty, "free": free,
        "placed": placed, "mesh": run.device.mesh.trial,
        "cache": os.environ["XLA_PERSISTENT_CACHE_PATH"],
    }  # fmt: skip


def split(corpus: str, checkpoints: str) -> dict[str, Any]:
    """A trial whose parameters two devices share, and the bytes placed on each for it."""
    members = trials(corpus, "float64")[1:2]
    dataset = data.load(members[0].data, progress=False)
    options = RunOptions(device="xla", split_over=2, log_every=1, checkpoint_every=STEPS // 2)
    run = PackRun(members, dataset, options, Path(checkpoints))
    whole = sum(t.nbytes for t in run.pack.tensors().values())
    placed = sum(xla._PLACED._bytes.values())
    run.finish()
    return {"losses": run.records.losses_SK[:, 0].tolist(), "share": placed / whole}


def main(mesh: str, precision: str, corpus: str, checkpoints: str, architecture: str, optimizer: str) -> None:
    """Count over bare steps; then train through the loop, stop half-way and go on, but not in bf16."""
    members = trials(corpus, precision, architecture, optimizer)
    dataset = data.load(members[0].data, progress=False)
    device = get_device("xla").arrange(len(members), members[0].data.batch_size, mesh)
    pack = Pack(members, dataset.vocab_size, device)
    batches_SBT1 = torch.from_numpy(np.stack([dataset.train_batch(s) for s in range(STEPS)]))
    chunks = [device.place_stack(part, "data", CHUNK) for part in batches_SBT1.split(CHUNK)]
    validation = torch.from_numpy(dataset.validation_batches(2))
    held_out = device.place_stack(validation, "data", len(validation))
    losses, counts = [], []
    with backward_threads() as threads:
        for chunk in chunks:  # the last one is shorter than the others
            left = STEPS - len(losses)
            losses += pack.read(pack.train(chunk, min(CHUNK, left)))[:left].tolist()
            counts.append(xla.report())
    first = pack.read(pack.evaluate(held_out)).tolist()
    after_evaluation = xla.report()
    again = pack.read(pack.evaluate(held_out)).tolist()
    after_second = xla.report()

    options = RunOptions(device="xla", mesh=mesh, eval_every=STEPS // 2, checkpoint_every=STEPS // 2)
    rows: list[dict[str, Any]] = []
    if precision != "bf16":
        stopped = PackRun(members, dataset, options, Path(checkpoints))
        for event in stopped.steps():
            if event.step == STEPS // 2:
                stopped.save()
                break
        rows = PackRun(members, dataset, options, Path(checkpoints)).finish().rows
    found = {
        "mesh": [device.mesh.trial, device.mesh.data], "losses": losses, "evaluations": [first, again],
        "first chunk": counts[0],
        "chunks": {name: counts[-1][name] - counts[0][name] for name in counts[0]},
        "second evaluation": {n: after_second[n] - after_evaluation[n] for n in after_second},
        "fallbacks": after_second["fallbacks"], "backward_threads": sorted(set(threads)),
        "rows": [row["loss"] for row in rows],
    }  # fmt: skip
    print(json.dumps(found))


def run(arguments: list[str]) -> None:
    """One run; it has a process to itself."""
    kinds = {"micro": in_parts, "tpu": as_on_a_tpu, "refused": refused, "split": split}
    if arguments[0] in kinds:
        print(json.dumps(kinds[arguments[0]](*arguments[1:])))
    else:
        main(*arguments)


def serve() -> None:
    """Fork for each line of stdin, and answer with the exit code."""
    for line in sys.stdin:
        environment, output, arguments = json.loads(line)
        child = os.fork()
        if not child:
            code = 1
            with open(output, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            try:
                os.environ.update(environment)
                run(arguments)
                sys.stdout.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
