"""Priors of the line of optima, by kind of scale: chosen on half of the sweeps, scored on the other half.

    python benchmarks/priors.py --results results --tables FOLDER

Priors of a kind are those that give its held-out optima (benchmarks/prediction.py) the highest density, times
a log-normal (of scale 0.7) around the usual priors, which counts as three optima; the probability of a steady
line is given. The halves follow from a hash of each sweep's name.

Shapes: S scales, K scatters, B coefficients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from prediction import HeldOut, every_held_out
from scipy.optimize import minimize

from mup_tpu.analysis.line import fit_line
from mup_tpu.analysis.priors import USUAL, Priors, keeps, kind_of, priors_of

_WEIGHT = 3.0


def kind(one: HeldOut) -> str:
    """Kind of scale, and whether the rule keeps the optimum along it."""
    found = kind_of(one.case.scale)
    return f"{found}, kept" if keeps(one.rule, found) else found


def half(one: HeldOut) -> int:
    """Half of the sweeps that an optimum belongs to."""
    return hashlib.sha256(one.case.sweep.encode()).digest()[0] % 2


def log_density(one: HeldOut, priors: Priors) -> float:
    """Log density of a held-out optimum: of a normal with the mean and variance of the line's draws."""
    line = fit_line(one.optima, np.random.default_rng(0), priors, draws=500)
    assert line is not None, "two optima are known"
    draws_R = line.optima_R(one.truth.scale, np.random.default_rng(1))
    variance = float(draws_R.var()) + one.truth.se**2
    return -0.5 * ((one.truth.x - float(draws_R.mean())) ** 2 / variance + math.log(2 * math.pi * variance))


def chosen(held_out: Sequence[HeldOut], steady: float) -> Priors:
    """Priors of the highest density; the usual ones where nothing is held out."""
    usual = np.log([USUAL.slope, USUAL.bend, USUAL.scatter])

    def loss(logs: np.ndarray) -> float:
        priors = Priors(*np.exp(logs), steady)
        away = _WEIGHT * 0.5 * float((((logs - usual) / 0.7) ** 2).sum())
        return away - sum(log_density(one, priors) for one in held_out)

    options = {"xatol": 0.05, "fatol": 0.05, "maxiter": 60}
    found = minimize(loss, usual, method="Nelder-Mead", options=options).x if held_out else usual
    return Priors(*np.exp(found).round(3).tolist(), steady)


def main(results: Path = Path("results"), tables: Path | None = None) -> None:
    """Print the priors of each kind, and how those of one half do on the other.

    Args:
        results: Folder of results folders.
        tables: Folder of tables.
    """
    held_out = every_held_out(results, tables, 3)
    rows = []
    for name in sorted({kind(one) for one in held_out}):
        own = [one for one in held_out if kind(one) == name]
        steady = priors_of(own[0].case.scale, own[0].rule).steady
        found = {h: chosen([one for one in own if h in (2, half(one))], steady) for h in (0, 1, 2)}
        for h, of in enumerate(("one half", "other half", "all")):
            print(f"{name or 'others'} ({len(own)}), {of}: {found[h]}")
        for one in own:
            line = fit_line(one.optima, np.random.default_rng(0), found[1 - half(one)])
            assert line is not None, "two optima are known"
            draws_R = line.optima_R(one.truth.scale, np.random.default_rng(1))
            seen_R = draws_R + one.truth.se * np.random.default_rng(2).standard_normal(len(draws_R))
            low, high = np.quantile(seen_R, [0.025, 0.975])
            known = sum(o.is_bracketed for o in one.optima)
            rows.append(
                {
                    "ahead": one.case.ahead,
                    "left": "3 or more" if known > 2 else "2",
                    "error": (float(draws_R.mean()) - one.truth.x) ** 2,
                    "in 95 %": float(low <= one.truth.x <= high),
                }
            )
    table = pd.DataFrame(rows)
    for by in (["ahead"], ["ahead", "left"]):
        means = table.groupby(by).agg(n=("error", "size"), rmse=("error", "mean"), inside=("in 95 %", "mean"))
        print(means.assign(rmse=means["rmse"] ** 0.5).round(3).to_string())


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.OmitArgPrefixes,))
