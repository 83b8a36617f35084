"""Where a pack runs: how it is placed, how its members go through a step, and how to wait for it.

One file a device; each is the only place that imports what that device needs.
"""

from mup_tpu.devices.base import Device, Execution, get_device

__all__ = ["Device", "Execution", "get_device"]
