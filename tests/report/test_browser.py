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
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from mup_tpu import report
from mup_tpu.analysis import analyze, coord_check
from mup_tpu.analysis.ablations import compare
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
KINDS = (
    "sweep",
    *(pytest.param(k, marks=pytest.mark.nightly) for k in ("search", "ablations", "coord_check")),
)

POINT = """([panel, wanted]) => {
  const targets = model(document.querySelectorAll(".panel")[panel].dataset.targets);
  const data = targets.data_source.data, view = Bokeh.index.find_one_by_id(targets.id);
  const at = Array.from(data.about).findIndex((about) => about.startsWith(wanted));
  const box = view.parent.canvas_view.el.getBoundingClientRect();
  return [box.left + view.coordinates.x_scale.compute(data[targets.glyph.x.field][at]),
          box.top + view.coordinates.y_scale.compute(data.y[at])];
}"""
"""Where on the screen the point of a panel is that says what begins so."""


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
        match kind:
            case "search":
                return report.search_page("tune_small", load_runs(RESULTS / "tune_small"))
            case "ablations":
                drift, stay = (analyze(RESULTS / "ablations" / name) for name in ("sp", "mup"))
                others = dict.fromkeys(("mup", "untied", "untied_zero_readout", "eps_1e-5"), stay)
                return report.ablations_page("ablations", compare({"sp": drift, **others}))
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
    page.wait_for_function(
        "typeof Bokeh === 'undefined'"
        " || (Bokeh.documents.length > 0 && Bokeh.documents.every((each) => each.is_idle))"
    )
    return page


def lefts(page: Page, selector: str) -> set[float]:
    return set(
        page.eval_on_selector_all(selector, "(all) => all.map((each) => each.getBoundingClientRect().left)")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_phone_tables_scroll_and_panels_stack_on_a_desk_these_are_beside_each_other(
    browser, address, kind
):
    page = opened(browser, address(kind), PHONE)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert len(lefts(page, ".panel")) == (kind != "ablations"), "all panels below each other"
    widths = page.eval_on_selector_all(".panel", "(all) => all.map((each) => each.scrollWidth)")
    assert all(width <= 390 for width in widths)
    wide = page.locator(".table:has(.cells)").first
    assert (
        wide.evaluate("(box) => box.scrollWidth > box.clientWidth && (box.scrollLeft = 50, box.scrollLeft)")
        == 50
    )
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    shown = page.eval_on_selector_all(
        "picture:has(source) img", "(all) => all.map((img) => img.naturalHeight > img.naturalWidth)"
    )
    assert all(shown), "of a picture's two forms the one with its panels below each other"
    page.set_viewport_size(DESK["viewport"])
    across = {"sweep": 2, "search": 3, "coord_check": 2, "ablations": 0}[kind]
    assert len(lefts(page, ".panel")) == across
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 1280
    assert page.complaints == []
    page.context.close()


def count_of(page: Page, panel: int, color: str) -> int:
    """Pixels of a panel that have about a colour."""
    seen = np.asarray(
        Image.open(io.BytesIO(page.locator(".panel").nth(panel).screenshot())).convert("RGB"), int
    )
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(seen - wanted).max(axis=-1) < 12).sum())


def test_a_point_under_the_pointer_says_its_loss_seeds_and_trials(browser, address, quickstart):
    page = opened(browser, address("sweep"), DESK)
    page.locator(".panel").nth(1).scroll_into_view_if_needed()
    page.mouse.move(*page.evaluate(POINT, [1, "<b>width 64, learning rate 2<sup>−8</sup>"]))
    told = page.locator(".about").first
    told.wait_for()
    runs = quickstart[1].runs.query("compared == 'sp' and scale == 64 and x == -8")
    assert len(runs) >= 1
    (result,) = (r for r in quickstart[0].results if r.parametrization == "sp")
    curve = next(c for c in result.curves if c.scale == 64)
    assert f"loss {curve.mean_G[list(curve.x_G).index(-8)]:.6g} ± " in told.inner_text()
    for run in runs.itertuples():
        assert f"seed {run.seed}: loss {run.loss:.6g}, trial {run.trial_id}" in told.inner_text()
    assert page.complaints == []
    page.context.close()


def test_a_click_on_the_key_hides_a_curve_in_all_panels_and_another_shows_it(browser, address):
    """Points of two widths lie under the pointer; the one whose curve is hidden says nothing."""
    page = opened(browser, address("sweep"), DESK)
    page.locator(".key").first.scroll_into_view_if_needed()
    button = page.locator(".key button").first
    color = button.locator("svg").get_attribute("stroke")
    point = page.evaluate(POINT, [0, "<b>width 256, learning rate 2<sup>−4</sup>"])
    assert button.inner_text().strip() == "width 64"
    assert min(drawn := [count_of(page, panel, color) for panel in (0, 1)]) > 100
    for is_shown in (True, False, True):
        assert button.get_attribute("aria-pressed") == str(is_shown).lower()
        page.mouse.move(*point)
        page.locator(".about", has_text="width 256").wait_for()
        assert page.locator(".about", has_text="width 64").count() == is_shown
        page.mouse.move(0, 0)
        page.locator(".about").first.wait_for(state="hidden")
        counted = [count_of(page, panel, color) for panel in (0, 1)]
        assert counted == (drawn if is_shown else [0, 0])
        button.click()
    assert page.complaints == []
    page.context.close()


def test_a_tap_on_a_trial_keeps_what_it_says_and_marks_it_in_all_panels(browser, address):
    runs = load_runs(RESULTS / "tune_small")
    trial = runs[runs["status"] == "stopped"].sort_values("loss").iloc[-1]  # alone at the top
    page = opened(browser, address("search"), PHONE)
    page.locator(".panel").first.scroll_into_view_if_needed()
    page.touchscreen.tap(*page.evaluate(POINT, [0, f"<b>trial {trial['trial_id']}"]))
    kept = page.locator(".panel").first.locator(".chosen")
    kept.wait_for()
    for text in (trial["trial_id"], f"loss {trial['loss']:.6g}", "seed 0", "stopped after", "init σ"):
        assert text in kept.inner_text()
    chosen = "(all) => all.map((each) => model(each.dataset.targets).data_source.selected.indices.length)"
    assert page.eval_on_selector_all(".panel", chosen) == [1] * 6
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert page.complaints == []
    page.context.close()
