"""Canonical digest of a Python value: equal values have equal digests, in every process.

A pickle will not do: it holds addresses of tensors, the hash order of sets, the order in which a mapping was filled,
and whether two parts were one object. Here a value is a tree whose nodes are hashed from their leaves up; mappings and
sets have no order; arrays and tensors are dtype, shape and bytes; any other object is what it tells ``pickle`` to
rebuild it from.
"""

from __future__ import annotations

import copyreg
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import xxhash

_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, type(...))
_NAMED: Final = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)


def canonical_digest(value: Any) -> bytes:
    """Return 16 bytes that depend on nothing but a value.

    Raises:
        TypeError: Part of it is neither data nor an object that can be pickled.
    """
    return _digest(value, ())


def _digest(value: Any, above: tuple[int, ...]) -> bytes:
    """Hash a node; ``above`` are the identities of those that it is a part of."""
    kind = type(value)
    if kind in _SCALARS or isinstance(value, _NAMED):
        return _leaf(value)
    if id(value) in above:
        return _node("cycle", _text(str(above[::-1].index(id(value)))))
    above = (*above, id(value))
    if kind in (list, tuple):
        return _node(kind.__name__, *(_digest(item, above) for item in value))
    if kind is dict:
        return _mapping(value.items(), above)
    if isinstance(value, (set, frozenset)):
        return _node(kind.__name__, *sorted(_digest(item, above) for item in value))
    return _array(value, above) or _object(value, above)


def _leaf(value: Any) -> bytes:
    if isinstance(value, _NAMED):
        module = getattr(value, "__module__", type(value).__module__)  # Ufuncs have none before numpy 2.
        return _node("name", _text(f"{module}:{getattr(value, '__qualname__', value.__name__)}"))
    text = value.hex() if type(value) is float else value if type(value) is bytes else str(value)
    return _node(type(value).__name__, text if isinstance(text, bytes) else _text(text))


def _mapping(items: Iterable[tuple[Any, Any]], above: tuple[int, ...]) -> bytes:
    return _node("dict", *sorted(_digest(key, above) + _digest(item, above) for key, item in items))


def _array(value: Any, above: tuple[int, ...]) -> bytes:
    """Hash an array or a tensor; empty for anything else, also for one that is not plain memory."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject:
            return _node("objects", _digest(value.shape, above), _digest(value.ravel().tolist(), above))
        return _memory(str(value.dtype.descr), value.shape, np.ascontiguousarray(value))
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return b""
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _memory(str(value.dtype), tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy())


def _memory(dtype: str, shape: tuple[int, ...], content: Any) -> bytes:
    return _node("array", _text(f"{dtype} {shape}"), xxhash.xxh3_128_digest(content.tobytes()))


def _object(value: Any, above: tuple[int, ...]) -> bytes:
    """Hash what rebuilds an object: function, arguments, state, items of a list, items of a mapping."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return _node(type(value).__qualname__, _mapping(value.items(), above))
    special = copyreg.dispatch_table.get(type(value))
    found = special(value) if special else value.__reduce_ex__(4)
    if isinstance(found, str):
        return _node("name", _text(f"{type(value).__module__}:{found}"))
    function, arguments, state, items, pairs = (*found, None, None, None)[:5]
    parts = [_digest(part, above) for part in (function, arguments, state, list(items or ()))]
    return _node("object", *parts, _mapping(pairs or (), above))


def _node(kind: str, *parts: bytes) -> bytes:
    digest = xxhash.xxh3_128(_text(kind))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
