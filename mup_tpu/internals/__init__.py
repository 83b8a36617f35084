"""Private parts of Linux and of other packages that are used here, with versions and reasons.

Here: torch without the plug-ins of other devices, which it loads by itself (entry points `torch.backends`).
TorchTPU's loads libtpu, which looks for a TPU for minutes where none is and hears no SIGTERM meanwhile. The
device that needs a plug-in loads it. Torch's switch is a variable of the environment, which a user's program
would inherit: so it is set during torch's import alone.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class _Torch:
    """Finder of torch's module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or _SWITCH in os.environ:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            os.environ[_SWITCH] = "0"
            try:
                run(module)
            finally:
                os.environ.pop(_SWITCH, None)
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def leave_out_backends() -> None:
    """Have a later import of torch in this process load no plug-in."""
    if "torch" not in sys.modules and not any(isinstance(finder, _Torch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Torch())


def load_backend(name: str) -> None:
    """Load the plug-in of a package, as torch does by itself."""
    import importlib.metadata

    for entry in importlib.metadata.entry_points(group="torch.backends", name=name):
        entry.load()()
