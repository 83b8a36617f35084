"""Reports of sweeps and ladders, and of several sweeps beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from mup_tpu import plots
from mup_tpu.analysis.optimum import EPSILON
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.scores import Score
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.analysis.verdict import DELTA
from mup_tpu.config.columns import label
from mup_tpu.report.page import Block, Box, Interactive, Page, Picture, Section, Text, Values, interactive
from mup_tpu.words.names import name, results_of
from mup_tpu.words.reasons import notes
from mup_tpu.words.tables import how_made, optima_table, regret_table, sweeps_table, worth_table
from mup_tpu.words.verdicts import details, remedy, score, verdict

_TITLES = {
    "transfer": "Loss against the hyperparameter, a line a scale; stars are optima, below their intervals",
    "optimum": "Optimum against scale, with the fitted drift; the shade is drift that does not matter",
    "regret": "Regret of every smaller scale's optimum at every larger scale",
    "best_loss": "Best loss against scale and size",
    "collapse": "Loss above the best, curves moved by the exponent that collapses them",
    "learning_curves": "Learning curves at the optima",
    "sequence": "Drift exponent and its interval against the cost until each look",
}
_RULE = (
    "A verdict is TRANSFERS if the regret's upper bound is below {epsilon:g} nat and the drift exponent's "
    "interval lies within ±{delta:g}; DRIFTS if that interval excludes 0 and the regret's lower one exceeds "
    "{epsilon:g} nat, or twice that for any α; INCONCLUSIVE otherwise. In a sequence of looks, each of which "
    "could end it, the regret has 99 % bounds. Intervals are 95 %: of optima and regrets from a parametric "
    "bootstrap, of α averaged over the scatter of the optima."
)

_WORTH = (
    "Cost of the smallest scale's optimum at the largest, as a share of the gain by growing. As the scale n "
    "grows without end, the loss gap falls as n^-a, the optimum's distance from its limit as n^-b. "
    "Transfer is useful if b > a/2 (Ghosh et al. 2026). An error of the same octaves costs n^κ more against "
    "the loss gap; R(∞) is the rule's irreducible loss over the lowest other one (Kalra & Barkeshli 2026). "
    "Intervals are 95 %."
)


def sweep_page(analysis: TransferAnalysis, table: RunTable, scores: Sequence[Score] = ()) -> Page:
    """Report of a sweep: verdicts, figures, optima, regrets, and scores of predictions.

    Raises:
        TableError: Bokeh is not installed.
    """
    scale, tuned = label(analysis.scale), label(analysis.hyperparameter)
    results = [(name(result.compared, analysis.compares), result) for result in results_of(analysis)]
    optima = [optima_table(result, analysis.scale, rule) for rule, result in results]
    regrets = [regret_table(result, analysis.scale, rule) for rule, result in results if result.regrets]
    sections = [Section("Figures", _figures(analysis, table)), Section("Optima", optima)]
    if regrets:
        meaning = f"Loss at a larger {scale} with the optimum of a smaller one, less the loss at its optimum."
        sections.append(Section("Regret", [Text(meaning), *regrets]))
        sections.append(Section("Is a transfer worth it?", [Text(_WORTH), worth_table(analysis, results)]))
    if scores:
        sections.append(
            Section("Predictions", [Text(f"{score(one, name(one.prediction.compared))}.") for one in scores])
        )
    if table.stored is not None:
        sections.append(Section("How the runs were made", [Values(how_made(table.stored))]))
    return Page(
        f"{analysis.name}: does {tuned} transfer across {scale}?",
        [
            *(_verdict(result, analysis, scores) for result in results_of(analysis)),
            *(Text(f"Note: {note}.", is_note=True) for note in notes(analysis)),
        ],
        sections,
        _RULE.format(epsilon=analysis.epsilon, delta=analysis.delta),
    )


def _verdict(result: TransferResult, analysis: TransferAnalysis, scores: Sequence[Score]) -> Box:
    """A verdict with advice, and the command or sentence that would settle it."""
    rule, settles = name(result.compared, analysis.compares), remedy(result, analysis)
    commands = (settles.text,) if settles.is_command else ()
    sentence = verdict(result, analysis, scores, rule)
    return Box(sentence, details(result, analysis), commands, result.verdict.decision)


def _figures(analysis: TransferAnalysis, table: RunTable) -> list[Block]:
    """Figures: interactive ones where there are, else static ones."""
    panels = {
        "transfer": interactive().transfer_panels,
        "learning_curves": interactive().learning_curve_panels,
    }
    blocks: list[Block] = []
    for figure, draw in plots.drawings(analysis).items():
        if figure in panels:
            blocks.append(Interactive(_TITLES[figure], panels[figure](analysis, table.runs)))
        else:
            blocks.append(Picture.of(_TITLES[figure], partial(draw, analysis)))
    return blocks


def ablations_page(title: str, table: pd.DataFrame, notes: Sequence[str] = ()) -> Page:
    """Report of several sweeps beside each other; `table` is from `mup_tpu.analysis.ablations.compare`."""
    counts = table["verdict"].value_counts()
    summary = ", ".join(f"{counts[v]} {v}" for v in ("TRANSFERS", "DRIFTS", "INCONCLUSIVE") if v in counts)
    caption = (
        "Drift exponent and regret of each sweep, with 95 % intervals; values in the shade do not matter"
    )
    return Page(
        f"{title}: what each change does to transfer",
        [Box(f"{len(table)} sweeps: {summary}", notes)],
        [
            Section("Figure", [Picture.of(caption, partial(plots.ablations_figure, table))]),
            Section("Sweeps, the worst regret first", [sweeps_table(table)]),
        ],
        "Regret is from the smallest scale to the largest. " + _RULE.format(epsilon=EPSILON, delta=DELTA),
    )
