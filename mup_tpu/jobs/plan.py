"""What is left to run, in which packs, and what each costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from mup_tpu.config import Trial
from mup_tpu.config.columns import CONFIGURED, write
from mup_tpu.errors import PackTooLarge
from mup_tpu.models import declare, training_flops
from mup_tpu.training.pack_key import pack_key

LARGEST_PACK = {"loop": 8, "vmap": 16}
"""Members of a pack. In turns a larger pack saves only the batches, and small packs are stored sooner."""

_FLOPS_PER_NUMBER = 500.0
"""Arithmetic that takes as long as writing a number that is kept for the backward pass (measured on CPUs)."""

_VOCABULARY = 256
"""Vocabulary assumed here: that of the data is known only once they are loaded."""


def describe(trial: Trial, fields: Sequence[str]) -> str:
    """A trial by some of its fields: "width 64", or "width 128 depth 4"."""
    labels = {column.field: column.label for column in CONFIGURED.values()}
    flat = trial.flat()
    return " ".join(f"{labels[name]} {write(name, flat[name])}" for name in fields)


def work(trial: Trial) -> float:
    """How long a trial takes beside others: its arithmetic, and what it writes, as arithmetic."""
    data = trial.data
    declaration = declare(trial.model, _VOCABULARY, data.sequence_length)
    numbers = declaration.activations.vectors["loop"] * declaration.width * declaration.layers
    tokens = trial.train.steps * data.batch_size * data.sequence_length
    return training_flops(trial, _VOCABULARY) + _FLOPS_PER_NUMBER * numbers * tokens


def threads_per_pack(trials: int, cores: int, hosts: int = 1) -> int:
    """CPU threads of a pack such that so many trials use every core of every host.

    One thread each where there are trials for all cores: two packs of one thread do more than one of two
    (measured: 119 k against 105 k tokens/s at width 64, 14.0 k against 12.6 k at width 256, on 2 cores).

    Args:
        trials: how many.
        cores: of each host.
        hosts: how many.
    """
    return max(1, cores // math.ceil(trials / hosts))


def missing_trials(
    trials: Sequence[Trial], done: Collection[str], trial_id: Callable[[Trial], str]
) -> list[Trial]:
    """The trials that have no result yet, each once.

    Args:
        trials: all of them.
        done: trial_ids that have a result.
        trial_id: of a trial, with its data.
    """
    by_id = {trial_id(trial): trial for trial in trials}
    return [trial for name, trial in by_id.items() if name not in done]


def make_packs(
    trials: Sequence[Trial], workers: int, execution: str, pack_size: int = 0
) -> list[list[Trial]]:
    """Trials in packs of one shape, the longest first so that no worker is left with one at the end.

    Args:
        trials: in any order.
        workers: packs that run at once.
        execution: "loop" or "vmap".
        pack_size: most members of a pack; 0 chooses.
    """
    shapes: dict[tuple, list[Trial]] = {}
    for trial in trials:
        shapes.setdefault(pack_key(trial), []).append(trial)
    packs = []
    for group in shapes.values():
        size = pack_size or LARGEST_PACK[execution]
        count = math.ceil(len(group) / size)
        if not pack_size and len(group) >= workers:
            count = math.ceil(count / workers) * workers
        # Round robin mixes values of the hyperparameter, so that no pack holds all that diverge early.
        packs += [group[i::count] for i in range(count) if group[i::count]]
    return sorted(packs, key=lambda pack: -work(pack[0]))


def split_pack(packs: list[list[Trial]], index: int, error: PackTooLarge) -> list[int]:
    """Add a pack's parts of at most `error.fits` members to the end of the packs; return their indices."""
    count = math.ceil(len(packs[index]) / error.fits)
    first = len(packs)
    packs += [packs[index][i::count] for i in range(count)]
    return list(range(first, len(packs)))
