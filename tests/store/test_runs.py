"""The store: whole parts or none, one row a trial, one experiment a folder."""

import json
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from merging import merge_all

from mup_tpu.config import Axes, Sweep
from mup_tpu.errors import StoreError
from mup_tpu.files import Folder, short_hash
from mup_tpu.store import Condition, Store, load_axes, load_curves, load_header, load_runs, tables
from mup_tpu.store import header as stored_header
from mup_tpu.store.header import Header, KeptPrediction, keep_predictions, load_predictions, read_header


def row(trial_id: str, loss: float = 1.0, status: str = "finished", **more) -> dict:
    return {"trial_id": trial_id, "width": 64, "lr": 0.01, "seed": 0, "loss": loss, "status": status} | more


def point(trial_id: str, step: int, loss: float) -> dict:
    return {"trial_id": trial_id, "step": step, "tokens": 10 * step, "split": "train", "loss": loss}


@pytest.mark.parametrize("place", ["local", "memory"])
def test_rows_and_curves_come_back(place, tmp_path):
    place = tmp_path if place == "local" else f"memory://bucket/{tmp_path.name}"
    store = Store(place, "x")
    store.append(
        [row("a", 1.5), row("b", float("inf"), "diverged")], [point("a", 1, 3.0), point("a", 2, 2.0)]
    )
    store.append([row("c", 1.25)])
    runs = load_runs(place)
    assert runs.set_index("trial_id")["loss"].to_dict() == {"a": 1.5, "b": float("inf"), "c": 1.25}
    assert set(runs["experiment"]) == {"x"}
    assert load_curves(place)["loss"].tolist() == [3.0, 2.0]
    assert store.done() == {"a", "b", "c"}


def test_a_trial_has_one_row_its_best(tmp_path):
    """A whole run outranks one that was stopped early, and that a failure, which is run again."""
    store, loss = Store(tmp_path, "x"), float("nan")
    store.append([row("a", loss, "failed", reason="out of memory"), row("b", loss, "preempted")])
    assert store.done() == set()
    store.append([row("a", 2.0, "stopped"), row("c")], [point("c", 1, 3.0)])
    assert store.done() == {"a", "c"} and store.done(stopped=False) == {"c"}
    Store(tmp_path, "x").append([row("a", 1.5), row("c")], [point("c", 1, 3.0)])
    assert store.done(stopped=False) == {"a", "c"}
    runs = load_runs(tmp_path).set_index("trial_id")
    assert runs["status"].to_dict() == {"a": "finished", "b": "preempted", "c": "finished"}
    assert runs["loss"].to_dict() == {"a": 1.5, "b": pytest.approx(loss, nan_ok=True), "c": 1.0}
    assert len(load_curves(tmp_path)) == 1


def test_a_merge_that_fails_costs_no_row(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tables, "MERGE_EVERY", 4)
    store = Store(tmp_path, "x")
    for i in range(3):
        store.append([row(f"t{i}", i)], [point(f"t{i}", 1, i)])
    damaged = next((tmp_path / "curves").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-9])
    Store(tmp_path, "x").append([row("t3")], [point("t3", 1, 3)])
    assert len(load_runs(tmp_path)) == 4
    assert "stay as they are" in caplog.text


def test_of_a_trial_whose_curve_cannot_be_stored_there_is_no_row(tmp_path):
    """A row says that all of its trial is there, so a kill between the two leaves a curve without a row."""
    store = Store(tmp_path, "x")
    (tmp_path / "curves").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        store.append([row("a")], [point("a", 1, 3.0)])
    (tmp_path / "curves").unlink()
    assert store.done() == set() and not list(tmp_path.glob("runs/*"))
    store.append([row("a")], [point("a", 1, 3.0)])
    assert store.done() == {"a"} and len(load_curves(tmp_path)) == 1


def test_a_merge_leaves_what_others_write_after_it_has_read(tmp_path, monkeypatch):
    """Another driver stores a trial right after the parts are read, and before they are removed."""
    store, read, remove = Store(tmp_path, "x"), tables.Parts.read, Folder.remove
    for name in "ab":
        store.append([row(name)], [point(name, 1, 3.0)])
    names = [f"{table} {step}" for table in ("runs", "curves") for step in ("read", "about to be removed")]
    others = iter(names)

    def another(step):
        name = next(others)
        assert name.endswith(step)
        for table, records in (("curves", [point(name, 1, 3.0)]), ("runs", [row(name)])):
            content, part = tables.encode(pa.Table.from_pylist(records), True)
            (tmp_path / table / part).write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(tables.Parts, "read", lambda *given: (read(*given), another("read"))[0])
        patch.setattr(Folder, "remove", lambda *given: (another("removed"), remove(*given))[1])
        merge_all(store)
    assert next(others, None) is None
    assert store.done() == {"a", "b", *names} == set(load_curves(tmp_path)["trial_id"])


def test_folders_that_cannot_be_opened_say_so(tmp_path):
    Store(tmp_path, "lr_transfer").append([row("a")])
    with pytest.raises(StoreError, match="holds experiment 'lr_transfer', not 'ablations'"):
        Store(tmp_path, "ablations")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written: "):
        Store(tmp_path / "file" / "results", "x")
    with pytest.raises(StoreError, match="holds no store"):
        load_runs(tmp_path / "nowhere")
    Store(tmp_path / "new", "x")
    with pytest.raises(StoreError, match="holds no runs yet"):
        load_runs(tmp_path / "new")
    (tmp_path / "runs" / f"{'0' * 32}-{short_hash(b'no')}.parquet").write_bytes(b"no")
    with pytest.raises(StoreError, match=r"\.parquet cannot be read"):
        load_runs(tmp_path)
    with pytest.raises(StoreError, match="results folder nothing://x cannot be opened: Protocol not known"):
        Store("nothing://x", "x")


AXIS = "its axis {} is not a column and fields that this version knows"
WRONG = [  # entries of a header, and what is said of them
    ({"axes": [1]}, "its axes are not scale, tune, compare"),
    ({"axes": {"depth": {}}}, "its axes are not scale, tune, compare"),
    ({"axes": {"scale": 3}}, AXIS.format("scale")),
    ({"axes": {"scale": {"column": "depth", "fields": []}}}, AXIS.format("scale")),
    ({"axes": {"tune": {"column": "lr", "fields": ["lr2"]}}}, AXIS.format("tune")),
    ({"axes": {"tune": {"column": {}, "fields": ["lr"]}}}, AXIS.format("tune")),
    ({"planned": 3}, "its planned scales are not numbers above 0: 3"),
    ({"planned": [2**63]}, "planned scales are not numbers above 0: "),
    ({"planned": [64, "a"]}, "are not numbers above 0"),
    ({"planned": [float("nan")]}, "are not numbers above 0"),
    ({"where": "width=64"}, "its question, where, is not a list of "),
    ({"where": [64]}, "its question, where, is not a list of "),
    ({"where": ["width"]}, "question: where 'width' is not COLUMN=VALUE"),
    ({"where": ["width>=a"]}, "'width>=a': 'a' is not a number"),
]


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("[]", "store.json: it is no JSON object"),
        ("[" * 100_000, "store.json: (maximum recursion depth|Stack overflow)"),
        ("{", "store.json: Expecting property name"),
        ("\ud800", "store.json: "),
        ("{}", "store.json: it has store format None; this version reads 1"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1}', "store.json: it does not name its experiment"),
        ('{"format": 1, "experiment": ["x"]}', "store.json: it does not name its experiment"),
        *((json.dumps({"format": 1, "experiment": "x"} | entries), sentence) for entries, sentence in WRONG),
    ],
)
def test_headers_that_are_none_are_refused_by_all_who_read(header, sentence, tmp_path):
    Store(tmp_path, "x").append([row("a")])
    (tmp_path / "store.json").write_bytes(header.encode("utf-8", "surrogatepass"))
    for read in (load_runs, load_axes, lambda path: Store(path, "x")):
        with pytest.raises(StoreError, match=sentence) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


def test_parts_whose_unknown_columns_do_not_fit_together_are_refused(tmp_path):
    store = Store(tmp_path, "x")
    store.append([row("a", note=1.5)])
    store.append([row("b", note="text")])
    with pytest.raises(StoreError, match=r"parts of .*/runs do not fit together: .*note"):
        load_runs(tmp_path)


def test_a_store_knows_its_axes_and_older_ones_are_learning_rate_by_width(tmp_path):
    depth = Sweep("x", scale={"depth": (2, 4)}, tune={"weight_decay": (0.0, 0.1)})
    Store(tmp_path / "new", "x", depth.axes).append([row("a")])
    assert load_axes(tmp_path / "new") == Axes(("depth",), "depth", ("weight_decay",))
    Store(tmp_path / "old", "x").append([row("a")])
    assert load_axes(tmp_path / "old") == Sweep("x").axes == Axes()
    Store(tmp_path / "old", "x", Sweep("x").axes)
    for folder, held in (("new", "weight_decay by depth"), ("old", "learning_rate by width")):
        other = Sweep("x", scale={"batch_size": (2, 4)}).axes
        with pytest.raises(
            StoreError, match=f"holds a sweep of {held}, .*not of learning_rate by batch_size"
        ):
            Store(tmp_path / folder, "x", other)


def test_a_folder_keeps_what_it_asks_whatever_else_is_written(tmp_path):
    store = Store(tmp_path, "x")
    store.append([row("a")])
    assert load_header(tmp_path).where == ()
    asked = (Condition("width", ">=", "64"), Condition("lr", "<=", "2^-4"))
    store.ask(asked)
    Store(tmp_path, "x", planned=(64.0, 128.0)).append([row("b")])
    assert load_header(tmp_path).where == asked and load_header(tmp_path).planned == (64.0, 128.0)
    assert len(load_runs(tmp_path)) == 2, "rows are there whatever is asked"
    store.ask(())
    assert load_header(tmp_path).where == () and load_header(tmp_path).planned == (64.0, 128.0)


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("other", ["another experiment", "other axes", "the same"])
def test_of_two_drivers_that_start_at_once_in_a_new_folder_one_begins_it(place, other, tmp_path, monkeypatch):
    """Both look, and find no header, before either writes one."""
    url = str(tmp_path / "new") if place == "local" else f"memory://bucket/{tmp_path.name}"
    both_looked, looked = threading.Barrier(2, timeout=60), threading.local()

    def read_then_wait(folder):
        found = read_header(folder)
        if not hasattr(looked, "once"):
            looked.once = True
            both_looked.wait()
        return found

    monkeypatch.setattr("mup_tpu.store.read_header", read_then_wait)
    depth = Sweep("x", scale={"depth": (2, 4)}, compare={"tied": (True, False)}).axes
    asked = {"another experiment": ("y", Axes()), "other axes": ("x", depth)}

    def begin(way):
        try:
            return Store(url, *way).folder
        except StoreError as error:
            return str(error)

    ways = [("x", Axes()), asked.get(other, ("x", Axes()))]
    with ThreadPoolExecutor(2) as drivers:
        ended = list(drivers.map(begin, ways))
    begun, refused = ([e for e in ended if isinstance(e, kind)] for kind in (Folder, str))
    assert len(begun) == (2 if other == "the same" else 1)
    assert all("give this one a folder of its own" in sentence for sentence in refused)
    header = read_header(begun[0])
    assert (header.experiment, header.axes) in ways


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    store = Store(tmp_path, "x")
    store.append([row("a")])
    for target, read, named in (
        (tmp_path / "runs" / f"{'0' * 32}-{'0' * 16}.parquet", load_runs, ""),
        (tmp_path / "store.json", load_runs, "store.json: "),
        (tmp_path / "predictions.json", load_predictions, "predictions.json: "),
    ):
        target.unlink(missing_ok=True)
        target.mkdir()
        with pytest.raises(StoreError, match=f"cannot be read: {named}Is a directory"):
            read(tmp_path)
        target.rmdir()


def test_entries_of_later_versions_stay_in_the_header(tmp_path):
    Store(tmp_path, "x").append([row("a")])
    header = json.loads((tmp_path / "store.json").read_text()) | {"later": [1]}
    (tmp_path / "store.json").write_text(json.dumps(header))
    Store(tmp_path, "x", planned=(64.0,)).ask([Condition("width", "=", "64")])
    assert json.loads((tmp_path / "store.json").read_text())["later"] == [1]
    assert load_header(tmp_path).planned == (64.0,)


def test_predictions_and_planned_scales_of_writers_at_once_are_all_kept(tmp_path):
    forks = multiprocessing.get_context("fork")
    Store(tmp_path, "x")
    together = forks.Barrier(8)

    def keep(name):
        together.wait(60)
        keep_predictions(tmp_path, [prediction(fingerprint=name)])
        Store(tmp_path, "x", planned=(float(name),))

    writers = [forks.Process(target=keep, args=(name,)) for name in "12345678"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {writer.exitcode for writer in writers} == {0}
    assert {p.fingerprint for p in load_predictions(tmp_path)} == {*"12345678"}
    assert load_header(tmp_path).planned == tuple(map(float, range(1, 9)))


def test_writers_of_one_header_in_a_bucket_keep_the_others_changes(monkeypatch):
    """A bucket has no lock: another writer replaces the header between reading and writing."""
    url = "memory://bucket/raced"
    store, write, others = Store(url, "x"), stored_header.write_file, iter([128.0, 256.0])

    def late(folder, file, content):
        write(folder, file, content)
        if (scale := next(others, None)) is not None:
            write(folder, file, Header("x", planned=(scale,)).to_json())

    monkeypatch.setattr(stored_header, "write_file", late)
    store.plan([64.0])
    assert load_header(url).planned == (64.0, 256.0)
    monkeypatch.setattr(stored_header, "write_file", lambda *to: write(*to[:2], Header("x").to_json()))
    with pytest.raises(StoreError, match=r"another process changes store\.json again and again"):
        store.plan([512.0])


def prediction(**changes):
    fields = {
        "made_at": "2026-01-01", "rows": 1, "fingerprint": "f", "scales": (64.0,), "compared": "mup",
        "scale_column": "width", "hyperparameter": "lr", "scale": 8192.0, "x": -6.0, "half": (-7.0, -5.0),
        "interval": (-8.0, -4.0), "expected_cost": None, "loss": None,
    }  # fmt: skip
    return KeptPrediction(**(fields | changes))


def test_a_prediction_is_kept_once_and_earlier_ones_stay(tmp_path):
    keep_predictions(tmp_path, [prediction()])
    keep_predictions(tmp_path, [prediction(x=-5.0, made_at="2026-02-02"), prediction(scale=4096.0)])
    for subject in ("fingerprint", "compared", "scale_column", "hyperparameter"):
        keep_predictions(tmp_path, [prediction(**{subject: "other"})])
    kept = load_predictions(tmp_path)
    assert kept[0] == prediction() and kept[1].scale == 4096.0 and len(kept) == 6


@pytest.mark.parametrize(
    "change", [{"x": -5.5}, {"made_at": "2025-01-01"}, {"interval": [-9.0, -1.0]}, {"checksum": None}]
)
def test_a_prediction_that_was_changed_later_is_refused(change, tmp_path):
    keep_predictions(tmp_path, [prediction(), prediction(scale=4096.0)])
    file = tmp_path / "predictions.json"
    entries = json.loads(file.read_text())
    entries[1] |= change
    file.write_text(json.dumps(entries))
    with pytest.raises(StoreError, match="the prediction of .* for mup was changed later"):
        load_predictions(tmp_path)
    with pytest.raises(StoreError, match="was changed later"):
        keep_predictions(tmp_path, [prediction(scale=512.0)])
    assert json.loads(file.read_text()) == entries
