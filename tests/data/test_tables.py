"""Corpora read through `datasets`: local files of each format, the hub's cache, and no hub at all."""

import json
import socketserver
import threading

import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data import load
from mup_tpu.data.cache import fingerprint
from mup_tpu.data.corpus import INSTEAD_OF_HUB, is_held_out, read_documents
from mup_tpu.errors import DataError

TEXTS = ["The Congress shall assemble.\n", "Zwölf Boxkämpfer.", " \n", None, "The last one."]
GOOD = [text for text in TEXTS if text and text.strip()]


def write(path, column="text"):
    """The texts as a file of the format that its name says."""
    from datasets import Dataset

    rows = Dataset.from_dict({"id": list(range(len(TEXTS))), column: TEXTS})
    if path.suffix == ".jsonl":
        rows.to_json(path)
    elif path.suffix == ".parquet":
        rows.to_parquet(path)
    else:
        rows.save_to_disk(path.parent)  # its folder: arrow files, and *.json that describe them
    return path


def texts_of(**config):
    return [document.text for document in read_documents(DataConfig(**config))]


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet", "saved/a.arrow"])
def test_local_formats_give_the_same_documents(file, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    write(path)
    corpus = str(path if path.exists() else path.parent)
    assert texts_of(corpus=corpus) == GOOD
    assert texts_of(corpus=str(path.parent), max_documents=2) == GOOD[:2]


def test_another_column_and_its_fingerprint(tmp_path):
    one, other = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", column="body")
    assert texts_of(corpus=str(other), text_column="body") == GOOD
    with pytest.raises(DataError, match=r"b\.jsonl has no column 'text'; its columns are id, body"):
        texts_of(corpus=str(other))
    with pytest.raises(DataError, match="column 'id' of .* holds int, not text"):
        texts_of(corpus=str(other), text_column="id")
    # The fingerprint is that of the texts.
    whole = fingerprint(DataConfig(corpus=str(one)))
    assert whole == fingerprint(DataConfig(corpus=str(other), text_column="body"))
    assert whole != fingerprint(DataConfig(corpus=str(one), max_documents=2))


def test_files_that_are_not_what_they_are_called(tmp_path):
    for name in ("a.jsonl", "a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"\x00 no such thing {")
        with pytest.raises(DataError, match=rf"corpus file .*{name} cannot be read as") as caught:
            texts_of(corpus=str(tmp_path / name))
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"mixes formats \(\.jsonl, \.parquet, \.arrow\)"):
        texts_of(corpus=str(tmp_path))


@pytest.fixture
def connections(monkeypatch):
    """Connections to a hub that closes each at once."""
    made = []

    class Closes(socketserver.BaseRequestHandler):
        def handle(self):
            made.append(self.client_address)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Closes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HTTP_PROXY", "")
        yield made
        server.shutdown()


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ({"corpus": "wikitext/no-such-one"}, INSTEAD_OF_HUB),
        ({"corpus": "nobody/no-such-one", "max_documents": 9}, INSTEAD_OF_HUB),
        ({"tokenizer": "nobody/no-such-one"}, "a folder that holds a tokenizer"),
    ],
)
def test_without_the_hub_a_name_is_one_sentence_after_one_connection(
    config, instead, corpus, connections, monkeypatch
):
    """And after none where HF_HUB_OFFLINE is set."""
    for is_offline in (False, True):
        monkeypatch.setenv("HF_HUB_OFFLINE", str(int(is_offline)))
        with pytest.raises(DataError) as caught:
            fingerprint(DataConfig(**{"corpus": str(corpus)} | config))
        sentence = str(caught.value)
        assert f"{[*config.values()][0]!r} is neither" in sentence and "hub is unreachable" in sentence
        assert instead in sentence and "HF_HOME" in sentence and "\n" not in sentence
        assert len(connections) == 1


def test_what_hf_home_holds_is_used_without_the_hub(monkeypatch, tmp_path):
    """A data set that was downloaded before, with a validation split of its own, which is kept."""
    from datasets import Dataset, config

    folder = tmp_path / "cached" / "wikitext" / "wikitext-2-raw-v1" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    info = {
        "features": {"text": {"dtype": "string", "_type": "Value"}},
        "config_name": "wikitext-2-raw-v1", "dataset_name": "wikitext", "builder_name": "parquet",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "splits": {},
    }  # fmt: skip
    for split, texts in {"train": ["First.", "", "Second."], "validation": ["Held out."]}.items():
        Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / split)
        next((tmp_path / split).glob("*.arrow")).rename(folder / f"wikitext-{split}.arrow")
        info["splits"][split] = {"name": split, "num_examples": len(texts), "dataset_name": "wikitext"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cached")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    documents = list(read_documents(DataConfig(corpus="wikitext/wikitext-2-raw-v1")))
    assert [(d.text, is_held_out(d, 0.999)) for d in documents] == [
        ("First.", False), ("Second.", False), ("Held out.", True),
    ]  # fmt: skip
    dataset = load(DataConfig(corpus="wikitext/wikitext-2-raw-v1", sequence_length=4, batch_size=1))
    assert dataset.name == "wikitext/wikitext-2-raw-v1"
