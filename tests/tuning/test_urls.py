"""Results folders at fsspec URLs hold a sweep's table, checkpoints, logs and figures."""

import os
from dataclasses import replace

import pandas as pd
import pytest
from rich.console import Console

from mup_tpu.cli.analysis import analyze, show
from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.files import Folder
from mup_tpu.store import load_curves, load_runs
from mup_tpu.tuning.sweep import run_sweep

ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options that give a pack all cores: it runs in this process, where memory:// lives."""
NOT_RESULTS = ["wall_time_s", "finished_at", "threads", "git_commit"]


@pytest.fixture(scope="module")
def sweep(tiny):
    return Sweep("x", tiny, widths=(32,), learning_rates=(0.003, 0.01), parametrizations=("mup",))


@pytest.fixture(scope="module")
def local(sweep, tmp_path_factory):
    """Local folder of the sweep."""
    path = tmp_path_factory.mktemp("local")
    run_sweep(sweep, str(path), SweepOptions(), ALONE, Console(quiet=True))
    return path


def same_table(url, path):
    pd.testing.assert_frame_equal(load_curves(url), load_curves(path))
    ours, theirs = (load_runs(where).drop(columns=NOT_RESULTS) for where in (url, path))
    pd.testing.assert_frame_equal(ours, theirs)


def test_a_sweep_at_a_url_stores_checkpoints_logs_and_draws_there(sweep, local, capsys):
    url = "memory://bucket/sweep"
    folder = Folder(url)
    folder.write("checkpoints/another-drivers/step-00000010/meta.json", b"{}")
    run = replace(ALONE, checkpoint_every=10)
    console = Console()
    assert run_sweep(sweep, url, SweepOptions(), run, console) == {"finished": 2}
    same_table(url, local)
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
    assert f"figure: {url}/figures/transfer.png" in out and f"report: {url}/report.html" in out


@pytest.mark.slow
@pytest.mark.parametrize("ray", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_workers_share_a_url_with_their_driver(ray, sweep, local, local_ray, tmp_path):
    url = f"file://{tmp_path}/shared"
    run = RunOptions(checkpoint_every=10, threads=1)
    run_sweep(sweep, url, SweepOptions(ray=ray, pack_size=1), run, Console(quiet=True))
    runs = load_runs(url).assign(pack_size=2)
    pd.testing.assert_frame_equal(
        runs.drop(columns=NOT_RESULTS), load_runs(local).drop(columns=NOT_RESULTS), check_dtype=False
    )
    logs = [path.read_text() for path in (tmp_path / "shared" / "logs").glob("*.log")]
    assert sum(text.count("step 30/30") for text in logs) == 2
    assert not (tmp_path / "shared" / "checkpoints").exists()
