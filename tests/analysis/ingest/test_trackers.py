"""Runs in trackers, written and read by the trackers' own packages."""

import http.server
import json
import math
import sys
import threading
from typing import ClassVar

import numpy as np
import pytest

from mup_tpu.analysis import load_table
from mup_tpu.analysis.ingest.readers import find_reader, read_tool
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of

GRID = [(w, 2.0**x, 2.5 + (x + 8) ** 2 / 20) for w in (64, 128) for x in (-9, -8, -7)]


def found(table) -> list[tuple[float, float, float]]:
    return [(run.scale, 2.0**run.x, run.loss) for run in table.runs.itertuples()]


def write_events(folder, grid=GRID, in_place=False):
    """Runs as torch's writer logs them: a held-out loss now and then, hyperparameters at the end."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for i, (width, lr, loss) in enumerate(grid):
        with tensorboard.SummaryWriter(str(folder / f"run{i}")) as writer:
            for step in range(0, 40, 10):
                writer.add_scalar("train/loss", loss - step / 100, step)
            for step in (15, 30):
                writer.add_scalar("val/loss", loss + 1 - step / 30, step)
            settings = {"d_model": width, "lr": lr, "optimizer": "adam", "tied": True}
            writer.add_hparams(settings, {"hparam/best": loss}, run_name="." if in_place else None)


@pytest.mark.parametrize("in_place", [False, True])
def test_event_files_of_tensorboard_are_a_table_with_its_curves(tmp_path, in_place):
    write_events(tmp_path, in_place=in_place)
    assert find_reader(tmp_path) is read_tool
    table = load_table(tmp_path)
    np.testing.assert_allclose(found(table), GRID, rtol=1e-6)
    assert (table.columns.scale, table.columns.hyperparameter) == ("d_model", "lr")
    assert len(table.history) == 12  # the held-out loss alone, two steps a run
    assert {"hparams/optimizer", "hparams/tied", "run"} <= set(read_tool(tmp_path))


def test_a_run_of_tensorboard_that_diverged_is_kept_and_one_that_was_cut_is_named(tmp_path):
    write_events(tmp_path, [*GRID[:5], (128, 2.0**-7, math.nan)])
    assert [loss for _, _, loss in found(load_table(tmp_path))][-1] == math.inf
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path / "cut")) as writer:
        writer.add_scalar("val/loss", 2.0, 15)
        writer.add_hparams({"d_model": 256, "lr": 2.0**-8}, {"hparam/best": 2.0}, run_name=".")
    table = load_table(tmp_path)
    assert len(table.runs) == 6
    assert any("256 at 2^-8 (step 15)" in note for note in notes_of(table))


def test_folders_of_other_things_are_no_tracker_s(tmp_path):
    pytest.importorskip("tensorboard")
    assert find_reader(tmp_path) is None
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1").touch()
    assert find_reader(tmp_path) is read_tool
    with pytest.raises(TableError, match="holds no runs"):
        load_table(tmp_path)
    (tmp_path / "store.json").touch()  # a sweep of ours, which logs there too
    assert find_reader(tmp_path) is None


@pytest.mark.slow
def test_runs_of_an_experiment_of_mlflow_by_its_name_and_by_its_database(tmp_path, monkeypatch):
    """In a database of its own, as on a laptop."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    try:
        experiment, client = mlflow.create_experiment("width sweep"), mlflow.tracking.MlflowClient()
        runs = [(*run, "FINISHED") for run in [*GRID[:5], (128, 2.0**-7, math.nan)]]
        for width, lr, loss, state in [*runs, (256, 2.0**-7, 1.0, "KILLED")]:
            run = client.create_run(experiment).info.run_id
            losses = [mlflow.entities.Metric("val_loss", loss + 2 - step, 0, step) for step in (1, 2)]
            settings = {"d_model": width, "learning_rate": lr}
            params = [mlflow.entities.Param(name, str(value)) for name, value in settings.items()]
            client.log_batch(run, losses, params)
            client.set_terminated(run, state)
        table = load_table("mlflow:width sweep")
        np.testing.assert_allclose(sorted(found(table)), [*GRID[:5], (128, 2.0**-7, math.inf)])
        assert table.columns.scale == "d_model"
        assert any("1 KILLED runs left out" in note for note in notes_of(table))
        with pytest.raises(TableError, match="has no such experiment; there are Default, width sweep"):
            load_table("mlflow:depth sweep")
        mlflow.set_tracking_uri(before)
        assert found(load_table(tmp_path / "runs.db")) == found(table)
        assert mlflow.get_tracking_uri() == before
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
        with mlflow.start_run(experiment_id=mlflow.create_experiment("other")):
            mlflow.log_metric("val_loss", 1.0)
        with pytest.raises(TableError, match=r"experiments \(other, width sweep\): set MLFLOW_TRACKING"):
            load_table(tmp_path / "runs.db")
    finally:
        mlflow.set_tracking_uri(before)


class _Service(http.server.BaseHTTPRequestHandler):
    """Answers as Weights & Biases does to who asks and for the runs of a project."""

    runs: ClassVar[list[dict] | None] = []

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        edges = [{"node": run, "cursor": run["id"]} for run in self.runs or []]
        page = {"endCursor": None, "hasNextPage": False}
        project = {"internalId": "1", "runCount": len(edges), "runs": {"edges": edges, "pageInfo": page}}
        viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        project = None if self.runs is None else project
        answer = {"project": project} if b"project(" in asked else {"viewer": viewer}
        content = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def wandb_service(monkeypatch):
    """The service cannot run here, so a server answers its own package in its shape."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


def test_a_project_of_wandb(wandb_service):
    runs = [(*run, "finished") for run in [*GRID[:5], (128, 2.0**-7, "NaN")]]
    runs += [(256, 2.0**-8, 1.0, "crashed")]
    _Service.runs = [
        {
            "id": f"id{i}",
            "name": f"run{i}",
            "displayName": f"lively-sun-{i}",
            "state": state,
            "config": json.dumps({"d_model": {"value": width}, "optim": {"value": {"lr": lr}}}),
            "summaryMetrics": json.dumps({"val/loss": loss, "lr": 0.0, "_step": 10}),
        }
        for i, (width, lr, loss, state) in enumerate(runs)
    ]
    table = load_table("wandb:me/sweep")
    np.testing.assert_allclose(found(table), [*GRID[:5], (128, 2.0**-7, math.inf)])
    assert (table.columns.scale, table.columns.hyperparameter) == ("d_model", "lr")
    assert any("1 crashed runs left out" in note for note in notes_of(table))


def test_a_project_of_wandb_that_is_not_there_is_one_sentence(wandb_service):
    _Service.runs = None
    with pytest.raises(TableError, match=r"^wandb:me/sweep cannot be read: Could not find project") as caught:
        load_table("wandb:me/sweep")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        *((f"wandb:{name}", "is not wandb:ENTITY/PROJECT") for name in ("", "project", "me/sweep/run")),
        ("wandb:me/sweep", r"needs the package wandb .*: pip install '\.\[wandb\]'"),
        ("mlflow:sweep", r"needs the package mlflow .*: pip install '\.\[mlflow\]'"),
    ],
)
def test_a_project_needs_its_entity_and_a_tracker_its_package(path, sentence, monkeypatch):
    monkeypatch.setitem(sys.modules, path.partition(":")[0], None)
    with pytest.raises(TableError, match=sentence):
        load_table(path)


def test_a_name_with_options_of_sqlite_creates_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a?mode=rwc&cache=shared#x.db").write_bytes(b"SQLite format 3\0")
    with pytest.raises(TableError):
        load_table("a?mode=rwc&cache=shared#x.db")
    assert [path.name for path in tmp_path.iterdir()] == ["a?mode=rwc&cache=shared#x.db"]
