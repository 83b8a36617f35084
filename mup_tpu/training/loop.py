"""The one training loop: a pack from its first step to its rows, with reports on the way.

Shapes: K members, S steps, B sequences, T tokens, N evaluation batches.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from mup_tpu.config import RunOptions, Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.data import TokenDataset, prefetch
from mup_tpu.devices import Device, get_device
from mup_tpu.errors import StoreError, first_line
from mup_tpu.training.checkpoint import CheckpointWriter, load_latest
from mup_tpu.training.continuation import open_steps
from mup_tpu.training.halving import RECENT, behind_best, rungs
from mup_tpu.training.memory import check_fits, half_fits
from mup_tpu.training.meter import Meter, start_meter
from mup_tpu.training.optimizer import learning_rate
from mup_tpu.training.pack import Pack
from mup_tpu.training.record import MemberRecord
from mup_tpu.training.report import PackResult, Rates, Report, summary
from mup_tpu.training.signals import handling

_STRETCH_S = 10.0
"""Most seconds that steps handed over at once are likely to take: SIGTERM is heeded after them, and a machine
is taken away half a minute later."""

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
    """
    return PackRun(trials, dataset, options, checkpoints).steps()


class PackRun:
    """State of one pack in training, all of it in the checkpoint; `train_pack` is the way to run one."""

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
        self.options, self.dataset = options, dataset
        self._writes = writes  # one process alone of those that train a pack together
        batch_size = trials[0].data.batch_size
        self.device: Device = get_device(options.device).arrange(len(trials), batch_size, options.mesh)
        execution = self.device.execution if options.execution == "auto" else options.execution
        gc.collect()  # or a pack that ran out of memory would still hold it, through its error's traceback
        parts = options.micro_batches
        options.require_parts(batch_size, self.device.mesh.data)
        check_fits(trials[0], dataset.vocab_size, len(trials), self.device, execution, parts)
        with half_fits(len(trials)):
            self.pack = Pack(trials, dataset.vocab_size, self.device, execution, options.compile, parts)
        self.total = trials[0].train.steps
        # Where reading a loss stalls the device, evaluations are when to do it (else now and then).
        seldom = 0 if options.eval_every else 10 * options.log_every
        self._read_every = options.log_every if self.device.reads_cheaply else seldom
        self.losses_SK = torch.full((self.total, len(trials)), math.nan, dtype=torch.float64)
        self.records = [MemberRecord(trial) for trial in trials]
        self._rungs = rungs(self.total) if options.halving else {}
        self.wall_time = 0.0
        self._preempted = False
        self._checkpoints = CheckpointWriter(checkpoints) if checkpoints is not None else None
        checkpointed = checkpoints is not None and options.checkpoint_every
        self._open_until = min(map(open_steps, trials)) if checkpointed else 0
        if checkpoints is not None:
            self._resume(checkpoints)

    @property
    def first_report_waits_for(self) -> str:
        """What is done between the start of `steps` and its first report, in a few words."""
        compiles = self.options.compile or self.device.compiles
        return "compiling, then first steps" if compiles else "first steps"

    def steps(self) -> Iterator[Report | PackResult]:
        """Train, report, finish; however it ends, no checkpoint is left half-written."""
        try:
            with half_fits(len(self.pack.trials)):
                yield from self._steps()
        finally:
            if self._checkpoints is not None:
                self._checkpoints.close()

    def _steps(self) -> Iterator[Report | PackResult]:
        start = epoch_began = self.pack.steps_done
        self._log_begin()
        meter = start_meter(self.pack, self.dataset.tokens_per_step)
        pending: list[tuple[torch.Tensor, int]] = []
        step_s = len(self.pack.trials) * meter.seconds_a_step(_LIKELY_MFU)
        stretches = self._stretches(start, step_s)
        room = max(map(len, stretches), default=1)

        def make(i: int) -> torch.Tensor:
            if i == 0:  # evaluations find it read: they do not heed SIGTERM while they wait
                self.dataset.validation_batches(self.pack.trials[0].train.eval_batches)
            return self._place_batches(stretches[i], room)

        with prefetch(make, 0, len(stretches), gives_up=lambda: self._preempted) as batches:
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
                done = self.pack.steps_done
                evaluates = self._falls_on(self.options.eval_every, done) and done < self.total
                saves = self._falls_on(self.options.checkpoint_every, done) and done < self.total
                saves |= done == self._open_until
                preempted = self._preempted and done < self.total
                halves = done in self._rungs and done < self.total
                if not (self._is_looked_at(done) or preempted):
                    continue
                steps, live = self._take_losses(pending)
                if halves:
                    self._end_hopeless(done, self._rungs[done])
                validation = self._evaluate(done) if evaluates else None
                self.wall_time += meter.lap(steps, live)
                report = self._report(meter.rates(self.total - done), validation)
                _log.info("%s", report)
                if self._epoch(done) > self._epoch(epoch_began) and any(self.pack.live):
                    self._log_epoch(epoch_began, meter.overall())
                    epoch_began = done
                yield report
                if saves:
                    self._save()
                if preempted:
                    yield from self._end_preempted()
                    return
        result = self._finish(meter)
        if self._checkpoints is not None:
            self._checkpoints.close()  # before the result: whoever gets it may drop the folder
        yield result

    def _take_losses(self, pending: list[tuple[torch.Tensor, int]]) -> tuple[int, int]:
        """Read the losses of the last steps, and end members that diverged; how many steps, of how many."""
        # Read one by one: on XLA, joining them would be another program.
        losses = [self.pack.read(losses_SR)[:count] for losses_SR, count in pending]
        pending.clear()
        done, steps, live = self.pack.steps_done, sum(map(len, losses)), sum(self.pack.live)
        if steps:
            self.losses_SK[done - steps : done] = torch.cat(losses)
        self._end_diverged(done)
        return steps, live

    def _end_preempted(self) -> Iterator[PackResult]:
        self.save()
        yield self.so_far("preempted")

    def preempt(self) -> None:
        """Checkpoint after the step in progress, or at once if it waits for data, and end as "preempted".

        For a signal handler.
        """
        self._preempted = True

    def preemptible(self) -> contextlib.AbstractContextManager[None]:
        """SIGTERM preempts the run, as Google Cloud sends it half a minute before it takes a machine away."""
        return handling({signal.SIGTERM: lambda number, frame: self.preempt()})

    def _is_looked_at(self, done: int) -> bool:
        """Whether losses are read after so many steps: log point, evaluation, checkpoint, rung or end."""
        o = self.options
        often = any(self._falls_on(n, done) for n in (self._read_every, o.eval_every, o.checkpoint_every))
        return often or done in self._rungs or done in (self._open_until, self.total)

    def _stretches(self, start: int, step_s: float) -> list[range]:
        """The steps from `start` on in parts to hand over at once: losses are read only between two of them.

        Args:
            start: the first step.
            step_s: seconds that one is likely to take; nan where that is not known.
        """
        data = self.dataset.config
        batch_bytes = data.batch_size * (data.sequence_length + 1) * _TOKEN_BYTES
        longest = self.pack.longest_stretch(batch_bytes)
        if step_s * longest > _STRETCH_S:
            longest = max(1, int(_STRETCH_S / step_s))
        stretches, begun = [], start
        for done in range(start + 1, self.total + 1):
            if done - begun == longest or self._is_looked_at(done):
                stretches.append(range(begun, done))
                begun = done
        return stretches

    @staticmethod
    def _falls_on(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _end_diverged(self, done: int) -> None:
        """End members with a loss that is not finite, at the first such step."""
        bad_SK = ~self.losses_SK[:done].isfinite()
        lost = [k for k, record in enumerate(self.records) if record.runs and bad_SK[:, k].any()]
        for k in lost:
            first = int(bad_SK[:, k].nonzero()[0])
            self.records[k].end("diverged", first, f"loss not finite at step {first}")
        self.pack.end(*lost)

    def _end_hopeless(self, done: int, limit: float) -> None:
        """End members too far behind the best of their group (alike but for tuned fields and seed)."""
        recent_SK = self.losses_SK[max(0, done - max(1, int(RECENT * self.total))) : done].numpy()
        first = self.pack.trials[0].flat()
        alike = {name: first[name] for name in (*self.options.tuned, "seed")}
        groups = [trial.replace(**alike) for trial in self.pack.trials]
        gaps_K = behind_best(recent_SK, groups)
        hopeless = [k for k, record in enumerate(self.records) if record.runs and gaps_K[k] > limit]
        for k in hopeless:
            self.records[k].end(
                "stopped", done, f"halving: {gaps_K[k]:.2f} nat behind the best at step {done}"
            )
        self.pack.end(*hopeless)

    def _place_batches(self, stretch: range, room: int) -> torch.Tensor:
        """Tokens_SBT1 of a stretch, with room for the longest one's, so that all are the same program."""
        tokens_SBT1 = torch.from_numpy(np.stack([self.dataset.train_batch(step) for step in stretch]))
        return self.device.place_stack(tokens_SBT1, "data", room)

    def _evaluate(self, done: int) -> tuple[float, ...]:
        count = self.pack.trials[0].train.eval_batches
        tokens_NBT1 = torch.from_numpy(self.dataset.validation_batches(count))
        held_out = self.device.place_stack(tokens_NBT1, "data", len(tokens_NBT1))
        losses = tuple(self.pack.read(self.pack.evaluate(held_out)).double().tolist())
        tokens = done * self.dataset.tokens_per_step
        for record, loss in zip(self.records, losses, strict=True):
            if record.runs:
                record.validation.append(
                    {"step": done, "tokens": tokens, "split": "validation", "loss": loss}
                )
        return losses

    def _report(self, rates: Rates, validation: tuple[float, ...] | None) -> Report:
        done = self.pack.steps_done
        losses = tuple(self.losses_SK[done - 1].tolist())
        learning_rates = tuple(learning_rate(trial, done - 1) for trial in self.pack.trials)
        statuses = tuple(record.status for record in self.records)
        return Report(done, self.total, losses, validation, learning_rates, statuses, rates)

    def _log_begin(self) -> None:
        trials, trial_id = self.pack.trials, self._trial_ids()[0]
        what = f"a pack of {len(trials)}" if len(trials) > 1 else "a trial"
        at = f"from step {self.pack.steps_done} of {self.total} on {self.device.name}"
        size = f"{write_scale('params', self.pack.declaration.total)} parameters"
        _log.info("%s of %s, %s, goes on %s", what, size, trial_id, at)

    def _epoch(self, step: int) -> int:
        """Whole passes over the training text after a step; 0 where its length is not known."""
        tokens = self.dataset.meta.get("train", {}).get("tokens")
        return step * self.dataset.tokens_per_step // tokens if tokens else 0

    def _log_epoch(self, began: int, rates: Rates) -> None:
        done = self.pack.steps_done
        means = self.losses_SK[began:done].mean(0)[torch.tensor(self.pack.live)]
        best = f"mean loss {means.min():.4f}" + (f", best of {len(means)}" if len(means) > 1 else "")
        _log.info("epoch %d, to step %d: %s · %s", self._epoch(done), done, best, rates)

    def _finish(self, meter: Meter) -> PackResult:
        """Final evaluation, rows and curves."""
        rates = meter.overall()
        done = self.pack.steps_done
        final = self._evaluate(done) if any(self.pack.live) else (math.nan,) * len(self.records)
        self.device.synchronize()
        self.wall_time += meter.lap(0, 0)
        for record, loss in zip(self.records, final, strict=True):
            if record.runs and math.isfinite(loss):
                record.end("finished", done)
            elif record.runs:
                record.end("diverged", done, f"loss not finite at step {done}")
        rows, curves = self._rows(self.records, final)
        _log.info("%s", summary(rows, rates))
        return PackResult(rows, curves, self.pack, rates)

    def so_far(self, status: str = "stopped") -> PackResult:
        """The result if the members still running were stopped (or preempted) now."""
        records = [record.ended(status, self.pack.steps_done) for record in self.records]
        rows, curves = self._rows(records, (math.nan,) * len(records))
        return PackResult(rows, curves, None, None)

    def _rows(
        self, records: Sequence[MemberRecord], final: Sequence[float]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows and curves of all members, given their final held-out losses."""
        rows, curves = [], []
        for k, record in enumerate(records):
            row, curve = record.row_and_curve(
                self.dataset,
                self.losses_SK[: record.ended_at, k].tolist(),
                final[k],
                self.options.log_every,
                wall_time_s=self.wall_time / len(records),
                device=self.device.name,
                pack_size=len(records),
            )
            rows.append(row)
            curves += curve
        return rows, curves

    def _trial_ids(self) -> list[str]:
        return [trial.trial_id(self.dataset.fingerprint) for trial in self.pack.trials]

    def save(self) -> None:
        """Checkpoint the pack as it stands, if it is checkpointed at all, and at its end if it can go on.

        On return it is written.

        Raises:
            StoreError: it, or the checkpoint before it, could not be written.
        """
        self._save()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _save(self) -> None:
        """As `save`, but it is written while training goes on."""
        done = self.pack.steps_done
        is_open = done == self._open_until
        at_end = done == self.total and not is_open
        if self._checkpoints is None or not done or at_end or not any(self.pack.live):
            return
        meta = {
            "trial_ids": self._trial_ids(),
            "members": self.pack.members,
            "statuses": [record.status for record in self.records],
            "ended_at": [record.ended_at for record in self.records],
            "reasons": [record.reason for record in self.records],
            "validation": [
                {"member": k, **point} for k, record in enumerate(self.records) for point in record.validation
            ],
            "wall_time": self.wall_time,
            "is_open": is_open,
        }
        tensors = self.pack.tensors() | {"losses_SK": self.losses_SK}
        evaluated = [p["loss"] for record in self.records for p in record.validation if p["step"] == done]
        if self._writes:
            best = min(filter(math.isfinite, evaluated), default=None)
            self._checkpoints.save(done, tensors, meta, best)

    def _resume(self, checkpoints: str | PathLike[str]) -> None:
        found = load_latest(checkpoints)
        if found is None or found.meta.get("trial_ids") != self._trial_ids():
            return
        try:
            self.losses_SK.copy_(found.tensors.pop("losses_SK"))
            self.pack.load_tensors(found.tensors, found.meta["members"], found.step)
            lists = (found.meta[name] for name in ("statuses", "ended_at", "reasons"))
            for record, *end in zip(self.records, *lists, strict=True):
                record.end(*end)
            for point in found.meta["validation"]:
                self.records[point.pop("member")].validation.append(point)
            self.wall_time = found.meta["wall_time"]
            self.pack.end(*(k for k, record in enumerate(self.records) if not record.runs))
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
