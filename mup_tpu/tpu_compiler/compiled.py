"""Facts about a compiled program: memory, collectives and estimated cycles, read from its text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)^\}", re.M | re.S)
_BODY = re.compile(r" while\(.*?body=%([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"calls=%([\w.-]+)")
_OPERATIONS = re.compile(r"^\s+(?:ROOT )?%[\w.-]+ = .*?[\]})] ([a-z-]+)\(", re.M)

_MOVING = {"copy", "transpose", "bitcast", "parameter", "reshape", "slice", "concatenate", "tuple", "pad"}


@dataclass(frozen=True)
class Compiled:
    """A program compiled for a TPU; memory and cycles are of one chip."""

    seconds: float
    """Time of compilation on this machine."""
    argument_bytes: int
    """Parameters, optimizer state and batches."""
    output_bytes: int
    temp_bytes: int
    """Peak of a step's memory beside its arguments."""
    alias_bytes: int
    """Outputs written over arguments."""
    text: str
    """The compiled program."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that the chip's memory must hold at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def collectives(self) -> Counter[str]:
        """Number of operations of each kind that pass data between chips."""
        return Counter(_COLLECTIVE.findall(self.text))

    @property
    def cycles(self) -> Counter[str]:
        """The compiler's estimate of a step's cycles, by kind: products, reductions, copies, other.

        Operations without an estimate count nothing.
        """
        found = Counter(products=0, reductions=0, copies=0, other=0)
        for kind, cycles in _estimates(dict(_COMPUTATION.findall(self.text)), self.text):
            found[kind] += cycles
        return found


def _estimates(computations: dict[str, str], text: str) -> Iterator[tuple[str, int]]:
    """Kind and cycles of each operation in the loop's body; without a loop, in the program."""
    bodies = _BODY.findall(text)
    for block in [computations[name] for name in bodies] if bodies else computations.values():
        for line in block.splitlines():
            if cycles := _CYCLES.search(line):
                called = _CALLED.search(line)
                inside = computations.get(called[1], "") if called else line
                yield _kind(set(_OPERATIONS.findall(inside + "\n"))), int(cycles[1])


def _kind(operations: set[str]) -> str:
    if operations & {"convolution", "dot"}:
        return "products"
    if operations & {"reduce", "reduce-window"}:
        return "reductions"
    return "copies" if operations <= _MOVING else "other"
