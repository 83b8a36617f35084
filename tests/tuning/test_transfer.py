"""Zero-shot transfer: from a search its best trials, from a sweep the predicted optimum of a rule."""

import json
import math
import os

import pytest
from rich.console import Console

from mup_tpu import octaves
from mup_tpu.cli import main
from mup_tpu.config import RunOptions, Sweep, SweepOptions
from mup_tpu.config.columns import configured
from mup_tpu.config.options import TransferOptions
from mup_tpu.config.toml import load_trial
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.store import Store, load_runs
from mup_tpu.tuning.sweep import run_sweep
from mup_tpu.tuning.transfer import Transfer, best_trial, target_trials, transfer_warnings

QUIET = Console(quiet=True)
ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options by which packs run in this process."""


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    """Folders of a sweep at width 32, and of one at the target width 64."""
    folders = {}
    for width in (32, 64):
        folders[width] = str(tmp_path_factory.mktemp(f"sweep{width}"))
        sweep = Sweep(
            "s", tiny.replace(steps=10), scale={"width": (width,)},
            tune={"learning_rate": (0.003, 0.01, 0.03)},
        )  # fmt: skip
        run_sweep(sweep, folders[width], SweepOptions(), ALONE, QUIET)
    return folders


def test_the_target_has_the_best_trial_s_values_and_differs_in_width_only(small):
    runs, best = load_runs(small[32]), best_trial(small[32])
    source = best.trial
    assert best.loss == runs["loss"].min()
    assert source.optimizer.learning_rate == runs.loc[runs["loss"].idxmin(), "lr"]
    targets = [t for rule in ("mup", "sp") for t in target_trials(source, {"width": 64}, rule, 2)]
    assert len(targets) == 4
    for target in targets:
        same = target.replace(width=32, parametrization=source.model.parametrization, seed=source.train.seed)
        assert same == source


def test_the_target_may_grow_along_any_scale_and_scales_without_a_rule_are_named(small):
    source = best_trial(small[32]).trial
    (target,) = target_trials(source, {"depth": 6, "width": 64}, "mup")
    assert (target.model.depth, target.model.width) == (6, 64)
    said = transfer_warnings(source, target)
    assert [w.partition(":")[0] for w in said] == ["depth 2 became 6"]


def test_a_rule_that_follows_the_target_has_the_search_as_its_base(small):
    """A target that is its own base would not be scaled."""
    source = best_trial(small[32]).trial
    (deep,) = target_trials(source, {"depth": 8}, "completep")
    assert deep.growth.depth == 4
    assert transfer_warnings(source.replace(parametrization="completep"), deep) == []
    (in_mup,) = target_trials(source, {"depth": 8}, "mup")
    assert in_mup.model.base_depth == 0, "the trial keeps its name where nothing follows depth"
    decayed = source.replace(decay_rule="timescale")
    (longer,) = target_trials(decayed, {"steps": 2 * source.train.steps}, "mup")
    assert longer.growth.tokens == 2
    ruled = source.replace(batch_rule="lr_sqrt", base_batch_size=source.data.batch_size)
    assert transfer_warnings(ruled, ruled.replace(batch_size=8)) == []


def test_transferred_trials_are_those_that_a_sweep_at_the_target_trains(small, tmp_path):
    moved = Transfer(small[32], TransferOptions(("width=64",), compare=("mup", "sp")))
    moved.run(str(tmp_path), SweepOptions(), ALONE, QUIET)
    at_target, runs = load_runs(small[64]).set_index("trial_id")["loss"], load_runs(tmp_path)
    assert set(runs["parametrization"]) == {"mup", "sp"}
    assert runs["loss"].tolist() == at_target[runs["trial_id"]].tolist()


def test_changes_that_mup_does_not_transfer_are_named_with_their_source(tiny):
    plain = tiny.replace(width=64)
    assert transfer_warnings(tiny, plain) == []
    decayed = transfer_warnings(tiny, plain.replace(weight_decay=0.1))
    assert "weight_decay 0.1 is regularisation" in decayed[0]
    assert "Tensor Programs V, table 2" in decayed[0]
    longer = transfer_warnings(tiny, plain.replace(steps=300, batch_size=8))
    assert [w.split(":")[0] for w in longer] == ["steps 30 became 300", "batch_size 4 became 8"]
    assert "was in sp" in transfer_warnings(tiny.replace(parametrization="sp"), plain)[0]


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({"width": 32}, "width 32 is not above the search's width 32"),
        ({"width": 100}, "width 100 is not a multiple"),
        ({"depth": 2}, "depth 2 is not above the search's depth 2"),
        ({"dept": 4}, "unknown key 'dept'; the nearest known key is 'depth'"),
    ],
)
def test_targets_that_do_not_grow_are_refused(target, sentence, small, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        target_trials(best_trial(small[32]).trial, target, "mup")
    Store(tmp_path, "empty")
    with pytest.raises(StoreError, match="holds no runs yet"):
        best_trial(str(tmp_path))
    Store(tmp_path, "empty").append([{"trial_id": "b", "status": "diverged", "loss": math.inf}])
    with pytest.raises(StoreError, match="holds no finished trial"):
        best_trial(str(tmp_path))


def test_a_sweep_gives_its_rule_s_predicted_optimum_and_not_the_best_row_of_any_rule(two_rules):
    assert best_trial(two_rules).trial.model.parametrization == "sp", "the best row is SP's, at width 64"
    (trial,) = Transfer(two_rules, TransferOptions(at=("width=1024",))).trials
    assert trial.model.parametrization == "mup" and trial.model.width == 1024
    assert math.log2(trial.optimizer.learning_rate) == pytest.approx(-6.0, abs=0.1)


def test_a_sweep_of_several_hyperparameters_gives_the_predicted_values_of_all(tiny, tmp_path, capsys):
    """Weight decay's optimum falls by half an octave with each octave of width."""
    tuned = {"learning_rate": octaves(-9, -3), "weight_decay": octaves(-6, 0)}
    rule = {"parametrization": ("mup",)}
    sweep = Sweep("two", tiny, scale={"width": (32, 64, 128)}, tune=tuned, compare=rule)
    rows, folder = [], str(tmp_path / "two")
    for i, trial in enumerate(sweep.trials()):
        a = math.log2(trial.optimizer.learning_rate) + 6
        b = math.log2(trial.optimizer.weight_decay) + 3 + math.log2(trial.model.width / 32) / 2
        loss = 3 - trial.model.width / 1e3 + 0.04 * a * a + 0.02 * b * b + 0.02 * a * b + 0.0003 * (i % 3)
        rows.append(configured(trial) | {"trial_id": f"{i}", "status": "finished", "loss": loss})
    Store(folder, "two", sweep.axes).append(rows)
    main(["analyze", folder, "--figures", "--report"])
    out = capsys.readouterr().out
    assert "μP: OPEN" in out and "learning rate: TRANSFERS" in out and "note" not in out
    drawn = {"transfer", "optimum", "regret"}
    assert {f"{figure}_{name}.svg" for figure in drawn for name in ("lr", "weight_decay")} <= {
        file.name for file in (tmp_path / "two" / "figures").iterdir()
    }
    page = (tmp_path / "two" / "report.html").read_text()
    assert page.count("<figure") == 6 and "weight decay, the others at their best" in page
    main(["predict", folder, "--at", "width=256", "--json"])
    rate, decay = (one["x"] for one in json.loads(capsys.readouterr().out)["predictions"])
    assert (rate, decay) == (pytest.approx(-6, abs=0.2), pytest.approx(-4.5, abs=0.3))
    moved = Transfer(folder, TransferOptions(at=("width=256",)))
    (trial,) = moved.trials
    assert math.log2(trial.optimizer.learning_rate) == pytest.approx(rate) and moved.warnings == []
    assert [one.hyperparameter for one in moved.chosen[0].predictions] == ["lr", "weight_decay"]
    assert math.log2(trial.optimizer.weight_decay) == pytest.approx(decay)
    main(["predict", folder, "--at", "width=256", "--format", "toml"])
    (tmp_path / "trial.toml").write_text(capsys.readouterr().out)
    trained = load_trial(tmp_path / "trial.toml")
    assert trained.model.width == 256 and trained == trial.replace(seed=trained.train.seed)
    with pytest.raises(SystemExit):
        main(["predict", folder])
    assert "a prediction needs a target, such as --at width=256" in capsys.readouterr().err


def test_another_rule_is_trained_at_its_own_predicted_optimum_only_where_it_is_asked_for(two_rules):
    """What a prediction covers is no warning."""
    alone = Transfer(two_rules, TransferOptions(at=("width=1024",), compare=("sp",)))
    assert math.log2(alone.trials[0].optimizer.learning_rate) == pytest.approx(-9.0, abs=0.3)
    assert "predicted" not in alone.origin[0] and alone.warnings == []
    mup, sp = Transfer(two_rules, TransferOptions(at=("width=1024",), compare=("mup", "sp"))).trials
    assert [t.model.parametrization for t in (mup, sp)] == ["mup", "sp"]
    assert sp == alone.trials[0]
    longer = Transfer(two_rules, TransferOptions(at=("width=1024,steps=700",), compare=("sp",)))
    (warning,) = longer.warnings
    assert "became 700" in warning
    assert longer.chosen[0].predictions == (), "a run of other steps does not score it"


def test_of_a_sweep_of_one_scale_the_rule_s_own_best_is_taken_and_said(small):
    moved = Transfer(small[32], TransferOptions(at=("width=64",)))
    runs = load_runs(small[32])
    own = runs[runs["parametrization"] == "mup"]
    assert len(moved.trials) == 1 and moved.trials[0].model.parametrization == "mup"
    assert moved.trials[0].optimizer.learning_rate == own.loc[own["loss"].idxmin(), "lr"]
    assert "nothing predicted" in moved.origin[0]
    (row,) = moved.reached(small[64]).to_dict("records")
    assert row["parametrization"] == "mup", "the transfer's own trials alone"
    assert Transfer(small[32], TransferOptions(at=("width=64,steps=9",))).reached(small[64]).empty


def test_along_another_scale_than_the_sweep_s_nothing_is_predicted(two_rules):
    moved = Transfer(two_rules, TransferOptions(at=("depth=8",)))
    assert moved.trials[0].model.depth == 8 and moved.trials[0].model.width == 512
    assert "the sweep's scale is width, not depth" in moved.origin[0]


def test_a_sweep_without_mup_asks_which_of_its_rules_is_meant(tiny, tmp_path):
    for rule in ("sp", "completep"):
        trial = tiny.replace(width=32, parametrization=rule)
        row = configured(trial) | {"trial_id": rule, "status": "finished", "loss": 2.0}
        Store(tmp_path, "s").append([row])
    with pytest.raises(ConfigError, match="has no trial of mup: give compare="):
        Transfer(str(tmp_path), TransferOptions(at=("width=64",)))
