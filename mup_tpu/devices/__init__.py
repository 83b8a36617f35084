"""Devices: placement of a pack, execution of its members, and waiting for results.

One file per device; only that file imports the device's packages. TPUs are the room `mup_tpu.tpu`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mup_tpu.devices.base import Device, Execution, get_device

__all__ = ["Device", "Execution", "get_device"]


def __getattr__(name: str) -> Any:
    """Import the interface, and torch with it, at first use: `peak` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mup_tpu.devices import base

    return getattr(base, name)
