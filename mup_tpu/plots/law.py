"""Power laws in several scales: the optimum over two of them, as contours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from mup_tpu.analysis.power_law import PowerLaw
from mup_tpu.errors import TableError
from mup_tpu.plots import names, style, ticks
from mup_tpu.plots.style import INK, styled


@styled
def law_figure(laws: Sequence[PowerLaw]) -> Figure:
    """Optimum of each rule over its first two scales as contours, and measured optima in the same colours.

    Further scales are at their geometric means; measured optima are moved there along the law.

    Raises:
        TableError: the law has one scale.
    """
    if len(laws[0].scales) < 2:
        raise TableError(f"figure: contours need two scales, and there is {laws[0].scales[0]} alone")
    x_N = np.concatenate([_measured(law)[1] for law in laws])
    colors = Normalize(math.floor(x_N.min()), math.ceil(x_N.max()))
    axes = style.panels(len(laws), 5.4, 4.4)
    for ax, law in zip(axes, laws, strict=True):
        _draw(ax, law, colors)
    style.label_rows(axes, names.title(laws[0].scales[1]))
    shown = matplotlib.cm.ScalarMappable(colors, "viridis")
    bar = style.figure_of(axes).colorbar(shown, ax=axes, pad=0.02, aspect=25)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: names.power(x)))
    bar.set_label(f"best {names.title(laws[0].hyperparameter)}")
    several = ", mean of the cells there" if len(laws[0].scales) > 2 else ""
    return style.with_key(axes, [style.mark("o", f"measured optimum{several}", mfc="none")])


def _measured(law: PowerLaw) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of the first two scales, N × 2, and means of the optima (log2) measured there, N.

    Optima are moved to the geometric means of all other scales.
    """
    sizes_SA, x_S = 2**law.sizes_SA, np.array([e.optimum.x for e in law.estimates])
    moved_S = x_S + law.trend(_at_means(law, sizes_SA[:, :2])) - law.trend(sizes_SA)
    places_N2, place_S = np.unique(sizes_SA[:, :2], axis=0, return_inverse=True)
    return places_N2, np.bincount(place_S.ravel(), moved_S) / np.bincount(place_S.ravel())


def _at_means(law: PowerLaw, sizes_N2: np.ndarray) -> np.ndarray:
    """Sizes of all scales; beyond the first two, geometric means."""
    others = np.exp2(law.sizes_SA[:, 2:].mean(axis=0))
    return np.column_stack([sizes_N2, np.tile(others, (len(sizes_N2), 1))])


def _draw(ax: Axes, law: PowerLaw, colors: Normalize) -> None:
    low_A, high_A = law.sizes_SA.min(axis=0)[:2], law.sizes_SA.max(axis=0)[:2]
    margin_A = 0.06 * (high_A - low_A)
    first, second = np.exp2(np.linspace(low_A - margin_A, high_A + margin_A, 40)).T
    across, up = np.meshgrid(first, second)
    x = law.trend(_at_means(law, np.column_stack([across.ravel(), up.ravel()]))).reshape(across.shape)
    levels = np.arange(math.floor(x.min()), math.ceil(x.max()) + 0.5, 0.5)
    ax.contourf(across, up, x, levels, cmap="viridis", norm=colors, alpha=0.9)
    lines = ax.contour(across, up, x, levels[::2], colors="white", linewidths=0.9, linestyles="solid")
    ax.clabel(lines, fmt=names.power, fontsize=9)
    places_N2, x_N = _measured(law)
    across_N, up_N = places_N2.T
    ax.scatter(
        across_N, up_N, c=x_N, cmap="viridis", norm=colors, edgecolors=INK, linewidths=0.9, s=38, zorder=3
    )
    for scaled, axis, name in ((ax.set_xscale, ax.xaxis, 0), (ax.set_yscale, ax.yaxis, 1)):
        scaled("log")
        ticks.size_axis(axis, *((first, second)[name][[0, -1]]))
        axis.set_minor_locator(NullLocator())
    ax.grid(False)
    ax.set_xlabel(names.title(law.scales[0]))
    exponents = " · ".join(f"{names.plain(e.scale)}$^{{{names.signed(e.value)}}}$" for e in law.exponents)
    ax.set_title(f"{names.label(law.compared)}: ∝ {exponents}")
