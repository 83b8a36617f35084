"""Whether a pack's step goes through torch.compile: where it pays, and where it can."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from mup_tpu.config import RunOptions, Trial
from mup_tpu.devices import Device, Way
from mup_tpu.errors import ConfigError, first_line
from mup_tpu.model import parameter_shapes
from mup_tpu.training.meter import flops_per_token

PAYS_FROM_FLOPS = 2.5e13
"""FLOPs of a pack's training, per CPU thread, from which compiling wins back its time: about eight minutes.

With its imports it takes 15 s, or 45 s the first time, and saves 10 to 15 % after that (benchmarks/step.py).
A core trains at 30 to 50 GFLOP/s.
"""

_log = logging.getLogger(__name__)


def compiles(options: RunOptions, trials: Sequence[Trial], vocab_size: int, device: Device, way: Way) -> bool:
    """Whether to compile the step of a pack.

    Left to "auto" that is so on a CPU, for a long pack of members in turns, where the C++ compiler works. The
    pack alone decides, and no timing, so that a run can be repeated.

    Raises:
        ConfigError: it was asked for, and torch.compile does not work here.
    """
    if options.compile == "off":
        return False
    if options.compile == "auto":
        on_cpu = device.torch_device.type == "cpu"
        if not (on_cpu and way == "loop" and _training_flops(trials, vocab_size) >= _threshold()):
            return False
    problem = _why_not(trials[0].train.precision)
    if problem is not None and options.compile == "on":
        raise ConfigError(f"compile 'on': torch.compile does not work here ({problem})")
    if problem is not None:
        _log.info("the step is not compiled, which would be faster: %s", problem)
    return problem is None


def _threshold() -> float:
    return PAYS_FROM_FLOPS * torch.get_num_threads()


def _training_flops(trials: Sequence[Trial], vocab_size: int) -> float:
    first = trials[0]
    m, d = first.model, first.data
    shapes = parameter_shapes(m, vocab_size, d.sequence_length)
    a_token = flops_per_token(shapes, vocab_size, m.width, m.depth, d.sequence_length)
    return a_token * d.batch_size * d.sequence_length * first.train.steps * len(trials)


@functools.cache
def _why_not(precision: str) -> str | None:
    """What goes wrong when something small is compiled; None if nothing does."""
    if precision == "float64":
        return "torch 2.9 takes the wrong type for attention in float64"
    from torch._inductor import config as inductor  # takes seconds

    # On a CPU it warns of a CUDA toolkit without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # With one thread it compiles in this process: a worker that is killed would leave its helpers behind.
    inductor.compile_threads = torch.get_num_threads()
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2))
    except Exception as error:  # compilers fail in many ways
        return first_line(error)
    return None
