"""Foreign text as a terminal may be given it: names and messages of results that somebody else made.

A line break in a name makes a line that looks like ours, the terminal obeys control characters, and half a surrogate
pair, which JSON and file names can hold, cannot be written at all.
"""

from __future__ import annotations

from typing import Final

__all__ = ["lines", "one_line"]

_BYTES: Final = 0xDC00
"""Where Python puts bytes of a file name that are no UTF-8, among the halves of surrogate pairs."""


def one_line(text: str) -> str:
    """Return text on one line: a space stands for whatever is not printed as itself, but for bytes of file names."""
    return text if text.isprintable() else "".join(map(_printed, text))


def _printed(char: str) -> str:
    r"""Return a character, or what stands for it: ``\xff`` for such a byte, which tells one file name from another."""
    if char.isprintable():
        return char
    byte = ord(char) - _BYTES
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else " "


def lines(text: str) -> str:
    """Return text with the lines that it has, such as a traceback."""
    return "\n".join(one_line(line.expandtabs()).rstrip() for line in text.splitlines())
