"""Commands on stored results and on tables."""

import html
import json
import re
from pathlib import Path

import pytest

import mup_tpu
from mup_tpu.store import Store

RESULTS = Path(__file__).parents[2] / "results"


def test_a_sequence_written_as_csv_keeps_its_looks(tmp_path, outcome):
    """Repeated looks ask for more than one: the file must not be judged by the rule of one look."""
    folder, table = RESULTS / "quickstart", tmp_path / "runs.csv"
    assert outcome("analyze", folder, "--csv", table)[0] == 0
    kept, stored = (json.loads(outcome("analyze", path, "--json")[1]) for path in (table, folder))
    for ours, theirs in zip(kept["results"], stored["results"], strict=True):
        assert ours["verdict"]["sentence"] == theirs["verdict"]["sentence"]
        assert len(ours["sequence"]["looks"]) == len(theirs["sequence"]["looks"]) > 1
    assert any("its looks are counted" in note for note in kept["notes"])


def test_where_takes_a_part_of_a_table_that_mixes_several(valleys, printed, refused):
    table = valleys(steps=100, note="a b")
    more = valleys("more.csv", steps=200, note="a b", loss=lambda w, x: 2.2 + 0.05 * (x + 7) ** 2)
    table.write_text(table.read_text() + more.read_text().partition("\n")[2])
    assert "--where steps=100" in refused("analyze", table)
    out = printed("analyze", table, "--where", "steps=200", "note=a b", "--json")
    assert min(json.loads(out)["results"][0]["curves"][0]["loss"]) == pytest.approx(2.2)
    out = printed("analyze", "--runs", RESULTS / "quickstart", "--where", "width=64", "lr=2^-7")
    assert "quickstart: 6 runs" in out


def test_every_command_answers_what_a_folder_asks(tmp_path, outcome, printed, refused):
    """From the base width on, where a narrower one was run too; options have the last word."""
    folder, note = tmp_path / "sweeps" / "x", "rows that the results folder selects: width from 64 on"
    rows = [
        {
            "trial_id": f"{w}-{x}", "parametrization": "mup", "width": w, "lr": 2.0**x, "seed": 0,
            "loss": 2.0 + 0.05 * (x + 7) ** 2, "status": "finished",
        }
        for w in (32, 64, 128, 256)
        for x in range(-9, -4)
    ]  # fmt: skip
    Store(folder, "x").append(rows)

    def widths(*options):
        out = printed("analyze", folder, "--json", *options)
        analysis = json.loads(out)
        assert (note in analysis["notes"]) == (not options and asked)
        return [curve["scale"] for curve in analysis["results"][0]["curves"]]

    asked = False
    assert widths() == [32, 64, 128, 256]
    out = printed("analyze", folder, "--where", "width>=64", "--keep")
    assert f"the verdict of {folder} uses width from 64 on" in " ".join(out.split())
    asked = True
    assert widths() == [64, 128, 256]
    assert widths("--where", "width<=128") == [32, 64, 128]
    page = folder.parent / "pages" / "README.md"
    assert outcome("analyze", folder.parent, "--report", "--out", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    assert "\n## Width\n" in text and " | 64–256 |" in text and "](sweeps.png)" in text
    assert {p.name for p in page.parent.iterdir()} == {"README.md", "sweeps.png", "sweeps.svg"}
    assert outcome("analyze", "--report", folder)[0] == 0
    assert note in html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    assert note in outcome("analyze", "--next", folder)[1]
    for bad, sentence in (
        (["width>=1000"], "where: no row has width>=1000; there are "),
        (["width>=wide"], "where 'width>=wide': 'wide' is not a number"),
        (["status>=3"], "where 'status>=3': column 'status' has no numbers"),
    ):
        assert sentence in refused("analyze", folder, "--keep", "--where", *bad).replace("\n", " ")
    assert widths() == [64, 128, 256], "what was refused changed nothing"
    assert "uses all rows" in printed("analyze", folder, "--keep")
    asked = False
    assert widths() == [32, 64, 128, 256]


def test_runs_of_a_search_show_what_was_tuned_and_losses_stay_whole(monkeypatch, printed):
    monkeypatch.setenv("COLUMNS", "80")
    out = printed("analyze", "--runs", RESULTS / "tune_small")
    assert "tune_small: 48 runs, seed 0" in out
    headings = " ".join(out.splitlines()[1:3]).split()
    assert {"lr", "warmup", "alpha_", "attn", "loss"} <= set(headings) and "2.8317" in out
    out = printed("analyze", "--runs", RESULTS / "ladder_mup")
    assert "…" not in out and re.search(r" 2\.\d{4} ", out)
    assert max(map(len, out.splitlines())) <= 80


def test_help_lists_the_commands_and_nothing_at_all_is_an_error(outcome):
    for words, code in ((["--help"], 0), ([], 2), (["data"], 0)):
        ended, out, _ = outcome(*words)
        assert ended == code and "data prepare" in out and ("analyze" in out) == (words != ["data"])
    assert outcome("--version")[:2] == (0, f"mup-tpu {mup_tpu.__version__}\n")
