"""Batches and shards that threads make ahead of their use."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from itertools import islice
from typing import Generic, TypeVar

A = TypeVar("A")
T = TypeVar("T")

_POLL_S = 0.1
"""Seconds between two checks while a batch is waited for."""


class Threads(Generic[A, T]):
    """Threads that call a function; they end with this object.

    An executor will not do: at its exit Python would wait for a thread that still tries a lost server.
    """

    def __init__(self, make: Callable[[A], T], count: int, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[A, Future[T]] | None] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_serve, args=(self._asked, make), name=name, daemon=True).start()
        self._ends = [weakref.finalize(self, self._asked.put, None) for _ in range(count)]

    def ask(self, argument: A) -> Future[T]:
        """Result for an argument; calls begin in the order in which they are asked for."""
        future = Future[T]()
        self._asked.put((argument, future))
        return future

    def close(self) -> None:
        """End each thread after its last call."""
        for end in self._ends:
            end()


def _serve(asked: queue.SimpleQueue[tuple[A, Future[T]] | None], make: Callable[[A], T]) -> None:
    while (job := asked.get()) is not None:
        argument, future = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(make(argument))
        except Exception as error:
            future.set_exception(error)


@contextmanager
def prefetch(
    make_batch: Callable[[int], T],
    start: int,
    stop: int,
    depth: int = 2,
    gives_up: Callable[[], bool] = lambda: False,
) -> Iterator[Iterator[T]]:
    """Batches of steps start to stop - 1 in order, made by a thread up to `depth` ahead.

    Errors of the thread are raised where the batch is asked for. The end of the block ends the thread. Once
    `gives_up` returns true, the iterator ends without waiting for a batch; the thread, which may wait for a
    server, is left to itself.
    """
    thread, steps = Threads(make_batch, 1, "prefetch"), iter(range(start, stop))
    ahead = deque(map(thread.ask, islice(steps, depth + 1)))

    def batches() -> Iterator[T]:
        while ahead:
            while not wait([ahead[0]], _POLL_S).done:
                if gives_up():
                    return
            batch = ahead.popleft().result()
            ahead.extend(map(thread.ask, islice(steps, 1)))
            yield batch

    try:
        yield batches()
    finally:
        for future in ahead:
            future.cancel()
        thread.close()
        while not gives_up() and wait(ahead, _POLL_S).not_done:
            continue
