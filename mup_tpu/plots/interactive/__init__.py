"""Figures for a browser, which answer to the pointer: takes results, returns panels, knows no paths.

They draw what the figures of their names in `mup_tpu.plots` draw, under the same rules. They need Bokeh,
which the extra `report` installs, so nothing but a report imports them.
"""

from mup_tpu.plots.interactive.coord_check import coordinate_check_panels
from mup_tpu.plots.interactive.losses import learning_curve_panels
from mup_tpu.plots.interactive.optima import transfer_panels
from mup_tpu.plots.interactive.panel import Panels
from mup_tpu.plots.interactive.search import search_panels

__all__ = [
    "Panels",
    "coordinate_check_panels",
    "learning_curve_panels",
    "search_panels",
    "transfer_panels",
]
