"""Handlers are those of the block inside it, and those from before after it, however it ends."""

import signal
import threading

import pytest

from mup_tpu.training.signals import handling


def test_handlers_hold_for_the_block_alone():
    heard = []
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(KeyError), handling({signal.SIGUSR2: lambda number, frame: heard.append(number)}):
        signal.raise_signal(signal.SIGUSR2)
        raise KeyError
    assert heard == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR2) == before


def test_another_thread_leaves_handlers_alone():
    before, inside = signal.getsignal(signal.SIGUSR2), []

    def block():
        with handling({signal.SIGUSR2: signal.SIG_IGN}):
            inside.append(signal.getsignal(signal.SIGUSR2))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert inside == [before]
