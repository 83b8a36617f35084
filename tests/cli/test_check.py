"""The command `check`."""

import json

import pandas as pd


def tiny_model(corpus, base_width=32):
    fields = {
        "base_width": base_width, "head_size": 16, "sequence_length": 32, "batch_size": 4, "init_std": 0.08
    }  # fmt: skip
    return ["--set", f"corpus={corpus}", *(f"{name}={value}" for name, value in fields.items())]


def test_a_check_keeps_its_table_and_shows_it_again(corpus, tmp_path, outcome, printed):
    to = ["check", "--results", tmp_path, "--compare", "mup", *tiny_model(corpus), "learning_rate=2^-9"]
    command, short = [*to, "--num-seeds", 2, "--steps", 2], [*to, "--num-seeds", 1, "--steps", 1]
    assert "mup: no layer grows with width" in printed(*command, "--scale", "32,64,128")
    table = pd.read_parquet(tmp_path / "coord_check.parquet")
    assert set(table["width"]) == {32, 64, 128} and table.attrs["adamw_tied"]["passes"] == {"mup": True}
    assert (tmp_path / "figures" / "adamw_tied.png").exists()
    outcome(*to, "optimizer=sgd", "--num-seeds", 1, "--steps", 1, "--scale", "32,48,64")
    stored, again = tmp_path / "coord_check.parquet", tmp_path / "again"
    printed("analyze", "--figures", tmp_path, "--out", again)
    assert {path.stem for path in again.iterdir()} == {"adamw_tied", "sgd_tied"}
    kept = pd.read_parquet(stored)
    assert len(kept[kept["setting"] == "adamw_tied"]) == len(table) < len(kept)
    for content, given, sentence in (
        (None, "depth=1,2", "holds no check along this scale"),
        (None, "depht=2,4", "unknown key 'depht'; the nearest known key is 'depth'"),
        (None, "tied=true,false", "scale tied of a coordinate check is no axis of growth"),
        (b"damaged", "32,64", "cannot be used: "),
    ):
        if content:
            stored.write_bytes(content)
        before = stored.read_bytes()
        code, out, err = outcome(*short, "--scale", given)
        assert (code, sentence in err, stored.read_bytes() == before) == (2, True, True), err


def test_no_width_is_begun_that_takes_long(corpus, tmp_path, outcome, monkeypatch):
    monkeypatch.setattr("mup_tpu.cli.check._SECONDS", 0.0)
    monkeypatch.setattr("mup_tpu.cli.check.WIDTHS", {"width": (16, 32, 48, 64)})
    command = ["check", "--json", "--num-seeds", 1, "--steps", 1, "--compare", "mup", *tiny_model(corpus, 16)]
    code, out, err = outcome(*command)
    assert json.loads(out)["sizes"] == [16, 32, 48], err


def test_sp_fails_the_check_alone_and_not_beside_other_rules(corpus, tmp_path, outcome, printed):
    model = tmp_path / "model.toml"  # of a sweep, whose trial is checked
    model.write_text(
        'experiment = "x"\n[base.model]\nbase_width = 32\nwidth = 32\nhead_size = 16\ninit_std = 0.08\n'
        f"[base.data]\ncorpus = {str(corpus)!r}\nsequence_length = 32\nbatch_size = 4\n"
    )
    command = ["check", model, "--num-seeds", 1, "--steps", 2, "--scale", "32,64,128"]
    printed(*command, "--compare", "sp,mup")
    code, out, err = outcome(*command, "--compare", "sp")
    assert code == 1 and "not scaled" in out and "not passed: sp" in err
