"""Compiled steps: the same training as eager ones, by default where it pays, without a compiler never."""

import os
import subprocess
import sys

import pytest

from mup_tpu.config import RunOptions
from mup_tpu.devices import get_device
from mup_tpu.training import compilation
from mup_tpu.training.compilation import compiles
from mup_tpu.training.loop import run_to_end, train_pack


def wanted(trials, way="loop", **options):
    return compiles(RunOptions(**options), trials, 256, get_device("cpu"), way)


def test_left_to_itself_only_a_long_pack_of_members_in_turns_is_compiled(tiny, monkeypatch):
    monkeypatch.setattr(compilation, "_why_not", lambda precision: None)
    wide = tiny.replace(width=256, sequence_length=128, batch_size=16)
    short, long = [wide.replace(steps=100)], [wide.replace(steps=1000, seed=s) for s in range(4)]
    assert [wanted(short), wanted(long), wanted(long, way="vmap")] == [False, True, False]
    assert [wanted(short, compile="on"), wanted(long, compile="off")] == [True, False]


@pytest.mark.slow
@pytest.mark.skipif(compilation._why_not("float32") is not None, reason="torch.compile does not work here")
def test_compiled_members_train_as_eager_ones_do(tiny, dataset, monkeypatch):
    """The order of operations alone can differ; one member diverges and leaves."""
    rates = (0.01, 0.02, 1e9)
    trials = [tiny.replace(learning_rate=rate) for rate in rates]
    calls = []
    monkeypatch.setattr(compilation, "PAYS_FROM_FLOPS", 0.0)
    real = compilation.torch.compile
    monkeypatch.setattr(compilation.torch, "compile", lambda *a, **k: calls.append(1) or real(*a, **k))
    compiled = run_to_end(train_pack(trials, dataset, RunOptions()))
    assert calls, "it was compiled"
    eager = run_to_end(train_pack(trials, dataset, RunOptions(compile="off")))
    assert [row["status"] for row in compiled.rows] == [row["status"] for row in eager.rows]
    for ours, theirs in zip(compiled.rows[:2], eager.rows[:2], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["auto", "on"])
def test_without_a_working_compiler_auto_trains_eagerly_and_on_is_refused(compile, tmp_path):
    program = f"""
import logging
from mup_tpu.config import RunOptions, Trial
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError
from mup_tpu.training import compilation
logging.basicConfig(level="INFO")
compilation.PAYS_FROM_FLOPS = 0.0
try:
    print(compilation.compiles(RunOptions(compile={compile!r}), [Trial()], 256, get_device("cpu"), "loop"))
except ConfigError as error:
    print("refused:", error)
"""
    environment = os.environ | {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    if compile == "auto":
        assert result.stdout.strip() == "False"
        assert "the step is not compiled, which would be faster: " in result.stderr
    else:
        assert result.stdout.startswith("refused: compile 'on': torch.compile does not work here (")
