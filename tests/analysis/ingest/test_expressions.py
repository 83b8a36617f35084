"""Axes by expressions: values beside the same column computed by hand, and texts that are none."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import Columns, Reading, analyze, check_table, load_table, loss_laws
from mup_tpu.analysis.ingest.expressions import canonical, with_derived
from mup_tpu.cli import main
from mup_tpu.errors import TableError

RUNS = pd.DataFrame(
    [(w, 2.0**x, wd, 1000, w * w) for w in (64, 128, 256) for x in range(-12, -4) for wd in (0.1,)],
    columns=["width", "lr", "wd", "steps", "params"],
).assign(loss=lambda t: 2 + 0.03 * (np.log2(t["lr"] * t["wd"]) + 12) ** 2)


@pytest.mark.parametrize(
    ("text", "by_hand"),
    [
        ("lr*wd", lambda t: t["lr"] * t["wd"]),
        ("1/(lr*wd*steps)", lambda t: 1 / (t["lr"] * t["wd"] * t["steps"])),
        ("steps / params", lambda t: t["steps"] / t["params"]),
        ("width^2 * 12", lambda t: 12 * t["width"] ** 2),
        ("sqrt(width)*-2 + log2(steps)", lambda t: -2 * np.sqrt(t["width"]) + np.log2(t["steps"])),
        ("width\n*\n2", lambda t: 2 * t["width"]),
        ("lr*(wd + 1e-1)", lambda t: t["lr"] * (t["wd"] + 0.1)),
    ],
)
def test_expression_has_the_value_of_its_columns(text, by_hand):
    table, columns = with_derived(RUNS, Columns(scale=text))
    assert columns.scale == canonical(text)
    assert table[columns.scale].to_numpy() == pytest.approx(by_hand(RUNS).to_numpy())


def test_axis_by_expression_is_analyzed_as_a_column_of_its_values():
    by_name = check_table(RUNS, Reading(Columns(scale="params/width", hyperparameter="lr*(wd+0)")))
    by_hand = check_table(RUNS.assign(width=RUNS["width"], lr=RUNS["lr"] * RUNS["wd"]).drop(columns="wd"))
    (one,), (other,) = analyze(by_name).results, analyze(by_hand).results
    assert [o.x for o in one.optima] == pytest.approx([o.x for o in other.optima])
    assert (by_name.columns.scale, by_name.columns.hyperparameter) == ("params / width", "lr * (wd + 0)")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr*wight_decay", "lr\\*wight_decay: table has no column 'wight_decay'; it has width"),
        ("lr*widht", "the nearest is 'width'"),
        ("lr*__import__('os').getpid()", "has .*, and an axis has columns, numbers, "),
        ("lr if wd else steps*1", "table has no column"),
        ("lr*wd.real", "has 'wd.real', and an axis"),
        ("lr*True", "has 'True'"),
        ("lr % wd * 1", "has 'lr % wd'"),
        ("log2(lr, 2)", "has 'log2\\(lr, 2\\)'"),
        ("1/lr)", "1/lr\\) is no whole expression"),
        ("(lr", "\\(lr is no whole expression"),
        ("lr**", "is no whole expression"),
        ("*lr", "is no whole expression"),
        ("lr*9**9**9", "lr \\* 9 \\*\\* 9 \\*\\* 9 must be finite, but row 0 has inf"),
        ("optim/rate", "table has no column 'optim/rate'"),
        ("lr-lr", "'?lr - lr'? is 0 in every run"),
    ],
)
def test_texts_that_are_no_axis(text, sentence):
    with pytest.raises(TableError, match=sentence):
        check_table(RUNS, Reading(Columns(hyperparameter=text)))


def test_commands_take_expressions_of_folders_and_tables(tmp_path, capsys):
    main(["analyze", "results/lr_transfer", "--tune", "lr*batch_size", "--where", "parametrization=mup"])
    assert "best lr * batch_size by width" in " ".join(capsys.readouterr().out.split())
    RUNS.to_csv(tmp_path / "runs.csv", index=False)
    options = ["--scale", "params/width", "--tune", "lr*wd", "--at", "params/width=512"]
    main(["predict", str(tmp_path / "runs.csv"), *options])
    assert "lr * wd 2^-12" in capsys.readouterr().out
    table = load_table(str(tmp_path / "runs.csv"), Reading(Columns(scale="width*2")))
    assert sorted(set(table.runs["scale"])) == [128, 256, 512]


def test_law_of_the_loss_takes_an_expression_as_its_size():
    table = pd.DataFrame({"N": 10 ** np.linspace(6, 9, 8)}).assign(D=lambda t: 20 * t["N"])
    table["loss"] = 1.7 + 900 * (6 * table["N"] * table["D"]) ** -0.15
    laws = loss_laws(table, reading=Reading(Columns(scale="6*N*D")))
    assert laws.sizes == ("6 * N * D",)
    assert laws.laws[0].law.parameters == pytest.approx({"E": 1.7, "A": 900, "α": 0.15}, rel=0.01)
