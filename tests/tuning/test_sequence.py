"""Sequences that train for real: bought look by look, interrupted, and continued from their rows."""

import dataclasses
import math
import os

import numpy as np
import pytest
from rich.console import Console

from mup_tpu import octaves
from mup_tpu.analysis import Reading, analyze, load_table
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.verdict import MOST_LOOKS
from mup_tpu.config import RunOptions, SequenceOptions, Sweep, SweepOptions
from mup_tpu.errors import ConfigError, StoreError, TableError
from mup_tpu.store import Condition, Store, load_header, load_runs
from mup_tpu.tuning.runner import Corpora
from mup_tpu.tuning.sequence import Buyer
from mup_tpu.tuning.sweep import measured, run_sweep

UNTIL = SequenceOptions(until_settled=True)
ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options by which packs run in this process."""


@pytest.fixture(scope="module")
def sweep(tiny):
    base = tiny.replace(steps=3, eval_batches=1, sequence_length=16)
    axes = {"scale": {"width": (32, 64, 128)}, "compare": {"parametrization": ("sp", "mup")}}
    return Sweep("seq", base, tune={"learning_rate": octaves(-9, -6)}, **axes)


def settle(sweep, path, until=UNTIL, options=SweepOptions(), console=None):
    console = console or Console(quiet=True)
    return run_sweep(sweep, str(path), options, RunOptions(threads=1), console, until)


@pytest.mark.slow
def test_an_interrupted_sequence_goes_on_from_its_rows_ends_and_buys_nothing_more(
    sweep, tmp_path, monkeypatch
):
    """By workers that stay. Two looks of few steps are enough."""
    monkeypatch.setattr("mup_tpu.analysis.design.MOST_LOOKS", 2)
    append, calls, packs = Store.append, [], SweepOptions(pack_size=6)
    sweep = dataclasses.replace(sweep, compare={"parametrization": ("mup",)})

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 4:  # in the second purchase: the first has two packs
            raise KeyboardInterrupt
        return append(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "append", interrupted)
        settle(sweep, tmp_path, options=packs)
    before = load_runs(tmp_path)
    first = before[before["purchase"] == 1]
    assert len(before) > len(first) == 12 and set(first["width"]) == {32} and set(first["seed"]) == {0, 1, 2}
    assert first["lr"].nunique() == 4
    workers = len(list(tmp_path.glob("logs/*")))
    outcome = settle(sweep, tmp_path, options=packs)
    runs = load_runs(tmp_path)
    assert sum(outcome.values()) == len(runs) - len(before) and runs["trial_id"].is_unique
    assert set(before["trial_id"]) < set(runs["trial_id"]) and load_header(tmp_path).planned == (32, 64, 128)
    assert len(list(tmp_path.glob("logs/*"))) <= workers + os.cpu_count(), "a purchase started workers anew"
    (result,) = analyze(load_table(tmp_path)).results
    assert sorted(runs["purchase"].unique()) == list(range(1, int(runs["purchase"].max()) + 1))
    assert runs["purchase"].max() > 1 and result.sequence.looks[-1].number <= MOST_LOOKS
    assert result.next_batch is None or result.sequence.stops
    assert not settle(sweep, tmp_path, options=packs), "what is settled is settled"


def test_a_sequence_that_is_killed_within_a_purchase_buys_the_trials_of_one_that_is_not(
    sweep, tmp_path, bought
):
    """Each rule on its own."""

    def result_of(trial, row):
        noise = np.random.default_rng(int(row["trial_id"][:8], 16)).normal(0, 0.01)
        # Costs grow otherwise in each purchase, so that half of one changes what a run seems to cost.
        cost = float(row["width"] ** (1 + 4 * (row["purchase"] % 2)))
        away = math.log2(row["lr"]) + 7 + 0.15 * math.log2(row["width"] / 32)
        loss = 3 + 0.03 * away**2 + noise
        return {"loss": loss, "wall_time_s": cost, "flops": cost}

    def simulated(folder, stop=math.inf):
        corpora = Corpora()
        store = Store(folder, sweep.experiment, sweep.axes, (32, 64, 128))
        buyer = Buyer(sweep, measured(sweep, corpora), corpora.trial_id, store)
        return bought(buyer, store, result_of, stop)

    most = 320  # rows: the fourth purchase is chosen by costs
    whole = simulated(tmp_path / "whole", most)
    for _, numbers in whole.groupby("parametrization")["purchase"]:
        assert sorted(numbers.unique()) == list(range(1, int(numbers.max()) + 1))
    counts = whole.groupby("purchase").size()
    assert len(counts) >= 4
    for end, size in zip(counts.cumsum()[1::2], counts[1::2], strict=True):
        stop = int(end - 0.75 * size)  # within the trials of one rule
        simulated(tmp_path / str(stop), stop)
        again = simulated(tmp_path / str(stop), len(whole))
        assert set(again["trial_id"]) == set(whole["trial_id"]), stop


def test_a_budget_ends_it_and_the_same_command_goes_on(sweep, tmp_path, capsys):
    hurried = SequenceOptions(until_settled=True, budget="0.01s")
    assert not settle(sweep, tmp_path, hurried, console=Console(width=200))
    assert "the budget is used up; the same command goes on" in capsys.readouterr().out


def test_a_value_that_no_trial_may_have_ends_the_sequence_with_a_sentence(tiny, tmp_path, capsys):
    """A start around β₂ = ½ reaches 1, which is not allowed."""
    sweep = Sweep("x", tiny, scale={"batch_size": (2, 4, 8)}, tune={"beta2": (0.5,)})
    assert not settle(sweep, tmp_path, console=Console(width=300))
    ends = "mup ends here: start at the smallest scale, but beta2 1.0 is not allowed: it must be below 1"
    assert ends in capsys.readouterr().out


def test_rows_added_to_a_grid_later_count_as_a_purchase(one_width, sweep, tmp_path):
    one = one_width(sweep.base, 0.01)
    run_sweep(one, str(tmp_path), SweepOptions(), ALONE, Console(quiet=True))
    assert load_runs(tmp_path)["purchase"].isna().all()
    store = Store(tmp_path, "x", planned=(32, 64, 128))
    assert store.next_purchase() == 1
    run_sweep(one_width(sweep.base, 0.02), str(tmp_path), SweepOptions(), ALONE, Console(quiet=True))
    assert load_runs(tmp_path).set_index("lr")["purchase"].dropna().to_dict() == {0.02: 1}
    assert store.next_purchase() == 2


def test_scales_outside_the_plan_are_left_out_of_the_analysis(sweep, tmp_path):
    """Otherwise runs asked for there would be bought at the nearest planned scale."""
    narrower = dataclasses.replace(sweep, scale={"width": (16, 32)}, tune={"learning_rate": (0.01,)})
    run_sweep(narrower, str(tmp_path), SweepOptions(), ALONE, Console(quiet=True))
    assert set(load_table(tmp_path).runs["scale"]) == {16, 32}
    Store(tmp_path, "seq", planned=(32, 64, 128))
    table = load_table(tmp_path)
    assert set(table.runs["scale"]) == set(table.history["scale"]) == {32}
    assert Reason.of("scales not planned", scales=[16]) in table.notes
    assert table.planned == (32, 64, 128)
    part = load_table(tmp_path, Reading(where=(Condition.parse("width<=64"), Condition.parse("lr=0.01"))))
    assert part.planned == (32, 64), "what is not asked about is not waited for"
    run_sweep(narrower, str(tmp_path / "b"), SweepOptions(), ALONE, Console(quiet=True))
    Store(tmp_path / "b", "seq", planned=(64, 128, 256))
    with pytest.raises(TableError, match="no run is at a width that the sequence plans: run it first"):
        analyze(load_table(tmp_path / "b"))


SIZES = {"batch_size": (2, 4, 8)}


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"scale": {"width": (32, 64)}}, "the grid has 2 widths: until_settled needs 3 at least"),
        ({"scale": {"weight_decay": (0.0, 0.01, 0.1)}}, "scale weight_decay 0.0 is not allowed: it"),
        ({"scale": SIZES, "tune": {"depth": (1, 2)}}, "tune depth is a whole number"),
        ({"scale": SIZES, "tune": {"weight_decay": (0.0,)}}, "tune weight_decay has no value above 0"),
    ],
)
def test_impossible_sequences_are_refused_in_a_sentence(axes, sentence, tiny, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        settle(Sweep("x", tiny, **axes), tmp_path / "d")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_more_scales_or_a_question_about_fewer_is_refused(sweep, tmp_path):
    Store(tmp_path / "c", "seq", planned=(32, 64, 128, 256))
    with pytest.raises(StoreError, match="plans width 256 too, which this grid lacks"):
        settle(sweep, tmp_path / "c")
    Store(tmp_path / "e", "seq").ask([Condition.parse("width>=64")])
    with pytest.raises(StoreError, match="asks about width from 64 on, and this grid has width 32 too: give"):
        settle(sweep, tmp_path / "e")
