"""Plain data: nested values as in JSON, the differences between two such values, and a digest of any value.

Data from other programs are parsed and checked against a type. An error describes the damage in one line.

The digest is canonical: equal values have equal digests, in every process. The bytes of a pickle are not canonical:
they depend on addresses of tensors, on the order of sets and mappings, and on whether two parts are the same object.
Here, a value is a tree that is hashed from its leaves up. The order of mappings and sets does not matter. Arrays and
tensors are hashed as dtype, shape and bytes. Any other object is hashed as the parts from which ``pickle`` rebuilds it.
"""

from __future__ import annotations

import copyreg
import functools
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import xxhash
from pydantic import TypeAdapter, ValidationError

ABSENT: Final = "(absent)"
"""Placeholder for a value that is missing in one of two trees."""

_PLAIN: Final = frozenset({str, int, bool, type(None)})


class Difference(NamedTuple):
    """One leaf in which two trees differ."""

    key: str
    """Dotted path of the leaf."""
    a: Any
    b: Any


def plain(value: Any) -> Any:
    """Convert a value to plain JSON.

    NaN becomes None, and a set becomes a sorted list. Infinity and objects of other types become strings.
    """
    return convert(value, plain_leaf)


def convert(value: Any, leaf: Callable[[str, Any], Any], key: str = "", name: Callable[[Any], Any] = str) -> Any:
    """Copy nested data.

    Mappings become dicts, sequences and sets become lists, and NumPy scalars become Python scalars.

    Args:
        value: The data.
        leaf: Function that converts a leaf that is not a string, int, bool or None. Its arguments are the dotted key
            and the value of the leaf.
        key: Dotted key of the data itself.
        name: Function that converts a key of a mapping.
    """
    if type(value) in _PLAIN:  # Fast path for most values: there may be very many faults.
        return value
    if type(value) is dict or isinstance(value, Mapping):
        return {name(part): convert(item, leaf, f"{key}.{part}".lstrip("."), name) for part, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert(item, leaf, key, name) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((convert(item, leaf, key, name) for item in value), key=repr)
    return leaf(key, value.item() if isinstance(value, np.generic) else value)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of plain data. The items of a list have the key of the list."""
    if isinstance(value, Mapping):
        for part, item in value.items():
            yield from leaves(item, f"{key}.{part}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value


def with_leaf(old: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of a mapping with a new value at a path of keys; the original does not change."""
    if not path:
        return value
    known = old if isinstance(old, Mapping) else {}
    return {**known, path[0]: with_leaf(known.get(path[0]), path[1:], value)}


def differences(a: Any, b: Any, key: str = "") -> Iterator[Difference]:
    """Yield the leaves in which two trees of plain data differ. A list is treated as one leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for part in dict.fromkeys([*a, *b]):
            yield from differences(a.get(part, ABSENT), b.get(part, ABSENT), f"{key}.{part}".lstrip("."))
    elif a != b:
        yield Difference(key, a, b)


def plain_leaf(key: str, value: Any) -> Any:
    """Convert a leaf for :func:`plain`: NaN to None, an array to a list, infinity and other objects to strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, np.ndarray):
        return convert(value.tolist(), plain_leaf, key)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


Value = TypeVar("Value")

MOST_UNRECORDED: Final = 10_000_000
"""Maximum number of planned episodes without a record, because a table has a row of 72 bytes for each episode."""
_MOST_SCALARS: Final = 10 * MOST_UNRECORDED
"""Maximum number of info scalars of episodes without a record. Each takes 8 bytes."""
_WIDEST: Final = 10_000
"""Maximum number of info scalars of one episode, because metrics are computed for each scalar, and for each agent."""

_DEEPEST: Final = 100
"""Maximum nesting depth of JSON. Recursive functions that read the data later could handle several times as many
levels."""
_MOST_CONTAINERS: Final = 250_000
"""Maximum number of lists and mappings in short JSON. Each takes up to 230 bytes, but only two characters."""
_CONTAINER: Final = 16
"""Mean number of characters per list or mapping, for longer JSON."""
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_TOO_DEEP: Final = f"the data are nested too deeply: at most {_DEEPEST} levels are read"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has very many lists and mappings.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    most = max(_MOST_CONTAINERS, len(text) // _CONTAINER)
    if _containers(text) > most and _containers(_STRING.sub("", text)) > most:
        raise ValueError(f"the data have more than {most:,} lists and mappings")
    try:
        level = [value := json.loads(text)]
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    for _ in range(_DEEPEST + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _containers(text: str) -> int:
    return text.count("[") + text.count("{")


def typed(kind: type[Value], value: Any) -> Value:
    """Return parsed JSON as a value of a type. Unknown keys of a dataclass are left out.

    Raises:
        ValueError: The value does not fit the type.
    """
    try:
        found: Value = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from error
    return found


_WORDS: Final = {
    "Value error, ": "",
    ", unable to parse string as an integer": "",
    "Input should be": "it must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "valid tuple": "list",
    "valid dictionary": "mapping",
    " or instance of ChunkSection": "",
}
"""Words in messages of pydantic, and ours."""


def in_our_words(message: str) -> str:
    """Return a message of pydantic in the words of our messages."""
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return f"{message[:1].lower()}{message[1:]}"


def check_claim(num_episodes: int, num_records: int, num_scalars: int) -> None:
    """Reject a plan with far more episodes than records, before memory for the plan is allocated.

    Args:
        num_episodes: Number of episodes of the plan.
        num_records: Number of episodes of the plan with a record.
        num_scalars: Number of info scalars of each episode.

    Raises:
        ValueError: The plan has too many episodes or info scalars.
    """
    missing = num_episodes - num_records
    claim = f"its plan has {num_episodes:,} episodes, {missing:,} more than there are records"
    if missing > MOST_UNRECORDED:
        raise ValueError(f"{claim}: at most {MOST_UNRECORDED:,} more are read")
    if missing * num_scalars > _MOST_SCALARS:
        raise ValueError(f"{claim}, with {num_scalars:,} info scalars each: at most {_MOST_SCALARS:,} more are read")
    if num_scalars > _WIDEST:
        raise ValueError(f"its episodes have {num_scalars:,} info scalars each: at most {_WIDEST:,} are read")


def damage(error: Exception) -> str:
    """Return a description of damaged data: the type of an error, and its text.

    The type ``ValueError`` is omitted.
    """
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, type(...))
_NAMED: Final = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)


def canonical_digest(value: Any) -> bytes:
    """Return a digest of a value: 16 bytes that depend only on the value.

    Raises:
        TypeError: A part of the value is neither data nor an object that can be pickled.
    """
    return _digest(value, ())


def _digest(value: Any, above: tuple[int, ...]) -> bytes:
    """Hash a node; ``above`` contains the ``id`` of each node that contains this node."""
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
        module = getattr(value, "__module__", type(value).__module__)  # Before numpy 2, ufuncs lack it.
        return _node("name", _text(f"{module}:{getattr(value, '__qualname__', value.__name__)}"))
    text = value.hex() if type(value) is float else value if type(value) is bytes else str(value)
    return _node(type(value).__name__, text if isinstance(text, bytes) else _text(text))


def _mapping(items: Iterable[tuple[Any, Any]], above: tuple[int, ...]) -> bytes:
    return _node("dict", *sorted(_digest(key, above) + _digest(item, above) for key, item in items))


def _array(value: Any, above: tuple[int, ...]) -> bytes:
    """Return the hash of an array or a tensor.

    The hash is empty for a sparse or quantized tensor, and for any other value.
    """
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
    """Return the hash of the parts that rebuild an object: function, arguments, state, items of lists and mappings."""
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
