"""Import of accelerate 1.15, which the models of transformers need, without torch_xla.

accelerate imports torch_xla wherever that is installed, unless USE_TORCH_XLA is 0 at that moment. It takes
3 to 4 s, and torch_xla may take the machine's TPUs.
"""

from __future__ import annotations

import contextlib
import os
import sys


def import_accelerate() -> None:
    """Import accelerate, without torch_xla unless this process has it or USE_TORCH_XLA is set."""
    is_quiet = "torch_xla" not in sys.modules and "USE_TORCH_XLA" not in os.environ
    if is_quiet:
        os.environ["USE_TORCH_XLA"] = "0"
    try:
        with contextlib.suppress(ImportError):
            import accelerate  # noqa: F401
    finally:
        if is_quiet:
            del os.environ["USE_TORCH_XLA"]
