"""The memory that a pack is estimated to need, beside what was measured; and packs that do not fit."""

from pathlib import Path

import pandas as pd
import psutil
import pytest

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.errors import DeviceFailed, PackTooLarge
from mup_tpu.training.pack import check_fits, device_errors, estimate_pack_bytes

MEASURED = Path(__file__).with_name("measured")
FIELDS = (
    "architecture", "optimizer", "precision", "width", "depth", "head_size", "sequence_length", "batch_size",
)  # fmt: skip


@pytest.mark.parametrize(("table", "kind"), [("gpu_memory", "cuda"), ("tpu_memory", "xla")])
def test_estimate_is_half_to_twice_the_measured_need(table, kind):
    """What torch's allocator took from CUDA, and what the compilers of TPU v4 and v5e need on one chip."""
    ratios = []
    for row in pd.read_csv(MEASURED / f"{table}.csv").to_dict("records"):
        row.setdefault("head_size", 32 if row["width"] < 512 else 64)
        fields = {name: row[name] for name in FIELDS if name in row}
        trial = Trial().replace(**fields, base_width=fields["head_size"])
        estimated = estimate_pack_bytes(
            trial, row["vocab_size"], row["members"], row.get("execution", "vmap"), kind=kind,
            micro_batches=row.get("micro_batches", 1),
        )  # fmt: skip
        measured = row["reserved_gib"] * 2**10 if kind == "cuda" else row["argument_mib"] + row["temp_mib"]
        ratios.append(estimated / 2**20 / measured)
    ratios = pd.Series(ratios)
    assert 0.8 < ratios.median() < 1.25
    assert ratios.between(0.5, 2).mean() > 0.85


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_muon_keeps_one_number_less_of_each_of_a_hidden_matrix_than_adamw(execution):
    trial, members = Trial().replace(width=256), 4
    muon, adamw = (
        estimate_pack_bytes(trial.replace(optimizer=o), 256, members, execution) for o in ("muon", "adamw")
    )
    a_block = 256 * (3 * 256) + 256 * 256 + 2 * 256 * (4 * 256)
    assert adamw - muon == 4 * members * trial.model.depth * a_block
    doubled = estimate_pack_bytes(
        trial.replace(optimizer="adamw", precision="float64"), 256, members, execution
    )
    assert doubled == pytest.approx(2 * adamw)


def test_a_pack_too_large_for_the_machine_is_refused_with_the_size_that_fits():
    device = get_device("cpu")
    trial = Trial().replace(width=256, depth=8)  # small: two fit beside whatever else runs here
    one, two = (estimate_pack_bytes(trial, 256, members, "loop") for members in (1, 2))
    members = 2 + psutil.virtual_memory().total // (two - one)
    with pytest.raises(
        PackTooLarge, match=r"trials of 6\.42M parameters need about .* GiB, and .* free"
    ) as error:
        check_fits(trial, 256, members, device, "loop")
    assert 1 < error.value.fits < members
    check_fits(trial.replace(width=2**20), 256, 1, device, "loop")  # a single trial is tried in any case


def test_only_running_out_of_memory_halves_a_pack():
    def fill() -> None:
        import torch

        torch.empty(2**60, dtype=torch.uint8)

    with pytest.raises(PackTooLarge, match="6 trials ran out of memory") as error, device_errors(6):
        fill()
    assert error.value.fits == 3
    with pytest.raises(PackTooLarge, match="can't start new thread"), device_errors(2):
        raise RuntimeError("can't start new thread")  # as Python says it where a stack finds no room
    with pytest.raises(PackTooLarge, match="ALLOC_FAILED"), device_errors(2):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    with pytest.raises(PackTooLarge, match="a trial ran out .*allocate memory") as error, device_errors(1):
        fill()
    assert error.value.fits == 0
    with pytest.raises(DeviceFailed, match="the GPU failed .CUDA error: an illegal"), device_errors(2):
        raise RuntimeError(
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ..."
        )
    with pytest.raises(RuntimeError, match="something else"), device_errors(6):
        raise RuntimeError("something else")
