"""Checkpoints: whole, few, checked, and never executed."""

import json

import pytest
import torch

from mup_tpu.errors import StoreError
from mup_tpu.training.checkpoint import load_latest, save


def test_round_trip_keeps_the_last_two(tmp_path):
    for step in (5, 10, 15):
        save(
            tmp_path, step, {"w": torch.full((2, 3), float(step)), "n": torch.tensor(step)}, {"note": [step]}
        )
    found = load_latest(tmp_path)
    assert (found.step, found.meta["note"]) == (15, [15])
    assert torch.equal(found.tensors["w"], torch.full((2, 3), 15.0)) and found.tensors["n"] == 15
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]
    assert {p.name for p in (tmp_path / "step-00000015").iterdir()} == {"tensors.safetensors", "meta.json"}


def test_nothing_there():
    from pathlib import Path

    assert load_latest(Path("/nonexistent")) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "no meta", "torn meta"])
def test_damaged_checkpoint_is_passed_over_for_the_one_before_it(damage, tmp_path):
    for step in (5, 10):
        save(tmp_path, step, {"w": torch.arange(100.0) * step}, {})
    tensors, meta = (tmp_path / "step-00000010" / name for name in ("tensors.safetensors", "meta.json"))
    content = tensors.read_bytes()
    if damage == "flip":
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncate":
        tensors.write_bytes(content[:-10])
    elif damage == "no meta":
        meta.unlink()
    else:
        meta.write_text(meta.read_text()[:-5])
    with pytest.warns(UserWarning, match="step-00000010 is damaged"):
        found = load_latest(tmp_path)
    assert found.step == 5 and torch.equal(found.tensors["w"], torch.arange(100.0) * 5)


def test_a_folder_left_half_written_is_not_a_checkpoint(tmp_path):
    save(tmp_path, 5, {"w": torch.ones(1)}, {})
    partial = tmp_path / ".partial-00000010-1"
    partial.mkdir()
    (partial / "meta.json").write_text(json.dumps({"step": 10}))
    assert load_latest(tmp_path).step == 5


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        save(tmp_path / "file" / "checkpoints", 5, {"w": torch.ones(1)}, {})
