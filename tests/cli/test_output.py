"""Output of all commands: names as they are, and nothing lost with it."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table
from mup_tpu.cli import console
from mup_tpu.cli.console import guard, write_output
from mup_tpu.cli.train import _log_lines
from mup_tpu.config import Trial
from mup_tpu.config.columns import configured
from mup_tpu.errors import ConfigError
from mup_tpu.plots import learning_curves_figure
from mup_tpu.store import Store, load_runs
from mup_tpu.study.study import load_study

HAS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")


@pytest.mark.parametrize("output", [pytest.param("full", marks=HAS_FULL), "unread", "ascii"])
def test_an_output_that_is_lost_or_lacks_letters_loses_no_row(
    output, corpus, tmp_path, small, outcome, monkeypatch
):
    """First the row and the export, then words about them."""
    words = ["--results", tmp_path / "r", "--export", tmp_path / "μP"]
    where: str | Path | int = {"full": "/dev/full"}.get(output, tmp_path / "out")
    if output == "unread":
        read, where = os.pipe()
        os.close(read)
    with open(where, "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        code, _, error = outcome("train", *small, "--corpus", corpus, *words)
    assert code == {"full": 2, "unread": 0, "ascii": 0}[output], error
    if output == "full":
        assert "; Ctrl-C stops warning: lines of the log are lost: No space left on device" in error
        assert error.endswith("stored results are kept; run the same command to continue"), error
    if output == "ascii":
        assert r"\u03bcP" in (tmp_path / "out").read_text()
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "μP").iterdir()}
    assert load_runs(tmp_path / "r")["status"].tolist() == ["finished"]


def test_a_package_of_the_extra_train_that_is_missing_is_named_and_others_are_errors_of_ours(capsys):
    def call(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(SystemExit) as ended:
        guard(lambda: call("transformers.models"))
    assert ended.value.code == 2
    assert "this command needs transformers, which is not installed: pip install '.[train]'" in " ".join(
        capsys.readouterr().err.split()
    )
    for name in ("mup_tpu.nowhere", "nowhere"):
        with pytest.raises(ModuleNotFoundError):
            guard(lambda name=name: call(name))


def test_ctrl_c_says_so_in_one_word_even_if_nobody_reads_the_output_any_more():
    """In `mup-tpu ... | tee log` it ends both, and what was not yet written has nowhere to go."""
    program = (
        "import os\nfrom mup_tpu.cli.console import guard\ndef call():\n    print('unread', end='')\n    "
        "raise KeyboardInterrupt\nread, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\nguard(call)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "stopped\n")


LOCAL = (["train", "--export"], ["analyze", "--figures", "x", "--out"], ["analyze", "x", "--csv"])
EMPTY = (
    ["train", "--results"], ["train", "--checkpoints"], ["data", "prepare", "--out"],
    ["sweep", "x.toml", "--results"], ["sweep"],
    ["check", "--results"], ["analyze"], ["init", "--out"], ["doctor", "--results"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "path", "sentence"),
    [(words, "", "it must name a file or folder") for words in LOCAL + EMPTY]
    + [(words, "gs://bucket/x", "it must be local, not a URL") for words in LOCAL],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_path_that_names_no_file_is_refused(words, path, sentence, tmp_path, monkeypatch, refused):
    """An empty one would be taken for none, or for the working folder; a URL would become a folder gs:."""
    monkeypatch.chdir(tmp_path)
    assert refused(*words, path) == f"error: a path {path!r} is not allowed: {sentence}"
    assert not list(tmp_path.iterdir())


STUDY = """
experiment = "mine"
trainer = "python -c 'print(1.0)'"
scale = { width = [1, 2] }
tune = { lr = [0.1, 0.2] }
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["predict", "runs.csv", "--at", "width=512", "--out", "x"], "out 'x' needs --figures"),
        (["doctor", "--tpu", "v4-8", "--results", "x"], "results and tpu were both given"),
        (["train", "--checkpoint-every", 5], "--checkpoint-every 5 needs --checkpoints"),
        (["train", "--placement", "slice"], "unknown option '--placement'"),
        (["sweep", "study.toml", "--checkpoint-every", 5], "checkpoint_every: a study's training is yours"),
        (["sweep", "study.toml", "--pack-size", 5, "--mix"], "mix, pack_size: a study's training is yours"),
        (["search", "search.toml", "--eval-every", 5], "unknown option '--eval-every'"),
        (
            ["transfer", "mine", "--at", "width=4", "--eval-every", 5],
            "eval_every: a study's training is yours",
        ),
        (
            ["transfer", "mine", "--at", "width=4", "--workers", 5],
            "options of a study's training need --trainer",
        ),
        (["check", "my:build", "--set", "depth=4"], "set depth: a module of yours takes learning_rate alone"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_an_option_that_would_have_no_effect_is_refused(
    words, sentence, valleys, tmp_path, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    valleys()
    Path("study.toml").write_text(STUDY)
    Path("search.toml").write_text('experiment = "x"\n[space.learning_rate]\nlow = 0.1\nhigh = 0.2\n')
    load_study(Path("study.toml"), "mine")[0].to_frame()  # writes the folder
    before = {*tmp_path.iterdir()}
    assert refused(*words).startswith(f"error: {sentence}")
    assert {*tmp_path.iterdir()} == before


ESCAPES = "\x1b[2J\x1b]0;title\x07", "\x9b31m\u202e", "back\r\x08"


def test_control_characters_of_a_table_reach_no_terminal(valleys, outcome):
    """They would clear the screen, set its title, or turn text around."""
    scale, *groups = ESCAPES
    table = valleys("runs.parquet", scale=scale, group=groups)
    names = ["--scale", scale, "--compare", "group"]
    for command in (["analyze"], ["analyze", "--next"], ["analyze", "--columns", "loss=\x1b[31m"]):
        _, out, err = outcome(*command, table, *names)
        assert not set(out + err) & set("\x1b\x07\x9b\u202e\r\x08")
        assert "\\x1b[2J" in out or "x1b[31m" in err


def test_control_characters_of_stored_rows_reach_no_terminal(tmp_path, capfd, printed, refused):
    row = configured(Trial()) | {"trial_id": "a", "status": "\x1b[31mred", "loss": 2.5}
    Store(tmp_path / "x", "\x1b]0;t\x07").append([row])
    out = printed("analyze", "--runs", tmp_path / "x")
    assert "\\x1b[31mred" in out and "\\x1b]0;t" in out and "\x1b" not in out
    err = refused("analyze", "--runs", "\x1b[31m\udcff")
    assert "\\x1b[31m" in err and "\x1b" not in err

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("mup_tpu"), "propagate", False)
        guard(lambda: logging.getLogger("mup_tpu").warning("\x1b[32mgreen"))
    assert capfd.readouterr().err == "\\x1b[32mgreen\n"
    assert "\\x1b[31mred" in warnings.formatwarning("\x1b[31mred", UserWarning, "file.py", 1)
    assert (
        warnings.formatwarning("it is damaged", UserWarning, console.__file__, 1)
        == "warning: it is damaged\n"
    )

    with _log_lines(console.Console(), str(tmp_path)):
        logging.getLogger("mup_tpu").warning("\x1b[33mcorpus")
    log = next(tmp_path.glob("logs/*.log")).read_text()
    assert capfd.readouterr().out == "\\x1b[33mcorpus\n" and log.endswith("\\x1b[33mcorpus\n")


def test_a_run_without_a_step_has_no_curve(valleys):
    rows = pd.read_csv(valleys(step=[10, 20, 30]))
    best = (rows["width"] == 64) & (rows["lr"] == 2.0**-7)
    rows.loc[best, "step"] = np.nan
    table = check_table(pd.concat([rows[~best], rows[best][:1]]))
    figure = learning_curves_figure(analyze(table), runs=table.runs)
    assert [len(ax.lines) for ax in figure.axes] == [2]


def test_a_long_run_table_shows_its_ends(tmp_path, outcome, printed):
    rows = [
        {"trial_id": f"{k:04}", "width": 64, "lr": 1.0 + k, "seed": 0, "loss": 2.0 + k, "status": "finished"}
        for k in range(1001)
    ]
    Store(tmp_path, "long").append(rows)
    _, out, _ = outcome("analyze", "--runs", tmp_path)
    assert "long: 1001 runs" in out and "961 runs are not shown: --csv FILE writes all" in out
    losses = [float(word) for word in re.findall(r"(?m)\b(\d+\.\d{4})\b", out)]
    assert losses == [2.0 + k for k in (*range(20), *range(981, 1001))]
    out = printed("analyze", "--runs", tmp_path, "--where", "lr<=1000")
    assert "not shown" not in out and out.count("finished") == 1000


def test_no_page_is_written_over_data(two_rules, refused):
    Path(two_rules, "data.toml").write_text("a = 1")
    before = {file: file.read_bytes() for file in Path(two_rules).glob("*.*")}
    sentence = "that file is data, and would be lost"
    assert sentence in refused("analyze", two_rules, "--csv", Path(two_rules, "store.json"))
    with pytest.raises(ConfigError, match=sentence):  # as reports and pages are written
        write_output("html", Path(two_rules, "data.toml"), "")
    assert before == {file: file.read_bytes() for file in before}
