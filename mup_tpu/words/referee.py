"""The page about all stored sweeps: a table a way of growing, with each rule's verdict and cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.referee import Ruling
from mup_tpu.config.columns import label, write_scale
from mup_tpu.words.names import exponent
from mup_tpu.words.reasons import because
from mup_tpu.words.tables import interval

_INTRODUCTION = """\
Which hyperparameters stay as a model or its training grows, under which rule? A row is one rule of one sweep
(`mup-tpu analyze {name} --report --out {name}/README.md`); the sweep's page has sizes, lengths and data,
`docs/rules.md` the rules.

- **α**: exponent of the best value over the scale (95 %), 0 where it stays.
- **Regret**: cost of the smallest scale's best value at the largest, nat; intervals are on the sweep's page.
- **Hours**: training time on one device; on CPUs, of one thread.

{default}."""

_WORTH = """\
## Is a transfer worth it?
[Numbers](../docs/statistics.md#is-a-transfer-worth-it) as the scale n grows: cost of the transfer over the
gain by growing, and loss gap ∝ n^-a. Only rules that tell a to half a unit, or whether the transfer is
useful. {useful}."""


def page(
    name: str,
    found: list[Ruling],
    left_out: Mapping[str, Reason],
    figure: str = "",
    predictions: Mapping[str, list[bool]] = MappingProxyType({}),
) -> str:
    """Return the rulings as a page of Markdown.

    Args:
        name: name of the folder.
        found: rulings, from `rulings`.
        left_out: reasons why folders are left out, from `rulings`.
        figure: file of `mup_tpu.plots.referee_figure`, relative to the page; "" for none.
        predictions: whether intervals held, from `held`.
    """
    common = Counter(r.setting for r in found).most_common(1)[0][0]
    model, update_rule, tuned = common
    default = f"Unless a row says otherwise, {update_rule} trains {model}, and the {label(tuned)} is tuned"
    lines = [f"# {name}", _INTRODUCTION.format(name=name, default=default)]
    if figure:
        lines += ["", f"![Drift exponent of each rule with its interval, by the way of growing]({figure})"]
    heads = ("rule", "from, to", "α", "regret", "verdict", "hours", "sweep")
    scale = ""
    for r in found:
        if label(r.columns.scale) != scale:
            scale = label(r.columns.scale)
            lines += ["", f"## {scale[:1].upper()}{scale[1:]}", "| " + " | ".join(heads) + " |"]
            lines += ["|" + "---|" * len(heads)]
        cost = "not known" if r.regret is None else r.regret.status
        if r.regret is not None and math.isfinite(r.regret.value):
            cost = f"{r.regret.value:.3f}"
        differs = [label(value) for value, other in zip(r.setting, common, strict=True) if value != other]
        cells = (
            ", ".join([f"`{r.rule}`", *differs]),
            span(r, "–"),
            exponent(r.alpha, r.low, r.high).replace("-", "−"),
            cost,
            r.decision + " (no power law)" * r.is_no_power_law,
            f"{r.hours:.2f}",
            f"[{r.sweep}]({r.sweep}/README.md)",
        )
        lines.append("| " + " | ".join(cells) + " |")
    if known := [r for r in found if r.worth.tells]:
        lines += ["", *_worths(known)]
    if predictions:
        inside = [one for of_folder in predictions.values() for one in of_folder]
        folders = ", ".join(f"[{name}]({name}/README.md)" for name in predictions)
        lines += [
            "",
            f"Predictions inside their 95 % interval: {sum(inside)} of {len(inside)} ({folders}).",
        ]
    if left_out:
        reasons = {folder: because(why).partition(";")[0] for folder, why in left_out.items()}
        others = [
            ", ".join(f"[{folder}]({folder}/README.md)" for folder in reasons if reasons[folder] == why)
            + f" ({why})"
            for why in dict.fromkeys(reasons.values())
        ]
        lines += ["", f"Not in the tables: {'; '.join(others)}."]
    return "\n".join(lines) + "\n"


def span(ruling: Ruling, to: str = " to ") -> str:
    """Write the smallest and the largest point of the scale."""
    return to.join(write_scale(ruling.columns.scale, at) for at in (ruling.smallest, ruling.largest))


def why_drifts(ruling: Ruling) -> str:
    """Return why a rule DRIFTS although α's interval holds 0; "" for all others."""
    if not ruling.is_no_power_law or ruling.regret is None:
        return ""
    return f"no power law, but regret {ruling.regret.low:.3f} to {ruling.regret.high:.3f} nat"


def _worths(known: list[Ruling]) -> list[str]:
    """Tabulate what transfers are worth as a scale grows without end."""
    heads = ("rule", "growing", "share of the gain", "a, loss gap", "sweep")
    rows = (
        (
            f"`{r.rule}`",
            f"{label(r.columns.scale)} {span(r, '–')}",
            interval(r.worth.share),
            interval(r.worth.loss_exponent),
            f"[{r.sweep}]({r.sweep}/README.md)",
        )
        for r in known
    )
    sure = [
        f"`{r.rule}` along {label(r.columns.scale)} {span(r)} ({r.worth.useful})"
        for r in known
        if r.worth.useful != "not told"
    ]
    top = _WORTH.format(useful=f"Known for {', '.join(sure) or 'none'}")
    return [top, "", *("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))]
