"""Sequences that train for real: bought look by look, interrupted, and continued from their rows."""

import dataclasses
import os

import pytest
from rich.console import Console

from mup_tpu.analysis import analyze, load_table
from mup_tpu.analysis.reasons import Reason
from mup_tpu.analysis.verdict import MOST_LOOKS
from mup_tpu.config import Axis, RunOptions, SequenceOptions, Sweep, SweepOptions
from mup_tpu.errors import ConfigError, StoreError, TableError
from mup_tpu.store import Condition, Store, load_header, load_runs
from mup_tpu.tuning.sequence import run_until_settled
from mup_tpu.tuning.sweep import run_sweep

UNTIL = SequenceOptions(until_settled=True)
ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options by which packs run in this process."""
OCTAVES = tuple(2.0**e for e in range(-10, -2))


@pytest.fixture(scope="module")
def sweep(tiny):
    """Sweep of SP: its optimum drifts so clearly that few runs settle it."""
    base = tiny.replace(steps=30, batch_size=8, init_std=0.06, eval_batches=8)
    return Sweep("seq", base, widths=(32, 64, 128), learning_rates=OCTAVES, parametrizations=("sp",))


def settle(sweep, path, until=UNTIL, options=SweepOptions(), console=None):
    console = console or Console(quiet=True)
    return run_until_settled(sweep, str(path), until, options, RunOptions(threads=1), console)


def ended(path):
    """Whether each parametrization is settled or stops with a reason."""
    results = analyze(load_table(path)).results
    return results and all(r.next_batch is None or r.sequence.stops for r in results)


@pytest.mark.slow
def test_a_sequence_ends_settled_or_with_a_reason_and_a_second_call_buys_nothing(
    sweep, tmp_path, monkeypatch
):
    """Each parametrization on its own, by workers that stay. Two looks of few steps are enough."""
    monkeypatch.setattr("mup_tpu.analysis.design.MOST_LOOKS", 2)
    short = dataclasses.replace(sweep, base=sweep.base.replace(steps=10, eval_batches=2))
    both = dataclasses.replace(short, parametrizations=("sp", "mup"))
    outcome = settle(both, tmp_path)
    runs = load_runs(tmp_path)
    assert sum(outcome.values()) == len(runs)
    assert load_header(tmp_path).planned == (32.0, 64.0, 128.0)
    first = runs[runs["purchase"] == 1]
    assert set(first["width"]) == {32} and set(first["seed"]) == {0, 1, 2}
    assert first.groupby("parametrization")["lr"].nunique().to_dict() == {"mup": 8, "sp": 8}
    assert runs["purchase"].max() > 1
    assert len(list(tmp_path.glob("logs/*"))) <= os.cpu_count(), "a purchase started workers anew"
    for result in analyze(load_table(tmp_path)).results:
        own = runs[runs["parametrization"] == result.parametrization]
        assert sorted(own["purchase"].unique()) == list(range(1, int(own["purchase"].max()) + 1))
        assert result.sequence.looks[-1].number <= MOST_LOOKS
        assert result.verdict.look or not result.drift.is_known
    assert ended(tmp_path)
    assert not settle(both, tmp_path), "what is settled is settled"
    assert len(load_runs(tmp_path)) == len(runs)


@pytest.mark.slow
def test_an_interrupted_sequence_goes_on_from_its_rows(sweep, tmp_path, monkeypatch):
    """In its second purchase: the first has eight runs, in four packs. Two looks of few steps are enough."""
    monkeypatch.setattr("mup_tpu.analysis.design.MOST_LOOKS", 2)
    short = dataclasses.replace(sweep, base=sweep.base.replace(steps=10, eval_batches=2))
    append, calls = Store.append, []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return append(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "append", interrupted)
        settle(short, tmp_path, options=SweepOptions(pack_size=2))
    before = set(load_runs(tmp_path)["trial_id"])
    assert len(before) > 8 and not ended(tmp_path)
    settle(short, tmp_path, options=SweepOptions(pack_size=2))
    runs = load_runs(tmp_path)
    assert before < set(runs["trial_id"]) and runs["trial_id"].is_unique
    for _, own in runs.groupby("parametrization"):
        assert sorted(own["purchase"].unique()) == list(range(1, int(own["purchase"].max()) + 1))
    assert ended(tmp_path)


def test_a_budget_ends_it_and_the_same_command_goes_on(sweep, tmp_path, capsys):
    hurried = SequenceOptions(until_settled=True, budget="0.01s")
    assert not settle(sweep, tmp_path, hurried, console=Console(width=200))
    assert "the budget of 0.01s is used up; the same command goes on" in capsys.readouterr().out


def test_a_value_that_no_trial_may_have_ends_the_sequence_with_a_sentence(tiny, tmp_path, capsys):
    """A start around β₂ = ½ reaches 1, which is not allowed."""
    sweep = Sweep("x", tiny, scale=Axis("batch_size", (2, 4, 8)), tune=Axis("beta2", (0.5,)))
    assert not settle(sweep, tmp_path, console=Console(width=300))
    ends = "mup ends here: start at the smallest scale, but beta2 1.0 is not allowed: it must be below 1"
    assert ends in capsys.readouterr().out


@pytest.mark.slow
def test_bought_values_stay_within_what_a_trial_may_have(tiny, tmp_path, monkeypatch, patience):
    """After so few steps the best may lie at the edge; a β₂ beyond 1 cannot be bought."""
    monkeypatch.setattr("mup_tpu.analysis.design.MOST_LOOKS", 1)
    sweep = Sweep(
        "x", tiny.replace(steps=10), scale=Axis("batch_size", (2, 4, 8)), tune=Axis("beta2", (0.1, 0.2, 0.9))
    )
    settle(sweep, tmp_path, SequenceOptions(True, budget=f"{10 * patience}s"))
    assert load_runs(tmp_path)["beta2"].between(0, 1, inclusive="neither").all()


def test_rows_added_to_a_grid_later_count_as_a_purchase(sweep, tmp_path):
    one = dataclasses.replace(sweep, widths=(32,), learning_rates=(0.01,), parametrizations=("mup",))
    run_sweep(one, str(tmp_path), SweepOptions(), ALONE, Console(quiet=True))
    assert load_runs(tmp_path)["purchase"].isna().all()
    store = Store(tmp_path, "seq", planned=(32, 64, 128))
    assert store.next_purchase() == 1
    more = dataclasses.replace(one, learning_rates=(0.02,))
    run_sweep(more, str(tmp_path), SweepOptions(), ALONE, Console(quiet=True))
    assert load_runs(tmp_path).set_index("lr")["purchase"].dropna().to_dict() == {0.02: 1}
    assert store.next_purchase() == 2


def test_scales_outside_the_plan_are_left_out_of_the_analysis(sweep, tmp_path):
    """Otherwise runs asked for there would be bought at the nearest planned scale."""
    narrower = dataclasses.replace(sweep, widths=(16, 32), learning_rates=(0.01,))
    run_sweep(narrower, str(tmp_path), SweepOptions(), ALONE, Console(quiet=True))
    assert set(load_table(tmp_path).runs["scale"]) == {16, 32}
    Store(tmp_path, "seq", planned=(32, 64, 128))
    table = load_table(tmp_path)
    assert set(table.runs["scale"]) == set(table.history["scale"]) == {32}
    assert Reason.of("scales not planned", scales=[16]) in table.notes
    assert table.planned == (32, 64, 128)
    part = load_table(tmp_path, where=(Condition.parse("width<=64"), Condition.parse("lr=0.01")))
    assert part.planned == (32, 64), "what is not asked about is not waited for"
    run_sweep(narrower, str(tmp_path / "b"), SweepOptions(), ALONE, Console(quiet=True))
    Store(tmp_path / "b", "seq", planned=(64, 128, 256))
    with pytest.raises(TableError, match="no run is at a width that the sequence plans: run it first"):
        analyze(load_table(tmp_path / "b"))


def test_impossible_sequences_are_refused_in_a_sentence(sweep, tiny, tmp_path):
    with pytest.raises(ConfigError, match="first_looks requires until_settled"):
        SequenceOptions(first_looks=True)
    with pytest.raises(ConfigError, match="budget '2h' requires until_settled"):
        SequenceOptions(budget="2h")
    with pytest.raises(ConfigError, match="budget 'soon' is not a time; write 90s, 30m or 2h"):
        SequenceOptions(until_settled=True, budget="soon")
    two = Sweep("x", tiny, widths=(32, 64))
    with pytest.raises(ConfigError, match="the sweep has 2 widths: until_settled needs 3 at least"):
        settle(two, tmp_path / "d")
    without = Sweep("x", tiny, scale=Axis("weight_decay", (0.0, 0.01, 0.1)))
    with pytest.raises(ConfigError, match="the sweep has weight decay 0: until_settled needs scales above 0"):
        settle(without, tmp_path / "z")
    whole = Sweep("x", tiny, scale=Axis("batch_size", (2, 4, 8)), tune=Axis("depth", (1, 2)))
    with pytest.raises(ConfigError, match="tune depth is a whole number"):
        settle(whole, tmp_path / "a")
    nothing = Sweep("x", tiny, scale=Axis("batch_size", (2, 4, 8)), tune=Axis("weight_decay", (0.0,)))
    with pytest.raises(ConfigError, match="tune weight_decay has no value above 0"):
        settle(nothing, tmp_path / "b")
    assert not list(tmp_path.iterdir())
    Store(tmp_path / "c", "seq", planned=(32, 64, 128, 256))
    with pytest.raises(StoreError, match="plans width 256 too, which this sweep lacks"):
        settle(sweep, tmp_path / "c")
    Store(tmp_path / "e", "seq").ask([Condition.parse("width>=64")])
    with pytest.raises(
        StoreError, match="asks about width from 64 on, and this sweep has width 32 too: give"
    ):
        settle(sweep, tmp_path / "e")
