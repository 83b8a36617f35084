"""What is left to run, and in which packs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from mup_tpu.config import Trial
from mup_tpu.errors import PackTooLarge
from mup_tpu.training.pack_key import pack_key

LARGEST_PACK = {"loop": 8, "vmap": 16}
"""Members in turns gain nothing from company beyond the shared batches, and small packs are stored sooner."""


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


def missing_trials(trials: Sequence[Trial], done: Collection[str], data_fingerprint: str) -> list[Trial]:
    """The trials that have no result yet, each once."""
    by_id = {trial.trial_id(data_fingerprint): trial for trial in trials}
    return [trial for trial_id, trial in by_id.items() if trial_id not in done]


def make_packs(trials: Sequence[Trial], workers: int, way: str, pack_size: int = 0) -> list[list[Trial]]:
    """Trials in packs of one shape, wide packs first so that no worker is left with one at the end.

    Args:
        trials: in any order.
        workers: packs that run at once.
        way: "loop" or "vmap".
        pack_size: most members of a pack; 0 chooses.
    """
    shapes: dict[tuple, list[Trial]] = {}
    for trial in trials:
        shapes.setdefault(pack_key(trial), []).append(trial)
    packs = []
    for group in shapes.values():
        size = pack_size or LARGEST_PACK[way]
        count = math.ceil(len(group) / size)
        if not pack_size and len(group) >= workers:
            count = math.ceil(count / workers) * workers
        # Round robin mixes learning rates, so that no pack holds all that diverge early.
        packs += [group[i::count] for i in range(count) if group[i::count]]
    return sorted(packs, key=lambda pack: -pack[0].model.width)


def split_pack(packs: list[list[Trial]], index: int, error: PackTooLarge) -> list[int]:
    """Add a pack's parts of at most `error.fits` members to the end of the packs; return their indices."""
    count = math.ceil(len(packs[index]) / error.fits)
    first = len(packs)
    packs += [packs[index][i::count] for i in range(count)]
    return list(range(first, len(packs)))
