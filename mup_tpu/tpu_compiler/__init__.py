"""Compilation of a pack by a TPU's compiler on a machine without TPUs: memory, cycles, and whether it fits.

One process (`program.py`) has torch_xla write the program, another (`libtpu.py`) compiles it: torch and jax
do not meet.
"""

from mup_tpu.tpu_compiler.cases import CASES, Case, Checked, check, listed, problems
from mup_tpu.tpu_compiler.compiled import Compiled
from mup_tpu.tpu_compiler.pack import TARGETS, Target, compile_pack, compile_program, hand_over, target

__all__ = [
    "CASES", "TARGETS", "Case", "Checked", "Compiled", "Target", "check", "compile_pack", "compile_program",
    "hand_over", "listed", "problems", "target",
]  # fmt: skip
