"""Plug-ins of torch, such as TorchTPU: our processes load none, and a user's program does."""

import os
import subprocess
import sys

import pytest

PLUG = "import os\ndef load():\n    open(os.environ['LOADED'], 'a').write(f'{os.getpid()} ')\n"


@pytest.fixture
def run(tmp_path):
    """Run Python beside a package with a plug-in of torch; return the output and who has loaded it."""
    (tmp_path / "plug.py").write_text(PLUG)
    (tmp_path / "plug-1.dist-info").mkdir()
    (tmp_path / "plug-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1\n")
    entry = "[torch.backends]\nplug = plug:load\n"
    (tmp_path / "plug-1.dist-info" / "entry_points.txt").write_text(entry)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "LOADED": str(tmp_path / "loaded")}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)

    def run(*words):
        (tmp_path / "loaded").unlink(missing_ok=True)
        ended = subprocess.run(
            [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        loaded = tmp_path / "loaded"
        return ended, loaded.read_text().split() if loaded.exists() else []

    return run


@pytest.mark.slow
def test_our_processes_load_no_plug_in_and_their_children_may(run):
    code = (
        "import gc, os, sys, mup_tpu.jobs.preload; is_frozen = gc.get_freeze_count() > 10_000\n"
        "print('torch' in sys.modules, is_frozen, 'TORCH_DEVICE_BACKEND_AUTOLOAD' in os.environ)"
    )
    ended, loaded = run("-c", code)
    assert ended.stdout.split() == ["True", "True", "False"] and not loaded, ended.stderr


def test_a_plug_in_is_loaded_for_its_device(run):
    assert run("-c", "from mup_tpu.internals import load_backend; load_backend('plug')")[1]
