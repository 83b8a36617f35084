"""The command `predict`: laws of several scales, and compute-optimal sizes."""

import json

import numpy as np
import pandas as pd
import pytest


def test_a_law_of_width_and_depth_from_a_file(valleys, tmp_path, outcome):
    table = valleys(grid=range(-13, -4), depth=[2, 4, 8])
    rows = pd.read_csv(table)
    away = np.log2(rows["lr"] * 2 * rows["width"] * rows["depth"] ** 0.5)
    rows.assign(loss=2 + 0.05 * away**2).to_csv(table, index=False)
    arguments = ("predict", table, "--scale", "width,depth")
    code, out, err = outcome(*arguments, "--at", "width=512,depth=16")
    assert code == 0, err
    assert "best learning rate ∝ width^-1.0" in out and "depth^-0.5" in out
    assert "9 of 9 cells have an optimum inside their grid" in out
    assert "at width=512,depth=16: learning rate 2^-12." in out or "2^-11.9" in out
    code, out, err = outcome(*arguments, "--json")
    assert code == 0 and [e["scale"] for e in json.loads(out)[0]["exponents"]] == ["width", "depth"], err
    code, out, err = outcome(*arguments, "--figures")
    assert code == 0 and "figure: " in out and (tmp_path / "figures" / "law.svg").exists(), err
    for wrong, sentence in (
        (
            ("predict", table, "--scale", "width", "--best-over", "depth", "--figures"),
            "figure: contours need two scales, and there is width alone",
        ),
        ((*arguments, "--at", "width=big"), "at width=big is not NAME=NUMBER,NAME=NUMBER"),
        ((*arguments, "--keep"), "keep needs a prediction along one scale"),
    ):
        code, _, err = outcome(*wrong)
        assert code == 2 and sentence in err


def test_compute_optimal_sizes_from_a_file(tmp_path, outcome):
    n, d = (x.ravel() for x in np.meshgrid(10.0 ** np.arange(7, 11), 10.0 ** np.arange(9, 13)))
    table = pd.DataFrame({"N": n, "D": d, "loss": 1.7 + 400 * n**-0.34 + 400 * d**-0.28})
    table.to_csv(tmp_path / "t.csv", index=False)
    arguments = ("predict", tmp_path / "t.csv", "--sizes", "--columns", "params=N", "tokens=D")
    code, out, err = outcome(*arguments, "--at", "1e21")
    assert code == 0 and "N* ∝ C^0.45" in out and "at 1e+21 FLOP: N " in out, err
    code, out, _ = outcome(*arguments, "--json")
    assert code == 0 and json.loads(out)["exponents"] == pytest.approx([0.34, 0.28], abs=0.01)
    for wrong, sentence in (
        (
            ("predict", tmp_path / "t.csv", "--sizes"),
            "has no column 'params', 'tokens'; it has N, D, loss; --col",
        ),
        ((*arguments, "--at", "big"), "at 'big' is not a budget in FLOP"),
        ((*arguments, "--keep"), "sizes cannot be combined with figures or keep"),
    ):
        code, _, err = outcome(*wrong)
        assert code == 2 and sentence in err
