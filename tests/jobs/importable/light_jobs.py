"""Jobs without torch, for tests of pools: they count, and end in every way that a job can end."""

import contextlib
import os
import signal
import time
from pathlib import Path

from mup_tpu.errors import DataError, PackTooLarge
from mup_tpu.jobs.driver import Job, Request


class Count(Job):
    """Reports numbers up to `steps`; keeps the last one in a file of its folder, from which it goes on.

    Args:
        folder: shared by all jobs of a test.
        name: of its file; files `NAME.pids` hold the processes that ran it.
        steps: numbers to report.
        then: what happens at the half, once: "die", "hang"; always: "raise", "refuse", "too large",
            "die always"; "wait" counts on until the file `go` is there; "follower dies": the second host of a
            slice, once.
    """

    def __init__(self, folder: Path, name: str, steps: int = 4, then: str = "") -> None:
        self.folder, self.name, self.steps, self.then = Path(folder), name, steps, then

    def __str__(self) -> str:
        return f"job {self.name}"

    def was_preempted(self, result):
        return result == "preempted"

    def split(self, fits):
        return [Count(self.folder, f"{self.name}{i}") for i in range(2)]

    def run(self, here):
        if not here.writes:  # it follows the first host of a slice
            yield from range(self.steps)
            fell = self.folder / f"{self.name}.fell"
            if self.then == "follower dies" and not fell.exists():
                while not self.pids():  # until the first host has begun
                    time.sleep(0.05)
                fell.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return None
        with (self.folder / f"{self.name}.pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        state = self.folder / self.name
        first = int(state.read_text()) if state.exists() else 0
        for step in range(first, self.steps):
            yield step
            unfinished = state.with_name(f"{self.name}.new")  # a process that is killed leaves no half file
            unfinished.write_text(str(step + 1))
            unfinished.replace(state)
            is_due = step + 1 >= self.steps // 2
            if is_due and (first == 0 or "always" in self.then):
                self.fall(self.then)
        while self.then == "wait" and not (self.folder / "go").exists():
            yield self.steps
            time.sleep(0.05)
        for _ in range(1200 if self.then == "follower dies" and len(self.pids()) == 1 else 0):
            yield self.steps  # until the slice is ended, a minute at most
            time.sleep(0.05)
        return f"{self.name} from {first}"

    def fall(self, how: str) -> None:
        match how:
            case "die" | "die always":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("no such luck")
            case "refuse":
                raise DataError("corpus 'x' is not there")
            case "too large":
                raise PackTooLarge("2 trials need too much", 1)

    def pids(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / f"{self.name}.pids").read_text().split()]
        return []


class Sees(Count):
    """Counts, and ends with the GPU that its process may see."""

    def run(self, here):
        yield from super().run(here)
        return os.environ.get("CUDA_VISIBLE_DEVICES")


class Asks(Count):
    """Counts, asks twice, and ends with both answers; it dies before the second, once."""

    def run(self, here):
        yield from super().run(here)
        first = yield Request(1)
        yield "between"
        fell = self.folder / f"{self.name}.fell"
        if self.then == "dies later" and not fell.exists():
            fell.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return first, (yield Request(2))


class Placed(Count):
    """Counts, and notes where each host of its slice is: node, slice, number, names of all its hosts."""

    def run(self, here):
        import ray

        told = [os.environ[name] for name in ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")]
        with (self.folder / f"{self.name}.places").open("a") as file:
            file.write(" ".join([ray.get_runtime_context().get_node_id(), *told]) + "\n")
        return (yield from super().run(here))

    def places(self) -> list[list[str]]:
        return [line.split() for line in (self.folder / f"{self.name}.places").read_text().splitlines()]


class Hungry(Job):
    """Uses memory for each of its members, whatever an estimate would say; its result is their names."""

    def __init__(self, names: str, megabytes: int) -> None:
        self.names, self.megabytes, self.members = names, megabytes, len(names)

    def split(self, fits):
        return [Hungry(self.names[i : i + fits], self.megabytes) for i in range(0, len(self.names), fits)]

    def run(self, here):
        held = []
        for name in self.names:
            held.append(b"1" * (self.megabytes * 2**20))
            yield name
        return self.names
