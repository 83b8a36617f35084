"""Looks are counted from the rows: of sequences on a machine whose optima are known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table, load_table
from mup_tpu.analysis.design import first_batch, next_batch, why_stop
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.run_table import run_cost
from mup_tpu.analysis.verdict import MOST_LOOKS, Question, Verdict, take_look, take_looks

ROOT = Path(__file__).parents[2]
WIDTHS = (64.0, 128.0, 256.0, 512.0)


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
        looks.append(take_look(table.runs, question, looks[-1] if looks else None))
        if looks[-1].decision != "INCONCLUSIVE":
            return rows, looks
        batch = next_batch("all", looks[-1].evidence, run_cost(table), question)
        if why_stop(looks[-1], batch, question):
            return rows, looks
    return rows, looks


@pytest.mark.parametrize(("alpha", "decision"), [(0.0, "TRANSFERS"), (-0.7, "DRIFTS")])
def test_the_rows_tell_which_looks_were_taken_whatever_their_order(alpha, decision):
    rows, taken = sequence(alpha)
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


def test_a_sequence_starts_at_the_smallest_scale_and_comes_to_each_planned_one():
    rows, _ = sequence(0.0)
    first = [r for r in rows if r["purchase"] == 1]
    assert {r["width"] for r in first} == {64} and len(first) == 24, "eight values, three seeds each"
    assert [min(r["purchase"] for r in rows if r["width"] == w) for w in WIDTHS] == [1, 2, 3, 4]


def test_what_drifts_plainly_never_pays_for_its_widest_model():
    rows, taken = sequence(-1.0)
    assert taken[-1].decision == "DRIFTS"
    assert max(r["width"] for r in rows) == 256


def test_a_drift_is_measured_at_the_rate_of_the_smallest_scale_before_a_larger_one_is_run():
    """Three octaves away: a first look at the third scale would leave it outside."""
    rows, taken = sequence(-1.6)
    at_256 = sorted({(r["purchase"], round(np.log2(r["lr"]), 6)) for r in rows if r["width"] == 256})
    assert (at_256[0][0], -8.0) in at_256 and {number for number, _ in at_256} == {at_256[0][0]}
    assert taken[-1].decision == "DRIFTS" and {r["width"] for r in rows} == {64, 128, 256}


def test_a_sequence_ends_after_its_last_look():
    _, taken = sequence(0.17, sigma=0.03, seed=3)
    assert taken[-1].number <= MOST_LOOKS
    if taken[-1].decision == "INCONCLUSIVE":
        assert taken[-1].number == MOST_LOOKS


def test_a_table_without_purchases_is_looked_at_once():
    rows, taken = sequence(0.0)
    table = pd.DataFrame(rows)
    (result,) = analyze(check_table(table.drop(columns="purchase"))).results
    assert result.sequence is None and result.verdict.look is None
    (result,) = analyze(check_table(table)).results
    assert result.sequence is not None and len(result.sequence.looks) == len(taken)


def test_a_budget_ends_what_is_not_worth_its_cost():
    rows, taken = sequence(0.12, sigma=0.03)
    table, question = check_table(pd.DataFrame(rows)), Question(planned=WIDTHS)
    late = replace(taken[-1], number=3, verdict=Verdict("INCONCLUSIVE", 3))
    batch = replace(next_batch("all", late.evidence, run_cost(table), question), to_verdict=500.0)
    assert why_stop(late, batch, question) is None is why_stop(late, batch, question, left=51.0)
    assert why_stop(late, batch, question, 49.0).code == "over budget"
    out_of_reach = replace(batch, to_verdict=np.inf)
    assert why_stop(late, out_of_reach, question) is None, "without a budget it goes on to the last look"
    assert why_stop(late, out_of_reach, question, left=1e9) is None, "with one, until it ends"


def test_a_grid_that_spans_fourteen_octaves_without_an_optimum_is_given_up():
    rows = [
        {"width": 64.0, "lr": 2.0**x, "seed": 0, "loss": 3 - 0.01 * x, "purchase": 1} for x in range(-16, -1)
    ]
    table, question = check_table(pd.DataFrame(rows)), Question(planned=WIDTHS)
    look = take_look(table.runs, question)
    batch = next_batch("all", look.evidence, run_cost(table), question)
    assert why_stop(look, batch, question) == Reason.of("no optimum in a wide grid", at=64.0, octaves=14.0)


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
    xs = [cell.x for cell in batch.cells]
    assert np.diff(xs).tolist() == [1] * (len(xs) - 1) and len(xs) <= 8
    middle = (min(grid) + max(grid)) / 2
    assert abs(np.mean(xs) - middle) <= 1.0
    assert {cell.runs for cell in batch.cells} == {3}
    assert set(xs) == set(expected) or abs(min(xs) - min(expected)) <= 1


@pytest.mark.parametrize("folder", ["quickstart", "quickstart_again"])
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
        look = take_look(pd.concat(rows), question, look)
        if look.decision != "INCONCLUSIVE":
            assert look.decision == "TRANSFERS"
            break
        costs = run_cost(replace(table, runs=pd.concat(rows)))
        batch = next_batch("mup", look.evidence, costs, question)
        assert not why_stop(look, batch, question, budget - spent), look.verdict
