"""The figure of a search."""

from pathlib import Path

import numpy as np
import pandas as pd

from mup_tpu import plots
from mup_tpu.analysis.rows import ranked, varied
from mup_tpu.store import load_runs

RESULTS = Path(__file__).parents[2] / "results"


def test_a_search_has_a_panel_for_each_hyperparameter_it_varied_and_marks_the_best():
    runs = load_runs(RESULTS / "tune_small")
    figure = plots.search_figure(ranked(runs), varied(runs))
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels[:3] == ["learning rate", "warm-up (share of the steps, or steps)", "init σ"]
    assert len(labels) == 6
    drawn = {line.get_marker(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert drawn["*"][0] == drawn["o"].min()


def test_trials_that_were_stopped_or_diverged_are_marked_as_such():
    trials = pd.DataFrame(
        {"status": ["finished", "finished", "stopped", "diverged"], "steps_done": [9, 9, 3, 1],
         "loss": [2.0, 2.5, 1.9, np.inf], "init_std": [0.1, 0.2, 0.3, 0.4]}
    )  # fmt: skip
    figure = plots.search_figure(trials, ["init_std"])
    (ax,) = figure.axes
    drawn = {line.get_marker(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert drawn["*"] == [[0.1, 2.0]] and drawn["s"] == [[0.3, 1.9]]
    assert drawn["x"][0][0] == 0.4 and 2.5 < drawn["x"][0][1] < ax.get_ylim()[1]
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert key == ["best", "finished (2)", "stopped early, loss at its last step (1)", "diverged (1)"]
