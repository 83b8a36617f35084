"""The command line as a user meets it: the main commands on a small corpus, and every bad input."""

import dataclasses
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from mup_tpu import cli
from mup_tpu.cli import main
from mup_tpu.config import DataConfig, Sweep, Trial
from mup_tpu.config.columns import CONFIGURED, configured
from mup_tpu.config.search import load_search
from mup_tpu.config.toml import load_sweep
from mup_tpu.data import load
from mup_tpu.store import Store, StoredAxes, load_axes, load_runs
from mup_tpu.training.checkpoint import load_latest, save

ROOT = Path(__file__).parents[2]
SMALL = ["--width", 32, "--base-width", 32, "--head-size", 16, "--sequence-length", 32, "--batch-size", 4]
SMALL += ["--steps", 12]
SWEEP_TOML = """
experiment = "small"
widths = [32]
learning_rates = ["2^-7", 0.02]

[base.model]
base_width = 32
head_size = 16

[base.data]
corpus = {corpus!r}
sequence_length = 32
batch_size = 4

[base.train]
steps = 12
"""


def outcome(capfd, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `mup-tpu ARGUMENTS`."""
    try:
        main([str(a) for a in arguments])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capfd.readouterr()
    return code, captured.out, " ".join(captured.err.split())


@pytest.mark.parametrize("kind", ["sweep", "search", "ladder"])
def test_init_writes_a_file_that_runs_as_it_is_and_never_over_another(capfd, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    code, out, _ = outcome(capfd, "init", kind)
    assert code == 0 and f"wrote {kind}.toml; next: mup-tpu" in out
    written = Path(f"{kind}.toml").read_text()
    code, _, error = outcome(capfd, "init", kind)
    assert code == 2 and f"out '{kind}.toml' is there already" in error
    assert Path(f"{kind}.toml").read_text() == written
    if kind == "search":
        assert set(load_search(Path("search.toml")).space) == {"learning_rate", "init_std", "warmup"}
        return
    code, out, error = outcome(capfd, "sweep", f"{kind}.toml", "--dry-run")
    assert code == 0, error
    assert f"{len(load_sweep(Path(f'{kind}.toml')).trials())} trials, 0 stored in results/{kind}" in out
    assert not Path("results").exists()


@pytest.mark.slow
def test_what_init_wrote_trains_and_a_dry_run_then_leaves_out_what_is_stored(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert outcome(capfd, "init")[0] == 0
    part = ["--widths", 64, "--parametrizations", "mup", "--num-seeds", 1]
    code, _, error = outcome(capfd, "sweep", "sweep.toml", *part, "--learning-rates", "2^-7")
    assert code == 0, error
    more = [*part, "--learning-rates", "2^-7", "2^-6"]
    code, out, _ = outcome(capfd, "sweep", "sweep.toml", *more, "--dry-run-on", "v4-8", "--mfu", 0.1)
    assert code == 0 and "2 trials, 1 stored" in out and "in all 1 trials" in out
    assert "on TPU v4-8, at 10% of 1.1e+03 TFLOP/s" in out
    assert len(load_runs("results/sweep")) == 1
    for wrong in (["--dry-run-on", "v9"], ["--dry-run", "--mfu", 0]):
        code, _, error = outcome(capfd, "sweep", "sweep.toml", *more, *wrong)
        assert code == 2 and ("'v9' is not one of" in error or "mfu 0 is not allowed" in error)


def test_train_stores_a_row_and_exports_a_stock_model(corpus, tmp_path, capfd):
    code, out, err = outcome(
        capfd, "train", *SMALL, "--corpus", corpus, "--results", tmp_path / "r", "--export", tmp_path / "hf",
    )  # fmt: skip
    assert code == 0, err
    row = load_runs(tmp_path / "r").iloc[0]
    assert f"loss {row['loss']:.4f} nat/token" in out
    (log,) = (tmp_path / "r" / "logs").iterdir()
    assert all("step 12/12 · loss" in text and "MFU" in text for text in (out, log.read_text()))
    assert (tmp_path / "hf" / "model.safetensors").exists()


GENERATE = """
import json, sys
sys.modules["mup_tpu"] = None  # importing it fails
from transformers import AutoModelForCausalLM, AutoTokenizer
TEXT = sys.argv[1]
for folder in sys.argv[2:]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer([TEXT, TEXT[:5]], return_tensors="pt", padding=True)
    out = model.generate(**ids, max_new_tokens=4)
    alone = model.generate(**tokenizer(TEXT[:5], return_tensors="pt"), max_new_tokens=4)
    said = {"ids": ids.input_ids[0].tolist(), "text": tokenizer.decode(ids.input_ids[0]),
            "new": tokenizer.batch_decode(out[:, ids.input_ids.shape[1]:]),
            "alone": tokenizer.decode(alone[0, -4:]), "from_nothing": model.generate()[0].tolist()}
    print(json.dumps(said))
"""


@pytest.mark.slow
def test_exports_generate_text_where_mup_tpu_is_not_installed(corpus, tmp_path, capfd):
    text, folders = "The Ā of ü, don't … ", [tmp_path / name for name in ("bytes", "bpe")]
    common = ["train", *SMALL, "--corpus", corpus, "--vocab-size", 300]
    assert outcome(capfd, *common, "--export", folders[0])[0] == 0
    llama = ["--tokenizer", "bpe", "--architecture", "llama", "--export", folders[1]]
    assert outcome(capfd, *common, *llama)[0] == 0

    run = [sys.executable, "-I", "-c", GENERATE, text, *folders]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # transformers warns of settings that do not fit; of padding it warns where nothing is given at all.
    warned = [line for line in done.stderr.splitlines() if "[transformers]" in line]
    assert all("may be padded" in line for line in warned), warned
    for folder, line in zip(folders, done.stdout.splitlines(), strict=True):
        config = DataConfig(corpus=str(corpus), tokenizer=folder.name, vocab_size=300)
        trained_with, said = load(config).tokenizer, json.loads(line)
        assert said["ids"] == trained_with.encode([text])[0].tolist()
        assert said["text"] == text
        assert said["new"][0] and said["new"][1] == said["alone"]
        assert said["from_nothing"][0] == trained_with.separator and len(said["from_nothing"]) > 1


def test_an_export_that_cannot_be_written_is_said_before_training(corpus, tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    code, out, error = outcome(capfd, "train", *SMALL, "--corpus", corpus, "--export", tmp_path / "file")
    assert code == 2 and "step" not in out
    assert f"export {tmp_path / 'file'} cannot be written: File exists" in error
    assert (tmp_path / "file").read_text() == "mine"


def test_train_again_goes_on_from_the_last_checkpoint(corpus, tmp_path, capfd):
    command = ["train", *SMALL, "--corpus", corpus, "--checkpoints", tmp_path, "--checkpoint-every", 4]
    _, first, _ = outcome(capfd, *command)
    code, second, err = outcome(capfd, *command)
    assert code == 0, err
    # The whole first run is reported, then only what comes after the checkpoint of step 8, to the same loss.
    assert "step 4/12" in first
    assert "step 4/12" not in second
    summary = first.splitlines()[-1].split(" nat/token")[0]
    assert summary in second


def test_trials_that_share_a_checkpoint_folder_leave_each_other_and_the_user_alone(corpus, tmp_path, capfd):
    """Another trial's checkpoints, and folders of the user's whose names look like them."""
    common = ["train", *SMALL, "--corpus", corpus, "--checkpoints", tmp_path, "--checkpoint-every", 4]
    (tmp_path / "step-results").mkdir()
    (tmp_path / "step-results" / "notes.txt").write_text("mine")
    losses = []
    for seed in (0, 1, 0):
        code, out, _ = outcome(capfd, *common, "--seed", seed)
        assert code == 0
        losses.append(re.search(r"finished: loss ([\d.]+)", out).group(1))
    assert losses[0] == losses[2] != losses[1]
    assert (tmp_path / "step-results" / "notes.txt").read_text() == "mine"
    folders = sorted(p for p in tmp_path.iterdir() if p.name != "step-results")
    assert len(folders) == 2
    for folder in folders:
        assert [p.name for p in sorted(folder.iterdir())] == ["step-00000004", "step-00000008"]


def test_checkpoints_of_an_earlier_version_are_gone_on_with(corpus, tmp_path, capfd):
    """They lay in the folder itself."""
    common = ["train", *SMALL, "--corpus", corpus, "--checkpoints", tmp_path / "c", "--checkpoint-every", 4]
    assert outcome(capfd, *common)[0] == 0
    (own,) = (tmp_path / "c").iterdir()
    for checkpoint in list(own.iterdir()):
        checkpoint.rename(tmp_path / "c" / checkpoint.name)
    own.rmdir()
    code, out, _ = outcome(capfd, *common)
    assert code == 0 and "goes on from step 8 of 12" in out


def test_export_best_takes_the_checkpoint_of_least_held_out_loss(corpus, tmp_path, capfd):
    """A checkpoint said to be better than any end, of weights that are told from all others."""
    from transformers import GPT2LMHeadModel

    common = [*SMALL, "--corpus", corpus, "--checkpoints", tmp_path / "c", "--checkpoint-every", 4]
    common += ["--eval-every", 4, "--export", tmp_path / "out", "--export-best"]
    assert outcome(capfd, "train", *common)[0] == 0
    (own,) = (tmp_path / "c").iterdir()
    last = load_latest(own)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in last.tensors.items()}
    meta = {name: value for name, value in last.meta.items() if name not in ("step", "sha256")}
    save(own, 2, zeros, meta | {"evaluation_loss": 0.5})
    code, out, _ = outcome(capfd, "train", *common)
    assert code == 0 and "of step 2, held-out loss 0.5000" in out
    exported = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert all(not p.any() for p in exported.parameters())
    code, _, error = outcome(capfd, "train", *SMALL, "--export", tmp_path / "out", "--export-best")
    assert code == 2 and "--export-best needs --export, --checkpoints and --eval-every" in error


def test_profile_is_a_trace_of_the_steps(corpus, tmp_path, capfd):
    trace = tmp_path / "traces" / "trace.json"
    command = ["train", *SMALL, "--corpus", corpus, "--log-every", 2, "--profile", trace]
    code, _, err = outcome(capfd, *command)
    assert code == 0, err
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::addmm", "_BlockAttention", "_BlockAttentionBackward"} <= names


@pytest.mark.slow
def test_sigterm_checkpoints_and_the_same_command_goes_on(corpus, tmp_path):
    command = [
        "train", *SMALL[:-2], "--steps", "1200", "--corpus", corpus,
        "--checkpoints", tmp_path / "c", "--checkpoint-every", "50", "--results", tmp_path / "r",
    ]  # fmt: skip
    command = [str(part) for part in command]
    run = [sys.executable, "-m", "mup_tpu", *command]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "c").glob("*/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "preempted at step" in output
    assert "the same command goes on" in output
    assert load_runs(tmp_path / "r")["status"].tolist() == ["preempted"]
    main(command)
    assert load_runs(tmp_path / "r")["status"].tolist() == ["finished"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_a_full_disk_under_the_output_is_a_sentence_and_loses_no_row(corpus, tmp_path):
    def run(*command, stderr=subprocess.PIPE):
        words = [sys.executable, "-m", "mup_tpu", *map(str, command)]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(words, stdout=full, stderr=stderr or full, text=True)
        return done.returncode, done.stderr

    command = ["train", *SMALL, "--corpus", corpus, "--log-every", 4]
    sentence = "error: No space left on device; what was stored before is kept, the same command goes on\n"
    lost = "warning: lines of the log are lost: No space left on device\n"
    assert run(*command, "--results", tmp_path / "r") == (2, lost + sentence)
    assert load_runs(tmp_path / "r")["status"].tolist() == ["finished"]
    assert run("runs", tmp_path / "r") == (2, sentence)
    assert run(*command, "--results", tmp_path / "both", stderr=None)[0] == 2
    assert load_runs(tmp_path / "both")["status"].tolist() == ["finished"]


@pytest.mark.slow
def test_a_finished_sweep_goes_on_to_more_steps_and_the_store_keeps_both(corpus, tmp_path, capfd):
    file, results = tmp_path / "sweep.toml", tmp_path / "results"
    wsd = 'steps = 12\nwarmup = 3\nschedule = "wsd"\ncooldown = 4'
    file.write_text(SWEEP_TOML.format(corpus=str(corpus)).replace("steps = 12", wsd))
    command = ["sweep", file, "--results", results, "--checkpoint-every", 5]
    assert outcome(capfd, *command)[0] == 0
    before = load_runs(results)
    code, out, err = outcome(capfd, *command, "--continue-to", 20)
    assert code == 0, err
    assert "4 trials, 0 stored, 4 to run" in out and "from the start" not in out
    logs = "".join(log.read_text() for log in (results / "logs").iterdir())
    assert "goes on from step 8 of 20" in logs
    runs = load_runs(results)
    assert runs.value_counts("steps_planned").to_dict() == {12: 4, 20: 4}
    pd.testing.assert_frame_equal(runs[runs["steps_planned"] == 12].reset_index(drop=True), before)
    assert "4 stored, 0 to run" in outcome(capfd, *command, "--continue-to", 20)[1]

    for given, sentence in (
        (["--continue-to", 12], "continue_to 12 is not allowed: it must be above the trial's steps, 12"),
        (["--continue-to", 20, "--halving"], "continue_to needs halving false"),
        (["--continue-to", 20, "--until-settled"], "continue_to and until_settled were both given"),
        (["--continue-to", 20, "--checkpoint-every", 0], "continue_to needs checkpoint_every"),
    ):
        code, _, error = outcome(capfd, *command, *given)
        assert (code, sentence in error) == (2, True), error


@pytest.mark.slow
def test_train_continues_a_trial_to_more_steps(corpus, tmp_path, capfd):
    common = ["train", *SMALL, "--corpus", corpus, "--schedule", "constant", "--warmup", 3]
    kept = [*common, "--checkpoints", tmp_path / "c"]
    assert outcome(capfd, *kept)[0] == 0
    code, out, err = outcome(capfd, *kept, "--continue-to", 20)
    assert code == 0 and "goes on from step 12 of 20" in out, err
    _, whole, _ = outcome(capfd, *common, "--steps", 20)
    assert whole.splitlines()[-1].split(" nat/token")[0] in out
    code, out, _ = outcome(capfd, *kept)  # the shorter one is still there, at its end
    assert code == 0 and "goes on from step 12 of 12" in out
    code, out, _ = outcome(capfd, *kept, "--seed", 1, "--continue-to", 20)
    assert code == 0 and "to go on from: it trains from the start" in out
    assert "--continue-to needs --checkpoints" in outcome(capfd, *common, "--continue-to", 20)[2]


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


@pytest.mark.skipif(sys.platform != "linux", reason="takes cores away as Linux does")
def test_while_a_driver_that_trains_itself_imports_torch_nothing_else_is_imported(corpus, tmp_path):
    """On one core. Parts of scipy ask about a torch that is there, and fail where it is there by half."""
    (tmp_path / "sweep.toml").write_text(SWEEP_TOML.format(corpus=str(corpus)))
    command = [sys.executable, "-c", ON_ONE_CORE, "sweep", "sweep.toml", "--results", "results"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0
    assert "ran 4 trials: 4 finished" in ended.stdout
    assert ended.stderr == "threads that import: 1\n"


def test_sweep_from_toml_then_runs_analyze_plot(corpus, tmp_path, capfd):
    file, results = tmp_path / "sweep.toml", tmp_path / "results"
    file.write_text(SWEEP_TOML.format(corpus=str(corpus)))
    code, out, err = outcome(capfd, "sweep", file, "--results", results, "--no-ray")
    assert code == 0, err
    assert "ran 4 trials: 4 finished" in out
    assert "mup: INCONCLUSIVE: 0 of 1 widths have a bracketed optimum" in out

    code, out, err = outcome(capfd, "runs", results, "--csv", tmp_path / "runs.csv")
    assert code == 0, err
    assert len(pd.read_csv(tmp_path / "runs.csv")) == 4

    code, out, err = outcome(capfd, "analyze", results, "--json")
    assert code == 0, err
    assert {r["parametrization"] for r in json.loads(out)["results"]} == {"mup", "sp"}

    code, out, err = outcome(capfd, "plot", results, "--out", tmp_path / "figures")
    assert code == 0, err
    assert (tmp_path / "figures" / "transfer.png").stat().st_size > 10_000

    code, out, err = outcome(capfd, "report", results)
    assert code == 0, err
    assert "INCONCLUSIVE" in (results / "report.html").read_text()


@pytest.mark.slow
def test_one_field_of_a_toml_makes_it_sgd_adamw_or_muon(corpus, tmp_path, capfd):
    """A sweep each, of one file but for `optimizer`: rows differ in that column and in what came of it."""
    tables = {}
    for optimizer in ("sgd", "adamw", "muon"):
        file, results = tmp_path / "sweep.toml", tmp_path / optimizer
        given = {"compare": 'parametrizations = ["mup"]', "corpus": str(corpus), "optimizer": optimizer}
        file.write_text(ONE_OPTIMIZER.format(**given))
        code, out, err = outcome(capfd, "sweep", file, "--results", results, "--no-ray")
        assert code == 0, err
        assert "ran 4 trials: 4 finished" in out
        tables[optimizer] = load_runs(results)
    assert {name: set(table["optimizer"]) for name, table in tables.items()} == {n: {n} for n in tables}
    losses = {name: tuple(table["loss"]) for name, table in tables.items()}
    assert len({*losses.values()}) == 3 and all(loss < math.log(256) for loss in losses["muon"])
    configured = [name for name in CONFIGURED if name != "optimizer"]
    for table in tables.values():
        pd.testing.assert_frame_equal(table[configured], tables["adamw"][configured])


def test_optimizers_are_compared_in_one_sweep(corpus, tmp_path, capfd):
    file = tmp_path / "sweep.toml"
    compare = 'compare = {optimizer = ["sgd", "adamw", "muon"]}'
    file.write_text(ONE_OPTIMIZER.format(compare=compare, corpus=str(corpus), optimizer="adamw"))
    code, out, err = outcome(capfd, "sweep", file, "--results", tmp_path / "r", "--no-ray")
    assert code == 0, err
    assert load_runs(tmp_path / "r")["optimizer"].value_counts().to_dict() == dict.fromkeys(
        ("sgd", "adamw", "muon"), 4
    )


ONE_OPTIMIZER = """
experiment = "one_optimizer"
widths = [32, 64]
learning_rates = [0.01, 0.02]
{compare}
[base.model]
base_width = 32
head_size = 16
depth = 1
[base.data]
corpus = "{corpus}"
sequence_length = 32
batch_size = 4
[base.optimizer]
optimizer = "{optimizer}"
[base.train]
steps = 6
eval_batches = 1
"""


@pytest.mark.slow
def test_search_then_transfer_to_a_wider_model(local_ray, corpus, tmp_path, capfd):
    file, results = tmp_path / "search.toml", tmp_path / "found"
    shared = SWEEP_TOML.split("0.02]")[1].replace("[base.model]", "[base.model]\nwidth = 32")
    file.write_text(
        'experiment = "found"\n'
        + shared.format(corpus=str(corpus))
        + '[space.learning_rate]\nlow = "2^-10"\nhigh = "2^-4"\n'
    )
    code, out, err = outcome(capfd, "search", file, "--results", results, "--num-samples", 2)
    assert code == 0, err
    assert "2 of 2 ended" in out
    assert "best: loss " in out
    code, _, err = outcome(capfd, "search", file, "--results", results, "--num-samples", 2)
    assert code == 2
    assert "holds a search of 2 trials; go on with --resume" in err

    code, out, err = outcome(capfd, "transfer", results, "--width", 64, "--steps", 20, "--no-ray")
    assert code == 0, err
    assert "warning: steps 12 became 20" in out
    assert "width 64, mup" in out
    assert "width 64, sp" in out
    assert len(load_runs(tmp_path / "found_transfer")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", sorted((ROOT / "experiments" / "examples").glob("*.toml")), ids=lambda p: p.stem
)
def test_example_sweeps_run_to_a_verdict(file, corpus, tmp_path, capfd):
    """Each file as it is but for corpus, fewer batches and one seed: ten lines, to verdict and figures."""
    text = file.read_text()
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 10
    short = re.sub(r"steps = \d+", "steps = 2", re.sub(r", eval_batches = \d+", "", text))
    short = short.replace("base.data = {", f"base.data = {{corpus = {str(corpus)!r}, ")
    short = short.replace("base.train = {", "base.train = {eval_batches = 1, ")
    (tmp_path / file.name).write_text(short)
    results = tmp_path / "results"
    code, out, _ = outcome(capfd, "sweep", tmp_path / file.name, "--num-seeds", 1, "--results", results)
    assert code == 0 and re.search(r"mup: (TRANSFERS|DRIFTS|INCONCLUSIVE): ", out)
    assert (results / "figures" / "transfer.png").exists()
    assert load_axes(results) == StoredAxes.of(load_sweep(file))


def test_axes_of_a_sweep_from_the_command_line_then_transfer_along_its_scale(corpus, tmp_path, capfd):
    toml = tmp_path / "sweep.toml"
    toml.write_text(SWEEP_TOML.format(corpus=str(corpus)))
    results = tmp_path / "r"
    axes = ["--scale", "depth=1,2", "--tune", "weight_decay=0,0.1", "--parametrizations", "mup"]
    code, out, _ = outcome(capfd, "sweep", toml, *axes, "--results", results)
    assert code == 0 and "at 0, scale 2: loss" in out
    runs = load_runs(results)
    assert sorted(zip(runs["depth"], runs["weight_decay"], strict=True)) == [
        (1, 0),
        (1, 0.1),
        (2, 0),
        (2, 0.1),
    ]
    code, out, _ = outcome(capfd, "runs", results)
    assert "depth" in out and "width" not in out
    arguments = ["transfer", results, "--to", "depth=3", "--parametrizations", "mup", "--sweep", results]
    code, out, _ = outcome(capfd, *arguments)
    assert code == 0 and "a rule for width says nothing of depth" in out
    assert "depth 3, mup, weight_decay 0" in out
    for bad, sentence in (
        (["sweep", toml, "--scale", "dept=1"], "scale: unknown key 'dept'"),
        (["sweep", toml, "--widths", "32", "--scale", "depth=1"], "scale and widths were both given"),
        (["sweep", toml, "--width", "32", "--widths", "32"], "width and widths were both given"),
        (["sweep", toml, *axes[:2], "--results", tmp_path / "r_transfer"], "holds experiment 'r_transfer'"),
        (["transfer", results], "transfer needs a target: give --width, or --to"),
        (["transfer", results, "--to", "depth"], "to 'depth' is not FIELD=VALUE"),
    ):
        code, _, error = outcome(capfd, *bad)
        assert code == 2 and sentence in error.replace("\n", " ")


def test_where_takes_a_part_of_a_table_that_mixes_several(tmp_path, capfd):
    rows = [
        {
            "width": w,
            "lr": 2.0**x,
            "loss": 2.0 + 0.05 * (x + 7) ** 2 + steps / 1000,
            "steps": steps,
            "note": "a b",
        }
        for w in (64, 128, 256)
        for x in range(-10, -3)
        for steps in (100, 200)
    ]
    table = tmp_path / "runs.csv"
    pd.DataFrame(rows).to_csv(table)
    code, _, error = outcome(capfd, "analyze", table)
    assert code == 2 and "--where steps=VALUE" in error
    code, out, _ = outcome(capfd, "analyze", table, "--where", "steps=200", "note=a b", "--json")
    assert code == 0 and min(json.loads(out)["results"][0]["curves"][0]["loss"]) == pytest.approx(2.2)
    for bad, sentence in (
        ("steps=300", "where: no row has steps 300; there are 100, 200"),
        ("step=100", "where: table has no column 'step'; it has"),
        ("steps", "where 'steps' is not COLUMN=VALUE"),
    ):
        code, _, error = outcome(capfd, "analyze", table, "--where", bad)
        assert code == 2 and sentence in error
    code, out, _ = outcome(capfd, "runs", ROOT / "results" / "quickstart", "--where", "width=64", "lr=2^-7")
    assert code == 0 and "quickstart: 6 runs" in out


def test_every_command_answers_what_a_folder_asks(tmp_path, capfd):
    """From the base width on, where a narrower one was run too; options have the last word."""
    folder, note = tmp_path / "sweeps" / "x", "as the folder asks: width from 64 on"
    rows = [
        {
            "trial_id": f"{w}-{x}", "parametrization": "mup", "width": w, "lr": 2.0**x, "seed": 0,
            "loss": 2.0 + 0.05 * (x + 7) ** 2, "status": "finished",
        }
        for w in (32, 64, 128, 256)
        for x in range(-9, -4)
    ]  # fmt: skip
    Store(folder, "x").append(rows)

    def widths(*options):
        code, out, _ = outcome(capfd, "analyze", folder, "--json", *options)
        assert code == 0
        analysis = json.loads(out)
        assert (note in analysis["notes"]) == (not options and asked)
        return [curve["scale"] for curve in analysis["results"][0]["curves"]]

    asked = False
    assert widths() == [32, 64, 128, 256]
    code, out, _ = outcome(capfd, "ask", folder, "--where", "width>=64")
    assert code == 0 and "asks about width from 64 on" in out
    asked = True
    assert widths() == [64, 128, 256]
    assert widths("--where", "width<=128") == [32, 64, 128]
    code, out, _ = outcome(capfd, "referee", folder.parent)
    assert code == 0 and "| width 64 to 256 |" in out
    page = folder.parent / "pages" / "README.md"
    code, _, _ = outcome(capfd, "referee", folder.parent, "--out", page)
    assert code == 0 and "](referee.png)" in page.read_text(encoding="utf-8")
    assert {p.name for p in page.parent.iterdir()} == {"README.md", "referee.png", "referee.svg"}
    code, _, _ = outcome(capfd, "report", folder)
    assert code == 0 and note in (folder / "report.html").read_text(encoding="utf-8")
    code, out, _ = outcome(capfd, "next", folder)
    assert code == 0 and note in out
    for bad, sentence in (
        (["width>=1000"], "where: no row has width>=1000; there are "),
        (["width>=wide"], "where 'width>=wide': 'wide' is not a number"),
        (["status>=3"], "where 'status>=3': column 'status' has no numbers"),
        (["width=64", "--all"], "where and all were both given"),
    ):
        code, _, error = outcome(capfd, "ask", folder, "--where", *bad)
        assert code == 2 and sentence in error.replace("\n", " ")
    assert widths() == [64, 128, 256], "what was refused changed nothing"
    code, out, _ = outcome(capfd, "ask", folder, "--all")
    assert code == 0 and "asks about all rows" in out
    asked = False
    assert widths() == [32, 64, 128, 256]


@pytest.mark.slow
def test_coord_check_writes_table_and_figure(corpus, tmp_path, capfd):
    command = [
        "coord-check", "--results", tmp_path, "--num-seeds", 1, "--corpus", corpus, "--base-width", 32,
        "--head-size", 16, "--sequence-length", 32, "--batch-size", 4,
    ]  # fmt: skip
    code, out, err = outcome(capfd, *command, "--widths", 32, 64)
    assert code == 0, err
    table = pd.read_parquet(tmp_path / "coord_check.parquet")
    assert set(table["width"]) == {32, 64}
    assert (tmp_path / "figures" / "adamw_tied.png").exists()
    assert outcome(capfd, *command, "--widths", 32, 64, "--optimizer", "sgd")[0] == 0
    assert outcome(capfd, "plot", tmp_path, "--out", tmp_path / "again")[0] == 0
    drawn = {path.stem for path in (tmp_path / "again").iterdir()}
    assert drawn == {"adamw_tied", "sgd_tied"}
    code, out, err = outcome(capfd, *command, "--widths", 32, 64, "--learning-rate", 0.5)
    assert (code, "with other options is stored there" in err) == (2, True)
    stored = tmp_path / "coord_check.parquet"
    assert len(pd.read_parquet(stored)) == 2 * len(table)
    for content, sentence in ((b"damaged", "cannot be used: "), (None, "is no coordinate check")):
        if content:
            stored.write_bytes(content)
        else:
            pd.DataFrame({"width": [32]}).to_parquet(stored)
        before = stored.read_bytes()
        code, out, err = outcome(capfd, *command, "--widths", 32, 64)
        assert (code, sentence in err, stored.read_bytes() == before) == (2, True, True), err


@pytest.mark.slow
def test_coord_check_goes_along_any_scale(corpus, tmp_path, capfd):
    command = [
        "coord-check", "--results", tmp_path, "--num-seeds", 2, "--corpus", corpus, "--base-width", 32,
        "--width", 32, "--head-size", 16, "--sequence-length", 32, "--batch-size", 4, "--check-steps", 1,
    ]  # fmt: skip
    code, out, err = outcome(capfd, *command, "--scale", "depth=1,2")
    assert code == 0, err
    assert "exponent of depth" in out
    for name in ("mup", "sp"):
        assert f"{name}: fastest growing is the" in out
        assert f"{name}: blocks " in out
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {"adamw_tied.png", "adamw_tied.svg"}
    for given, sentence in (
        (("--scale", "batch_size=4,8"), "along another scale than batch_size is stored there"),
        (("--scale", "depth=2", "--widths", 32), "scale and widths were both given"),
        (("--scale", "depht=2,4"), "unknown key 'depht'; the nearest known key is 'depth'"),
        (("--scale", "tied=true,false"), "scale tied of a coordinate check is no way of growing"),
    ):
        code, out, err = outcome(capfd, *command, *given)
        assert (code, sentence in err) == (2, True), err


BAD_TRIALS = {
    "more micro-batches than sequences": (
        ["--batch-size", "4", "--micro-batches", "5"],
        "micro_batches 5 is not allowed: batch_size 4 has 4 sequences to split, so at most 4",
    ),
    "unknown parametrization": (["--parametrization", "mupp"], "'mupp' is not one of 'mup', 'sp'"),
    "width": (["--width", "100"], "width 100 is not a multiple of head_size 32; nearest allowed: 96, 128"),
    "zero learning rate": (["--learning-rate", "0"], "learning_rate 0 is not allowed"),
    "log2 learning rate": (["--learning-rate=-8"], "if that is its log2, write 0.00390625 or 2^-8"),
    "no learning rate": (["--learning-rate", "fast"], "learning rate 'fast' is not a number"),
    "warm-up": (["--warmup", "500"], "warmup 500 is 500 steps, but the run has steps 500"),
    "missing file": (["--corpus", "/no/such.txt"], "corpus '/no/such.txt' is neither"),
    "negative threads": (["--threads", "-1"], "threads -1 is not allowed"),
    "zero log interval": (["--log-every", "0"], "log_every 0 is not allowed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TRIALS)
def test_bad_option_is_one_sentence_and_exit_code_2(case, capfd):
    arguments, sentence = BAD_TRIALS[case]
    code, _, err = outcome(capfd, "train", *arguments)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


def test_bad_corpora(tmp_path, capfd):
    (tmp_path / "empty.txt").write_text(" \n\n ")
    (tmp_path / "latin.txt").write_bytes("Ärger und Überdruß".encode("latin-1"))
    (tmp_path / "short.txt").write_text("A short text.\n\n" * 40)
    (tmp_path / "folder").mkdir()
    for name, sentence in {
        "empty.txt": "is empty",
        "latin.txt": "is not UTF-8 at byte 0",
        "short.txt": "is shorter than one batch",
        "folder": "holds no",
    }.items():
        code, _, err = outcome(capfd, "train", "--corpus", tmp_path / name)
        assert code == 2, name
        assert sentence in err
        assert str(tmp_path / name) in err


def test_bad_results_folders(corpus, tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    Store(tmp_path / "other", "another_experiment")
    train = ["train", *SMALL, "--corpus", corpus, "--results"]
    code, _, err = outcome(capfd, *train, tmp_path / "file" / "results")
    assert code == 2
    assert "cannot be written" in err
    code, _, err = outcome(capfd, *train, tmp_path / "other")
    assert code == 2
    assert "holds experiment 'another_experiment', not 'train'" in err


def test_bad_toml(tmp_path, capfd):
    file = tmp_path / "sweep.toml"
    file.write_text('experiment = "x"\n[base.optimizer]\nlearning_rat = 0.01\n')
    code, _, err = outcome(capfd, "sweep", file)
    assert code == 2
    assert "unknown key 'learning_rat'" in err
    assert "learning_rate" in err.split("learning_rat'")[1]
    file.write_text('experiment = "x"\n[space.learning_rat]\nlow = 0.1\nhigh = 1.0\n')
    code, _, err = outcome(capfd, "search", file)
    assert code == 2
    assert "space of learning_rat: unknown key 'learning_rat'" in err
    file.write_text("experiment = ")
    assert outcome(capfd, "sweep", file)[0] == 2
    assert outcome(capfd, "sweep", tmp_path / "missing.toml")[0] == 2


def test_bad_tables(tmp_path, capfd):
    table = tmp_path / "runs.csv"
    table.write_text("width,step_size,loss\n64,-8,2.5\n")
    code, _, err = outcome(capfd, "analyze", table)
    assert code == 2
    assert "table has no column 'lr'; it has width, step_size, loss" in err
    code, _, err = outcome(capfd, "analyze", table, "--lr-col", "step_size")
    assert code == 2
    assert "are these log2 values?" in err
    assert outcome(capfd, "analyze", tmp_path / "nothing.csv")[0] == 2
    code, _, err = outcome(capfd, "plot", tmp_path / "nothing")
    assert code == 2
    assert "holds no store" in err


def test_next_says_what_to_run_why_and_at_what_cost(tmp_path, capfd):
    noise = random.Random(1)
    rows = [
        f"{p},{w},{2.0**x},{s},"
        f"{2.5 + 0.04 * (x + 8 + drift * math.log2(w / 64)) ** 2 + noise.gauss(0, 0.02)},{w / 16}"
        for p, drift in (("sp", 1), ("mup", 0))
        for w in (64, 128, 256, 512)
        for x in range(-14, -3)
        for s in (0, 1)
    ]
    table = tmp_path / "runs.csv"
    table.write_text("parametrization,width,lr,seed,loss,gpu_minutes\n" + "\n".join(rows))
    code, out, err = outcome(capfd, "next", table, "--cost-col", "gpu_minutes")
    assert code == 0, err
    assert "mup: INCONCLUSIVE" in out and "sp: DRIFTS" in out
    assert "settled: nothing to run" in out
    assert "interval is too wide: seeds beside the optimum" in out
    assert "gpu_minutes were spent" in out and "(as measured: width^1)" in out
    assert "  add lr 2^" in out
    batches = json.loads(outcome(capfd, "next", table, "--json")[1])
    assert batches["sp"] is None
    assert {cell["scale"] for cell in batches["mup"]["cells"]} <= {64, 128, 256, 512}
    assert batches["mup"]["costs"]["unit"] == "runs of width 64"
    code, _, err = outcome(capfd, "next", table, "--cost-col", "gpu_hours")
    assert code == 2 and "table has no column 'gpu_hours'" in err


def test_analyze_any_hyperparameter_against_any_scale(tmp_path, capfd):
    rows = [
        f"{layers},{2.0**x},{2.5 + 0.05 * (x + 5 + math.log2(layers)) ** 2}"
        for layers in (2, 4, 8, 16)
        for x in range(-11, -2)
    ]
    table = tmp_path / "runs.csv"
    table.write_text("layers,init,final\n" + "\n".join(rows))
    command = ["analyze", table, "--scale", "layers", "--hyperparameter", "init", "--loss-col", "final"]
    code, out, err = outcome(capfd, *command)
    assert code == 0, err
    assert "DRIFTS (one look): init* ∝ layers^-1.0" in out


ONE_TRIAL = ["--width", "64", "--learning-rates", "2^-8", "--num-seeds", "1", "--parametrizations", "mup"]


@pytest.mark.slow
def test_experiment_script_runs_one_width(tmp_path):
    """The script as a user runs it, on a few trials of its own grid."""
    command = [sys.executable, "experiments/quickstart.py", *ONE_TRIAL, "--results", tmp_path / "results"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    runs = load_runs(tmp_path / "results")
    assert runs[["width", "lr", "experiment"]].values.tolist() == [[64, 2.0**-8, "quickstart"]]
    assert "figure: " in done.stdout


@pytest.mark.slow
def test_experiment_script_of_hours_runs_one_width_of_fewer_steps(tmp_path, capfd, monkeypatch):
    """As it is but for the number of steps, in this process."""
    run_experiment = cli.run_experiment

    def shortened(sweep, *others):
        run_experiment(dataclasses.replace(sweep, base=sweep.base.replace(steps=20)), *others)

    monkeypatch.setattr(cli, "run_experiment", shortened)
    script = str(ROOT / "experiments" / "lr_transfer.py")
    monkeypatch.setattr(sys, "argv", [script, *ONE_TRIAL, "--results", str(tmp_path / "results")])
    runpy.run_path(script, run_name="__main__")
    runs = load_runs(tmp_path / "results")
    assert runs[["width", "lr", "experiment"]].values.tolist() == [[64, 2.0**-8, "lr_transfer"]]
    assert "figure: " in capfd.readouterr().out


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "experiments").glob("*.py")))
def test_every_preset_is_a_grid_of_allowed_trials(script):
    names = runpy.run_path(str(ROOT / "experiments" / f"{script}.py"))
    sweeps = [names[preset] for preset in ("SWEEP", "H200") if preset in names]
    for sweep in [*sweeps, *names.get("ABLATIONS", {}).values()]:
        assert len(sweep.trials()) >= 5
    if "H200" in names:
        assert names["H200"].experiment == f"{script}_h200"
    assert sweeps or {"ABLATIONS", "SEARCH", "TRIALS"} & set(names)


@pytest.mark.parametrize(
    ("script", "option", "value", "sentence"),
    [
        ("quickstart", "--width", "100", "width 100 is not a multiple"),
        ("lr_transfer", "--preset", "tpu", "preset 'tpu' is not one of this experiment's: 'cpu' or 'h200'"),
        (
            "ablations",
            "--names",
            "warmup",
            "names: unknown key 'warmup'; the nearest known key is 'warmup_0",
        ),
    ],
)
def test_bad_input_of_a_process_has_no_traceback(script, option, value, sentence):
    command = [sys.executable, f"experiments/{script}.py", option, value, "--results", "/dev/null/x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def bpe_shards(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "shards"
    main([
        "data", "prepare", "--corpus", str(corpus), "--tokenizer", "bpe", "--vocab-size", "600",
        "--sequence-length", "32", "--shard-samples", "1000", "--validation-fraction", "0.2",
        "--workers", "1", "--out", str(out),
    ])  # fmt: skip
    return out


def test_inspect_says_what_shards_and_corpora_hold(bpe_shards, corpus, capfd):
    code, out, err = outcome(capfd, "data", "inspect", "--corpus", bpe_shards, "--texts", 2, "--verify")
    assert code == 0, err
    assert "600 different" in out and "nat/token" in out and "shards are as the index says" in out
    code, text, err = outcome(capfd, "data", "inspect", "--corpus", corpus, "--texts", 1)
    assert code == 0, err
    assert "256 different" in text and "shards" not in text
    code, _, err = outcome(capfd, "data", "inspect", "--corpus", corpus, "--verify")
    assert code == 2 and "--verify is for prepared shards" in err


def test_verify_names_a_damaged_shard(bpe_shards, capfd, tmp_path):
    copy = shutil.copytree(bpe_shards, tmp_path / "copy")
    (copy / "train-000001.tar").write_bytes(b"gone")
    code, _, err = outcome(capfd, "data", "inspect", "--corpus", copy, "--verify")
    assert code == 2 and "train-000001.tar is corrupted" in err and "Traceback" not in err


def test_a_sweep_trains_on_prepared_shards(bpe_shards, corpus, tmp_path, capfd):
    file = tmp_path / "sweep.toml"
    file.write_text(
        'experiment = "streamed"\nwidths = [32]\nparametrizations = ["mup"]\nlearning_rates = [0.01, 0.02]\n'
        "[base.model]\nbase_width = 32\nhead_size = 16\n[base.train]\nsteps = 8\n"
        f'[base.data]\ncorpus = "{bpe_shards}"\nsequence_length = 32\nbatch_size = 4\n'
    )
    code, _, err = outcome(capfd, "sweep", file, "--no-ray", "--results", tmp_path / "r")
    assert code == 0, err
    runs = load_runs(tmp_path / "r")
    assert len(runs) == 2 and set(runs["status"]) == {"finished"} and set(runs["dataset"]) == {corpus.name}
    # The same shards in another place are the same data: nothing would be run again.
    copy = shutil.copytree(bpe_shards, tmp_path / "copy")
    moved = load(DataConfig(corpus=str(copy), sequence_length=32, batch_size=4))
    assert set(runs["data_fingerprint"]) == {moved.fingerprint}


def test_ctrl_c_says_so_in_one_word_even_if_nobody_reads_the_output_any_more():
    """In `mup-tpu ... | tee log` it ends both, and what was not yet written has nowhere to go."""
    program = (
        "import os\nfrom mup_tpu.cli import guard\n"
        "def call():\n    print('unread', end='')\n    raise KeyboardInterrupt\n"
        "read, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\nguard(call)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_failed_trials_are_exit_code_1_beside_those_that_ended(corpus, tmp_path, capfd):
    """A width that no memory holds fails; the other is stored, and the same command tries the first again."""
    file = tmp_path / "sweep.toml"
    wide = SWEEP_TOML.format(corpus=str(corpus)).replace("[32]", "[32, 524288]")
    file.write_text(wide.replace('"2^-7", 0.02', "0.02") + "\n")
    run = ["sweep", file, "--parametrizations", "mup"]
    for stored in (0, 1):
        code, out, err = outcome(capfd, *run, "--results", tmp_path / "out")
        assert code == 1, out + err
        assert f"2 trials, {stored} stored" in out
        assert re.search(
            r"error: 1 of . trials failed, with their reasons in .*; the same command tries", err
        )
    statuses = load_runs(tmp_path / "out").set_index("width")["status"].to_dict()
    assert statuses == {32: "finished", 524288: "failed"}
    only = wide.replace("[32, 524288]", "[524288]").replace('"2^-7", 0.02', "0.02")
    file.write_text(only)
    code, out, err = outcome(capfd, *run, "--results", tmp_path / "two")
    assert code == 1 and "nothing to show: table has no finished run" in out, out + err


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
        (
            ["--num-seeds", 10**9],
            "num_seeds 1000000000 makes 2,000,000,000 trials; at most 100,000 are planned",
        ),
        (["--top", 0], "top 0 is not allowed: it must be above 0"),
        (["--sweep", "nowhere"], "results folder nowhere holds no store"),
    ],
)
def test_what_is_wrong_with_a_transfer_is_said_before_anything_trains(searched, options, sentence, capfd):
    code, out, err = outcome(capfd, "transfer", searched, "--width", 128, *options)
    assert code == 2 and sentence in err
    assert not searched.with_name("searched_transfer").exists()


def test_a_sweep_without_a_finished_trial_is_nothing_to_compare_a_transfer_with(searched, tmp_path, capfd):
    Store(tmp_path / "sweep", "sweep").append([{"trial_id": "b", "status": "diverged", "loss": math.inf}])
    options = ["--width", 128, "--sweep", tmp_path / "sweep"]
    code, _, err = outcome(capfd, "transfer", searched, *options)
    assert code == 2 and "holds no finished trial to compare with" in err


HOSTILE = ["[/b]", "[red]", "$x$_{", ":smile:", "<b>&amp;"]


@pytest.mark.slow
def test_names_and_paths_are_shown_as_they_are_and_never_as_markup(tmp_path, capfd):
    """Rich's markup, matplotlib's formulas, emoji codes and HTML in names of columns, groups and files."""
    folder = tmp_path / "[" / "b]"  # so that the path holds [/b]
    folder.mkdir(parents=True)
    scale, tuned, *groups = HOSTILE
    rows = [
        {scale: w, tuned: 2.0**x, "group": g, "loss": 2 + 0.1 * (x + 8) ** 2 + 1 / w, "note[/b]": 1}
        for w in (64, 128, 256)
        for x in range(-10, -5)
        for g in groups
    ]
    file = folder / "[bold]table[red].csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    names = ["--scale", scale, "--hyperparameter", tuned, "--parametrization-col", "group"]
    for command in ("analyze", "next", "plot", "report"):
        code, out, err = outcome(capfd, command, file, *names)
        assert code == 0, err
        assert "[/b]" in out
        assert command != "analyze" or all(group in out for group in groups)
    for figure in (folder / "figures").glob("*.svg"):
        assert "smile" in figure.read_text() or figure.stem == "optimum"
    code, _, err = outcome(capfd, "analyze", file, "--scale", "[/i]")
    assert code == 2 and "no column '[/i]'" in err and "note[/b]" in err
    code, _, err = outcome(capfd, "analyze", folder / "[/i].csv")
    assert code == 2 and "[/i].csv cannot be read" in err


@pytest.mark.slow
def test_a_results_folder_with_markup_in_its_path_is_shown(tmp_path, capfd):
    folder = tmp_path / "[" / "b]"
    sweep = Sweep("[red]x[$y$]")
    rows = [
        configured(t) | {"trial_id": f"{k}", "status": "finished", "loss": 2.0 + k % 7, "reason": "[/b]"}
        for k, t in enumerate(sweep.trials())
    ]
    Store(folder, sweep.experiment).append(rows)
    for command in ("runs", "analyze", "plot", "report"):
        code, out, err = outcome(capfd, command, folder)
        assert code == 0, err
        assert command not in ("plot", "report") or "/[/b]/" in out.replace("\n", "")
    assert "[red]x[$y$]" in outcome(capfd, "runs", folder)[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--threads", 1_000_000], "threads 1000000 is not allowed: it must be at most 1,024"),
        (["train", "--depth", 100_000_000], "depth 100000000 is not allowed: it must be at most 10,000"),
        (["train", "--width", 10**30], "width 1000000000000000000000000000000 is not allowed"),
        (["train", "--learning-rate", "2^99999"], "learning rate '2^99999' is not a number"),
        (["train", "--learning-rate", "0^-1"], "learning rate '0^-1' is not a number"),
        (["train", "--weight-decay", "nan"], "weight_decay nan is not allowed: it must be a finite number"),
        (["train", "--weight-decay", "inf"], "weight_decay inf is not allowed: it must be a finite number"),
        (["train", "--seed", 2**64], "seed 18446744073709551616 is not allowed"),
        (["train", "--corpus", "[/b]"], "[/b]"),
        (["train", "--data-seed", "-1"], "data_seed -1 is not allowed: it must be 0 or more"),
        (["coord-check", "--num-seeds", 0], "num_seeds 0 is not allowed"),
        (["coord-check", "--widths"], "widths is empty"),
        (["analyze", "[/b]"], "results folder [/b] holds no store"),
        (["runs", "[/b]"], "results folder [/b] holds no store"),
    ],
)
def test_hostile_values_are_one_sentence_and_exit_code_2(arguments, sentence, capfd):
    code, _, err = outcome(capfd, *arguments)
    assert code == 2
    assert sentence in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("name", ["", ".", "../.."])
def test_an_experiment_that_names_no_folder_is_refused(name, corpus, tmp_path, capfd):
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP_TOML.format(corpus=str(corpus)).replace('"small"', f'"{name}"'))
    code, _, err = outcome(capfd, "sweep", file)
    assert code == 2 and f"experiment '{name}' is not allowed: it is the name of a folder" in err
