"""A pack's program by the compiler of a TPU, on a machine without one: what it takes, and whether it fits.

torch_xla hands the program over in a process of its own (`program.py`), libtpu compiles it in another
(`libtpu.py`): torch and jax do not meet.
"""

from mup_tpu.tpu_compiler.cases import CASES, Case, Checked, check, listed, problems
from mup_tpu.tpu_compiler.compiled import Compiled
from mup_tpu.tpu_compiler.pack import TARGETS, Target, compile_pack, compile_program, hand_over, target

__all__ = [
    "CASES",
    "TARGETS",
    "Case",
    "Checked",
    "Compiled",
    "Target",
    "check",
    "compile_pack",
    "compile_program",
    "hand_over",
    "listed",
    "problems",
    "target",
]
