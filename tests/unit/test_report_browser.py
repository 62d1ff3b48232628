"""The pages in a real browser: sorting, filters, links, keyboard, print, videos; nothing foreign runs or is loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from rl_eval.recording.video_selection import captions, video_name
from rl_eval.records.determinism import Determinism
from rl_eval.reports.html import Source, render
from rl_eval.results.comparison import compare
from rl_eval.results.files import RESULT_FILE
from rl_eval.suites.report import write_report
from tests.unit.cli_world import call
from tests.unit.results_world import drawn_result
from tests.unit.test_suite_result import suite_of
from tests.unit.test_view import serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no program is called chromium here: apt-get install chromium"),
]

ROOT = Path(__file__).parents[2]
EVIL = "</script><img src=https://example.com/x onerror=\"document.title='owned'\">"
RESULTS = (
    drawn_result(10_000, 1, failed=range(5, 10_000, 97), policy=EVIL, traceback=EVIL, info_keys=[EVIL]),
    drawn_result(10_000, 2, shift=3.0),
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
        self.page.goto(f"{file.as_uri()}{fragment}")
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
    told = "on runner 1: env failed in step after 12 steps: RuntimeError: diverged at 167.0000"
    assert detail.count(told) == (2 if run == 0 else 0)
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


# Videos, the index, and the pictures of the docs


PLAYED = """async () => {
  const video = document.querySelector("video");
  const turn = () => new Promise((go) => setTimeout(go, 50));
  const until = async (done) => { for (let i = 0; i < 200 && !done(); i++) await turn(); };
  await until(() => video.readyState >= 2);
  video.pause();
  video.currentTime = 2;
  await until(() => !video.seeking && video.readyState >= 2);
  return [video.duration, video.currentTime, video.videoWidth];
}"""


@pytest.fixture(scope="module")
def filmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, of which one has a video of four seconds, and one that is broken."""
    folder = tmp_path_factory.mktemp("filmed")
    for name, number, policy in (("first", 1, "plain"), ("second", 2, EVIL)):
        drawn_result(60, number, policy=policy).save(folder / name)
    record = drawn_result(60, 1).table.record(40)
    video = folder / "first" / "videos" / video_name(40, record.seed, record.episode_return)
    video.parent.mkdir()
    source = ["-f", "lavfi", "-i", "testsrc=duration=4:size=64x48:rate=10", "-pix_fmt", "yuv420p"]
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *source, video], check=True)
    (folder / "torn").mkdir()
    (folder / "torn" / RESULT_FILE).write_text(EVIL)
    return folder


@pytest.fixture(scope="module")
def address(filmed: Path) -> Iterator[str]:
    """Where the folder is served."""
    with serving(filmed) as client:
        yield client.url


def played(page: Any, link: Any) -> list[float]:
    """Follow a link to a video; return its length, a place that was jumped to, and its width."""
    with page.expect_popup() as opening:
        link.click()
    found = opening.value.evaluate(PLAYED)
    opening.value.close()
    return found


def test_a_video_plays_beside_a_report(browser: Any, filmed: Path) -> None:
    """From the list of videos, and from its episode, which can be looked for."""
    outcome = call("report", filmed / "first", "-o", filmed / "report.html")
    assert outcome.exit_code == 0, outcome.output
    opened = Opened(browser, filmed / "report.html")
    assert played(opened.page, opened.page.locator(".videos a")) == [4, 2, 64]
    opened.table.locator("select").select_option("filmed")
    assert opened.column(1) == ["40"]
    opened.table.locator("tbody a").first.click()
    assert played(opened.page, opened.page.locator("tr.detail").get_by_role("link", name="video")) == [4, 2, 64]
    assert opened.said == []
    opened.page.close()


def test_the_worst_the_median_and_the_best_episode_play_in_the_page(browser: Any, filmed: Path) -> None:
    """From the disk and from the server, without a word in the console."""
    result, [video] = drawn_result(60, 1), [*(filmed / "first" / "videos").glob("episode_40_*")]
    for index in captions(result):
        record = result.table.record(index)
        shutil.copy(video, video.with_name(video_name(index, record.seed, record.episode_return)))
    assert call("report", filmed / "first", "-o", filmed / "three.html").exit_code == 0
    ready = "() => [...document.querySelectorAll('video')].every((each) => each.readyState > 0)"
    with serving(filmed) as client:
        for address_ in ((filmed / "three.html").as_uri(), f"{client.url}report?run={client.ids()['first']}"):
            page, said = browser.new_page(viewport={"width": 1280, "height": 800}), []
            page.on("console", lambda message, told=said: told.append(message.text))
            page.goto(address_)
            page.wait_for_function(ready)
            boxes = [one.bounding_box() for one in page.locator("video").all()]
            assert len(boxes) == 3
            assert len({box["y"] for box in boxes}) == 1
            assert page.locator(".films").inner_text().split("\n") == [*captions(result).values()]
            assert said == []
            page.close()
    for index in captions(result):
        record = result.table.record(index)
        video.with_name(video_name(index, record.seed, record.episode_return)).unlink()


def test_the_index_leads_to_reports_comparisons_and_videos(browser: Any, address: str) -> None:
    """Without a word in the console, and without a request to anywhere else."""
    page, said, asked = browser.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    assert "broken" in page.locator("tr", has_text="torn").inner_text()
    assert EVIL in page.locator("main").inner_text()
    page.get_by_role("link", name="first").click()
    page.wait_for_selector("html[data-ready]", state="attached")
    length, _, width = played(page, page.locator(".videos a"))  # http.server sends whole files: no jumps.
    assert (length, width) == (4, 64)
    page.go_back()
    for name in ("first", "second"):
        page.get_by_label(f"choose {name}").check()
    page.get_by_role("button", name="Compare").press("Enter")
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator(".pairing:visible").count() == 1
    assert said == []
    assert all(url.startswith(address) for url in asked)
    assert page.locator("img").count() == 0
    page.close()


def test_all_columns_are_in_sight(browser: Any, tmp_path: Path) -> None:
    """Of the index and of a comparison, in a window of usual width, with long names and reasons."""
    for place, name in enumerate(["2026-11-24-152540-CartPole-v1", "20261124-151010-cartpole", "sweep/a2c/seed_1"]):
        found = Determinism(checked=20, mismatched=(1,)) if place else Determinism()
        policy = "rl_eval.policies.uniform:UniformPolicy"
        result = drawn_result(30, place, failed=(1, 2), policy=policy, env="my_env:Reach", determinism=found)
        result.save(tmp_path / str(place) / name)
    with serving(tmp_path) as client:
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(client.url)
        assert "partial, not deterministic" in page.locator("main").inner_text()
        assert page.locator(".scroll").evaluate("node => node.scrollWidth - node.clientWidth") == 0
        for box in page.get_by_role("checkbox").all():
            box.check()
        page.get_by_role("button", name="Compare").click()
        page.wait_for_selector("html[data-ready]", state="attached")
        table = page.locator(".scroll").first
        assert "set evaluation.return_bounds for an interval" in page.locator("main").inner_text()
        assert table.evaluate("node => node.scrollWidth - node.clientWidth") == 0
        page.close()


# Several results, and tables with chosen columns


def texts(table: Any, place: int) -> list[str]:
    """Return the texts of a column of a table, in rows that are in sight."""
    return table.locator(f"tbody tr:visible > :nth-child({place})").all_inner_texts()


def test_a_table_of_results_is_sorted_filtered_and_has_chosen_columns(browser: Any, tmp_path: Path) -> None:
    """Numbers sort as numbers, and what is missing is last; the choice is kept for the next page."""
    results = [drawn_result(60, draw, shift=shift) for draw, shift in enumerate((0.0, -300.0, 900.0, -240.0))]
    path = tmp_path / "report.html"
    path.write_text(render([Source(f"runs/{name}", each) for name, each in zip("abcd", results, strict=True)]))
    context = browser.new_context()
    opened = Opened(context, path)
    table = opened.page.locator("table.choose")
    heads = table.locator("thead th:visible").all_inner_texts()
    place = heads.index("mean return") + 1
    button = table.locator("thead button:text-is('mean return')")
    button.click()
    assert texts(table, 1) == ["b", "d", "a", "c"]
    button.click()
    assert texts(table, 1) == ["c", "a", "d", "b"]
    assert float(texts(table, place)[0].split()[0].replace(",", "")) == pytest.approx(results[2].mean_return, abs=0.1)
    opened.page.get_by_placeholder("words in a row").fill("a")
    assert "a" in texts(table, 1)
    opened.page.get_by_placeholder("words in a row").fill(texts(table, place)[-1])
    assert len(texts(table, 1)) == 1
    opened.page.get_by_placeholder("words in a row").fill("")
    assert not table.get_by_text("episode_return_median").is_visible()
    opened.page.get_by_text("columns", exact=True).click()
    opened.page.get_by_label("episode_return_median").check()
    opened.page.get_by_label("policy", exact=True).uncheck()
    opened.page.reload()
    table = opened.page.locator("table.choose")
    assert table.get_by_role("button", name="episode_return_median").is_visible()
    assert "policy" not in table.locator("thead th:visible").all_inner_texts()
    assert opened.said == []
    context.close()


def test_the_baseline_is_chosen_on_the_page(browser: Any, tmp_path: Path) -> None:
    """The differences and verdicts are those of the library, and no request is made."""
    results = [drawn_result(60, draw, shift=10.0 * draw) for draw in range(3)]
    path = tmp_path / "report.html"
    path.write_text(render([Source(f"runs/{name}", each) for name, each in zip("abc", results, strict=True)]))
    opened = Opened(browser, path)
    shown = opened.page.locator("[data-baseline]:visible")
    assert shown.locator("h2").inner_text() == "Differences from a"
    shown.get_by_label("baseline").select_option("c")
    assert shown.locator("h2").inner_text() == "Differences from c"
    assert shown.get_by_label("baseline").input_value() == "c"
    titles = shown.locator(".pairing summary h3").all_inner_texts()
    assert titles == ["a against c", "b against c"]
    assert compare(results[2], results[0]).verdict_on("c", "a") in shown.inner_text()
    shown.get_by_label("baseline").select_option("a")
    assert shown.locator("h2").inner_text() == "Differences from a"
    assert (opened.said, opened.asked) == ([], [path.as_uri()])
    opened.page.close()


def test_the_index_is_sorted_and_filtered_and_still_compares(browser: Any, address: str) -> None:
    """A broken run is in a table of its own."""
    page = browser.new_page()
    page.goto(address)
    table = page.locator("table.choose")
    page.locator("thead button:text-is('run')").click()
    assert texts(table, 2) == ["first", "second"]
    page.locator("thead button:text-is('run')").click()
    assert texts(table, 2) == ["second", "first"]
    page.get_by_placeholder("words in a row").fill("PLAIN")
    assert texts(table, 2) == ["first"]
    compare = page.get_by_role("button", name="Compare")
    assert compare.is_disabled()
    page.get_by_label("choose first").check()
    compare.click()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator("h1").inner_text() == "Hopper-v5"
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_or_broken_at_any_width(browser: Any, file: Path, width: int) -> None:
    """A page has no sideways scroll, seeds are whole, and on a phone values stand beside their labels."""
    opened = Opened(browser, file, viewport={"width": width, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    seed = opened.table.locator("tbody tr").first.locator("td").nth(1)
    lines = "node => { const r = new Range(); r.selectNodeContents(node); return r.getClientRects().length; }"
    assert seed.evaluate(lines) == 1
    assert seed.inner_text() == str(RESULTS[0].plan.seeds[0])
    label = seed.evaluate("node => getComputedStyle(node, '::before').content")
    assert ("seed" in label) == (width == 390)
    for chart in opened.page.locator("figure:visible").all():
        size = chart.locator(".tick").first.evaluate("node => node.getBoundingClientRect().height")
        assert size > 9, "text of a chart is too small"
        assert chart.locator("h3").inner_text()
    opened.page.close()


def test_the_pictures_of_the_docs_can_be_made(tmp_path: Path) -> None:
    """Small ones, of the size of those that are there."""
    subprocess.run([sys.executable, ROOT / "docs" / "pictures.py", tmp_path], check=True)
    for name in ("report.webp", "report_dark.webp"):
        made, there = tmp_path / name, ROOT / "docs" / name
        with Image.open(made) as new, Image.open(there) as old:
            assert new.size == old.size
        assert max(made.stat().st_size, there.stat().st_size) < 150_000
    assert (tmp_path / "terminal.svg").read_bytes().count(b"fingerprint") > 1


CONTRASTS = """() => {
  const parts = (text) => { const found = text.match(/[\\d.]+/g).map(Number); return [...found, 1].slice(0, 4); };
  const over = (top, under) => under.map((value, n) => top[n] * top[3] + value * (1 - top[3]));
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const chain = [];
    for (let each = node; each; each = each.parentElement) chain.unshift(parts(getComputedStyle(each).backgroundColor));
    return chain.reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = [];
  const look = (node, colour, name) => {
    const under = ground(node);
    let alpha = 1;
    for (let each = node; each; each = each.parentElement) alpha *= Number(getComputedStyle(each).opacity);
    const seen = parts(colour);
    seen[3] *= alpha;
    const [a, b] = [light(over(seen, under)), light(under)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), name]);
  };
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (own && node.checkVisibility() && !node.closest("title, option, script")) {
      const style = getComputedStyle(node);
      look(node, node.closest("svg") ? style.fill : style.color, `${node.tagName} ${node.textContent.slice(0, 40)}`);
    }
    if (node.placeholder) look(node, getComputedStyle(node, "::placeholder").color, `placeholder ${node.placeholder}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(browser: Any, file: Path, scheme: str) -> None:
    """At least 4.5 to 1, as WCAG AA asks: also of a placeholder and of a button that cannot be pressed."""
    opened = Opened(browser, file, color_scheme=scheme)
    found = opened.page.evaluate(CONTRASTS)
    assert opened.page.locator("button:disabled").first.is_visible()
    assert any("placeholder" in name for _, name in found)
    assert len(found) > 300
    assert [(round(ratio, 2), name) for ratio, name in found if ratio < 4.5] == []
    opened.page.close()


@pytest.mark.parametrize("num_seeds", [2, 5])
def test_no_part_of_a_suite_is_cut_on_a_phone(browser: Any, tmp_path: Path, num_seeds: int) -> None:
    """Numbers stand beside their labels."""
    result = suite_of(tmp_path / "made", 3, 3, num_seeds).result(tmp_path / "made")
    files, _ = write_report(result, tmp_path / "report", tmp_path / "made")
    [path] = [one for one in files if one.suffix == ".html"]
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(path.as_uri())
    for box in [page.locator("html"), *page.locator(".scroll:visible").all()]:
        assert box.evaluate("node => node.scrollWidth - node.clientWidth") == 0
    cell = page.locator("[data-label=IQM]").first
    assert "IQM" in cell.evaluate("node => getComputedStyle(node, '::before').content")
    page.close()
