"""Arrays in pickles of other libraries. No code that a pickle names is imported or run."""

from __future__ import annotations

import errno
import io
import pickle
import pickletools
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

_ARRAYS: Final = ("_frombuffer", "dtype", "scalar")
"""Names of NumPy that a pickle of an array refers to, and that take no more memory than the pickle."""
_MOST_STEPS: Final = 100_000
"""Maximum number of instructions in a pickle. Each byte can be one, and create an object."""


class Inert:
    """Replacement for an object that is not an array. It has the object's attributes, but not its methods."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


_OF_PACKAGES: Final = {
    package: type("Inert", (Inert,), {"__module__": package})
    for package in ("gym", "gymnasium", "stable_baselines3", "tianshou")
}
"""Replacements that know the package of the object's class."""


def inert(pickled: bytes) -> Any:
    """Return a pickled object, with an :class:`Inert` for each object that is not an array.

    Raises:
        OSError: The pickle has too many parts.
        Exception: It cannot be read.
    """
    if next(islice(pickletools.genops(pickled), _MOST_STEPS, None), None) is not None:
        raise OSError(errno.EFBIG, f"a pickle has more than {_MOST_STEPS:,} instructions")
    return _Arrays(io.BytesIO(pickled)).load()


class _Arrays(pickle.Unpickler):
    """Unpickler that builds arrays, and replacements for all other objects."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of NumPy for arrays, or a replacement."""
        package = module.partition(".")[0]
        if package == "numpy" and name in _ARRAYS:
            return super().find_class(module, name)
        known = {"_reconstruct": _empty, "bytearray": bytearray, "OrderedDict": dict}
        return known.get(name) or _OF_PACKAGES.get(package, Inert)


def _empty(*_: Any) -> npt.NDArray[Any]:
    """Return an array that the pickle then fills. A pickle of an array also asks for an empty one."""
    return np.zeros(0)
