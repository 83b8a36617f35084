"""The command `train`: rows, exports, checkpoints, and bad input."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data import load
from mup_tpu.store import Store, load_runs
from mup_tpu.training.loop import PackRun


def test_train_stores_a_row_and_exports_a_stock_model(corpus, tmp_path, outcome, small):
    code, out, err = outcome(
        "train", *small, "--corpus", corpus, "--results", tmp_path / "r", "--export", tmp_path / "hf",
    )  # fmt: skip
    assert code == 0, err
    row = load_runs(tmp_path / "r").iloc[0]
    assert f"loss {row['loss']:.4f} nat/token" in out
    (log,) = (tmp_path / "r" / "logs").iterdir()
    assert all("step 12/12 · loss" in text and "MFU" in text for text in (out, log.read_text()))
    assert (tmp_path / "hf" / "model.safetensors").exists()


GENERATE = """
import json, sys
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


def run_apart(arguments, folder):
    """Lines that GENERATE prints in a process that cannot import mup_tpu."""
    program = f"import sys\nsys.modules['mup_tpu'] = None\n{GENERATE}"
    run = [sys.executable, "-I", "-c", program, *arguments]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # transformers warns of settings that do not fit; of padding it warns where nothing is given at all.
    warned = [line for line in done.stderr.splitlines() if "[transformers]" in line]
    assert all("may be padded" in line for line in warned), warned
    return done.stdout.splitlines()


@pytest.fixture
def run_here(monkeypatch, capfd):
    """Runner of GENERATE in this process, from which mup_tpu is hidden meanwhile."""

    def run_here(arguments, folder):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] == "mup_tpu"]:
                patch.setitem(sys.modules, name, None)
            patch.setattr(sys, "argv", ["generate", *map(str, arguments)])
            exec(GENERATE, {})
        return capfd.readouterr().out.splitlines()

    return run_here


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_exports_generate_text_where_mup_tpu_is_not_installed(
    is_apart, corpus, tmp_path, outcome, small, run_here, printed
):
    text, folders = "The Ā of ü, don't … ", [tmp_path / name for name in ("bytes", "bpe")]
    common = ["train", *small, "--corpus", corpus, "--vocab-size", 300]
    assert outcome(*common, "--export", folders[0])[0] == 0
    llama = ["--tokenizer", "bpe", "--architecture", "llama", "--export", folders[1]]
    assert outcome(*common, *llama)[0] == 0

    printed = (run_apart if is_apart else run_here)([text, *folders], tmp_path)
    for folder, line in zip(folders, printed, strict=True):
        config = DataConfig(corpus=str(corpus), tokenizer=folder.name, vocab_size=300)
        trained_with, said = load(config).tokenizer, json.loads(line)
        assert said["ids"] == trained_with.encode([text])[0].tolist()
        assert said["text"] == text
        assert said["new"][0] and said["new"][1] == said["alone"]
        assert said["from_nothing"][0] == trained_with.separator and len(said["from_nothing"]) > 1


def test_an_export_that_cannot_be_written_is_said_before_training(corpus, tmp_path, outcome, small):
    (tmp_path / "file").write_text("mine")
    code, out, error = outcome("train", *small, "--corpus", corpus, "--export", tmp_path / "file")
    assert code == 2 and "step" not in out
    assert f"export {tmp_path / 'file'} cannot be written: File exists" in error
    assert (tmp_path / "file").read_text() == "mine"


def test_trials_that_share_a_checkpoint_folder_go_on_and_leave_each_other_alone(
    corpus, tmp_path, small, printed
):
    """Another trial's checkpoints, and folders of the user's whose names look like them."""
    common = ["train", *small, "--corpus", corpus, "--checkpoints", tmp_path, "--checkpoint-every", 4]
    (tmp_path / "step-results").mkdir()
    (tmp_path / "step-results" / "notes.txt").write_text("mine")
    losses, outputs = [], []
    for seed in (0, 1, 0):
        out = printed(*common, "--seed", seed)
        outputs.append(out)
        losses.append(re.search(r"finished: loss ([\d.]+)", out).group(1))
    assert losses[0] == losses[2] != losses[1]
    assert ["step 4/12" in out for out in outputs] == [True, True, False], "the last goes on from step 8"
    assert (tmp_path / "step-results" / "notes.txt").read_text() == "mine"
    folders = sorted(p for p in tmp_path.iterdir() if p.name != "step-results")
    assert len(folders) == 2
    for folder in folders:
        assert [p.name for p in sorted(folder.iterdir())] == ["step-00000004", "step-00000008"]


def test_sigterm_checkpoints_and_the_same_command_goes_on(
    corpus, tmp_path, small, outcome, monkeypatch, printed
):
    """It comes after the first checkpoint; in a process of its own a sweep's driver gets one."""
    command = [
        "train", *small[:-2], "--steps", 60, "--corpus", corpus,
        "--checkpoints", tmp_path / "c", "--checkpoint-every", 10, "--results", tmp_path / "r",
    ]  # fmt: skip

    def save(run, before=PackRun._save):
        before(run)
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(PackRun, "_save", save)
    code, _, error = outcome(*command)
    assert code == 143 and "preempted at step 10 of 60" in error and "the same command goes on" in error
    assert load_runs(tmp_path / "r")["status"].tolist() == ["preempted"]
    out = printed(*command)
    assert "step 10/60" not in out and "step 20/60" in out
    assert load_runs(tmp_path / "r")["status"].tolist() == ["finished"]


@pytest.mark.slow
def test_train_continues_a_trial_to_more_steps(corpus, tmp_path, outcome, small, printed):
    common = ["train", *small, "--corpus", corpus, "--schedule", "constant", "--warmup", 3]
    kept = [*common, "--checkpoints", tmp_path / "c"]
    assert outcome(*kept)[0] == 0
    out = printed(*kept, "--continue-to", 20)
    assert "goes on from step 12 of 20" in out
    _, whole, _ = outcome(*common, "--steps", 20)
    assert whole.splitlines()[-1].split(" nat/token")[0] in out
    code, out, _ = outcome(*kept)  # the shorter one is still there, at its end
    assert code == 0 and "goes on from step 12 of 12" in out
    assert "to go on from: it trains from the start" in printed(*kept, "--seed", 1, "--continue-to", 20)
    assert "--continue-to needs --checkpoints" in outcome(*common, "--continue-to", 20)[2]


def test_bad_corpora_and_results_folders(corpus, tmp_path, small, refused):
    (tmp_path / "empty.txt").write_text(" \n\n ")
    (tmp_path / "latin.txt").write_bytes("Ärger und Überdruß".encode("latin-1"))
    (tmp_path / "short.txt").write_text("A short text.\n\n" * 40)
    (tmp_path / "folder").mkdir()
    Store(tmp_path / "other", "another_experiment")
    text = ["--corpus", corpus, "--results"]
    for words, name, sentence in (
        (["--corpus"], "empty.txt", "is empty"),
        (["--corpus"], "latin.txt", "is not UTF-8 at byte 0"),
        (["--corpus"], "short.txt", "is shorter than one batch"),
        (["--corpus"], "folder", "holds no"),
        ([*small, *text], "empty.txt/results", "cannot be written"),
        ([*small, *text], "other", "holds experiment 'another_experiment', not 'train'"),
    ):
        err = refused("train", *words, tmp_path / name)
        assert sentence in err and str(tmp_path / name) in err
