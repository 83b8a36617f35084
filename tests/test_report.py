"""The report is one file with everything in it, and says what the analysis says."""

import html
import re
from pathlib import Path

import pytest

from mup_tpu import report
from mup_tpu.analysis import analyze, load_table
from mup_tpu.store import load_runs

RESULTS = Path(__file__).parents[1] / "results" / "quickstart"


@pytest.fixture(scope="module")
def page():
    return report.render(analyze(load_table(RESULTS)), load_runs(RESULTS))


def test_verdicts_come_first_and_in_full(page):
    analysis = analyze(load_table(RESULTS))
    text = html.unescape(page)
    for result in analysis.results:
        assert result.verdict.sentence in text
        assert text.index(result.verdict.sentence) < text.index("<h2>Figures")
        assert all(detail in text for detail in report.details(result, analysis))


def test_nothing_is_loaded_from_elsewhere(page):
    assert "<script" not in page
    assert "<link" not in page
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)', page))
    assert len(re.findall(r"<img ", page)) == 7


def test_how_the_runs_were_made(page):
    for value in ("sotu", "80 finished", "validation_final", "cosine", "torch 2"):
        assert value in page


def test_text_from_a_table_is_not_markup(tmp_path):
    table = tmp_path / "runs.csv"
    rows = [f"{w},{2.0**x},{2.5 + abs(x + 7)},<b>sp</b>" for w in (64, 128) for x in range(-9, -4)]
    table.write_text("width,lr,loss,parametrization\n" + "\n".join(rows))
    page = report.render(analyze(load_table(table)))
    assert "<b>sp</b>" not in page
    assert "&lt;b&gt;sp&lt;/b&gt;" in page


def test_a_table_without_a_store_says_nothing_of_how_it_was_made():
    reference = Path(__file__).parent / "reference_runs" / "nanogpt_mup_owt_digitised.csv"
    assert "git commit" not in report.render(analyze(load_table(reference)))


def test_a_verdict_ends_in_what_to_do():
    """Of the stored quickstart: its optimum may be taken in μP, at a bounded cost, and not in SP."""
    analysis = analyze(load_table(RESULTS))
    advice = {result.parametrization: report.details(result, analysis)[0] for result in analysis.results}
    sp, mup = advice["sp"], advice["mup"]
    regret = next(r for r in analysis.results if r.parametrization == "mup").headline_regret
    assert mup.startswith("take learning rate 2^-6.1 from width 64 to 384: expected cost ")
    assert f"{regret.value:.3f} nat, at most {regret.high:.3f}" in mup
    assert sp == "do not take learning rate 2^-6.1 from width 64 to 384: 2^-7.6 is the optimum there"
