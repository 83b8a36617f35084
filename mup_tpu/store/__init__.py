"""The store: run tables and learning curves in a results folder."""

from mup_tpu.store.header import STUDY_COLUMNS, Condition, results_folder
from mup_tpu.store.runs import (
    FINAL,
    SEARCH_FILE,
    Store,
    done_of,
    holds_store,
    is_search,
    load_axes,
    load_curves,
    load_header,
    load_runs,
    load_values,
)  # fmt: skip

__all__ = [
    "FINAL", "SEARCH_FILE", "STUDY_COLUMNS", "Condition", "Store",
    "done_of", "holds_store", "is_search", "load_axes", "load_curves", "load_header", "load_runs",
    "load_values", "results_folder",
]  # fmt: skip
