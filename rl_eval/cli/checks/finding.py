"""Findings of a check, with what to do about them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from rl_eval.errors import EvalError, summary_of

__all__ = ["Finding", "note", "ok", "problem", "raised", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    level: Literal["ok", "note", "warning", "problem"]
    text: str
    fix: str = ""
    """What to do about it; empty if nothing."""


ok: Final = partial(Finding, "ok")
"""It is as it should be."""
note: Final = partial(Finding, "note")
"""Neither good nor bad."""
warning: Final = partial(Finding, "warning")
"""It works, and may surprise."""
problem: Final = partial(Finding, "problem")
"""An evaluation would fail, or its result would not be what it seems."""


def raised(what: str, error: Exception, fix: str = "") -> Finding:
    """Something raised: an error of rl_eval speaks for itself; where another is from, ``rl-eval run -v`` shows."""
    return problem(str(error) if isinstance(error, EvalError) else f"{what} raised {summary_of(error)}", fix)
