"""The one training loop: a pack from its first step to its rows, with reports on the way.

Shapes: K members, S steps, R rows of the stack, B sequences, T tokens, N evaluation batches.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from os import PathLike

import numpy as np
import torch

from mup_tpu.config import RunOptions, Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.data import TokenDataset, prefetch
from mup_tpu.devices import Device, get_device
from mup_tpu.devices.peak import bfloat16_units
from mup_tpu.errors import StoreError, first_line
from mup_tpu.training.checkpoint import CheckpointWriter, load_latest
from mup_tpu.training.continuation import open_steps
from mup_tpu.training.halving import rungs
from mup_tpu.training.memory import check_fits, device_errors
from mup_tpu.training.meter import Meter, start_meter
from mup_tpu.training.optimizer import learning_rate
from mup_tpu.training.pack import Pack
from mup_tpu.training.record import Records
from mup_tpu.training.report import PackResult, Rates, Report, summary
from mup_tpu.training.signals import handling
from mup_tpu.training.stretches import Looks, falls_on

_LIKELY_MFU = 0.2

_TOKEN_BYTES = 4

_log = logging.getLogger(__name__)


def train_pack(
    trials: Sequence[Trial],
    dataset: TokenDataset,
    options: RunOptions,
    checkpoints: str | PathLike[str] | None = None,
) -> Iterator[Report | PackResult]:
    """Train a pack to its end, yielding a Report at every log point and the PackResult last.

    Args:
        trials: the members, of one `pack_key`.
        dataset: their batches.
        options: how to run.
        checkpoints: folder (or fsspec URL) to checkpoint to and to go on from; None keeps none.

    Returns:
        An iterator; a member that diverges ends with status "diverged" and loss +inf, and raises nothing.

    Raises:
        PackTooLarge: the pack does not fit in memory; a part of it may.
        DeviceFailed: a GPU failed.
    """
    return PackRun(trials, dataset, options, checkpoints).steps()


class PackRun:
    """State of one pack in training, all of it in the checkpoint; `train_pack` runs one to its end.

    `writes` says whether this process writes the checkpoints; one of the processes of a pack does.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        dataset: TokenDataset,
        options: RunOptions,
        checkpoints: str | PathLike[str] | None = None,
        writes: bool = True,
    ) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self.options, self.dataset, self._writes = options, dataset, writes
        batch_size, parts = trials[0].data.batch_size, options.micro_batches
        self.device: Device = get_device(options.device).arrange(len(trials), batch_size, options.mesh)
        execution = self.device.execution if options.execution == "auto" else options.execution
        gc.collect()  # a pack that ran out of memory holds it until then, through its error's traceback
        options.require_parts(batch_size, self.device.mesh.data)
        with device_errors(len(trials)):
            check_fits(trials[0], dataset.vocab_size, len(trials), self.device, execution, parts)
            self.pack = Pack(trials, dataset.vocab_size, self.device, execution, options.compile, parts)
        self.total = trials[0].train.steps
        self.records = Records(trials, dataset)
        self.wall_time = 0.0
        self._preempted = False
        self._rungs = rungs(self.total) if options.halving else {}
        checkpointed = checkpoints is not None and options.checkpoint_every
        self._open_until = min(map(open_steps, trials)) if checkpointed else 0
        # If reading a loss stalls the device, losses are read at evaluations; without any, seldom.
        seldom = 0 if options.eval_every else 10 * options.log_every
        read_every = options.log_every if self.device.reads_cheaply else seldom
        self._looks = Looks(
            (read_every, options.eval_every, options.checkpoint_every),
            {*self._rungs, self._open_until, self.total},
        )
        self._checkpoints = CheckpointWriter(checkpoints) if checkpoints is not None else None
        if checkpoints is not None:
            self._resume(checkpoints)

    @property
    def first_report_waits_for(self) -> str:
        """Work between the start of `steps` and its first report, in a few words."""
        return "compiling, then first steps" if self.pack.compiles else "first steps"

    def steps(self) -> Iterator[Report | PackResult]:
        """Train, report, finish. However it ends, no checkpoint is left half-written."""
        try:
            with device_errors(len(self.pack.trials)):
                yield from self._steps()
        finally:
            if self._checkpoints is not None:
                self._checkpoints.close()

    def _steps(self) -> Iterator[Report | PackResult]:
        self._epoch_began = self.pack.steps_done
        self._log_begin()
        meter = start_meter(self.pack, self.dataset.tokens_per_step)
        pending: list[tuple[torch.Tensor, int]] = []
        stretches = self._stretches(self.pack.steps_done, meter)
        prepares = self.pack.compiles or self.device.compiles  # or traces and records, for seconds
        with self._batches(stretches) as batches:
            for stretch in stretches:
                if not any(self.pack.live):
                    break
                with meter.waiting():
                    tokens_SBT1 = next(batches, None)
                if tokens_SBT1 is None:  # preempted while it waited
                    self.wall_time += meter.lap(*self._take_losses(pending))
                    yield from self._end_preempted()
                    return
                pending.append((self.pack.train(tokens_SBT1, len(stretch)), len(stretch)))
                if prepares:
                    meter.prepared()
                    prepares = False
                done, preempted = self.pack.steps_done, self._preempted
                if not (self._looks.falls_on(done) or preempted):
                    continue
                yield self._look(pending, meter)
                before_end = done < self.total
                if falls_on(self.options.checkpoint_every, done) and before_end or done == self._open_until:
                    self._save()
                if preempted and before_end:
                    yield from self._end_preempted()
                    return
        result = self._finish(meter)
        if self._checkpoints is not None:
            self._checkpoints.close()  # before the result: its receiver may drop the folder
        yield result

    def _batches(
        self, stretches: Sequence[range]
    ) -> contextlib.AbstractContextManager[Iterator[torch.Tensor]]:
        """Batches of each stretch on the device, made by a thread."""
        room = max(map(len, stretches), default=1)

        def make(i: int) -> torch.Tensor:
            if i == 0:  # read here: an evaluation that waits for them would not heed SIGTERM
                self.dataset.validation_batches(self.pack.trials[0].train.eval_batches)
            tokens_SBT1 = torch.from_numpy(np.stack([*map(self.dataset.train_batch, stretches[i])]))
            return self.device.place_stack(tokens_SBT1, "data", room)  # one program serves all stretches

        return prefetch(make, 0, len(stretches), gives_up=lambda: self._preempted)

    def _look(self, pending: list[tuple[torch.Tensor, int]], meter: Meter) -> Report:
        """Read losses, end members that diverged or are hopeless, evaluate if it is time, and log."""
        done, before_end = self.pack.steps_done, self.pack.steps_done < self.total
        steps, live = self._take_losses(pending)
        if done in self._rungs and before_end:
            self.pack.end(*self.records.end_hopeless(done, self._rungs[done], self.options.tuned))
        evaluates = falls_on(self.options.eval_every, done) and before_end
        validation = self._evaluate(done) if evaluates else None
        self.wall_time += meter.lap(steps, live)
        report = self._report(meter.rates(self.total - done), validation)
        _log.info("%s", report)
        if self._epoch(done) > self._epoch(self._epoch_began) and any(self.pack.live):
            self._log_epoch(self._epoch_began, meter.overall())
            self._epoch_began = done
        return report

    def _stretches(self, start: int, meter: Meter) -> list[range]:
        data = self.dataset.config
        batch_bytes = data.batch_size * (data.sequence_length + 1) * _TOKEN_BYTES
        step_s = len(self.pack.trials) * meter.seconds_a_step(_LIKELY_MFU)
        longest = self.pack.longest_stretch(batch_bytes)
        return self._looks.stretches(start, self.total, longest, step_s)

    def _take_losses(self, pending: list[tuple[torch.Tensor, int]]) -> tuple[int, int]:
        """Read the losses of the last steps, and end members that diverged; return steps and live members."""
        # Read one by one: on XLA, joining them would be another program.
        losses = [self.pack.read(losses_SR)[:count] for losses_SR, count in pending]
        pending.clear()
        done, steps, live = self.pack.steps_done, sum(map(len, losses)), sum(self.pack.live)
        if steps:
            self.records.losses_SK[done - steps : done] = torch.cat(losses)
        self.pack.end(*self.records.end_diverged(done))
        return steps, live

    def _evaluate(self, done: int) -> tuple[float, ...]:
        count = self.pack.trials[0].train.eval_batches
        tokens_NBT1 = torch.from_numpy(self.dataset.validation_batches(count))
        held_out = self.device.place_stack(tokens_NBT1, "data", len(tokens_NBT1))
        losses = tuple(self.pack.read(self.pack.evaluate(held_out)).double().tolist())
        self.records.evaluated(done, losses)
        return losses

    def preempt(self) -> None:
        """Checkpoint after this step, or at once if it waits for data, and end as "preempted"."""
        self._preempted = True

    def preemptible(self) -> contextlib.AbstractContextManager[None]:
        """SIGTERM preempts the run, as Google Cloud sends it half a minute before it takes a machine away."""
        return handling({signal.SIGTERM: lambda number, frame: self.preempt()})

    def _end_preempted(self) -> Iterator[PackResult]:
        self.save()
        yield self.so_far("preempted")

    def so_far(self, status: str = "stopped") -> PackResult:
        """The result if the members still running were stopped (or preempted) now."""
        records = self.records.ended(status, self.pack.steps_done)
        final = (math.nan,) * len(records.members)
        rows, curves = records.results(final, self.options.log_every, self.wall_time, self.device.name)
        return PackResult(rows, curves, None, None)

    def _finish(self, meter: Meter) -> PackResult:
        rates, done = meter.overall(), self.pack.steps_done
        final = self._evaluate(done) if any(self.pack.live) else (math.nan,) * len(self.pack.trials)
        self.device.synchronize()
        self.wall_time += meter.lap(0, 0)
        self.records.end_all(done, final)
        rows, curves = self.records.results(final, self.options.log_every, self.wall_time, self.device.name)
        _log.info("%s", summary(rows, rates))
        return PackResult(rows, curves, self.pack, rates)

    def _report(self, rates: Rates, validation: tuple[float, ...] | None) -> Report:
        done = self.pack.steps_done
        losses = tuple(self.records.losses_SK[done - 1].tolist())
        learning_rates = tuple(learning_rate(trial, done - 1) for trial in self.pack.trials)
        return Report(done, self.total, losses, validation, learning_rates, self.records.statuses, rates)

    def _log_begin(self) -> None:
        trials, trial_id = self.pack.trials, self.records.trial_ids()[0]
        name = f"a pack of {len(trials)}" if len(trials) > 1 else "a trial"
        done, where = self.pack.steps_done, f"on {self.device.name}"
        at = f"goes on from step {done} of {self.total}" if done else f"starts its {self.total} steps"
        size = f"{write_scale('params', self.pack.declaration.total)} parameters"
        _log.info("%s of %s, %s, %s %s", name, size, trial_id, at, where)
        kind = self.device.torch_device.type
        if trials[0].train.precision == "bf16" and kind != "xla" and not (found := bfloat16_units(kind))[0]:
            _log.warning("precision bf16 is slow: %s", found[1])

    def _epoch(self, step: int) -> int:
        """Whole passes over the training text after a step; 0 if its length is unknown."""
        tokens = self.dataset.meta.get("train", {}).get("tokens")
        return step * self.dataset.tokens_per_step // tokens if tokens else 0

    def _log_epoch(self, began: int, rates: Rates) -> None:
        done = self.pack.steps_done
        means = self.records.losses_SK[began:done].mean(0)[torch.tensor(self.pack.live)]
        best = f"mean loss {means.min():.4f}" + (f", best of {len(means)}" if len(means) > 1 else "")
        _log.info("epoch %d, to step %d: %s · %s", self._epoch(done), done, best, rates)

    def save(self) -> None:
        """Checkpoint the pack if it has checkpoints, and wait until all is written.

        At its end a pack is checkpointed only if a longer run can go on from there.
        """
        self._save()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _save(self) -> None:
        """Checkpoint as `save` does, but write while training goes on."""
        done = self.pack.steps_done
        is_open = done == self._open_until
        at_end = done == self.total and not is_open
        if self._checkpoints is None or not done or at_end or not any(self.pack.live):
            return
        own = {"members": self.pack.members, "wall_time": self.wall_time, "is_open": is_open}
        meta = self.records.state() | own
        # Read on every host, even if another one writes: reading a sharded tensor is a program of all hosts.
        tensors = self.pack.tensors() | {"losses_SK": self.records.losses_SK}
        evaluated = [point["loss"] for point in meta["validation"] if point["step"] == done]
        best = min(filter(math.isfinite, evaluated), default=None)
        if self._writes:
            self._checkpoints.save(done, tensors, meta, best)

    def _resume(self, checkpoints: str | PathLike[str]) -> None:
        found = load_latest(checkpoints)
        if found is None or found.meta.get("trial_ids") != self.records.trial_ids():
            return
        try:
            losses_SK = found.tensors.pop("losses_SK")
            self.pack.load_tensors(found.tensors, found.meta["members"], found.step)
            self.records.load(found.meta, losses_SK)
            self.wall_time = float(found.meta["wall_time"])
            self.pack.end(*(k for k, member in enumerate(self.records.members) if not member.runs))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise StoreError(
                f"checkpoint of step {found.step} in {checkpoints} is not one that this version wrote "
                f"({first_line(error)}); remove that folder to train from the start"
            ) from None


def run_to_end(
    events: Iterator[Report | PackResult], on_report: Callable[[Report], None] | None = None
) -> PackResult:
    """Drain `train_pack`, handing its reports on, and return its result."""
    for event in events:
        if isinstance(event, PackResult):
            return event
        if on_report is not None:
            on_report(event)
    raise AssertionError("a pack always ends with its result")
