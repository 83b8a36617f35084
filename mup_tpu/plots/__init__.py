"""Figures from analysis results: every function returns a Figure, the same input gives the same bytes.

Functions with `ax` draw in axes of the caller's, one a panel, or without any in a new figure.

Scales are sequential colours (viridis), parametrizations are panels that share axes, μP first and SP second,
and hyperparameters lie on a log2 axis. Keys lie below the panels. Colours are safe for colour-blind readers,
and nothing depends on colour alone. `interactive` has the figures of reports.
"""

from collections.abc import Callable

from matplotlib.figure import Figure

from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.plots.coord_check import coordinate_check_figure, coordinate_check_figures
from mup_tpu.plots.law import law_figure
from mup_tpu.plots.losses import best_loss_figure, learning_curves_figure, scaling_law_figure
from mup_tpu.plots.names import label, name, ordered, point, raised
from mup_tpu.plots.optima import collapse_figure, optimum_figure, transfer_figure
from mup_tpu.plots.prediction import prediction_figure
from mup_tpu.plots.referee import referee_figure
from mup_tpu.plots.search import search_figure
from mup_tpu.plots.style import STYLE, beside, png, save_figure
from mup_tpu.plots.verdict import ablations_figure, known_looks, regret_figure, sequence_figure

__all__ = [
    "STYLE", "ablations_figure", "beside", "best_loss_figure", "collapse_figure", "coordinate_check_figure",
    "coordinate_check_figures", "drawings", "label", "law_figure", "learning_curves_figure", "name",
    "optimum_figure", "ordered", "png", "point", "prediction_figure", "raised", "referee_figure",
    "regret_figure", "save_figure", "scaling_law_figure", "search_figure", "sequence_figure",
    "transfer_figure", "transfer_figures",
]  # fmt: skip


def drawings(analysis: TransferAnalysis) -> dict[str, Callable[[TransferAnalysis], Figure]]:
    """Functions that draw the figures for which an analysis has data, by name."""
    several = len({o.scale for result in analysis.results for o in result.optima}) > 1
    tuned = any(len(curve.x_G) > 1 for result in analysis.results for curve in result.curves)
    there = {
        "transfer": (tuned, transfer_figure),
        "optimum": (tuned and several, optimum_figure),
        "regret": (tuned and several, regret_figure),
        "best_loss": (several, best_loss_figure),
        "collapse": (tuned and several, collapse_figure),
        "learning_curves": (any(r.learning_curves for r in analysis.results), learning_curves_figure),
        "sequence": (any(known_looks(r) for r in analysis.results), sequence_figure),
    }
    return {name: draw for name, (is_there, draw) in there.items() if is_there}


def transfer_figures(analysis: TransferAnalysis) -> dict[str, Figure]:
    """Figures for which an analysis has data, by name."""
    return {name: draw(analysis) for name, draw in drawings(analysis).items()}
