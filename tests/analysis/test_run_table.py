"""Validation: what is wrong stops with a sentence, what is odd becomes a note, what diverged is kept."""

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, analyze, check_table
from mup_tpu.analysis.ingest.table_values import States
from mup_tpu.analysis.run_table import ranked, varied
from mup_tpu.config.columns import CONFIGURED
from mup_tpu.errors import ConfigError, TableError
from mup_tpu.words.reasons import notes as notes_of


def runs(**columns) -> pd.DataFrame:
    """Two widths, three learning rates, two seeds."""
    rows = [
        {"width": w, "lr": 2.0**e, "seed": s, "loss": 2.5 + 0.1 * abs(e + 8) + 0.01 * s}
        for w in (64, 128)
        for e in (-9, -8, -7)
        for s in (0, 1)
    ]
    return pd.DataFrame(rows).assign(**columns)


def by_step(ends=(30, 30)) -> pd.DataFrame:
    """Two widths logged at steps 10, 20, ... up to their ends."""
    return pd.DataFrame(
        [
            {"width": w, "lr": 2.0**x, "step": t, "loss": 2.5 + 0.1 * abs(x + 8) + 1 / t}
            for w, end in zip((64, 128), ends, strict=True)
            for x in (-9, -8, -7)
            for t in range(10, end + 1, 10)
        ]
    )


def losses(*first) -> pd.DataFrame:
    """Return runs with other losses in the first rows."""
    return runs(loss=[*first, *runs()["loss"][len(first) :]])


REFUSED = [
    (runs(lr=-8.0), "lr must be 0 or more, but row 0 has -8, and 11 more rows .*log2"),
    (runs().rename(columns={"width": "depth"}).assign(width=[64, 128] * 6), "mixes several depths"),
    (runs(width=0), "width must be above 0, but row 0 has 0"),
    (runs(width=["wide"] * 12), "width must be numbers, but row 0 has 'wide', row 1"),
    (runs(steps_planned=[100] * 11 + [200]), r"several step counts \(column 'steps_planned': 100, 200\)"),
    (runs(dataset=["a", "b"] * 6), "mixes several datasets"),
    (runs(batch_size=[8, 16] * 6), "mixes several batch sizes"),
    (runs(depth=[2, 4] * 6), "mixes several depths"),
    (runs(depth=[[1], [2]] * 6), r"mixes several depths \(column 'depth': \[1\], \[2\]\)"),
    (runs(init_std=[0.02, 0.04] * 6), "mixes several init σs"),
    (runs(loss_kind=["validation_final", "train_mean"] * 6), "several loss kinds"),
    (runs(seed=0), "two runs of all, scale 64, 2\\^-9, seed 0 have different losses"),
    (pd.concat([by_step(), by_step().assign(loss=lambda t: t["loss"] + 0.1)]),
     "two runs of all, scale 64, .* in nothing but their loss: give .* seed"),
    (by_step((20, 30)), r"runs end at different steps \(column 'step': 20 to 30\)"),
    (runs(status="failed"), "no finished run"),
    (runs(status="stopped"), "no finished run"),
    (runs().iloc[:0], "no finished run"),
    (runs(seed=[None] + [0] * 11), "seed is empty in row 0"),
    (runs(parametrization=["mup"] * 11 + [None]), "parametrization is empty in row 11"),
    (losses("1.5 nits"), "loss must be numbers, but row 0 has '1.5 nits'; leave it empty, or inf"),
    (losses("1,45"), "loss mixes decimal commas and points: row 0 has '1,45', row 1 has 2.6"),
    (losses([2.5]), r"loss must be numbers, but row 0 has '\[2.5\]'"),
    (losses(True), "row 0 has True"),
    (losses("crashed", "x", {}, b"1", 1j), r"row 1 has 'x', row 2 has {}, row 3 has b'1', and 1 more"),
    (losses("1_000"), "row 0 has '1_000'"),
    (losses("2.5", "2,345"), "loss of row 1 is '2,345', which may be 2.345 or 2345: write it"),
    (losses(-np.inf), "loss must be above -inf, but row 0 has -inf"),
    (losses(pd.Timestamp("2026-01-01")), "row 0 has Timestamp"),
    (losses(10**400), "row 0 has 1000"),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_what_cannot_be_analysed_is_one_sentence_with_its_column(frame, sentence):
    with pytest.raises(TableError, match=sentence) as caught:
        check_table(frame)
    assert "\n" not in str(caught.value)


def test_columns_that_a_table_has_not_or_twice_are_refused():
    with pytest.raises(TableError, match="no column 'sead'; the nearest is 'seed'; it has width, lr"):
        check_table(runs(), Reading(Columns(seed="sead")))
    with pytest.raises(TableError, match="must be different columns, not lr, lr, loss"):
        check_table(runs(), Reading(Columns(scale="lr")))


def test_diverged_nan_and_chance_losses_are_kept_as_infinite():
    assert sorted(check_table(runs()).runs["x"].unique()) == [-9, -8, -7] and not check_table(runs()).notes
    frame = runs(status=["diverged"] + ["finished"] * 11, steps_planned=100, steps_done=[7] + [100] * 11)
    frame.loc[1:2, "loss"] = np.nan, 5.6
    table = check_table(frame, Reading(chance=5.545))
    assert len(table.runs) == 12 and set(table.runs["compared"]) == {"all"}
    assert np.isinf(table.runs["loss"]).sum() == 3 and "diverged runs, kept as +inf: 3" in notes_of(table)


def test_failed_runs_are_left_out_and_stopped_ones_kept_as_infinite():
    table = check_table(runs(status=["stopped", "failed"] + ["finished"] * 10))
    assert len(table.runs) == 11
    assert table.runs["stopped"].tolist() == [True] + [False] * 10
    assert np.isinf(table.runs["loss"]).tolist() == [True] + [False] * 10
    assert any("1 failed" in note for note in notes_of(table))
    assert any("1 runs stopped early are kept, as +inf" in note for note in notes_of(table))
    assert not any("diverged runs" in note for note in notes_of(table))


def test_learning_rates_that_differ_by_rounding_are_merged_unless_a_run_has_both():
    frame = runs()
    frame.loc[frame["seed"] == 1, "lr"] *= 1.005
    table = check_table(frame)
    assert len(table.runs["x"].unique()) == 3
    assert "3 values within 0.02 octaves of another are merged with it" in notes_of(table)
    drawn = check_table(frame.drop(columns="seed"))  # not set on a grid
    assert len(drawn.runs) == 12 and len(drawn.runs["x"].unique()) == 6
    assert not any("merged" in note for note in notes_of(drawn))


def test_duplicates_are_dropped_and_unequal_seeds_noted():
    table = check_table(pd.concat([runs(), runs().head(2)], ignore_index=True))
    assert len(table.runs) == 12 and "2 identical duplicate rows dropped" in notes_of(table)
    assert "unequal seeds: cells have 1 to 2 runs" in notes_of(check_table(runs().head(11)))[0]


def test_of_a_table_with_a_row_a_step_the_last_counts_and_the_rest_is_history():
    table = check_table(by_step())
    assert len(table.runs) == 6
    assert table.runs["loss"].min() == pytest.approx(2.5 + 1 / 30)
    assert table.history is not None
    assert len(table.history) == 18


def test_of_a_table_where_most_runs_end_at_one_step_the_others_are_named_and_left_out():
    frame = by_step((30, 30))
    cut = (frame["width"] == 128) & (frame["lr"] == 2.0**-7)
    short = check_table(frame[~(cut & (frame["step"] > 10))])
    assert len(short.runs) == 5 and len(short.history) == 15
    (note,) = (note for note in notes_of(short) if "left out" in note)
    assert "1 runs left out, since they did not end with their peers (column step: 10, not 30)" in note
    diverged = check_table(frame.assign(loss=frame["loss"].where(~cut))[~(cut & (frame["step"] > 10))])
    assert len(diverged.runs) == 6 and np.isinf(diverged.runs["loss"]).sum() == 1


def test_a_loss_that_is_measured_at_some_steps_alone_has_not_diverged_at_the_others():
    frame = by_step((30, 30))
    between = pd.concat([frame, frame.assign(step=frame["step"] + 5, loss=np.nan)])
    pd.testing.assert_frame_equal(check_table(between).runs, check_table(frame).runs)


def of_rules(**columns) -> pd.DataFrame:
    """Two rules a step, their column under a name of its own; runs are named, as trackers do."""
    frame = pd.concat([by_step().assign(rule=rule) for rule in ("mup", "sp")], ignore_index=True)
    frame["loss"] += 0.01 * (frame["rule"] == "sp")
    frame["run_name"] = frame["rule"] + "_w" + frame["width"].map(str) + "_lr" + frame["lr"].map(str)
    return frame.assign(seed=0, **columns)


def test_runs_that_clash_say_in_which_columns_they_differ_and_the_option_for_each():
    with pytest.raises(TableError) as caught:
        check_table(of_rules(host="a"))
    said = str(caught.value)
    assert "two runs of all, scale 64, 2^-9, seed 0 have different losses" in said
    assert "they differ in rule ('mup', 'sp': parametrization='rule' compares them, where" in said
    assert "='rule=mup' takes one), run_name (a name a run)" in said and "host" not in said
    assert len(check_table(of_rules(), Reading(Columns(parametrization="rule"))).runs) == 12
    with pytest.raises(TableError, match=r"they differ in run \(0, 1: .* seed='run' takes it for"):
        check_table(runs().drop(columns="seed").assign(run=[0, 1] * 6))


def test_runs_of_several_batches_say_how_to_hold_the_batch_or_to_fit_both_scales():
    """A table of lr × batch × N, whose rates lie on no grid of their own."""
    table = runs().drop(columns="seed").rename(columns={"width": "N"}).assign(batch=[32.0, 64.0] * 6)
    with pytest.raises(TableError, match="no column 'width'; it has .*; scale='units' names the scale$"):
        check_table(table.rename(columns={"N": "units"}))
    with pytest.raises(TableError) as caught:
        check_table(table)
    assert "batch (32, 64: where='batch=32' holds it" in str(caught.value)
    assert "a prediction with scale='N,batch' fits both)" in str(caught.value)


def test_a_setting_that_varies_inside_cells_is_said_whatever_tells_their_runs_apart():
    table = check_table(of_rules(), Reading(Columns(seed="run_name")))
    varies = "rule varies inside cells ('mup', 'sp': parametrization='rule' compares them"
    assert any(varies in note for note in notes_of(table))
    compared = check_table(of_rules(), Reading(Columns(parametrization="rule")))
    assert not any("varies" in note for note in notes_of(compared))


def test_a_ladder_is_read_where_the_columns_that_change_with_its_scale_are_named():
    shapes = runs().assign(depth=[12] * 6 + [3] * 6)
    with pytest.raises(TableError, match="mixes several depths .*; give along='depth' if it grows"):
        check_table(shapes)
    table = check_table(shapes, Reading(Columns(along=("depth",))))
    pd.testing.assert_frame_equal(table.runs, check_table(runs()).runs)
    with pytest.raises(TableError) as caught:  # which no ladder is
        check_table(runs().assign(depth=[12, 3] * 6))
    assert "along" not in str(caught.value)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, -1.0])
def test_settings_and_scales_that_are_no_finite_numbers_above_zero_are_refused(value):
    table = check_table(runs())
    for name in ("epsilon", "delta"):
        with pytest.raises(ConfigError, match=f"{name} {value} is not allowed: it must be above 0"):
            analyze(table, **{name: value})
    with pytest.raises(ConfigError, match=f"chance {value} is not allowed"):
        check_table(runs(), Reading(chance=value))
    for column in ("width", "lr") if value != 0 else ("width",):
        with pytest.raises(TableError, match=f"{column} must be (above 0|0 or more|finite), but row 0 has"):
            check_table(runs(**{column: [value, *runs()[column][1:]]}))


def test_states_of_trackers_are_not_finished():
    """Of Weights & Biases, Slurm and MLflow, in any case; a run that failed is no divergence unless said."""
    states = ["running", "Crashed", "KILLED", "Failed", "preempted", "node_fail", "Timed Out", "FINISHED"]
    frame = runs().assign(State=states + ["completed", "Success", "COMPLETE", "terminated"])
    frame.loc[3, "loss"] = np.nan
    table = check_table(frame)
    assert len(table.runs) == 5 and np.isfinite(table.runs["loss"]).all()
    assert any("1 running" in n and "1 Failed" in n and "runs left out" in n for n in notes_of(table))
    failed = check_table(frame, Reading(states=States(diverged=("failed",))))
    assert np.isinf(failed.runs["loss"]).sum() == 1 and "diverged runs, kept as +inf: 1" in notes_of(failed)


def test_states_that_are_not_known_are_listed_with_how_to_map_them():
    frame = runs().assign(status=["ok", "cooked", "ok", None] + ["finished"] * 8)
    sentence = r"not known: 'ok' \(2 rows\), .*'empty' \(1 rows\); give states='ok=unfinished'"
    with pytest.raises(TableError, match=f"status has states that are {sentence}"):
        check_table(frame)
    table = check_table(frame, Reading(states=States(("OK",), ("cooked",), ("empty",))))
    assert len(table.runs) == 11 and np.isinf(table.runs["loss"]).sum() == 1
    with pytest.raises(TableError, match="no row has the status 'crashd' that was given as diverged; "):
        check_table(frame, Reading(states=States(diverged=("crashd",))))
    with pytest.raises(TableError, match="state 'ok' was given two meanings"):
        States(("ok",), ("OK",))


@pytest.mark.parametrize("without", ["", "loss", "width", "lr"])
def test_a_name_of_two_columns_is_refused_whatever_it_names(without):
    frame = runs(status="finished", trial_id="a", wall_time_s=1.0, other=0).drop(columns=without or [])
    for name in frame:
        with pytest.raises(TableError, match=f"table has two columns '{name}'"):
            check_table(pd.concat([frame, frame[[name]]], axis=1))


def test_a_cost_that_is_no_number_is_noted_and_not_used():
    table = check_table(runs(wall_time_s=["0:01:23"] * 12))
    assert table.runs["cost"].isna().all()
    assert any("wall_time_s must be numbers" in n and "the column is not used" in n for n in notes_of(table))


@pytest.mark.nightly
def test_a_million_rows_with_a_seed_a_row_take_time_and_memory_in_proportion():
    """They were a design matrix of 73 GiB. A child, so that its peak memory is its own."""
    code = """
import resource, time, numpy as np, pandas as pd
from mup_tpu.analysis import analyze, check_table
generator, took = np.random.default_rng(0), []
for n in (10**5, 10**6):
    x = generator.integers(-10, -5, n)
    loss = 2.5 + 0.02 * (x + 8) ** 2 + 0.01 * generator.standard_normal(n)
    width = generator.choice([64, 128], n)
    table = pd.DataFrame({"width": width, "lr": 2.0**x, "seed": np.arange(n), "loss": loss})
    began = time.process_time()
    result = analyze(check_table(table)).results[0]
    took.append(time.process_time() - began)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(took[1] / took[0], peak, *(o.x for o in result.optima))
"""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    ratio, gib, *optima = map(float, ran.stdout.split())
    assert ratio < 30 and gib < 4
    assert optima == pytest.approx([-8, -8], abs=0.01)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lost", [1e100, -1e300, math.inf])
def test_a_loss_beyond_all_bounds_is_a_divergence(lost):
    """Its square overflowed, with a warning of numpy."""
    table = runs()
    table.loc[table["lr"] == 2.0**-7, "loss"] = lost
    checked = check_table(table).runs
    assert np.isinf(checked["loss"]).tolist() == (checked["x"] == -7).tolist()
    analyze(check_table(table))


def trials() -> pd.DataFrame:
    """Five trials that vary learning rate and init alone."""
    same = dict.fromkeys(CONFIGURED, 1.0) | {"data_fingerprint": "0"}
    rows = [
        ("stopped", 100, 2.4, 0.001, 0.1),
        ("finished", 500, 1.7, 0.004, 0.2),
        ("stopped", 200, 2.1, 0.002, 0.1),
        ("diverged", 40, math.inf, 0.5, 0.1),
        ("finished", 500, 1.6, 0.008, 0.1),
    ]
    names = ("status", "steps_done", "loss", "lr", "init_std")
    return pd.DataFrame([same | dict(zip(names, row, strict=True)) for row in rows])


def test_finished_trials_come_first_by_loss_and_only_what_was_varied_is_shown():
    assert ranked(trials())["lr"].tolist() == [0.008, 0.004, 0.002, 0.001, 0.5]
    assert varied(trials()) == ["lr", "init_std"]
