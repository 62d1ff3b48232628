"""Descriptions of the Python objects in a config: a name, and a digest of the data that the name does not determine.

These descriptions are compared when results are compared, and when a run is continued. So ``Path("a")`` and
``Path("b")`` must have different descriptions, as must two lambdas of one line that captured different values. On the
other hand, a description must not change during training. So the digest covers only data: values that compare by value,
such as strings, arrays, paths, enums and dataclasses. For any other object in the data, such as a captured trainer, the
digest covers only the name of its class.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rl_eval.records.plain import canonical_digest

UNNAMEABLE: Final = re.compile(r"<locals>|<lambda>|, digest [0-9a-f]{8}$|^array of \S+ \[.*\], sha256 [0-9a-f]{16}$")
"""Pattern of the descriptions of objects that cannot be imported by their name."""
_EMPTY: Final = types.CellType()
"""Cell of a captured variable without a value."""
_SCALARS: Final = (str, int, float, complex, bytes, types.NoneType)


def describe_object(value: Any) -> Any:
    """Return the name of an object, followed by a digest of its data, if it has data; return plain data unchanged.

    The data are the values that a lambda, a local function or a ``functools.partial`` captured, or the attributes of
    any other object. Functions and classes that can be imported have no data.
    """
    return _described(value, ())


def name_of(value: Any) -> Any:
    """Return ``module:qualname`` of an object; return plain data unchanged."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, functools.partial):
        return name_of(value.func)
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return f"array of {value.dtype} {list(value.shape)}, sha256 {digest}"
    target = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(target, "__module__", None) or type(target).__module__  # A method of a builtin class has none.
    return f"{module}:{target.__qualname__}"


def _described(value: Any, above: tuple[int, ...]) -> Any:
    """Return the description of an object; ``above`` contains the ``id`` of each enclosing object."""
    name = name_of(value)
    if value is name or isinstance(value, np.ndarray) or id(value) in above:
        return name
    data = _data_of(value, above)
    return f"{name}, digest {canonical_digest(data).hex()[:8]}" if data else name


def _data_of(value: Any, above: tuple[int, ...]) -> list[Any]:
    inside = (*above, id(value))
    if isinstance(value, functools.partial):
        return [_data(part, inside) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.FunctionType):
        if "<" not in value.__qualname__:  # An imported function. A digest of its file is compared separately.
            return []
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        captured = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [_data(part, inside) for part in captured]
    if hasattr(value, "__qualname__"):
        return []
    if _compares_by_value(value):
        return [_data(value, above)]
    return [_data(vars(value), inside)] if getattr(value, "__dict__", None) else []


def _data(value: Any, above: tuple[int, ...]) -> Any:
    """Return the data in a value. An object that does not compare by value is replaced with its name."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, functools.partial | types.FunctionType):
        return _described(value, above)
    return name_of(value) if id(value) in above else _parts(value, (*above, id(value)))


def _parts(value: Any, above: tuple[int, ...]) -> Any:
    """Return the data in a container, a dataclass or a single value; ``above`` contains the ``id`` of ``value``."""
    if isinstance(value, Mapping):
        return {str(key): _data(item, above) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_data(item, above) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _compares_by_value(value):
        compared = [field.name for field in dataclasses.fields(value) if field.compare]
        return [name_of(value), *(_data(getattr(value, name, None), above) for name in compared)]
    try:
        return _leaf(value)
    except Exception:  # A digest calls code of the object's class, which may raise any exception.
        return name_of(value)


def _leaf(value: Any) -> Any:
    if hasattr(value, "__qualname__"):
        return name_of(value)  # A method can be bound to an object that changes.
    if (gym := sys.modules.get("gymnasium")) and isinstance(value, gym.Space):
        return repr(value)  # Equal spaces can have different random generators.
    return canonical_digest(value) if _compares_by_value(value) else name_of(value)


def _compares_by_value(value: Any) -> bool:
    return isinstance(value, enum.Enum) or any("__eq__" in vars(base) for base in type(value).__mro__[:-1])
