"""Several sweeps beside each other: a table for each way of growing, with each rule's verdict and cost."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from urllib.parse import quote

from mup_tpu.analysis.referee import Comparison, Ruling
from mup_tpu.config.columns import Table, label, write_scale
from mup_tpu.config.values import visible
from mup_tpu.words.names import exponent, name, number
from mup_tpu.words.reasons import because
from mup_tpu.words.tables import interval

_INTRODUCTION = """\
Which hyperparameters stay as a model or its training grows, under which rule? A row is one rule of one sweep
(`mup-tpu analyze {name} --report --out {name}/README.md`); the sweep's page has sizes, lengths and data,
`docs/rules.md` the rules.

- **α**: exponent of the best value over the scale (95 %), 0 where it stays.
- **By hand**: the same by a parabola through each scale's five lowest points, and a straight line; ≠ where it
  lies outside α's interval ({parts} of {fitted}).
- **Regret**: cost of the smallest scale's best value at the largest, nat; intervals are on the sweep's page.
- **Hours**: training time on one device; on CPUs, of one thread.

{default}."""

_WORTH = """\
## Is a transfer worth it?
[Numbers](../docs/statistics.md#is-a-transfer-worth-it) as the scale n grows: cost of the transfer over the
gain by growing, and loss gap ∝ n^-a. Only rules whose a is known to half a unit, or whose
usefulness is known. {useful}."""


# Columns of the tables on a page of Markdown, where a link leads to the intervals of each sweep
_ON_A_PAGE = ("stored rule", "from, to", "α", "by hand", "regret", "verdict", "hours", "sweep")
_BY_ITSELF = (
    "sweep",
    "rule",
    "from, to",
    "α (95 %)",
    "by hand",
    "regret (nat, 95 %)",
    "best loss, largest",
    "verdict",
)
IN_A_TERMINAL = ("sweep", "rule", "from, to", "α (95 %)", "regret (nat, 95 %)", "verdict")


def page(
    name: str,
    comparison: Comparison,
    figure: str = "",
    predictions: Mapping[str, Sequence[bool]] | None = None,
) -> str:
    """Return several sweeps beside each other as a page of Markdown.

    Args:
        name: name of the folder.
        comparison: the sweeps.
        figure: file of `mup_tpu.plots.sweeps_figure`, relative to the page; "" for none.
        predictions: whether each prediction's interval holds what came out, by folder.
    """
    model, update_rule, tuned = _common_setting(comparison)
    default = f"Unless a row says otherwise, {update_rule} trains {model}, and the {label(tuned)} is tuned"
    fitted = [r for r in comparison.rulings if not math.isnan(r.parabola)]
    parts = sum(r.parts_from_parabola for r in fitted)
    introduction = _INTRODUCTION.format(name=name, default=default, parts=parts, fitted=len(fitted))
    lines = [f"# {name}", introduction]
    if figure:
        lines += ["", f"![Drift exponent and regret of each rule, by the way of growing]({figure})"]
    for table in ruling_tables(comparison, _ON_A_PAGE):
        links = [(_marked(rule), *middle, _link(sweep)) for rule, *middle, sweep in table.rows]
        lines += [
            "",
            f"## {table.title[:1].upper()}{table.title[1:]}",
            *_markdown(("rule", *table.headings[1:]), links),
        ]
    if known := [r for r in comparison.rulings if r.worth.tells]:
        lines += ["", *_worths(known)]
    if predictions:
        inside = [one for of_folder in predictions.values() for one in of_folder]
        folders = ", ".join(map(_link, predictions))
        lines += ["", f"Predictions inside their 95 % interval: {sum(inside)} of {len(inside)} ({folders})."]
    if comparison.left_out:
        lines += ["", f"Not in the tables: {'; '.join(left_out(comparison, _link))}."]
    return "\n".join(lines) + "\n"


def ruling_tables(comparison: Comparison, headings: Sequence[str] = _BY_ITSELF) -> list[Table]:
    """Return a table for each way of growing, with a row for each rule of a sweep.

    Args:
        comparison: the sweeps.
        headings: columns to show.
    """
    common, tables = _common_setting(comparison), []
    for way, rulings in groupby(comparison.rulings, lambda r: label(r.columns.scale)):
        rows = [[_cells(r, common)[heading] for heading in headings] for r in rulings]
        tables.append(Table(headings, rows, way, left=("rule", "verdict", "sweep"), whole=("verdict",)))
    return tables


def _cells(r: Ruling, common: tuple[str, str, str]) -> dict[str, str]:
    cost = bounded = "not known" if r.regret is None else r.regret.status
    if r.regret is not None and math.isfinite(r.regret.value):
        cost = f"{r.regret.value:.3f}"
        bounded = f"{cost} ({number(r.regret.low, 3)} to {number(r.regret.high, 3)})"
    labels = zip(map(label, r.setting), map(label, common), strict=True)
    differs = [of_row for of_row, of_most in labels if of_row != of_most]
    alpha = exponent(r.alpha, r.low, r.high)
    by_hand = (
        "–"
        if math.isnan(r.parabola)
        else f"{r.parabola:.2f}".replace("-", "−") + " ≠" * r.parts_from_parabola
    )
    return {
        "rule": ", ".join([name(r.rule, r.columns.parametrization), *differs]),
        "stored rule": ", ".join([r.rule, *differs]),
        "from, to": span(r, "–"),
        "α": alpha.replace("-", "−"),
        "α (95 %)": alpha,
        "by hand": by_hand,
        "regret": cost,
        "regret (nat, 95 %)": bounded,
        "best loss, largest": number(r.best_loss, 3),
        "verdict": r.decision + " (no power law)" * r.is_no_power_law,
        "hours": f"{r.hours:.2f}",
        "sweep": r.sweep,
    }


def left_out(comparison: Comparison, name_of: Callable[[str], str] = str) -> list[str]:
    """Return the folders without a ruling, those of one reason together with it."""
    reasons = {folder: because(why).partition(";")[0] for folder, why in comparison.left_out.items()}
    return [
        f"{', '.join(name_of(folder) for folder in reasons if reasons[folder] == why)} ({why})"
        for why in dict.fromkeys(reasons.values())
    ]


def verdict_counts(comparison: Comparison) -> str:
    counts = Counter(r.decision for r in comparison.rulings)
    return ", ".join(f"{counts[v]} {v}" for v in ("TRANSFERS", "DRIFTS", "INCONCLUSIVE") if v in counts)


def _common_setting(comparison: Comparison) -> tuple[str, str, str]:
    return Counter(r.setting for r in comparison.rulings).most_common(1)[0][0]


def _link(sweep: str) -> str:
    return f"[{_safe(sweep)}]({quote(sweep)}/README.md)"


def _code(text: str) -> str:
    return f"`{text}`" if _safe(text) == text else f"<code>{_safe(text)}</code>"


def _safe(text: str) -> str:
    """Escape a text from somebody's rows, which may end a cell or a code span, or begin HTML."""
    one_line = visible(" ".join(text.split()))
    return re.sub(r"[`|\[\]\\]", lambda mark: f"&#{ord(mark[0])};", html.escape(one_line, quote=False))


def _marked(rule: str) -> str:
    name, comma, differs = rule.partition(", ")
    return f"{_code(name)}{comma}{_safe(differs)}"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    return [lines[0], "|" + "---|" * len(headings), *lines[1:]]


def span(ruling: Ruling, to: str = " to ") -> str:
    return to.join(write_scale(ruling.columns.scale, at) for at in (ruling.smallest, ruling.largest))


def _worths(known: list[Ruling]) -> list[str]:
    heads = ("rule", "growing", "share of the gain", "a, loss gap", "sweep")
    rows = (
        (
            _code(r.rule),
            f"{label(r.columns.scale)} {span(r, '–')}",
            interval(r.worth.share),
            interval(r.worth.loss_exponent),
            _link(r.sweep),
        )
        for r in known
    )
    sure = [
        f"{_code(r.rule)} along {label(r.columns.scale)} {span(r)} ({r.worth.useful})"
        for r in known
        if r.worth.useful != "not told"
    ]
    top = _WORTH.format(useful=f"Known for {', '.join(sure) or 'none'}")
    return [top, "", *_markdown(heads, rows)]
