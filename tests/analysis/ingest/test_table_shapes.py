"""Wide tables and curves side by side that say too little; those that say enough: test_kinds.py."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import check_table
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of

RUNS = pd.DataFrame(
    [(w, 2.0**x, 2.5 + (x + 8) ** 2 / 20 + w / 1000) for w in (64, 128) for x in (-9, -8, -7)],
    columns=["width", "lr", "loss"],
)
BY_WIDTH = RUNS.pivot(index="lr", columns="width", values="loss")


def test_an_empty_cell_is_no_run_and_inf_a_diverged_one():
    wide = BY_WIDTH.rename(columns=str)
    wide.loc[2.0**-7, "128"] = np.nan
    table = check_table(wide.reset_index())
    assert len(table.runs) == 5
    assert "1 empty cells left out: write inf where a run diverged" in notes_of(table)
    wide.loc[2.0**-7, "128"] = np.inf
    assert check_table(wide.reset_index()).runs["loss"].tolist()[-1] == np.inf


def test_headings_that_nothing_explains_are_refused():
    wide = BY_WIDTH.rename(columns=str).rename_axis("x").reset_index()
    with pytest.raises(
        TableError, match="column for each of 64, 128, but no heading names these values or the rows"
    ):
        check_table(wide)
    with pytest.raises(TableError, match="no column 'loss'"):  # metrics, no axis
        check_table(RUNS[["width", "lr"]].assign(**{"acc@1": 0.5, "acc@5": 0.9}))


def curves(name, metrics=("val/loss",)) -> pd.DataFrame:
    columns = {
        f"{name(run)} - {metric}": [run.loss + 1, run.loss] for run in RUNS.itertuples() for metric in metrics
    }
    return pd.DataFrame({"Step": [10, 20], **columns})


def test_curves_of_runs_that_say_nothing_are_refused():
    with pytest.raises(TableError, match=r"curves of 6 runs whose names do not say .*wandb:ENTITY/PROJECT"):
        check_table(curves(lambda run: f"lively-sun-{run.Index}"))
    both = curves(lambda run: f"w{run.width}-lr{run.lr}", ("val/loss", "train/loss"))
    with pytest.raises(
        TableError, match="table holds curves of train/loss, val/loss: export the curves of one loss"
    ):
        check_table(both)
