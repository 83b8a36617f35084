"""Runs in folders, databases and journals of other tools, mostly written by the tools themselves."""

import json
import warnings
from pathlib import Path

import pandas as pd
import pytest

from mup_tpu.analysis import load_table
from mup_tpu.analysis.ingest.readers import find_reader
from mup_tpu.analysis.ingest.table_files import read_file
from mup_tpu.cli import main
from mup_tpu.errors import TableError

RUNS = [(w, 2.0**e, 3 - w / 640 + 0.05 * (e + 8) ** 2) for w in (64, 128, 256) for e in range(-10, -5)]
"""Width, learning rate and final loss."""


def tune(folder, local_ray):
    """Ray Tune's own folder: result.json, progress.csv and params.json of each trial."""
    from ray import tune

    def train(config):
        for done in (1, 2):
            width, lr = config["shape"]["width"], config["lr"]
            loss = next(loss for w, r, loss in RUNS if (w, r) == (width, lr))
            tune.report({"loss": loss + 2 - done})

    space = [{"shape": {"width": w}, "lr": lr} for w, lr, _ in RUNS]
    config = tune.RunConfig(storage_path=str(folder), name="sweep", verbose=0)
    tune.Tuner(
        tune.with_resources(lambda config: train(config["point"] | {}), {"cpu": 1}),
        param_space={"point": tune.grid_search(space)},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=2),  # a process has many trials
        run_config=config,
    ).fit()


def trainer(folder):
    """trainer_state.json of transformers' TrainerState, in two checkpoints of each run."""
    from transformers.trainer_callback import TrainerState

    for width, lr, loss in RUNS:
        history = [{"step": s, "loss": loss + 0.3, "learning_rate": lr / s} for s in (10, 50, 90)]
        for step in (50, 100):
            history.append({"step": step, "eval_loss": loss + 0.01 * (100 - step)})
            file = folder / f"w{width}_lr{lr:.6e}" / f"checkpoint-{step}" / "trainer_state.json"
            file.parent.mkdir(parents=True)
            TrainerState(global_step=step, log_history=[*history]).save_to_json(str(file))


def lightning(folder):
    """metrics.csv and hparams.yaml as Lightning's CSVLogger writes them."""
    for number, (width, lr, loss) in enumerate(RUNS):
        run = folder / "lightning_logs" / f"version_{number}"
        run.mkdir(parents=True)
        (run / "hparams.yaml").write_text(f"d_model: {width}\nlr: {lr}\nname: null\n")
        rows = [f"0,{s},{loss + 0.2},\n0,{s},,{loss + 0.01 * (100 - s)}\n" for s in (50, 100)]
        (run / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n" + "".join(rows))


def nanogpt(folder):
    """log.txt with the lines that nanoGPT's train.py prints."""
    for width, lr, loss in RUNS:
        run = folder / f"w{width}_lr{lr:.6e}"
        run.mkdir(parents=True)
        lines = [
            f"step {s}: train loss {loss + 0.2:.6f}, val loss {loss + 0.01 * (100 - s):.6f}\n"
            f"iter {s}: loss {loss + 0.1:.6f}, time 12.34ms, mfu 1.00%\n"
            for s in (0, 100)
        ]
        (run / "log.txt").write_text("number of parameters: 0.80M\n" + "".join(lines))


def dumps(folder):
    """JSON files with config and summary, where the summary has the decayed learning rate."""
    folder.mkdir()
    for number, (width, lr, loss) in enumerate(RUNS):
        run = {
            "config": {"width": {"value": width}, "lr": {"value": lr}},
            "summary": {"val_loss": loss, "lr": 0},
        }
        (folder / f"run{number}.json").write_text(json.dumps(run | {"state": "finished"}))


def wandb_folder(folder):
    """A folder of W&B's local runs: config.yaml, and wandb-summary.json with the decayed learning rate."""
    for number, (width, lr, loss) in enumerate(RUNS):
        files = folder / "wandb" / f"run-20260101_{number:06}-abc" / "files"
        files.mkdir(parents=True)
        config = f"wandb_version: 1\n_wandb:\n  value: {{}}\nmodel:\n  value:\n    n_embd: {width}\n"
        (files / "config.yaml").write_text(f"{config}optim:\n  value:\n    lr: {lr}\n")
        (files / "wandb-summary.json").write_text(json.dumps({"val/loss": loss, "lr": lr / 10, "_step": 9}))


def hydra(folder):
    """A multirun of Hydra whose jobs write metrics.json."""
    for number, (width, lr, loss) in enumerate(RUNS):
        job = folder / "multirun" / "2026-01-01" / "12-00-00" / str(number)
        (job / ".hydra").mkdir(parents=True)
        (job / ".hydra" / "config.yaml").write_text(f"model:\n  d_model: {width}\noptim:\n  lr: {lr}\n")
        (job / "metrics.json").write_text(json.dumps({"val_loss": loss, "train_loss": loss + 0.2}))


def mlruns(folder):
    """MLflow's folder as its file store writes it."""
    experiment = folder / "mlruns" / "12345"
    experiment.mkdir(parents=True)
    (experiment / "meta.yaml").write_text("artifact_location: file:///x\nname: widths\n")
    for number, (width, lr, loss) in enumerate(RUNS):
        run = experiment / f"{number:032x}"
        for part, content in (
            ("params/d_model", str(width)),
            ("params/learning_rate", str(lr)),
            ("metrics/val_loss", f"1700000000000 9.0 0\n1700000001000 {loss} 100\n"),
        ):
            (run / part).parent.mkdir(parents=True, exist_ok=True)
            (run / part).write_text(content)
        (run / "meta.yaml").write_text(f"artifact_uri: file:///x\nrun_id: {number:032x}\nstatus: 3\n")


def nanogpt_output(folder):
    """What nanoGPT's train.py prints, in a file of each run."""
    nanogpt(folder)
    for log in sorted(folder.glob("*/log.txt")):
        log.rename(folder / f"{log.parent.name}.out")
        log.parent.rmdir()


def study_as_json(folder):
    """Rows of a tracker's API under one key."""
    rows = [{"name": f"r{w}", "config": {"width": w, "lr": lr}, "val_loss": loss} for w, lr, loss in RUNS]
    (folder / "runs.json").write_text(json.dumps({"runs": rows}))
    return folder / "runs.json"


def aim_runs(folder):
    """The CSV of Aim's table of runs: a column for each metric and context."""
    rows = [
        {"run.hash": f"{i:024x}", "run.name": f"Run: {i}", "run.experiment": "sweep", "run.hparams.n_embd": w,
         "run.hparams.learning_rate": lr, 'loss subset="val"': loss, 'loss subset="train"': loss + 0.2}
        for i, (w, lr, loss) in enumerate(RUNS)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "runs.csv", index=False)
    return folder / "runs.csv"


def aim_metrics(folder):
    """The data frame of Aim's metrics as CSV: a row a step of a metric."""
    rows = [
        {"run.hash": f"{i:024x}", "run.hparams.n_embd": w, "run.hparams.learning_rate": lr,
         "metric.name": "loss", "metric.context.subset": subset, "step": step,
         "value": loss + more + 1 - step / 100}
        for i, (w, lr, loss) in enumerate(RUNS)
        for step in (50, 100)
        for subset, more in (("val", 0), ("train", 0.2))
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    return folder / "metrics.csv"


def optuna_study(storage):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=storage, study_name="widths")
    for width, lr, loss in RUNS:
        study.enqueue_trial({"width": width, "lr": lr})
        trial = study.ask()
        trial.suggest_categorical("width", [64, 128, 256])
        trial.suggest_float("lr", 1e-5, 1, log=True)
        study.tell(trial, loss)
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)


def found_in(path):
    runs = load_table(path).runs
    return sorted(zip(runs["scale"], runs["x"].round(3), runs["loss"].round(4), strict=True))


EXPECTED = sorted((w, round(e, 3), round(3 - w / 640 + 0.05 * (e + 8) ** 2, 4))
                  for w in (64, 128, 256) for e in range(-10, -5))  # fmt: skip


@pytest.mark.parametrize(
    "write", [trainer, lightning, nanogpt, dumps, wandb_folder, hydra, mlruns, nanogpt_output]
)
def test_a_folder_of_another_tool_is_read_as_it_is(write, tmp_path):
    write(tmp_path / "out")
    assert found_in(tmp_path / "out") == EXPECTED


@pytest.mark.parametrize("write", [study_as_json, aim_runs, aim_metrics])
def test_a_file_of_another_tool_is_read_as_it_is(write, tmp_path):
    assert found_in(write(tmp_path)) == EXPECTED


def test_a_sampled_history_ends_with_its_summary(tmp_path):
    """W&B samples 500 steps of a history: the last one may be none of them."""
    dumps(tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        run = json.loads(file.read_text())
        run["summary"]["_step"] = 1000
        run["history"] = [{"_step": step, "val_loss": 9 - step / 500} for step in (0, 500)]
        file.write_text(json.dumps(run))
    assert found_in(tmp_path / "out") == EXPECTED


def test_runs_of_a_second_tool_in_a_folder_are_warned_of(tmp_path):
    lightning(tmp_path)
    trainer(tmp_path / "lightning_logs" / "version_0" / "of_a_callback")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found_in(tmp_path) == EXPECTED
    trainer(tmp_path / "trainer")
    with pytest.warns(UserWarning, match="15 files metrics.csv are read, and 30 others are not, such as"):
        assert found_in(tmp_path) == EXPECTED


@pytest.mark.slow
def test_a_folder_of_ray_tune_is_read_as_it_is(tmp_path, local_ray):
    tune(tmp_path, local_ray)
    assert found_in(tmp_path / "sweep") == EXPECTED
    files = sorted((tmp_path / "sweep").rglob("result.json"))
    assert found_in(files) == EXPECTED, "single files are read too"
    for file in files:
        file.unlink()
    assert found_in(tmp_path / "sweep") == EXPECTED, "progress.csv and params.json say the same"


def test_a_study_of_optuna_is_read_from_its_database_and_from_its_journal(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna_study(f"sqlite:///{tmp_path}/study.db")
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
    optuna_study(optuna.storages.JournalStorage(journal))
    assert found_in(tmp_path / "study.db") == found_in(tmp_path / "journal.log") == EXPECTED
    optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="another")
    with pytest.raises(TableError, match=r"holds 2 studies \(another, widths\), not one"):
        load_table(tmp_path / "study.db")


def test_a_database_of_mlflow_is_read_by_its_path(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        for name, runs in (("widths", RUNS), ("other", RUNS[:1])):
            mlflow.set_experiment(name)
            for width, lr, loss in runs:
                with mlflow.start_run():
                    mlflow.log_params({"d_model": width, "learning_rate": lr})
                    mlflow.log_metric("val_loss", loss)
            mlflow.set_tracking_uri(before)
            if name == "widths":
                assert found_in(tmp_path / "mlflow.db") == EXPECTED
            mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    finally:
        mlflow.set_tracking_uri(before)
    with pytest.raises(
        TableError, match=r"holds several experiments \(other, widths\): set MLFLOW_TRACKING_URI"
    ):
        load_table(tmp_path / "mlflow.db")


def test_lists_of_runs_by_size_in_json_are_one_table(tmp_path, capsys):
    """As marin's selection_summary.json: sizes as names, and other things beside them."""
    sizes = {64: "130m", 128: "520m", 256: "1_2b"}
    runs = {
        name: [
            {"learning_rate": lr, "c4_loss": loss, "state": "finished"} for w, lr, loss in RUNS if w == width
        ]
        for width, name in sizes.items()
    }
    file = tmp_path / "summary.json"
    file.write_text(json.dumps({"all_runs": runs, "optimizer": "muonh", "selected_runs": {"130m": {"x": 1}}}))
    main(["analyze", str(file), "--columns", "loss=c4_loss", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {o["scale"] for o in found["results"][0]["optima"]} == {130e6, 520e6, 1.2e9}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.db", b"", "is a database of neither MLflow nor Optuna"),
        ("x.db", b"no database", "cannot be read: file is not a database"),
        ("out/a/log.txt", b"hello\n", "holds 1 files log.txt, and none has a loss"),
        ("out/a/result.json", b"{broken\n", "cannot be read: "),
        ("out/a/trainer_state.json", b"{}", "cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, name, content, sentence):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    with pytest.raises(TableError, match=sentence) as caught:
        load_table(file if name == "x.db" else tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_looked_into_is_left_to_the_reader_of_tables(tmp_path, monkeypatch):
    file = tmp_path / "runs.csv"
    file.write_text("width,lr,loss\n" + "".join(f"{w},{lr},{loss}\n" for w, lr, loss in RUNS))

    def refuse(self, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert find_reader(file) is read_file
    assert found_in(file) == EXPECTED


def test_a_folder_without_runs_says_what_is_read(tmp_path):
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(TableError, match="holds no runs that are read: it is no results folder .*Ray Tune"):
        load_table(tmp_path)
