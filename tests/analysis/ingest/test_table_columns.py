"""Columns are told by the names that people give them; two that differ are not chosen between in silence."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, check_table
from mup_tpu.analysis.ingest.table_columns import find_columns, means, plain_name, short_name
from mup_tpu.analysis.run_table import select
from mup_tpu.errors import TableError
from mup_tpu.store import Condition
from mup_tpu.words.reasons import notes as notes_of

RUNS = pd.DataFrame(
    [
        (w, 2.0**x, s, 2.5 + (x + 8) ** 2 / 20 + s / 100)
        for w in (64, 128)
        for x in (-9, -8, -7)
        for s in (0, 1)
    ],
    columns=["width", "lr", "seed", "loss"],
)


def named(width, lr, seed, loss, **others) -> pd.DataFrame:
    return RUNS.set_axis([width, lr, seed, loss], axis=1).assign(**others)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (("config/d_model", "config/lr", "config/seed", "val/loss"), ("d_model", "lr")),
        (("config.model.n_embd", "config.optim.lr", "config.seed", "summary.val/loss"), ("n_embd", "lr")),
        (("params.hidden_size", "params.learning_rate", "params.seed", "metrics.eval_loss"),
         ("hidden_size", "learning_rate")),
        (("hparams/dim", "hparams/max_lr", "hparams/seed", "hparam/val_loss"), ("dim", "max_lr")),
        (("hiddenSize", "learningRate", "randomSeed", "valLoss"), ("hiddenSize", "learningRate")),
        (("WIDTH", "LR (peak)", "Seed", "Loss [nat]"), ("WIDTH", "LR (peak)")),
        (("n_layer", "base_lr", "rng_seed", "final_loss"), ("n_layer", "base_lr")),
    ],
)  # fmt: skip
def test_usual_names_are_told_and_said_and_figures_call_them_short(names, short):
    table = check_table(named(*names))
    pd.testing.assert_frame_equal(table.runs, check_table(RUNS).runs)
    assert (table.columns.scale, table.columns.hyperparameter) == short
    assert notes_of(table)[0].startswith("columns recognized by their names: ")
    assert all(name in notes_of(table)[0] for name in names)
    assert "to choose others: hyperparameter, scale, loss" in notes_of(table)[0]


def test_a_name_that_is_given_is_taken_in_place_of_the_usual_one():
    frame = named("d_model", "lr", "seed", "val_loss", size=RUNS["width"] * 3, nll=RUNS["loss"] + 1)
    table = check_table(frame, Reading(Columns(scale="size", loss="nll")))
    assert table.runs["scale"].tolist() == (RUNS["width"] * 3).tolist()
    assert table.runs["loss"].tolist() == (RUNS["loss"] + 1).tolist()
    assert table.notes == ()


@pytest.mark.parametrize(
    "given, taken",
    [
        ({"hyperparameter": "lr"}, ("peak_lr",)),
        ({"hyperparameter": "lr", "tuned_beside": ("weight_decay",)}, ("peak_lr", "weight_decay")),
        ({"hyperparameter": "weight_decay", "tuned_beside": ("learning_rate",)}, ("weight_decay", "peak_lr")),
    ],
)
def test_a_given_name_is_the_only_column_of_its_meaning(given, taken):
    table = pd.DataFrame({"d_model": [64], "peak_lr": [0.1], "weight_decay": [0.1], "loss": [3.0]})
    _, columns = find_columns(table, Columns(**given, scale="width"), [])
    assert columns.tuned == taken and columns.scale == "d_model"
    _, columns = find_columns(table.assign(base_lr=[0.01]), Columns(**given, scale="width"), [])
    assert "peak_lr" not in columns.tuned, "two rates are not chosen between"


def test_a_rate_that_is_named_leaves_the_logged_one_aside_as_a_guessed_one_does():
    """A row a step: lr decays, peak_lr is the setting."""
    rows = [RUNS.assign(peak_lr=RUNS["lr"], lr=RUNS["lr"] * (1 - step / 9), step=step) for step in (0, 4, 8)]
    frame = pd.concat(rows, ignore_index=True)
    told, named_ = check_table(frame), check_table(frame, Reading(Columns(hyperparameter="peak_lr")))
    pd.testing.assert_frame_equal(told.runs, named_.runs)
    with pytest.raises(TableError, match="mixes several learning rates"):
        check_table(RUNS.assign(init_std=RUNS["lr"]), Reading(Columns(hyperparameter="init_std")))


def test_what_grows_is_the_first_size_that_varies_and_two_rates_that_differ_are_refused():
    frame = named("config/n_layer", "config/lr", "seed", "loss", **{"config/d_model": 256})
    assert check_table(frame).columns.scale == "n_layer"
    twice = named("d_model", "lr", "seed", "loss", hidden_size=RUNS["width"] * 2)
    assert check_table(twice).columns.scale == "d_model"  # the one says what the other does
    shuffled = np.roll(RUNS["lr"].to_numpy(), 1)
    with pytest.raises(TableError, match="columns max_lr and base_lr may both be the learning rate"):
        check_table(named("width", "max_lr", "seed", "loss", base_lr=shuffled))


def test_a_step_of_another_name_is_told_where_runs_have_several_rows():
    long = pd.concat([RUNS.assign(_step=t, loss=RUNS["loss"] + 1 / t) for t in (10, 20)])
    table = check_table(long)
    assert len(table.runs) == 12 and table.history is not None
    assert check_table(RUNS.assign(_step=range(12))).history is None


def test_where_takes_short_names_too():
    frame = named("config/d_model", "config/lr", "seed", "loss")
    assert len(select(frame, [Condition.parse("d_model=64")])) == 6
    with pytest.raises(TableError, match="no column 'model'"):
        select(frame, [Condition.parse("model=64")])


@pytest.mark.parametrize(
    ("read", "name", "result"),
    [
        (plain_name, " config/optim.dModel (features) ", "optim_d_model"),
        *((short_name, name, name) for name in ("lr_1.5", "params_non_embedding", "<b>[/b]")),
        *((short_name, name, "lr") for name in ("config/optim.lr", "params_lr")),
        *((means, name, "") for name in ("a/loss", "widths")),
        (means, "train/loss", "loss"),
        (means, "config/x/n_embd", "width"),
    ],
)
def test_names_are_read_as_people_write_them(read, name, result):
    assert read(name) == result
