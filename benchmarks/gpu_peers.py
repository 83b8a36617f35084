"""Tokens per second on one GPU: packs against nanoGPT's loop, HF's Trainer and several processes.

    python benchmarks/gpu_peers.py --out benchmarks/gpu_peers.csv
    python benchmarks/gpu_peers.py --device cpu --widths 32 --members 2 --seconds 0.2 --peers stacked loop

GPT-2 of 2 layers, batches of 16 × 512 tokens, AdamW, clipping at 1, bf16 autocast in all of them. Each case
is measured in a process of its own after a warm-up, batches sampled on the host included:

- `stacked`: a pack of K trials, its step compiled and replayed as one CUDA graph (`mup_tpu.devices.cuda`);
- `graph`: the same without the compiler;
- `in turns`: a pack whose members take turns, eager;
- `nanogpt`: K trials one after another in the loop that nanoGPT-mup's users run (compiled, flash attention,
  fused AdamW; `nanogpt_peer.py`), so the rate of one trial;
- `trainer`: the same with Hugging Face's Trainer, eager;
- `processes`: K of nanogpt's processes on the GPU at once, as people do to fill it (not compiled).
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro
from rich.console import Console

BATCH, LENGTH = 16, 512

Peer = Literal["stacked", "graph", "in turns", "nanogpt", "trainer", "processes"]


@dataclass(frozen=True)
class Case:
    """One way to train K trials of one width."""

    peer: Peer
    device: str
    width: int
    members: int
    compile: bool = False
    """Whether torch's compiler has the step."""
    optimizer: str = "adamw"
    """Update rule of a pack; peers have AdamW."""
    depth: int = 2
    vocabulary: int = 256

    @property
    def head_size(self) -> int:
        """64, as in GPT-2, or the whole width."""
        return min(64, self.width)


def batches(device: str, vocabulary: int, length: int = LENGTH) -> Any:
    """An endless stream of random batches, sampled on the host as nanoGPT does and sent without waiting."""
    import numpy as np
    import torch

    tokens = np.random.default_rng(0).integers(0, vocabulary, 10**6)
    generator = np.random.default_rng(1)
    while True:
        starts = generator.integers(0, len(tokens) - length - 1, BATCH)
        batch = torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]))
        yield batch.pin_memory().to(device, non_blocking=True) if device == "cuda" else batch


def wait(device: str) -> None:
    """Until the device has done all that it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def measure_pack(case: Case, seconds: float) -> dict[str, float]:
    """A pack of ours, by chunks as long as its device takes."""
    import torch

    from mup_tpu.config import Trial
    from mup_tpu.devices import Execution, get_device
    from mup_tpu.training.pack import Pack

    base = Trial().replace(
        width=case.width, base_width=64, head_size=case.head_size, depth=case.depth, batch_size=BATCH,
        sequence_length=LENGTH, precision="bf16", optimizer=case.optimizer, steps=100,
    )  # fmt: skip
    trials = [base.replace(learning_rate=2**-9 * 2 ** (i / 8)) for i in range(case.members)]
    device = get_device(case.device).arrange(case.members, BATCH)
    chunk = min(20, device.longest_chunk(1))
    execution: Execution = "loop" if case.peer == "in turns" else "vmap"
    pack = Pack(trials, case.vocabulary, device, execution, compile=case.compile)
    stream = batches("cpu", case.vocabulary)

    def step() -> None:
        tokens_SBT1 = torch.stack([next(stream) for _ in range(chunk)])
        pack.train(device.place_stack(tokens_SBT1, "data", chunk), chunk)

    return timed(step, chunk * case.members, case.device, seconds)


def measure_nanogpt(case: Case, seconds: float) -> dict[str, float]:
    """One trial in nanoGPT's loop."""
    import torch
    from nanogpt_peer import GPT

    model: Any = GPT(case.vocabulary, LENGTH, case.width, case.depth, case.width // case.head_size)
    model = model.to(case.device)
    model = torch.compile(model) if case.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    stream = batches(case.device, case.vocabulary)

    def step() -> None:
        batch = next(stream)
        with torch.autocast(case.device, torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed(step, 1, case.device, seconds)


def measure_trainer(case: Case, seconds: float) -> dict[str, float]:
    """One trial by Hugging Face's Trainer, as its guides show it."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    began: list[tuple[float, int]] = []

    class Blocks(torch.utils.data.Dataset[Any]):
        tokens = torch.randint(0, case.vocabulary, (LENGTH * 4096,))

        def __len__(self) -> int:
            return 4096

        def __getitem__(self, i: int) -> dict[str, Any]:
            block = self.tokens[i * LENGTH : (i + 1) * LENGTH]
            return {"input_ids": block, "labels": block}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % 10 == 0:
                wait(case.device)
                began.append((time.perf_counter(), state.global_step))
                control.should_training_stop = began[-1][0] - began[0][0] > seconds

    shape = GPT2Config(
        vocab_size=case.vocabulary, n_positions=LENGTH, n_embd=case.width, n_layer=case.depth,
        n_head=case.width // case.head_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=100_000, per_device_train_batch_size=BATCH, learning_rate=1e-3,
            adam_beta2=0.95, max_grad_norm=1.0, logging_steps=10**6, report_to=[], disable_tqdm=True,
            bf16=case.device == "cuda", use_cpu=case.device == "cpu", save_strategy="no",
        )  # fmt: skip
        Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=Blocks(), callbacks=[Clock()]).train()
    (first, before), (last, after) = began[min(2, len(began) - 2)], began[-1]
    return {"tokens_per_s": (after - before) * BATCH * LENGTH / (last - first), "start_s": float("nan")}


def _one_of_many(case: Case, seconds: float, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(measure_nanogpt(case, seconds)["tokens_per_s"])


def measure_processes(case: Case, seconds: float) -> dict[str, float]:
    """K of nanogpt's processes at once: the sum of their rates while all run."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(case.members), spawn.Queue()
    began = time.perf_counter()
    processes = [
        spawn.Process(target=_one_of_many, args=(case, 2 * seconds, barrier, results))
        for _ in range(case.members)
    ]
    for process in processes:
        process.start()
    rates = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return {"tokens_per_s": sum(rates), "start_s": time.perf_counter() - began - 2 * seconds}


def timed(step: Any, trained: int, device: str, seconds: float) -> dict[str, float]:
    """Tokens per second of a step, after three warm-up steps."""
    began = time.perf_counter()
    for _ in range(3):
        step()
    wait(device)
    ready, steps = time.perf_counter(), 0
    while time.perf_counter() - ready < seconds:
        for _ in range(5):
            step()
        wait(device)
        steps += 5
    tokens = trained * steps * BATCH * LENGTH
    return {"tokens_per_s": tokens / (time.perf_counter() - ready), "start_s": ready - began}


MEASURES = {
    "stacked": measure_pack,
    "graph": measure_pack,
    "in turns": measure_pack,
    "nanogpt": measure_nanogpt,
    "trainer": measure_trainer,
    "processes": measure_processes,
}


def measure(case: Case, seconds: float) -> dict[str, object]:
    """A row of the table; `failed` says why there is no rate."""
    import torch

    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if case.device == "cuda" else "cpu"
    try:
        found: dict[str, Any] = MEASURES[case.peer](case, seconds)
    except Exception as error:  # out of memory, say: the other cases go on
        found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    if case.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {**asdict(case), "gpu": name, "torch": torch.__version__, **found}


def measure_all(cases: Sequence[Case], seconds: float, minutes: float, out: Path | None) -> None:
    """Measure each case in a process of its own, until the minutes are over; write the table as it grows."""
    console, rows, ends = Console(soft_wrap=True, highlight=False), [], time.monotonic() + 60 * minutes
    for case in cases:
        if time.monotonic() > ends:
            console.print(f"{len(cases) - len(rows)} cases are left: no time")
            break
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
            rows.append(pool.submit(measure, case, seconds).result())
        row = rows[-1]
        result = row.get("failed") or f"{row['tokens_per_s']:,.0f} tokens/s"
        console.print(f"width {case.width} · {case.peer} · {case.members}: {result}")
        if out is not None:
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


def main(
    device: Literal["cuda", "cpu"] = "cuda",
    widths: tuple[int, ...] = (64, 256, 768, 2048),
    members: tuple[int, ...] = (1, 8, 32),
    peers: tuple[Peer, ...] = ("nanogpt", "stacked", "graph", "in turns", "trainer", "processes"),
    seconds: float = 1.5,
    optimizer: Literal["adamw", "sgd", "muon", "adamh", "muonh"] = "adamw",
    minutes: float = 60.0,
    out: Path | None = None,
) -> None:
    """Measure every case.

    Args:
        device: Where to train; cpu to rehearse.
        widths: Model widths.
        members: Numbers of trials at once.
        peers: Ways to train.
        seconds: About how long each case is measured.
        optimizer: Update rule of packs; peers keep AdamW.
        minutes: Of this call; cases that are left after it are not measured.
        out: CSV file for the table, written after each case.
    """
    cases = [
        Case(peer, device, width, k, peer in ("nanogpt", "stacked") and device == "cuda", optimizer)
        for width, peer, k in itertools.product(widths, peers, members)
        if (k == 1 if peer in ("nanogpt", "trainer") else k == 8 if peer == "processes" else True)
        and not (width >= 2048 and k > 8)
    ]
    measure_all(cases, seconds, minutes, out)


if __name__ == "__main__":
    tyro.cli(main)
