"""Errors in tests: their type and fields are asserted, since the wording of a message may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_eval.errors import EvalError


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
