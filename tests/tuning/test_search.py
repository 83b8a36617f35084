"""Searches of our networks: trials are stored, stopped early, and go on after kills and full disks."""

import dataclasses
import itertools
import json
import os
import signal
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from mup_tpu import data
from mup_tpu.cli import main
from mup_tpu.cli.sweep import SearchRun
from mup_tpu.cli.sweep import search as command
from mup_tpu.config import RunOptions, SearchOptions, SweepOptions
from mup_tpu.config.sweep import Domain, Search
from mup_tpu.config.toml import write_trial
from mup_tpu.devices import peak
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.files import Folder
from mup_tpu.store import load_curves, load_runs
from mup_tpu.training.loop import PackRun

SPACE = {
    "learning_rate": Domain("loguniform", 2.0**-12, 2.0**-3),
    "warmup": Domain("uniform", 0.05, 0.4),
    "weight_decay": Domain("choice", values=(0.0, 0.1)),
}
RATES = {"learning_rate": Domain("loguniform", 0.001, 0.06)}
ALONE = RunOptions(threads=os.cpu_count() or 1)
"""Options that give a trial all cores, so that it trains in this process."""


def searched_in(path, search, run=ALONE, where=None, console=None, **options):
    """Run a search; return the number of this call's trials by status."""
    from mup_tpu.tuning.search import search_networks

    console, where = console or Console(quiet=True), where or SweepOptions()
    search = dataclasses.replace(search, search=SearchOptions(**options))
    return search_networks(search, str(path), where, run, console)


def proposals(path):
    """Return the points of a search, and the numbers whose ends are in its file."""
    stored = json.loads((path / "search.json").read_text())["proposals"]
    ended = [int(number) for proposal in stored for number in proposal["ended"]]
    assert len(ended) == len({*ended}), "an end is told once"
    return [proposal["point"] for proposal in stored], {*ended}


@pytest.fixture(scope="module")
def quick(tiny):
    return tiny.replace(steps=10, eval_batches=1)


@pytest.fixture(scope="module")
def search(quick):
    return Search("small_search", quick, SPACE)


@pytest.fixture
def chooser(tmp_path):
    from mup_tpu.tuning.search import Chooser

    def chooser(base=None, folder=tmp_path, space=SPACE, **options):
        return Chooser(space, SearchOptions(**options), base or {"width": 32}, Folder(folder))

    return chooser


@pytest.mark.parametrize("algorithm", ["random", "optuna", "hyperopt"])
def test_a_resumed_algorithm_proposes_what_the_uninterrupted_one_would(algorithm, chooser, tmp_path):
    """Losses that were known late, and one of a divergence, are told again as they were."""

    def points(path, stop):
        one = chooser(folder=path, algorithm=algorithm, seed=3)
        if one.points:
            one.end(len(one.points) - 1, [(1.0, loss(one.points[-1]))])
        while len(one.points) < stop:
            number = one.propose()
            if number < stop - 1:
                one.end(number, [(1.0, loss(one.points[number]))])
        return one.points

    def loss(point):
        return np.inf if point["warmup"] > 0.35 else abs(point["learning_rate"] - 0.01)

    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    points(tmp_path / "parts", 15)
    assert points(tmp_path / "parts", 24) == points(tmp_path / "whole", 24)


def test_bohb_models_each_length_and_goes_on(chooser):
    pytest.importorskip("hpbandster")
    first = chooser(algorithm="bohb", grace=0.2)
    for number in range(20):
        first.propose()
        rate = first.points[number]["learning_rate"]
        first.end(number, [(share / 10, rate + 1 / share) for share in range(1, 11)])
    known = first._algorithm.bohber.configs
    # Results of shorter lengths do not count once there is a model of a longer one.
    assert {*known} == {20, 60, 100} and len(known[100]) == 20
    again = chooser(algorithm="bohb", grace=0.2)
    assert again.points == first.points
    told = np.array(again._algorithm.bohber.configs[100])
    assert np.array_equal(told, np.array(known[100])[:19]), "the last end comes from its row"


def test_bohb_without_its_package_is_one_sentence(chooser, monkeypatch):
    monkeypatch.setitem(sys.modules, "hpbandster", None)
    with pytest.raises(ConfigError, match="algorithm 'bohb' needs hpbandster, .*: pip install"):
        chooser(algorithm="bohb")


def test_asha_stops_what_is_not_among_the_best_third_at_a_rung(chooser):
    """Rungs at shares 0.2 and 0.6 of the steps; after the first, each trial is compared with those before."""
    one = chooser(grace=0.2)
    numbers = [one.propose() for _ in range(5)]
    losses = [3.0, 2.0, 2.5, 1.9, 1.95]
    assert not any(one.stops(n, [(0.1, loss)]) for n, loss in zip(numbers, losses, strict=True))
    stopped = [one.stops(n, [(0.2, loss)]) for n, loss in zip(numbers, losses, strict=True)]
    bests = [np.percentile(losses[:i], 100 / 3) if i else np.inf for i in range(5)]
    assert stopped == [loss > best for loss, best in zip(losses, bests, strict=True)] == [
        False, False, True, False, False,
    ]  # fmt: skip
    assert not one.stops(0, [(0.4, 9.0)]), "between two rungs"
    assert not one.stops(1, [(0.6, 2.0)]) and one.stops(3, [(0.6, 2.1)])


def test_the_median_rule_stops_what_never_was_as_good_as_the_median(chooser):
    one = chooser(scheduler="median", grace=0.2)
    curves = {n: [(share / 10, n + 1 / share) for share in range(1, 10)] for n in range(5)}
    assert [one.propose() for _ in range(5)] == [*range(5)]
    assert not any(one.stops(n, curves[n]) for n in range(3)), "fewer than three others are known"
    assert not one.stops(4, [(0.1, 4.0)]) and one.stops(4, [(0.3, 3.9)])
    assert not any(chooser(scheduler="none").stops(n, curves[n]) for n in range(4))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"space": SPACE | {"warmup": Domain("uniform", 0.1, 0.4)}}, "space"),
        ({"algorithm": "random"}, "algorithm"),
        ({"base": {"width": 64}}, "base"),
    ],
)
def test_another_search_in_the_folder_is_refused(changed, name, chooser, tmp_path):
    chooser().propose()
    chooser(num_samples=99, base={"width": 32, "depth": 2})  # a later version knows more fields
    with pytest.raises(ConfigError, match=f"{name} of the search differs from that in .*search.json"):
        chooser(**changed)
    file = tmp_path / "search.json"
    stored = json.loads(file.read_text())
    stored["proposals"][0]["point"]["warmup"] = 0.123  # as another version of an algorithm proposes
    file.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="algorithm optuna proposes other points than those in"):
        chooser()


FOREIGN = [
    b"", b"\xff", b"[1]", b'{"a": 1}', b"[" * 100_000,
    b'{"space": {}, "algorithm": "optuna", "seed": 0, "base": 3, "proposals": []}',
    b'{"space": {}, "algorithm": "optuna", "seed": 0, "base": {}, "proposals": [{"point": {}, "ended": {}}]}',
]  # fmt: skip


@pytest.mark.parametrize("content", FOREIGN, ids=itertools.count())
def test_a_file_that_is_no_search_is_one_sentence_and_stays(content, chooser, tmp_path):
    (tmp_path / "search.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"search.json cannot be read: it is no search: "):
        chooser()
    assert (tmp_path / "search.json").read_bytes() == content


def test_every_trial_is_stored_once_with_its_status_curve_and_precision(search, tmp_path):
    """In the precision of a CPU that does not multiply in bf16."""
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2\n")
    auto = dataclasses.replace(search, base=search.base.replace(precision="auto"))
    results = tmp_path / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "_CPUINFO", tmp_path / "cpuinfo")
        outcome = searched_in(results, auto, RunOptions(device="cpu", threads=1), num_samples=6)
    runs, curves = load_runs(results), load_curves(results)
    assert len(runs) == 6 and outcome == Counter(runs["status"]) and {"finished"} <= {*runs["status"]}
    assert set(runs["trial_id"]) == set(curves["trial_id"])
    assert set(runs["precision"]) == {"float32"}
    stopped = runs[runs["status"] == "stopped"]
    assert len(stopped) and (stopped["steps_done"] < stopped["steps_planned"]).all()
    assert (runs[runs["status"] == "finished"]["steps_done"] == auto.base.train.steps).all()
    held_out = curves[curves["split"] == "validation"].groupby("trial_id")["loss"].last()
    assert stopped["loss"].tolist() == held_out[stopped["trial_id"]].tolist(), "its last known loss"
    assert runs["lr"].between(2.0**-12, 2.0**-3).all()
    assert not list((results / "checkpoints").glob("*"))


def test_packs_of_a_search_train_together_and_members_are_stopped_alone(quick, tmp_path):
    search = Search("packs", quick, RATES | {"width": Domain("choice", values=(32, 64))})
    where = SweepOptions(pack_size=4)
    outcome = searched_in(tmp_path, search, where=where, num_samples=8, grace=0.1, algorithm="random")
    runs = load_runs(tmp_path)
    assert outcome.total() == len(runs) == 8 and outcome["stopped"]
    assert {*runs["width"]} == {32, 64} and runs["pack_size"].max() > 1
    assert (runs.groupby("width")["pack_size"].max() <= 4).all()


def test_a_point_that_is_proposed_again_is_not_trained_again(quick, tmp_path):
    """A text may be chosen too."""
    search = Search("again", quick, {"schedule": Domain("choice", values=("cosine", "linear"))})
    outcome = searched_in(tmp_path, search, num_samples=9, scheduler="none", algorithm="random")
    points, ended = proposals(tmp_path)
    assert outcome == {"finished": 2} and len(load_runs(tmp_path)) == 2
    assert len(points) == 9 and ended == set(range(8)), "the last end is told before a next proposal"
    assert searched_in(tmp_path, search, num_samples=9, scheduler="none", algorithm="random") == {}


def test_a_point_between_two_allowed_ones_that_is_not_allowed_is_left_out(quick, tmp_path, capsys):
    search = Search("between", quick, {"width": Domain("uniform", 32, 64)})
    for _ in range(2):
        assert searched_in(tmp_path, search, num_samples=2, console=Console(width=400)) == {}
        assert "trial 0 is left out: width" in capsys.readouterr().out


def test_a_search_that_goes_on_repeats_no_trial_and_knows_the_best_of_its_store(search, tmp_path, capsys):
    """After a kill between the rows and the next proposal, which tells their losses."""
    for count, ran in ((2, {"finished": 2}), (2, {}), (3, {"finished": 1})):
        known = load_runs(tmp_path) if list(tmp_path.iterdir()) else None
        options = {"num_samples": count, "scheduler": "none", "console": Console(width=400)}
        assert searched_in(tmp_path, search, **options) == ran
        runs, printed = load_runs(tmp_path), capsys.readouterr().out
        if ran:
            assert f"{count} of {count} ended, best {runs['loss'].min():.4f} (" in printed.splitlines()[-2]
        else:
            pd.testing.assert_frame_equal(runs, known)
    assert proposals(tmp_path)[1] == {0, 1}


def trained(trial, run=ALONE):
    """Loss of a trial that is not interrupted."""
    return PackRun([trial], data.load(trial.data), run).finish().rows[0]["loss"]


def checkpoints(results):
    return list((results / "checkpoints").glob("*/step-*/meta.json"))


def write_search(path, space, base):
    """Write a search for the command line."""
    path.write_text(f'experiment = "from_a_file"\n{space}\n{write_trial(base, "base.")}')
    return path


def test_a_search_that_is_ended_goes_on_from_its_checkpoint(tiny, tmp_path, monkeypatch):
    """After its budget, and after a Ctrl-C by which this process interrupts itself."""
    results, base = tmp_path / "results", tiny.replace(steps=60)
    file = write_search(tmp_path / "x.toml", "space.learning_rate = {low = 0.001, high = 0.06}", base)
    search, limits = Search("from_a_file", base, RATES), {"num_samples": 2, "evaluations": 6}
    assert searched_in(results, search, budget="0.001s", scheduler="none", **limits) == {}

    def save(run, before=PackRun._save):
        before(run)
        run._checkpoints.wait()
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PackRun, "_save", save)
    options = SearchOptions(scheduler="none", **limits)
    with pytest.raises(KeyboardInterrupt, match=f"are stored in .*; continue with: mup-tpu search {file}"):
        command(file, SearchRun(str(results), options, run=ALONE))
    assert checkpoints(results) and len(proposals(results)[0]) == 1, "nothing more is proposed"
    assert searched_in(results, search, scheduler="none", **limits) == {"finished": 2}
    expected = [trained(search.trial(point)) for point in proposals(results)[0]]
    assert sorted(load_runs(results)["loss"]) == sorted(expected)


def test_a_trial_that_is_too_large_is_failed_with_the_reason_and_the_rest_goes_on(tiny, tmp_path):
    """The seed draws both widths, one too wide for any memory."""
    file = write_search(
        tmp_path / "search.toml", "space.width = {kind = 'choice', values = [32, 1048576]}", tiny
    )
    results = tmp_path / "results"
    options = ["--num-samples", "2", "--algorithm", "random", "--threads", str(os.cpu_count())]
    with pytest.raises(SystemExit, match="^1$"):
        main(["search", str(file), "--results", str(results), *options])
    runs = load_runs(results).set_index("width")
    assert runs["status"].to_dict() == {32: "finished", 2**20: "failed"}
    assert "allocate memory" in runs["reason"][2**20]


def test_two_searches_do_not_write_one_folder(search, tmp_path):
    with (
        Folder(tmp_path).locked("search.lock"),
        pytest.raises(StoreError, match="is being written by another search; wait"),
    ):
        searched_in(tmp_path, search)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda tiny: Search("x", tiny, {}), "space of the search is empty"),
        (lambda tiny: Search("x", tiny, {"lr": Domain(low=0.1, high=1)}), "space of lr: unknown key"),
        (lambda tiny: Search("x", tiny, {"warmup": Domain("uniform", 0.0, 40)}), "of warmup: warmup 40"),
        (lambda tiny: Domain("loguniform", 0.0, 1.0), "low 0 of a loguniform is not above 0"),
        (lambda tiny: Domain("uniform", 2.0, 1.0), "low 2 is not below high 1"),
        (lambda tiny: Domain("choice"), "of a choice leave nothing to choose"),
        (lambda tiny: SearchOptions(budget="soon"), "budget 'soon' is not a time"),
        (lambda tiny: SearchOptions(grace=0), "grace 0 is not allowed: it must be above 0"),
        (lambda tiny: SearchOptions(algorithm="grid"), "algorithm 'grid' is not one of 'random', 'hyperopt'"),
        (
            lambda tiny: searched_in(
                "", Search("x", tiny, RATES), RunOptions(device="xla", placement="slice")
            ),
            "placement 'slice' is for sweeps; a search takes",
        ),
    ],
)  # fmt: skip
def test_bad_searches_are_refused_in_one_sentence(make, sentence, tiny):
    with pytest.raises(ConfigError, match=sentence):
        make(tiny)
