"""Missing trials, the packs that they run in, and the work of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from mup_tpu.config import Trial
from mup_tpu.config.columns import CONFIGURED, write
from mup_tpu.models import declare, training_flops
from mup_tpu.training.trials import pack_key

T = TypeVar("T")

LARGEST_PACK = {"loop": 8, "vmap": 16}
"""Members of a pack. In turns a larger pack saves only the batches, and small packs are stored sooner."""

_LARGEST_ON_GPU = 32
"""Most members of a pack on a GPU of known speed; more were not measured."""

_FULL_S = 1.2e-3
"""Arithmetic of a pack's step that fills a GPU, in seconds at its peak for each layer.

Launches then take 5 % of a step: a layer's launches take 0.17 ms, and a third of the peak is reached (one
H100, two widths, `benchmarks/gpu_peers.csv`). Other GPUs, lengths and precisions are a guess.
"""

_FLOPS_PER_NUMBER = 500.0
"""Arithmetic in the time of writing one number for the backward pass (measured on CPUs)."""

_VOCABULARY = 256
"""Assumed size of the vocabulary; the data, which is not loaded yet, has the real one."""


def describe(trial: Trial, fields: Sequence[str]) -> str:
    """Name of a trial by some of its fields: "width 64", or "width 128 depth 4"."""
    labels = {column.field: column.label for column in CONFIGURED.values()}
    flat = trial.flat()
    return " ".join(f"{labels[name]} {write(name, flat[name])}" for name in fields)


def work(trial: Trial) -> float:
    """Relative time of a trial: its arithmetic, and its memory traffic as arithmetic."""
    data = trial.data
    declaration = declare(trial.model, _VOCABULARY, data.sequence_length)
    numbers = declaration.activations.vectors["loop"] * declaration.width * declaration.layers
    tokens = trial.train.steps * data.batch_size * data.sequence_length
    return training_flops(trial, _VOCABULARY) + _FLOPS_PER_NUMBER * numbers * tokens


def threads_per_pack(trials: int, cores: int, hosts: int = 1) -> int:
    """CPU threads of a pack, such that this number of trials uses every core (`cores` a host).

    One thread each if there are trials for all cores: two packs of one thread are faster than one of two
    (measured: 119 k against 105 k tokens/s at width 64, 14.0 k against 12.6 k at width 256, on 2 cores).
    """
    return max(1, cores // math.ceil(trials / hosts))


def missing_trials(trials: Iterable[T], done: Collection[str], trial_id: Callable[[T], str]) -> list[T]:
    """Trials without a result, each once; `done` are the trial_ids with one."""
    by_id = {trial_id(trial): trial for trial in trials}
    return [trial for name, trial in by_id.items() if name not in done]


def largest_pack(trial: Trial, execution: str, gpu: str = "") -> int:
    """Most members of a pack: on a GPU of known speed, as many as fill it.

    Wide trials then train in packs of one, since stacking brings little and needs their memory at once. Where
    memory is too short, packs are split before they train.

    Args:
        trial: any of the pack.
        execution: "loop" or "vmap".
        gpu: name of the GPU; "" on other devices.
    """
    if execution == "loop" or not gpu:
        return LARGEST_PACK[execution]
    from mup_tpu.devices.peak import gpu_peak_flops

    peak = gpu_peak_flops(gpu, trial.train.precision)
    if peak is None:
        return LARGEST_PACK[execution]
    step_s = training_flops(trial, _VOCABULARY) / trial.train.steps / peak
    return min(_LARGEST_ON_GPU, math.ceil(_FULL_S * trial.model.depth / step_s))


def make_packs(
    trials: Sequence[Trial], workers: int, execution: str, pack_size: int = 0, gpu: str = ""
) -> list[list[Trial]]:
    """Packs of trials of one shape, the longest first, so that the last one to run is short.

    Where they are more than the workers, the shortest comes before all: results are stored from the start.

    Args:
        trials: in any order.
        workers: packs at once.
        execution: "loop" or "vmap".
        pack_size: most members of a pack; 0 is automatic.
        gpu: name of the GPU that each pack trains on; "" on other devices.
    """
    shapes: dict[tuple, list[Trial]] = {}
    for trial in trials:
        shapes.setdefault(pack_key(trial), []).append(trial)
    packs = []
    for group in shapes.values():
        size = pack_size or largest_pack(group[0], execution, gpu)
        count = math.ceil(len(group) / size)
        if not pack_size and len(group) >= workers:
            count = math.ceil(count / workers) * workers
        # Round robin spreads values of the hyperparameter: trials that diverge early are not all in one pack.
        packs += [group[i::count] for i in range(count) if group[i::count]]
    packs.sort(key=lambda pack: -work(pack[0]))
    return [packs[-1], *packs[:-1]] if len(packs) > workers else packs
