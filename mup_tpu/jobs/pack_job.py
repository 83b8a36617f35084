"""Packs: which trials train together, and the job of one pack, from importing torch to its rows."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mup_tpu import data
from mup_tpu.config import RunOptions, Trial
from mup_tpu.config.columns import CONFIGURED, write
from mup_tpu.jobs.driver import Job, JobContext, Preparing, Request
from mup_tpu.models import declare, training_flops
from mup_tpu.training import pack_key
from mup_tpu.training.record import PackResult

T = TypeVar("T")

# Members of a pack. In turns a larger pack saves only the batches, and small packs are stored sooner.
LARGEST_PACK = {"loop": 8, "vmap": 16}

_LARGEST_ON_GPU = 32  # most members of a pack on a GPU of known speed; more were not measured

# Arithmetic of a pack's step that fills a GPU, in seconds at its peak for each layer. Launches then take 5
# % of a step: a layer's launches take 0.17 ms, and a third of the peak is reached (one H100, two widths,
# `benchmarks/gpu_peers.csv`). Other GPUs, lengths and precisions are a guess.
_FULL_S = 1.2e-3

# Vectors of the model's width that a layer writes per token for the backward pass (measured on CPUs)
_KEPT = 34

# Arithmetic in the time of writing one number for the backward pass (measured on CPUs)
_FLOPS_PER_NUMBER = 500.0

_VOCABULARY = 256  # assumed size of the vocabulary, since the data is not loaded yet


def describe(trial: Trial, fields: Sequence[str]) -> str:
    labels = {column.field: column.label for column in CONFIGURED.values()}
    flat = trial.flat()
    return " ".join(f"{labels[name]} {write(name, flat[name])}" for name in fields)


def work(trial: Trial) -> float:
    """Estimate the relative time of a trial: its arithmetic, and its memory traffic as arithmetic."""
    data = trial.data
    declaration = declare(trial.model, _VOCABULARY, data.sequence_length)
    numbers = _KEPT * declaration.width * declaration.layers
    tokens = trial.train.steps * data.batch_size * data.sequence_length
    return training_flops(trial, _VOCABULARY) + _FLOPS_PER_NUMBER * numbers * tokens


def missing_trials(trials: Iterable[T], done: Collection[str], trial_id: Callable[[T], str]) -> list[T]:
    by_id = {trial_id(trial): trial for trial in trials}
    return [trial for name, trial in by_id.items() if name not in done]


def largest_pack(trial: Trial, execution: str, gpu: str = "") -> int:
    """Return the most members of a pack: on a GPU of known speed, as many as fill it.

    Wide trials then train in packs of one, since stacking brings little and needs their memory at once. Where
    memory is too short, packs are split before they train. `gpu` is "" on other devices.
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
    """Group trials of one shape into packs, the longest first, so that the last one to run is short.

    Where they are more than the workers, the shortest comes before all: results are stored from the start. A
    pack has at most `pack_size` members; 0 is automatic.
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


# Folder or fsspec URL of a pack's checkpoints; None keeps none
FolderOf = Callable[[list[Trial]], str | None]


@dataclass(eq=False)
class PackJob(Job):
    """A pack to train; its parts, after a split, have their own folders of checkpoints."""

    trials: list[Trial]
    options: RunOptions
    folder_of: FolderOf | None = None
    asks: bool = False  # whether the driver decides after each evaluation which members train on
    scale: Sequence[str] = ("width",)  # fields that name the pack's size in sentences

    def __post_init__(self) -> None:
        self.checkpoints = self.folder_of(self.trials) if self.folder_of else None
        self.members = len(self.trials)
        is_kept = self.options.checkpoint_every > 0
        self.kept = "its checkpoint is kept" if is_kept else "without --checkpoint-every"

    def __str__(self) -> str:
        count = "a trial" if self.members == 1 else f"a pack of {self.members} trials"
        return f"{count} of {describe(self.trials[0], self.scale)}"

    def __getstate__(self) -> dict[str, Any]:
        """Drop `folder_of`: only the driver splits, and the function holds all data of a sweep."""
        return {**vars(self), "folder_of": None}

    def split(self, fits: int) -> Sequence[PackJob]:
        if len(self.trials) == 1:
            return ()
        count = math.ceil(len(self.trials) / fits)
        return [replace(self, trials=self.trials[i::count]) for i in range(count)]

    def was_preempted(self, result: PackResult) -> bool:
        return any(row["status"] == "preempted" for row in result.rows)

    def run(self, here: JobContext) -> Generator[Any, Any, PackResult]:
        """Train the pack, and before the first report name the current work.

        The result has no tensors: their memory must be free before the next pack starts, and the store needs
        only rows and curves.
        """
        if "torch" not in sys.modules:
            yield Preparing("importing torch")
        from mup_tpu.jobs.preload import PackRun

        corpus = self.trials[0].data
        yield Preparing(f"reading {corpus.corpus}")
        dataset = here.once(corpus, lambda: data.load(corpus, progress=here.in_driver))
        yield Preparing("initialising parameters")
        training = PackRun(self.trials, dataset, self.options, self.checkpoints, here.writes)
        yield Preparing(training.first_report_waits_for)
        with training.preemptible() if here.handles_sigterm else contextlib.nullcontext():
            for event in training.steps():
                if isinstance(event, PackResult):
                    return replace(event, pack=None)
                yield event
                if self.asks and event.validation_losses is not None:
                    rows = zip(training.so_far().rows, event.statuses, strict=True)
                    live = [row for row, status in rows if status == "running"]
                    points = {row["trial_id"]: [(event.step, row["loss"])] for row in live}
                    training.stop((yield Request(points, event.steps)))
        raise AssertionError("a pack ends with its result")
