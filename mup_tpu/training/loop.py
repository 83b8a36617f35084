"""The one training loop: a pack from its first step to its rows, with reports on the way.

Shapes: K members, S steps, B sequences, T tokens, N evaluation batches.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mup_tpu.config import RunOptions, Trial
from mup_tpu.data import TokenDataset, prefetch
from mup_tpu.devices import Device, get_device
from mup_tpu.model import count_parameters
from mup_tpu.training import checkpoint
from mup_tpu.training.halving import RECENT, behind_best, rungs
from mup_tpu.training.memory import check_fits, half_fits
from mup_tpu.training.pack import Pack
from mup_tpu.training.report import PackResult, Report
from mup_tpu.training.rows import run_row, train_curve

Control = Callable[[Report], Collection[int]]
"""Looks at a report and names the members to stop."""


def train_pack(
    trials: Sequence[Trial],
    dataset: TokenDataset,
    options: RunOptions,
    checkpoints: Path | None = None,
    control: Control | None = None,
) -> Iterator[Report | PackResult]:
    """Train a pack to its end, yielding a Report at every log point and the PackResult last.

    Args:
        trials: the members, of one `Trial.pack_key()`.
        dataset: their batches.
        options: how to run.
        checkpoints: folder to checkpoint to and to go on from; None keeps none.
        control: may stop members early; they end with status "stopped".

    Returns:
        An iterator; a member that diverges ends with status "diverged" and loss +inf, and raises nothing.

    Raises:
        PackTooLarge: the pack does not fit in memory; a part of it may.
    """
    return PackRun(trials, dataset, options, checkpoints, control).steps()


class PackRun:
    """State of one pack in training, all of it in the checkpoint; `train_pack` is the way to run one."""

    def __init__(
        self,
        trials: Sequence[Trial],
        dataset: TokenDataset,
        options: RunOptions,
        checkpoints: Path | None,
        control: Control | None,
        writes: bool = True,
    ) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self.options, self.dataset, self.control, self.checkpoints = options, dataset, control, checkpoints
        self._writes = writes  # one process alone of those that train a pack together
        batch_size = trials[0].data.batch_size
        self.device: Device = get_device(options.device).arrange(len(trials), batch_size, options.mesh)
        way = self.device.way if options.way == "auto" else options.way
        check_fits(trials[0], dataset.vocab_size, len(trials), self.device, way)
        with half_fits(len(trials)):
            self.pack = Pack(trials, dataset.vocab_size, self.device, way, options.compile)
        self.total = trials[0].train.steps
        # Where reading a loss stalls the device, evaluations are when to do it (else now and then).
        seldom = 0 if options.eval_every else 10 * options.log_every
        self._read_every = options.log_every if self.device.reads_cheaply else seldom
        self.losses_SK = torch.full((self.total, len(trials)), math.nan, dtype=torch.float64)
        self.statuses = ["running"] * len(trials)
        self.ended_at = [0] * len(trials)
        self.reasons = [""] * len(trials)
        self._rungs = rungs(self.total) if options.halving else {}
        self.validation: list[dict[str, Any]] = []
        self.wall_time = self.waited = 0.0
        self._preempted = False
        if checkpoints is not None:
            self._resume()

    def steps(self) -> Iterator[Report | PackResult]:
        """Train, report, finish."""
        with half_fits(len(self.pack.trials)):
            yield from self._steps()

    def _steps(self) -> Iterator[Report | PackResult]:
        start = self.pack.steps_done
        began = last_report = time.perf_counter()
        before = self.wall_time
        pending: list[torch.Tensor] = []
        with prefetch(self._batch_on_device, start, self.total) as batches:
            while self.pack.steps_done < self.total and any(self.pack.live):
                asked = time.perf_counter()
                tokens_BT1 = next(batches)
                self.waited += time.perf_counter() - asked
                pending.append(self.pack.step(tokens_BT1))
                done = self.pack.steps_done
                evaluates = self._falls_on(self.options.eval_every, done) and done < self.total
                saves = self._falls_on(self.options.checkpoint_every, done) and done < self.total
                logs = self._falls_on(self._read_every, done)
                preempted = self._preempted and done < self.total
                halves = done in self._rungs and done < self.total
                if not (logs or evaluates or saves or halves or preempted or done == self.total):
                    continue
                # Read one by one: on XLA, stacking them would be another program.
                on_cpu = torch.stack([self.pack.read(losses_K) for losses_K in pending])
                self.losses_SK[done - len(pending) : done] = on_cpu
                live = len(pending) * sum(self.pack.live)
                pending = []
                self._end_diverged(done)
                if halves:
                    self._end_hopeless(done, self._rungs[done])
                validation = self._evaluate(done) if evaluates else None
                now = time.perf_counter()
                rate = live * self.dataset.tokens_per_step / max(now - last_report, 1e-9)
                last_report = now
                self.wall_time = before + now - began
                report = self._report(rate, validation)
                yield report
                if self.control:
                    self._end("stopped", {k: (done, "stopped by its control") for k in self.control(report)})
                if saves or preempted:
                    self.save()
                if preempted:
                    yield self.so_far("preempted")
                    return
        yield self._finish(before, began)

    def preempt(self) -> None:
        """Checkpoint after the step in progress, and end with status "preempted"; for a signal handler."""
        self._preempted = True

    @contextlib.contextmanager
    def preemptible(self) -> Iterator[None]:
        """SIGTERM preempts the run, as Google Cloud sends it half a minute before it takes a machine away."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread hears signals
            return
        before = signal.signal(signal.SIGTERM, lambda number, frame: self.preempt())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @staticmethod
    def _falls_on(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _end(self, status: str, ended: Mapping[int, tuple[int, str]]) -> None:
        """End members: for each the step after which, and the reason."""
        for k, (step, reason) in ended.items():
            self.statuses[k], self.ended_at[k], self.reasons[k] = status, step, reason
        self.pack.end(*ended)

    def _end_diverged(self, done: int) -> None:
        """End members whose loss is no number any more, at the first step where it was not."""
        bad_SK = ~self.losses_SK[:done].isfinite()
        lost = [k for k, status in enumerate(self.statuses) if status == "running" and bad_SK[:, k].any()]
        firsts = {k: int(bad_SK[:, k].nonzero()[0]) for k in lost}
        self._end("diverged", {k: (first, f"loss not finite at step {first}") for k, first in firsts.items()})

    def _end_hopeless(self, done: int, limit: float) -> None:
        """End members too far behind the best of those that differ in learning rate and seed alone."""
        recent_SK = self.losses_SK[max(0, done - max(1, int(RECENT * self.total))) : done].numpy()
        groups = [trial.replace(learning_rate=1.0, seed=0) for trial in self.pack.trials]
        gaps_K = behind_best(recent_SK, groups)
        hopeless = {
            k: (done, f"halving: {gap:.2f} nat behind the best at step {done}")
            for k, gap in enumerate(gaps_K)
            if self.statuses[k] == "running" and gap > limit
        }
        self._end("stopped", hopeless)

    def _batch_on_device(self, step: int) -> torch.Tensor:
        return self.device.place_batch(torch.from_numpy(self.dataset.train_batch(step)))

    def _evaluate(self, done: int) -> tuple[float, ...]:
        count = self.pack.trials[0].train.eval_batches
        batches = torch.from_numpy(self.dataset.validation_batches(count))
        held_out = [self.device.place_batch(tokens_BT1) for tokens_BT1 in batches]
        losses = tuple(self.pack.read(self.pack.evaluate(held_out)).double().tolist())
        for k, loss in enumerate(losses):
            if self.statuses[k] == "running":
                tokens = done * self.dataset.tokens_per_step
                self.validation.append(
                    {"member": k, "step": done, "tokens": tokens, "split": "validation", "loss": loss}
                )
        return losses

    def _report(self, rate: float, validation: tuple[float, ...] | None) -> Report:
        done = self.pack.steps_done
        losses = tuple(self.losses_SK[done - 1].tolist())
        return Report(done, self.total, losses, validation, tuple(self.statuses), rate)

    def _finish(self, before: float, began: float) -> PackResult:
        """Final evaluation, rows and curves."""
        done = self.pack.steps_done
        final = self._evaluate(done) if any(self.pack.live) else (math.nan,) * len(self.statuses)
        self.device.synchronize()
        training_time = max(self.wall_time, 1e-9)
        self.wall_time = before + time.perf_counter() - began
        for k in range(len(self.pack.trials)):
            if self.statuses[k] == "running":
                self.statuses[k] = "finished" if math.isfinite(final[k]) else "diverged"
                self.ended_at[k] = done
                self.reasons[k] = "" if math.isfinite(final[k]) else f"loss not finite at step {done}"
        rows, curves = self._rows(final, self.statuses, self.ended_at)
        return PackResult(rows, curves, self.pack, self.waited / training_time)

    def so_far(self, status: str = "stopped") -> PackResult:
        """What the rows would be if the members still running were stopped (or preempted) now."""
        running = [status == "running" for status in self.statuses]
        statuses = [status if r else s for r, s in zip(running, self.statuses, strict=True)]
        ended_at = [self.pack.steps_done if r else at for r, at in zip(running, self.ended_at, strict=True)]
        rows, curves = self._rows((math.nan,) * len(statuses), statuses, ended_at)
        return PackResult(rows, curves, None, 0.0)

    def _rows(
        self, final: Sequence[float], statuses: Sequence[str], ended_at: Sequence[int]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows and curves of all members, given their final held-out losses and how they ended."""
        rows, curves = [], []
        total, non_embedding = count_parameters(self.pack.shapes)
        for k, trial in enumerate(self.pack.trials):
            ended, status = ended_at[k], statuses[k]
            trained = self.losses_SK[:ended, k].tolist()
            trial_id = trial.trial_id(self.dataset.fingerprint)
            validation = [
                {name: v for name, v in p.items() if name != "member"}
                for p in self.validation
                if p["member"] == k
            ]
            points = train_curve(trained, self.options.log_every, self.dataset.tokens_per_step) + validation
            curves += [{"trial_id": trial_id, **point} for point in points]
            rows.append(
                run_row(
                    trial,
                    trial_id=trial_id,
                    params=total,
                    params_non_embedding=non_embedding,
                    steps_done=ended,
                    dataset=self.dataset.name,
                    data_fingerprint=self.dataset.fingerprint,
                    loss=_result(trial.train.loss_kind, status, final[k], trained, validation),
                    status=status,
                    reason=self.reasons[k],
                    wall_time_s=self.wall_time / len(statuses),
                    device=self.device.name,
                    pack_size=len(statuses),
                )
            )
        return rows, curves

    def _trial_ids(self) -> list[str]:
        return [trial.trial_id(self.dataset.fingerprint) for trial in self.pack.trials]

    def save(self) -> None:
        """Checkpoint the pack as it stands, if it is checkpointed at all and not at its end."""
        if self.checkpoints is None or not 0 < self.pack.steps_done < self.total or not any(self.pack.live):
            return
        meta = {
            "trial_ids": self._trial_ids(),
            "members": self.pack.members,
            "statuses": self.statuses,
            "ended_at": self.ended_at,
            "reasons": self.reasons,
            "validation": self.validation,
            "wall_time": self.wall_time,
            "waited": self.waited,
        }
        tensors = self.pack.tensors() | {"losses_SK": self.losses_SK}
        if self._writes:
            checkpoint.save(self.checkpoints, self.pack.steps_done, tensors, meta)

    def _resume(self) -> None:
        assert self.checkpoints is not None
        found = checkpoint.load_latest(self.checkpoints)
        if found is None or found.meta["trial_ids"] != self._trial_ids():
            return
        self.losses_SK.copy_(found.tensors.pop("losses_SK"))
        self.pack.load_tensors(found.tensors, found.meta["members"], found.step)
        for name in ("statuses", "ended_at", "reasons", "validation", "wall_time", "waited"):
            setattr(self, name, found.meta[name])
        self.pack.end(*(k for k, status in enumerate(self.statuses) if status != "running"))


def _result(
    loss_kind: str, status: str, final: float, trained: list[float], validation: list[dict[str, Any]]
) -> float:
    """A member's loss, nat per token; a stopped one's is its last known of the same kind."""
    if status == "diverged":
        return math.inf
    if loss_kind == "train_mean":
        return math.fsum(trained) / len(trained)
    if status in ("stopped", "preempted"):
        return validation[-1]["loss"] if validation else math.nan
    return final


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
