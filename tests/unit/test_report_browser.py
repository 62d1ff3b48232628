"""The report in a real browser: sorting, filters, links, keyboard, print; nothing foreign runs or is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_eval.results.page.html import Source, render
from tests.unit.report_world import make_result

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]

EVIL = "</script><img src=https://example.com/x onerror=\"document.title='owned'\">"
RESULTS = (
    make_result(10_000, 1, failed=range(5, 10_000, 97), policy=EVIL, traceback=EVIL, info_keys=[EVIL]),
    make_result(10_000, 2, shift=3.0),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two results."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render([Source(f"runs/{name}", each) for name, each in zip("ab", RESULTS, strict=True)]))
    return path


class Opened:
    """A page, with what it said and asked for."""

    def __init__(self, browser: Any, file: Path, fragment: str = "", **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"file://{file}{fragment}")
        if options.get("java_script_enabled", True):
            self.page.wait_for_selector("html[data-ready]", state="attached")
        self.table = self.page.locator("#episodes")

    def column(self, place: int) -> list[str]:
        """Return the texts of a column of the rows in sight."""
        return self.table.locator(f"tbody tr:not(.detail) td:nth-child({place})").all_inner_texts()

    @property
    def count(self) -> str:
        """What the table says that it holds."""
        return self.table.locator("output").inner_text()


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    """The report, which must have said nothing and asked for nothing but itself when the test is over."""
    opened = Opened(browser, file)
    yield opened
    assert opened.said == []
    assert opened.asked == [f"file://{file}"]
    assert opened.page.title() != "owned"
    assert opened.page.locator("img").count() == 0
    opened.page.close()


def test_every_episode_is_in_the_table(opened: Opened) -> None:
    """All pages together have each index once."""
    assert opened.count == "10,000 of 10,000 episodes"
    seen = []
    following = opened.table.get_by_role("button", name="next")
    while True:
        seen += opened.column(1)
        if following.is_disabled():
            break
        following.evaluate("button => button.click()")
    assert seen == [str(index) for index in range(10_000)]


def test_sorting_is_that_of_numbers(opened: Opened) -> None:
    """Up, then down; failed episodes, which have no return, stand last."""
    returns = np.sort(RESULTS[0].counted_rows["episode_return"])
    button = opened.table.locator("thead").get_by_role("button", name="return")
    button.click()
    np.testing.assert_allclose([float(text) for text in opened.column(3)], returns[:100], rtol=1e-6)
    button.click()
    np.testing.assert_allclose([float(text) for text in opened.column(3)], returns[::-1][:100], rtol=1e-6)
    assert opened.table.locator("th[aria-sort=descending]").inner_text() == "return"


def test_filters_choose_episodes(opened: Opened) -> None:
    """By how they ended, by a range of returns, and by seed."""
    rows, failed = RESULTS[0].table.rows, RESULTS[0].num_failed
    opened.table.locator("select").select_option("failed")
    assert opened.count == f"{failed:,} of 10,000 episodes"
    assert set(opened.column(5)) == {"failed"}
    opened.table.get_by_role("button", name="reset").click()
    opened.table.locator("input[type=number]").first.fill("300")
    opened.table.locator("input[type=number]").last.fill("310")
    chosen = int(((rows["episode_return"] >= 300) & (rows["episode_return"] <= 310)).sum())
    assert opened.count == f"{chosen:,} of 10,000 episodes"
    opened.table.get_by_role("button", name="reset").click()
    opened.table.locator("input[type=search]").fill(str(rows["seed"][4321]))
    assert opened.column(1) == ["4321"]


def test_a_bar_of_the_histogram_chooses_its_episodes(opened: Opened) -> None:
    """As many as it says."""
    bar = opened.page.locator("[data-histogram='0'] rect.bar").nth(20)
    count = bar.locator("title").text_content().rpartition(": ")[2].split()[0]
    bar.click()
    assert opened.count == f"{count} of 10,000 episodes"


@pytest.mark.parametrize(("run", "anchor"), [(0, ""), (1, "run-2-")])
def test_a_link_leads_to_an_episode(browser: Any, file: Path, run: int, anchor: str) -> None:
    """Wherever it stands, with its faults and the command that runs it again."""
    opened = Opened(browser, file, f"#{anchor}episode-1169")
    row = opened.page.locator(f"[id='{anchor}episode-1169']")
    playwright.expect(row).to_be_in_viewport()
    detail = opened.page.locator("tr.detail").inner_text()
    assert f"rl-eval replay runs/{'ab'[run]} --episodes 1169" in detail
    assert f"seed {RESULTS[run].plan.seeds[1169]}" in detail
    assert detail.count("diverged at 167.0000") == (2 if run == 0 else 0)
    assert opened.said == []
    opened.page.close()


def test_it_works_by_keyboard(opened: Opened) -> None:
    """A heading sorts, and the index of an episode opens it; what has the focus is marked."""
    opened.table.locator("thead").get_by_role("button", name="length").focus()
    opened.page.keyboard.press("Enter")
    assert opened.table.locator("th[aria-sort=ascending]").inner_text() == "length"
    opened.table.locator("tbody a").first.focus()
    assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("tr.detail")


def test_what_is_foreign_is_inert(opened: Opened) -> None:
    """A traceback, a policy's name and an info key that are markup are shown as text."""
    opened.page.goto(opened.page.url + "#episode-5")
    opened.page.wait_for_selector("tr.detail")
    opened.page.locator("tr.detail summary").first.click()
    assert opened.page.locator("tr.detail pre").first.inner_text() == EVIL
    assert opened.table.locator("thead th").last.inner_text() == EVIL
    assert EVIL in opened.page.locator("body").inner_text()


def test_nothing_can_be_loaded(browser: Any, file: Path) -> None:
    """Not even by a script in the page."""
    opened, answered = Opened(browser, file), []
    opened.page.on("response", lambda response: answered.append(response.url))
    refused = []
    opened.page.on("requestfailed", lambda request: refused.append(request.failure))
    opened.page.evaluate("fetch('https://example.com/').catch(() => 0)")
    opened.page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.com/x.png'}))")
    opened.page.evaluate(
        "const s = document.createElement('script'); s.text = 'document.title = 1'; document.body.append(s)"
    )
    opened.page.wait_for_timeout(100)
    assert [text for text in opened.said if "Content Security Policy" in text]
    assert opened.page.title() != "1"
    assert answered == []
    assert set(refused) <= {"csp"}
    opened.page.close()


def test_without_javascript_it_is_readable(browser: Any, file: Path) -> None:
    """Headline, comparison, and the first hundred episodes."""
    opened = Opened(browser, file, java_script_enabled=False)
    text = opened.page.locator("main").inner_text()
    assert f"{RESULTS[0].mean_return:.2f}" in text
    assert "b returns more than a at 95 %" in text
    assert opened.column(1) == [str(index) for index in range(100)]
    opened.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_readers_colours(browser: Any, file: Path, scheme: str) -> None:
    """Light and dark; print is always black on white, without what can only be clicked."""
    opened = Opened(browser, file, color_scheme=scheme)
    red = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert (opened.page.evaluate(red) < 60) == (scheme == "dark")
    opened.page.emulate_media(media="print", color_scheme="light")
    assert opened.page.evaluate(red) == 255
    assert not opened.table.locator(".controls").is_visible()
    assert len(opened.page.pdf()) > 20_000
    opened.page.close()
