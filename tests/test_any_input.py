"""Whatever comes in as configuration, TOML, table or store: a result or one sentence, never a traceback.

A few examples of each in every run, always the same; MUP_TPU_EXAMPLES=20000 draws so many, other ones each
time. What was found is kept as an example.
"""

import io
import json
import math
import os
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mup_tpu.analysis import analyze, check_table, load_table
from mup_tpu.config import Trial
from mup_tpu.config.toml import from_dict, load_search, load_sweep
from mup_tpu.errors import MupTpuError
from mup_tpu.files import short_hash
from mup_tpu.store import load_axes, load_curves, load_header, load_runs
from mup_tpu.words.verdicts import to_dict, verdict

RESULTS = Path(__file__).parents[1] / "results"
EXAMPLES = int(os.environ.get("MUP_TPU_EXAMPLES", "0"))


def drawn(few: int) -> settings:
    """A few examples, always the same, or as many as MUP_TPU_EXAMPLES says."""
    how = {"derandomize": not EXAMPLES, "database": None, "deadline": None}
    return settings(max_examples=EXAMPLES or few, suppress_health_check=list(HealthCheck), **how)


def result_or_sentence(call, *arguments):
    """What comes of a call, or None where it says in one sentence why nothing does."""
    try:
        return call(*arguments)
    except MupTpuError as error:
        said = str(error)
        assert len(said.splitlines()) == 1 and said.strip() == said and len(said) < 2000, said
        return None


# Values: plain ones, and such as break what did not expect them.
ODD_TEXT = [
    "", "nan", "inf", "2^-8", "2^9999", "1e999", "[bold red]", "[/]", "$x^2$", "\u2028\x00\n", "1,234"
]  # fmt: skip
WORDS = ["sp", "mup", "width", "depth", "loss", "lr", "64", "a b", "sgd"]
ODD_NUMBERS = [math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0, 2**31, 2**63, 2**64, -(2**63), 10**400]
ODD = st.sampled_from([*ODD_TEXT, *ODD_NUMBERS])
TOML_SCALARS = st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | ODD
SCALARS = st.none() | TOML_SCALARS


def nested(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)


VALUES, TOML_VALUES = st.recursive(SCALARS, nested), st.recursive(TOML_SCALARS, nested)


def paths(value, at=()):
    """Every place in nested tables and lists."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from paths(inner, (*at, key))


def alike(value):
    """Values of the same kind as one, and some that are nearly."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int | float):
        near = [0, 1, 2, 3, 32, 64, 0.5, -1, value, 2 * value, value + 1, str(value)[:9]]
        near += [float(value), value / 2] if abs(value) < 2**60 else []
        return st.sampled_from([*near, *ODD_NUMBERS])
    if isinstance(value, list):
        return st.lists(alike(value[0]) if value else SCALARS, max_size=5)
    return st.sampled_from([value, *WORDS, *ODD_TEXT])


@st.composite
def mutated(draw, base, values=VALUES):
    """A nested value with up to three places changed, taken away or added."""
    changed = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(paths(changed))))
        if not at:
            return draw(values) if draw(st.integers(0, 20)) == 0 else changed
        *way, last = at
        inner = changed
        for key in way:
            inner = inner[key]
        match draw(st.sampled_from(["alike", "alike", "change", "remove", "add"])):
            case "alike" if isinstance(inner[last], int | float | str | list):
                inner[last] = draw(alike(inner[last]))
            case "remove":
                del inner[last]
            case "add" if isinstance(inner, dict):
                inner[draw(st.sampled_from(list(inner)) | st.text(max_size=6))] = draw(values)
            case _:
                inner[last] = draw(values)
    return changed


TRIAL = Trial().to_dict()


def use_trial(values):
    trial = from_dict(Trial, values)
    assert from_dict(Trial, trial.to_dict()) == trial
    return trial.trial_id("data")


@drawn(60)
@given(mutated(TRIAL))
def test_a_trial(values):
    result_or_sentence(use_trial, values)


@st.composite
def toml_texts(draw, base):
    """A file of these keys, some of them changed, and now and then a few letters too."""
    values = draw(mutated(base, TOML_VALUES))
    return draw(torn(tomli_w.dumps(values) if isinstance(values, dict) else str(values)))


@st.composite
def torn(draw, text):
    """A text with a piece now and then cut out or put in."""
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at, to = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        text = text[:at] + draw(st.text(max_size=4)) + text[min(to, at + 6) :]
    return text


BASE = {"model": {"width": 32, "base_width": 32, "head_size": 16}, "train": {"steps": 4}, "optimizer": {}}
SWEEP = {
    "experiment": "s", "scale": {"width": [32, 64]}, "tune": {"learning_rate": ["2^-8", 0.01]},
    "num_seeds": 2, "compare": {"parametrization": ["sp", "mup"]}, "base": BASE,
}  # fmt: skip
AXES = {
    "experiment": "s", "tune": {"weight_decay": [0, 0.1]}, "compare": {"tied": [True, False]}, "base": BASE,
    "scale": [{"width": 32, "depth": 1}, {"width": 64, "depth": 2}], "measured_by": "flops",
}  # fmt: skip
SEARCH = {
    "experiment": "s", "base": BASE,
    "space": {
        "learning_rate": {"low": 0.001, "high": 0.1}, "warmup": {"kind": "uniform", "low": 0, "high": 0.5},
        "depth": {"kind": "choice", "values": [1, 2]},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


def use_file(load, scratch, text):
    path = scratch / "file.toml"
    path.write_text(text, encoding="utf-8", newline="")
    loaded = result_or_sentence(load, path)
    if load is load_sweep and loaded and len(loaded.points) * len(loaded.tuned_points) < 50:
        result_or_sentence(lambda: [trial.trial_id("data") for trial in loaded.trials()[:20]])


def test_what_is_not_changed_is_a_result(scratch):
    for load, values in ((load_sweep, SWEEP), (load_sweep, AXES), (load_search, SEARCH)):
        path = scratch / "whole.toml"
        path.write_text(tomli_w.dumps(values))
        assert load(path).experiment == "s"
    assert use_trial(TRIAL) and use_table(check_table(TABLE)).results


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_choice_that_is_no_whole_number_is_one_sentence(scratch, value):
    space = {"depth": {"kind": "choice", "values": [value, 2]}}
    use_file(load_search, scratch, tomli_w.dumps(SEARCH | {"space": space}))


@pytest.mark.parametrize(("load", "base"), [(load_sweep, SWEEP), (load_sweep, AXES), (load_search, SEARCH)])
@drawn(18)
@given(data=st.data())
def test_a_file_of_a_sweep_or_search(scratch, load, base, data):
    use_file(load, scratch, data.draw(toml_texts(base)))


COLUMNS = {
    "parametrization": "mup", "width": [64, 64, 64, 128, 128, 128], "lr": [0.001, 0.01, 0.1] * 2,
    "loss": [2.5, 2.0, 2.6, 2.4, 1.9, math.inf], "seed": 0, "status": "finished", "steps": 100,
    "loss_err": 0.01, "wall_time_s": 1.0, "params_non_embedding": [1, 1, 1, 4, 4, 4], "purchase": 0,
}  # fmt: skip
TABLE = pd.DataFrame(COLUMNS)
USUAL_NAMES = [
    "config/d_model", "n_layer", "config/lr", "learning_rate", "log2_lr", "val/loss", "train/loss", "_step",
    "64", "2^-8", "lr=0.1", "w64-lr0.1 - loss", "d_model: 64, lr: 2 - loss", "rng_seed",
]  # fmt: skip
"""That columns of others have."""


@st.composite
def tables(draw, base=TABLE, values=SCALARS):
    """A table with columns changed, taken away, named anew, doubled, or of other types."""
    table = base.copy()
    for _ in range(draw(st.integers(1, 3))):
        if not len(table.columns) or not len(table):
            break
        position = draw(st.integers(0, len(table.columns) - 1))
        column = table.columns[position]
        row = draw(st.integers(0, len(table) - 1))
        name = draw(st.sampled_from([*base.columns, *USUAL_NAMES]) | st.text(max_size=6))
        changes = ["value", "value", "value", "all", "drop", "name", "double", "rows", "type", "step"]
        match draw(st.sampled_from(changes)):
            case "value":
                series = table.iloc[:, position].astype(object)
                series.iloc[row] = draw(values)
                table.isetitem(position, series)
            case "all":
                table.isetitem(position, pd.Series([draw(values)] * len(table), table.index, dtype=object))
            case "drop":
                table = table.drop(columns=column)
            case "name":
                table.columns = [name if i == position else old for i, old in enumerate(table.columns)]
            case "double":
                table.insert(position, name, table.iloc[:, position].to_numpy(), allow_duplicates=True)
            case "rows":
                table = table.iloc[: draw(st.integers(0, len(table)))]
            case "type":
                kind = draw(st.sampled_from(["str", "category", "string", "Float64", "float32", "complex"]))
                try:
                    table.isetitem(position, table.iloc[:, position].astype(kind))
                except (ValueError, TypeError, OverflowError):
                    break  # pandas has no such column
            case "step":
                table["step"] = draw(st.lists(values, min_size=len(table), max_size=len(table)))
    return table


def use_table(table):
    analysis = analyze(table)
    json.dumps(to_dict(analysis))
    for result in analysis.results:
        assert verdict(result, analysis)
    return analysis


@drawn(18)
@given(tables())
@example(TABLE.rename(columns={"width": "\x1ewidth"}))
@example(TABLE.assign(width="0\x1e"))
@example(TABLE.assign(width=["", 64, 64, 128, 128, 128]))
@example(TABLE.assign(steps=["100", "\x1e100"] * 3))
@example(TABLE.assign(purchase=[math.inf, 0, 0, 0, 0, 0]))
@example(TABLE.assign(width=[64.0] * 3 + [2.0**512] * 3).drop(columns="wall_time_s"))
@example(TABLE.assign(wall_time_s=[1.0] * 3 + [2.0**129] * 3))
@example(TABLE.assign(width=[64.0] * 3 + [2.0**512] * 3, wall_time_s=[1.0] * 3 + [2.0**900] * 3))
@example(pd.concat([TABLE, TABLE[["lr"]]], axis=1))
@example(TABLE.rename(columns={"steps": 0}))
def test_a_table(table):
    result_or_sentence(lambda: use_table(check_table(table)))


CSV_TEXTS = st.builds(
    lambda table, sep: table.to_csv(index=False, sep=sep), tables(), st.sampled_from(",;\t")
)
JSON_TEXTS = st.sampled_from(["records", "columns", "index", "split", "table"]).map(
    lambda o: TABLE.to_json(orient=o)
)
FILES = {"csv": CSV_TEXTS, "json": JSON_TEXTS, "jsonl": st.just(TABLE.to_json(orient="records", lines=True))}


@drawn(24)
@given(st.sampled_from(["csv", "csv", "json", "jsonl"]), st.data())
def test_a_table_s_file(scratch, kind, data):
    path = scratch / f"table.{kind}"
    path.write_text(data.draw(torn(data.draw(FILES[kind]))), encoding="utf-8", newline="")
    result_or_sentence(lambda: use_table(load_table(path)))


@pytest.fixture(scope="module")
def store(scratch):
    """A results folder of a few runs, and its header."""
    folder, of = scratch / "store", RESULTS / "quickstart"
    runs = load_runs(of).iloc[::40].reset_index(drop=True)
    curves = load_curves(of)
    curves = curves[curves["trial_id"].isin(runs["trial_id"])].groupby("trial_id").head(2)
    for kind, table in (("runs", runs), ("curves", curves)):
        (folder / kind).mkdir(parents=True)
        content = table.to_parquet(index=False)
        (folder / kind / f"{'0' * 32}-{short_hash(content)}.parquet").write_bytes(content)
    shutil.copy(of / "store.json", folder)
    return folder, json.loads((of / "store.json").read_text())


def use_store(folder):
    for read in (load_axes, load_header, load_runs, load_curves):
        result_or_sentence(read, folder)
    result_or_sentence(lambda: load_table(folder))


HEADER = {
    "experiment": "quickstart", "format": 1, "planned": [64, 128.0],
    "axes": {
        "scale": {"column": "width", "fields": ["width"]},
        "tune": {"column": "lr", "fields": ["learning_rate"]},
        "compare": {"column": "parametrization", "fields": ["parametrization"]},
    },
}  # fmt: skip


@drawn(18)
@given(header=mutated(HEADER), data=st.data())
def test_a_store_s_header(store, header, data):
    folder, own = store
    text = data.draw(torn(json.dumps(header)))
    (folder / "store.json").write_text(text, encoding="utf-8")
    use_store(folder)
    (folder / "store.json").write_text(json.dumps(own))


@drawn(18)
@given(data=st.data(), kind=st.sampled_from(["runs", "curves"]))
def test_a_store_s_part(store, kind, data):
    """With values that do not belong there, or changed bytes, whose checksum its name holds."""
    folder, _ = store
    (whole,) = (folder / kind).glob("*.parquet")
    table = data.draw(tables(pd.read_parquet(whole)))
    try:
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pandas(table, preserve_index=False), sink)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return  # no Parquet holds this
    content = bytearray(sink.getvalue())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3) | st.just([])):
        content[at] ^= data.draw(st.integers(1, 255))
    part = folder / kind / f"{'1' * 32}-{short_hash(bytes(content))}.parquet"
    part.write_bytes(bytes(content))
    try:
        use_store(folder)
    finally:
        part.unlink()
