"""Checks of packs of several kinds, compiled for a type of TPU: `mup-tpu doctor --tpu`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mup_tpu.config import Trial
from mup_tpu.config.values import counted
from mup_tpu.devices.tpus import generation
from mup_tpu.tpu_compiler.compiled import Compiled
from mup_tpu.tpu_compiler.pack import Target, compile_pack

_VOCAB_SIZE = 4096
_LARGEST_LOSS = 64 * 2**10
"""Most bytes of output, mainly losses, that may lie outside of the memory of arguments."""


@dataclass(frozen=True)
class Case:
    """A pack to compile, and the collectives that its program may have."""

    name: str
    trial: Trial
    members: Callable[[int], int]
    """Number of members, from the number of devices."""
    mesh: str
    """Mesh, with `{n}` for the number of devices."""
    collectives: Counter[str]

    def compile(self, chips: Target) -> Compiled:
        """The pack, compiled for chips."""
        members = self.members(chips.devices)
        trials = [self.trial.replace(seed=seed) for seed in range(members)]
        return compile_pack(trials, _VOCAB_SIZE, chips, self.mesh.format(n=chips.devices))


_NARROW = Trial().replace(width=64, depth=2, sequence_length=128, batch_size=16, grad_clip=1.0)
CASES = (
    Case("trials apart", _NARROW, lambda devices: 2 * devices, "trial={n},data=1", Counter()),
    Case("a trial's batches split", _NARROW, lambda _: 1, "trial=1,data={n}", Counter({"all-reduce": 1})),
    Case(
        "long sequences, wide, bf16",
        _NARROW.replace(width=512, sequence_length=1024, batch_size=8, precision="bf16"),
        lambda devices: devices,
        "trial={n},data=1",
        Counter(),
    ),
    Case(
        "trials apart, Muon",
        _NARROW.replace(optimizer="muon"),
        lambda devices: 2 * devices,
        "trial={n},data=1",
        Counter(),
    ),
)


@dataclass(frozen=True)
class Checked:
    """Result of one case."""

    case: Case
    compiled: Compiled
    problems: list[str]
    """Sentences; none for a program that is as it must be."""


def check(chips: Target) -> Iterator[Checked]:
    """Compile each case for a type of TPU and check the programs."""
    for case in CASES:
        compiled = case.compile(chips)
        yield Checked(case, compiled, list(problems(case, compiled, chips)))


def problems(case: Case, compiled: Compiled, chips: Target) -> Iterator[str]:
    """Faults of a program, a sentence each."""
    promised = case.collectives if chips.devices > 1 else Counter()
    if compiled.collectives != promised:
        yield f"passes data between chips by {listed(compiled.collectives)}, not by {listed(promised)}"
    there = generation(chips.accelerator_type).device_hbm_bytes
    if compiled.needed_bytes > there:
        needed = f"{compiled.needed_bytes / 2**30:.1f} GiB"
        yield f"needs {needed}, and a device of {chips.accelerator_type} has {there / 2**30:.0f} GiB"
    copied = compiled.output_bytes - compiled.alias_bytes
    if copied > _LARGEST_LOSS + 0.02 * compiled.output_bytes:
        yield f"writes {copied} of {compiled.output_bytes} bytes beside where they were, not over them"


def listed(collectives: Counter[str]) -> str:
    """Text such as "1 all-reduce"; "nothing" for none."""
    return counted(sorted(collectives.items())) or "nothing"
