"""Sweeps: run the missing trials of a known grid, and store each pack as it ends.

The store is the only state. The same sweep again runs the missing trials and nothing else: one rule for
resuming, caching, and "three more learning rates".
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console

from mup_tpu.config import RunOptions, SequenceOptions, Sweep, SweepOptions, Trial, field_column
from mup_tpu.config.columns import CONFIGURED, configured, label, write
from mup_tpu.config.grid import Point
from mup_tpu.config.values import parse_limit
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.jobs.pack_job import describe, make_packs, missing_trials, work
from mup_tpu.models import sizes, training_flops
from mup_tpu.store import Store, results_folder
from mup_tpu.training import longer
from mup_tpu.tuning.runner import Corpora, Packs, sweep_with_precision

if TYPE_CHECKING:
    from mup_tpu.devices import Execution
    from mup_tpu.devices.peak import TpuType


def run_sweep(
    sweep: Sweep,
    results: str,
    options: SweepOptions,
    run: RunOptions,
    console: Console,
    until: SequenceOptions = SequenceOptions(),
    continue_to: int | None = None,
) -> Counter[str]:
    """Run the missing trials of a sweep and store their rows.

    `until` may have runs bought batch after batch, until each verdict is settled or not worth its cost; the
    sweep then gives the scales, and the hyperparameter's values at the start. With `continue_to`, trials have
    that number of steps, and go on from checkpoints of the shorter ones.

    Returns the number of this call's trials by status; empty if none was missing.
    """
    deadline = time.monotonic() + parse_limit("budget", until.budget)
    sweep = sweep_with_precision(sweep, results, run, console)
    before = sweep.base.train.steps
    if continue_to is not None:
        if until.until_settled:
            raise ConfigError("continue_to and until_settled were both given: give one of them")
        if "steps" in sweep.fields:
            raise ConfigError("continue_to sets the steps of all trials, and so does an axis of the sweep")
        if not run.checkpoint_every:
            raise ConfigError("continue_to needs checkpoint_every: packs go on from checkpoints")
        for trial in sweep.trials():
            longer(trial, continue_to)  # refuses trials that cannot go on
        sweep = replace(sweep, base=sweep.base.replace(steps=continue_to))
    corpora = Corpora(sweep.trials())
    points, planned = measured(sweep, corpora), None
    if until.until_settled:
        from mup_tpu.tuning.sequence import settleable  # with the analysis

        planned = settleable(sweep, points, results)
    store = Store(results, sweep.experiment, sweep.axes, tuple(planned or ()))
    check_alike(sweep, store, but=() if continue_to is None else ("steps",))
    before = 0 if continue_to is None else before
    with Packs(store, corpora, sweep.axes.scale, options, run, console, before, deadline) as packs:
        return packs.run_grid(sweep, planned)


def what_is_missing(sweep: Sweep, results: str) -> tuple[list[Trial], Corpora]:
    """Return missing trials of a sweep, and their data; write nothing."""
    trials = sweep.trials()
    corpora, done = Corpora(trials), set[str]()
    measured(sweep, corpora)
    if "store.json" in results_folder(results).names():
        store = Store(results, sweep.experiment, sweep.axes)
        check_alike(sweep, store)
        done = store.done(stopped=False)
    return missing_trials(trials, done, corpora.trial_id), corpora


def measured(sweep: Sweep, corpora: Corpora) -> dict[float, Point]:
    """Return the points of the scale by their measure; refuse two of the same: an analysis joins them."""
    axes, by_size = sweep.axes, dict[float, Point]()
    for point in sweep.points:
        trial = sweep.base.replace(**point)
        # The vocabulary as in rows: bytes have 256, and the trial's vocab_size is not read.
        values = configured(trial) | sizes(trial, corpora.of(trial).vocab_size)
        at = describe(trial, axes.scale)
        size = float(values[axes.size])
        if size in by_size:
            before = describe(sweep.base.replace(**by_size[size]), axes.scale)
            raise ConfigError(
                f"scale: {before} and {at} have the same {label(axes.size)} "
                f"({write(axes.size, values[axes.size])}), by which the sweep is measured; "
                "give a measured_by that tells them apart"
            )
        by_size[size] = point
    return by_size


def check_alike(sweep: Sweep, store: Store, but: Sequence[str] = ()) -> None:
    """Refuse a sweep of another kind than stored runs, as an analysis would; fields of `but` may differ."""
    fields = [*but, *sweep.fields]
    changing = {field_column(field) for field in fields} | {"seed", "corpus"}
    of_base = configured(sweep.base).items()
    settings = {c: value for c, value in of_base if c in CONFIGURED and c not in changing}
    for column, other in store.others(settings):
        raise StoreError(
            f"results folder {store.folder} holds runs with {label(column)} {write(column, other)}, and this "
            f"sweep has {write(column, settings[column])}; an analysis compares runs of one kind: give "
            f"another --results, or analyse the stored runs with --where {column}={other}"
        )


MFU = 0.3  # share of the peak arithmetic that training is assumed to reach


@dataclass(frozen=True)
class Machine:
    """Machine for packs, as far as a forecast needs it."""

    name: str
    flops: float  # peak FLOP/s of the whole machine, in the precision of the trials
    packs: int  # packs at once
    execution: str
    devices: int = 1  # devices of one pack
    memory_bytes: int = 0  # memory of one device
    kind: str = "cpu"  # type of its torch devices


@dataclass(frozen=True)
class SizeForecast:
    """Forecast for the trials of one size."""

    size: str  # name of the size, as "width 64"
    trials: int
    packs: int
    flops: float  # arithmetic of one trial
    seconds: float  # time of all trials, at `MFU`
    memory_bytes: int  # memory of a pack on each device; of a trial alone, if not even that fits
    fits: bool  # whether it can be trained, if need be in smaller packs


def machine_here(trials: Sequence[Trial], run: RunOptions) -> Machine:
    """Return this machine; the peak of a CPU is measured."""
    from mup_tpu.devices import get_device
    from mup_tpu.devices.peak import cpu_peak_flops, peak_flops
    from mup_tpu.jobs import this_machine

    device, precision = get_device(run.device), trials[0].train.precision
    kind, execution = device.torch_device.type, this_machine.execution(run)
    memory = device.free_memory_bytes()
    packs, threads = this_machine.room(len(trials), run)
    name, devices = device.name, 1
    if run.split_over > 1 and kind != "xla":
        devices, packs, execution = run.split_over, 1, "loop"
        if kind == "cpu":  # processes share the cores and the memory
            peak, memory = peak_flops(device, precision), memory // devices
        else:
            peak = peak_flops(device, precision) * devices
        name = f"{devices} × {name}"
    elif kind == "cpu":
        peak = cpu_peak_flops(precision, 1) * threads * packs
        name = f"{packs * threads} cores here"
    else:
        members = len(make_packs(trials, 1, execution, gpu=this_machine.gpu(run))[0])
        mesh = device.arrange(members, trials[0].data.batch_size, run.mesh, run.split_over).mesh
        devices = mesh.trial * mesh.data
        peak = peak_flops(device, precision) * devices * packs
        name = name if packs == 1 else f"{packs} × {name}"
    return Machine(name, peak, packs, execution, devices, memory, kind)


def tpu(kind: TpuType, device: str = "xla") -> Machine:
    """Describe a TPU of one type: torch_xla spreads a pack over all chips, TorchTPU has packs on each."""
    chip, name = kind.generation, f"TPU {kind.accelerator_type}"
    packs, devices = (kind.devices, 1) if device == "tpu" else (1, kind.devices)
    peak = chip.device_flops * kind.devices
    return Machine(name, peak, packs, "vmap", devices, chip.device_hbm_bytes, device)


def forecast(
    trials: Sequence[Trial],
    scale: Sequence[str],
    vocab_size: Callable[[Trial], int],
    machine: Machine,
    where: SweepOptions,
    run: RunOptions = RunOptions(),
) -> list[SizeForecast]:
    """Predict the cost of each size of a sweep before it runs, the smallest first."""
    from mup_tpu.devices.base import ONE_DEVICE, mesh_of
    from mup_tpu.training.pack import estimate_pack_bytes

    execution: Execution = "vmap" if machine.execution == "vmap" else "loop"
    shards = run.split_over

    def memory_of(trial: Trial, members: int) -> int:
        mesh = ONE_DEVICE
        if machine.kind == "xla":  # refuses a split that does not fit the devices
            mesh = mesh_of(machine.devices, members, trial.data.batch_size, run.mesh, shards)
        mesh = ONE_DEVICE if shards > 1 else mesh  # the estimate divides by the shards instead
        return estimate_pack_bytes(
            trial, vocab_size(trial), members, execution, mesh, machine.kind, run.micro_batches, shards
        )

    by_size: dict[str, list[list[Trial]]] = {}
    gpu = machine.name if machine.kind == "cuda" else ""
    most = 1 if shards > 1 else where.pack_size
    packs = make_packs(trials, machine.packs, machine.execution, most, gpu)
    for pack in sorted(packs, key=lambda pack: work(pack[0])):
        by_size.setdefault(describe(pack[0], scale), []).append(pack)
    forecasts = []
    for size, packs in by_size.items():
        first, most = packs[0][0], max(map(len, packs))
        vocabulary = vocab_size(first)
        flops = sum(training_flops(trial, vocabulary) for pack in packs for trial in pack)
        needed = memory_of(first, most)
        if needed > machine.memory_bytes and (alone := memory_of(first, 1)) > machine.memory_bytes:
            needed, most = alone, 1
        count, computed = sum(map(len, packs)), flops
        if execution == "vmap" and first.model.architecture == "moe":
            # Stacked members compute each token by all experts (models/networks.py).
            everywhere = first.replace(experts_per_token=first.model.num_experts)
            computed *= training_flops(everywhere, vocabulary) / training_flops(first, vocabulary)
        seconds = computed / (machine.flops * MFU)
        fits = needed <= machine.memory_bytes or most > 1
        forecasts.append(SizeForecast(size, count, len(packs), flops / count, seconds, needed, fits))
    return forecasts
