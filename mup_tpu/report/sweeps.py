"""Reports of sweeps and ladders, and of several sweeps beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from mup_tpu import plots
from mup_tpu.analysis import worth
from mup_tpu.analysis.optimum import EPSILON
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.scores import Score
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.analysis.verdict import DELTA
from mup_tpu.config.columns import label
from mup_tpu.config.table import Table
from mup_tpu.plots.names import results_of
from mup_tpu.report.page import Block, Box, Interactive, Page, Picture, Section, Text, Values, interactive
from mup_tpu.report.tables import optima_table, regret_table, sweeps_table
from mup_tpu.report.words import details, how_made, said

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
    results = [(plots.name(result.compared, analysis.compares), result) for result in results_of(analysis)]
    optima = [optima_table(result, analysis.scale, name) for name, result in results]
    regrets = [regret_table(result, analysis.scale, name) for name, result in results if result.regrets]
    read = partial(_read, analysis=analysis)
    sections = [Section("Figures", _figures(analysis, table)), Section("Optima", optima)]
    if regrets:
        said_first = Text(
            f"Loss at a larger {scale} with a smaller one's optimum, less the loss with its own."
        )
        sections.append(Section("Regret", [said_first, *regrets]))
        worths = [(name, *result.worth.cells) for name, result in results]
        heads = (label(analysis.compares), *worth.HEADINGS)
        sections.append(Section("Is a transfer worth it?", [Text(_WORTH), Table(heads, worths)]))
    if scores:
        sections.append(Section("Predictions", [Text(f"{said(one.sentence())}.") for one in scores]))
    if table.stored is not None:
        sections.append(Section("How the runs were made", [Values(how_made(table.stored))]))
    return Page(
        f"{analysis.name}: does {tuned} transfer across {scale}?",
        [
            *(_verdict(result, analysis, table.command) for result in results_of(analysis)),
            *(Text(f"Note: {read(note)}.", is_note=True) for note in analysis.notes),
        ],
        sections,
        _RULE.format(epsilon=analysis.epsilon, delta=analysis.delta),
    )


def _verdict(result: TransferResult, analysis: TransferAnalysis, command: str | None) -> Box:
    """A verdict with advice, and the command or sentence that would settle it."""
    read = partial(_read, analysis=analysis)
    settle = result.verdict.settle
    commands = (settle,) if command and settle.startswith(command) else ()
    lines = [line if commands and settle in line else read(line) for line in details(result, analysis)]
    return Box(read(result.verdict.sentence), lines, commands, result.verdict.decision)


def _read(text: str, analysis: TransferAnalysis) -> str:
    written = said(text, analysis.scale, analysis.hyperparameter, compares=analysis.compares)
    return written.replace(" && ", "; ")


def _figures(analysis: TransferAnalysis, table: RunTable) -> list[Block]:
    """Figures: interactive ones where there are, else static ones."""
    panels = {
        "transfer": interactive().transfer_panels,
        "learning_curves": interactive().learning_curve_panels,
    }
    blocks: list[Block] = []
    for name, draw in plots.drawings(analysis).items():
        if name in panels:
            blocks.append(Interactive(_TITLES[name], panels[name](analysis, table.runs)))
        else:
            blocks.append(Picture.of(_TITLES[name], partial(draw, analysis)))
    return blocks


def ablations_page(name: str, table: pd.DataFrame, notes: Sequence[str] = ()) -> Page:
    """Report of several sweeps beside each other; `table` is from `mup_tpu.analysis.ablations.compare`."""
    counts = table["verdict"].value_counts()
    summary = ", ".join(f"{counts[v]} {v}" for v in ("TRANSFERS", "DRIFTS", "INCONCLUSIVE") if v in counts)
    title = "Drift exponent and regret of each sweep, with 95 % intervals; values in the shade do not matter"
    return Page(
        f"{name}: what each change does to transfer",
        [Box(f"{len(table)} sweeps: {summary}", notes)],
        [
            Section("Figure", [Picture.of(title, partial(plots.ablations_figure, table))]),
            Section("Sweeps, the worst regret first", [sweeps_table(table)]),
        ],
        "Regret is from the smallest scale to the largest. " + _RULE.format(epsilon=EPSILON, delta=DELTA),
    )
