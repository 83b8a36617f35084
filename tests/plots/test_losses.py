"""Losses at the optima and on the way, with the laws through them."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots
from mup_tpu.analysis import analyze, check_table
from mup_tpu.analysis.scaling_law import fit_scaling_law


def test_scaling_law_is_drawn_over_the_parameters_that_it_is_a_function_of():
    rows = pd.DataFrame(
        [
            {
                "width": w,
                "lr": 2.0**x,
                "loss": 2.0 + 20 * (12 * w**2) ** -0.3 + 0.05 * (x + 7) ** 2,
                "params_non_embedding": 12 * w**2,
                "tokens": 1000,
            }
            for w in (32, 64, 128, 256, 512)
            for x in range(-10, -3)
        ]
    )
    result = (analysis := analyze(check_table(rows))).results[0]
    assert result.law.law.exponents[0] == pytest.approx(0.3, rel=0.01)
    ax = plots.best_loss_figure(analysis).axes[1]
    points, law = ax.get_lines()
    assert points.get_xdata().tolist() == [12 * w**2 for w in (32, 64, 128, 256, 512)]
    drawn = [result.law.law.loss(n) for n in law.get_xdata()]
    assert len(drawn) > 10 and law.get_ydata() == pytest.approx(drawn)
    ax.figure.canvas.draw()
    (compute,) = ax.child_axes
    assert np.array(compute.get_xlim()) == pytest.approx(6000 * np.array(ax.get_xlim()), rel=1e-3)
    assert "0.30" in law.get_label()


def test_scaling_law_figure_marks_what_the_law_has_not_seen():
    sizes = 2.0 ** np.arange(14, 22)
    losses = 2.0 + 30 * sizes**-0.3
    law = fit_scaling_law(losses[:-1], sizes[:-1])
    lines = {
        line.get_label(): line for line in plots.scaling_law_figure(law, sizes, losses, 1).axes[0].get_lines()
    }
    assert lines["fitted"].get_xdata().tolist() == sizes[:-1].tolist()
    assert lines["held out"].get_ydata().tolist() == [losses[-1]]
