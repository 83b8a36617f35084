import sys

import psutil
import pytest
import torch

from mup_tpu.devices import get_device


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries give back as they see fit")
def test_memory_that_was_kept_for_the_next_step_is_handed_back_before_free_memory_is_read():
    device, process = get_device("cpu"), psutil.Process()
    device.free_memory_bytes()
    tensors = [torch.ones(16 * 2**20 // 4) for _ in range(12)]
    held = process.memory_info().rss
    del tensors
    kept = process.memory_info().rss
    assert held - kept < 16 * 2**20
    device.free_memory_bytes()
    # CI's process once kept 48 of them. Why is not known; a heap of an arena beside the main one has 64.
    assert kept - process.memory_info().rss > (12 * 16 - 64) * 2**20
