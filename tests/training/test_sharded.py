"""A trial split over two processes is the trial in one: losses, weights, checkpoints."""

import dataclasses
import os

import pytest
import torch

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError, DeviceFailed
from mup_tpu.models import declare
from mup_tpu.training.loop import PackRun
from mup_tpu.training.pack import estimate_pack_bytes

RUN = RunOptions(log_every=1, checkpoint_every=2, threads=1)
SHARDED = dataclasses.replace(RUN, split_over=2)
GPT2 = {"parametrization": "mup"}
MOE = {"architecture": "moe", "num_experts": 4, "experts_per_token": 2, "balance_loss": 0.1}
LLAMA = {"architecture": "llama", "optimizer": "muon", "parametrization": "completep", "tied": False}


@pytest.mark.parametrize(
    "fields", [GPT2, MOE, pytest.param(LLAMA, marks=pytest.mark.nightly)], ids=["gpt2", "moe", "llama"]
)
def test_two_processes_train_as_one_and_their_checkpoint_goes_on_in_one(
    fields, tiny, dataset, tmp_path, recwarn, capfd
):
    trial = tiny.replace(
        precision="float64", steps=3, eval_batches=1, grad_clip=0.1, weight_decay=0.1, **fields
    )
    whole = PackRun([trial], dataset, RUN).finish()
    split = PackRun([trial], dataset, SHARDED, tmp_path).finish()
    continued = PackRun([trial], dataset, RUN, tmp_path)
    assert continued.pack.steps_done == 2
    for other in (split, continued.finish()):
        losses = zip(other.curves, whole.curves, strict=True)
        assert all(ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10) for ours, theirs in losses)
        weights = whole.pack.member_parameters(0)
        for name, weight in other.pack.member_parameters(0).items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-9, atol=1e-10)
    assert not [str(one.message) for one in recwarn], "a command would print them"
    os.write(1, b"said after it")
    assert capfd.readouterr().out == "said after it", "gloo's words are left out, and no others"


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"batch_size": 5}, {}, "split_over 2 is not allowed: it must divide batch_size 5"),
        ({}, {"execution": "vmap"}, "works on device xla, and on cpu and cuda where members train in turns"),
    ],
)
def test_what_cannot_be_split_is_refused(fields, options, message, tiny, dataset):
    with pytest.raises(ConfigError, match=message):
        PackRun([tiny.replace(**fields)], dataset, dataclasses.replace(SHARDED, **options))


def test_a_process_that_fails_is_named_with_its_reason(tiny, dataset, tmp_path):
    """The second process reads the corpus by itself, and there is none."""
    gone = tiny.replace(corpus=str(tmp_path / "gone.txt"))
    with pytest.raises(DeviceFailed, match=r"process 2 of 2 failed \(.*gone.txt.* is neither"):
        PackRun([gone], dataset, SHARDED)


def test_shards_divide_all_but_one_block_and_the_embeddings(tiny):
    trial = tiny.replace(width=512, depth=24, batch_size=8)
    one, four = (estimate_pack_bytes(trial, 256, 1, "loop", shards=shards) for shards in (1, 4))
    block = 4 * declare(trial.model, 256, 32).total / 24
    assert one / 4 < four < one / 4 + 6 * block
