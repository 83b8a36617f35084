"""Run by test_cuda.py in a process with a GPU, hollow or not. Prints what came of it as JSON.

steps ARCHITECTURE/OPTIMIZER/PRECISION ...   losses of packs on GPU and CPU, kernels of a step, captures
recorder                                     graphs that have gone, and a step that no graph can have

With "filled", last, the CPU computes what a hollow GPU should.
"""

import ctypes
import dataclasses
import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from mup_tpu.config import Trial
from mup_tpu.devices import Device, get_device
from mup_tpu.devices.cuda import CudaRecorder, GraphSteps
from mup_tpu.training.pack import Pack

BATCHES, VOCAB = 3, 64
LOGGED: list[str] = []


class Logged(logging.Handler):
    """Messages of all loggers, kept."""

    def emit(self, record: logging.LogRecord) -> None:
        LOGGED.append(record.getMessage())


def kernels() -> int:
    """Kernels that a hollow GPU was given so far."""
    try:
        counted = ctypes.CDLL("libcuda.so.1").hollow_gpu_kernels
    except AttributeError:  # a GPU
        return 0
    counted.restype = ctypes.c_size_t
    return int(counted())


class Counting(CudaRecorder):
    """Recorder that counts."""

    recorded = 0

    def record(self, act: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return super().record(act)


def trained(
    device: Device, execution: Any, trials: list[Trial], compile: bool = False
) -> tuple[list[float], float]:
    """Losses of the second of three members in four chunks and an evaluation; the others end after two.

    And kernels of each step of the last chunk.
    """
    pack = Pack(trials, VOCAB, device, execution, compile)
    generator = torch.Generator().manual_seed(0)

    def batches() -> torch.Tensor:
        tokens_SBT1 = torch.randint(0, VOCAB, (BATCHES, 4, 17), generator=generator)
        return device.place_stack(tokens_SBT1, "data", BATCHES)

    unread = [pack.train(batches(), BATCHES) for _ in range(2)]
    losses = [pack.read(losses_SR) for losses_SR in unread]
    pack.end(0, 2)
    losses.append(pack.read(pack.train(batches(), BATCHES)))
    placed, began = batches(), kernels()
    losses.append(pack.read(pack.train(placed, BATCHES)))
    launched = (kernels() - began) / BATCHES
    losses.append(pack.read(pack.evaluate(batches()))[None])
    return torch.cat(losses)[:, 1].tolist(), launched


def steps(name: str) -> dict[str, Any]:
    architecture, optimizer, precision = name.split("/")
    base = Trial().replace(
        architecture=architecture, optimizer=optimizer, precision=precision, width=32, base_width=16,
        head_size=16, depth=1, batch_size=4, sequence_length=16,
    )  # fmt: skip
    trials = [base.replace(seed=k, learning_rate=2.0 ** (k - 9)) for k in range(3)]
    recorder = Counting()
    cuda = dataclasses.replace(get_device("cuda"), recorder=recorder)
    losses, launched = trained(cuda, "vmap", trials, compile=os.environ["TORCH_COMPILE_DISABLE"] == "0")
    expected, _ = trained(get_device("cpu"), "loop", trials)
    return {"losses": losses, "expected": expected, "kernels": launched, "recorded": recorder.recorded}


def compiled() -> list[bool]:
    """Whether packs of a short and a long trial are."""
    base = Trial().replace(width=32, head_size=16, depth=1, batch_size=4, sequence_length=16)
    device = get_device("cuda")
    return [Pack([base.replace(steps=steps)], VOCAB, device).compiles for steps in (500, 500_000)]


def plain(changed: Any, fixed: Any, item: Any) -> torch.Tensor:
    return changed[0].add_(item[0] * 2).sum()


class Waiting(GraphSteps):
    """Steps that wait for the device, which tracing would leave out."""

    def __init__(self, recorder: CudaRecorder) -> None:
        def waiting(changed: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
            torch.cuda.current_stream().synchronize()
            return plain([changed], (), [item])

        super().__init__(plain, recorder, lambda traced: waiting)


def recorder() -> dict[str, Any]:
    shared = CudaRecorder()

    def summed(make: Callable[[], GraphSteps]) -> float:
        changed, stack = torch.zeros(64, device="cuda"), torch.ones(8, 64, device="cuda")
        return make()((changed,), (), (stack,), 8)[-1].item()

    kept, source = [], torch.zeros(1000, device="cuda")
    for _ in range(3):  # the graph goes, and what it has made stays
        shared.record(lambda: kept.append(source * 2))
        gc.collect()
    before = torch.cuda.current_stream()
    sums = [summed(lambda: Waiting(shared))]
    after = torch.cuda.current_stream()
    free, _ = torch.cuda.mem_get_info()

    def take(tenths: int) -> None:
        """Memory that fits if unused memory is freed, which torch leaves out during a capture."""
        torch.empty(free * tenths // 10, dtype=torch.uint8, device="cuda")

    take(6)
    take(7)
    shared.warm_up(lambda: take(6))
    ended = threading.Event()

    def place() -> None:
        while not ended.is_set():
            torch.zeros(1000).pin_memory().to("cuda", non_blocking=True)
            torch.cuda.current_stream().synchronize()

    other = threading.Thread(target=place)
    other.start()
    sums += [summed(lambda: GraphSteps(plain, shared)) for _ in range(20)]
    ended.set()
    other.join()
    return {"stream is the caller's": before == after, "sums": sorted({*sums}), "compiled": compiled()}


def main() -> None:
    if sys.argv[-1] == "filled":
        sys.argv.pop()
        import filled_gpu  # noqa: F401
    logging.getLogger().addHandler(Logged())
    if sys.argv[1] == "recorder":
        found: object = recorder()
    else:
        found = {name: steps(name) for name in sys.argv[2:]}
    print(json.dumps({"found": found, "logged": LOGGED}))


if __name__ == "__main__":
    main()
