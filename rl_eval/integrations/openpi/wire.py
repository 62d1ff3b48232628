"""Messages of openpi's protocol: msgpack, with NumPy arrays as maps of dtype, shape and bytes."""

from __future__ import annotations

import re
from typing import Any, Final

import msgpack
import numpy as np

_DTYPE: Final = re.compile(r"[<>|=]?[biufSU][1-9]\d{0,8}")
"""Dtypes of booleans, numbers and strings, as ``numpy.dtype.str`` writes them. Their elements have bytes, so that the
length of a message limits the length of an array."""


def pack(value: Any) -> bytes:
    """Return a message of nested dicts, lists, strings, numbers and arrays.

    Raises:
        ValueError: The dtype of an array is not one of booleans, real numbers and strings.
        TypeError: A value has another type.
    """
    packed: bytes = msgpack.packb(value, default=_packed)
    return packed


def unpack(data: bytes) -> Any:
    """Return the value of a message. It takes at most about the memory of the message.

    Raises:
        ValueError: The message is not valid.
    """
    try:
        return msgpack.unpackb(data, object_hook=_unpacked, strict_map_key=False)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"the message is not valid: {type(error).__name__}: {error}") from error


def _packed(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    dtype = _checked(value.dtype.str)
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": dtype, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": dtype}


def _unpacked(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        data, dtype = value[b"data"], np.dtype(_checked(value[b"dtype"]))
        array: Any = np.ndarray(value[b"shape"], dtype, data)
        if list(array.shape) != list(value[b"shape"]) or array.nbytes != len(data):
            raise ValueError(f"an array of shape {array.shape} and dtype {dtype} does not have {len(data)} bytes")
        return array
    if b"__npgeneric__" in value:
        return np.dtype(_checked(value[b"dtype"])).type(value[b"data"])
    return value


def _checked(dtype: str) -> str:
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"the dtype {dtype!r} cannot be sent")
    return dtype
