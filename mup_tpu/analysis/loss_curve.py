"""Mean loss of each grid point at one scale.

Shapes: G grid points, N runs, S seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.sparse.linalg import LinearOperator, cg


@dataclass(frozen=True)
class LossCurve:
    """Mean loss of each grid point at one scale; +inf where half of its runs diverged or were stopped."""

    scale: float
    x_G: np.ndarray
    """log2 of the hyperparameter, ascending."""
    mean_G: np.ndarray
    count_G: np.ndarray
    diverged_G: np.ndarray
    """Diverged runs of each point."""
    stopped_G: np.ndarray
    """Runs of each point that were stopped early, for being far behind the best."""
    error_G: np.ndarray
    """Standard error of each mean where the table gives one, else nan."""
    squares_G: np.ndarray
    """Sum of squared deviations of each point's finite runs from their mean."""
    df_G: np.ndarray
    """Degrees of freedom of those squares: finite runs less one."""

    @property
    def step(self) -> float:
        """Usual distance of grid points, octaves."""
        return float(np.median(np.diff(self.x_G))) if len(self.x_G) > 1 else 1.0

    @property
    def near_G(self) -> np.ndarray:
        """Whether each point is within an octave (or a grid step) of the best one."""
        return np.abs(self.x_G - self.x_G[int(np.argmin(self.mean_G))]) <= max(1.0, self.step) + 1e-9


def loss_curve(runs: pd.DataFrame) -> LossCurve:
    """The curve of one scale (and parametrization) from checked runs.

    A cell counts as lost if at least half its runs are; else its mean is over the finite ones. Where
    cells have unequal seeds, an effect of each seed is taken out first, so that none is better for its seeds.
    """
    runs = runs.assign(loss=runs["loss"] - _seed_effects(runs))
    x, mean, count, diverged, stopped, error, squares, df = [], [], [], [], [], [], [], []
    for value, cell in runs.groupby("x"):
        losses = cell["loss"].to_numpy()
        finite = losses[np.isfinite(losses)]
        lost = len(losses) - len(finite)
        alive = 2 * lost < len(losses)
        x.append(value)
        mean.append(finite.mean() if alive else np.inf)
        count.append(len(finite) if alive else len(losses))
        stopped.append(int(cell["stopped"].sum()))
        diverged.append(lost - stopped[-1])
        error.append(float(cell["loss_error"].mean()) / np.sqrt(len(cell)))
        squares.append(float(((finite - finite.mean()) ** 2).sum()) if alive else 0.0)
        df.append(len(finite) - 1 if alive else 0)
    return LossCurve(
        scale=float(runs["scale"].iloc[0]),
        x_G=np.array(x, float),
        mean_G=np.array(mean, float),
        count_G=np.array(count),
        diverged_G=np.array(diverged),
        stopped_G=np.array(stopped),
        error_G=np.array(error),
        squares_G=np.array(squares),
        df_G=np.array(df),
    )


def _seed_effects(runs: pd.DataFrame) -> np.ndarray:
    """Each run's seed effect, nat: 0 where cells have equal seeds, for means then compare like with like.

    Loss = cell + seed + noise by ridge regression with a penalty of 1 on the seeds, which is the mixed model
    of a seed variance equal to the noise's; over the cells within 0.3 nat of the best, where training is
    stable.
    """
    losses = runs["loss"].to_numpy()
    finite = np.isfinite(losses)
    cells, seeds = runs["x"].to_numpy(), runs["seed"].to_numpy()
    counts = runs[finite].groupby("x")["seed"].count()
    if counts.nunique() < 2 or len(np.unique(seeds[finite])) < 2:
        return np.zeros(len(runs))
    means = runs[finite].groupby("x")["loss"].mean()
    used = finite & np.isin(cells, means.index[means <= means.min() + 0.3])
    level, _ = pd.factorize(seeds)
    cell, _ = pd.factorize(cells[used])
    effects = _ridge_effects(losses[used], cell, level[used], level.max() + 1)
    return np.where(finite, effects[level], 0.0)


def _ridge_effects(y_N: np.ndarray, cell_N: np.ndarray, seed_N: np.ndarray, seeds: int) -> np.ndarray:
    """Seed effects of loss = cell + seed + noise with a penalty of 1 on the seeds, nat; one a seed.

    Cells are eliminated (their means are taken out), which leaves (Zᵀ M Z + I) s = Zᵀ M y. Conjugate
    gradients solve it in memory and time of the rows, where a design matrix of a million seeds is 73 GiB: its
    eigenvalues lie between 1 and 1 + the runs of a seed.
    """
    count = np.bincount(cell_N)

    def centred(v_N: np.ndarray) -> np.ndarray:
        return v_N - (np.bincount(cell_N, v_N) / count)[cell_N]

    def normal(s_S: np.ndarray) -> np.ndarray:
        return np.bincount(seed_N, centred(s_S[seed_N]), seeds) + s_S

    operator = LinearOperator((seeds, seeds), matvec=normal, dtype=float)
    return cg(operator, np.bincount(seed_N, centred(y_N), seeds), rtol=1e-13)[0]
