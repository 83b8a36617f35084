"""The command `plan`, and its way to a trained target."""

import json
import re

import pytest

from mup_tpu.analysis import load_table
from mup_tpu.store.header import load_predictions

MODEL = """experiment = "tiny"
learning_rates = ["2^-10", "2^-9", "2^-8", "2^-7", "2^-6", "2^-5", "2^-4", "2^-3"]
[base.model]
head_size = 4
base_width = 8
depth = 1
init_std = 0.1
[base.data]
sequence_length = 16
batch_size = 4
[base.train]
steps = 10
eval_batches = 1
"""


@pytest.mark.slow
def test_a_plan_is_swept_predicted_and_trained_as_it_is(tmp_path, outcome, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.toml").write_text(MODEL)
    code, out, err = outcome("plan", "model.toml", "--at", "width=64", "--budget", "5e11")
    assert code == 0, err
    first = re.search(r"1\. width 8, mup: (\d+) runs", out)
    assert first is not None and "wrote plan.toml; next:" in out
    commands = [line.split()[1:] for line in out.splitlines() if line.startswith("  mup-tpu")]
    assert [command[0] for command in commands] == ["sweep", "transfer"]
    code, out, err = outcome(*commands[0])
    assert code == 0, err
    assert "ran" in out and "mup" in out
    rows = load_table("results/tiny").runs
    assert (rows["purchase"] == 1).sum() == int(first[1])
    code, out, err = outcome("predict", "results/tiny", "--at", "width=64")
    assert code == 0 and "1 octave beyond width 32" in out, err
    code, out, err = outcome(*commands[1])
    assert code == 0 and "predicted on" in out, err
    assert [p.scale for p in load_predictions("results/tiny")] == [64]


def test_a_plan_says_time_by_its_machine_and_keeps_files(tmp_path, outcome, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("plan", "--at", "width=4096", "tokens=1e9", "batch_size=1024", "--budget", "1h", "--on")
    code, out, err = outcome(*arguments, "8xH100", "--mfu", "0.5", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["flops_per_second"] == pytest.approx(8 * 989e12 * 0.5)  # in bf16
    assert found["budget"] == pytest.approx(3600 * found["flops_per_second"])
    assert found["flops"] <= found["budget"] and not (tmp_path / "plan.toml").exists()
    (tmp_path / "plan.toml").write_text("mine")
    code, _, err = outcome(*arguments, "8xH100")
    assert code == 2 and "out 'plan.toml' exists already" in err
    assert (tmp_path / "plan.toml").read_text() == "mine"
    for option, value, sentence in (
        ("--on", "v9-9", "v9-9"),
        (
            "--on",
            "8xZ100",
            "on '8xZ100' is not a known machine: give GPUs, as 8xH100, or a TPU type, as v4-8",
        ),
        ("--on", "RTX4090", "on 'RTX4090' is not a known machine: give GPUs"),
        ("--mfu", "2", "mfu 2 is not allowed"),
    ):
        code, _, err = outcome("plan", "--at", "width=4096", "--budget", "1h", option, value)
        assert code == 2 and sentence in err
    code, _, err = outcome("plan", "--at", "width=4096")
    assert code == 2 and "a plan needs a budget" in err
