"""More steps for trials that have ended: a longer run goes on from a checkpoint of the same steps.

Batches are a function of (data seed, step). Updates must agree too: before the checkpoint a schedule may not
depend on its end, and no rule may follow the number of steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mup_tpu.config import Trial
from mup_tpu.errors import ConfigError
from mup_tpu.files import Folder


def open_steps(trial: Trial) -> int:
    """Number of first steps that do not depend on the length of the run; 0 for none."""
    t = trial.train
    if t.schedule not in ("constant", "wsd") or 0 < t.warmup < 1:
        return 0
    return t.steps - (t.cooldown_steps if t.schedule == "wsd" else 0)


def longer(trial: Trial, steps: int) -> Trial:
    """The trial with more steps."""
    t, o, asked = trial.train, trial.optimizer, f"continue_to {steps}"
    if steps <= t.steps:
        raise ConfigError(f"{asked} is not allowed: it must be above the trial's steps, {t.steps}")
    if t.schedule not in ("constant", "wsd"):
        raise ConfigError(
            f"{asked} needs schedule 'constant' or 'wsd': {t.schedule!r} falls over all of the steps, so "
            "that a longer run differs from the first on"
        )
    if 0 < t.warmup < 1:
        raise ConfigError(
            f"{asked} needs a warmup in steps: {t.warmup:g} is a share, {t.warmup_steps} steps of {t.steps} "
            "but more of a longer run"
        )
    found = trial.replace(steps=steps)
    if found.growth != trial.growth and (o.token_rule != "none" or o.decay_rule == "timescale"):
        name = "token_rule" if o.token_rule != "none" else "decay_rule"
        raise ConfigError(
            f"{asked} needs {name} without tokens: {getattr(o, name)!r} sets hyperparameters by the number "
            "of steps, so that a longer run differs from the first on"
        )
    return found


def begin(
    root: Folder,
    trials: Sequence[Trial],
    shorter: Sequence[Trial],
    trial_id: Callable[[Trial], str],
    folder: str,
) -> int:
    """Write a checkpoint for a pack to go on from, made of checkpoints of the same trials with fewer steps.

    `root` is the folder of all packs' checkpoints, `folder` this pack's. Returns the steps before the
    checkpoint; 0 if the trials have no checkpoints of a common step.
    """
    from mup_tpu.training.checkpoint import load_latest, save

    trial_ids, shorter_ids = ([trial_id(trial) for trial in some] for some in (trials, shorter))
    own = load_latest(folder)
    if own is not None and own.meta.get("trial_ids") == trial_ids:
        return own.step
    found = _common(root, shorter_ids, min(map(open_steps, [*shorter, *trials])))
    if not found:
        return 0
    checkpoint = _joined(root, found, shorter_ids, trials[0].train.steps)
    if checkpoint is None:
        return 0
    tensors, meta, step = checkpoint
    save(folder, step, tensors, meta | {"trial_ids": trial_ids})
    return step


def _common(root: Folder, trial_ids: Sequence[str], most: int) -> dict[str, tuple[str, str]]:
    """Trial -> pack and name of its checkpoint, at the latest step that all trials have."""
    by_step: dict[int, dict[str, tuple[str, str]]] = {}
    for pack, name, meta in _metas(root):
        if not 0 < meta.get("step", 0) <= most:
            continue
        for k, trial_id in enumerate(meta["trial_ids"]):
            # Not a trial that halving stopped: a longer run might have kept it.
            if trial_id in trial_ids and meta["statuses"][k] != "stopped":
                by_step.setdefault(meta["step"], {})[trial_id] = (pack, name)
    whole = [step for step, held in by_step.items() if len(held) == len(set(trial_ids))]
    return by_step[max(whole)] if whole else {}


def _metas(root: Folder) -> Iterator[tuple[str, str, dict[str, Any]]]:
    from mup_tpu.training.checkpoint import read_metas

    for pack in filter(re.compile(r"[0-9a-f]{16}(-[0-9a-f]{8})?").fullmatch, root.names()):
        for name, meta in read_metas(root / pack).items():
            if meta.keys() >= _NEEDED:
                yield pack, name, meta


_NEEDED = {"trial_ids", "members", "statuses", "ended_at", "reasons", "validation", "wall_time"}


def _joined(
    root: Folder, found: dict[str, tuple[str, str]], trial_ids: Sequence[str], steps: int
) -> tuple[dict[str, Any], dict[str, Any], int] | None:
    """Tensors, meta and step of one checkpoint for these trials with more steps; None if one is damaged."""
    import torch

    from mup_tpu.training.checkpoint import load

    held = {place: load(root / place[0], place[1]) for place in set(found.values())}
    if not all(held.values()):
        return None
    rows: dict[str, list[Any]] = {}
    meta: dict[str, Any] = {"members": [], "statuses": [], "ended_at": [], "reasons": [], "validation": []}
    losses, wall_time, step = [], 0.0, 0
    for k, trial_id in enumerate(trial_ids):
        checkpoint = held[found[trial_id]]
        assert checkpoint is not None
        before, step = checkpoint.meta, checkpoint.step
        at = before["trial_ids"].index(trial_id)
        for name in ("statuses", "ended_at", "reasons"):
            meta[name].append(before[name][at])
        meta["validation"] += [
            point | {"member": k} for point in before["validation"] if point["member"] == at
        ]
        wall_time += before["wall_time"] / len(before["trial_ids"])
        losses.append(checkpoint.tensors["losses_SK"][:step, at])
        if at in before["members"]:
            meta["members"].append(k)
            for name, tensor in checkpoint.tensors.items():
                if name != "losses_SK":
                    rows.setdefault(name, []).append(tensor[before["members"].index(at)])
    if not rows:
        return None
    losses_SK = torch.full((steps, len(trial_ids)), torch.nan, dtype=torch.float64)
    losses_SK[:step] = torch.stack(losses, 1)
    tensors = {name: torch.stack(found_rows) for name, found_rows in rows.items()}
    return tensors | {"losses_SK": losses_SK}, meta | {"wall_time": wall_time}, step
