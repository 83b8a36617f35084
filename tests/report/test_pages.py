"""A report is one file with everything in it, and says what the analysis says."""

import html
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mup_tpu import plots, report
from mup_tpu.analysis import analyze, diagnosis, load_table
from mup_tpu.cli import main
from mup_tpu.cli.table import TableOptions
from mup_tpu.config import Axes
from mup_tpu.store import Store, load_runs
from mup_tpu.words.names import power, rule_name
from mup_tpu.words.tables import how_made
from mup_tpu.words.verdicts import details, remedy, verdict

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="session")
def quickstart(stored):
    return stored("quickstart")


@pytest.fixture(scope="module")
def sweep_html(quickstart):
    return report.render(report.sweep_page(quickstart))


def text_of(page: str) -> str:
    """What a page says, without its links, with powers as 2^-6 and hyphens for minus signs."""
    shown = re.sub(r"<(style|nav|svg).*?</\1>", "", page, flags=re.DOTALL)
    shown = re.sub(r"<sup>(.*?)</sup>", r"^\1", shown)
    return html.unescape(re.sub(r"<[^>]*>", "", shown)).replace("−", "-")


def of_table(path: Path) -> str:
    table = load_table(path)
    return report.render(report.sweep_page(analyze(table)))


def test_verdicts_come_first_and_in_full_and_how_the_runs_were_made_last(quickstart, sweep_html):
    text = text_of(sweep_html)
    assert re.search(r"best learning rate ∝ width\^-0\.\d\d \(95", text) and "parametrizationμP, SP" in text
    verdicts, _, made = text.partition("How the runs were made")
    words = verdicts.replace("mup-tpu sweep", "")
    assert not re.search(r"\b(mup|sp|lr|steps_planned)\b", words), "names are those that people use"
    assert all(value in made for value in ("sotu", "80 finished", "validation_final", "cosine", "torch 2"))
    for result in quickstart.results:
        sentence = verdict(result, quickstart, name=rule_name(result.compared))
        assert sentence.startswith(f"{rule_name(result.compared)}: {result.verdict.decision}")
        assert text.index(sentence.replace("−", "-")) < text.index("Figures")
        assert all(line in text for line in details(result, quickstart))


def test_nothing_is_loaded_from_elsewhere(sweep_html):
    assert not re.search(r"<script|<link|@import|<img", sweep_html)
    links = re.findall(r'(?:href|src)="([^"]*)', sweep_html)
    assert len(links) > 100 and all(link.startswith(("#", "data:")) for link in links)
    assert len(sweep_html) < 600_000


def test_a_page_has_each_figure_with_title_and_caption(quickstart, sweep_html):
    drawn = plots.drawings(quickstart)
    assert len(drawn) == 6
    for figure in drawn:
        kind = plots.FIGURES[figure]
        assert f"<h3>{kind.title}</h3>" in sweep_html and html.escape(
            kind.caption
        ) + "." in sweep_html.replace("&#39;", "&#x27;")
    widths = re.findall(r'<svg[^>]* width="([\d.]+)pt"', sweep_html)
    assert len(widths) == 6 and all(float(width) * 96 / 72 < 1024 for width in widths)
    ids = re.findall(r'\bid="([^"]+)"', sweep_html)
    assert len(ids) == len(set(ids))
    (nav,) = re.findall(r"<nav.*?</nav>", sweep_html)
    anchors = re.findall(r'href="#([^"]+)"', nav)
    assert anchors == ["figures", "optima", "regret", "how-the-runs-were-made"]
    assert all(f'<h2 id="{anchor}">' in sweep_html for anchor in anchors)


def test_text_from_a_table_is_not_markup(tmp_path):
    """Nor ends it a script, nor is it a formula, for which a server would be asked."""
    hostile = "</script><b>sp</b>$$x$$"
    file = tmp_path / "runs.csv"
    rows = [f"{w},{2.0**x},{2.5 + abs(x + 7)},{hostile}" for w in (64, 128) for x in range(-9, -4)]
    file.write_text("width,lr,loss,parametrization\n" + "\n".join(rows))
    page = of_table(file)
    assert "<b>sp</b>" not in page and hostile not in page
    assert "&lt;b&gt;sp&lt;/b&gt;" in page
    assert "How the runs were made" not in page and "git commit" not in page, "a table does not say"


def test_a_verdict_ends_in_what_to_do():
    """Advice on the smallest width's optimum at the largest, with its cost; none for an open verdict."""
    analysis = analyze(load_table(RESULTS / "nanogpt_mup"))
    advice = {result.compared: details(result, analysis)[0] for result in analysis.results}
    mup = next(result for result in analysis.results if result.compared == "mup")
    value, regret = power(mup.optima[0].x, ".1f"), mup.headline_regret
    assert advice["mup"] == (
        f"use learning rate {value}, the optimum of width 64, at width 512: the expected cost is "
        f"{regret.expected:.3f} nat, at most {regret.high:.3f} nat"
    )
    assert advice["sp"].startswith("do not use learning rate 2^-")
    assert ", the optimum of width 64, at width 512: the optimum there is 2^-11." in advice["sp"]
    analysis = analyze(load_table(RESULTS / "muon_transfer"))
    lines = {r.compared: details(r, analysis) for r in analysis.results}["mup"]
    assert lines[0].startswith("if you use learning rate 2^")
    assert any("total to a verdict: unknown" in line for line in lines)
    better = r"wider is better in \d+ of \d+ comparisons of final losses, and in \d of 5 at the optima"
    assert any(re.fullmatch(better, line) for line in lines)


def test_what_would_settle_a_verdict_is_a_command_as_it_is_or_a_sentence(tmp_path, monkeypatch):
    """Powers in a command line stay as they are typed."""
    monkeypatch.setattr(report.plots, "drawings", lambda analysis: {})  # they take most of the time
    analysis = analyze(TableOptions().load(str(RESULTS / "decay_transfer")))
    settle = next(filter(None, (remedy(r, analysis) for r in analysis.results)))
    page = report.render(report.sweep_page(analysis))
    assert f"to settle it: <code>{html.escape(settle)}</code>" in page
    rows = [f"{w},{2.0**x},{2.5 + 0.01 * (x + 7) ** 2}" for w in (64, 128) for x in range(-9, -4)]
    (tmp_path / "runs.csv").write_text("width,lr,loss\n" + "\n".join(rows))
    assert "to settle it: add learning rate 2<sup>" in of_table(tmp_path / "runs.csv")


def test_a_ladder_is_named_by_what_it_is_measured_by(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report.plots, "drawings", lambda analysis: {})
    axes = Axes(("width", "depth"), "flops")
    rows = [
        {
            "trial_id": f"{w}-{x}-{seed}", "parametrization": "mup", "width": w, "depth": w // 32,
            "flops": 1e7 * w**2, "lr": 2.0**x, "seed": seed, "status": "finished",
            "loss": 2.0 + 64 / w + 0.05 * (x + 7) ** 2 + 0.001 * seed,
        }
        for w in (32, 64, 128)
        for x in range(-9, -4)
        for seed in (0, 1)
    ]  # fmt: skip
    Store(tmp_path / "family", "family", axes).append(rows)
    main(["analyze", "--report", str(tmp_path / "family")])
    assert "report.html" in capsys.readouterr().out.replace("\n", "")
    text = text_of((tmp_path / "family" / "report.html").read_text(encoding="utf-8"))
    assert "family: does learning rate transfer across compute?" in text
    assert "best learning rate ∝ compute^" in text and "10.2 GFLOP" in text and "164 GFLOP" in text


def test_a_search_says_its_best_trial_if_any_and_what_became_of_the_others(monkeypatch):
    monkeypatch.setattr(report.plots, "svg", lambda figure, prefix: "")
    runs = load_runs(RESULTS / "tune_small")
    text = text_of(report.render(report.search_page("tune_small", runs)))
    best = runs[runs["status"] == "finished"].sort_values("loss").iloc[0]
    for part in (
        "tune_small: a search of 48 trials", "trials: 34 stopped, 14 finished", "48 values",
        f"The best trial: loss {best['loss']:.4f} nat",
        f"learning rate {best['lr']:.3g}, warm-up {best['warmup']:.4g}",
    ):  # fmt: skip
        assert part in text
    assert text.index(best["trial_id"]) < text.index("How the runs were made")
    lost = runs.assign(status="diverged", loss=np.inf)
    text = text_of(report.render(report.search_page("lost", lost)))
    assert "No trial has finished." in text and "48 diverged" in text


@pytest.mark.nightly
def test_a_coordinate_check_says_what_grows_and_every_slope():
    measured = pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")
    text = text_of(report.render(report.coordinate_check_page("coord_check", measured)))
    assert "do activations and updates keep their size as width grows?" in text
    part = diagnosis.by_setting(measured)["adamw_tied"]
    fit = diagnosis.layer_exponents(part)["sp", "activation", "output"]
    assert f"{fit.value:.2f} ± {fit.high - fit.value:.2f}" in text
    page = report.coordinate_check_page("coord_check", measured)
    outcomes = [(box.sentence.split(":")[0], box.decision) for box in page.lead]
    assert outcomes == [("μP", "passes"), ("SP", "fails")] * 4
    assert {box.details[0] for box in page.lead} == {*diagnosis.by_setting(measured)}


def test_the_command_tells_by_itself_what_a_folder_holds(tmp_path, capsys):
    measured = pd.read_parquet(RESULTS / "coord_check_depth" / "coord_check.parquet")
    (tmp_path / "check").mkdir()
    measured[measured["parametrization"] == "mup"].to_parquet(tmp_path / "check" / "coord_check.parquet")
    sweeps = tmp_path / "sweeps"
    for rule in ("mup", "lost_multipliers"):
        shutil.copytree(RESULTS / "ablations" / rule, sweeps / rule)
    folders = {
        tmp_path / "check": ("as depth grows",),
        sweeps: ("| mup |", "| DRIFTS |", "-0.86 (-1.36 to -0.19)"),
    }
    for folder, sentences in folders.items():
        out = tmp_path / f"{folder.name}.{'md' if folder == sweeps else 'html'}"
        main(["analyze", "--report", str(folder), "--out", str(out)])
        text = text_of(out.read_text(encoding="utf-8"))
        assert all(sentence in text for sentence in sentences), folder
    assert capsys.readouterr().out.count("report: ") == 2


def test_how_runs_were_made_leaves_out_what_is_the_default():
    made = dict(how_made(load_runs(RESULTS / "quickstart")).rows)
    assert made["schedule"] == "cosine" and made["warm-up"] == "0.3" and made["optimizer"] == "adamw"
    assert made["parametrization"] == "μP, SP" and made["all other settings"] == "the defaults"
    assert not [name for name in made if "uon" in name or "newton" in name.lower()], "of an AdamW run"
    many = load_runs(RESULTS / "quickstart").assign(weight_decay=lambda rows: 0.1 * np.arange(len(rows)))
    assert (
        dict(how_made(many).rows)["weight decay"] == f"{len(many)} values, 0 to {0.1 * (len(many) - 1):.3g}"
    )
    assert dict(how_made(load_runs(RESULTS / "muon_transfer")).rows)["optimizer"] == "muon"
    for versions in ("null", "[1]", '"x"', "no JSON"):  # of another program, so shown as they are
        rows = load_runs(RESULTS / "quickstart").head(2).assign(versions=versions)
        assert dict(how_made(rows).rows)["versions"] == versions


def test_control_characters_of_a_table_are_escapes_in_a_page():
    page = report.Page("\x1b[2J", [], [], "\u202egnp.exe \x07")
    text = report.render(page)
    assert "\\x1b[2J" in text and "\\u202egnp.exe \\x07" in text
    assert not set(text) & set("\x1b\x07\u202e")
