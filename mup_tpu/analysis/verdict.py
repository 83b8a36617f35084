"""The verdict on transfer, by equivalence: TRANSFERS and DRIFTS both have to be shown, else INCONCLUSIVE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mup_tpu.analysis.drift import Drift
from mup_tpu.analysis.optimum import LossCurve, Optimum
from mup_tpu.analysis.regret import Regret
from mup_tpu.analysis.run_table import Columns
from mup_tpu.columns import write_scale

EPSILON = 0.01
"""Regret that does not matter, nat per token."""
DELTA = 0.2
"""Drift exponent that does not matter."""
_NEEDED = 3


@dataclass(frozen=True)
class Verdict:
    """TRANSFERS, DRIFTS or INCONCLUSIVE, why, and what would settle it."""

    decision: str
    sentence: str
    settle: str
    """What to run to settle it, a command line where the experiment is ours; "" where it is settled."""

    def to_dict(self) -> dict[str, str]:
        """Plain values."""
        return {"verdict": self.decision, "sentence": self.sentence, "settle": self.settle}


def decide(
    parametrization: str,
    optima: Sequence[Optimum],
    drift: Drift,
    regret: Regret | None,
    columns: Columns,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> tuple[str, str]:
    """The verdict and its sentence.

    TRANSFERS if the regret's upper bound is below epsilon and drift's interval lies within ±delta; DRIFTS if
    drift's interval excludes 0 and regret exceeds epsilon (or lies outside the grid, or diverges).

    Args:
        parametrization: name to say.
        optima: of each scale.
        drift: fitted over the bracketed ones.
        regret: from the smallest bracketed scale to the largest; None where there are not two.
        columns: what is tuned and what scales.
        epsilon: regret that does not matter, nat per token.
        delta: drift exponent that does not matter.
    """
    if not drift.is_known or regret is None:
        why = (
            f"{len(drift.scales)} of {len(optima)} {columns.scale}s have a bracketed optimum, "
            f"and {_NEEDED} are needed"
        )
        return "INCONCLUSIVE", f"{parametrization}: INCONCLUSIVE: {why}."
    source, target = (write_scale(columns.scale, s) for s in (regret.source, regret.target))
    cost = {
        "diverged": f"diverges at {target}",
        "stopped early": f"was stopped early at {target}, far behind the best",
        "outside the grid": f"lies outside the grid of {target}",
    }.get(
        regret.status,
        f"costs {regret.value:.3f} nat at {target} (95 % {regret.low:.3f} to {_nat(regret.high)})",
    )
    numbers = (
        f"{columns.hyperparameter}* ∝ {columns.scale}^{drift.alpha:.2f} "
        f"(95 % {drift.low:.2f} to {drift.high:.2f}); the optimum of {source} {cost}"
    )
    verdict = "INCONCLUSIVE"
    if regret.high < epsilon and -delta < drift.low and drift.high < delta:
        verdict = "TRANSFERS"
    elif (drift.low > 0 or drift.high < 0) and (
        regret.value > epsilon or regret.status == "outside the grid"
    ):
        verdict = "DRIFTS"
    return verdict, f"{parametrization}: {verdict}: {numbers}."


def settle(
    parametrization: str,
    curves: Sequence[LossCurve],
    optima: Sequence[Optimum],
    columns: Columns,
    command: str | None,
) -> str:
    """What would settle an open verdict: extend a grid, add scales, or add seeds near the optima.

    Args:
        parametrization: whose runs to add.
        curves: what has been run, by scale.
        optima: of each scale.
        columns: what is tuned and what scales.
        command: command line that adds runs, or None for tables from elsewhere.
    """
    unbracketed = [o for o in optima if not o.is_bracketed]
    seeds = int(max(c.count_G.max() for c in curves))
    if unbracketed:
        scales = [o.scale for o in unbracketed]
        grid = sorted({x for o, c in zip(optima, curves, strict=True) for x in _beyond(o, c)})
    elif len(optima) < _NEEDED:
        largest = max(o.scale for o in optima)
        scales = [2 * largest * 2**k for k in range(_NEEDED - len(optima))]
        grid = sorted({float(x) for c in curves for x in c.x_G})
    else:
        scales = [o.scale for o in optima]
        step = min(c.step for c in curves)
        near = {round(o.x / step) * step + k * step / 2 for o in optima for k in range(-3, 4)}
        grid, seeds = sorted(near), 2 * seeds
    values = " ".join(f"2^{x:.4g}" for x in grid)
    numbers = " ".join(f"{s:g}" for s in scales)
    flags = {"parametrization": "--parametrizations", "width": "--widths", "lr": "--learning-rates"}
    if command is not None and {columns.parametrization, columns.scale, columns.hyperparameter} == set(flags):
        return (
            f"{command} --parametrizations {parametrization} --widths {numbers} "
            f"--num-seeds {seeds} --learning-rates {values}"
        )
    points = [write_scale(columns.scale, s) for s in scales]
    at = (", " if any(" " in point for point in points) else " ").join(points)
    return f"add {columns.hyperparameter} {values} at {columns.scale} {at}, {seeds} seeds each"


def _beyond(optimum: Optimum, curve: LossCurve) -> list[float]:
    """Grid points that would bracket an optimum found at an edge."""
    if optimum.is_bracketed:
        return []
    if optimum.status == "one value":
        return [optimum.x + k for k in (-2, -1, 0, 1, 2)]
    upwards = optimum.status == "at upper edge"
    edge = float(curve.x_G[-1] if upwards else curve.x_G[0])
    return [edge + (1 if upwards else -1) * k * curve.step for k in (1, 2)]


def _nat(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "∞"
