"""Errors and output in tests: types, fields and values are asserted, since the wording of a text may change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_eval.errors import EpisodeError, EvalError
from rl_eval.results.result import EvalResult


@contextmanager
def refused(kind: type[EvalError], key: str | None = None, **fields: Any) -> Iterator[pytest.ExceptionInfo[EvalError]]:
    """Expect an error of exactly this type, with these fields and something to say.

    Args:
        kind: Type of the error.
        key: Its ``key``; None for any.
        **fields: Other fields: ``value``, ``episode``, ``runner``.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert str(caught.value)
    assert key in (None, caught.value.key), caught.value
    assert {name: getattr(caught.value, name) for name in fields} == fields, caught.value


def untold(text: str, *values: object) -> list[str]:
    """Return those of the values that a text does not have as words of their own, however it is worded."""
    text = " ".join(text.split())
    return [one for one in map(str, values) if not re.search(rf"(?<![\w.]){re.escape(one)}(?!\w|\.\d)", text)]


def result_of(evaluate: Callable[..., EvalResult], *args: Any, **keywords: Any) -> EvalResult:
    """Return the result of a call, also if all of its attempts failed alike, so that the call raises."""
    try:
        return evaluate(*args, **keywords)
    except EpisodeError as error:
        result: EvalResult = error.result
        return result
