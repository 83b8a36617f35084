"""Drivers that train for one results folder at the same time, with checkpoints."""

import json

import pytest

from mup_tpu.config import RunOptions
from mup_tpu.files import Folder
from mup_tpu.jobs.this_machine import start_process
from mup_tpu.store import load_runs
from mup_tpu.tuning.runner import CheckpointFolders

DRIVERS = 2


@pytest.mark.nightly
def test_drivers_that_share_a_folder_all_end_well(tiny, tmp_path):
    """Each driver packs the same trials differently, and checkpoints every third step."""
    results = tmp_path / "results"
    base = json.dumps(tiny.replace(steps=6).to_dict())
    script = (
        "import json, os\nfrom rich.console import Console\nfrom mup_tpu.config import *\nfrom "
        "mup_tpu.config.toml import from_dict\nfrom mup_tpu.tuning.sweep import run_sweep\nbase = "
        f"from_dict(Trial, json.loads({base!r}))\nsweep = Sweep('shared', base, "
        "scale={'width': (32,)}, tune={'learning_rate': (0.003, 0.01)}, num_seeds=2 + n,\n"
        "              compare={'parametrization': ('mup',)})\nrun = "
        "RunOptions(checkpoint_every=3, threads=max(2, os.cpu_count()))\nrun_sweep(sweep, results, "
        "SweepOptions(pack_size=1 + n % 2), run, Console(quiet=True))\n"
    )
    # Forked from a process that has imported torch.
    drivers = [start_process(exec, (script, {"results": str(results), "n": n})) for n in range(DRIVERS)]
    for driver in drivers:
        driver.join(timeout=500)
    assert [driver.exitcode for driver in drivers] == [0] * DRIVERS, "see what they said"
    runs = load_runs(results)
    assert runs["status"].tolist() == ["finished"] * 6
    assert not (results / "checkpoints").exists()


def test_a_pack_of_another_driver_keeps_its_checkpoints_until_all_of_its_trials_are_done(tiny, tmp_path):
    """A driver that trained some of the same trials ends first."""
    run = RunOptions(checkpoint_every=1)
    folders = CheckpointFolders(Folder(tmp_path), lambda t: f"seed{t.train.seed}", run)
    one, both = [tiny], [tiny, tiny.replace(seed=1)]
    assert folders.of(one) != folders.of(both) != folders.of(both[::-1])
    for pack in (one, both):
        meta = {"trial_ids": [f"seed{t.train.seed}" for t in pack]}
        Folder(folders.of(pack)).write("step-00000005/meta.json", json.dumps(meta).encode())
    torn = Folder(tmp_path / "checkpoints" / "seed0-00000000")
    torn.write("step-00000005/meta.json", b"[1")
    folders.remove_done(one, lambda: {"seed0"})
    assert [str(path) for path in (tmp_path / "checkpoints").iterdir()] == [folders.of(both)]
    folders.remove_done(one, lambda: {"seed0", "seed1"})
    assert not (tmp_path / "checkpoints").exists()
