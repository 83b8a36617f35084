"""Where a pack runs: how it is placed, how its members go through a step, and how to wait for it.

One file a device; each is the only place that imports what that device needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mup_tpu.devices.base import Device, Execution, get_device

__all__ = ["Device", "Execution", "get_device"]


def __getattr__(name: str) -> Any:
    """Import the protocol, and torch with it, when first asked for: `tpus` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mup_tpu.devices import base

    return getattr(base, name)
