"""Longer runs that go on from checkpoints of shorter ones, bit by bit against runs of their length."""

import pytest
import torch

from mup_tpu.config import RunOptions
from mup_tpu.errors import ConfigError
from mup_tpu.files import Folder
from mup_tpu.training.continuation import begin, longer
from mup_tpu.training.loop import PackRun, run_to_end


def ids(trials, dataset):
    return [trial.trial_id(dataset.fingerprint) for trial in trials]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({"schedule": "wsd", "cooldown": 0.25}, 12),
        pytest.param({"schedule": "constant"}, 16, marks=pytest.mark.nightly),  # test_train.py has one daily
    ],
    ids=["wsd", "constant"],
)
def test_a_continued_run_is_bit_identical_to_one_of_its_length(tiny, dataset, tmp_path, settings, at):
    """Packs of other trials than the checkpoints', one of which diverges at once; the checkpoint is kept."""
    base = tiny.replace(steps=16, warmup=3, **settings)
    short = [base.replace(learning_rate=lr) for lr in (0.01, 1e30, 0.003)]
    run = RunOptions(device="cpu", checkpoint_every=5, eval_every=8, log_every=4)
    root = Folder(tmp_path)
    for pack in (short[:2], short[2:]):
        name = ids(pack, dataset)[0]
        run_to_end(PackRun(pack, dataset, run, tmp_path / name).steps())
        assert f"step-{at:08d}" in (root / name).names()
    long = [longer(trial, 24) for trial in reversed(short)]
    assert not set(ids(long, dataset)) & set(ids(short, dataset))

    def begun(shorter, folder):
        return begin(root, long, shorter, lambda trial: ids([trial], dataset)[0], str(tmp_path / folder))

    assert begun([trial.replace(seed=1) for trial in short], "other") == 0
    assert begun(short[::-1], "pack") == at  # not from one that was written during the cooldown
    assert begun(short[::-1], "pack") == at  # again, as after a kill

    going = PackRun(long, dataset, run, tmp_path / "pack")
    assert going.pack.steps_done == at
    continued = run_to_end(going.steps())
    whole = run_to_end(PackRun(long, dataset, run).steps())
    unlike = ("wall_time_s", "finished_at")
    for row, expected in zip(continued.rows, whole.rows, strict=True):
        assert {k: v for k, v in row.items() if k not in unlike} == {
            k: v for k, v in expected.items() if k not in unlike
        }
    assert [row["status"] for row in continued.rows] == ["finished", "diverged", "finished"]
    for k in (0, 2):
        theirs = whole.pack.member_parameters(k)
        for name, p in continued.pack.member_parameters(k).items():
            assert torch.equal(p, theirs[name]), name
    points = [
        [point for point in result.curves if point["split"] == "train"] for result in (continued, whole)
    ]
    assert points[0] == points[1]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"schedule": "cosine"},
            "continue_to 60 needs schedule 'constant' or 'wsd': 'cosine' falls over all",
        ),
        ({"warmup": 0.2}, "continue_to 60 needs a warmup in steps: 0.2 is a share, 6 steps of 30"),
        ({"steps": 60}, "continue_to 60 is not allowed: it must be above the trial's steps, 60"),
        (
            {"token_rule": "lr_0.32", "base_steps": 10, "base_batch_size": 4},
            "continue_to 60 needs token_rule without tokens: 'lr_0.32' sets",
        ),
        (
            {"decay_rule": "timescale", "base_steps": 10},
            "continue_to 60 needs decay_rule without tokens: 'timescale' sets",
        ),
    ],
)
def test_what_a_longer_run_would_do_otherwise_from_the_first_on_is_refused(tiny, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        longer(tiny.replace(**{"schedule": "constant", "warmup": 3} | settings), 60)
