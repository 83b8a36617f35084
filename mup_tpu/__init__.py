"""mup_tpu: tune small, check that the optimum transfers, train large once.

The names below are the public face; each is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mup_tpu.analysis import analyze, load_table, predict
    from mup_tpu.config import Sweep, Trial, octaves
    from mup_tpu.study.study import Study
    from mup_tpu.tuning.plan import plan

__version__ = "0.1.0"

__all__ = [
    "Study", "Sweep", "Trial", "analyze", "load_table", "octaves", "plan", "predict",
]  # fmt: skip

_FROM = {
    "analysis": ("analyze", "load_table", "predict"),
    "config": ("Sweep", "Trial", "octaves"),
    "study.study": ("Study",),
    "tuning.plan": ("plan",),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    for module, names in _FROM.items():
        if name in names:
            return getattr(importlib.import_module(f"mup_tpu.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
