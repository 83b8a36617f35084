"""Parts of a store: whatever bit of one flips, it is a sentence that names the part, never another number."""

import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mup_tpu.errors import StoreError
from mup_tpu.store import Store, load_curves, load_runs, parts


def a_store(path) -> Store:
    """Two packs of two trials, each with a curve."""
    store = Store(path, "x")
    rows = [
        {"trial_id": f"t{k}", "width": 64, "lr": 2.0**-k, "seed": k, "loss": 1.5 + k, "status": "finished"}
        for k in range(4)
    ]
    curves = [
        {"trial_id": f"t{k}", "step": s, "tokens": 10 * s, "split": "train", "loss": 3.0 + k / s}
        for k in range(4)
        for s in range(1, 21)
    ]
    store.append(rows[:2], curves[:40])
    store.append(rows[2:], curves[40:])
    return store


@pytest.mark.parametrize(("table", "load"), [("runs", load_runs), ("curves", load_curves)])
@pytest.mark.parametrize("compacted", [False, True])
def test_no_flipped_bit_is_read_as_another_number(table, load, compacted, tmp_path):
    store = a_store(tmp_path)
    if compacted:
        store.compact()
    part = sorted((tmp_path / table).iterdir())[0]
    whole, generator = part.read_bytes(), random.Random(0)
    for bit in generator.sample(range(8 * len(whole)), 60):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        part.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"part .*{part.name} is damaged: .*checksum in its name"):
            load(tmp_path)


@pytest.mark.parametrize(("table", "load"), [("runs", load_runs), ("curves", load_curves)])
def test_flipped_bits_of_a_part_without_a_checksum_are_no_traceback(table, load, tmp_path):
    """As earlier versions named them, and as a copy may be named: pages still have checksums of their own."""
    a_store(tmp_path)
    part = sorted((tmp_path / table).iterdir())[0]
    part = part.rename(part.with_name("copied.parquet"))
    before = load(tmp_path)
    whole, generator = part.read_bytes(), random.Random(0)
    for bit in generator.sample(range(8 * len(whole)), 100):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        part.write_bytes(damaged)
        try:
            load(tmp_path).astype(object).to_dict("records")
        except StoreError as error:
            assert part.name in str(error) and "\n" not in str(error)
    part.write_bytes(whole)
    pd.testing.assert_frame_equal(load(tmp_path), before)


def test_pages_have_checksums_that_any_reader_can_verify(tmp_path):
    a_store(tmp_path)
    part = sorted((tmp_path / "curves").iterdir())[0]
    content = bytearray(part.read_bytes())
    loss = pq.ParquetFile(part).metadata.row_group(0).column(4)
    assert loss.path_in_schema == "loss"
    first = loss.dictionary_page_offset or loss.data_page_offset
    content[first + loss.total_compressed_size - 1] ^= 1
    part.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.read_table(part, page_checksum_verification=True)


def test_parts_of_earlier_versions_are_read(tmp_path):
    store = a_store(tmp_path)
    before = load_runs(tmp_path)
    for part in (tmp_path / "runs").iterdir():
        pq.write_table(pq.read_table(part), part.with_name(f"{part.name[:32]}.parquet"), compression="zstd")
        part.unlink()
    pd.testing.assert_frame_equal(load_runs(tmp_path), before)
    store.compact()
    pd.testing.assert_frame_equal(load_runs(tmp_path), before)


SCHEMA = pa.schema([("trial_id", pa.string()), ("step", pa.int64()), ("loss", pa.float64())])


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"step": [1]}, "part p cannot be read: it does not give trial_id in every row"),
        ({"trial_id": ["a", None], "loss": [1.0, 2.0]}, "does not give trial_id in every row"),
        ({"trial_id": ["a"], "loss": ["1,45"]}, "column loss is string, not double"),
        ({"trial_id": ["a"], "loss": [[1.0]]}, "Unsupported cast from list"),
        ({"trial_id": ["a"], "step": [1.5]}, "was truncated"),
        ({"trial_id": [3]}, "column trial_id is int64, not string"),
    ],
)
def test_what_is_no_part_of_its_kind_is_refused(columns, sentence):
    content = parts.encode(pa.table(columns))
    with pytest.raises(StoreError, match=sentence):
        parts.decode(content, "p.parquet", "p", SCHEMA, ["trial_id"])
    with pytest.raises(StoreError, match="cannot be read: it has two columns loss"):
        doubled = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["trial_id", "loss", "loss"])
        parts.decode(parts.encode(doubled), "p.parquet", "p", SCHEMA, ["trial_id"])


def test_known_columns_come_in_their_types_and_others_as_they_are():
    content = parts.encode(pa.table({"trial_id": ["a"], "step": pa.array([3], pa.int8()), "dropout": [1]}))
    table = parts.decode(content, "p.parquet", "p", SCHEMA, ["trial_id"])
    assert table.schema.field("step").type == pa.int64()
    assert table.to_pylist() == [{"trial_id": "a", "step": 3, "dropout": 1}]
