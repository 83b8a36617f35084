"""Results folders at fsspec URLs hold a sweep's table, checkpoints, logs and figures."""

import os
import re
from dataclasses import replace

import pandas as pd
from rich.console import Console

from mup_tpu.cli.analysis import analyze, show
from mup_tpu.config import RunOptions, SweepOptions
from mup_tpu.files import Folder
from mup_tpu.store import load_curves, load_runs
from mup_tpu.tuning.sweep import run_sweep

ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options that give a pack all cores: it runs in this process, where memory:// lives."""
NOT_RESULTS = ["wall_time_s", "finished_at", "threads", "git_commit"]


def test_a_sweep_at_a_url_stores_checkpoints_logs_and_draws_there(one_width, tiny, tmp_path, capsys):
    sweep = one_width(tiny, 0.003, 0.01)
    url, run, console = "memory://bucket/sweep", replace(ALONE, checkpoint_every=10), Console()
    folder = Folder(url)
    folder.write("checkpoints/another-drivers/step-00000010/meta.json", b"{}")
    assert run_sweep(sweep, url, SweepOptions(), run, console) == {"finished": 2}
    run_sweep(sweep, str(tmp_path), SweepOptions(), ALONE, Console(quiet=True))
    pd.testing.assert_frame_equal(load_curves(url), load_curves(tmp_path))
    ours, theirs = (load_runs(where).drop(columns=NOT_RESULTS) for where in (url, tmp_path))
    pd.testing.assert_frame_equal(ours, theirs)
    assert (folder / "checkpoints").names() == ["another-drivers"]
    (log,) = (folder / "logs").names()
    assert "step 20/30" in folder.read(f"logs/{log}").decode()
    assert not run_sweep(sweep, url, SweepOptions(), run, console), "what is stored is not run again"
    show(url)
    analyze((url,), report=True)
    assert {"transfer.png", "transfer.svg", "analysis.json"} <= set((folder / "figures").names())
    assert b"<html" in folder.read("report.html")
    out = capsys.readouterr().out
    assert "tokens/s in all" in out and "input wait" in out
    assert re.search(f"figures in {url}/figures: .*transfer.png", out) and f"report: {url}/report.html" in out
