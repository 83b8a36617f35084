"""Numbers that a plan takes from a table of one's own, and plans in folders."""

import json
import math
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table
from mup_tpu.analysis.design import REACH
from mup_tpu.analysis.planned import FILE, Assumed, Planned, _loss
from mup_tpu.analysis.scaling_law import expected_loss
from mup_tpu.errors import StoreError
from mup_tpu.files import sealed

CURVATURE = 0.08


def test_as_many_runs_as_a_table_has_give_the_error_that_its_optima_have():
    noise = np.random.default_rng(0).normal
    rows = [
        {"width": w, "lr": 2.0**x, "seed": s, "loss": 2 + CURVATURE / 2 * (x + 7) ** 2 + noise(0, 0.01)}
        for w in (64, 128, 256)
        for x in range(-10, -3)
        for s in range(4)
    ]  # fmt: skip
    analysis = analyze(check_table(pd.DataFrame(rows)))
    assumed = Assumed.measured(analysis, "mup")
    runs = 4 * (2 * int(REACH) + 1)
    errors = [optimum.se for optimum in analysis.results[0].optima]
    assert math.sqrt(assumed.error(runs)) == pytest.approx(np.median(errors), rel=0.2)
    assert assumed.error(runs / 4) == pytest.approx(4 * assumed.error(runs))
    assert assumed.curvature == pytest.approx(CURVATURE, rel=0.3)
    assert assumed.regret(0.5) == pytest.approx(assumed.curvature / 4)


def test_the_loss_of_cells_on_a_ladder_is_that_of_their_sizes():
    losses, cells = [3.0, 2.8, 2.65, 2.54], [{"width": 32.0 * 2**k} for k in range(4)]
    plan = Planned.load(str(Path(__file__).parents[2] / "results" / "prediction" / "reach_width"))
    plan = replace(plan, cells=tuple(({}, sizes) for sizes in cells))
    known = {k: SimpleNamespace(optimum=SimpleNamespace(loss=loss)) for k, loss in enumerate(losses)}
    expected = expected_loss(np.array(losses), np.array([of["width"] for of in cells]), 512.0)
    assert astuple(_loss(plan, known, {"width": 512.0})) == pytest.approx(astuple(expected))


def test_runs_move_what_published_laws_say():
    cells = tuple(({"width": w}, {"width": float(w)}) for w in (64, 128, 256))
    planned = Planned(("lr",), "parametrization", ("width",), {"width": 4096.0}, cells)
    measured = {k: SimpleNamespace(optimum=SimpleNamespace(mean=-7.0, se=0.1)) for k in range(3)}
    alone = planned.trend("lr", measured).optimum([4096.0])
    errors, moved = (0.01, 1.0, 30.0), []
    for error in errors:
        told = replace(planned, published={"lr": (alone.mean - 2, error)})
        moved.append((told.trend("lr", measured).optimum([4096.0]).mean - alone.mean) / -2)
    assert moved[0] > 0.6 > moved[1] > 0.05 > abs(moved[2])
    assert told.trend("wd", measured).optimum([4096.0]).mean == alone.mean


def test_no_damaged_plan_is_read_as_another_one(tmp_path):
    """Each bit of each twelfth byte flipped, lines left out, and contents with a checksum of their own."""
    stored = Path(__file__).parents[2] / "results" / "prediction" / "reach_width"
    whole, file = (stored / FILE).read_bytes(), tmp_path / FILE
    plan, lines, values = Planned.load(str(stored)), whole.splitlines(keepends=True), json.loads(whole)
    damaged = [b"", b"[" * 10_000, b"3", *(b"".join(lines[:k] + lines[k + 1 :]) for k in range(len(lines)))]
    for at in range(0, len(whole), 12):
        flipped = [bytes([whole[at] ^ 1 << bit]) for bit in range(8)]
        damaged += [whole[:at], *(whole[:at] + byte + whole[at + 1 :] for byte in flipped)]
    for change in (
        {"target": {"width": -1.0}}, {"target": {"width": math.inf}}, {"target": {}}, {"tuned": []},
        {"cells": []}, {"cells": [[{}, {}]]}, {"cells": [3]}, {"fix": {"depth": 0.0}},
        {"fix": {"width": math.nan}}, {"published": {"lr": [-7.0, 0.0]}}, {"published": {"lr": -7.0}},
        {"published": {"lr": [5000.0, 1.0]}}, {"published": {"lr": [-7.0, 1e300]}},
        {"follows": []}, {"rule": None, "values": 3},
    ):  # fmt: skip
        damaged.append(json.dumps(sealed(values | change)).encode())
    refused = 0
    for content in damaged:
        file.write_bytes(content)
        try:
            assert Planned.load(str(tmp_path)) == plan, "a line's end or a space was changed"
        except StoreError as error:
            assert "plan.json cannot be read: " in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 0.9 * len(damaged) > 300
