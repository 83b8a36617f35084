"""Tests, peers, sweeps and steps on a GPU, most important first.

    python benchmarks/on_gpu.py --minutes 9                       # the same command goes on after a kill
    python benchmarks/on_gpu.py --rehearse --out /tmp/rehearsal   # on the CPU, in tiny sizes

Each step is a process with a limit of its own. One that has ended is noted in OUT/on_gpu.json and not run
again. One that failed, was killed or ran past its limit is, and sweeps then run what they miss.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

ROOT = Path(__file__).parents[1]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
ON_CUDA = ("-n", "12", "-p", "failing_tests", "--tb", "short", "-o", "timeout=100", "--device", "cuda")
TESTS = ("tests/devices/test_cuda.py", "tests/training/test_pack.py", "tests/training/test_loop.py")
"""Tests that train on the GPU; others train on the CPU wherever they run."""
ONE_TEST = "tests/training/test_pack.py::test_trials_of_different_shape_are_refused"
TINY = ("--compare", "steps=2", "--tune", "eval_batches=1", "--num-seeds", "1")
"""Axes in place of a preset's: its base for two steps."""


@dataclass(frozen=True)
class Step:
    """A command of the list."""

    name: str
    minutes: float
    """Limit of the command."""
    words: tuple[str, ...]
    """Arguments of Python; {out} is the folder of tables, {results} the folder of stored sweeps."""
    rehearsal: tuple[str, ...]
    """The same in tiny."""


def benchmark(name: str, minutes: float, script: str, words: str, rehearsal: str) -> Step:
    """A script of this folder, which writes OUT/NAME.csv."""
    common = (f"benchmarks/{script}.py", "--out", f"{{out}}/{name}.csv")
    return Step(name, minutes, (*common, "--device", "cuda", *words.split()), (*common, *rehearsal.split()))


def preset(experiment: str, width: int) -> Step:
    """One width of an experiment's H200 preset, into its results folder."""
    folder = f"{experiment}_h200"
    common = (f"experiments/{experiment}.py", "--preset", "h200", "--results", f"{{results}}/{folder}")
    words = ("--device", "cuda", "--width", str(width), "--checkpoint-every", "200")
    rehearsal = ("--device", "cpu", "--width", str(width // 4), "--checkpoint-every", "1", *TINY)
    return Step(f"{folder}_{width}", 8, (*common, *words), (*common, *rehearsal))


def trained(device: str, width: int, steps: int) -> tuple[str, ...]:
    """A lone trial by `mup-tpu train`, in the precision that the device is good at; its log names that."""
    given = f"--device {device} --precision auto --width {width} --steps {steps} --results {{results}}/auto"
    return ("-m", "mup_tpu", "train", *given.split())


STEPS = (
    Step("tests", 1.5, (*PYTEST, *ON_CUDA, *TESTS), (*PYTEST, "-p", "failing_tests", ONE_TEST)),
    Step("precision_auto", 1, trained("cuda", 768, 300), trained("cpu", 32, 2)),
    benchmark(
        "gpu_peers", 3.5, "gpu_peers", "--seconds 1 --peers stacked nanogpt --widths 768 2048 --members 1 8",
        "--device cpu --peers stacked nanogpt --widths 32 --members 1 --seconds 0.1",
    ),
    benchmark(
        "hyperball_cuda", 1.5, "gpu_peers",
        "--optimizer muonh --peers stacked graph --widths 256 --members 1 8 --seconds 0.5",
        "--device cpu --optimizer muonh --peers stacked --widths 32 --members 1 --seconds 0.1",
    ),
    Step(
        "gpu_memory", 1,
        ("benchmarks/gpu_memory.py", "--real", "--out", "{out}/gpu_memory_real.csv", "--only", *"01234567"),
        ("benchmarks/gpu_memory.py", "--help"),  # which needs no GPU
    ),
    preset("lr_transfer", 256),
    preset("lr_transfer", 512),
    preset("lr_transfer", 1024),
    benchmark(
        "step_cuda", 6, "step", "--widths 128 512 2048 --members 1 4 16 --seconds 2",
        "--widths 32 --members 2 --seconds 0.1",
    ),
    benchmark(
        "sweep_cuda_256", 5, "sweep", "--width 256 --repeats 3",
        "--width 32 --trials 2 --steps 2 --repeats 1",
    ),
    benchmark(
        "step_cuda_bf16", 5, "step", "--precision bf16 --widths 128 512 2048 --members 1 4 16 --seconds 2",
        "--precision bf16 --widths 32 --members 2 --seconds 0.1",
    ),
    benchmark(
        "bf16_cuda_512", 4, "bf16", "--width 512 --trials 4 --steps 300",
        "--width 32 --trials 1 --steps 2 --repeats 1",
    ),
    preset("lr_transfer", 128),
    preset("nanogpt_mup", 256),
    preset("nanogpt_mup", 512),
    preset("nanogpt_mup", 1024),
    preset("nanogpt_mup", 2048),
    preset("lr_transfer", 2048),
)  # fmt: skip


def run(words: tuple[str, ...], log: Path, seconds: float) -> int | None:
    """Exit code of a Python process, None where it ran past its limit; what it started ends with it."""
    # The package where it is not installed, and pytest's plugin.
    places = (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    if "pytest" in words:  # hundreds of small packs: compiling each would take hours
        environment |= {"TORCH_COMPILE_DISABLE": "1", "FAILING_TESTS": str(log.with_suffix(".failing.txt"))}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # a sweep stores what has ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that started it: two would be in each other's way."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(
    minutes: float = 40,
    rehearse: bool = False,
    steps: tuple[str, ...] = (),
    out: Path = ROOT / "benchmarks",
    results: Path | None = None,
) -> None:
    """Run what has not ended yet.

    Args:
        minutes: Of this call.
        rehearse: On the CPU, in tiny sizes; give an --out of its own.
        steps: Names of those to run; all by default.
        out: Folder for tables, logs and the note of what has ended.
        results: Folder of the presets' results folders; by default results, of a rehearsal OUT/results.
    """
    console = Console(soft_wrap=True, highlight=False)
    if rehearse and out.resolve() == ROOT / "benchmarks":
        sys.exit("error: out of a rehearsal is the folder of the real tables; give it another")
    if unknown := set(steps) - {step.name for step in STEPS}:
        known = ", ".join(step.name for step in STEPS)
        sys.exit(f"error: steps {sorted(unknown)[0]!r} is not one of {known}")
    results = results or (out / "results" if rehearse else ROOT / "results")
    logs, note = out / "on_gpu_logs", out / "on_gpu.json"
    logs.mkdir(parents=True, exist_ok=True)
    ended: dict[str, dict[str, float]] = json.loads(note.read_text()) if note.exists() else {}
    deadline, failed = time.monotonic() + 60 * minutes, 0
    where = {"out": str(out.resolve()), "results": str(results.resolve())}
    for step in STEPS:
        if steps and step.name not in steps:
            continue
        if step.name in ended:
            console.print(f"{step.name}: ended before")
            continue
        left = min(60 * step.minutes, deadline - time.monotonic())
        if left <= 0:
            console.print(f"{step.name}: no time left; the same command goes on")
            continue
        began, log = time.monotonic(), logs / f"{step.name}.log"
        words = step.rehearsal if rehearse else step.words
        code = run(tuple(word.format(**where) for word in words), log, left)
        seconds = round(time.monotonic() - began, 1)
        if code is None:
            console.print(f"{step.name}: not done in {seconds:g} s; the same command goes on")
            continue
        said = "ended" if code == 0 else f"FAILED with exit code {code}, see {log}"
        console.print(f"{step.name}: {said} ({seconds:g} s)")
        failed += code != 0
        if code == 0:
            ended[step.name] = {"seconds": seconds}
            made = note.with_suffix(".partial")
            made.write_text(json.dumps(ended, indent=1) + "\n")
            made.replace(note)
    sys.exit(min(1, failed))


if __name__ == "__main__":
    tyro.cli(main)
