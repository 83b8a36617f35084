"""The command `check`."""

import re

import pandas as pd
import pytest


def tiny_model(corpus, base_width=32):
    fields = {"base_width": base_width, "head_size": 16, "sequence_length": 32, "batch_size": 4}
    return ["--set", f"corpus={corpus}", *(f"{name}={value}" for name, value in fields.items())]


@pytest.mark.slow
def test_coord_check_writes_table_and_figure(corpus, tmp_path, outcome):
    command = ["check", "--results", tmp_path, "--num-seeds", 1, "--steps", 1, "--compare", "mup"]
    command += tiny_model(corpus)
    code, out, err = outcome(*command, "--scale", "32,64")
    assert code == 0, err
    table = pd.read_parquet(tmp_path / "coord_check.parquet")
    assert set(table["width"]) == {32, 64}
    assert (tmp_path / "figures" / "adamw_tied.png").exists()
    assert outcome(*command, "--scale", "32,64", "--set", "optimizer=sgd")[0] == 0
    assert outcome("analyze", "--figures", tmp_path, "--out", tmp_path / "again")[0] == 0
    drawn = {path.stem for path in (tmp_path / "again").iterdir()}
    assert drawn == {"adamw_tied", "sgd_tied"}
    code, out, err = outcome(*command, "--scale", "32,64", "--set", "learning_rate=0.5")
    assert (code, "with other options is stored there" in err) == (2, True)
    stored = tmp_path / "coord_check.parquet"
    assert len(pd.read_parquet(stored)) == 2 * len(table)
    for content, sentence in ((b"damaged", "cannot be used: "), (None, "is no coordinate check")):
        if content:
            stored.write_bytes(content)
        else:
            pd.DataFrame({"width": [32]}).to_parquet(stored)
        before = stored.read_bytes()
        code, out, err = outcome(*command, "--scale", "32,64")
        assert (code, sentence in err, stored.read_bytes() == before) == (2, True, True), err


@pytest.mark.slow
def test_a_width_that_takes_long_is_left_to_the_same_command_again(corpus, tmp_path, outcome, monkeypatch):
    monkeypatch.setattr("mup_tpu.cli.check._SECONDS", 0.0)
    monkeypatch.setattr("mup_tpu.cli.check.WIDTHS", {"width": (16, 32, 48, 64)})
    command = ["check", "--results", tmp_path, "--num-seeds", 1, "--steps", 1, "--compare", "mup"]
    command += tiny_model(corpus, 16)
    code, out, err = outcome(*command)
    assert code == 0 and "width 64 would take longer than a minute: run the same command again" in out, err
    assert set(pd.read_parquet(tmp_path / "coord_check.parquet")["width"]) == {16, 32, 48}
    code, out, err = outcome(*command)
    assert code == 0 and "would take longer" not in out, err
    assert set(pd.read_parquet(tmp_path / "coord_check.parquet")["width"]) == {16, 32, 48, 64}


@pytest.mark.slow
def test_coord_check_goes_along_any_scale(corpus, tmp_path, outcome):
    model = tmp_path / "model.toml"  # of a sweep, whose trial is checked
    model.write_text(
        'experiment = "x"\n[base.model]\nbase_width = 32\nwidth = 32\nhead_size = 16\n'
        f"[base.data]\ncorpus = {str(corpus)!r}\nsequence_length = 32\nbatch_size = 4\n"
    )
    command = ["check", model, "--results", tmp_path, "--num-seeds", 2, "--steps", 1]
    code, out, err = outcome(*command, "--scale", "depth=1,2")
    assert code == 0, err
    assert "exponent of depth" in out
    for name in ("μP", "SP"):
        assert re.search(rf"^{name}: (passes|fails); the fastest growing size is the ", out, re.M)
        assert f"{name}: blocks " in out
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {"adamw_tied.png", "adamw_tied.svg"}
    for given, sentence in (
        (("--scale", "batch_size=4,8"), "along another scale than batch_size is stored there"),
        (("--scale", "depht=2,4"), "unknown key 'depht'; the nearest known key is 'depth'"),
        (("--scale", "tied=true,false"), "scale tied of a coordinate check is no axis of growth"),
    ):
        code, out, err = outcome(*command, *given)
        assert (code, sentence in err) == (2, True), err
