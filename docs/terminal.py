"""Animation of a terminal as an SVG: commands that really run, what they print, and when."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from html import escape
from io import StringIO
from itertools import accumulate, groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, ROWS = 88, 34
KEY_S, PROMPT_S, LAST_S = 0.03, 1.5, 5.0
"""How long a typed letter, an empty prompt and the last frame are shown."""
IDLE_S = 0.6
"""How long nothing but a clock may go on; what takes longer is quickened."""
FLICKER_S = 0.02
"""What is there for less is half a drawing, and not shown."""
SVG = Template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" width="$width" height="$height" role="img">
<title>$title</title>
<style>
svg { font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace }
rect { stroke: #888; stroke-opacity: 0.6 }
text { visibility: hidden; white-space: pre; animation: ${seconds}s step-end infinite }
tspan { fill: currentColor }
.last { visibility: visible }
$light
@media (prefers-color-scheme: dark) {
$dark
}
@media (prefers-reduced-motion: reduce) { text { animation: none } }
$keyframes
</style>
<rect width="$width" height="$height" rx="8"/>
$texts
</svg>
""")

Row = tuple[Char, ...]


class Frame(NamedTuple):
    """What a terminal shows for some time."""

    seconds: float
    rows: tuple[Row, ...]


class _Screen(pyte.Screen):
    def select_graphic_rendition(self, *attrs: int) -> None:
        super().select_graphic_rendition(*[90 if attr == 2 else attr for attr in attrs])  # It knows grey, but not dim.

    def frame(self, seconds: float) -> Frame:
        rows = [[self.buffer[y][x] for x in range(COLUMNS)] for y in range(ROWS)]
        if not self.cursor.hidden:
            rows[self.cursor.y][min(self.cursor.x, COLUMNS - 1)] = Char("█", fg="brightblack")
        return Frame(seconds, tuple(map(tuple, rows)))


def record(commands: Iterable[str], folder: Path) -> list[Frame]:
    """Type commands one after the other, and run them in a folder."""
    screen = _Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    for command in commands:
        for typed, seconds in [("$ ", PROMPT_S), *((key, KEY_S) for key in command)]:
            stream.feed(typed.encode())
            frames.append(screen.frame(seconds))
        stream.feed(b"\r\n")
        frames += _quickened(_shown(screen, stream, _printed(command, folder)))
    stream.feed(b"$ ")
    return [*frames, screen.frame(LAST_S)]


def _shown(screen: _Screen, stream: pyte.ByteStream, printed: Iterable[tuple[float, bytes]]) -> Iterator[Frame]:
    for waited, part in printed:
        if waited > FLICKER_S:
            yield screen.frame(waited)
        stream.feed(part)


def _quickened(frames: Iterable[Frame]) -> Iterator[Frame]:
    for _, group in groupby(frames, key=lambda frame: re.sub(r"\d+:\d\d", "", "\n".join(map(_text, frame.rows)))):
        same = list(group)
        factor = min(1.0, IDLE_S / sum(frame.seconds for frame in same))
        yield from (Frame(frame.seconds * factor, frame.rows) for frame in same)


def _printed(command: str, folder: Path) -> Iterator[tuple[float, bytes]]:
    """Yield what a command prints to a terminal, each part with the seconds since the one before."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "TERM": "linux", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    ours, theirs = pty.openpty()
    shell = ["bash", "-euo", "pipefail", "-c", command]
    with subprocess.Popen(shell, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:  # noqa: S603
        os.close(theirs)
        then = time.monotonic()
        while part := _read(ours):
            now = time.monotonic()
            yield now - then, part
            then = now
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{command!r} ended with {process.returncode}")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # So Linux says that nobody is left who could write.
        return b""


def svg(title: str, frames: list[Frame]) -> str:
    """Draw frames over and over again, a line of text once for each time that it is there."""
    begins = [0.0, *accumulate(frame.seconds for frame in frames)]
    markup, styles = _styled({row for frame in frames for row in frame.rows})
    keyframes, texts = set(), []
    for y, rows in enumerate(zip(*(frame.rows for frame in frames), strict=True)):
        end = 0
        for row, group in groupby(rows):
            first, end = end, end + len(list(group))
            if markup[row]:
                keyframes.add(f"@keyframes f{first}-{end} {{ {_visible(begins[first], begins[end], begins[-1])} }}")
                place = f'x="14" y="{29 + 19 * y}" textLength="{9 * len(_text(row))}"'
                last = ' class="last"' if end == len(frames) else ""
                texts.append(f'<text {place}{last} style="animation-name: f{first}-{end}">{markup[row]}</text>')
    lines = {"keyframes": "\n".join(sorted(keyframes)), "texts": "\n".join(texts), **styles}
    size = {"width": 28 + 9 * COLUMNS, "height": 28 + 19 * ROWS}
    return SVG.substitute(lines, **size, title=escape(title), seconds=f"{begins[-1]:.2f}")


def _visible(begin: float, end: float, total: float) -> str:
    before = "0% { visibility: hidden } " if begin else ""
    after = f" {end / total:.3%} {{ visibility: hidden }}" if end < total else ""
    return f"{before}{begin / total:.3%} {{ visibility: visible }}{after}"


def _styled(rows: set[Row]) -> tuple[dict[Row, str], dict[str, str]]:
    """Return the markup of each row, and the style sheets of its classes by colour scheme."""
    console = Console(record=True, file=StringIO(), width=COLUMNS)
    for row in rows:
        console.print(Text.assemble(*[(cell.data, _style(cell)) for cell in row[: len(_text(row))]]))
    export, sheet = console.export_html, "rect {{ fill: {background} }}\n{stylesheet}"
    lines = export(code_format="{code}", clear=False).replace("span", "tspan").splitlines()
    light = export(theme=DEFAULT_TERMINAL_THEME, code_format=sheet, clear=False)
    dark = export(theme=SVG_EXPORT_THEME, code_format=sheet)
    return dict(zip(rows, lines, strict=True)), {"light": light, "dark": dark}


def _style(cell: Char) -> Style:
    return Style(color=cell.fg.replace("bright", "bright_").replace("brown", "yellow"), bold=cell.bold)


def _text(row: Row) -> str:
    return "".join(cell.data for cell in row).rstrip()
