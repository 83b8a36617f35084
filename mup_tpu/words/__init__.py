"""Every sentence, table and note about results. `analysis` returns data, and this room writes it.

Terminal, reports, notebooks and JSON take their texts from here, so no code reads a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mup_tpu.analysis.loss_law import LossLaws
    from mup_tpu.analysis.planned import Recipe
    from mup_tpu.analysis.prediction import Predictions
    from mup_tpu.analysis.transfer import TransferAnalysis

__all__ = ["summary"]


def summary(result: TransferAnalysis | Predictions | Recipe | LossLaws) -> str:
    """Return what an analysis, predictions, a recipe or laws of the loss say, as lines of text.

    Examples:
        >>> from mup_tpu.analysis import predict
        >>> print(summary(predict("results/lr_transfer", "width=1024")).split(";")[0])
        μP: learning rate 2^-5.15 = 0.0282 at width 1024 (1 octave beyond width 512)
    """
    from mup_tpu.analysis.loss_law import LossLaws
    from mup_tpu.analysis.planned import Recipe
    from mup_tpu.analysis.prediction import Predictions
    from mup_tpu.words import plans, predictions, verdicts

    if isinstance(result, Recipe):
        return "\n".join(plans.recipe_lines(result))
    if isinstance(result, LossLaws):
        return "\n".join(predictions.loss_law_lines(result))
    return predictions.summary(result) if isinstance(result, Predictions) else verdicts.summary(result)
