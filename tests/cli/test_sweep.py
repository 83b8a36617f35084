"""The commands `init` and `sweep`, and what follows a sweep."""

import importlib.resources
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from mup_tpu.config import Sweep, Trial
from mup_tpu.config.sweep import Domain
from mup_tpu.config.toml import load_search, load_sweep
from mup_tpu.data.corpus import source_files
from mup_tpu.store import load_axes, load_runs
from mup_tpu.training import pack_key

ROOT = Path(__file__).parents[2]
ALONE = ["--threads", os.cpu_count() or 1]
"""Options by which packs run in this process."""


@pytest.mark.parametrize("kind", ["sweep", "search", "ladder"])
def test_init_writes_a_file_that_runs_as_it_is_and_never_over_another(
    tmp_path, monkeypatch, kind, printed, refused
):
    monkeypatch.chdir(tmp_path)
    assert f"wrote {kind}.toml; next: mup-tpu" in printed("init", kind)
    written = Path(f"{kind}.toml").read_text()
    assert f"out '{kind}.toml' exists already" in refused("init", kind)
    assert Path(f"{kind}.toml").read_text() == written
    if kind == "search":
        assert set(load_search(Path("search.toml")).space) == {"learning_rate", "init_std", "warmup"}
        return
    out = printed("sweep", f"{kind}.toml", "--dry-run")
    assert f"{len(load_sweep(Path(f'{kind}.toml')).trials())} trials, 0 stored in results/{kind}" in out
    assert not Path("results").exists()


def test_init_writes_what_plan_takes(outcome, tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    for kind in ("sweep", "ladder"):
        assert outcome("init", kind)[0] == 0
        arguments = ["plan", f"{kind}.toml", "--at", "width=512", "--budget", "1e15", "--out", "p.toml"]
        printed(*arguments)
        assert load_sweep("p.toml").base.data == load_sweep(f"{kind}.toml").base.data
        Path("p.toml").unlink()


CHOICES = {
    "scale": lambda field: Sweep("x", scale={field: (2, 4)}),
    "architecture": lambda name: Trial().replace(architecture=name),
    "optimizer": lambda name: Trial().replace(optimizer=name),
    "corpus": lambda name: source_files(name.strip('"')),
    "kind": lambda kind: Domain(kind, 0.1, 1.0, (0.1, 1.0)),
}
"""Readers of the alternatives in comments of templates, by key."""


def test_every_alternative_in_a_templates_comments_is_allowed():
    lines = [
        line.removeprefix("# ")
        for file in importlib.resources.files("mup_tpu").joinpath("templates").iterdir()
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    found = re.findall(r"^(\w+) = .*? # (?:.*, )?or (.*)$", "\n".join(lines), re.MULTILINE)
    assert {key for key, _ in found} == CHOICES.keys()
    for key, comment in found:
        for alternative in re.split(r", (?:or )?", comment):
            CHOICES[key](alternative.split(" ")[0])


@pytest.mark.slow
def test_what_init_wrote_trains_and_a_dry_run_then_leaves_out_what_is_stored(
    outcome, tmp_path, monkeypatch, printed, refused
):
    monkeypatch.chdir(tmp_path)
    assert outcome("init")[0] == 0
    part = ["--scale", "64", "--compare", "mup", "--num-seeds", 1]
    printed("sweep", "sweep.toml", *part, "--tune", "2^-7")
    more = [*part, "--tune", "2^-7,2^-6"]
    out = printed("sweep", "sweep.toml", *more, "--dry-run", "--on", "v4-8")
    assert "2 trials, 1 stored" in out and "in all 1 trials" in out
    assert "on TPU v4-8, at 30% of 1.1e+03 TFLOP/s" in out
    by_chip = outcome("sweep", "sweep.toml", *more, "--dry-run", "--on", "v4-8", "--device", "tpu")
    assert by_chip[0] == 0 and "on TPU v4-8" in by_chip[1], "without TorchTPU here"
    assert len(load_runs("results/sweep")) == 1
    for wrong, sentence in (
        (
            ["--dry-run", "--on", "v4-8", "--split-over", 3],
            "mesh 'trial=1,data=3' has 3 places, but there are 4 devices",
        ),
        (
            ["--dry-run", "--device", "tpu", "--split-over", 4],
            "--split-over 4 works on device xla, and on cpu",
        ),
    ):
        assert sentence in refused("sweep", "sweep.toml", *more, *wrong)


@pytest.mark.slow
def test_a_finished_sweep_goes_on_to_more_steps_and_the_store_keeps_both(tmp_path, outcome, sweep_toml):
    file, results = tmp_path / "sweep.toml", tmp_path / "results"
    wsd = 'steps = 12\nwarmup = 3\nschedule = "wsd"\ncooldown = 4'
    file.write_text(sweep_toml.replace("steps = 12", wsd))
    command = ["sweep", file, "--results", results, "--checkpoint-every", 5, *ALONE]
    assert outcome(*command)[0] == 0
    before = load_runs(results)
    code, out, err = outcome(*command, "--continue-to", 20)
    assert code == 0, err
    assert "4 trials, 0 stored, 4 to run" in out and "from the start" not in out
    logs = "".join(log.read_text() for log in (results / "logs").iterdir())
    assert "goes on from step 8 of 20" in logs
    runs = load_runs(results)
    assert runs.value_counts("steps_planned").to_dict() == {12: 4, 20: 4}
    pd.testing.assert_frame_equal(runs[runs["steps_planned"] == 12].reset_index(drop=True), before)
    assert "4 stored, 0 to run" in outcome(*command, "--continue-to", 20)[1]

    for given, sentence in (
        (["--continue-to", 12], "continue_to 12 is not allowed: it must be above the trial's steps, 12"),
        (["--continue-to", 20, "--until-settled"], "continue_to and until_settled were both given"),
        (["--continue-to", 20, "--checkpoint-every", 0], "continue_to needs checkpoint_every"),
    ):
        code, _, error = outcome(*command, *given)
        assert (code, sentence in error) == (2, True), error


ON_ONE_CORE = """
import os, sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
            at_it = [s for s in stacks if any(f.filename == "<frozen importlib._bootstrap>" for f in s)]
            print(f"threads that import: {len(at_it)}", file=sys.stderr)

os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
sys.meta_path.insert(0, Watch())
from mup_tpu.cli import main
main(sys.argv[1:])
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="takes cores away as Linux does")
def test_while_a_driver_that_trains_itself_imports_torch_nothing_else_is_imported(tmp_path, sweep_toml):
    """On one core. Parts of scipy ask about a torch that is there, and fail where it is there by half."""
    (tmp_path / "sweep.toml").write_text(sweep_toml)
    command = [sys.executable, "-c", ON_ONE_CORE, "sweep", "sweep.toml", "--results", "results"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0
    assert re.search("ran 4 trials in .*: 4 finished", ended.stdout)
    assert ended.stderr == "threads that import: 1\n"


def test_sweep_from_toml_then_a_table(tmp_path, outcome, sweep_toml, painted, printed):
    file, results = tmp_path / "sweep.toml", tmp_path / "results"
    file.write_text(sweep_toml)
    out = printed("sweep", file, "--results", results)
    assert "4 to run; Ctrl-C stops" in out and re.search("ran 4 trials in .* of training.: 4 finished", out)
    assert "μP: OPEN: 0 of 1 widths have an optimum inside their grid" in out

    assert (results / "figures" / "transfer.png").stat().st_size > 10_000
    printed("analyze", results, "--csv", tmp_path / "runs.csv", "--report")
    assert len(pd.read_csv(tmp_path / "runs.csv")) == 4
    assert "OPEN" in (results / "report.html").read_text()
    code, out, err = outcome("analyze", results, "--json", "--runs", "--figures", "--out", tmp_path / "f")
    assert code == 0 and len(json.loads(out)["results"]) == 2 and "small: 4 runs" in err, "machines read all"


EXAMPLES = sorted((ROOT / "experiments" / "examples").glob("*.toml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_trial_of_an_example_can_be_planned(file):
    assert all(map(pack_key, load_sweep(file).trials()))


@pytest.mark.nightly
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_sweeps_run_to_a_verdict(file, corpus, tmp_path, printed):
    """Each file as it is but for corpus, fewer batches and one seed: ten lines, to verdict and figures."""
    text = file.read_text()
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 10
    short = re.sub(r"steps = \d+", "steps = 2", re.sub(r", eval_batches = \d+", "", text))
    short = short.replace("base.data = {", f"base.data = {{corpus = {str(corpus)!r}, ")
    short = short.replace("base.train = {", "base.train = {eval_batches = 1, ")
    (tmp_path / file.name).write_text(short)
    results = tmp_path / "results"
    out = printed("sweep", tmp_path / file.name, "--num-seeds", 1, "--results", results, *ALONE)
    assert re.search(r"μP: (TRANSFERS|DRIFTS|OPEN): ", out)
    assert (results / "figures" / "transfer.png").exists()
    assert load_axes(results) == load_sweep(file).axes


def test_failed_trials_are_exit_code_1_beside_those_that_ended(tmp_path, outcome, sweep_toml):
    """A width that no memory holds fails; the other is stored, and the same command tries the first again."""
    file = tmp_path / "sweep.toml"
    wide = sweep_toml.replace("[32]", "[32, 524288]")
    file.write_text(wide.replace('"2^-7", 0.02', "0.02") + "\n")
    run = ["sweep", file, "--compare", "mup", *ALONE]
    for stored in (0, 1):
        code, out, err = outcome(*run, "--results", tmp_path / "out")
        assert code == 1, out + err
        assert f"2 trials, {stored} stored" in out
        assert re.search(r"error: 1 of . trials failed, with their reasons in .*; run the same command", err)
    statuses = load_runs(tmp_path / "out").set_index("width")["status"].to_dict()
    assert statuses == {32: "finished", 524288: "failed"}
    only = wide.replace("[32, 524288]", "[524288]").replace('"2^-7", 0.02', "0.02")
    file.write_text(only)
    code, out, err = outcome(*run, "--results", tmp_path / "two")
    assert code == 1 and "nothing to show: table has no finished run" in out, out + err


EXPERIMENTS = Path(__file__).parents[2] / "experiments"
ONE_TRIAL = ["--scale", "64", "--tune", "2^-8", "--num-seeds", "1", "--compare", "mup"]


@pytest.mark.slow
def test_a_script_s_sweep_runs_one_width_of_fewer_steps(tmp_path, printed):
    """A copy with fewer steps, and a neighbour that it imports."""
    (tmp_path / "base.py").write_text("STEPS = 4\n")
    text = (EXPERIMENTS / "lr_transfer.py").read_text().replace("steps=500", "steps=STEPS")
    (tmp_path / "short.py").write_text(f"from base import STEPS\n{text}")
    out = printed("sweep", tmp_path / "short.py", *ONE_TRIAL, "--results", tmp_path / "results")
    assert "figures in " in out
    runs = load_runs(tmp_path / "results")
    assert runs[["width", "lr", "experiment"]].values.tolist() == [[64, 2.0**-8, "lr_transfer"]]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("sweep", "quickstart.py", "--scale", "100"), "width 100 is not a multiple"),
        (
            ("sweep", "lr_transfer.py:TPU"),
            "lr_transfer.py has no Sweep of the name TPU; there are H200, SWEEP",
        ),
        (("search", "lr_transfer.py"), "lr_transfer.py has no Search of the name SEARCH; there are none"),
        (("sweep", "nothing.py"), "nothing.py cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, refused):
    command, file, *options = words
    err = refused(command, EXPERIMENTS / file, *options, "--results", "/dev/null/x")
    assert sentence in " ".join(err.split())


def test_other_sweeps_of_a_script_have_names(printed):
    for name in ("lr_transfer.py:H200", "ablations.py:warmup_0.9"):
        assert name.partition(":")[2].lower() in printed("sweep", EXPERIMENTS / name, "--dry-run")
