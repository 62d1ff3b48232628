"""Readers of what an environment returns besides its observation: reward, flags and info.

A reward is a number and a flag is true or false: text, None, several values and objects are refused, since ``"False"``
would pass as true and ``"0.3"`` as 0.3. Runners take Python's own floats and bools as they are, and ask here about
everything else.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import numpy as np

from rl_eval.errors import EnvError
from rl_eval.records.episode import first_seen
from rl_eval.runners.lane import Lane

__all__ = ["ValueReader", "broken_step", "read_reset"]

_BOOLS: Final = (bool, np.bool_)
_OLD_STEP: Final = 4
"""Values that ``step`` returned before gym 0.26."""


@final
class ValueReader:
    """Reads rewards, flags and infos.

    Args:
        info_keys: Names of the ``info`` scalars to keep.
        note: Takes a note for the reader of the result.
    """

    def __init__(self, info_keys: tuple[str, ...], note: Callable[[str], None]) -> None:
        self._info_keys = info_keys
        self._note = note

    def reward(self, lane: Lane, value: Any) -> float:
        """Return the reward of the step that a lane has taken.

        Raises:
            EnvError: It is no finite number.
        """
        number = float(value) if isinstance(value, float) else self._scalar("reward", value)
        if number is None:
            raise EnvError(
                f"the reward is {_shown(value)}: gymnasium's contract is a number, so let step() return one float"
            )
        if not math.isfinite(number):
            raise EnvError(f"the reward of step {lane.length} is {number}, which is not a finite number")
        return float(number)

    def flag(self, field: str, value: Any) -> bool:
        """Return ``terminated`` or ``truncated``.

        Raises:
            EnvError: It is neither true nor false.
        """
        flag = bool(value) if isinstance(value, _BOOLS) else self._flag(field, value)
        if flag is None:
            raise EnvError(
                f"{field} is {_shown(value)}: gymnasium's contract is a bool, so let step() return True or False for it"
            )
        return flag

    def read_info(self, lane: Lane, info: Any) -> None:
        """Keep success and the scalars that were asked for.

        Raises:
            EnvError: The info is no mapping, or a scalar that was asked for is no number.
        """
        if type(info) is not dict:
            _check_info("step", info)
        success = info.get("is_success", info.get("success"))
        if success is not None:
            self._read_success(lane, info, success)
        for position, key in enumerate(self._info_keys):
            if key in info:
                lane.info[position] = self._info_scalar(key, info[key])

    def _read_success(self, lane: Lane, info: Mapping[str, Any], value: Any) -> None:
        field = f"info[{'is_success' if 'is_success' in info else 'success'!r}]"
        flag = self._flag(field, value)
        if flag is None:
            assert lane.lease is not None
            text = f"{field} is neither true nor false, and such steps count as reporting no success"
            self._note(first_seen(text, lane.lease.index, lane.length, _shown(value)))
            return
        lane.success_at_end = int(flag)
        lane.success_once = max(lane.success_once, lane.success_at_end)

    def _info_scalar(self, key: str, value: Any) -> float:
        number = self._scalar(f"info[{key!r}]", value)
        if number is None:
            raise EnvError(f"info[{key!r}], which evaluation.info_keys asks for, is no number: {_shown(value)}")
        return float(number)

    def _flag(self, field: str, value: Any) -> bool | None:
        """Read a flag; None if it is none. A float is one if it is 0 or 1."""
        if isinstance(value, _BOOLS):
            return bool(value)
        number = self._scalar(field, value)
        if number is None or (isinstance(number, float) and number not in {0.0, 1.0}):
            return None
        return bool(number)

    def _scalar(self, field: str, value: Any) -> float | None:
        """Read a number of Python, numpy or torch, or an array of one; None if it is something else."""
        if isinstance(value, (int, float)):
            return value
        shape, item = getattr(value, "shape", None), getattr(value, "item", None)
        if not isinstance(shape, tuple) or item is None or math.prod(shape) != 1:
            return None
        number = item()
        if not isinstance(number, (int, float)):
            return None
        if shape:
            self._note(f"the environment returns {field} as an array of one value, which is read as that value")
        return number


def read_reset(result: Any) -> Any:
    """Return the observation of what ``reset`` returned.

    Raises:
        EnvError: It is not ``(observation, info)``.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise EnvError(f"reset() returned {_count(result)}: gymnasium's contract is (observation, info)")
    observation, info = result
    if type(info) is not dict:
        _check_info("reset", info)
    return observation


def broken_step(result: Any) -> EnvError:
    """Return the error about a step that returned something else than five values."""
    old = isinstance(result, tuple) and len(result) == _OLD_STEP
    return EnvError(
        f"step() returned {_count(result)}{' (the API of gym before 0.26)' if old else ''}: gymnasium's contract is "
        "(observation, reward, terminated, truncated, info)"
    )


def _check_info(method: str, info: Any) -> None:
    if not isinstance(info, Mapping):
        raise EnvError(f"{method}() returned {reprlib.repr(info)} as info: gymnasium's contract is a dict, if empty")


def _count(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, (tuple, list)) else _shown(result)


def _shown(value: Any) -> str:
    """Return a value with its type and shape, in a few words."""
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    of_shape = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{reprlib.repr(value)} of type {type(value).__name__}{of_shape}"
