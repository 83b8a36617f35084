"""One self-contained HTML file about results: verdicts, figures, tables, and how runs were made."""

from mup_tpu.report.coord_check import coordinate_check_page
from mup_tpu.report.page import Page, render
from mup_tpu.report.search import search_page
from mup_tpu.report.sweeps import ablations_page, sweep_page

__all__ = ["Page", "ablations_page", "coordinate_check_page", "render", "search_page", "sweep_page"]
