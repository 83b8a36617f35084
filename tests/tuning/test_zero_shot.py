"""Zero-shot transfer: the best trials of a search at the target, and warnings where μP does not apply."""

import dataclasses

import pytest
from rich.console import Console

from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import Store, load_runs
from mup_tpu.tuning.sweep import run_sweep, run_trials
from mup_tpu.tuning.zero_shot import best_trials, regret_against_sweep, target_trials, transfer_warnings

QUIET = Console(quiet=True)
ALONE = SweepOptions()


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    """Folders of a sweep at width 32, and of one at the target width 64."""
    folders = {}
    for width in (32, 64):
        folders[width] = str(tmp_path_factory.mktemp(f"sweep{width}"))
        sweep = Sweep("s", tiny, ("mup", "sp"), (width,), (0.003, 0.01, 0.03))
        run_sweep(sweep, folders[width], ALONE, RunOptions(), QUIET)
    return folders


def test_the_best_trials_have_the_least_loss(small):
    runs = load_runs(small[32])
    found = best_trials(small[32], 2)
    assert [f.loss for f in found] == sorted(runs["loss"])[:2]
    assert found[0].trial.optimizer.learning_rate == runs.loc[runs["loss"].idxmin(), "lr"]


def test_the_target_differs_in_width_only(small, tiny):
    found = best_trials(small[32])
    targets = target_trials(found, {"width": 64}, ("mup", "sp"), 2)
    assert len(targets) == 4
    source = found[0].trial
    for target in targets:
        same = target.replace(width=32, parametrization=source.model.parametrization, seed=source.train.seed)
        assert same == source


def test_the_target_may_grow_along_any_scale_and_scales_without_a_rule_are_named(small):
    found = best_trials(small[32])
    (target,) = target_trials(found, {"depth": 6, "width": 64}, ("mup",))
    assert (target.model.depth, target.model.width) == (6, 64)
    said = transfer_warnings(found[0].trial, target)
    assert [w.partition(":")[0] for w in said] == ["depth 2 became 6"]


def test_a_rule_that_follows_the_target_has_the_search_as_its_base(small):
    """A target that is its own base would not be scaled."""
    found = best_trials(small[32])
    source = found[0].trial
    (deep,) = target_trials(found, {"depth": 8}, ("completep",))
    assert deep.growth.depth == 4
    assert transfer_warnings(source.replace(parametrization="completep"), deep) == []
    (in_mup,) = target_trials(found, {"depth": 8}, ("mup",))
    assert in_mup.model.base_depth == 0, "the trial keeps its name where nothing follows depth"
    decayed = [dataclasses.replace(found[0], trial=source.replace(decay_rule="timescale"))]
    (longer,) = target_trials(decayed, {"steps": 2 * source.train.steps}, ("mup",))
    assert longer.growth.tokens == 2
    ruled = source.replace(batch_rule="lr_sqrt", base_batch_size=source.data.batch_size)
    assert transfer_warnings(ruled, ruled.replace(batch_size=8)) == []


def test_transferred_trials_run_and_their_regret_is_relative_to_the_sweep(small, tmp_path):
    targets = target_trials(best_trials(small[32]), {"width": 64}, ("mup", "sp"))
    run_trials("t", targets, ("width",), str(tmp_path), ALONE, RunOptions(), QUIET)
    runs = load_runs(tmp_path)
    rows = {row["parametrization"]: row for row in regret_against_sweep(runs, small[64])}
    assert set(rows) == {"mup", "sp"}
    at_target = load_runs(small[64])
    for name, row in rows.items():
        best = at_target.loc[at_target["parametrization"] == name, "loss"].min()
        reached = runs.loc[runs["parametrization"] == name, "loss"].iloc[0]
        assert row["regret"] == pytest.approx(reached - best)
        assert row["regret"] >= -1e-9, "the sweep holds the transferred learning rate"


def test_changes_that_mup_does_not_transfer_are_named_with_their_source(tiny):
    plain = tiny.replace(width=64)
    assert transfer_warnings(tiny, plain) == []
    decayed = transfer_warnings(tiny, plain.replace(weight_decay=0.1))
    assert "weight_decay 0.1 is regularisation" in decayed[0]
    assert "Tensor Programs V, table 2" in decayed[0]
    longer = transfer_warnings(tiny, plain.replace(steps=300, batch_size=8))
    assert [w.split(":")[0] for w in longer] == ["steps 30 became 300", "batch_size 4 became 8"]
    assert "was in sp" in transfer_warnings(tiny.replace(parametrization="sp"), plain)[0]


def test_targets_that_do_not_grow_are_refused(small, tmp_path):
    with pytest.raises(ConfigError, match="width 32 is not above the search's width 32"):
        target_trials(best_trials(small[32]), {"width": 32}, ("mup",))
    with pytest.raises(ConfigError, match="width 100 is not a multiple"):
        target_trials(best_trials(small[32]), {"width": 100}, ("mup",))
    with pytest.raises(ConfigError, match="depth 2 is not above the search's depth 2"):
        target_trials(best_trials(small[32]), {"depth": 2}, ("mup",))
    with pytest.raises(ConfigError, match="unknown key 'dept'; the nearest known key is 'depth'"):
        target_trials(best_trials(small[32]), {"dept": 4}, ("mup",))
    Store(tmp_path, "empty")
    with pytest.raises(StoreError, match="holds no runs yet"):
        best_trials(str(tmp_path))
