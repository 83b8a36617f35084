"""doctor: what it finds on this machine, and the sentence for each thing that will not work."""

import os
import pwd
from pathlib import Path

import psutil
import pytest

from mup_tpu.cli.doctor import check_fit, check_folder, check_tpu, examine
from mup_tpu.files import Folder

RESULTS = Path(__file__).parents[2] / "results"


def test_this_machine_is_examined(tmp_path):
    found = {finding.subject: finding for finding in examine(str(tmp_path))}
    assert found["torch"].state == pytest.importorskip("torch").__version__.split("+")[0]
    state, memory = found["machine"].state, psutil.virtual_memory().total / 2**30
    assert f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB" in state
    assert not found["results folder"].problem


def test_torch_and_torch_xla_that_do_not_fit():
    (finding,) = check_fit("2.15.0", "2.9.0")
    assert "torch_xla 2.9.0 does not load beside torch 2.15.0" in finding.problem
    assert "'torch==2.9.*'" in finding.problem
    assert list(check_fit("2.9.1", "2.9.0")) == list(check_fit("2.15.0", None)) == []


@pytest.mark.parametrize(
    ("chips", "pjrt", "sentence"),
    [
        (1, None, ""),
        (1, "CPU", "PJRT_DEVICE=CPU hides 1 TPU chips"),
        (0, "TPU", "there is no TPU chip here"),
        (1, "TPU", ""),
        (0, None, ""),
    ],
)
def test_tpu_chips_and_pjrt_device(chips, pjrt, sentence):
    problem = check_tpu(chips, pjrt).problem
    assert sentence in problem and bool(problem) == bool(sentence)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in check_folder("results folder", str(tmp_path / "file")).problem
    assert not check_folder("results folder", str(tmp_path / "new" / "deep")).problem
    assert not Path(tmp_path / "new").exists()


def test_a_results_url_is_asked_not_taken_for_a_folder_here():
    Folder("memory://doctor/results").write("store.json", b"{}")
    answers = check_folder("results folder", "memory://doctor/results").state
    assert answers == "memory://doctor/results answers, with 1 entries"
    assert "Protocol not known" in check_folder("results folder", "nothing://x").problem


@pytest.mark.parametrize(
    ("environment", "code", "sentence"),
    [
        ({}, 0, "no problems"),
        ({"PJRT_DEVICE": "TPU"}, 1, "- PJRT_DEVICE=TPU, but there is no TPU chip here"),
    ],
)
def test_the_exit_code_is_1_where_a_problem_would_stop_a_run(
    environment, code, sentence, outcome, tmp_path, monkeypatch
):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mup_tpu.cli.doctor.tpu_device_files", list)
    ended, out, err = outcome("doctor", "--results", tmp_path)
    assert ended == code and sentence in out, out + err
    assert err == ("error: problems that would stop a run: 1, with remedies above" if code else "")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--version"], 0, "mup-tpu "),
        (["doctor"], 1, "MUP_TPU_CACHE is not set, and this user has no home folder"),
        (["ask", "/nowhere"], 2, "error: results folder /nowhere holds no study"),
        (["analyze", RESULTS / "nanogpt_mup"], 0, "SP: DRIFTS"),
        (["train", "--steps", "1"], 2, "error: MUP_TPU_CACHE is not set, and this user has no home folder"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_a_user_without_a_home_and_a_name_gets_answers(words, code, sentence, outcome, monkeypatch):
    """As in a container that is started with a number for its user."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    for name in ("HOME", "MUP_TPU_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    ended, out, err = outcome(*words)
    assert ended == code and sentence in " ".join((out + err).split())
