"""Settings that stand in names of runs and files."""

import pandas as pd
import pytest

from mup_tpu.analysis import load_table
from mup_tpu.analysis.ingest.table_shapes import settings
from mup_tpu.cli import main
from mup_tpu.errors import TableError


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mup_w256_lr1.2e-04_s0", {"width": 256, "lr": 1.2e-4, "seed": 0, "parametrization": "mup"}),
        ("PyGemma-3072x12_bs2M_lr5e-02", {"width": 3072, "depth": 12, "lr": 0.05}),
        ("d_model: 64, learning_rate: 0.01", {"width": 64, "lr": 0.01}),
        ("sp/w64-lr2^-8-s1", {"width": 64, "lr": 2**-8, "seed": 1, "parametrization": "sp"}),
        ("n_layer=4 lr=0.5", {"depth": 4, "lr": 0.5}),
        ("gpt2-baseline", {}),
        ("20261126_final", {}),
    ],
)
def test_settings_are_read_from_a_run_s_name(name, found):
    assert settings(name) == found


def named_runs(rule="mup"):
    rows = [(w, 2.0**e, 3 - w / 640 + 0.05 * (e + 8) ** 2) for w in (64, 128, 256) for e in range(-10, -5)]
    return pd.DataFrame(
        [(f"{rule}_w{w}_lr{lr:.6e}", loss) for w, lr, loss in rows], columns=["run_name", "loss"]
    )


def test_named_columns_are_not_replaced_by_names(tmp_path):
    named_runs().assign(width=64, seed=range(15)).to_csv(tmp_path / "runs.csv", index=False)
    assert set(load_table(tmp_path / "runs.csv").runs["scale"]) == {64}


def test_names_that_say_a_setting_of_some_runs_alone_are_not_taken(tmp_path):
    runs = named_runs()
    runs.loc[3, "run_name"] = "mup_base"
    runs.to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(TableError, match="no column 'width', 'lr'; it has run_name, loss"):
        load_table(tmp_path / "runs.csv")


def test_several_tables_are_one_whose_files_say_what_their_rows_do_not(tmp_path, capsys):
    runs = named_runs()
    for width in (64, 128, 256):
        part = runs[runs["run_name"].str.contains(f"w{width}_")]
        names = part["run_name"].str.replace(f"mup_w{width}_", "")
        part.assign(run_name=names).to_csv(tmp_path / f"mup_w{width}.csv", index=False)
    main(["analyze", str(tmp_path / "mup_w*.csv")])
    out = " ".join(capsys.readouterr().out.split())
    assert "read from the names of the runs: width, parametrization" in out and "μP: " in out
