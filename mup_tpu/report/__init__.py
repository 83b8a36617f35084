"""One self-contained HTML file about results: verdicts, figures, tables, and how runs were made."""

from mup_tpu.report.coord_check import coordinate_check_page
from mup_tpu.report.page import Page, render
from mup_tpu.report.search import search_page
from mup_tpu.report.sweeps import ablations_page, sweep_page
from mup_tpu.report.tables import optima_table, slopes_table, sweeps_table, trials_table
from mup_tpu.report.words import details, how_made, number, power, recommendation

__all__ = [
    "Page", "ablations_page", "coordinate_check_page", "details", "how_made", "number", "optima_table",
    "power", "recommendation", "render", "search_page", "slopes_table", "sweep_page", "sweeps_table",
    "trials_table",
]  # fmt: skip
