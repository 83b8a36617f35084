"""One self-contained HTML file about results: verdicts, figures, tables, and how runs were made."""

from mup_tpu.report.coord_check import coordinate_check_page
from mup_tpu.report.page import Page, render
from mup_tpu.report.search import search_page
from mup_tpu.report.sweeps import ablations_page, sweep_page
from mup_tpu.report.words import (
    details,
    how_made,
    number,
    optima_cells,
    power,
    recommendation,
    regret_cells,
)

__all__ = [
    "Page", "ablations_page", "coordinate_check_page", "details", "how_made", "optima_cells", "number",
    "power", "recommendation", "regret_cells", "render", "search_page", "sweep_page",
]  # fmt: skip
