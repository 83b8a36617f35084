"""One model of all loss curves of a rule, and what each curve tells of its optimum.

Around its optimum a curve is loss = level + curvature · valley(x - vertex, shape). The curvatures of a rule's
curves scatter around a common value and their shapes come from common shares, so that a curve of few runs
borrows from the others. On either side the valley may end at an edge: beyond it runs diverge, are stopped,
or lie anywhere above the valley (a wall, a plateau). Where between two points the edge lies nobody knows,
and the optimum is never beyond it.

The likelihood is computed on a grid of vertices and shapes, with levels and curvatures integrated in closed
form; the noise and the common curvature are weighed on a grid too. Draws from it ("particles") carry all that
later questions need: the optimum, the valley around it, and the edges.

Shapes: G grid points of a window, N vertices, K shapes, E pairs of edges, F factors
on the noise, H pairs of a factor and a common curvature, P particles, M positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mup_tpu.analysis.curves import LEAST_ERROR, LossCurve, Noise

PARTICLES = 800
_SHAPES = np.array(
    [
        ("exponential", a, p)
        for a, p in ((-0.6, 2), (-0.4, 5), (-0.2, 12), (0.01, 20), (0.2, 12), (0.4, 5), (0.6, 2))
    ]
    + [("straight", a, p) for a, p in ((-0.4, 4), (-0.2, 9), (0.0, 16), (0.2, 9), (0.4, 4))]
    + [("narrow", 0.0, 4), ("wide", 0.0, 6)],
    dtype=[("kind", "U11"), ("asymmetry", float), ("share", float)],
)
"""Valleys, u²/2 near 0: exponential on one side and straight on the other; straight on both with different
slopes; or a bell upside down that levels off, narrow or wide. And the share of each before any curve was
seen."""
_NARROW, _WIDE = 1.0, 2.2
"""Standard deviations of bells, octaves."""
_SHAPE_SPREAD, _OTHER_KIND = 0.3, 0.7
"""Scatter of a rule's asymmetries, and how much rarer the other kind is among its curves."""
_CURVATURES = np.geomspace(0.002, 3.0, 10)
"""Common curvatures that are weighed, nat per squared octave."""
_CURVATURE_SPREAD = 0.5
"""Scatter of a rule's curvatures, as a share of the common one: of their logarithms it is 0.37 in stored
sweeps."""
_LEVEL_SD = 1.0
"""Prior standard deviation of a valley's floor about the best run, nat."""
_MODEL_ERROR, _MOST_MODEL_ERROR = 0.07, 0.3
"""Standard error of the model at a point, as a share of the point's rise times the square of its octaves from
the vertex; and the largest share. In stored sweeps a valley misses a point two octaves off by a fifth of its
rise."""
_LOW_WALL, _HIGH_WALL = 0.0005, 0.1
"""Probability of a wall at each of the nearest steps below and above the best point."""
_WALL_REACH = 2.0
"""Octaves (or two steps) from the best point within which walls are looked for above it."""
_OVERSHOOT = 0.7
"""Octaves by which a vertex may usually lie beyond its edge."""
_LEAST_KEPT = 3
"""Points that walls leave at least."""
_HEIGHT = 0.3
"""Typical height of what lies beyond a wall, nat."""
_WINDOW_STEPS, _WINDOW_OCTAVES = 3, 3.0
_BEYOND, _BEYOND_OPEN = 1.0, 6.0
"""Octaves beyond a window in which vertices lie, where the best point is inside it and at its end."""
_COARSE, _FINE = 0.35, 48
"""Distance of vertices at first, octaves; number of vertices afterwards."""
_STEEP = 0.1
"""Loss of a neighbour over the best point, nat, from which no optimum lies nearer to that neighbour."""
_LEAST_LIKELY = -14.0
"""Logarithm of the likelihood, over the most likely, from which a vertex is not looked at."""
_LEAST_CURVATURE = 1e-3
"""Least curvature of a valley, nat per squared octave."""
_HYPER = 12
"""Common noises, curvatures and shapes that the final draws are taken from."""
_USUAL_NOISE = 0.006
"""Noise of a run near its optimum, nat, where nothing tells."""
_CAUTION = 0.7
"""Posterior standard deviations by which noise without replicates is taken above its mean."""
_NEAR = 0.15
"""Loss over the best up to which a point tells of the noise, nat."""
_MIXED = 0.25
"""Share of particles that are spread evenly over the vertices, so that few are far off in the tails."""


def valley(u: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Rise at u octaves from the vertex of a valley of a shape (its number), in units of the curvature."""
    a = _SHAPES["asymmetry"][shape]
    exponential = (np.exp(np.clip(a * u, -30.0, 8.0)) - a * u - 1) / np.where(a == 0, 1.0, a) ** 2
    straight = 4 * (np.sqrt(1 + u**2 / 4) - 1) * (1 + a * np.tanh(u / 2))
    kind = _SHAPES["kind"][shape]
    sd = np.where(kind == "narrow", _NARROW, _WIDE)
    bell = sd**2 * -np.expm1(-(u**2) / (2 * sd**2))
    return np.select([kind == "exponential", kind == "straight"], [exponential, straight], bell)


@dataclass(frozen=True)
class Particles:
    """Draws of what one curve may be, P of each."""

    weight_P: np.ndarray
    """Importance of each, of sum 1; equal where they are of the posterior."""
    vertex_P: np.ndarray
    shape_P: np.ndarray
    curvature_P: np.ndarray
    level_P: np.ndarray
    low_P: np.ndarray
    high_P: np.ndarray
    """Edges of the valley, log2 of the hyperparameter; infinite where it has none."""

    @property
    def optimum_P(self) -> np.ndarray:
        """The vertex, or the edge before it."""
        return np.clip(self.vertex_P, self.low_P, self.high_P)

    @property
    def loss_P(self) -> np.ndarray:
        """Loss at the optimum, nat."""
        return self.at(self.optimum_P)

    def at(self, x_P: np.ndarray | float) -> np.ndarray:
        """Loss of each valley at an x of its own, edges not counted."""
        return self.level_P + self.curvature_P * valley(x_P - self.vertex_P, self.shape_P)

    def median_at(self, x_M: np.ndarray) -> np.ndarray:
        """Median loss at each x, edges not counted."""
        losses_MP = self.level_P + self.curvature_P * valley(x_M[:, None] - self.vertex_P, self.shape_P)
        return np.array([self.quantiles(losses_P, (0.5,))[0] for losses_P in losses_MP])

    def quantiles(self, value_P: np.ndarray, shares: Sequence[float]) -> np.ndarray:
        """Quantiles of a value that each draw has."""
        order = np.argsort(value_P)
        total = np.cumsum(self.weight_P[order])
        return value_P[order][np.minimum(np.searchsorted(total, shares), len(order) - 1)]

    def take(self, chosen: np.ndarray) -> Particles:
        """Some of them, equally likely."""
        fields = (self.vertex_P, self.shape_P, self.curvature_P, self.level_P, self.low_P, self.high_P)
        return Particles(np.full(len(chosen), 1 / len(chosen)), *(f[chosen] for f in fields))


@dataclass(frozen=True)
class _Window:
    """The points of a curve that tell of its optimum, and the edges that it may have."""

    x_G: np.ndarray
    rise_G: np.ndarray
    """Mean loss over the best point's, nat."""
    error_G: np.ndarray
    best: int
    kept_EG: np.ndarray
    """Points inside each pair of edges."""
    edges_E4: np.ndarray
    """Steps that the edges lie in: from and to of the lower, from and to of the upper; infinite if none."""
    log_prior_E: np.ndarray
    lowest: float
    highest: float
    """Vertices that are allowed."""
    floor: float
    """Loss of the best point, nat."""

    @classmethod
    def of(cls, curve: LossCurve, noise: Noise) -> _Window:
        best_of_all = int(np.argmin(curve.mean_G))
        chosen = window(curve)
        x_G, mean_G = curve.x_G[chosen], curve.mean_G[chosen]
        best = int(np.flatnonzero(chosen == best_of_all)[0])
        rise_G = mean_G - mean_G[best]
        error_G = np.maximum(noise.errors_G(curve)[chosen], LEAST_ERROR)
        last = len(x_G) - 1
        outside = [chosen[0] - 1, chosen[-1] + 1]
        lost = [
            float(curve.x_G[i]) if 0 <= i < len(curve.x_G) and np.isinf(curve.mean_G[i]) else math.nan
            for i in outside
        ]
        lower = [(0, *((lost[0], x_G[0]) if math.isfinite(lost[0]) else (-math.inf, -math.inf)), 0.0)]
        upper = [(last, *((x_G[-1], lost[1]) if math.isfinite(lost[1]) else (math.inf, math.inf)), 0.0)]
        walls = [
            i for i in range(1, len(x_G)) if abs(x_G[i] - x_G[best]) <= _WALL_REACH or abs(i - best) <= 2
        ]
        lower += [(i, x_G[i - 1], x_G[i], math.log(_LOW_WALL)) for i in walls if best - 2 <= i <= best]
        upper += [(i - 1, x_G[i - 1], x_G[i], math.log(_HIGH_WALL)) for i in walls if i > best]
        least = min(_LEAST_KEPT, len(x_G))
        pairs = [(a, b) for a in lower for b in upper if b[0] - a[0] + 1 >= least]
        order = np.arange(len(x_G))
        lowest = x_G[0] - (_BEYOND_OPEN if best == 0 and not math.isfinite(lost[0]) else _BEYOND)
        highest = x_G[-1] + (_BEYOND_OPEN if best == last and not math.isfinite(lost[1]) else _BEYOND)
        # A valley cannot be lowest beside a run that is plainly worse than another.
        steep_G = rise_G > np.maximum(_STEEP, 2 * error_G)
        if best > 0 and steep_G[best - 1]:
            lowest = (x_G[best - 1] + x_G[best]) / 2
        if best < last and steep_G[best + 1]:
            highest = (x_G[best] + x_G[best + 1]) / 2
        return cls(
            x_G,
            rise_G,
            error_G,
            best,
            np.array([(order >= a[0]) & (order <= b[0]) for a, b in pairs]),
            np.array([(*a[1:3], *b[1:3]) for a, b in pairs], float),
            np.array([a[3] + b[3] for a, b in pairs]),
            float(lowest),
            float(highest),
            float(mean_G[best]),
        )


def window(curve: LossCurve) -> np.ndarray:
    """Numbers of the points within three steps or octaves of the best, whichever is more, and its neighbours.

    None across a lost point.
    """
    x_G, finite_G = curve.x_G, np.isfinite(curve.mean_G)
    best = int(np.argmin(curve.mean_G))
    reach = max(_WINDOW_STEPS * curve.step, _WINDOW_OCTAVES)
    near_G = np.abs(np.arange(len(x_G)) - best) <= 1
    inside = finite_G & (near_G | (np.abs(x_G - x_G[best]) <= reach + 1e-9))
    for direction in (-1, 1):
        k = best
        while 0 <= k < len(x_G):
            if not finite_G[k]:
                inside[k::direction] = False
                break
            k += direction
    return np.flatnonzero(inside)


@dataclass(frozen=True)
class _Cells:
    """Log weights of a window over vertices, shapes, edges and hyperparameters, and what they leave of
    level and curvature.
    """

    log_NKEH: np.ndarray
    curvature_NKEH: np.ndarray
    """Mean of the curvature, with the level integrated out."""
    precision_NKEH: np.ndarray
    """Precision of the curvature, likewise."""
    level: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Precision of the level, and its products with losses and with unit valleys; each broadcasts to NKEH."""


def _weigh(
    w: _Window, vertex_N: np.ndarray, factor_F: np.ndarray, number_H: np.ndarray, common_H: np.ndarray
) -> _Cells:
    """Likelihood of a window at each vertex, shape, pair of edges and hyperparameters.

    Args:
        w: the window.
        vertex_N: vertices.
        factor_F: factors on the noise.
        number_H: which of these, of each hyperparameter.
        common_H: common curvature, likewise.
    """
    u_NG = w.x_G - vertex_N[:, None]
    share_NG = np.minimum(_MODEL_ERROR * u_NG**2, _MOST_MODEL_ERROR)
    variance_FNG = (factor_F[:, None, None] * w.error_G) ** 2 + (share_NG * w.rise_G) ** 2
    weight_FN1G = 1 / variance_FNG[:, :, None]
    rises_NKG = valley(u_NG[:, None], np.arange(len(_SHAPES))[:, None])
    kept_GE = w.kept_EG.T.astype(float)
    y_G = w.rise_G

    def summed(terms: np.ndarray) -> np.ndarray:
        return (terms @ kept_GE).transpose(1, 2, 3, 0)

    s1 = summed(weight_FN1G) + 1 / _LEVEL_SD**2
    sv, svv = summed(weight_FN1G * rises_NKG), summed(weight_FN1G * rises_NKG**2)
    sy, syy = summed(weight_FN1G * y_G), summed(weight_FN1G * y_G**2)
    syv = summed(weight_FN1G * rises_NKG * y_G)
    log_variance = summed(np.log(2 * np.pi * variance_FNG[:, :, None]))
    dropped_E = np.where(w.kept_EG, 0.0, -np.log(_HEIGHT) - 2 * np.log1p(w.rise_G / _HEIGHT)).sum(axis=1)
    over_NE = np.maximum(w.edges_E4[:, 0] - vertex_N[:, None], vertex_N[:, None] - w.edges_E4[:, 3])
    log_NKEF = -0.5 * (log_variance + np.log(s1) + syy - sy**2 / s1) + (w.log_prior_E + dropped_E)[:, None]
    log_NKEF = log_NKEF - 0.5 * (np.maximum(over_NE, 0.0) / _OVERSHOOT)[:, None, :, None] ** 2
    # The level is gone; what is left is normal in the curvature.
    left_NKEF, gain_NKEF = svv - sv**2 / s1, syv - sv * sy / s1
    prior_H = 1 / (_CURVATURE_SPREAD * common_H) ** 2
    precision = left_NKEF[..., number_H] + prior_H
    curvature = (gain_NKEF[..., number_H] + prior_H * common_H) / precision
    # A valley opens upwards: a mean below 0 gains nothing over a curvature of 0.
    log = 0.5 * (precision * np.maximum(curvature, 0.0) ** 2 - np.log(precision))
    log += log_NKEF[..., number_H] + 0.5 * (np.log(prior_H / _LEVEL_SD**2) - prior_H * common_H**2)
    return _Cells(log, curvature, precision, (s1[..., number_H], sy[..., number_H], sv[..., number_H]))


def _log_sum(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    most = values.max(axis=axes, keepdims=True)
    return np.log(np.exp(values - most).sum(axis=axes)) + most.squeeze(axis=axes)


@dataclass(frozen=True)
class _Common:
    """What the curves of a rule share, as weighed by all of them: noise, curvature and shape."""

    factor_F: np.ndarray
    number_H: np.ndarray
    common_H: np.ndarray
    log_KH: np.ndarray
    """Log posterior of each common shape, factor and curvature."""
    ranges: tuple[tuple[float, float], ...]
    """Where each curve's vertex may lie."""

    @property
    def factor(self) -> float:
        """Factor on the noise, above its posterior mean: what the model's error takes up the noise lacks.
        """
        weight_H = np.exp(self.log_KH - self.log_KH.max()).sum(axis=0)
        log_H = np.log(self.factor_F[self.number_H])
        mean = np.average(log_H, weights=weight_H)
        return float(np.exp(mean + _CAUTION * np.sqrt(np.average((log_H - mean) ** 2, weights=weight_H))))


def _alike() -> np.ndarray:
    """Log probability of a curve's shape (columns) where that of its rule (rows) is known."""
    apart = _SHAPES["asymmetry"][:, None] - _SHAPES["asymmetry"]
    is_other = _SHAPES["kind"][:, None] != _SHAPES["kind"]
    alike = np.exp(-0.5 * (apart / _SHAPE_SPREAD) ** 2) * np.where(is_other, _OTHER_KIND, 1.0)
    return np.log(alike / alike.sum(axis=1, keepdims=True))


def _vertices(w: _Window, factor_1: np.ndarray, common_H: np.ndarray) -> np.ndarray:
    """Vertices over all that is allowed, dense about the likeliest: there little noise makes a sharp peak."""
    coarse_N = np.linspace(w.lowest, w.highest, max(12, math.ceil((w.highest - w.lowest) / _COARSE)))
    cells = _weigh(w, coarse_N, factor_1, np.zeros(len(common_H), int), common_H)
    middle = coarse_N[int(np.argmax(_log_sum(cells.log_NKEH, (1, 2, 3))))]
    dense = middle + np.sinh(np.linspace(-3.0, 3.0, 31)) * _COARSE / 10
    found = np.unique(np.concatenate([coarse_N, dense]))
    return found[(found >= w.lowest) & (found <= w.highest)]


def _common(windows: Sequence[_Window], factor_F: np.ndarray, log_prior_F: np.ndarray) -> _Common:
    """Weigh noise, common curvature and common shape by all curves."""
    number_H = np.repeat(np.arange(len(factor_F)), len(_CURVATURES))
    common_H = np.tile(_CURVATURES, len(factor_F))
    tables, vertices = [], []
    log_KH = np.log(_SHAPES["share"] / _SHAPES["share"].sum())[:, None] + log_prior_F[number_H]
    for w in windows:
        vertices.append(_vertices(w, factor_F[-1:], common_H[: len(_CURVATURES)]))
        cells = _weigh(w, vertices[-1], factor_F, number_H, common_H)
        share_N = np.gradient(vertices[-1]) / (w.highest - w.lowest)
        tables.append(_log_sum(cells.log_NKEH, (2,)) + np.log(share_N)[:, None, None])  # N × K × H
        log_KH = log_KH + _log_sum(_alike()[:, :, None] + _log_sum(tables[-1], (0,)), (1,))
    ranges = []
    for vertex_N, table in zip(vertices, tables, strict=True):
        own_KH = _log_sum(_alike()[:, :, None] + log_KH[:, None], (0,))
        log_N = _log_sum(table - _log_sum(table, (0, 1)) + own_KH, (1, 2))
        likely = np.flatnonzero(log_N > log_N.max() + _LEAST_LIKELY)
        ends = vertex_N[max(likely[0] - 1, 0)], vertex_N[min(likely[-1] + 1, len(vertex_N) - 1)]
        ranges.append((float(ends[0]), float(ends[1])))
    return _Common(factor_F, number_H, common_H, log_KH, tuple(ranges))


def fit_valleys(
    curves: Sequence[LossCurve], noise: Noise, generator: np.random.Generator
) -> list[Particles | None]:
    """What each curve of a rule may be.

    Args:
        curves: of one rule, one a scale.
        noise: of a run; a spread of factors on it is weighed, as wide as its degrees of freedom leave it.
        generator: of the draws.

    Returns:
        Draws of each curve; None where nothing was tuned or no run is finite.
    """
    tuned = [len(c.x_G) > 1 and bool(np.isfinite(c.mean_G).any()) for c in curves]
    windows = [_Window.of(c, noise) for c, is_tuned in zip(curves, tuned, strict=True) if is_tuned]
    if not windows:
        return [None] * len(curves)
    factor_F, log_prior_F = noise.factors()
    common = _common(windows, factor_F, log_prior_F)
    weight_KH = np.exp(common.log_KH - common.log_KH.max())
    chosen = np.unique(_systematic(weight_KH.ravel(), _HYPER, generator))
    drawn = iter(
        [_draw(w, common, chosen, r, generator) for w, r in zip(windows, common.ranges, strict=True)]
    )
    return [next(drawn) if is_tuned else None for is_tuned in tuned]


def noise_of_residuals(curves: Sequence[LossCurve]) -> tuple[float, int]:
    """Noise of a run, nat, where no cell has two: what the valleys leave over, and its degrees of freedom.

    The model's error grows with the rise, so that points far up say little of the noise.
    """
    usable = [c for c in curves if len(window(c)) > 1] if curves else []
    if not usable:
        return _USUAL_NOISE, 1
    unit = Noise(_USUAL_NOISE, 1, "lack of fit")
    factor_F = np.geomspace(0.05, 20.0, 12)
    # Usual noise, to within a factor of three: two or three points say nothing of it.
    log_prior_F = -0.5 * (np.log(factor_F) / math.log(3.0)) ** 2
    common = _common([_Window.of(c, unit) for c in usable], factor_F, log_prior_F)
    points = sum(int((c.mean_G[window(c)] <= c.mean_G.min() + _NEAR).sum()) for c in usable)
    return _USUAL_NOISE * common.factor, max(1, points - 3 * len(usable))


def _draw(
    w: _Window,
    common: _Common,
    chosen: np.ndarray,
    between: tuple[float, float],
    generator: np.random.Generator,
) -> Particles:
    """Draws of one curve, from finer and finer vertices."""
    low, high = max(between[0], w.lowest), min(between[1], w.highest)
    shape_H, chosen_H = np.unravel_index(chosen, common.log_KH.shape)
    weight_H = common.log_KH.ravel()[chosen] - _log_sum(common.log_KH.ravel()[chosen], (0,))
    alike_KH = _alike()[shape_H].T
    for _ in range(4):
        vertex_N = np.linspace(low, high, _FINE)
        cells = _weigh(w, vertex_N, common.factor_F, common.number_H[chosen_H], common.common_H[chosen_H])
        log = cells.log_NKEH + alike_KH[:, None, :]
        log = log - _log_sum(log, (0, 1, 2)) + weight_H
        p_N = np.exp(_log_sum(log, (1, 2, 3)))
        p_N /= p_N.sum()
        step = vertex_N[1] - vertex_N[0]
        mean = float(p_N @ vertex_N)
        sd = math.sqrt(float(p_N @ (vertex_N - mean) ** 2))
        if sd > 1.5 * step or high - low < 1e-3:
            break
        reach = max(8 * sd, 2 * step)
        low, high = max(low, mean - reach), min(high, mean + reach)
    likely_N = p_N > math.exp(_LEAST_LIKELY) * p_N.max()
    q_N = (1 - _MIXED) * p_N + _MIXED * likely_N / likely_N.sum()
    number_P = _systematic(q_N, PARTICLES, generator)
    weight_P = p_N[number_P] / q_N[number_P]
    cell_P = np.empty(PARTICLES, int)
    flat = np.exp(log - log.max(axis=(1, 2, 3), keepdims=True)).reshape(len(vertex_N), -1)
    for n in np.unique(number_P):
        here = number_P == n
        total = np.cumsum(flat[n])
        cell_P[here] = np.searchsorted(total, generator.uniform(0, total[-1], here.sum()))
    cell_P = np.minimum(cell_P, flat.shape[1] - 1)
    at = (number_P, *np.unravel_index(cell_P, log.shape[1:]))
    vertex_P = vertex_N[number_P] + step * generator.uniform(-0.5, 0.5, PARTICLES)
    vertex_P = np.clip(vertex_P, w.lowest, w.highest)
    precision, product, valleys = (np.broadcast_to(part, log.shape)[at] for part in cells.level)
    # Curvature by its own precision, then the level given it.
    curvature_P = cells.curvature_NKEH[at]
    shock_P = generator.standard_normal(PARTICLES) / np.sqrt(cells.precision_NKEH[at])
    drawn_P = np.maximum(curvature_P + shock_P, np.maximum(0.05 * curvature_P, _LEAST_CURVATURE))
    level_P = (product - valleys * drawn_P + np.sqrt(precision) * generator.standard_normal(PARTICLES)) / precision
    edge_P4 = w.edges_E4[at[2]]
    share_P2 = generator.uniform(size=(PARTICLES, 2))
    with np.errstate(invalid="ignore"):
        low_P, high_P = (
            np.where(
                np.isfinite(edge_P4[:, k]), edge_P4[:, k] + share * (edge_P4[:, k + 1] - edge_P4[:, k]), none
            )
            for k, share, none in ((0, share_P2[:, 0], -np.inf), (2, share_P2[:, 1], np.inf))
        )
    return Particles(weight_P / weight_P.sum(), vertex_P, at[1], drawn_P, w.floor + level_P, low_P, high_P)


def _systematic(weight_N: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Numbers drawn in proportion to weights, evenly spread."""
    total = np.cumsum(weight_N)
    at = (generator.uniform() + np.arange(count)) / count * total[-1]
    return np.minimum(np.searchsorted(total, at), len(weight_N) - 1)
