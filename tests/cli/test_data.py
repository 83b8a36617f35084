"""The command `data prepare`."""

import shutil

from mup_tpu.config import DataConfig
from mup_tpu.data import load
from mup_tpu.store import load_runs


def test_a_sweep_trains_on_prepared_shards(corpus, tmp_path, printed):
    shards = tmp_path / "shards"
    words = ["--tokenizer", "bpe", "--vocab-size", 600, "--sequence-length", 32, "--validation-fraction", 0.2]
    printed("data", "prepare", "--corpus", corpus, *words, "--out", shards)
    file = tmp_path / "sweep.toml"
    file.write_text(
        'experiment = "streamed"\nscale = {width = [32]}\ncompare = {parametrization = ["mup"]}\n'
        "tune = {learning_rate = [0.01, 0.02]}\n"
        "[base.model]\nbase_width = 32\nhead_size = 16\n[base.train]\nsteps = 8\n"
        f'[base.data]\ncorpus = "{shards}"\nsequence_length = 32\nbatch_size = 4\n'
    )
    printed("sweep", file, "--results", tmp_path / "r")
    runs = load_runs(tmp_path / "r")
    assert len(runs) == 2 and set(runs["status"]) == {"finished"} and set(runs["dataset"]) == {corpus.name}
    # The same shards in another place are the same data: nothing would be run again.
    copy = shutil.copytree(shards, tmp_path / "copy")
    moved = load(DataConfig(corpus=str(copy), sequence_length=32, batch_size=4))
    assert set(runs["data_fingerprint"]) == {moved.fingerprint}
