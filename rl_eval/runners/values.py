"""Values that an environment returns: rewards, flags and infos.

A reward is a number and a flag is true or false. Strings, None, several values and objects are errors. Otherwise,
``"False"`` would be read as true and ``"0.3"`` as 0.3. Runners read Python's own floats and bools themselves, and
everything else with :class:`ValueReader`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from rl_eval.config.settings import EvaluationSection
from rl_eval.errors import EnvError
from rl_eval.records.episode import first_seen

if TYPE_CHECKING:
    from rl_eval.runners.lane import Lane


_BOOLS: Final = (bool, np.bool_)
_OLD_STEP: Final = 4
"""Number of values that ``step`` returned before gym 0.26."""


@final
class ValueReader:
    """Reader of rewards, flags and infos.

    Args:
        info_keys: Names of the ``info`` scalars to record, and of other columns.
        section: Section with the names of metrics, which are not read from infos, and with the keys of success.
        note: Takes a note for the reader of the result.
    """

    def __init__(self, info_keys: Sequence[str], section: EvaluationSection, note: Callable[[str], None]) -> None:
        self.places = [(place, key) for place, key in enumerate(info_keys) if key not in section.metrics]
        """Columns of the ``info`` scalars that are read, with their keys."""
        self._success_key, self._other_key = section.success_keys
        self._note = note

    def reward(self, lane: Lane, value: Any) -> float:
        """Return the reward of a lane's last step.

        Raises:
            EnvError: The reward is not a finite number.
        """
        number = float(value) if isinstance(value, float) else self._scalar("reward", value)
        if number is None:
            problem = f"the reward is {_shown(value)}, but gymnasium's contract is a number"
            raise EnvError(problem, key="reward", value=_shown(value), fix="Return one float from step().")
        if not math.isfinite(number):
            problem = f"the reward of step {lane.length} is {number}, which is not a finite number"
            raise EnvError(problem, key="reward", value=number)
        return float(number)

    def flag(self, field: str, value: Any) -> bool:
        """Return ``terminated`` or ``truncated``.

        Raises:
            EnvError: The flag is not true or false.
        """
        flag = bool(value) if isinstance(value, _BOOLS) else self._flag(field, value)
        if flag is None:
            problem = f"{field} is {_shown(value)}, but gymnasium's contract is a bool"
            raise EnvError(problem, key=field, value=_shown(value), fix="Return True or False from step().")
        return flag

    def read_info(self, lane: Lane, info: Any) -> None:
        """Record success and the configured scalars of an info.

        Raises:
            EnvError: The info is not a mapping, or a configured scalar is not a number.
        """
        if type(info) is not dict:
            _check_info("step", info)
        success = info.get(self._success_key, info.get(self._other_key))
        if success is not None:
            self._read_success(lane, info, success)
        for position, key in self.places:
            if key in info:
                lane.info[position] = self.info_scalar(key, info[key])

    def _read_success(self, lane: Lane, info: Mapping[str, Any], value: Any) -> None:
        assert lane.lease is not None
        field = f"info[{self._success_key if self._success_key in info else self._other_key!r}]"
        flag = self.success(field, value, lane.lease.index, lane.length)
        if flag is not None:
            lane.success_at_end = int(flag)
            lane.success_once = max(lane.success_once, lane.success_at_end)

    def success(self, field: str, value: Any, index: int, step: int) -> bool | None:
        """Return a reported success as a bool. If it is neither true nor false, add a note and return None."""
        flag = self._flag(field, value)
        if flag is None:
            text = f"{field} is neither true nor false; these steps are treated as steps without a report of success"
            self._note(first_seen(text, index, step, _shown(value)))
        return flag

    def info_scalar(self, key: str, value: Any) -> float:
        """Return a configured scalar of an info.

        Raises:
            EnvError: The scalar is not a number.
        """
        number = self._scalar(f"info[{key!r}]", value)
        if number is None:
            problem = f"info[{key!r}], which is in evaluation.info_keys, is not a number: {_shown(value)}"
            raise EnvError(problem, key=f"info.{key}", value=_shown(value))
        return float(number)

    def _flag(self, field: str, value: Any) -> bool | None:
        """Return a flag as a bool; None if the value is not a flag. A float is a flag if it is 0 or 1."""
        if isinstance(value, _BOOLS):
            return bool(value)
        number = self._scalar(field, value)
        if number is None or (isinstance(number, float) and number not in {0.0, 1.0}):
            return None
        return bool(number)

    def _scalar(self, field: str, value: Any) -> float | None:
        number = scalar_of(value)
        if number is not None and getattr(value, "shape", None):
            self._note(f"the environment returns {field} as an array of one value, which is read as a scalar")
        return number


def scalar_of(value: Any) -> float | None:
    """Return a Python, NumPy or torch number, or the number in an array of one element; None for any other value.

    Times are not numbers, and neither are masked arrays, which may have no value.
    """
    if isinstance(value, (int, float)):
        return value
    quick = isinstance(value, (np.floating, np.int64, np.int32))
    number = value.item() if quick or _has_one_element(value) else None
    return number if isinstance(number, (int, float)) else None


def _has_one_element(value: Any) -> bool:
    shape, kind = getattr(value, "shape", None), getattr(getattr(value, "dtype", None), "kind", "")
    one = isinstance(shape, tuple) and math.prod(shape) == 1 and hasattr(value, "item")
    return one and kind not in ("m", "M") and not isinstance(value, np.ma.MaskedArray)


def read_reset(result: Any) -> Any:
    """Return the observation from the result of ``reset``.

    Raises:
        EnvError: The result is not ``(observation, info)``.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise EnvError(
            f"reset() returned {_count(result)}, but gymnasium's contract is (observation, info)", key="reset"
        )
    observation, info = result
    if type(info) is not dict:
        _check_info("reset", info)
    return observation


def broken_step(result: Any) -> EnvError:
    """Return the error for a step that did not return five values."""
    old = isinstance(result, tuple) and len(result) == _OLD_STEP
    return EnvError(
        f"step() returned {_count(result)}{' (the API of gym before 0.26)' if old else ''}, but the contract is "
        "(observation, reward, terminated, truncated, info)",
        key="step",
    )


def _check_info(method: str, info: Any) -> None:
    if not isinstance(info, Mapping):
        problem = (
            f"{method}() returned {reprlib.repr(info)} as info, but gymnasium's contract is a dict, which may be empty"
        )
        raise EnvError(problem, key="info", value=reprlib.repr(info))


def _count(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, (tuple, list)) else _shown(result)


def _shown(value: Any) -> str:
    """Return a short description of a value, with its type and shape."""
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    of_shape = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{reprlib.repr(value)} of type {type(value).__name__}{of_shape}"
