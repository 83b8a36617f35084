"""Pages about results, as one HTML file or as Markdown: verdicts, figures, tables, and how runs were made."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar
from urllib.parse import quote

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from mup_tpu import plots
from mup_tpu.analysis.diagnosis import by_setting, scale_of
from mup_tpu.analysis.load import named_loss
from mup_tpu.analysis.planned import Recipe
from mup_tpu.analysis.prediction import Score
from mup_tpu.analysis.referee import Comparison
from mup_tpu.analysis.run_table import of_status, ranked, varied
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config.columns import Table, label, write
from mup_tpu.config.values import counted, visible, write_time
from mup_tpu.words.names import measured, ordered, powers_in_html, results_of, rule_name
from mup_tpu.words.plans import recipe_lines, recipe_table
from mup_tpu.words.reasons import notes
from mup_tpu.words.tables import (
    ON_A_PAGE,
    common_setting,
    conclusions,
    how_made,
    left_out,
    optima_table,
    regret_table,
    ruling_tables,
    slopes_table,
    trials_table,
)
from mup_tpu.words.verdicts import details, remedy, score_sentence, tuned_words, verdict


@dataclass(frozen=True)
class Box:
    """A main message in a box."""

    kind: ClassVar[str] = "box"
    sentence: str
    details: Sequence[str] = ()
    commands: Sequence[str] = ()  # commands that end a detail; they are shown as code
    decision: str = ""  # verdict, which sets the colour of the box; "" for none


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str
    is_note: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure of `plots.FIGURES`; `file` is its name beside a page of Markdown."""

    kind: ClassVar[str] = "picture"
    title: str
    caption: str
    draw: Callable[[], Figure]
    file: str

    @classmethod
    def of(cls, name: str, draw: Callable[[], Figure], number: int = 0) -> Picture:
        """Make the block of a figure; `number` tells figures of one name apart."""
        kind = plots.FIGURES[name]
        return cls(kind.title, kind.caption, draw, name + f"-{number}" * bool(number))


Block = Box | Text | Table | Picture


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    lead: Sequence[Block]  # blocks at the top
    sections: Sequence[Section]
    foot: str  # how to read the page
    reload_s: float = 0.0  # time after which a browser loads the page again; 0 for never


def render(page: Page, template: str = "html") -> str:
    """Return a page as HTML with everything in it, or as Markdown ("md") with its pictures beside it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mup_tpu.report", "."),
        autoescape=template == "html",
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["anchor"] = lambda title: re.sub(r"\W+", "-", title.lower()).strip("-")
    environment.filters["powers"] = _in_html if template == "html" else _in_markdown
    environment.filters["svg"] = lambda picture: Markup(plots.svg(picture.draw(), picture.file))
    written = environment.get_template(f"page.{template}.j2")
    return visible(written.render(page=page, version=version("mup_tpu")))


class Link(str):
    """A cell with the name of a sweep, which leads to its page."""

    @property
    def address(self) -> str:
        return f"{quote(self)}/README.md"


def _in_html(text: str) -> Markup:
    written = Markup(powers_in_html(text))
    return Markup(f'<a href="{text.address}">{written}</a>') if isinstance(text, Link) else written


def _in_markdown(text: str) -> str:
    """Escape a text from somebody's rows, which may end a cell or begin a link or HTML."""
    one_line = html.escape(visible(" ".join(text.split())), quote=False)
    escaped = re.sub(r"[`|\[\]\\]", lambda mark: f"&#{ord(mark[0])};", one_line)
    return f"[{escaped}]({text.address})" if isinstance(text, Link) else escaped


_RULE = (
    "A verdict is TRANSFERS if the regret's upper bound is below {epsilon:g} {unit} and the interval of the "
    "optima's slope lies within ±{delta:g}; MOVES AT NO COST if the regret is as small and that interval "
    "lies beyond half of it; DRIFTS if it excludes 0 and the regret's lower bound exceeds {epsilon:g} "
    "{unit}, or twice that for any slope; OPEN otherwise, at each look of a sequence. "
    "Intervals are 95 %, from draws of the valleys and of the trend of their optima."
)


def sweep_page(analysis: TransferAnalysis, scores: Sequence[Score] = ()) -> Page:
    """Return the report of a sweep: verdicts, figures, optima, regrets, and scores of predictions."""
    table, scale, lead = analysis.table, label(analysis.scale), list[Block]()
    for result in results_of(analysis):
        settles = remedy(result, analysis)
        commands = (settles,) if table.command and settles.startswith(table.command) else ()
        sentence = verdict(result, analysis, scores)
        lead.append(Box(sentence, details(result, analysis), commands, result.verdict.decision))
    if (stored := table.stored) is not None:
        ended, seconds = counted(stored["status"].value_counts().items()), stored["wall_time_s"].sum()
        lead.append(Text(f"{len(stored)} runs ({ended}), {write_time(seconds)} of training."))
    lead += [Text(f"Note: {note}.", is_note=True) for note in notes(analysis)]
    sections, several = [], len(analysis.parts) > 1
    for number, part in enumerate(analysis.parts):
        pictures = []
        for figure, draw in plots.drawings(part).items():
            if figure in plots.OF_EACH or not several:
                runs = {"runs": part.table.runs} if figure in ("transfer", "learning_curves") else {}
                pictures.append(Picture.of(figure, partial(draw, part, **runs), number))
        results = [(rule_name(result.compared, part.compares), result) for result in results_of(part)]
        optima = [optima_table(result, part.columns, rule) for rule, result in results]
        regrets = [regret_table(result, part.columns, rule) for rule, result in results if result.regrets]
        of_part = f" of {label(part.hyperparameter)}, the others at their best" * several
        sections += [Section("Figures" + of_part, pictures), Section("Optima" + of_part, optima)]
        if regrets:
            text = (
                f"Loss at a larger {scale} with the optimum of a smaller one, less the loss at its optimum."
            )
            sections.append(Section("Regret" + of_part, [Text(text), *regrets]))
    if scores:
        texts = [Text(f"{score_sentence(one, analysis.columns)}.") for one in scores]
        sections.append(Section("Predictions", texts))
    if stored is not None:
        sections.append(Section("How the runs were made", [how_made(stored)]))
    does = "do" if several else "does"
    return Page(
        f"{analysis.name}: {does} {tuned_words(analysis.columns)} transfer across {scale}?",
        lead,
        sections,
        _RULE.format(epsilon=analysis.epsilon, delta=analysis.delta, unit=analysis.columns.unit),
    )


def recipe_page(title: str, made: Recipe, analysis: TransferAnalysis) -> Page:
    """Return the report of a plan: values at its target, what came of each size, and the losses."""
    boxes = list[tuple[str, list[str]]]()
    for line in recipe_lines(made):
        if line.startswith(" "):
            boxes[-1][1].append(line.strip())
        else:
            boxes.append((line[:1].upper() + line[1:], []))
    lead = [Box(text, below) if below else Text(f"{text}.") for text, below in boxes]
    table = recipe_table(made)
    of_plan: dict[str, Any] = {"runs": analysis.table.runs, "is_judged": False}
    pictures = [
        Picture.of("transfer", partial(plots.transfer_figure, part, **of_plan), number)
        for number, part in enumerate(analysis.parts)
    ]
    sections = [Section(table.title[:1].upper() + table.title[1:], [replace(table, title="")])]
    sections.append(Section("Figures", pictures))
    if (stored := analysis.table.stored) is not None:
        sections.append(Section("How the runs were made", [how_made(stored)]))
    foot = "“Known within ×2” says that the 95 % interval reaches from half of the value to twice of it."
    return Page(f"{title}: values for the target of a plan", lead, sections, foot)


def search_page(title: str, runs: pd.DataFrame) -> Page:
    """Return the report of a search: best trial, trials against each hyperparameter, how they were made."""
    trials, searched = ranked(runs), varied(runs)
    finished, counts = of_status(trials, "finished"), counted(trials["status"].value_counts().items())
    lead = Box("No trial has finished.", [counts])
    if len(finished):
        best = finished.iloc[0]
        values = ", ".join(f"{label(column)} {write(column, best[column])}" for column in searched)
        loss = measured(*named_loss(runs.get("versions", ())), best["loss"], ".4f")
        lead = Box(f"The best trial: {loss}", [values, f"trials: {counts}"])
    figures: list[Block] = [Text("All trials have the same searched values.")]
    if searched and np.isfinite(trials.loc[trials["status"] != "diverged", "loss"]).any():
        figures = [Picture.of("search", partial(plots.search_figure, trials, searched))]
    return Page(
        f"{title}: a search of {len(trials)} trials",
        [lead],
        [
            Section("Figure", figures),
            Section(f"The best of {len(finished)} finished trials", [trials_table(runs)]),
            Section("How the runs were made", [how_made(runs)]),
        ],
        "A trial stopped early has the loss of its last step; do not compare it with a finished one.",
    )


def sweeps_page(
    title: str, comparison: Comparison, predictions: Mapping[str, Sequence[bool]] | None = None
) -> Page:
    """Return the report of several sweeps; `predictions` says for each folder which intervals were right."""
    fitted = [r for r in comparison.rulings if not math.isnan(r.parabola)]
    parts = sum(r.parts_from_parabola for r in fitted)
    model, update_rule, tuned = common_setting(comparison)
    meanings = [
        ("α", "exponent of the best value over the scale (95 %), 0 where it stays"),
        ("by hand", "the same by a parabola through each scale's five lowest points, and a straight line"),
        ("≠", f"by hand, α lies outside its interval ({parts} of {len(fitted)})"),
        (
            "regret",
            "cost of the smallest scale's best value at the largest, nat; intervals are on the sweep's page",
        ),
        ("hours", "training time on one device; on CPUs, of one thread"),
    ]
    question = "Which hyperparameters stay as a model or its training grows, under which rule?"
    default = f"Unless a row says otherwise, {update_rule} trains {model}, and the {label(tuned)} is tuned."
    tables = ruling_tables(comparison, ON_A_PAGE)
    sections = []
    for one in tables:
        linked = replace(one, title="", rows=[(*cells, Link(sweep)) for *cells, sweep in one.rows])
        sections.append(Section(one.title[:1].upper() + one.title[1:], [linked]))
    foot = []
    if predictions:
        inside = [one for of_folder in predictions.values() for one in of_folder]
        counts = f"{sum(inside)} of {len(inside)} ({', '.join(predictions)})"
        foot.append(f"Predictions inside their 95 % interval: {counts}.")
    if comparison.left_out:
        foot.append(f"Not in the tables: {'; '.join(left_out(comparison))}.")
    picture = Picture.of("sweeps", partial(plots.sweeps_figure, comparison.rulings))
    lead: list[Block] = [Text(question), Table(("column", "meaning"), meanings), Text(default), picture]
    return Page(title, lead, sections, " ".join(foot))


def coordinate_check_page(title: str, table: pd.DataFrame) -> Page:
    """Return the report of a coordinate check: lines and slopes of all layers, by setting."""
    scale = scale_of(table)
    lead: list[Block] = []
    sections = []
    for number, (setting, part) in enumerate(by_setting(table).items()):
        by_rule = conclusions(table.attrs, setting)
        for rule in ordered(by_rule):
            passes, sentence, *others = by_rule[rule]
            decision = "passes" if passes else "fails"
            lead.append(Box(f"{rule_name(rule)}: {sentence}", [setting, *others], decision=decision))
        picture = Picture.of("coordinate_check", partial(plots.coordinate_check_figure, part), number)
        slopes = slopes_table(part, ordered(part["parametrization"].unique()))
        sections.append(Section(setting, [picture, slopes]))
    return Page(
        f"{title}: do activations and updates keep their size as {label(scale)} grows?",
        lead,
        sections,
        f"A slope is the exponent of a layer's size in {label(scale)}, fitted over all seeds after the last "
        "step; a positive one means that it grows without bound. Intervals are 95 %.",
    )
