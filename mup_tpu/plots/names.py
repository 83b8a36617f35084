"""Names for people in figures and reports: compared values, columns, points of a scale, exponents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.transfer import TransferAnalysis, TransferResult
from mup_tpu.config import columns
from mup_tpu.config.values import as_number

_LABELS = {
    "mup": "μP",
    "sp": "SP",
    "sp_embedding": "SP, embeddings × m",
    "completep": "CompleteP",
    "completep_half": "CompleteP, α = ½",
    "umup": "u-μP",
    "completep_zero": "CompleteP, α = 0",
    "completedp": "Complete(d)P",
    "mup_sqrt_attention": "μP, attention / √d",
    "mup_unscaled_readout": "μP, unscaled readout",
    "mup_hidden_embedding": "μP, embedding as hidden",
    "mup_lost_multipliers": "μP, lost multipliers",
    "all": "all runs",
}
"""Parametrization -> its name for people, in the order of all figures."""
_RULES = {
    "optimizer": {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "adamh": "AdamH", "muonh": "MuonH"},
    "batch_rule": {"none": "no batch rule", "lr_sqrt": "lr × √batch", "lr_linear": "lr × batch"},
    "token_rule": {"none": "no token rule", "lr_0.32": "lr × tokens^−0.32", "lr_0.5": "lr × tokens^−0.5"},
    "decay_rule": {
        "parametrization": "decay of the parametrization",
        "constant": "decay constant",
        "sqrt": "decay × √width",
        "linear": "decay × width",
        "timescale": "decay of one timescale",
    },
}
"""Column -> its values' names for people, the baseline first."""


def name(compared: str, column: str = "parametrization") -> str:
    """Name of a compared value of a column for people: "μP", "lr × √batch", "batch size 16"."""
    if (number := _number(compared)) is not None:
        return f"{columns.label(column)} {columns.write(column, number)}"
    return _RULES.get(column, {}).get(compared) or _LABELS.get(compared, compared)


def label(compared: str, column: str = "parametrization") -> str:
    """Name of a compared value for matplotlib; arguments as of `name`."""
    return raised(name(compared, column))


def raised(text: str) -> str:
    """Text for matplotlib with its exponents raised: tokens^−0.32."""
    return re.sub(r"\^(−?\d+(?:\.\d+)?)", r"$^{\1}$", plain(text))


def _number(text: str) -> float | None:
    value = as_number(text)
    return value if value is not None and math.isfinite(value) else None


def plain(name: str) -> str:
    """A name without formulas: matplotlib reads text between two $ as one."""
    return name.replace("$", r"\$")


def title(name: str) -> str:
    """Label and unit of a column."""
    return plain(columns.title(name))


def column_label(name: str) -> str:
    """Label of a column."""
    return plain(columns.label(name))


def point(scale: str, value: float) -> str:
    """A point of a scale, named: "width 64"."""
    return f"{columns.label(scale)} {columns.write_scale(scale, value)}"


def at(scale: str, value: float) -> str:
    """A point of a scale for matplotlib."""
    return plain(point(scale, value))


def power(x: float) -> str:
    """A power of 2 for matplotlib."""
    return f"$2^{{{x:g}}}$"


def exponent(value: float) -> str:
    """An exponent with two digits, never −0.00."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def alpha(result: TransferResult) -> str:
    """The drift exponent with its interval, or that it is not known; "" at one scale."""
    drift = result.drift
    if not drift.is_told:
        return "α not known" if len(result.optima) > 1 else ""
    text = f"α = {exponent(drift.alpha)} [{exponent(drift.low)}, {exponent(drift.high)}]"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def verdict(result: TransferResult, analysis: TransferAnalysis) -> str:
    """Title of a panel: compared name, verdict and α."""
    text = f"{name(result.compared, analysis.compares)}: {result.verdict.decision}"
    return ", ".join(filter(None, (text, alpha(result))))


def ordered(names: Iterable[str], column: str = "parametrization") -> list[str]:
    """Compared values in the order of all figures: the baseline, μP, SP, then the others; numbers ascend."""
    first = [*_RULES.get(column, {}), *_LABELS]

    def place(name: str) -> tuple[int, float, str]:
        return first.index(name) if name in first else len(first), _number(name) or 0.0, name

    return sorted(names, key=place)


def results_of(analysis: TransferAnalysis) -> list[TransferResult]:
    """The results in the order of `ordered`."""
    by_name = {result.compared: result for result in analysis.results}
    return [by_name[name] for name in ordered(by_name, analysis.compares)]


def scales_of(results: Iterable[TransferResult]) -> list[float]:
    """Scales of all curves, ascending."""
    return sorted({curve.scale for result in results for curve in result.curves})


def smallest_known(result: TransferResult) -> Optimum | None:
    """Optimum of the smallest scale that has one."""
    return next((o for o in result.optima if o.is_bracketed), None)
