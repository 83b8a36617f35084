"""Wide tables and curves side by side say what their long forms say."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import check_table, load_table
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of

RUNS = pd.DataFrame(
    [(w, 2.0**x, 2.5 + (x + 8) ** 2 / 20 + w / 1000) for w in (64, 128) for x in (-9, -8, -7)],
    columns=["width", "lr", "loss"],
)
BY_WIDTH = RUNS.pivot(index="lr", columns="width", values="loss")
BY_LR = BY_WIDTH.T


def losses(table) -> dict[tuple[float, float], float]:
    return {(run.scale, run.x): run.loss for run in table.runs.itertuples()}


EXPECTED = losses(check_table(RUNS))


@pytest.mark.parametrize(
    ("wide", "name"),
    [
        (BY_WIDTH, str),
        (BY_WIDTH, "width {}".format),
        (BY_WIDTH, "d_model={}".format),
        (BY_WIDTH, "loss_w{}".format),
        (BY_LR, str),
        (BY_LR, "lr={}".format),
        (BY_LR, "lr {:.9e}".format),
        (BY_LR, lambda lr: f"2^{int(np.log2(lr))}"),
        (BY_LR, lambda lr: f"{lr:.10f}".replace(".", ",")),
    ],
)
def test_a_column_for_each_width_or_learning_rate(tmp_path, wide, name):
    wide.rename(columns=name).to_csv(tmp_path / "wide.csv", sep=";")
    table = load_table(tmp_path / "wide.csv")
    assert losses(table) == pytest.approx(EXPECTED)
    assert "are read as losses, one column for each" in notes_of(table)[0]


def test_an_empty_cell_is_no_run_and_inf_a_diverged_one():
    wide = BY_WIDTH.rename(columns=str)
    wide.loc[2.0**-7, "128"] = np.nan
    table = check_table(wide.reset_index())
    assert len(table.runs) == 5
    assert "1 empty cells left out: write inf where a run diverged" in notes_of(table)
    wide.loc[2.0**-7, "128"] = np.inf
    assert losses(check_table(wide.reset_index()))[128, -7] == np.inf


def test_headings_that_nothing_explains_are_refused():
    wide = BY_WIDTH.rename(columns=str).rename_axis("x").reset_index()
    with pytest.raises(
        TableError, match="column for each of 64, 128, but no heading names these values or the rows"
    ):
        check_table(wide)
    with pytest.raises(TableError, match="no column 'loss'"):  # metrics, no axis
        check_table(RUNS[["width", "lr"]].assign(**{"acc@1": 0.5, "acc@5": 0.9}))


def curves(name, metrics=("val/loss",)) -> pd.DataFrame:
    """As Weights & Biases exports a panel: a column a run, with the extremes beside it."""
    columns = {"Step": [10, 20, 30]}
    for run in RUNS.itertuples():
        for metric in metrics:
            heading = f"{name(run)} - {metric}"
            columns |= {heading: [run.loss + 2, run.loss + 1, run.loss]}
            columns |= {f"{heading}__MIN": columns[heading], f"{heading}__MAX": columns[heading]}
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    "name",
    [
        lambda run: f"d_model: {run.width}, lr: {run.lr}",
        lambda run: f"w{run.width}-lr2^{np.log2(run.lr):g}-s0",
        lambda run: f"sp_width={run.width}_learning_rate={run.lr:.6e}",
    ],
)
def test_curves_side_by_side_whose_runs_names_say_what_they_are(name):
    table = check_table(curves(name))
    assert losses(table) == pytest.approx(EXPECTED)
    assert table.history is not None and len(table.history) == 18
    assert set(table.runs["compared"]) == ({"sp"} if name(RUNS.iloc[0]).startswith("sp") else {"all"})
    assert "6 columns are read as curves of val/loss" in notes_of(table)[0]


def test_curves_of_runs_that_say_nothing_are_refused():
    with pytest.raises(TableError, match=r"curves of 6 runs whose names do not say .*wandb:ENTITY/PROJECT"):
        check_table(curves(lambda run: f"lively-sun-{run.Index}"))
    both = curves(lambda run: f"w{run.width}-lr{run.lr}", ("val/loss", "train/loss"))
    with pytest.raises(
        TableError, match="table holds curves of train/loss, val/loss: export the curves of one loss"
    ):
        check_table(both)
