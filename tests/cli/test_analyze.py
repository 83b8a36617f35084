"""Commands on stored results and on tables."""

import html
import json
import math
import random
import re
from pathlib import Path

import pandas as pd
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


def test_where_takes_a_part_of_a_table_that_mixes_several(valleys, outcome):
    table = valleys(steps=100, note="a b")
    more = valleys("more.csv", steps=200, note="a b", loss=lambda w, x: 2.2 + 0.05 * (x + 7) ** 2)
    table.write_text(table.read_text() + more.read_text().partition("\n")[2])
    code, _, error = outcome("analyze", table)
    assert code == 2 and "--where steps=VALUE" in error
    code, out, _ = outcome("analyze", table, "--where", "steps=200", "note=a b", "--json")
    assert code == 0 and min(json.loads(out)["results"][0]["curves"][0]["loss"]) == pytest.approx(2.2)
    for bad, sentence in (
        ("steps=300", "where: no row has steps 300; there are 100, 200"),
        ("step=100", "where: table has no column 'step'; the nearest is 'steps'; it has"),
        ("steps", "where 'steps' is not COLUMN=VALUE"),
    ):
        code, _, error = outcome("analyze", table, "--where", bad)
        assert code == 2 and sentence in error
    code, out, _ = outcome("analyze", "--runs", RESULTS / "quickstart", "--where", "width=64", "lr=2^-7")
    assert code == 0 and "quickstart: 6 runs" in out


def test_every_command_answers_what_a_folder_asks(tmp_path, outcome):
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
        code, out, _ = outcome("analyze", folder, "--json", *options)
        assert code == 0
        analysis = json.loads(out)
        assert (note in analysis["notes"]) == (not options and asked)
        return [curve["scale"] for curve in analysis["results"][0]["curves"]]

    asked = False
    assert widths() == [32, 64, 128, 256]
    code, out, _ = outcome("analyze", folder, "--where", "width>=64", "--keep")
    assert code == 0 and f"the verdict of {folder} uses width from 64 on" in " ".join(out.split())
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
        code, _, error = outcome("analyze", folder, "--keep", "--where", *bad)
        assert code == 2 and sentence in error.replace("\n", " ")
    assert widths() == [64, 128, 256], "what was refused changed nothing"
    code, out, _ = outcome("analyze", folder, "--keep")
    assert code == 0 and "uses all rows" in out
    asked = False
    assert widths() == [32, 64, 128, 256]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["analyze", "runs.csv"], "table has no column 'lr'; it has width, step_size, loss"),
        (["analyze", "runs.csv", "--tune", "step_size"], "are these log2 values?"),
        (["analyze", "runs.csv", "--scale", "widht"], "the nearest is 'width'; it has width, step_size"),
        (["analyze", "runs.csv", "--out", "x"], "out 'x' needs either --figures or --report"),
        (["analyze", "runs.csv", "--columns", "lr=eta"], "'lr=eta' is not ROLE=COLUMN with a role of loss"),
        (["analyze", "runs.csv", "--columns", "eta"], "columns 'eta' is not ROLE=COLUMN"),
        (["analyze", "runs.csv", "--states", "ok=good"], "states 'ok=good' is not STATE=MEANING with one"),
        (["analyze", "runs.csv", "x", "--keep"], "keep, runs and csv take exactly one"),
        (["analyze", "nothing.csv"], "nothing.csv cannot be read"),
        (["analyze", "--figures", "nothing"], "holds no store"),
        (["analyze", "[/b]"], "results folder [/b] holds no store"),
        (["analyze", "[/b]", "--runs"], "results folder [/b] holds no store"),
        (["analyse", "x"], "unknown command 'analyse'; the nearest is 'analyze'"),
        (["coord-check"], "unknown command 'coord-check'; the nearest is 'check'"),
        (["data", "prepair"], "unknown command 'data prepair'; the nearest is 'data prepare'"),
        (["xyz"], "unknown command 'xyz'; the commands are init, plan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_be_analysed_is_one_sentence(words, sentence, tmp_path, outcome, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.csv").write_text("width,step_size,loss\n64,-8,2.5\n")
    code, _, error = outcome(*words)
    assert code == 2 and sentence in error and error.count("error: ") == 1


def test_next_says_what_to_run_why_and_at_what_cost(tmp_path, outcome):
    noise = random.Random(1)
    rows = [
        f"{p},{w},{2.0**x},{s},"
        f"{2.5 + 0.04 * (x + 8 + drift * math.log2(w / 64)) ** 2 + noise.gauss(0, 0.06)},{w / 16}"
        for p, drift in (("sp", 1), ("mup", 0))
        for w in (64, 128, 256, 512)
        for x in range(-14, -3)
        for s in (0, 1)
    ]
    table = tmp_path / "runs.csv"
    table.write_text("parametrization,width,lr,seed,loss,gpu_minutes\n" + "\n".join(rows))
    code, out, err = outcome("analyze", "--next", table, "--columns", "cost=gpu_minutes")
    assert code == 0, err
    for words in (
        "μP: INCONCLUSIVE", "SP: DRIFTS", "settled: no runs needed", "is too wide: runs beside the optimum",
        "spent so far: 1320 gpu_minutes", "measured: cost ∝ width^1.0", "  add learning rate 2^",
    ):  # fmt: skip
        assert words in out
    batches = json.loads(outcome("analyze", "--next", table, "--json")[1])
    assert batches["sp"] is None
    assert {cell["scale"] for cell in batches["mup"]["cells"]} <= {64, 128, 256, 512}
    costs = batches["mup"]["costs"]
    assert (costs["unit"], costs["scale"], costs["smallest"]) == ("runs", "width", 64)


def test_analyze_any_hyperparameter_against_any_scale(valleys, outcome):
    table = valleys(
        scales=(2, 4, 8, 16), grid=range(-11, -2), scale="layers", tuned="init", loss=None,
        final=lambda layers, x: 2.5 + 0.05 * (x + 5 + math.log2(layers)) ** 2,
    )  # fmt: skip
    code, out, err = outcome(
        "analyze", table, "--scale", "layers", "--tune", "init", "--columns", "loss=final"
    )
    assert code == 0 and "DRIFTS: best init ∝ layers^-1.0" in out, err


def test_runs_of_a_search_show_what_was_tuned_and_losses_stay_whole(outcome, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = outcome("analyze", "--runs", RESULTS / "tune_small")
    assert code == 0 and "tune_small: 48 runs, seed 0" in out
    headings = " ".join(out.splitlines()[1:3]).split()
    assert {"lr", "warmup", "alpha_", "attn", "loss"} <= set(headings) and "2.8317" in out
    code, out, _ = outcome("analyze", "--runs", RESULTS / "ladder_mup")
    assert code == 0 and "…" not in out and re.search(r" 2\.\d{4} ", out)
    assert max(map(len, out.splitlines())) <= 80


def test_help_lists_the_commands_and_nothing_at_all_is_an_error(outcome):
    for words, code in ((["--help"], 0), ([], 2), (["data"], 0)):
        ended, out, _ = outcome(*words)
        assert ended == code and "data prepare" in out and ("analyze" in out) == (words != ["data"])
    assert outcome("--version")[:2] == (0, f"mup-tpu {mup_tpu.__version__}\n")


def test_columns_and_states_of_a_table_are_named(valleys, outcome):
    table = valleys(
        tuned="eta", loss=None, final=lambda w, x: 2 + (x + 6) ** 2 / 20,
        state=lambda w, x: "lost" if x == -5 else "ok",
    )  # fmt: skip
    names = "--tune eta --columns loss=final status=state --states ok=finished lost=diverged --json"
    code, out, err = outcome("analyze", *names.split()[:-1], table, "--json")
    assert code == 0, err
    curve = json.loads(out)["results"][0]["curves"][0]
    assert curve["loss"][-1] in (None, "inf") and min(curve["loss"][:-1]) == pytest.approx(2.0)


def test_targets_follow_each_other_without_commas_and_a_path_may_stand_behind_them(valleys, outcome):
    table = valleys()
    for arguments in (
        (table, "--at", "width=512", "width=1024"),
        ("--at", "width=512", "--at", "width=1024", table),
        ("--at", "width=512,width=1024", table),
    ):
        code, out, err = outcome("predict", *arguments, "--json")
        assert code == 0, err
        assert [p["scale"] for p in json.loads(out)["predictions"]] == [512, 1024]


def test_several_hyperparameters_are_analysed_and_predicted_together(tmp_path, outcome):
    table, generator = tmp_path / "runs.csv", random.Random(0)
    rows = []
    for width in (64, 128, 256):
        for _ in range(30):
            a, b = generator.uniform(-2, 2), generator.uniform(-2, 2)
            loss = 3 - width / 1e3 + 0.02 * a * a + 0.015 * b * b + 0.01 * a * b + generator.gauss(0, 0.002)
            rows.append({"width": width, "lr": 2.0 ** (a - 8), "weight_decay": 2.0 ** (b - 3), "loss": loss})
    pd.DataFrame(rows).to_csv(table)
    code, out, _ = outcome("analyze", table, "--tune", "lr,weight_decay")
    text = " ".join(out.split())
    assert (
        code == 0
        and "all runs: TRANSFERS: with learning rate and weight decay of width 64, width 256 loses 0.00"
        in text
    )
    assert "learning rate: TRANSFERS: best learning rate ∝ width^" in text
    assert "learning rate and weight decay interact" in text
    code, out, _ = outcome("predict", table, "--tune", "lr,weight_decay", "--at", "width=1024", "--json")
    rate, decay = (one["predictions"][0] for one in json.loads(out))
    assert rate["x"] == pytest.approx(-8, abs=0.3) and decay["x"] == pytest.approx(-3, abs=0.3)
    code, _, error = outcome("analyze", table)
    assert code == 2 and "if it is tuned too, --tune lr,weight_decay" in error
    pd.DataFrame(rows).rename(columns={"weight_decay": "wd"}).to_csv(tmp_path / "named.csv")
    code, out, _ = outcome("analyze", tmp_path / "named.csv")
    assert code == 0 and "wd differs among the runs of one width" in " ".join(out.split())
    assert "if it is tuned too, --tune lr,wd analyses both" in " ".join(out.split())
    for command in (
        ("analyze", table, table, "--tune", "lr,weight_decay"),
        ("predict", table, "--tune", "lr,weight_decay"),
        ("analyze", table, "--tune", "lr,beta"),
    ):
        code, _, error = outcome(*command)
        assert code == 2 and len(error.strip().splitlines()) == 1
