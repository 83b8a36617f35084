"""What the loss of a table means: perplexity is converted, a score is refused, others are noted."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, check_table, load_table
from mup_tpu.analysis.ingest.table_values import LossUnit
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of

RUNS = pd.DataFrame(
    [
        {"width": w, "lr": 2.0**x, "seed": s, "loss": 3 - w / 640 + 0.05 * (x + 8) ** 2 + 0.01 * s}
        for w in (64, 128, 256)
        for x in range(-10, -5)
        for s in (0, 1)
    ]
)
EXPECTED = check_table(RUNS).runs


def renamed(name: str, values=RUNS["loss"]) -> pd.DataFrame:
    return RUNS.drop(columns="loss").assign(**{name: values})


@pytest.mark.parametrize("name", ["val_ppl", "perplexity", "eval/perplexity"])
def test_perplexity_becomes_nat_by_its_logarithm(name):
    table = check_table(renamed(name, np.exp(RUNS["loss"])))
    np.testing.assert_allclose(table.runs["loss"], EXPECTED["loss"])
    assert any(note.startswith(f"{name} is a perplexity, converted to nat") for note in notes_of(table))
    with pytest.raises(TableError, match="must be above 0, but row 0 has -1"):
        check_table(renamed(name, -1.0))


def test_the_error_of_a_perplexity_is_converted_too():
    table = check_table(
        renamed("val_ppl", np.exp(RUNS["loss"])).assign(val_ppl_stderr=np.exp(RUNS["loss"]) / 50)
    )
    np.testing.assert_allclose(table.runs["loss_error"], 0.02)


@pytest.mark.parametrize(
    "name", ["val_acc", "test/accuracy", "psnr", "hellaswag_score", "bleu", "eval_reward"]
)
def test_a_score_is_refused(name):
    columns = Columns(loss=name)
    with pytest.raises(TableError, match=f"{name} is a score, of which more is better"):
        check_table(renamed(name), columns)
    assert len(check_table(renamed(name), columns, unit=LossUnit("nat")).runs) == len(RUNS), (
        "if it is so called"
    )


@pytest.mark.parametrize(
    ("name", "is_noted"), [("mse", True), ("my_metric", True), ("c4_loss", False), ("nll", False)]
)
def test_a_metric_that_is_no_cross_entropy_is_noted(name, is_noted):
    notes = notes_of(check_table(renamed(name), Columns(loss=name)))
    assert any(f"{name} may not be in nat per token" in note for note in notes) == is_noted


def test_a_column_that_gives_the_unit_of_each_row_must_have_one_value():
    with pytest.raises(TableError, match=r"several units \(column 'unit': bits, nats\)"):
        check_table(RUNS.assign(unit=np.where(RUNS["width"] > 64, "nats", "bits")))


def test_a_run_that_lost_its_summary_is_missing_and_not_diverged():
    """Its tracker says that it finished, with no metric at all."""
    lost = RUNS.assign(**{"train/loss": RUNS["loss"]}, State="finished").rename(columns={"loss": "val/loss"})
    lost.loc[3, ["val/loss", "train/loss"]] = np.nan
    lost.loc[4, ["val/loss", "train/loss"]] = [np.nan, 7.0]
    table = check_table(lost)
    assert len(table.runs) == len(RUNS) - 1 and np.isinf(table.runs["loss"]).sum() == 1
    assert "1 runs left out, since none of their metrics has a value" in notes_of(table)


def test_cells_with_settings_are_columns(tmp_path):
    """As W&B's API is documented to be exported: a dict in each cell."""
    rows = [
        {
            "summary": {"val/loss": loss, "lr": lr / 10, "_step": 9},
            "config": {"m": {"n_embd": w}, "o": {"lr": lr}},
        }
        for w, lr, loss in zip(RUNS["width"], RUNS["lr"], RUNS["loss"], strict=True)
    ]  # fmt: skip
    pd.DataFrame(rows).assign(seed=RUNS["seed"]).to_csv(tmp_path / "project.csv")
    table = load_table(tmp_path / "project.csv")
    assert (table.columns.scale, table.columns.hyperparameter) == ("n_embd", "lr")
    np.testing.assert_allclose(table.runs["x"], EXPECTED["x"])
