"""Several sweeps beside each other, as a table and through the command line."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mup_tpu import report
from mup_tpu.analysis import Columns, Reading, analyze, check_table, load_table
from mup_tpu.analysis.referee import Comparison, Ruling, parabola_slope
from mup_tpu.analysis.verdict import Regret
from mup_tpu.cli import main
from mup_tpu.config.columns import Table
from mup_tpu.store import Store
from mup_tpu.words.tables import ruling_tables


def swept(alpha, grid=range(-12, -4)) -> pd.DataFrame:
    """Parabolas whose optimum moves as width^alpha from 2^-8 at width 64."""
    generator = np.random.default_rng(0)
    cells = itertools.product((64, 128, 256), grid, range(2))
    runs = pd.DataFrame(cells, columns=["width", "lr", "seed"]).astype(float)
    away = runs["lr"] + 8 - alpha * np.log2(runs["width"] / 64)
    return runs.assign(
        lr=2 ** runs["lr"], loss=2.5 + 0.04 * away**2 + 0.002 * generator.normal(size=len(runs))
    )


@pytest.fixture(scope="module")
def table():
    sweeps = {"fine": swept(0.0), "broken": swept(-1.0), "unbracketed": swept(0.0, range(-12, -8))}
    return Comparison.of({n: analyze(check_table(frame)) for n, frame in sweeps.items()}).table()


def test_each_sweep_is_a_row_the_worst_regret_first(table):
    assert table["name"].tolist() == ["unbracketed", "broken", "fine"], "an optimum outside the grid is worst"
    unbracketed, broken, fine = table.itertuples()
    assert broken.verdict == "DRIFTS" and broken.alpha == pytest.approx(-1.0, abs=0.05)
    assert broken.regret == pytest.approx(0.04 * 2**2, abs=0.02)
    assert broken.regret_low < broken.regret < broken.regret_high
    assert fine.verdict == "TRANSFERS" and fine.regret < 0.01
    assert fine.best_loss == pytest.approx(2.5, abs=0.01)
    assert math.isnan(unbracketed.alpha) and math.isnan(unbracketed.regret)
    assert unbracketed.regret_status == "not known" and fine.regret_status == "estimated"


def test_rulings_name_their_rules_and_parametrizations_come_before_other_columns():
    reading = Reading(Columns(parametrization="architecture"))
    others = check_table(swept(0.0).assign(architecture="gpt2"), reading)
    both = check_table(pd.concat(swept(0.0).assign(parametrization=name) for name in ("mup", "sp")))
    sweeps = Comparison.of({"a": analyze(others), "mine": analyze(both)})
    assert [r.columns.parametrization for r in sweeps.rulings] == ["parametrization"] * 2 + ["architecture"]
    assert sorted(sweeps.table()["name"]) == ["a", "mine: mup", "mine: sp"]
    named = sweeps.table(lambda compared, column: f"{column} {compared}")
    assert sorted(named["name"])[1:] == ["mine: parametrization mup", "mine: parametrization sp"]


def test_a_folder_of_sweeps_is_compared_and_one_that_cannot_be_is_named(tmp_path, capsys):
    several = tmp_path / "several"
    Store(several / "empty", "empty")
    with pytest.raises(SystemExit):
        main(["analyze", str(several)])
    assert "no folder has a sweep to compare: empty: refused (error results folder" in capsys.readouterr().err
    rows = swept(0.0).assign(parametrization="mup", status="finished").reset_index(names="trial_id")
    for name in ("one", "two"):  # of runs that were never trained
        Store(several / name, name).append(rows.astype({"trial_id": str}).to_dict("records"), [])
    main(["analyze", "--figures", str(several)])
    out = capsys.readouterr().out
    assert "2 TRANSFERS" in out and "left out: empty (" in out
    figures = several / "figures"
    assert {p.name for p in figures.iterdir()} == {"sweeps.png", "sweeps.svg", "sweeps.csv"}
    assert pd.read_csv(figures / "sweeps.csv")["name"].tolist() == ["one", "two"]
    main(["analyze", str(several), "--where", "width>=128"])
    assert "2 OPEN" in capsys.readouterr().out, "two widths of three"


def test_stored_rows_say_what_was_made_and_how_long_it_took():
    table = load_table("results/nanogpt_mup")
    rulings = Comparison.of({"nanogpt_mup": analyze(table)}).rulings
    for rule, rows in table.stored.groupby("parametrization"):
        (of_rule,) = (ruling for ruling in rulings if ruling.rule == rule)
        assert (of_rule.architecture, of_rule.update_rule) == ("gpt2", "adamw")
        assert of_rule.hours == pytest.approx(rows["wall_time_s"].sum() / 3600)


def test_the_slope_by_hand_is_that_of_exact_parabolas_and_not_of_scales_without_a_minimum():
    x = np.arange(-12.0, -4)
    rows = pd.DataFrame(
        [
            {"width": w, "lr": 2.0**v, "loss": 2 + 0.04 * (v + 8.3 + 0.4 * k) ** 2 * (1 + k)}
            for k, w in enumerate((64, 128, 256))
            for v in x
        ]
        + [{"width": 512, "lr": 2.0**v, "loss": 2 - 0.1 * v} for v in x]
    )
    (result,) = analyze(check_table(rows)).results
    assert parabola_slope(result.curves) == pytest.approx(-0.4, abs=1e-9)
    assert math.isnan(parabola_slope(result.curves[-2:]))


def test_a_learning_rate_under_two_names_is_no_other_setting():
    frames = {"grid": swept(0.0), "study": swept(0.0).rename(columns={"lr": "learning_rate"})}
    of = Comparison.of({n: analyze(check_table(frame)) for n, frame in frames.items()})
    assert {r.columns.hyperparameter for r in of.rulings} == {"lr", "learning_rate"}
    (rows,) = (table.rows for table in ruling_tables(of, ("rule",)))
    assert [*map(list, rows)] == [["all runs"]] * 2


def test_the_exponent_of_a_flat_valley_is_not_known_in_any_table():
    exponents = {"flat": (1.09, -15.74, 17.92), "steep": (-1.2, -3.0, -0.2), "open": (0.1, -0.7, 0.8)}
    (result,) = analyze(check_table(swept(-0.5))).results
    first, last = (optimum.scale for optimum in (result.optima[0], result.optima[-1]))
    regret = Regret(first, last, 0.006, 0.002, 0.013, 0.007, "estimated", 0.1)
    result = replace(result, regrets=(regret,))
    rulings = [
        Ruling(one, Columns(), replace(result, drift=replace(result.drift, alpha=at, low=low, high=high)))
        for one, (at, low, high) in exponents.items()
    ]
    (table,) = ruling_tables(Comparison(tuple(rulings)))
    assert table.title == "width" and [row[4] for row in table.rows] == ["0.006 (0.002 to 0.013)"] * 3
    assert [row[3] for row in table.rows] == ["not known", "-1.20 (-3.00 to -0.20)", "0.10 (-0.70 to 0.80)"]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("<script>x</script>", "&lt;script&gt;x&lt;/script&gt;"),
        ("b|c`d", "b&#124;c&#96;d"),
        ("a\n| row", "a &#124; row"),
        ("\x1b[31m", r"&#92;x1b&#91;31m"),
    ],
)
def test_names_of_rules_are_text_on_a_page_of_markdown(name, written):
    page = report.Page("a", [Table(("rule",), [(name,)])], [], "")
    assert f"| {written} |\n" in report.render(page, "md")
