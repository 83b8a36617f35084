"""Corpora read through `datasets`: local files of each format, the hub's cache, and no hub at all."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data import load
from mup_tpu.data.cache import fingerprint
from mup_tpu.data.corpus import INSTEAD_OF_HUB, hub_answers, is_held_out, read_documents
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


@contextmanager
def closed_hub(monkeypatch, tmp_path):
    """A hub that closes every connection, and an HF_HOME that is empty; gives the connections made to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def refuse():
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                connections.append(address)
                connection.close()

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HTTP_PROXY", "")
        yield connections
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_without_the_hub_a_name_is_one_sentence_after_one_connection(corpus, monkeypatch, tmp_path):
    cases = {
        "wikitext/wikitext-2-raw-v1": ["--corpus", "wikitext/wikitext-2-raw-v1"],
        "HuggingFaceFW/fineweb-edu": ["--corpus", "HuggingFaceFW/fineweb-edu", "--max-documents", "9"],
        "openai-community/gpt2": ["--corpus", str(corpus), "--tokenizer", "openai-community/gpt2"],
    }
    commands = [
        ["data", "prepare", "--out", str(tmp_path / "shards"), *options] for options in cases.values()
    ]
    # In a process of its own, since HF_ENDPOINT and HF_HOME are read when the libraries are imported.
    code = (
        "import json, sys\nfrom mup_tpu.cli import main\nfor command in json.loads(sys.argv[1]):\n    "
        "try:\n        main(command)\n    except SystemExit as end:\n        print(end.code)"
    )
    with closed_hub(monkeypatch, tmp_path) as connections:
        run = [sys.executable, "-c", code, json.dumps(commands)]
        result = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["2", "2", "2"] and "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    for name, error, instead in zip(
        cases, errors, [INSTEAD_OF_HUB, INSTEAD_OF_HUB, "a folder that holds a tokenizer"], strict=True
    ):
        assert f"{name!r} is neither" in error and "hub is unreachable" in error
        assert instead in error and "HF_HOME" in error
    assert len(connections) == 3


def test_offline_by_choice_asks_nobody(monkeypatch, tmp_path):
    with closed_hub(monkeypatch, tmp_path) as connections:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not hub_answers()
    assert not connections


def test_what_hf_home_holds_is_used_without_the_hub(monkeypatch, tmp_path):
    """A data set that was downloaded before, with a validation split of its own, which is kept."""
    from datasets import Dataset, DatasetDict, DatasetInfo, config

    folder = tmp_path / "cached" / "wikitext" / "wikitext-2-raw-v1" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    splits = DatasetDict()
    for split, texts in {"train": ["First.", "", "Second."], "validation": ["Held out."]}.items():
        splits[split] = Dataset.from_dict({"text": texts})
        file = folder / f"wikitext-{split}.arrow"
        saved = tmp_path / split
        splits[split].save_to_disk(saved)
        next(saved.glob("*.arrow")).rename(file)
    info = {
        "features": {"text": {"dtype": "string", "_type": "Value"}},
        "config_name": "wikitext-2-raw-v1",
        "dataset_name": "wikitext",
        "builder_name": "parquet",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "splits": {
            split: {"name": split, "num_examples": len(rows), "dataset_name": "wikitext"}
            for split, rows in splits.items()
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    assert DatasetInfo.from_directory(str(folder)).config_name == "wikitext-2-raw-v1"
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cached")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    documents = list(read_documents(DataConfig(corpus="wikitext/wikitext-2-raw-v1")))
    assert [(d.text, is_held_out(d, 0.999)) for d in documents] == [
        ("First.", False), ("Second.", False), ("Held out.", True),
    ]  # fmt: skip
    dataset = load(DataConfig(corpus="wikitext/wikitext-2-raw-v1", sequence_length=4, batch_size=1))
    assert dataset.name == "wikitext/wikitext-2-raw-v1"
    assert os.environ["MUP_TPU_CACHE"]
