"""The animation of a terminal in the docs: small, up to date, of what a terminal shows; nothing is loaded by it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.unit.pages_world import DOCS, ROOT, blocks, commands

PICTURE = DOCS / "terminal.svg"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program that makes it."""
    monkeypatch.syspath_prepend(str(DOCS))
    import terminal

    yield terminal
    sys.modules.pop("terminal")


def shown_at_the_end(text: str) -> list[str]:
    """Return the lines of the last frame."""
    return ["".join(line.itertext()) for line in ElementTree.fromstring(text).iter(f"{SVG}text") if line.get("class")]


def check(text: str) -> None:
    """Nothing is loaded by it, nothing runs in it, and each line has its times."""
    elements = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(text).iter()}
    assert elements == {"svg", "title", "style", "rect", "text", "tspan"}
    assert re.findall(r"https?:|//|url\(|@import|@font-face|href|\bon\w+=", text.replace(SVG.strip("{}"), "")) == []
    assert set(re.findall(r'animation-name: (\S+)"', text)) == set(re.findall(r"@keyframes (\S+)", text))


def test_it_is_small_and_loads_nothing() -> None:
    """As a picture of a page must be."""
    check(PICTURE.read_text(encoding="utf-8"))
    assert PICTURE.stat().st_size < 150_000


def test_it_tells_nothing_of_the_machine() -> None:
    """Relative paths only."""
    texts = "\n".join("".join(line.itertext()) for line in ElementTree.parse(PICTURE).iter(f"{SVG}text"))
    assert re.findall(r"(?<!\w)[/~][\w.]\S*", texts) == []


def test_it_shows_the_command_of_the_pages_and_one_fingerprint_twice() -> None:
    """That of the home page; the alternative text is the title."""
    lines = shown_at_the_end(PICTURE.read_text(encoding="utf-8"))
    [title] = ElementTree.parse(PICTURE).iter(f"{SVG}title")
    for page, path in ((DOCS / "index.md", "terminal.svg"), (ROOT / "README.md", "docs/terminal.svg")):
        assert f"![{title.text}]({path})" in page.read_text()
        typed = [
            command for block in blocks(page) if block.language == "console" for command, _ in commands(block.text)
        ]
        assert lines[0].removeprefix("$ ") in typed
    fingerprints = [line.split()[1] for line in lines if line.startswith("fingerprint")]
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1
    assert f"fingerprint          {fingerprints[0]}\n" in (DOCS / "index.md").read_text()


@pytest.mark.process
def test_what_a_command_prints_is_shown_when_it_prints_it(terminal: ModuleType, tmp_path: Path) -> None:
    """In its folder and its colours; what is erased is gone, a clock alone is quickened, markup is text."""
    printed = (r"\033[32m<b>&\033[0m\n0:01", r"\r\033[K0:02", r"\r\033[Kend\n")
    (tmp_path / "show").write_text("; sleep 0.5; ".join(f"printf '{part}'" for part in printed))
    frames = terminal.record(["basename $PWD; bash show"], tmp_path)
    text = terminal.svg("a & b", frames)
    check(text)
    assert shown_at_the_end(text) == ["$ basename $PWD; bash show", tmp_path.name, "<b>&", "end", "$ █"]
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title") == "a & b"
    [green] = [span for span in root.iter(f"{SVG}tspan") if span.text == "<b>&"]
    assert f".{green.get('class')} {{color: #008000" in text
    clocks = [
        frame.seconds for frame in frames if any("".join(cell.data for cell in row[:3]) == "0:0" for row in frame.rows)
    ]
    assert len(clocks) == 2
    assert sum(clocks) == pytest.approx(terminal.IDLE_S)


@pytest.mark.process
def test_a_command_that_fails_makes_no_picture(terminal: ModuleType, tmp_path: Path) -> None:
    """Also one in a pipe."""
    with pytest.raises(SystemExit, match=r"'false \| cat' ended with 1"):
        terminal.record(["false | cat"], tmp_path)
