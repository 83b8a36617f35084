"""Examples of pages and of `examples/`, as somebody runs them."""

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console

from mup_tpu.store import load_runs

ROOT = Path(__file__).parents[2]


def test_the_pages_example_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL)
    exec(compile(example, "study.md", "exec"), {"__name__": "__main__"})
    assert "TRANSFERS (one look): learning_rate*" in capsys.readouterr().out
    assert Path("runs/mine/transfer.png").stat().st_size > 10_000
    plt.close("all")


def test_the_numpy_example_trains(tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "numpy_mlp.py"))
    study = example["study_in"](tmp_path, widths=(32, 128), exponents=(-7, -6))
    study.run(example["train"], workers=2, console=Console(quiet=True))
    runs = load_runs(tmp_path)
    assert runs["status"].eq("finished").all() and len(runs) == 16
    at_base = runs[runs["width"] == 32].groupby("rule")["loss"].mean()
    assert at_base["mup"] == at_base["standard"], "at the base both rules are one"
    wide = runs[runs["width"] == 128].groupby("rule")["loss"].mean()
    assert wide["mup"] < wide["standard"] - 0.003, "too small a rate costs the standard rule more"
