"""Figures from analysis results: one style, every function returns a Figure, the same input gives the same
bytes.

Scales are sequential colours (viridis), parametrizations are panels that share axes, μP first and SP second,
and hyperparameters lie on a log2 axis. Keys lie below the panels, so that nothing is under them. Colours are
safe for colour-blind readers, and nothing depends on colour alone.
"""

from matplotlib.figure import Figure

from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.plots.coord_check import coordinate_check_figure, coordinate_check_figures
from mup_tpu.plots.losses import best_loss_figure, learning_curves_figure, scaling_law_figure
from mup_tpu.plots.referee import referee_figure
from mup_tpu.plots.search import search_figure
from mup_tpu.plots.style import STYLE, label, save_figure
from mup_tpu.plots.transfer import collapse_figure, optimum_figure, transfer_figure
from mup_tpu.plots.verdict import ablations_figure, known_looks, regret_figure, sequence_figure

__all__ = [
    "STYLE",
    "ablations_figure",
    "best_loss_figure",
    "collapse_figure",
    "coordinate_check_figure",
    "coordinate_check_figures",
    "label",
    "learning_curves_figure",
    "optimum_figure",
    "referee_figure",
    "regret_figure",
    "save_figure",
    "scaling_law_figure",
    "search_figure",
    "sequence_figure",
    "transfer_figure",
    "transfer_figures",
]


def transfer_figures(analysis: TransferAnalysis) -> dict[str, Figure]:
    """Every figure that an analysis has the data for, by name."""
    several = len({o.scale for result in analysis.results for o in result.optima}) > 1
    tuned = any(len(curve.x_G) > 1 for result in analysis.results for curve in result.curves)
    figures = {}
    if tuned:
        figures["transfer"] = transfer_figure(analysis)
    if tuned and several:
        figures["optimum"] = optimum_figure(analysis)
        figures["regret"] = regret_figure(analysis)
    if several:
        figures["best_loss"] = best_loss_figure(analysis)
    if tuned and several:
        figures["collapse"] = collapse_figure(analysis)
    if any(result.learning_curves for result in analysis.results):
        figures["learning_curves"] = learning_curves_figure(analysis)
    if any(known_looks(result) for result in analysis.results):
        figures["sequence"] = sequence_figure(analysis)
    return figures
