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
    """Detector of environments that change a global random generator, shared by the environments of a process.

    The sensor compares the states of the generators around the calls 1, 2, 4, 8 and so on. If a generator changed
    between two of these calls, an environment or the policy may have changed it. Then the sensor compares the states
    around every call. It is used in the first whole episode of each environment, or longer if a generator changed.
    A call that imports modules is ignored, because modules may seed when imported.

    Args:
        report: Takes a text such as ``reset() changes numpy's global generator``, which may be repeated.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._last: Mapping[str, int] = {}
        """States after the last call that was compared."""
        self._calls = 0
        self._left = _MOST_COMPARED
        self._compares_all = self._found = False
        self._knows_reset = False
        """Whether a reset was compared that imported nothing."""

    @classmethod
    def of_this_process(cls, report: Callable[[str], object]) -> GeneratorSensor | None:
        """Return a sensor; None outside of the main thread, because another thread may draw during a call."""
        return cls(report) if threading.current_thread() is threading.main_thread() else None

    def call(self, method: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call ``reset`` or ``step`` of an environment, and return its result."""
        self._calls += 1
        due = self._compares_all or self._calls & (self._calls - 1) == 0
        if not self._left or not (due or (method == "reset" and not self._knows_reset)):
            return function(*args, **kwargs)
        self._left -= 1
        modules, before = len(sys.modules), generator_states()
        self._compares_all = self._compares_all or bool(changes(self._last, before))
        result = function(*args, **kwargs)
        self._last = generator_states()
        if len(sys.modules) == modules:
            self._knows_reset = self._knows_reset or method == "reset"
            for name in changes(before, self._last):
                self._compares_all = self._found = True
                self._report(f"{method}() changes {name}")
        return result

    def finished(self) -> bool:
        """Return whether an environment that has completed an episode no longer needs the sensor."""
        if self._found or not self._left:
            return True
        self._compares_all = self._compares_all or bool(changes(self._last, generator_states()))
        return self._knows_reset and not self._compares_all
