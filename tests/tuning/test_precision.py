"""Precision "auto": the folder's, else the device's; rows and ids hold what it became."""

import contextlib
import dataclasses
import json
import os

import pytest
from rich.console import Console

from mup_tpu.cli import main
from mup_tpu.config import RunOptions, Sweep, SweepOptions, Trial
from mup_tpu.config.columns import configured
from mup_tpu.config.toml import load_sweep, write_sweep
from mup_tpu.devices import peak
from mup_tpu.errors import ConfigError
from mup_tpu.store import Store, load_runs, load_values
from mup_tpu.tuning.runner import precision_of, refuse_another_device, with_precision
from mup_tpu.tuning.sweep import run_sweep

CPU = RunOptions(device="cpu", threads=os.cpu_count() or 1)
"""Options by which packs run in this process."""


@pytest.fixture
def cpu_with(tmp_path, monkeypatch):
    """Function that gives this machine a CPU with some flags."""

    def set_flags(flags: str) -> None:
        (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
        monkeypatch.setattr(peak, "_CPUINFO", tmp_path / "cpuinfo")

    return set_flags


def run(sweep: Sweep, folder, console: Console):
    return run_sweep(sweep, str(folder), SweepOptions(), CPU, console)


@pytest.mark.parametrize(("flags", "precision"), [("avx512_bf16", "bf16"), ("avx2", "float32")])
def test_a_new_folder_takes_the_device_s_precision_and_keeps_it_elsewhere(
    flags, precision, cpu_with, tiny, tmp_path
):
    asked, folder, console = (
        tiny.replace(precision="auto"),
        str(tmp_path / "r"),
        Console(record=True, width=200),
    )
    cpu_with(flags)
    assert with_precision(asked, folder, CPU, console) == tiny.replace(precision=precision)
    assert f"precision {precision}: this CPU " in console.export_text()
    cpu_with("avx2 avx512_bf16" if precision == "float32" else "avx2")  # another machine
    row = {"trial_id": "a", "status": "finished", "loss": 1.0, "device": "cpu"}
    Store(folder, "x").append([configured(tiny.replace(precision=precision)) | row])
    assert with_precision(asked, folder, CPU, console) == tiny.replace(precision=precision)
    assert f"precision {precision}: as the runs in {folder}" in console.export_text()


@pytest.mark.parametrize("device", ["tpu", "xla"])
def test_a_tpu_computes_in_bfloat16_whatever_its_host_s_cpu_has(device, cpu_with, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    cpu_with("avx2")
    assert precision_of(RunOptions(device=device))[0] == "bf16" and precision_of(CPU)[0] == "float32"


def test_rows_and_ids_are_of_the_precision_that_was_taken(one_width, cpu_with, tiny, tmp_path):
    tiny, console = tiny.replace(steps=2, eval_batches=1), Console(quiet=True)
    cpu_with("avx2")
    assert run(one_width(tiny.replace(precision="auto"), 0.01), tmp_path, console) == {"finished": 1}
    (config,) = load_runs(tmp_path)["config"]
    assert json.loads(config)["train"]["precision"] == "float32"
    assert not run(one_width(tiny.replace(precision="float32"), 0.01), tmp_path, console)


@pytest.mark.nightly
def test_train_dry_run_and_transfer_follow(one_width, cpu_with, corpus, tiny, tmp_path, capsys):
    cpu_with("avx512_bf16")
    tiny = tiny.replace(steps=2, eval_batches=1)
    file, results = tmp_path / "sweep.toml", str(tmp_path / "r")
    sweep = one_width(tiny.replace(precision="auto"), 0.01)
    file.write_text(write_sweep(sweep))
    assert load_sweep(file) == sweep
    main(["sweep", str(file), "--results", results, "--dry-run"])
    assert "precision bf16: this CPU has avx512_bf16" in capsys.readouterr().out
    main(["train", "--precision", "auto", "--results", results, "--device", "cpu", *_options(tiny)])
    assert load_values(results, "precision") == ["bf16"]
    main(["transfer", results, "--at", "width=64", "--device", "cpu", "--compare", "mup"])
    assert load_values(f"{results}_transfer", "precision") == ["bf16"]


@pytest.mark.parametrize(
    ("stored", "device", "refused"),
    [
        ("xla:CPU", "cpu", "holds runs of xla, and losses of devices drift apart; give --mix"),
        ("NVIDIA H100", "cpu", "holds runs of cuda"),
        ("cpu", "xla", "holds runs of cpu"),
        ("xla:TPU", "tpu", "holds runs of xla"),
        ("cpu", "cpu", None),
        ("tpu:v4", "tpu", None),
    ],
)
def test_a_folder_holds_runs_of_one_kind_of_device_unless_they_may_mix(stored, device, refused, tmp_path):
    Store(tmp_path, "x").append(
        [configured(Trial()) | {"trial_id": "a", "status": "finished", "loss": 1.0, "device": stored}]
    )
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        refuse_another_device(str(tmp_path), RunOptions(device=device))
    refuse_another_device(str(tmp_path), RunOptions(device=device, mix=True))
    refuse_another_device(str(tmp_path / "new"), RunOptions(device=device))


def _options(trial: Trial) -> list[str]:
    flat = {k: v for k, v in trial.flat().items() if v != Trial().flat()[k]}
    return [word for k, v in flat.items() for word in (f"--{k.replace('_', '-')}", str(v))]


def test_precisions_are_compared_by_name_alone(one_width, tiny, tmp_path):
    auto = one_width(tiny.replace(precision="auto"), 0.01)
    sweep = dataclasses.replace(auto, compare={"precision": ("float32", "bf16")})
    assert run(sweep, tmp_path, Console(quiet=True)) == {"finished": 2}
    with pytest.raises(ConfigError, match="precision 'auto' cannot be on an axis: give 'float32', 'bf16'"):
        dataclasses.replace(sweep, compare={"precision": ("float32", "auto")})


def test_auto_names_no_trial_and_a_typo_is_named(tiny):
    with pytest.raises(ConfigError, match="precision 'auto' has no trial_id yet: give 'float32'"):
        tiny.replace(precision="auto").trial_id("data")
    with pytest.raises(ConfigError, match="precision 'bf32' is not one of .*'bf16', 'auto'"):
        tiny.replace(precision="bf32")


def test_a_failed_trial_has_the_kind_of_the_device_it_was_for(one_width, tiny, tmp_path, monkeypatch):
    """Else the command that tries it again would be refused as one for another device."""

    def fails(*arguments):
        raise ValueError("no")

    monkeypatch.setattr("mup_tpu.training.loop.PackRun.__init__", fails)
    there = dataclasses.replace(CPU, device="auto")
    for _ in range(2):
        ended = run_sweep(one_width(tiny, 0.01), str(tmp_path), SweepOptions(), there, Console())
        assert ended == {"failed": 1}
    assert load_values(tmp_path, "device") == ["cpu"]
