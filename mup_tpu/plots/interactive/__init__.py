"""Figures of `mup_tpu.plots` for a browser, where points say their runs under the pointer.

They need Bokeh, which the extra `report` installs, so only reports import them.
"""

from mup_tpu.plots.interactive.coord_check import coordinate_check_panels
from mup_tpu.plots.interactive.losses import learning_curve_panels
from mup_tpu.plots.interactive.optima import transfer_panels
from mup_tpu.plots.interactive.panel import Panels
from mup_tpu.plots.interactive.search import search_panels

__all__ = ["Panels", "coordinate_check_panels", "learning_curve_panels", "search_panels", "transfer_panels"]
