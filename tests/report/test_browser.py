"""Reports in a real browser: on a phone and on a desk, under a pointer and under a finger, and no network."""

from __future__ import annotations

import functools
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from mup_tpu import report
from mup_tpu.analysis import coord_check
from mup_tpu.plots.style import sequential
from mup_tpu.store import load_runs

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "results"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
DESK = {"viewport": {"width": 1280, "height": 900}}
KINDS = ("sweep", "search", "coord_check")

POINT = """([nth, wanted]) => {
  const points = [...document.querySelectorAll(".point")].filter(
    (each) => each.getClientRects().length && each.textContent.startsWith(wanted));
  points[nth].scrollIntoView({block: "center"});
  const box = points[nth].getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
}"""
"""Where on the screen the nth visible point is whose tooltip begins so."""
TOOLTIPS = """([x, y]) => document.elementsFromPoint(x, y).filter((each) => each.matches(".point"))
  .map((each) => each.textContent)"""
"""Tooltips of the points under the pointer, the one that the browser shows first."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(sweep_html, tmp_path_factory) -> Callable[[str], str]:
    """Address of a report of a kind, made once."""
    folder = tmp_path_factory.mktemp("reports")

    def page(kind: str) -> report.Page:
        if kind == "search":
            return report.search_page("tune_small", load_runs(RESULTS / "tune_small"))
        measured = pd.read_parquet(RESULTS / "coord_check" / "coord_check.parquet")
        return report.coordinate_check_page("coord_check", coord_check.by_setting(measured)["adamw_tied"])

    @functools.cache
    def address(kind: str) -> str:
        file = folder / f"{kind}.html"
        file.write_text(sweep_html if kind == "sweep" else report.render(page(kind)), encoding="utf-8")
        return file.as_uri()

    return address


def opened(browser: Browser, address: str, screen: dict) -> Page:
    """A report on a screen, drawn; what it says on the console or asks of a network is an error."""
    page = browser.new_context(**screen).new_page()
    page.set_default_timeout(60_000)
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "console",
        lambda said: page.complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on(
        "request",
        lambda asked: (
            page.complaints.append(asked.url)
            if not asked.url.startswith(("file:", "data:", "blob:"))
            else None
        ),
    )
    page.goto(address)
    return page


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_a_phone_and_a_desk_and_wide_tables_scroll(browser, address, kind):
    page = opened(browser, address(kind), PHONE)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    wide = page.locator(".table:has(.cells)").first
    assert (
        wide.evaluate("(box) => box.scrollWidth > box.clientWidth && (box.scrollLeft = 50, box.scrollLeft)")
        == 50
    )
    fixed = (
        "[...document.querySelectorAll('*')].filter((e) => /fixed|sticky/.test(getComputedStyle(e).position))"
    )
    assert page.evaluate(f"{fixed}.length") == 0, "nothing covers the page"
    for screen in (PHONE, DESK):
        page.set_viewport_size(screen["viewport"])
        scale = page.eval_on_selector_all(
            "figure svg",
            "(all) => all.map((e) => e.getBoundingClientRect().width / e.viewBox.baseVal.width * 72 / 96)",
        )
        assert min(scale) > 0.88, "type of 10 points keeps at least 12 pixels"
        assert page.evaluate("document.scrollingElement.scrollWidth") <= screen["viewport"]["width"]
    assert page.complaints == []
    page.context.close()


def test_a_point_under_the_pointer_says_its_loss_seeds_and_trials(browser, address, quickstart):
    page = opened(browser, address("sweep"), DESK)
    at = page.evaluate(POINT, [1, "width 128, learning rate 2^-5\n"])
    (text, *_) = page.evaluate(TOOLTIPS, at)
    runs = quickstart[1].runs.query("compared == 'sp' and scale == 128 and x == -5")
    assert len(runs) >= 1
    for run in runs.itertuples():
        assert f"seed {run.seed}: loss {run.loss:.6g}, trial {run.trial_id}" in text
    assert page.complaints == []
    page.context.close()


def count_of(page: Page, color: str) -> int:
    """Pixels of the first figure that have about a colour."""
    picture = page.locator("figure").first.locator("svg:visible").screenshot()
    seen = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), int)
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(seen - wanted).max(axis=-1) < 12).sum())


@pytest.mark.parametrize("by", ["click", "keyboard"])
def test_the_key_hides_a_curve_with_its_tooltips_and_shows_it_again(browser, address, by):
    page = opened(browser, address("sweep"), DESK)
    key = page.locator("figure").first.locator("[data-key]")
    assert key.count() == 4
    button, color = key.first, to_hex(sequential([64, 128, 256, 384], 64))
    assert button.text_content() == "hide or show width 64"
    for is_shown in (True, False, True):
        assert button.get_attribute("aria-pressed") == str(is_shown).lower()
        page.mouse.move(0, 0)
        texts = page.eval_on_selector_all(
            "figure:first-of-type .point",
            "(all) => all.filter((e) => e.getClientRects().length).map((e) => e.textContent)",
        )
        assert any(text.startswith("width 64,") for text in texts) == is_shown
        assert any(text.startswith("width 128,") for text in texts)
        assert is_shown == (count_of(page, color) > 100)
        button.click() if by == "click" else button.press("Enter")
    assert page.complaints == []
    page.context.close()


@pytest.mark.nightly
def test_a_tap_on_a_trial_keeps_what_it_says_and_marks_it_in_all_panels(browser, address):
    runs = load_runs(RESULTS / "tune_small")
    trial = runs[runs["status"] == "stopped"].sort_values("loss").iloc[-1]  # alone at the top
    page = opened(browser, address("search"), PHONE)
    chosen = page.locator(".chosen")
    assert not chosen.is_visible()
    at = page.evaluate(POINT, [0, f"trial {trial['trial_id']}"])
    page.touchscreen.tap(*at)
    chosen.wait_for()
    for text in (trial["trial_id"], f"loss {trial['loss']:.6g}", "seed 0", "stopped after", "init σ"):
        assert text in chosen.inner_text()
    marked = page.locator(".chosen-point")
    assert marked.count() == 6
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    page.touchscreen.tap(at[0], at[1] + 60)
    chosen.wait_for(state="hidden")
    assert marked.count() == 0
    assert page.complaints == []
    page.context.close()
