"""Run by test_cuda.py in a process with hollow GPUs. Prints what came of it as JSON.

steps PRECISION ARCHITECTURE/OPTIMIZER ...   kernels of a replayed step of each, and what was logged
recorder                                     graphs that have gone, and a step that no graph can have
"""

import ctypes
import gc
import json
import logging
import sys
import threading

import torch

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.devices.graphs import CudaRecorder, GraphSteps
from mup_tpu.training.pack import Pack

BATCHES = 4

LOGGED: list[str] = []


class Logged(logging.Handler):
    """Messages of all loggers, kept."""

    def emit(self, record: logging.LogRecord) -> None:
        LOGGED.append(record.getMessage())


def kernels() -> int:
    """Kernels that the GPU was given so far."""
    counted = ctypes.CDLL("libcuda.so.1").hollow_gpu_kernels
    counted.restype = ctypes.c_size_t
    return int(counted())


def steps(precision: str, name: str) -> dict[str, object]:
    """Two stretches of steps and an evaluation of a pack; kernels of each step of a third stretch."""
    architecture, optimizer = name.split("/")
    trial = Trial().replace(
        architecture=architecture, optimizer=optimizer, precision=precision, width=32, base_width=16,
        head_size=16, depth=1, batch_size=4, sequence_length=16,
    )  # fmt: skip
    device = get_device("cuda")
    pack = Pack([trial, trial.replace(seed=1)], 64, device)

    def stretch() -> torch.Tensor:
        return device.place_stack(torch.zeros(BATCHES, 4, 17, dtype=torch.int64), "data", BATCHES)

    for _ in range(2):
        pack.read(pack.train(stretch(), BATCHES))
    pack.read(pack.evaluate(stretch()))
    placed, began = stretch(), kernels()
    pack.train(placed, BATCHES)
    return {"kernels": (kernels() - began) / BATCHES}


def recorder() -> dict[str, object]:
    """Graphs that go before others are recorded in their memory, and a step that waits for the host."""
    shared = CudaRecorder()

    def trained(step) -> GraphSteps:
        steps = GraphSteps(step, shared)
        steps((torch.zeros(64, device="cuda"),), (), (torch.zeros(8, 64, device="cuda"),), 8)
        return steps

    def plain(changed, fixed, item):
        return changed[0].add_(item[0] * 2).sum()

    def waiting(changed, fixed, item):
        torch.cuda.current_stream().synchronize()
        return changed[0].add_(item[0]).sum()

    class Waiting(GraphSteps):
        """Steps that wait for the device, which tracing would leave out."""

        def __init__(self) -> None:
            super().__init__(plain, shared, lambda traced: lambda *given: waiting([given[0]], (), given[1:]))

    kept, source = [], torch.zeros(1000, device="cuda")
    for _ in range(3):  # the graph goes, and what it has made stays
        shared.record(lambda: kept.append(source * 2))
        gc.collect()
    before = torch.cuda.current_stream()
    Waiting()((torch.zeros(64, device="cuda"),), (), (torch.zeros(8, 64, device="cuda"),), 8)
    after = torch.cuda.current_stream()
    for gib in (50, 60):  # fits if unused memory is freed, which torch leaves out during a capture
        torch.empty(gib * 2**30, dtype=torch.uint8, device="cuda")
    ended = threading.Event()

    def place() -> None:
        while not ended.is_set():
            torch.zeros(1000).pin_memory().to("cuda", non_blocking=True)
            torch.cuda.current_stream().synchronize()

    other = threading.Thread(target=place)
    other.start()
    for _ in range(20):
        trained(plain)
    ended.set()
    other.join()
    return {"stream is the caller's": before == after}


def main() -> None:
    logging.getLogger().addHandler(Logged())
    if sys.argv[1] == "recorder":
        found: object = recorder()
    else:
        precision, *names = sys.argv[2:]
        found = {name: steps(precision, name) for name in names}
    print(json.dumps({"found": found, "logged": LOGGED}))


if __name__ == "__main__":
    main()
