"""Global random generators of a process, and the calls of an environment that change them.

All environments of a process share these generators. If an environment draws from one of them, its episodes depend on
the other environments of the process.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, final

import numpy as np

_MOST_COMPARED: Final = 1_000
"""Maximum number of calls around which a sensor compares the generators. A comparison takes about 0.1 ms."""

Result = TypeVar("Result")


def generator_states() -> dict[str, int]:
    """Return a hash of the state of each global random generator, by the name of the generator.

    The generators of torch are included if torch is imported.
    """
    numpys: Mapping[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002
    words = [value.tobytes() if isinstance(value, np.ndarray) else value for value in numpys["state"].values()]
    states = {
        "Python's global generator": hash(random.getstate()),
        "numpy's global generator": hash((*words, numpys["has_gauss"], numpys["gauss"])),
    }
    if torch := sys.modules.get("torch"):
        tensors = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
        states["torch's global generator"] = hash(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    return states


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return the names whose hash changed; new names are ignored, because they may be caches or new imports."""
    return [name for name, content in before.items() if name in after and after[name] != content]


@final
class GeneratorSensor:
    """Detector of an environment that changes a global random generator.

    The sensor compares the states of the generators before and after the reset of the first whole episode and its
    steps 1, 3, 7, 15 and so on. If a generator changed between two of these calls, the environment or the policy may
    have changed it. Then the sensor compares the states around every call, also in the next episodes.

    Args:
        report: Takes a text such as ``reset() changes numpy's global generator``, which may be repeated.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._last: Mapping[str, int] = {}
        """States after the last call that was compared."""
        self._calls = 0
        """Number of calls in this episode."""
        self._left = _MOST_COMPARED
        self._compares_all = self._found = False
        self._imported = False
        """Whether a call of this episode imported modules. Such a call is ignored: modules may seed when imported."""

    @classmethod
    def of_this_process(cls, report: Callable[[str], object]) -> GeneratorSensor | None:
        """Return a sensor; None outside of the main thread, because another thread may draw during a call."""
        return cls(report) if threading.current_thread() is threading.main_thread() else None

    def call(self, method: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call ``reset`` or ``step`` of an environment, and return its result."""
        if method == "reset":
            self._calls, self._imported = 0, False
        self._calls += 1
        if not self._left or not (self._compares_all or self._calls & (self._calls - 1) == 0):
            return function(*args, **kwargs)
        self._left -= 1
        modules, before = len(sys.modules), generator_states()
        self._compares_all = self._compares_all or bool(changes(self._last, before))
        result = function(*args, **kwargs)
        self._last = generator_states()
        if len(sys.modules) != modules:
            self._imported = True
        else:
            for name in changes(before, self._last):
                self._compares_all = self._found = True
                self._report(f"{method}() changes {name}")
        return result

    def finished(self) -> bool:
        """Return whether the sensor is no longer needed. Call this between two episodes."""
        if not self._calls or self._found or not self._left:
            return self._calls > 0
        self._compares_all = self._compares_all or bool(changes(self._last, generator_states()))
        return not (self._compares_all or self._imported)
