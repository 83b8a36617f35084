"""Compilation of trials to a program, through two processes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_tpu.config import Trial
from mup_tpu.config.fields import require_one_of
from mup_tpu.errors import ConfigError
from mup_tpu.files.leftovers import scratch_folder
from mup_tpu.tpu_compiler.compiled import Compiled

STEPS = 100
"""Steps of the compiled stretch; they are a loop in the program."""
_TIMEOUT_S = 1800.0
"""Longest time of each process."""


@dataclass(frozen=True)
class Target:
    """Chips to compile for."""

    accelerator_type: str
    topology: str
    """Name in libtpu."""
    devices: int


TARGETS = {
    t.accelerator_type: t
    for t in (
        Target("v4-8", "v4:2x2x1", 4),
        Target("v4-16", "v4:2x2x2", 8),
        Target("v5litepod-1", "v5e:1x1", 1),
        Target("v5litepod-4", "v5e:2x2", 4),
        Target("v5litepod-8", "v5e:2x4", 8),
        Target("v6e-1", "v6e:1x1", 1),
        Target("v6e-4", "v6e:2x2", 4),
        Target("v6e-8", "v6e:2x4", 8),
    )
}


def target(accelerator_type: str) -> Target:
    """The chips of a type such as v4-8."""
    require_one_of("TPU type", accelerator_type, tuple(TARGETS))
    return TARGETS[accelerator_type]


def compile_pack(trials: Sequence[Trial], vocab_size: int, chips: Target, mesh: str = "auto") -> Compiled:
    """A pack's training compiled for chips that need not be here; `mesh` is as in `RunOptions`.

    Raises:
        ConfigError: torch_xla, jax or libtpu is missing, or the compiler refuses the program.
    """
    return compile_program(hand_over(trials, vocab_size, chips.devices, mesh), chips)


def hand_over(
    trials: Sequence[Trial],
    vocab_size: int,
    devices: int,
    mesh: str = "auto",
    forms: Mapping[str, Any] = {},
) -> str:
    """Program of a stretch of a pack's training, as torch_xla hands it over to XLA.

    Takes the arguments of `compile_pack` and `Pack`. The process ends before XLA's CPU compiler starts.
    """
    _check_installed()
    asked = {
        "trials": [t.flat() for t in trials], "vocab_size": vocab_size, "mesh": mesh, "steps": STEPS,
        "forms": dict(forms),
    }  # fmt: skip
    with scratch_folder() as folder:
        environment = os.environ | {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(devices),
            "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text",
            **_own_modules(),
        }
        (folder / "pack.json").write_text(json.dumps(asked))
        with (folder / "pack.json").open() as pack, (folder / "errors").open("w") as errors:
            command = [sys.executable, "-m", "mup_tpu.tpu_compiler.program"]
            process = subprocess.Popen(command, stdin=pack, stderr=errors, stdout=errors, env=environment)
            try:
                return _dumped(folder, process)
            finally:
                process.kill()
                process.wait()


def _dumped(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """The program of a loop that XLA dumps into a folder, once it is whole."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        for path in folder.glob("*.before_optimizations.txt"):
            text = path.read_text()
            if "ENTRY " in text and text.rstrip().endswith("}") and "while(" in text:
                return text
        if ended:
            why = _why((folder / "errors").read_text())
            raise ConfigError(f"the pack's program could not be made: {why}")
        time.sleep(0.2)
    raise ConfigError(f"the pack's program was not made within {_TIMEOUT_S:.0f} s")


def compile_program(program: str, chips: Target) -> Compiled:
    """Compile a program that `hand_over` made for the same number of devices."""
    with scratch_folder() as folder:
        given, out = folder / "program.txt", folder / "compiled.txt"
        given.write_text(program)
        command = [sys.executable, "-m", "mup_tpu.tpu_compiler.libtpu"]
        result = subprocess.run(
            [*command, str(given), chips.topology, str(chips.devices), str(out)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=os.environ | _own_modules(),
        )
        if result.returncode:
            raise ConfigError(f"libtpu does not compile the pack for {chips.topology}: {_why(result.stderr)}")
        found = json.loads(result.stdout.splitlines()[-1])
        return Compiled(**found, text=out.read_text())


def _check_installed() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigError("libtpu compiles for TPUs on Linux x86-64 alone")
    for package in ("torch_xla", "libtpu", "jax"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            message = f"{package} is not installed: pip install 'mup_tpu[tpu-compiler]'"
            raise ConfigError(f"to compile for TPUs, {message}") from None


def _own_modules() -> dict[str, str]:
    """Environment with this package on the path of modules, and without the working folder."""
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, places)), "PYTHONSAFEPATH": "1"}


def _why(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["no word of why"])[-1]
