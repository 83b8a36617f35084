"""GPUs that cannot be used, are full, or fail while they train."""

import pytest


@pytest.mark.parametrize(
    ("environment", "settings", "why"),
    [
        ({"HOLLOW_GPU_DRIVER": "11040"}, {}, "NVIDIA driver on your system is too old (found version 11040)"),
        pytest.param({}, {"visible": "-1"}, "CUDA_VISIBLE_DEVICES='-1'", marks=pytest.mark.nightly),
        pytest.param({}, {"major": 5}, ", and NVIDIA H100 80GB HBM3 has 5.0",
                     marks=pytest.mark.nightly),
    ],
    ids=["old driver", "hidden", "old GPU"],
)  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_explained_once(hollow_gpu, monkeypatch, environment, settings, why):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    program = (
        "from mup_tpu.config import RunOptions\nfrom mup_tpu.cli.doctor import check_cuda\n"
        "from mup_tpu.devices import get_device\nfrom mup_tpu.errors import ConfigError\n"
        "from mup_tpu.jobs.this_machine import unused_gpus\n"
        "try: get_device('cuda')\nexcept ConfigError as error: "
        "print(error)\nprint(get_device('auto').name, unused_gpus(RunOptions()), check_cuda().problem, "
        "sep='\\n')\n"
    )
    refused, device, note, problem = hollow_gpu("-c", program, **settings).splitlines()
    assert why in refused and refused.endswith("; use --device cpu")
    assert device == "cpu"
    assert (why in note) == ("visible" not in settings)
    assert problem.startswith("torch sees none of 1 GPUs here") and why in problem


def test_trials_of_a_gpu_that_fails_are_tried_again_by_a_new_process(hollow_gpu, monkeypatch, tmp_path):
    """CUDA refuses all calls of a process whose GPU has failed: all later trials used to fail."""
    for name, value in {
        "TORCH_COMPILE_DISABLE": "1",
        "HOLLOW_GPU_FAULT": "719",  # cudaErrorLaunchFailure
        "HOLLOW_GPU_FAULT_AFTER": "300",
        "HOLLOW_GPU_FAULT_ONCE": str(tmp_path / "failed"),
    }.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "sweep.toml"
    file.write_text(
        'experiment = "failing"\ncompare = {parametrization = ["mup"]}\n'
        "tune = {learning_rate = [0.01, 0.02]}\nscale = {width = [32]}\n"
        "[base.model]\nbase_width = 32\nhead_size = 16\ndepth = 1\n"
        "[base.data]\nsequence_length = 32\nbatch_size = 4\n[base.train]\nsteps = 10\neval_batches = 1\n"
    )
    said = hollow_gpu("-m", "mup_tpu", "sweep", file, "--results", tmp_path / "swept", "--device", "cuda")
    assert "2 trials of width 32 is tried again (the GPU failed (CUDA error: unspecified launch" in said
    assert "2 finished; stored" in said


def test_the_time_of_runs_on_a_gpu_of_unknown_speed_is_not_told(hollow_gpu, tmp_path):
    """Peaks in float64 are not listed: a dry run used to tell of "nan h"."""
    file = tmp_path / "sweep.toml"
    file.write_text(
        'experiment = "slow"\ntune = {learning_rate = [0.01, 0.02]}\nscale = {width = [64, 128]}\n'
        '[base.model]\nbase_width = 64\n[base.train]\nsteps = 10\nprecision = "float64"\n'
    )
    program = (
        "import sys\nfrom mup_tpu.cli import main\nmain(['sweep', sys.argv[1], '--results', sys.argv[2], "
        "'--dry-run'])\nmain(['plan', sys.argv[1], '--at', 'width=512', '--budget', '2h'])\n"
    )
    said = " ".join(hollow_gpu("-c", program, file, tmp_path / "none", code=2).split())
    assert "the peak of NVIDIA H100 80GB HBM3 in float64 is not known, so no time is given" in said
    assert "error: the peak of NVIDIA H100 80GB HBM3 in float64 is not known: give --budget as FLOP" in said
    assert "nan" not in said
