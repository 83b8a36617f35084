"""Figures of coordinate checks."""

import pandas as pd
import pytest

from mup_tpu import plots


def test_coordinate_check_figure_names_each_slope():
    table = pd.DataFrame(
        [
            {
                "parametrization": p,
                "width": w,
                "seed": 0,
                "step": 1,
                "layer": layer,
                "quantity": q,
                "rms": w**0.5,
            }
            for p in ("mup", "sp")
            for w in (64, 128, 256)
            for layer in ("embedding", "logits")
            for q in ("activation", "update")
        ]
    )
    figure = plots.coordinate_check_figure(table)
    labels = [text.get_text() for ax in figure.axes for text in ax.get_legend().get_texts()]
    assert labels == ["embedding: +0.50", "logits: +0.50"] * 4


def test_coordinate_check_figure_along_the_depth_has_a_row_for_linearization():
    table = pd.DataFrame(
        [
            {
                "parametrization": p, "depth": d, "seed": s, "step": 1, "layer": layer, "quantity": q,
                "rms": d**e,
            }
            for p in ("mup", "sp")
            for d in (2, 4, 8)
            for s in (0, 1)
            for layer, q, e in (
                ("block", "activation", -0.5), ("block", "update", 0.25), ("block", "linearization", -1.0)
            )
        ]
    )  # fmt: skip
    figure = plots.coordinate_check_figure(table)
    assert [ax.get_title() for ax in figure.axes[1::2]] == [
        "SP: activation size", "SP: update size", "SP: distance from linearization"
    ]  # fmt: skip
    labels = [text.get_text() for ax in figure.axes[1::2] for text in ax.get_legend().get_texts()]
    assert labels == ["block: -0.50", "block: +0.25", "block: -1.00"]
    assert figure.axes[-1].get_xlabel() == "depth (layers)"


@pytest.mark.parametrize("names", [("sp", "mup"), ("completep", "mup", "sp"), ("mup",)])
def test_mup_comes_first_and_sp_second_whatever_else_is_checked(names):
    figure = plots.coordinate_check_figure(measured(names, ["logits"]))
    titles = [ax.get_title().partition(":")[0] for ax in figure.axes[: len(names)]]
    assert titles == ["μP", "SP", "CompleteP"][: len(names)]


def test_lines_of_a_coordinate_check_can_be_told_apart():
    figure = plots.coordinate_check_figure(measured(("mup",), [f"layer {i}" for i in range(40)]))
    lines = figure.axes[0].get_lines()
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(lines) == len(looks) == 40


def measured(names, layers):
    return pd.DataFrame(
        [
            {"parametrization": p, "width": w, "seed": 0, "step": 1, "layer": layer, "quantity": q, "rms": w}
            for p in names
            for w in (64, 128)
            for layer in layers
            for q in ("activation", "update")
        ]
    )
