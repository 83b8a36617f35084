"""The command watch, on studies that fill by ask and tell, in a folder and in a bucket."""

import json
import math
import shutil

import pytest

from mup_tpu import Study, octaves
from mup_tpu.cli import main
from mup_tpu.cli.console import Console
from mup_tpu.cli.watch import Watched
from mup_tpu.files import Folder
from mup_tpu.store import Store


def loss(trial):
    return 3 + 0.05 * (math.log2(trial.lr) + 6) ** 2 + 0.001 * trial.seed - 0.1 * math.log2(trial.width)


@pytest.fixture(params=["local", "memory"])
def study(request, tmp_path):
    url = str(tmp_path / "one") if request.param == "local" else f"memory://bucket/{tmp_path.name}"
    return Study(url, name="one", scale={"width": [64, 128]}, tune={"lr": octaves(-8, -4)}, seeds=2)


def watch(study, capsys, *words):
    main(["watch", study.folder, "--once", *map(str, words)])
    return capsys.readouterr().out


def test_a_folder_is_watched_as_it_fills(study, capsys, tmp_path):
    assert "no run is stored yet" in watch(study, capsys)
    trials = study.ask(20)
    study.tell(trials[0], failed="out of \x1b[31mmemory")
    early = watch(study, capsys)
    assert "1 of 20 trials stored (1 failed)" in early and "failed (1 ×): out of \\x1b[31mmemory" in early
    assert early.count("leased") == 8 and "and 11 more" in early and "nan" not in early
    page, reloads = tmp_path / "page.html", '<meta http-equiv="refresh"'
    watch(study, capsys, "--html", page)
    assert "no optimum yet" in page.read_text() and reloads not in page.read_text(), "watched once"
    for trial in trials[:18]:
        study.tell(trial, loss(trial))
    watched = Watched(study.folder)
    assert watched.look() and not watched.look(), "nothing is new at the second look"
    state = watched.state()
    assert state["statuses"] == {"finished": 18} and state["trials"] == 20 and len(state["running"]) == 2
    assert [round(optimum["x"]) for optimum in state["analysis"]["results"][0]["optima"]] == [-6, -6]
    watched.write(page, 5.0)
    text = page.read_text()
    assert reloads in text and "18 of 20 trials stored" in text and "<svg" in text and "leased" in text
    for trial in trials[18:]:
        study.tell(trial, loss(trial))
    assert watched.look() and watched.is_complete and not watched.running
    printed = json.loads(watch(study, capsys, "--json"))
    assert printed["statuses"] == {"finished": 20}
    main(["watch", study.folder, "--html", str(page)])  # ends: the grid is complete
    shown = capsys.readouterr().out
    assert reloads not in page.read_text() and "20 of 20 trials stored" in page.read_text()
    assert "20 of 20 trials" in shown and "best learning rate" in shown and "\x1b" not in shown


def test_a_folder_that_was_removed_or_replaced_is_said(tmp_path, capsys):
    def fill(rate):
        study = Study(tmp_path / "one", scale={"width": [64]}, tune={"lr": [rate]})
        study.tell(study.ask(1)[0], 2.5)
        return study

    watched = Watched(fill(0.5).folder)
    assert watched.look() and watched.is_complete
    shutil.rmtree(tmp_path / "one")
    assert watched.look() and not watched.is_complete and not watched.look()
    assert watched.state()["statuses"] == {}
    watched.show(Console())
    gone, nothing = capsys.readouterr().out.splitlines()
    assert "are gone: the folder was removed or replaced" in gone and "no run is stored yet" in nothing
    watched = Watched(fill(0.5).folder)
    watched.look()
    shutil.rmtree(tmp_path / "one")
    fill(0.25)
    assert watched.look() and "the folder was removed or replaced" in watched.replaced


def test_steps_of_running_trials_are_shown_and_files_of_others_are_no_traceback(study, capsys):
    one, two, three, four, *_ = study.ask(8)
    folder = Folder(study.folder)
    folder.write(f"work/{one.id}/resume.json", b'{"step": 40}')
    folder.write(f"work/{two.id}/resume.json", b'{"step": ')
    folder.write(f"work/{three.id}/state", b"")
    folder.write(f"work/{four.id}/resume.json", b'{"step": Infinity}')
    for name in ("nobody", "asked.lock"):
        folder.write(f"work/{name}/resume.json", b"[1]")
    shown = watch(study, capsys)
    assert f"running: {one}: step 40 saved" in shown and f"{three}: no step saved yet" in shown
    study.tell(one, 2.5)
    folder.write(f"work/{one.id}/resume.json", b'{"step": 40}')  # its runner was killed before it removed it
    shown = watch(study, capsys)
    assert "1 of 20 trials stored" in shown and "step 40 saved" not in shown
    folder.write("study.json", b"[" * 100_000)
    assert "1 trials stored" in watch(study, capsys)
    Store(study.folder, "one").append([{"trial_id": "a", "status": "finished", "loss": 2.5}])
    assert "best loss so far: 2.5000" in watch(study, capsys)
    with pytest.raises(SystemExit):
        main(["watch", study.folder, "--every", "often"])
    assert "every 'often' is not a time" in capsys.readouterr().err
