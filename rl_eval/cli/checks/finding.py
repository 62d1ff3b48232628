"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_eval.errors import summary_of

__all__ = ["Finding", "Level", "note", "ok", "problem", "raised", "warning"]

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    level: Level
    text: str
    fix: str = ""
    """What to do about it; empty if nothing."""


def ok(text: str) -> Finding:
    """It is as it should be."""
    return Finding("ok", text)


def note(text: str) -> Finding:
    """Neither good nor bad."""
    return Finding("note", text)


def warning(text: str, fix: str = "") -> Finding:
    """It works, and may surprise."""
    return Finding("warning", text, fix)


def problem(text: str, fix: str = "") -> Finding:
    """An evaluation would fail, or its result would not be what it seems."""
    return Finding("problem", text, fix)


def raised(what: str, error: BaseException, fix: str = "") -> Finding:
    """Something of the user's raised; ``--debug`` of ``rl-eval run`` shows where."""
    return problem(f"{what} raised {summary_of(error)}", fix)
