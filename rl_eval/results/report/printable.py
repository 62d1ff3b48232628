"""Foreign text as a terminal may be given it: names and messages of results that somebody else made.

A line break in a name makes a line that looks like ours, the terminal obeys control characters, and half a surrogate
pair, which JSON and file names can hold, cannot be written at all.
"""

from __future__ import annotations

__all__ = ["lines", "one_line"]


def one_line(text: str) -> str:
    """Return text on one line: a space stands for whatever is not printed as itself."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def lines(text: str) -> str:
    """Return text with the lines that it has, such as a traceback."""
    return "\n".join(one_line(line.expandtabs()).rstrip() for line in text.splitlines())
