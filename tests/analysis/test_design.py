"""Which runs would settle a verdict: of sweeps whose truth is known, and of costs that are."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, analyze, check_table
from mup_tpu.analysis.design import Distance, new_scale
from mup_tpu.analysis.optimum import estimates
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import run_cost
from mup_tpu.errors import TableError

OCTAVES = range(-12, -3)


def rows_at(width, vertex, cells, sigma, generator, curvature=0.04, cost=None):
    """Runs of one width: cells are x → seeds to make."""
    timed = {"wall_time_s": cost(width)} if cost else {}
    return [
        {
            "width": width, "lr": 2.0**x, "seed": seed, **timed,
            "loss": 2.5 + curvature * (x - vertex) ** 2 + sigma * generator.standard_normal(),
        }
        for x, seeds in cells.items()
        for seed in seeds
    ]  # fmt: skip


def sweep_of(vertices, sigma=0.01, seeds=2, cost=None, generator=None):
    """Widths 64, 128 … with their optima, on an octave grid."""
    generator = generator or np.random.default_rng(0)
    grid = {x: range(seeds) for x in OCTAVES}
    each = (rows_at(64 * 2**k, x, grid, sigma, generator, cost=cost) for k, x in enumerate(vertices))
    return pd.DataFrame(itertools.chain.from_iterable(each))


def batch_of(frame):
    return analyze(check_table(frame)).results[0].next_batch


FEW, BOTH = Reason.of("few scales", needed=3, known=2), "extend grids and add a scale"


@pytest.mark.parametrize(
    ("vertices", "sigma", "lost", "missing", "reason", "cells"),
    [
        # What is settled needs no runs.
        ([-8] * 4, 0.001, "", "", None, {}),
        # An optimum at an edge comes first.
        ([-8, -10, -12.5], 0.01, "", "", Reason.of("extend grids", scales=[256]), {256: [-14, -13]}),
        # Both are needed for a verdict; the third scale is looked at where the other's optimum lies.
        ([-8, -12.5], 0.01, "", "", Reason.of(BOTH, scales=[128], needed=3, known=2),
         {128: [-14, -13], 256: [-10, -9, -8, -7, -6]}),
        ([-2, -8], 0.01, "", "", Reason.of(BOTH, scales=[64], needed=3, known=2),
         {64: [-3, -2], 256: [-10, -9, -8, -7, -6]}),
        # Nobody knows yet where to look at a third.
        ([-13, -14], 0.01, "", "", Reason.of("extend grids", scales=[64, 128]),
         {64: [-14, -13], 128: [-14, -13]}),
        # A third scale gets a pack around where its optimum is expected.
        ([-7, -8], 0.001, "", "", FEW, {256: [-11, -10, -9, -8, -7]}),
        # Seeds tell nothing of where between two learning rates runs begin to diverge.
        ([-8] * 3, 0.01, "width >= 128 and lr > 2**-8", "", Reason.of("holes", scales=[128, 256]),
         {128: [-7.5], 256: [-7.5]}),
        ([-8] * 3, 0.03, "", "width == 256 and lr == 2**-7", Reason.of("holes", scales=[256]), {256: [-7]}),
    ],
)  # fmt: skip
def test_next_runs_follow_from_the_state_of_each_scale(vertices, sigma, lost, missing, reason, cells):
    frame = sweep_of(vertices, sigma)
    frame.loc[frame.eval(lost or "seed < 0"), "loss"] = np.nan
    batch = batch_of(frame[~frame.eval(missing or "seed < 0")])
    if reason is None:
        assert batch is None
        return
    assert batch.reason == reason and math.isnan(batch.to_verdict)
    found = [(cell.scale, cell.x) for cell in batch.cells]
    assert found == [(scale, x) for scale, values in cells.items() for x in values]


def test_where_scales_lie_too_close_another_is_asked_for():
    frame = sweep_of([-8.0, -7.977, -7.953], sigma=0.0005, seeds=4)
    batch = batch_of(frame.assign(width=frame["width"].map({64: 64, 128: 70, 256: 77})))
    assert (batch.reason.code, batch.reason["count"]) == ("another scale", 4)
    assert {cell.scale for cell in batch.cells} == {154}


def test_where_the_drift_is_known_the_next_scale_s_runs_lie_on_its_line():
    """Optima at −7, −8, −9, −10: −11 is expected at width 1024."""
    result = analyze(check_table(sweep_of([-7, -8, -9, -10], sigma=0.001))).results[0]
    cells = new_scale(estimates(result.curves, result.noise, np.random.default_rng(0)), result.drift)
    assert {cell.scale for cell in cells} == {1024} and np.median([cell.x for cell in cells]) == -11


def test_what_is_planned_is_looked_at_before_seeds_are_bought():
    table = check_table(sweep_of([-8, -8, -8], sigma=0.03))
    first = analyze(replace(table, planned=(64, 128, 256, 1024))).results[0].next_batch
    assert {cell.scale for cell in first.cells} == {1024} and first.reason == Reason.of(
        "planned scale", at=1024
    )
    between = analyze(replace(table, planned=(64, 96, 128, 256))).results[0].next_batch
    assert {cell.scale for cell in between.cells} == {96}, "a width may be added between the others"
    scattered = check_table(sweep_of([-8.0, -7.82, -7.64], sigma=0.02, seeds=4))
    all_run = analyze(replace(scattered, planned=(64, 128, 256))).results[0].next_batch
    assert {cell.scale for cell in all_run.cells} <= {64, 128, 256}, "no other width can be had"


def test_noise_is_met_by_seeds_beside_the_optima_that_decide():
    frame = sweep_of([-8, -8, -8, -8], sigma=0.03)
    frame.loc[(frame["width"] == 512) & (frame["lr"] == 2.0**-6), "loss"] = np.nan
    batch = batch_of(frame)
    assert (batch.reason.code, batch.reason["scales"][0]) == ("wide interval", 64)
    analysis = analyze(check_table(frame)).results[0]
    optima = {o.scale: o.x for o in analysis.optima}
    for cell in batch.cells:
        assert abs(cell.x - optima[cell.scale]) <= 2.3 and 2 * cell.x == round(2 * cell.x)
        assert (cell.scale, cell.x) != (512, -6), "where runs diverge, none is bought"
        assert cell.seeds == cell.runs + 2 * (cell.x == round(cell.x))
    middle = sum(c.runs for c in batch.cells if c.scale in (128, 256))
    ends = sum(c.runs for c in batch.cells if c.scale in (64, 512))
    assert ends > middle, "the outer widths tell most of a slope"
    assert batch.cost < batch.to_verdict


def test_an_optimum_that_moves_once_is_settled_by_its_regret_alone():
    """Its scatter about a power holds α open whatever is bought; the ends tell what staying costs."""
    frame = sweep_of([-8, -6.8, -6.8, -6.9], sigma=0.04)
    batch = batch_of(frame)
    assert batch.reason == Reason.of("wide interval", quantity="regret", scales=[64, 512])
    assert batch.cost <= batch.to_verdict


def a_regret_read_beside_one_run():
    """Half-octave grids; beside the narrowest width's optimum the widest has one run, 0.008 nat off."""
    generator, rows = np.random.default_rng(0), []
    for width, vertex, seeds in ((64, -5.5, 8), (128, -5.45, 3), (256, -5.3, 3), (512, -5.27, 5)):
        wide = {x / 2: range(seeds) for x in range(-15, -6)}
        if width == 512:
            wide |= {x: range(1) for x in (-6.5, -5.5, -4.5)}
        rows += rows_at(width, vertex, wide, 0.013, generator, curvature=0.035, cost=lambda w: w / 64)
    frame = pd.DataFrame(rows)
    one = (frame["width"] == 512) & (frame["lr"] == 2.0**-5.5)
    frame.loc[one, "loss"] = 2.5 + 0.035 * 0.23**2 + 0.008
    return frame


def test_seeds_beside_the_largest_scale_s_optimum_settle_a_regret():
    """However well α is known, what staying costs is read where the optima of both ends lie."""
    frame = a_regret_read_beside_one_run()
    result = analyze(check_table(frame), delta=0.3).results[0]
    assert result.headline_regret.high > 0.01 > result.headline_regret.value
    generator = np.random.default_rng(1)
    for _ in range(12):
        assert result.verdict.decision == "OPEN"
        batch = result.next_batch
        assert (batch.reason.code, batch.reason["quantity"]) == ("wide interval", "regret")
        assert {c.scale for c in batch.cells} <= {64, 512}
        assert batch.cost <= batch.to_verdict * (1 + 1e-9)
        for cell in batch.cells:
            seeds = {cell.x: range(cell.seeds - cell.runs, cell.seeds)}
            rows = rows_at(cell.scale, -5.27, seeds, 0.012, generator, curvature=0.035, cost=lambda w: w / 64)
            frame = pd.concat([frame, pd.DataFrame(rows)])
        result = analyze(check_table(frame), delta=0.3).results[0]
        if result.verdict.decision == "TRANSFERS":
            return
    raise AssertionError(result)


def test_what_is_bought_has_no_unit():
    frame = sweep_of([-8, -8, -8], sigma=0.03)
    tenfold = check_table(frame.assign(loss=10 * frame["loss"]))
    assert analyze(tenfold, epsilon=0.1).results[0].next_batch.cells == batch_of(frame).cells


def test_runs_are_bought_where_they_are_cheap():
    cheap = batch_of(sweep_of([-8] * 4, sigma=0.05, cost=lambda width: 1.0))
    steep = batch_of(sweep_of([-8] * 4, sigma=0.05, cost=lambda width: width**3.0))
    share = [
        sum(c.runs for c in b.cells if c.scale == 512) / sum(c.runs for c in b.cells) for b in (cheap, steep)
    ]
    assert share[0] > share[1]


def test_what_the_valley_s_form_leaves_open_is_met_by_values_in_between():
    """Seeds of values two octaves apart say nothing more of where between them the optimum lies."""
    frame = sweep_of([-8.2, -8.0, -7.9], sigma=0.001, seeds=6)
    frame = frame[np.log2(frame["lr"]) % 2 == 0]
    batch = batch_of(frame)
    assert batch.reason.code == "wide interval"
    new = [cell for cell in batch.cells if cell.x % 2 != 0]
    assert sum(cell.runs for cell in new) > 0.7 * sum(cell.runs for cell in batch.cells)


@pytest.mark.parametrize(
    ("variances", "nearer"),
    [
        ((0.1, 0.001, 0.1), 1),
        ((0.05, 0.1, 0.05), 2),
        ((0.05, 0.1, 0.1), 4 / 3),
        ((0.1, 0.1, 0.05, 0.1), 0.05 / 0.0195),
    ],
)
def test_runs_at_the_ends_of_the_scales_narrow_a_slope(variances, nearer):
    """Of three scales an octave apart, the one in the middle has no weight."""
    distance = Distance((64, 128, 256), (0.1,) * 3, 0.02, 0.3, 0.15, math.nan, 0.5, (math.nan, math.nan))
    squared = [distance.nearest(v)[0] for v in ((0.1,) * 3, variances)]
    assert squared[0] / squared[1] == pytest.approx(nearer)


def test_costs_are_measured_where_a_table_tells():
    frame = sweep_of([-8] * 3, cost=lambda width: 0.01 * width**1.25)
    measured = run_cost(check_table(frame))
    assert (measured.exponent, measured.unit) == (pytest.approx(1.25), "s")
    assert measured.of(512) == pytest.approx(0.01 * 512**1.25)
    flops = frame.drop(columns="wall_time_s").assign(flops=lambda t: t["width"] ** 2.0)
    assert run_cost(check_table(flops)).unit == "FLOP"
    unknown = run_cost(check_table(frame.drop(columns="wall_time_s")))
    assert (unknown.exponent, unknown.of(64), unknown.of(128)) == (2, pytest.approx(1), pytest.approx(4))
    assert (unknown.of(512), unknown.unit, unknown.smallest) == (pytest.approx(64), "runs", 64)
    d_model = frame.drop(columns="wall_time_s").rename(columns={"width": "config/d_model"})
    assert run_cost(check_table(d_model)).exponent == 2
    renamed = frame.rename(columns={"wall_time_s": "dollars"})
    assert run_cost(check_table(renamed, Reading(Columns(cost="dollars")))).exponent == pytest.approx(1.25)
    with pytest.raises(TableError, match="no column 'euros'"):
        check_table(renamed, Reading(Columns(cost="euros")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alpha", "right", "wrong"), [(0.0, "TRANSFERS", "DRIFTS"), (-0.6, "DRIFTS", "TRANSFERS")]
)
def test_who_follows_it_comes_to_the_right_verdict(alpha, right, wrong):
    """From two seeds an octave, batch after batch, on a machine that is this simulation."""
    decisions = []
    for sweep in range(4):
        generator = np.random.default_rng(sweep)
        vertices = [-8 + generator.uniform(-0.5, 0.5)]
        vertices = [vertices[0] + alpha * k for k in range(4)]
        frame = sweep_of(vertices, sigma=0.02, generator=generator)
        for _ in range(8):
            result = analyze(check_table(frame)).results[0]
            if result.next_batch is None:
                break
            for cell in result.next_batch.cells:
                vertex = vertices[0] + alpha * np.log2(cell.scale / 64)
                fresh = {cell.x: range(cell.seeds - cell.runs, cell.seeds)}
                rows = rows_at(int(cell.scale), vertex, fresh, 0.02, generator)
                frame = pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)
        decisions.append(result.verdict.decision)
    assert decisions.count(right) >= 3
    assert wrong not in decisions


def test_the_interval_that_is_named_holds_the_verdict_open():
    """At rest in a flat valley the regret is bounded at once; what is open is α."""
    generator, grid = np.random.default_rng(2), {x: range(2) for x in OCTAVES}
    widths = (64, 128, 256, 512)
    rows = [row for w in widths for row in rows_at(w, -8.0, grid, 0.015, generator, curvature=0.01)]
    result = analyze(check_table(pd.DataFrame(rows))).results[0]
    assert result.verdict.decision == "OPEN" and result.headline_regret.high < 0.01
    assert (result.next_batch.reason.code, result.next_batch.reason["quantity"]) == ("wide interval", "α")
