"""Stored sweeps as one table: the verdict of each rule along each way of growing, and its cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mup_tpu.analysis.drift import exponent
from mup_tpu.analysis.load import load_table
from mup_tpu.analysis.regret import Regret
from mup_tpu.analysis.run_table import RunTable
from mup_tpu.analysis.scores import score
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult, analyze
from mup_tpu.analysis.worth import HEADINGS, Worth
from mup_tpu.config import columns
from mup_tpu.errors import MupTpuError, TableError
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.store import is_search
from mup_tpu.store.predictions import FILE, load_predictions

_RULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "parametrization": {name: rule.source for name, rule in PARAMETRIZATIONS.items()},
        "batch_rule": {name: rule.source for name, rule in BATCH_RULES.items()},
        "token_rule": {name: rule.source for name, rule in TOKEN_RULES.items()},
        "decay_rule": {name: rule.source for name, rule in DECAY_RULES.items()},
    }
)
"""Source of each rule, by the column that names it."""
_FIRST = "parametrization"
"""Compared column whose rows come first."""
_BEFORE = {"architecture": "gpt2", "optimizer": "adamw"}
"""Values of columns that the rows of the first releases lack."""

_INTRODUCTION = """\
Which hyperparameters stay as a model or its training grows, under which rule? A row is one rule of one sweep
(`mup-tpu analyze {name} --report --out {name}/README.md`); the sweep's page has sizes, lengths and data,
`docs/rules.md` the rules.

- **α**: exponent of the best value over the scale (95 %), 0 where it stays.
- **Regret**: cost of the smallest scale's best value at the largest, nat; intervals are on the sweep's page.
- **Hours**: training time on one device; on CPUs, of one thread.

{usual}."""

_WORTH = """\
## Is a transfer worth it?
[Numbers](../docs/statistics.md#is-a-transfer-worth-it) as the scale n grows: cost of the transfer over the
gain by growing, and loss gap ∝ n^-a. Only rules that tell a to half a unit, or whether the transfer is
useful. {useful}."""

_SHOWN = (0, 1)
"""Numbers of a transfer's worth in the table; the others rarely tell anything."""


@dataclass(frozen=True)
class Ruling:
    """The verdict of one stored sweep on one rule."""

    sweep: str
    """Folder of the sweep."""
    scale: str
    """Label of the scale: "width"."""
    growing: str
    """The scale, from its smallest point to its largest: "width 64 to 256"."""
    tuned: str
    rule: str
    source: str
    """Paper of the rule; "" if no rules are compared."""
    architecture: str
    update_rule: str
    alpha: float
    low: float
    high: float
    """Drift exponent, with a 95 % interval."""
    regret: Regret | None
    """Regret of the smallest scale's optimum at the largest; None if one of these optima is unknown."""
    decision: str
    looks: int
    """Looks of its sequence; 0 for a table with one look."""
    runs: int
    hours: float
    """Training time of its runs on one device (on CPUs, one thread); nan if unknown."""
    compares: str = _FIRST
    """Column of the rule."""
    worth: Worth = Worth()

    @property
    def span(self) -> str:
        """The smallest and the largest point of the scale."""
        return self.growing.removeprefix(f"{self.scale} ")

    @property
    def why_drifts(self) -> str:
        """Reason why it DRIFTS although α's interval holds 0; "" for all others."""
        if self.decision != "DRIFTS" or self.low > 0 or self.high < 0 or self.regret is None:
            return ""
        return f"no power law, but regret {self.regret.low:.3f} to {self.regret.high:.3f} nat"


Judged = dict[Path, tuple[RunTable, TransferAnalysis]]
"""Tables of sweeps and their analyses, by their folders."""


def rulings(folder: str | Path, judged: Judged | None = None) -> tuple[list[Ruling], dict[str, str]]:
    """Rulings of the sweeps below a folder, and the reason why each other folder is left out.

    Sweeps are added to `judged`, from which `held` takes them.

    Raises:
        TableError: there is no sweep.
    """
    found: list[Ruling] = []
    left_out: dict[str, str] = {}
    for header in sorted(Path(folder).glob("*/store.json")):
        path = header.parent
        if is_search(path):
            left_out[path.name] = "a search"
            continue
        try:
            table = load_table(path)
            scale, tuned = table.columns.scale, table.columns.hyperparameter
            if table.runs["scale"].nunique() < 2:
                left_out[path.name] = f"of one {columns.label(scale)}"
                continue
            if table.runs.groupby("scale")["x"].nunique().max() < 2:
                left_out[path.name] = f"of one {columns.label(tuned)} at each {columns.label(scale)}"
                continue
            analysis = analyze(table)
            if judged is not None:
                judged[path] = table, analysis
        except MupTpuError as error:
            left_out[path.name] = str(error).partition(";")[0]
            continue
        found += [_ruling(path.name, table, result) for result in analysis.results]
    if not found:
        raise TableError(f"{folder} has no folder with a sweep of several scales in it")
    return sorted(found, key=lambda r: (r.scale, r.compares != _FIRST, r.compares, r.rule, r.sweep)), left_out


def held(folder: str | Path, judged: Judged | None = None) -> dict[str, list[bool]]:
    """Whether the interval of each kept prediction holds the optimum that came out.

    Args:
        folder: folder of results folders, at any depth; the answers are listed by its direct subfolders.
        judged: sweeps that are analysed already.
    """
    found: dict[str, list[bool]] = {}
    for file in sorted(Path(folder).glob(f"*/**/{FILE}")):
        try:
            table, analysis = (judged or {}).get(file.parent) or (load_table(file.parent), None)
            run = set(table.runs["scale"])
            kept = [p for p in load_predictions(file.parent) if p.scale in run and p.scale not in p.scales]
            inside = [s.is_inside for s in score(kept, analysis or analyze(table))] if kept else []
        except MupTpuError:
            continue
        if known := [one for one in inside if one is not None]:
            found.setdefault(file.relative_to(folder).parts[0], []).extend(known)
    return found


def _ruling(sweep: str, table: RunTable, result: TransferResult) -> Ruling:
    scale, compared = table.columns.scale, table.columns.parametrization
    assert table.stored is not None, "read from a results folder"
    of_rule = stored = table.stored
    if compared in stored and stored[compared].astype(str).eq(result.compared).any():
        of_rule = stored[stored[compared].astype(str) == result.compared]

    def made_with(column: str) -> str:
        if column not in of_rule:  # a study of somebody's own training
            return "own"
        held = of_rule[column].fillna(_BEFORE[column])
        return ", ".join(sorted(map(str, held.unique())))

    first, last = (columns.write_scale(scale, o.scale) for o in (result.optima[0], result.optima[-1]))
    return Ruling(
        sweep=sweep,
        scale=columns.label(scale),
        growing=f"{columns.label(scale)} {first} to {last}",
        tuned=columns.label(table.columns.hyperparameter),
        rule=result.compared,
        source=_RULES.get(compared, {}).get(result.compared, ""),
        architecture=made_with("architecture"),
        update_rule=made_with("optimizer"),
        alpha=result.drift.alpha,
        low=result.drift.low,
        high=result.drift.high,
        regret=result.headline_regret,
        decision=result.verdict.decision,
        compares=compared,
        worth=result.worth,
        looks=result.sequence.looks[-1].number if result.sequence else 0,
        runs=len(of_rule),
        hours=float(of_rule["wall_time_s"].sum() / 3600) if "wall_time_s" in of_rule else math.nan,
    )


def page(
    name: str,
    found: list[Ruling],
    left_out: Mapping[str, str],
    figure: str = "",
    predictions: Mapping[str, list[bool]] = MappingProxyType({}),
) -> str:
    """The rulings as a page of Markdown.

    Args:
        name: name of the folder.
        found: rulings, from `rulings`.
        left_out: reasons why folders are left out, from `rulings`.
        figure: file of `mup_tpu.plots.referee_figure`, relative to the page; "" for none.
        predictions: whether intervals held, from `held`.
    """
    usual = Counter(map(_setting, found)).most_common(1)[0][0]
    models, update_rules, tuned = usual
    said = f"Unless a row says otherwise, {models} is trained by {update_rules}, and the {tuned} is tuned"
    lines = [f"# {name}", _INTRODUCTION.format(name=name, usual=said)]
    if figure:
        lines += ["", f"![Drift exponent of each rule with its interval, by the way of growing]({figure})"]
    heads = ("rule", "from, to", "α", "regret", "verdict", "hours", "sweep")
    scale = ""
    for r in found:
        if r.scale != scale:
            scale = r.scale
            lines += ["", f"## {scale[:1].upper()}{scale[1:]}", "| " + " | ".join(heads) + " |"]
            lines += ["|" + "---|" * len(heads)]
        cost = "not known" if r.regret is None else r.regret.status
        if r.regret is not None and math.isfinite(r.regret.value):
            cost = f"{r.regret.value:.3f}"
        unusual = [own for own, others in zip(_setting(r), usual, strict=True) if own != others]
        cells = (
            ", ".join([f"`{r.rule}`", *unusual]),
            r.span.replace(" to ", "–"),
            exponent(r.alpha, r.low, r.high).replace("-", "−"),
            cost,
            r.decision + " (no power law)" * bool(r.why_drifts),
            f"{r.hours:.2f}",
            f"[{r.sweep}]({r.sweep}/README.md)",
        )
        lines.append("| " + " | ".join(cells) + " |")
    if told := [r for r in found if r.worth.tells]:
        lines += ["", *_worths(told)]
    if predictions:
        inside = [one for of_folder in predictions.values() for one in of_folder]
        folders = ", ".join(f"[{name}]({name}/README.md)" for name in predictions)
        lines += [
            "",
            f"Predictions inside their 95 % interval: {sum(inside)} of {len(inside)} ({folders}).",
        ]
    if left_out:
        others = [
            ", ".join(f"[{name}]({name}/README.md)" for name in left_out if left_out[name] == why)
            + f" ({why})"
            for why in dict.fromkeys(left_out.values())
        ]
        lines += ["", f"Not in the tables: {'; '.join(others)}."]
    return "\n".join(lines) + "\n"


def _worths(told: list[Ruling]) -> list[str]:
    """Table of the transfers' worth as a scale grows without end."""
    heads = ("rule", "growing", *(HEADINGS[i] for i in _SHOWN), "sweep")
    rows = (
        (
            f"`{r.rule}`",
            r.growing.replace(" to ", "–"),
            *(r.worth.cells[i] for i in _SHOWN),
            f"[{r.sweep}]({r.sweep}/README.md)",
        )
        for r in told
    )
    sure = [f"`{r.rule}` along {r.growing} ({r.worth.useful})" for r in told if r.worth.useful != "not told"]
    top = _WORTH.format(useful=f"Usefulness is told of {', '.join(sure) or 'none'}")
    return [top, "", *("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))]


def _setting(ruling: Ruling) -> tuple[str, str, str]:
    return ruling.architecture, ruling.update_rule, ruling.tuned
