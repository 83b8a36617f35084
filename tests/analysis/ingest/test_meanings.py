"""What the loss of a table means: perplexity is converted, a score is refused, others are noted."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, analyze, check_table, predict
from mup_tpu.analysis.ingest.table_values import LossUnit, numbers, plain_sizes
from mup_tpu.errors import ConfigError, TableError
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


def test_a_perplexity_is_above_0_and_its_error_is_converted_too():
    with pytest.raises(TableError, match="must be above 0, but row 0 has -1"):
        check_table(renamed("val_ppl", -1.0))
    perplexity = np.exp(RUNS["loss"])
    table = check_table(renamed("val_ppl", perplexity).assign(val_ppl_stderr=perplexity / 50))
    np.testing.assert_allclose(table.runs["loss_error"], 0.02)


@pytest.mark.parametrize("name", ["val_acc", "test/accuracy", "psnr", "arc_score", "bleu", "eval_reward"])
def test_a_score_is_refused_unless_it_is_called_a_loss(name):
    with pytest.raises(TableError, match=f"{name} is a score, so higher is better"):
        check_table(renamed(name), Reading(Columns(loss=name)))
    named = Reading(Columns(loss=name), unit=LossUnit("nat"))
    assert len(check_table(renamed(name), named).runs) == len(RUNS)


@pytest.mark.parametrize(
    "name, is_noted", [("mse", True), ("metric", True), ("c4_loss", False), ("nll", False)]
)
def test_a_metric_that_is_no_cross_entropy_is_noted(name, is_noted):
    notes = notes_of(check_table(renamed(name), Reading(Columns(loss=name))))
    assert any(f"{name} may not be in nat per token: regrets" in note for note in notes) == is_noted


def test_a_run_that_lost_its_summary_is_missing_and_not_diverged():
    """Its tracker says that it finished, with no metric at all."""
    lost = RUNS.assign(**{"train/loss": RUNS["loss"]}, State="finished").rename(columns={"loss": "val/loss"})
    lost.loc[3, ["val/loss", "train/loss"]] = np.nan
    lost.loc[4, ["val/loss", "train/loss"]] = [np.nan, 7.0]
    table = check_table(lost)
    assert len(table.runs) == len(RUNS) - 1 and np.isinf(table.runs["loss"]).sum() == 1
    assert "1 runs left out, since none of their metrics has a value" in notes_of(table)


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        (["15m", "130M", "1_3b", "1.3B"], [15e6, 130e6, 1.3e9, 1.3e9]),
        (["d512", "d_model=512", "~512", "512 (15M)", "512.0"], [512] * 5),
        (["1,024", "16,384", "4,096.0"], [1024, 16384, 4096]),
    ],
)
def test_sizes_as_people_write_them(texts, sizes):
    assert [float(text.replace(",", "")) for text in plain_sizes(pd.Series(texts))] == sizes


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["2^-8", "2**-7", "2⁻⁶", "10^-3", "3·10⁻⁴"], [2**-8, 2**-7, 2**-6, 1e-3, 3e-4]),
        (["0.7x", "1×", "3e-3*", "4†", "−5", "~6"], [0.7, 1, 3e-3, 4, -5, 6]),
        (["12.5%", "1%"], [0.125, 0.01]),
        (["50%", "inf", ""], [0.5, np.inf, np.nan]),
        (["1e-3%"], "c must be numbers, but row 0 has '1e-3%'"),
        (["10^999"], "c must be numbers, but row 0 has '10^999'"),
        (["1,5", "2,25e-3", "1.234,5"], [1.5, 2.25e-3, 1234.5]),
        (["2,5", "2,345", "3", ""], [2.5, 2.345, 3, np.nan]),
        (["0,125", "2,345"], [0.125, 2.345]),
        (["1.234,5", "1.234.567", "12"], [1234.5, 1234567, 12]),
        (["1,234.5", "2,345", "2.5"], [1234.5, 2345, 2.5]),
        (["1,234,567", "1,234"], [1234567, 1234]),
        (["1 234.5", "12 345"], [1234.5, 12345]),
        ([" 2.5 ", "1e-3", "+.5", "NaN", "inf", "null"], [2.5, 0.001, 0.5, np.nan, np.inf, np.nan]),
        (["diverged", "∞", "inf", "div."], [np.inf] * 4),
        (["95%", "12"], "c mixes percent and plain numbers: row 0 has '95%', row 1 has '12'"),
        (["1,234"], "c of row 0 is '1,234', which may be 1.234 or 1234: write it with a point"),
        (["1,5", "1.5"], "c mixes decimal commas and points"),
        (["3.4 (crashed)", "1"], "c must be numbers, but row 0 has '3.4 (crashed)'"),
    ],
)
def test_numbers_as_people_write_them(texts, values):
    if isinstance(values, str):
        with pytest.raises(TableError) as error:
            numbers(pd.Series(texts), "c")
        assert str(error.value).startswith(values)
    else:
        np.testing.assert_allclose(numbers(pd.Series(texts), "c"), values)


@pytest.mark.parametrize("written", ["params_wd", "config/wd", "optim.wd"])
def test_a_column_of_a_tracker_may_be_given_by_its_last_name(written):
    table = RUNS.rename(columns={"lr": written})
    assert len(check_table(table, Reading(Columns(hyperparameter="wd"))).runs) == len(RUNS)


def test_runs_of_one_size_have_an_optimum_and_no_prediction():
    runs = RUNS[RUNS["width"] == 64].drop(columns="width")
    analysis = analyze(check_table(runs))
    assert notes_of(analysis.table)[-1].endswith("a model of size 2 is twice as large")
    assert abs(analysis.results[0].optima[0].x + 8) < 0.1
    with pytest.raises(TableError, match="a prediction needs runs at 2 values of size, and these are of one"):
        predict(analysis.table, at=[])


def test_repeats_that_a_column_tells_apart_are_no_seeds():
    with pytest.raises(TableError, match="they differ in recipe"):
        check_table(RUNS.drop(columns="seed").assign(recipe=np.where(RUNS["seed"], "a", "b")))


@pytest.mark.parametrize(
    ("unit", "sentence"),
    [
        ({"name": "dit"}, "loss_unit 'dit' is not one of 'auto', 'nat', 'bit', 'bpb'"),
        ({"bytes_per_token": -1.0}, "bytes_per_token -1.0 is not allowed: it must be above 0"),
    ],
)
def test_units_that_are_none_are_one_sentence(unit, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LossUnit(**unit)


def test_bits_a_token_are_asked_for():
    in_bits = check_table(renamed("loss", RUNS["loss"] / np.log(2)), Reading(unit=LossUnit("bit")))
    np.testing.assert_allclose(in_bits.runs["loss"], EXPECTED["loss"])
    assert check_table(RUNS).notes == ()


MEANS = RUNS[::2].drop(columns="seed").rename(columns={"loss": "val_loss"}).reset_index(drop=True)


@pytest.mark.parametrize("sign", ["±", " ± ", "+/-", " +- "])
def test_errors_behind_a_sign_are_the_losses_own(sign):
    cells = [f"{loss:.4f}{sign}{0.002 * (1 + i % 2)}" for i, loss in enumerate(MEANS["val_loss"])]
    table = check_table(MEANS.assign(val_loss=[*cells[:-1], "inf"]))
    assert table.runs["loss"].tolist() == pytest.approx([*MEANS["val_loss"][:-1], np.inf], abs=1e-4)
    assert table.runs["loss_error"].tolist()[:-1] == pytest.approx([0.002 * (1 + i % 2) for i in range(14)])
    assert any("standard errors of its means" in note for note in notes_of(table))


@pytest.mark.parametrize("loss", ["val_loss", "eval_loss", "loss"])
def test_columns_of_errors_and_of_deviations_with_their_counts_are_the_same(loss):
    runs = MEANS.rename(columns={"val_loss": loss})
    table = check_table(runs.assign(**{f"{loss}_std": 0.01, "n_seeds": 4}))
    assert f"the standard error of {loss} is {loss}_std over the square root of n_seeds" in notes_of(table)
    tables = [table, *(check_table(runs.assign(**{name: 0.005})) for name in (f"{loss}_se", "stderr"))]
    # A name with the loss's comes before one without.
    for one in (*tables, check_table(runs.assign(**{"stderr": 9.0, f"{loss}_se": 0.005}))):
        assert one.runs["loss_error"].tolist() == pytest.approx([0.005] * 15)


def test_larger_errors_make_wider_intervals():
    tables = (check_table(MEANS.assign(val_loss_se=error)) for error in (0.001, 0.02))
    narrow, wide = (analyze(table).results[0].optima[0] for table in tables)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_a_deviation_of_an_unknown_number_of_runs_is_not_used():
    table = check_table(MEANS.assign(val_loss_std=0.01))
    assert table.runs["loss_error"].isna().all()
    assert any("val_loss_std is not used: its number of runs is needed" in note for note in notes_of(table))
