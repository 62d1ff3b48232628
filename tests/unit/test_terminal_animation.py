"""The animation of a terminal in the docs: small, up to date, of what a terminal shows; nothing is loaded by it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.unit.pages_world import DOCS, ROOT, blocks, commands

PICTURE = DOCS / "terminal.svg"
SVG = "{http://www.w3.org/2000/svg}"


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
    fingerprints = [line.split()[1].rstrip(";") for line in lines if line.startswith("fingerprint")]
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1
    assert f" {fingerprints[0]};" in (DOCS / "index.md").read_text()
