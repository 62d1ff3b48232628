"""Removal of characters that would control a terminal or the direction of a text."""

from __future__ import annotations

import re
from typing import Final

_NEW_LINE: Final = re.compile("\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069](?:"
    r"(?:(?<=\x1b)\[|(?<=\x9b))[0-?]*[ -/]*[@-~]"  # Colours and movements of the cursor.
    r"|(?:(?<=\x1b)[]PX^_]|(?<=[\x90\x98\x9d-\x9f]))[^\x07\x1b\x9c]{0,1000}(?:\x07|\x1b\\|\x9c)"  # Titles and links.
    r"|(?<=\x1b)[ -/]*[0-~])?"
)
"""Terminal codes, control characters but tabs and line breaks, and marks of direction."""


def printable(text: str) -> str:
    """Return a text without terminal codes, control characters and marks of direction; tabs and lines remain."""
    return _CONTROL.sub("", _NEW_LINE.sub("\n", text))
