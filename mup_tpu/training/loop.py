"""The training loop: a pack from its first step to its rows, with reports on the way.

Shapes: K members, S steps, R rows of the stack, B sequences, T tokens, N evaluation batches.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from os import PathLike

import numpy as np
import torch

from mup_tpu import data
from mup_tpu.config import RunOptions, Trial
from mup_tpu.config.columns import write_scale
from mup_tpu.data import TokenDataset, prefetch
from mup_tpu.devices import Device, get_device
from mup_tpu.devices.base import BY_XLA
from mup_tpu.devices.peak import bfloat16_units, peak_flops
from mup_tpu.errors import MupTpuError, StoreError, first_line
from mup_tpu.training import learning_rate, open_steps
from mup_tpu.training.checkpoint import CheckpointWriter, load_latest
from mup_tpu.training.pack import Pack, check_fits, device_errors
from mup_tpu.training.process import handling
from mup_tpu.training.record import Meter, PackProgress, PackResult, Records, summary
from mup_tpu.training.sharded import Processes, ShardedPack, follower

# SIGTERM takes effect between two chunks of steps, and comes 30 s before a machine is taken away.
_LONGEST_CHUNK_S = 10.0

# Share of a device's peak FLOP/s that training is assumed to reach before its first steps are measured.
_LIKELY_MFU = 0.2

_TOKEN_BYTES = 4

_log = logging.getLogger(__name__)


class PackRun:
    """State of one pack in training; a checkpoint holds all of it."""

    def __init__(
        self,
        trials: Sequence[Trial],  # trials with the same `pack_key`
        dataset: TokenDataset,
        options: RunOptions,
        checkpoints: str | PathLike[str] | None = None,  # folder to write to and go on from; None keeps none
        writes: bool = True,  # whether this process writes them: one of several with one pack does
    ) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self.options, self.dataset, self._writes = options, dataset, writes
        self.records = Records(trials, dataset)
        by_processes = options.split_over > 1 and options.device != "xla"
        self._processes = Processes(trials, options, checkpoints, follow) if by_processes else None
        batch_size, parts = trials[0].data.batch_size, options.micro_batches
        self.device: Device = get_device(options.device).arrange(
            len(trials), batch_size, options.mesh, options.split_over
        )
        execution = self.device.execution if options.execution == "auto" else options.execution
        gc.collect()  # frees the memory of a failed pack, which the traceback of its error still holds
        options.require_parts(batch_size, max(self.device.mesh.data, options.split_over))
        with self._errors():
            if self._processes is not None:
                self.pack: Pack = ShardedPack(trials[0], dataset.vocab_size, self.device, parts)
            else:
                check_fits(trials[0], dataset.vocab_size, len(trials), self.device, execution, parts)
                self.pack = Pack(trials, dataset.vocab_size, self.device, execution, micro_batches=parts)
        self.total = trials[0].train.steps
        self.wall_time = 0.0
        self._preempted = False
        checkpointed = checkpoints is not None and options.checkpoint_every
        self._open_until = min(map(open_steps, trials)) if checkpointed else 0
        self._checkpoints = CheckpointWriter(checkpoints) if checkpoints is not None else None
        if checkpoints is not None:
            self._resume(checkpoints)

    def steps(self) -> Iterator[PackProgress | PackResult]:
        """Train the pack to its end, yielding a Report at every log point and the PackResult last.

        A member that diverges ends with status "diverged" and loss +inf, and raises nothing. However training
        ends, no checkpoint is left half-written.

        Raises:
            PackTooLarge: the pack does not fit in memory; a part of it may.
            DeviceFailed: a GPU failed.
        """
        with contextlib.ExitStack() as stack:
            if self._processes is not None:
                stack.callback(self._processes.close)
            stack.enter_context(self._errors())
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close)
            yield from self._train()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the process of a split trial that failed first; in the others, the exchange fails."""
        try:
            with device_errors(len(self.records.members)):
                yield
        except (RuntimeError, MupTpuError) as error:
            if self._processes is None:
                raise
            failure = self._processes.failure()
            self._processes.close()
            raise (failure or error) from None

    def finish(self, on_report: Callable[[PackProgress], None] = lambda report: None) -> PackResult:
        for event in self.steps():
            if isinstance(event, PackResult):
                return event
            on_report(event)
        raise AssertionError("a pack always ends with its result")

    def _train(self) -> Iterator[PackProgress | PackResult]:
        pack, records, options, total = self.pack, self.records, self.options, self.total
        first, mesh = pack.trials[0], self.device.mesh
        flops = pack.declaration.flops_per_token(pack.vocab_size, first.data.sequence_length)
        peak = peak_flops(self.device, first.train.precision)
        devices = mesh.trial * mesh.data * (options.split_over if self._processes else 1)
        meter = Meter(self.dataset.tokens_per_step, flops, devices, peak)
        chunks = self._chunks(meter)
        unread: list[tuple[torch.Tensor, int]] = []  # losses_SR of chunks on the device, and their steps
        first_step_prepares = pack.compiles or self.device.compiles  # compiles, or traces and records
        self._log_begin()
        with self._batches(chunks) as batches:
            for chunk in chunks:
                with meter.waiting():
                    tokens_SBT1 = None if self._preempted else next(batches, None)
                if pack.agree(tokens_SBT1 is None):  # it was preempted, perhaps while it waited
                    self._preempted = True
                    break
                assert tokens_SBT1 is not None
                unread.append((pack.train(tokens_SBT1, len(chunk)), len(chunk)))
                if first_step_prepares:
                    self.device.synchronize()  # otherwise the chunk's time would count for the next
                    meter.prepared(len(chunk), sum(pack.live))
                    first_step_prepares = False
                done = pack.steps_done
                if not self._reads_losses_after(done):
                    continue
                steps, live = self._read_losses(unread)
                evaluates = _is_due(options.eval_every, done) and done < total
                validation = self._evaluate(done) if evaluates else None
                self.wall_time += meter.lap(steps, live)
                losses = tuple(records.losses_SK[done - 1].tolist())
                rates = tuple(learning_rate(trial, done - 1) for trial in pack.trials)
                speed = meter.rates(total - done)
                report = PackProgress(done, total, losses, validation, rates, records.statuses, speed)
                _log.info("%s", report)
                yield report
                if _is_due(options.checkpoint_every, done) and done < total or done == self._open_until:
                    self._save()
                if not any(pack.live):
                    break
        if self._preempted and pack.steps_done < total and any(pack.live):
            self.wall_time += meter.lap(*self._read_losses(unread))
            self.save()
            yield self.so_far("preempted")
            return
        speed = meter.overall()
        final = self._evaluate(pack.steps_done) if any(pack.live) else (math.nan,) * len(pack.trials)
        self.device.synchronize()
        self.wall_time += meter.lap(0, 0)
        pack.leave()
        records.end_all(pack.steps_done, final)
        rows, curves = records.results(final, options.log_every, self.wall_time, self.device.name)
        _log.info("%s", summary(rows, speed))
        if self._checkpoints is not None:
            self._checkpoints.close()  # before the result, whose receiver may remove the folder
        yield PackResult(rows, curves, pack, speed)

    def _log_begin(self) -> None:
        trials, trial_id = self.pack.trials, self.records.trial_ids()[0]
        name = f"a pack of {len(trials)}" if len(trials) > 1 else "a trial"
        done, kind = self.pack.steps_done, self.device.torch_device.type
        at = f"goes on from step {done} of {self.total}" if done else f"starts its {self.total} steps"
        size = write_scale("params", self.pack.declaration.total)
        _log.info("%s of %s parameters, %s, %s on %s", name, size, trial_id, at, self.device.name)
        if trials[0].train.precision == "bf16" and kind not in BY_XLA:
            has_units, why = bfloat16_units(kind)
            if not has_units:
                _log.warning("precision bf16 is slow: %s", why)

    def _reads_losses_after(self, done: int) -> bool:
        options = self.options
        # If reading a loss stalls the device, losses are read at evaluations, or seldom where there are none.
        seldom = 0 if options.eval_every else 10 * options.log_every
        log_every = options.log_every if self.device.reads_cheaply else seldom
        periods = (log_every, options.eval_every, options.checkpoint_every)
        return done in (self._open_until, self.total) or any(_is_due(every, done) for every in periods)

    def _chunks(self, meter: Meter) -> list[range]:
        """Divide the steps that are left into chunks dispatched together; losses are read between them."""
        data = self.dataset.config
        longest = self.pack.longest_chunk(data.batch_size * (data.sequence_length + 1) * _TOKEN_BYTES)
        step_s = len(self.pack.trials) * meter.seconds_a_step(_LIKELY_MFU)  # nan if unknown
        if step_s * longest > _LONGEST_CHUNK_S:
            longest = max(1, int(_LONGEST_CHUNK_S / step_s))
        chunks, begun = [], self.pack.steps_done
        for done in range(begun + 1, self.total + 1):
            if done - begun == longest or self._reads_losses_after(done):
                chunks.append(range(begun, done))
                begun = done
        return chunks if any(self.pack.live) else []

    def _batches(self, chunks: Sequence[range]) -> contextlib.AbstractContextManager[Iterator[torch.Tensor]]:
        room = max(map(len, chunks), default=1)

        def make(i: int) -> torch.Tensor:
            if i == 0:  # read here, since an evaluation that waits for batches would not heed SIGTERM
                self.dataset.validation_batches(self.pack.trials[0].train.eval_batches)
            tokens_SBT1 = torch.from_numpy(np.stack([*map(self.dataset.train_batch, chunks[i])]))
            return self.device.place_stack(tokens_SBT1, "data", room)  # one program serves all chunks

        return prefetch(make, 0, len(chunks), gives_up=lambda: self._preempted)

    def _read_losses(self, unread: list[tuple[torch.Tensor, int]]) -> tuple[int, int]:
        # Read one by one: on XLA, joining them would be another program.
        losses = [self.pack.read(losses_SR)[:count] for losses_SR, count in unread]
        unread.clear()
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

    @property
    def first_report_waits_for(self) -> str:
        return "compiling, then first steps" if self.pack.compiles else "first steps"

    def preempt(self) -> None:
        """End as "preempted", with a checkpoint, after this chunk, or at once if it waits for data."""
        self._preempted = True

    def preemptible(self) -> contextlib.AbstractContextManager[None]:
        # Google Cloud sends SIGTERM before it takes a machine away.
        return handling({signal.SIGTERM: lambda number, frame: self.preempt()})

    def stop(self, trial_ids: Collection[str]) -> None:
        """Train these members no further; their rows have status "stopped" and the last known loss."""
        done, records = self.pack.steps_done, self.records
        ended = [
            k for k, name in enumerate(records.trial_ids()) if name in trial_ids and records.members[k].runs
        ]
        for k in ended:
            records.members[k].end("stopped", done, f"stopped by the search at step {done}")
        self.pack.end(*ended)

    def so_far(self, status: str = "stopped") -> PackResult:
        """Return the result if the members still running were stopped (or preempted) now."""
        records = self.records.ended(status, self.pack.steps_done)
        final = (math.nan,) * len(records.members)
        rows, curves = records.results(final, self.options.log_every, self.wall_time, self.device.name)
        return PackResult(rows, curves, None, None)

    def save(self) -> None:
        """Write a checkpoint and wait for it, if the pack keeps checkpoints.

        At its end a pack is checkpointed only if a longer run can go on from there.
        """
        self._save()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _save(self) -> None:
        done = self.pack.steps_done
        is_open = done == self._open_until
        at_end = done == self.total and not is_open
        if self._checkpoints is None or not done or at_end or not any(self.pack.live):
            return
        pack_meta = {"members": self.pack.members, "wall_time": self.wall_time, "is_open": is_open}
        meta = self.records.state() | pack_meta
        # Read on every host, even if another one writes: reading a sharded tensor is a program of all hosts.
        tensors = self.pack.tensors() | {"losses_SK": self.records.losses_SK}
        if self._writes:
            self._checkpoints.save(done, tensors, meta)  # written while training goes on

    def _resume(self, checkpoints: str | PathLike[str]) -> None:
        latest = load_latest(checkpoints)
        if latest is None or latest.meta.get("trial_ids") != self.records.trial_ids():
            return
        try:
            losses_SK = latest.tensors.pop("losses_SK")
            self.pack.load_tensors(latest.tensors, latest.meta["members"], latest.step)
            self.records.load(latest.meta, losses_SK)
            self.wall_time = float(latest.meta["wall_time"])
            self.pack.end(*(k for k, member in enumerate(self.records.members) if not member.runs))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise StoreError(
                f"checkpoint of step {latest.step} in {checkpoints} is not one that this version wrote "
                f"({first_line(error)}); remove that folder to train from the start"
            ) from None


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def follow(
    environment: dict[str, str], trials: Sequence[Trial], options: RunOptions, checkpoints: str | None
) -> None:
    with follower(environment):
        dataset = data.load(trials[0].data, progress=False)
        PackRun(trials, dataset, options, checkpoints, writes=False).finish()
