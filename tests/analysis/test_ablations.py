"""Several sweeps beside each other, as a table and through the command line."""

import io
import math
from contextlib import redirect_stdout

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table
from mup_tpu.analysis.ablations import compare
from mup_tpu.cli import main
from mup_tpu.cli.console import Console
from mup_tpu.cli.results import SeveralSweeps
from mup_tpu.plots import ablations_figure
from mup_tpu.store import Store


def swept(alpha, grid=range(-12, -4)) -> pd.DataFrame:
    """Parabolas whose optimum moves as width^alpha from 2^-8 at width 64."""
    generator = np.random.default_rng(0)
    return pd.DataFrame(
        [
            {
                "width": w,
                "lr": 2.0**x,
                "seed": s,
                "loss": 2.5 + 0.04 * (x + 8 - alpha * math.log2(w / 64)) ** 2 + 0.002 * generator.normal(),
            }
            for w in (64, 128, 256)
            for x in grid
            for s in range(2)
        ]
    )


@pytest.fixture(scope="module")
def table():
    sweeps = {"fine": swept(0.0), "broken": swept(-1.0), "unbracketed": swept(0.0, range(-12, -8))}
    return compare({name: analyze(check_table(frame)) for name, frame in sweeps.items()})


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


def test_the_figure_has_a_row_a_sweep_and_says_what_is_not_known(table):
    figure = ablations_figure(table)
    axes = figure.axes
    assert [text.get_text() for text in axes[0].get_yticklabels()] == table["name"].tolist()
    for ax, column in zip(axes, ("alpha", "regret"), strict=True):
        drawn = sorted(x for bars in ax.containers for x in bars.lines[0].get_xdata())
        assert drawn == sorted(table[column].dropna())
        assert [text.get_text() for text in ax.texts] == ["not known"]
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said[:-1] == ["TRANSFERS", "DRIFTS", "INCONCLUSIVE"], "what is settled looks unlike what is open"


def test_a_folder_of_sweeps_is_compared_by_analyze_and_plot(tmp_path, capsys, stored_sweep):
    for name in ("one", "two"):
        stored_sweep(tmp_path / "several" / name, name)
    main(["analyze", str(tmp_path / "several")])
    assert "2 sweeps" in capsys.readouterr().out
    main(["analyze", "--figures", str(tmp_path / "several")])
    figures = tmp_path / "several" / "figures"
    assert {p.name for p in figures.iterdir()} == {"ablations.png", "ablations.svg", "ablations.csv"}
    assert pd.read_csv(figures / "ablations.csv")["name"].tolist() == ["one", "two"]


def test_a_folder_that_cannot_be_compared_is_named_and_the_others_are_shown(tmp_path, capsys, stored_sweep):
    several = tmp_path / "several"
    Store(several / "empty", "empty")
    with pytest.raises(SystemExit):
        main(["analyze", str(several)])
    assert "empty is left out: results folder" in capsys.readouterr().err
    stored_sweep(several / "one", "one")
    main(["analyze", str(several), "--where", "width>=128"])
    out = capsys.readouterr().out
    assert "1 sweeps" in out and "empty is left out" in out and "INCONCLUSIVE" in out, "two widths of three"


@pytest.fixture
def stored_sweep():
    """Makes a results folder of a sweep that was never trained."""

    def make(folder, name):
        rows = [
            row
            | {
                "trial_id": f"{row['width']}-{row['lr']}-{row['seed']}",
                "parametrization": "mup",
                "status": "finished",
            }
            for row in swept(0.0).to_dict("records")
        ]
        Store(folder, name).append(rows, [])

    return make


def test_rows_of_a_sweep_that_compares_several_say_which_and_may_name_them():
    frame = pd.concat(swept(0.0).assign(parametrization=name) for name in ("mup", "sp"))
    analyses = {"mine": analyze(check_table(frame))}
    assert sorted(compare(analyses)["name"]) == ["mine: mup", "mine: sp"]
    named = compare(analyses, lambda compared, column: f"{column} {compared}")
    assert sorted(named["name"]) == ["mine: parametrization mup", "mine: parametrization sp"]


def test_the_exponent_of_a_flat_valley_is_not_known_in_the_terminal_and_in_the_report():
    known = {
        "regret": 0.006,
        "regret_low": 0.002,
        "regret_high": 0.013,
        "best_loss": 1.5,
        "verdict": "DRIFTS",
    }
    exponents = {"flat": (1.09, -15.74, 17.92), "steep": (-1.2, -3.0, -0.2), "open": (0.1, -0.7, 0.8)}
    table = pd.DataFrame(
        {"name": name, "alpha": alpha, "low": low, "high": high, **known}
        for name, (alpha, low, high) in exponents.items()
    )
    sweeps = SeveralSweeps("sweeps")
    sweeps.compared = table
    shown = io.StringIO()
    with redirect_stdout(shown):
        sweeps.show(Console())
    (section,) = [s for s in sweeps.page().sections if s.title.startswith("Sweeps")]
    rows = section.blocks[0].rows
    assert [row[1] for row in rows] == ["not known", "-1.20 (-3.00 to -0.20)", "0.10 (-0.70 to 0.80)"]
    assert shown.getvalue().count("not known") == 1 and "-15.74" not in shown.getvalue()
