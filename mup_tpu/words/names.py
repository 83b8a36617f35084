"""Names and numbers in sentences, tables and figures: compared values, points of a scale, powers of two."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable

from mup_tpu.analysis.drift import is_told
from mup_tpu.analysis.optimum import Optimum
from mup_tpu.analysis.result import TransferResult
from mup_tpu.analysis.run_table import Cost
from mup_tpu.analysis.transfer import TransferAnalysis
from mup_tpu.config import columns
from mup_tpu.config.values import as_number, write_time

# Parametrization -> its name for people, in the order of all figures
_LABELS = {
    "mup": "μP",
    "sp": "SP",
    "sp_embedding": "SP, embeddings × m",
    "completep": "CompleteP",
    "completep_half": "CompleteP, α = ½",
    "umup": "u-μP",
    "hyperp": "HyperP",
    "completep_zero": "CompleteP, α = 0",
    "completedp": "Complete(d)P",
    "mup_sqrt_attention": "μP, attention / √d",
    "mup_unscaled_readout": "μP, unscaled readout",
    "mup_hidden_embedding": "μP, embedding as hidden",
    "mup_lost_multipliers": "μP, lost multipliers",
    "all": "all runs",
}
# Column -> its values' names for people, the baseline first
_RULES = {
    "optimizer": {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "adamh": "AdamH", "muonh": "MuonH"},
    "batch_rule": {"none": "no batch rule", "lr_sqrt": "lr × √batch", "lr_linear": "lr × batch"},
    "module": {
        "all": "all parameters",
        "embedding": "embeddings",
        "hidden": "hidden matrices",
        "readout": "readout",
        "norm": "norms and biases",
    },
    "token_rule": {"none": "no token rule", "lr_0.32": "lr × tokens^−0.32", "lr_0.5": "lr × tokens^−0.5"},
    "decay_rule": {
        "parametrization": "decay of the parametrization",
        "constant": "decay constant",
        "sqrt": "decay × √width",
        "linear": "decay × width",
        "timescale": "decay of one timescale",
    },
}


def rule_name(compared: str, column: str = "parametrization") -> str:
    # For people: "μP", "lr × √batch", "batch size 16"
    if (value := _finite_number(compared)) is not None:
        return f"{columns.label(column)} {columns.write(column, value)}"
    return _RULES.get(column, {}).get(compared) or _LABELS.get(compared, compared)


def ordered(names: Iterable[str], column: str = "parametrization") -> list[str]:
    """Sort compared values as in all figures: the baseline, μP, SP, then the others; numbers ascend."""
    first = [*_RULES.get(column, {}), *_LABELS]

    def place(name: str) -> tuple[int, float, str]:
        return first.index(name) if name in first else len(first), _finite_number(name) or 0.0, name

    return sorted(names, key=place)


def _finite_number(text: str) -> float | None:
    value = as_number(text)
    return value if value is not None and math.isfinite(value) else None


def results_of(analysis: TransferAnalysis) -> list[TransferResult]:
    by_name = {result.compared: result for result in analysis.results}
    return [by_name[name] for name in ordered(by_name, analysis.compares)]


def point(scale: str, value: float) -> str:
    return f"{columns.label(scale)} {columns.write_scale(scale, value)}"


def heading(name: str, unit: str) -> str:
    # "val_loss (nat)", and "val_bpb" in bpb
    return name if unit != "nat" and unit.lower() in name.lower() else f"{name} ({unit})"


def measured(name: str, unit: str, value: float, digits: str = ".3f", words: str = "") -> str:
    """Write a loss by its name, with its unit unless the name says it: loss 2.400 nat, val_bpb 0.910."""
    return f"{name} {words}{value:{digits}}" + ("" if heading(name, unit) == name else f" {unit}")


def interval(low: float, high: float, digits: str = ".3f") -> str:
    return f"95 % {low:{digits}} to {high:{digits}}"


def number(value: float, digits: int) -> str:
    # Never −0.00
    if math.isnan(value):
        return "-"
    return f"{round(value, digits) + 0.0:.{digits}f}" if math.isfinite(value) else "∞" if value > 0 else "−∞"


def power(x: float, digits: str = ".4g") -> str:
    # 2^-5.53 = 0.0216
    exponent = f"{x:{digits}}"
    return f"2^{exponent if float(exponent) else exponent.lstrip('-')} = {2.0**x:.3g}"


def plain(x: float) -> str:
    return f"{2.0**x:.3g}" if x < math.inf else "∞"


def exponent(alpha: float, low: float, high: float) -> str:
    """Write a drift exponent with its interval, or "not known" where the interval is too wide."""
    if not is_told(low, high):
        return "not known"
    return f"{number(alpha, 2)} ({number(low, 2)} to {number(high, 2)})"


def amount(costs: Cost, cost: float) -> str:
    if costs.unit == "s":
        return write_time(cost)
    return f"{cost:.0f} {costs.unit}" if 10 <= cost < 1e5 else f"{cost:.2g} {costs.unit}"


def listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def signed(value: float) -> str:
    # With a minus sign
    return number(value, 2).replace("-", "−")


def alpha(result: TransferResult) -> str:
    """Write the drift exponent with its interval for a title; "" at one scale."""
    drift = result.drift
    if not drift.is_told:
        return "α not known" if len(result.optima) > 1 else ""
    text = f"α = {signed(drift.alpha)} [{signed(drift.low)}, {signed(drift.high)}]"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def scales_of(results: Iterable[TransferResult]) -> list[float]:
    return sorted({curve.scale for result in results for curve in result.curves})


def smallest_known(result: TransferResult) -> Optimum | None:
    return next((o for o in result.optima if o.is_bracketed), None)


def powers_in_html(text: str) -> str:
    """Escape markup, raise exponents, and turn hyphens before numbers into minus signs.

    Examples:
        >>> powers_in_html("lr ∝ width^-0.03 (-0.16 to 0.09) <b>")
        'lr ∝ width<sup>−0.03</sup> (−0.16 to 0.09) &lt;b&gt;'
    """
    written = re.sub(r"(?<![\w-])-(?=\d)", "−", html.escape(text))
    return re.sub(r"\^(−?\d+(?:\.\d+)?|α)", r"<sup>\1</sup>", written)


def bound(x: float) -> str:
    return f"2^{x:.4g}" if math.isfinite(x) else "0" if x < 0 else "∞"
