"""Small tables whose answer is known: verdicts where grids end, runs diverge, or nothing moves."""

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, analyze, check_table, load_table, predict
from mup_tpu.analysis.design import first_batch, next_batch, why_stop
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import run_cost
from mup_tpu.analysis.verdict import (
    MOST_LOOKS,
    LookTaken,
    Question,
    Verdict,
    regret,
    regret_interval,
    take_looks,
    weigh,
)

DATA = Path(__file__).parent / "data"


@functools.cache
def result_of(name):
    """The analysis of a table with one parametrization."""
    (result,) = analyze(DATA / f"{name}.csv").results
    return result


@pytest.mark.parametrize("name", ["identical_optima", "identical_curves"])
def test_identical_optima_lose_nothing(name):
    """The regret is that of any x nearby, on either side of the target's best grid point."""
    table = load_table(DATA / f"{name}.csv")
    evidence = weigh(table.runs, Question.of(table))
    first, last = evidence.estimates[0], evidence.estimates[-1]
    for off in (-1e-6, 0.0, 1e-6):
        moved = replace(first, optimum=replace(first.optimum, x=round(last.optimum.x) + off))
        assert regret(moved, last).value == pytest.approx(0.0, abs=1e-3)
    assert result_of(name).headline_regret.value == pytest.approx(0.0, abs=1e-3)


def test_finite_blow_ups_count_as_diverged():
    """Losses of 13 to 64 where the smallest rates lose 7.7: α was -0.25 beside optima of slope -1.44."""
    table = load_table(DATA / "finite_blowups.csv")
    assert [(n["count"], n["least"]) for n in table.notes if n.code == "blown up"] == [(6, 13.2)]
    (result,) = analyze(table).results
    assert result.verdict.decision == "DRIFTS"
    assert result.drift.low < -1.44 < result.drift.high < -1
    assert result.headline_regret.status == "diverged" and result.headline_regret.low > 1


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_lucky_run_shows_no_drift_where_noise_differs_along_the_grid(seeds):
    generator, rows = np.random.default_rng(0), []
    for width, x in itertools.product((64, 128, 256, 512), range(-10, -3)):
        for seed in range(seeds if width == 512 else 4):
            noise = (0.002 if x < -6 else 0.04) * generator.standard_normal()
            lucky = -0.25 if (width, x) == (512, -5) else 0.0
            loss = 2.5 + 0.03 * (x + 7) ** 2 + noise + lucky
            rows.append({"width": width, "lr": 2.0**x, "seed": seed, "loss": loss})
    (result,) = analyze(pd.DataFrame(rows)).results
    if seeds == 1:
        assert result.verdict.decision != "DRIFTS"
        assert result.next_batch.reason.code == "one run"
        assert [(c.scale, c.x, c.runs) for c in result.next_batch.cells] == [(512, -5, 1)]
    else:
        assert result.next_batch is None or result.next_batch.reason.code != "one run"


def test_drift_by_the_lucky_run_of_a_table_with_one_seed_waits_for_a_second_one():
    """Drawn without drift; noise grows along the rate, which no run of another seed shows."""
    losses = {
        64: (2.740, 2.587, 2.508, 2.476, 2.498, None, None),
        128: (None, None, 2.503, 2.459, 2.455, 2.466, 2.504),
        256: (None, None, 2.441, 2.407, 2.385, 2.424, 2.502),
        512: (None, None, 2.412, 2.374, 2.346, 2.298, 2.429),
    }
    runs = [
        {"width": width, "lr": 2.0 ** (k - 12), "seed": 0, "loss": loss}
        for width, of_width in losses.items()
        for k, loss in enumerate(of_width)
        if loss is not None
    ]
    (result,) = analyze(check_table(pd.DataFrame(runs))).results
    assert result.drift.has_moved and result.headline_regret.low > 0.01
    assert result.verdict.decision == "OPEN"
    (cell,) = result.next_batch.cells
    assert (cell.scale, cell.x, cell.runs) == (512, -7, 1)


def test_no_transfer_while_the_largest_scales_have_left_the_grid():
    """Widths 64 to 256 agree; at 512 and 1024 the optimum lies below the lowest learning rate."""
    result, headline = result_of("unbracketed_largest"), result_of("unbracketed_largest").headline_regret
    assert result.verdict.decision != "TRANSFERS"
    assert headline.target == 1024 and headline.low > 0.01 and headline.high == math.inf
    for optimum in result.optima[-2:]:
        assert optimum.status in ("at lower edge", "no finite run")


def test_equal_optima_beside_divergence_do_not_drift():
    """Somewhere between 2^-7 and 2^-6 runs of width 512 begin to diverge: a run there tells."""
    result = result_of("equal_optima_beside_divergence")
    assert result.verdict.decision != "DRIFTS"
    cells = {(cell.scale, cell.x) for cell in result.next_batch.cells}
    assert any(scale == 512 and -7 < x < -6 for scale, x in cells)


def test_single_runs_of_a_public_table_are_no_noisier_than_they_are():
    """Six widths × 20 rates, a seed each: points within 0.15 nat of the best scatter by 0.0023."""
    mup, sp = analyze(DATA / "mup_mlp.csv").results
    assert mup.noise.sigma == pytest.approx(0.0023, rel=0.5)
    assert mup.verdict.decision == "TRANSFERS" and sp.verdict.decision == "DRIFTS"
    headline = mup.headline_regret
    assert (headline.source, headline.target) == (256, 8192) and 0.001 < headline.value < 0.006
    optima = {o.scale: o.x for o in mup.optima}
    assert optima[8192] - optima[256] == pytest.approx(-0.25, abs=0.12)


def test_no_optimum_lies_beside_a_run_that_is_plainly_worse():
    """Four shapes × 6 rates, losses up to 59: at width 3072 the next run above the best loses 0.9 nat."""
    result = analyze(pd.read_csv(DATA / "gemstone.csv").drop(columns="depth")).results[0]
    for curve, optimum in zip(result.curves, result.optima, strict=True):
        nearest = int(np.argmin(np.abs(curve.x_G - optimum.x)))
        assert curve.mean_G[nearest] - curve.mean_G.min() < 0.35
    assert result.optima[-1].best_x == pytest.approx(np.log2(0.0005))
    assert result.noise.sigma < 0.2  # losses up to 59 nat, without a replicate


def test_optima_that_nothing_bounds_show_no_drift():
    """Three flat walks to the left, each in a window of its own: once DRIFTS, width^-3.30 (-4.33 to
    -2.28)."""
    result = result_of("flat_walk")
    assert result.verdict.decision == "OPEN"
    assert all(o.status == "flat" and o.se > 0.8 for o in result.optima)
    assert result.drift.low < 0 < result.drift.high
    assert {(cell.scale, cell.x) for cell in result.next_batch.cells} == {(256, round(result.optima[0].x))}, (
        "64's rate"
    )


def test_a_plain_drift_to_the_last_rate_before_divergence_is_settled():
    """The loss beyond is at least that of the last finite run: once a regret of 0.478 (0.000 to ∞)."""
    result = result_of("falls_to_the_edge")
    assert result.verdict.decision == "DRIFTS"
    assert result.drift.alpha == pytest.approx(-1.01, abs=0.05)
    headline = result.headline_regret
    assert 0.3 < headline.low <= headline.value <= headline.high


def test_a_claim_is_known_by_any_spelling():
    frame = pd.read_csv(DATA / "spelled_muP.csv")
    tables = [frame, *(frame.assign(parametrization=name) for name in ("mup", "μP"))]
    first, *others = [predict(table, "width=4096").predictions[0] for table in tables]
    assert all(p.interval == pytest.approx(first.interval) for p in others)
    unnamed = predict(frame.drop(columns="parametrization"), "width=4096").predictions[0]
    reach = [high - low for low, high in (first.interval, unnamed.interval)]
    assert 1 < reach[1] / reach[0] < 2, "by the data, not by the name alone"


@pytest.mark.parametrize(
    "name", ["flat_walk", "falls_to_the_edge", pytest.param("mup_mlp", marks=pytest.mark.nightly)]
)
def test_nothing_depends_on_the_unit_of_the_loss(name):
    frame = pd.read_csv(DATA / f"{name}.csv")
    (column,) = {"loss", "train_loss", "val_loss"} & set(frame)
    tens = frame.assign(**{column: 10 * frame[column]})
    for one, ten in zip(analyze(frame).results, analyze(tens, epsilon=0.1).results, strict=True):
        assert one.verdict.decision == ten.verdict.decision
        assert (one.drift.low, one.drift.high) == pytest.approx((ten.drift.low, ten.drift.high), abs=1e-3)
        assert 10 * one.headline_regret.low == pytest.approx(ten.headline_regret.low, rel=1e-3, abs=1e-6)
    in_no_nat = analyze(check_table(frame.rename(columns={column: "mse"}), Reading(Columns(loss="mse"))))
    assert in_no_nat.epsilon == pytest.approx(0.02 * np.ptp(frame.groupby("width")[column].min()))


def valley(centre, rates, lost=(), seeds=3, curvature=0.08, sigma=0.002, width=64):
    """Runs of a parabola in log2 lr; `lost` holds (rate, number of seeds that diverge)."""
    generator, dead, rows = np.random.default_rng(0), dict(lost), []
    for x, seed in itertools.product(rates, range(seeds)):
        loss = 2.5 + curvature / 2 * (x - centre) ** 2
        loss = math.inf if seed < dead.get(x, 0) else loss + sigma * generator.normal()
        rows.append({"width": width, "lr": 2.0**x, "seed": seed, "loss": loss})
    return rows


def test_two_of_three_lost_runs_are_no_wall():
    """The share of lost runs has a sampling error: only the rise of the last finite rate is certain."""
    rows = [row for w in (64, 128) for row in valley(-8, range(-11, -4), width=w)]
    at_256 = {"rates": range(-11, -4), "width": 256}
    few = rows + valley(-8.6, lost=((-7, 2), (-6, 3), (-5, 3)), **at_256)
    (result,) = analyze(check_table(pd.DataFrame(few)), delta=0.5).results
    headline = result.headline_regret
    assert result.verdict.decision == "OPEN" and headline.low < 0.02
    many = [row | {"lr": 8 * row["lr"]} if row["width"] < 256 else row for row in few]
    (result,) = analyze(check_table(pd.DataFrame(many)), delta=0.5).results
    assert result.headline_regret.low == math.inf, "eight of nine lost runs on the way are"


@pytest.mark.parametrize(
    ("curvature", "sigma", "count", "tolerance"), [(0.08, 0.004, 24, 0.05), (0.4, 0.2, 12, 0.3)]
)
def test_near_optimal_ranges_have_a_width_on_random_rates(curvature, sigma, count, tolerance):
    """Also where draws of the optimum lie further apart than the range is wide."""
    rates = np.sort(np.random.default_rng(0).uniform(-12, -4, count))
    made = {"seeds": 1, "sigma": sigma, "curvature": curvature}
    rows = [row for w in (64, 128, 256) for row in valley(-8, rates, width=w, **made)]
    for optimum in analyze(check_table(pd.DataFrame(rows))).results[0].optima:
        width = 2 * math.sqrt(2 * 0.01 / curvature)
        assert optimum.band_high - optimum.band_low == pytest.approx(width, rel=tolerance)


def test_a_regret_is_the_median_of_its_draws():
    """Of two valleys of one parabola, a source known to octaves: its mean regret is c/2 (Δ² + se²)."""
    rows = valley(-8, range(-12, -3), seeds=2, sigma=0.006, curvature=0.03)
    rows += valley(-8.5, range(-12, -3), seeds=6, sigma=0.003, curvature=0.03, width=256)
    table = check_table(pd.DataFrame(rows))
    first, last = weigh(table.runs, Question.of(table)).estimates
    found = regret(first, last)
    rise_R = last.valley.rise(first.valley.x_R - last.valley.x_R)
    assert found.value == pytest.approx(np.median(rise_R), rel=0.1)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("power", [3.5, 4.5])
def test_the_regret_of_a_flat_valley_is_within_its_interval(power):
    held = []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        runs = [
            {"width": width, "lr": 2.0**x, "seed": n, "loss": 2.5 + 0.05 * abs(x + 8 + move) ** power + noise}
            for width, move in zip((64, 128, 256, 512), (0.0, 0.4, 0.8, 1.2), strict=True)
            for x in np.arange(-12.0, -3.0)
            for n, noise in enumerate(0.01 * generator.standard_normal(2))
        ]
        headline = analyze(check_table(pd.DataFrame(runs))).results[0].headline_regret
        held.append(headline.low <= 0.05 * 1.2**power <= headline.high)
    assert sum(held) >= 7


def test_the_interval_of_a_regret_begins_at_0_where_the_optimum_may_have_stayed():
    moved_RH = np.random.default_rng(0).normal((3.0, 0.0), 1.0, (4000, 2))
    regret_R = (moved_RH**2).sum(axis=1)
    for columns, low_is_0 in (([0, 1], False), ([0], False), ([1], True)):
        low, value, high = regret_interval(regret_R, moved_RH[:, columns])
        assert (low == 0.0) is low_is_0 and low < value < high


def test_a_bound_of_a_regret_does_not_hang_on_a_draw_or_two():
    """The other scales make the first one's optimum unlikely: of 2000 draws a few were left to bound it."""
    table = load_table(DATA.parents[2] / "results" / "quickstart")
    runs = table.runs[table.runs["compared"] == "sp"]
    lows = [weigh(runs, replace(Question.of(table), seed=seed)).headline.low for seed in range(4)]
    assert max(lows) < 1.5 * min(lows)


def test_a_source_outside_the_target_s_window_is_run_there_before_anything_is_said():
    """Noise moved the window of width 256 by two octaves; that shows nothing."""
    rows = [row for w in (64, 128) for row in valley(-8, range(-12, -4), curvature=0.02, width=w)]
    rows += valley(-8.9, [-14, -13, -12, -11, -10, -9], curvature=0.02, width=256)
    (result,) = analyze(check_table(pd.DataFrame(rows))).results
    assert not result.headline_regret.is_run or result.optima[-1].status == "at upper edge"
    assert result.verdict.decision != "DRIFTS"


ROOT = Path(__file__).parents[2]
WIDTHS = (64.0, 128.0, 256.0, 512.0)


@functools.cache
def sequence(alpha, sigma=0.01, seed=0, most=30):
    """Rows as bought from a machine whose optimum is 2^-8 at width 64 and moves as width^alpha."""
    generator = np.random.default_rng(seed)
    rows, looks = [], []
    question = Question(planned=WIDTHS)
    batch = first_batch("all", 64, list(range(-12, -3)))
    for purchase in range(1, most):
        for cell in batch.cells:
            before = sum(r["width"] == cell.scale and r["lr"] == 2.0**cell.x for r in rows)
            off = cell.x + 8 - alpha * np.log2(cell.scale / 64)
            for s in range(before, before + cell.runs):
                loss = 2.5 + 0.04 * off**2 + sigma * generator.standard_normal()
                rows.append(
                    {"width": cell.scale, "lr": 2.0**cell.x, "seed": s, "loss": loss, "purchase": purchase}
                )
        table = check_table(pd.DataFrame(rows))
        looks.append(LookTaken(table.runs, question, looks[-1] if looks else None))
        if looks[-1].decision != "OPEN":
            return rows, looks
        batch = next_batch("all", looks[-1].evidence, run_cost(table), question)
        if why_stop(looks[-1], batch):
            return rows, looks
    return rows, looks


@pytest.mark.parametrize(
    ("alpha", "decision", "firsts"),
    [(0.0, "TRANSFERS", {64: 1, 128: 2, 256: 3, 512: 4}), (-0.7, "DRIFTS", {64: 1, 128: 2, 256: 3})],
)
def test_the_rows_tell_which_looks_were_taken_whatever_their_order(alpha, decision, firsts):
    """Each planned scale is come to in turn, and what drifts plainly never pays for its widest model."""
    rows, taken = sequence(alpha)
    assert pd.DataFrame(rows).groupby("width")["purchase"].min().to_dict() == firsts
    assert sum(r["purchase"] == 1 for r in rows) == 24, "eight values, three seeds each"
    shuffled = pd.DataFrame(rows).sample(frac=1, random_state=1)
    table = replace(check_table(shuffled), planned=WIDTHS)
    counted = list(take_looks(table.runs, Question(planned=WIDTHS)))
    assert [(k.number, k.decision, k.runs) for k in counted] == [
        (k.number, k.decision, k.runs) for k in taken
    ]
    (result,) = analyze(table).results
    assert result.verdict.decision == decision
    assert result.verdict.look == taken[-1].number
    assert [look.purchase for look in result.sequence.looks] == list(range(1, len(taken) + 1))
    assert list(result.sequence.spent) == sorted(result.sequence.spent)
    (once,) = analyze(check_table(shuffled.drop(columns="purchase"))).results
    assert once.sequence is None and once.verdict.look is None


def test_a_drift_is_measured_at_the_rate_of_the_smallest_scale_before_a_larger_one_is_run():
    """Three octaves away: a first look at the third scale would leave it outside."""
    rows, taken = sequence(-1.6)
    at_256 = sorted({(r["purchase"], round(np.log2(r["lr"]), 6)) for r in rows if r["width"] == 256})
    assert (at_256[0][0], -8.0) in at_256 and {number for number, _ in at_256} == {at_256[0][0]}
    assert taken[-1].decision == "DRIFTS" and {r["width"] for r in rows} == {64, 128, 256}


def test_a_sequence_ends_after_its_last_look():
    _, taken = sequence(0.17, sigma=0.03, seed=3)
    assert taken[-1].number <= MOST_LOOKS
    if taken[-1].decision == "OPEN":
        assert taken[-1].number == MOST_LOOKS


def test_a_budget_ends_what_is_not_worth_its_cost():
    rows, taken = sequence(0.0)
    table, question = check_table(pd.DataFrame(rows)), Question(planned=WIDTHS)
    late = replace(taken[-1])
    vars(late).update(number=3, verdict=Verdict("OPEN", 3))
    batch = replace(next_batch("all", late.evidence, run_cost(table), question), to_verdict=500.0)
    assert why_stop(late, batch) is None is why_stop(late, batch, left=51.0)
    assert why_stop(late, batch, 49.0).code == "over budget"
    out_of_reach = replace(batch, to_verdict=np.inf)
    assert why_stop(late, out_of_reach) is None, "without a budget it goes on to the last look"
    assert why_stop(late, out_of_reach, left=1e9) is None, "with one, until it ends"


def test_a_grid_that_spans_fourteen_octaves_without_an_optimum_is_given_up():
    rows = [
        {"width": 64.0, "lr": 2.0**x, "seed": 0, "loss": 3 - 0.01 * x, "purchase": 1} for x in range(-16, -1)
    ]
    table, question = check_table(pd.DataFrame(rows)), Question(planned=WIDTHS)
    look = LookTaken(table.runs, question)
    batch = next_batch("all", look.evidence, run_cost(table), question)
    assert why_stop(look, batch) == Reason.of("no optimum in a wide grid", at=64.0, octaves=14.0)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (range(-11, -4), range(-11, -4)),
        (np.arange(-10, -2, 0.5), range(-10, -2)),
        ([-8], range(-12, -4)),
        (range(-20, 1), range(-14, -6)),
    ],
)
def test_a_start_is_eight_values_an_octave_apart_in_the_middle_of_what_was_asked(grid, expected):
    batch = first_batch("mup", 64, list(grid))
    assert [cell.x for cell in batch.cells] == [*expected]
    assert {cell.runs for cell in batch.cells} == {3} and batch.cost == 3 * len(expected)


@pytest.mark.parametrize(
    "folder", ["quickstart", pytest.param("quickstart_again", marks=pytest.mark.nightly)]
)
def test_a_quickstart_is_settled_or_buys_on_until_its_budget_ends(folder):
    """The nearest stored rows answer; a sequence of μP ended open after three looks and half of its time."""
    table = load_table(ROOT / "results" / folder)
    left = table.runs[table.runs["compared"] == "mup"].sort_values("seed")
    budget, spent, rows, look = 600.0, 0.0, [], None  # five minutes of two packs at once
    question = Question(planned=tuple(sorted(left["scale"].unique())))
    batch = first_batch("mup", question.planned[0], sorted(left["x"].unique()))
    while spent < budget:
        found = [
            left[(left["scale"] == cell.scale) & ((left["x"] - cell.x).abs() < 0.51)].head(cell.runs)
            for cell in batch.cells
        ]
        bought = pd.concat(found)
        if not len(bought):
            break
        left, spent = left.drop(bought.index), spent + bought["cost"].sum()
        rows.append(bought.assign(purchase=1.0 + len(rows)))
        look = LookTaken(pd.concat(rows), question, look)
        if look.decision != "OPEN":
            assert look.decision == "TRANSFERS"
            break
        costs = run_cost(replace(table, runs=pd.concat(rows)))
        batch = next_batch("mup", look.evidence, costs, question)
        assert not why_stop(look, batch, budget - spent), look.verdict
