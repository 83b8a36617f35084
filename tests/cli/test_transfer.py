"""The commands `search` and `transfer`."""

import json
import os
from pathlib import Path

import pytest

from mup_tpu.analysis.referee import predictions_inside
from mup_tpu.config import Trial
from mup_tpu.config.columns import configured
from mup_tpu.config.options import TransferOptions
from mup_tpu.config.toml import load_sweep
from mup_tpu.store import Store, load_runs
from mup_tpu.store.header import load_predictions
from mup_tpu.tuning.transfer import Transfer

ALONE = ["--threads", os.cpu_count() or 1]
"""Options by which packs run in this process."""


@pytest.mark.slow
def test_search_then_transfer_to_a_wider_model(tmp_path, sweep_toml, printed):
    file, results = tmp_path / "search.toml", tmp_path / "found"
    shared = sweep_toml.split("0.02]}")[1].replace("[base.model]", "[base.model]\nwidth = 32")
    file.write_text(
        'experiment = "found"\n' + shared + '[space.learning_rate]\nlow = "2^-10"\nhigh = "2^-4"\n'
    )
    one_by_one = ["--num-samples", 2, "--max-concurrent", 1]
    out = printed("search", file, "--results", results, *one_by_one)
    assert "2 of 2 ended" in out and "best: loss " in out
    out = printed("transfer", results, "--at", "width=64", "steps=20", *ALONE)
    assert "warning: steps 12 became 20" in out
    assert "width 64, μP" in out and "width 64, SP" in out
    assert len(load_runs(tmp_path / "found_transfer")) == 2


def test_axes_of_a_sweep_from_the_command_line_then_transfer_along_its_scale(
    tmp_path, outcome, sweep_toml, printed, refused
):
    toml = tmp_path / "sweep.toml"
    toml.write_text(sweep_toml)
    results = tmp_path / "r"
    axes = ["--scale", "depth=1,2", "--tune", "weight_decay=0.05,0.1", "--compare", "mup"]
    assert "μP: best weight decay by depth" in printed("sweep", toml, *axes, "--results", results, *ALONE)
    runs = load_runs(results)
    trained = sorted(zip(runs["depth"], runs["weight_decay"], strict=True))
    assert trained == [(1, 0.05), (1, 0.1), (2, 0.05), (2, 0.1)]
    code, out, _ = outcome("analyze", "--runs", results)
    assert "depth" in out and "width" not in out
    arguments = ["transfer", results, "--at", "depth=3", "--compare", "mup"]
    out = printed(*arguments)
    assert "a rule for width says nothing of depth" in out
    assert "depth 3, μP, weight decay 0.05" in out
    for bad, sentence in (
        (["sweep", toml, *axes[:2], "--results", tmp_path / "r_transfer"], "holds experiment 'r_transfer'"),
        (["transfer", results], "transfer needs a target, such as --at width=1024"),
        (["transfer", tmp_path / "none"], f"results folder {tmp_path / 'none'} holds no store"),
        (["transfer", results, "--at", "depth"], "at 'depth' is not FIELD=VALUE"),
    ):
        assert sentence in refused(*bad).replace("\n", " ")


@pytest.fixture
def searched(tmp_path):
    """A results folder with one finished trial."""
    trial = Trial().replace(width=64)
    row = configured(trial) | {"trial_id": "a", "status": "finished", "loss": 2.5}
    Store(tmp_path / "searched", "searched").append([row])
    return tmp_path / "searched"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num-seeds", 0], "num_seeds 0 is not allowed: it must be above 0"),
        (["--num-seeds", 10**9], "num_seeds 1000000000 makes 1,000,000,000 trials; at most 100,000 are"),
        (["--at", "width=256"], "at 'width=256' and another value of width were both given"),
        (["--compare", "foo"], "compare 'foo' is not one of 'mup', 'sp'"),
    ],
)
def test_what_is_wrong_with_a_transfer_is_said_before_anything_trains(searched, options, sentence, refused):
    assert sentence in refused("transfer", searched, "--at", "width=128", *options)
    assert not searched.with_name("searched_transfer").exists()


def test_a_row_whose_config_is_no_trial_is_one_sentence(tmp_path, refused):
    row = configured(Trial()) | {"trial_id": "a", "status": "finished", "loss": 2.5, "config": "{torn"}
    Store(tmp_path / "damaged", "damaged").append([row])
    err = refused("transfer", tmp_path / "damaged", "--at", "width=256")
    assert "has a row whose config is no JSON of a trial" in err


def test_a_prediction_is_kept_and_scored_when_its_scale_is_run(two_rules, outcome):
    moved = Transfer(two_rules, TransferOptions(at=("width=1024",)))
    moved.keep(two_rules)
    moved.keep(two_rules)
    (kept,) = load_predictions(two_rules)
    assert kept.scale == 1024 and kept.rows == 72 and kept.scales == (64, 128, 256, 512)
    rows = []
    for x in range(-9, -3):
        trial = Trial().replace(width=1024, parametrization="mup", learning_rate=2.0**x)
        loss = 2.0 + 8 * 1024**-0.5 + 0.04 * (x + 6) ** 2
        rows.append(configured(trial) | {"trial_id": f"later{x}", "status": "finished", "loss": loss})
    Store(two_rules, "swept").append(rows)
    code, out, _ = outcome("analyze", two_rules, "--json")
    (scored,) = json.loads(out)["predictions"]
    assert scored["is_inside"] is True and scored["x"] == pytest.approx(-6, abs=0.1)
    assert predictions_inside(Path(two_rules).parent) == {"swept": [True]}


def test_a_folder_of_the_target_alone_says_what_came_of_the_prediction(two_rules, tmp_path, outcome):
    folder = tmp_path / "target"
    store = Store(folder, "target")

    def run(*at):
        trials = [Trial().replace(width=1024, parametrization="mup", learning_rate=2.0**x) for x in at]
        store.append(
            configured(t) | {"trial_id": f"at{x}", "status": "finished", "loss": 2.0 + 0.04 * (x + 6) ** 2}
            for x, t in zip(at, trials, strict=True)
        )

    moved = Transfer(two_rules, TransferOptions(at=("width=1024",)))
    (choice,) = moved.chosen
    run(choice.predictions[0].x)
    moved.keep(folder)
    code, out, err = outcome("analyze", folder)
    said = " ".join(out.split())
    assert code == 0 and "the optimum is not known; loss predicted" in said, err
    assert "at width 1024" in said and "2048" not in said and "OPEN" not in said
    run(*range(-9, -3))
    for options in ([], ["--next"]):
        code, out, err = outcome("analyze", folder, *options)
        said = " ".join(out.split())
        assert code == 0 and "measured 2^-6.0" in said and said.count("predicted on") == 1, err
        assert "2048" not in said and "OPEN" not in said
    assert "no runs needed" in said
    code, _, err = outcome("analyze", "--report", folder)
    page = (folder / "report.html").read_text()
    assert code == 0 and "at width 1024, predicted on" in page and "width 2048" not in page, err


def test_a_damaged_file_of_predictions_takes_no_verdict_with_it(two_rules, printed):
    Path(two_rules, "predictions.json").write_text("[1]")
    sentence = r"predictions.json is no list of predictions: .*; kept .* left out"
    with pytest.warns(UserWarning, match=sentence) as warned:
        out = printed("analyze", two_rules)
    assert "μP: TRANSFERS" in out and "predicted on" not in out
    assert Path(warned[0].filename).name == "results.py", "ours are shown in one line"


@pytest.mark.parametrize("command", ["train", "sweep", "buy", "dry run", "search", "transfer"])
def test_no_command_adds_runs_of_another_device_unasked(
    command, tmp_path, sweep_toml, small, corpus, refused
):
    """Losses of devices drift apart; a transfer's folder is the one of its target."""
    folder, file, space = tmp_path / "searched_transfer", tmp_path / "sweep.toml", tmp_path / "search.toml"
    file.write_text(sweep_toml)
    domain = '[space.learning_rate]\nlow = "2^-10"\nhigh = "2^-4"\n'
    space.write_text('experiment = "small"\n' + sweep_toml.split("0.02]}")[1] + domain)
    to = ["--results", folder, "--device", "cpu", *ALONE]
    words = {
        "train": ["train", *small, "--corpus", corpus],
        "sweep": ["sweep", file],
        "buy": ["sweep", file, "--until-settled", "--scale", "32,64,128"],
        "dry run": ["sweep", file, "--dry-run"],
        "search": ["search", space],
        "transfer": ["transfer", tmp_path / "searched", "--at", "width=256", "--compare", "mup"],
    }
    names = {"train": "train", "transfer": "searched_transfer"}
    stored = configured(load_sweep(file).base) | {"trial_id": "a", "status": "finished", "loss": 2.5}
    Store(tmp_path / "searched", "searched").append([stored])
    Store(folder, names.get(command, "small")).append([stored | {"device": "xla:TPU"}])
    assert f"device 'cpu' is not allowed: {folder} holds runs of xla" in refused(*words[command], *to)
    assert len(load_runs(folder)) == 1
