"""Modules under the names that they had in 0.1, so that code written for it goes on."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

MOVED = {
    "attention": "models.attention",
    "columns": "config.columns",
    "config_io": "config.toml",
    "config_search": "config.search",
    "doctor": "cli.doctor",
    "leftovers": "files.leftovers",
    "optimizer_rules": "rules.optimizer",
    "parametrization": "rules.parametrization",
    "parts": "store.parts",
    "analysis.search": "analysis.ranking",
    "analysis.table_columns": "analysis.ingest.table_columns",
    "analysis.table_files": "analysis.ingest.table_files",
    "analysis.table_shapes": "analysis.ingest.table_shapes",
    "analysis.table_values": "analysis.ingest.table_values",
    "analysis.trackers": "analysis.ingest.trackers",
    "plots.interactive.transfer": "plots.interactive.optima",
    "plots.transfer": "plots.optima",
    "tuning.cluster": "jobs.cluster",
    "tuning.plan": "jobs.plan",
    "tuning.transfer": "tuning.zero_shot",
}
"""Old name -> new name, below `mup_tpu`."""


class _Finder(MetaPathFinder, Loader):
    """Imports a module by its old name as the module of its new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The old name's, where it has moved."""
        old = fullname.removeprefix("mup_tpu.")
        return ModuleSpec(fullname, self) if fullname != old and old in MOVED else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Put the module of the new name in place of an empty one of the old."""
        old = module.__name__
        new = f"mup_tpu.{MOVED[old.removeprefix('mup_tpu.')]}"
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Have old names found, after all others."""
    sys.meta_path.append(_Finder())
