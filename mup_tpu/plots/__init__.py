"""Figures from analysis results: every function returns a Figure, and the same input gives the same bytes.

Scales are sequential colours (viridis), parametrizations are panels that share axes, μP first and SP second,
and hyperparameters lie on a log2 axis. Keys lie below the panels, or beside a single one. Colours are safe
for colour-blind readers, and nothing depends on colour alone. `FIGURES` has all figures with their titles.
"""

import re
from collections.abc import Callable
from functools import partial

from matplotlib.figure import Figure

from mup_tpu.analysis.prediction import Predictions
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.plots.laws import best_loss_figure, law_figure, loss_law_figure, prediction_figure
from mup_tpu.plots.optima import optimum_figure, transfer_figure
from mup_tpu.plots.runs import (
    coordinate_check_figure,
    coordinate_check_figures,
    learning_curves_figure,
    search_figure,
)
from mup_tpu.plots.style import FIGURES, STYLE, FigureType, save_figure, svg
from mup_tpu.plots.verdict import regret_figure, sequence_figure, sweeps_figure

__all__ = [
    "FIGURES", "OF_EACH", "STYLE", "FigureType", "best_loss_figure",
    "coordinate_check_figure", "coordinate_check_figures", "drawings", "law_figure",
    "learning_curves_figure", "loss_law_figure", "optimum_figure", "prediction_figure", "prediction_figures",
    "regret_figure", "save_figure", "search_figure", "sequence_figure", "svg", "sweeps_figure",
    "transfer_figure", "transfer_figures",
]  # fmt: skip


OF_EACH = ("transfer", "optimum", "regret")  # figures that each of several hyperparameters has


def drawings(analysis: TransferAnalysis) -> dict[str, Callable[..., Figure]]:
    """Return the functions of all figures that an analysis has data for, by name; they take the analysis.

    Of several hyperparameters each has its figures, as transfer_learning_rate.
    """
    if analysis.columns.tuned_beside:
        return {
            re.sub(r"\W", "_", f"{name}_{part.hyperparameter}"): partial(
                lambda draw, part, _: draw(part), draw, part
            )
            for part in analysis.parts
            for name, draw in drawings(part).items()
            if name in OF_EACH
        }
    return {name: kind.draw for name, kind in FIGURES.items() if kind.has_data and kind.has_data(analysis)}


def prediction_figures(predictions: Predictions) -> dict[str, Figure]:
    """Draw predictions: along one scale, or over the first two of several."""
    if predictions.analysis.columns.scales_beside:
        return {"law": law_figure(predictions)}
    return {"prediction": prediction_figure(predictions)}


def transfer_figures(analysis: TransferAnalysis) -> dict[str, Figure]:
    return {name: draw(analysis) for name, draw in drawings(analysis).items()}
