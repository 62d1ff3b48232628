"""Messages of openpi's protocol."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rl_eval.integrations.openpi.wire import pack, unpack

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(),
    arrays.unsigned_integer_dtypes(),
    arrays.floating_dtypes(),
    arrays.byte_string_dtypes(),
    arrays.unicode_string_dtypes(),
)


@given(DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))))
def test_arrays_keep_their_bits(array: Any) -> None:
    found = unpack(pack({"a": [array]}))["a"][0]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_numbers_and_texts_keep_their_types() -> None:
    value = {"text": "höher", "number": 2, "scalar": np.float32(0.1), b"key": None, "list": [1.5, True]}
    found = unpack(pack(value))
    assert found == value
    assert type(found["scalar"]) is np.float32


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_not_valid(data: bytes) -> None:
    with suppress(ValueError):
        unpack(data)


def array_of(**changes: Any) -> bytes:
    parts = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2], **changes}
    return msgpack.packb({key.encode(): value for key, value in parts.items() if value is not None})


WRONG: dict[str, dict[str, Any]] = {
    "objects": {"dtype": "|O"},
    "structure": {"dtype": "i4,i4"},
    "time": {"dtype": "<M8[s]"},
    "complex": {"dtype": "<c8"},
    "dtype of another type": {"dtype": 4},
    "huge item": {"dtype": "<U999999999"},
    "many empty texts": {"dtype": "<U0", "data": b"", "shape": [10**12]},
    "no shape": {"shape": None},
    "shape of a text": {"shape": "ab"},
    "negative": {"shape": [-1]},
    "too large": {"shape": [2**63]},
    "more than the bytes": {"shape": [2**40]},
    "fewer than the bytes": {"shape": [1]},
    "bytes of another type": {"data": 8},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_wrong_array_is_not_valid(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not valid"):
        unpack(array_of(**changes))


@pytest.mark.parametrize("data", [b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\xc1", b"", b"\x81\x80\x00", pack(1) * 2])
def test_a_wrong_message_is_not_valid(data: bytes) -> None:
    with pytest.raises(ValueError, match="not valid"):
        unpack(data)


@pytest.mark.parametrize("value", [np.array([{}]), np.array([1j]), np.datetime64("2020")])
def test_other_dtypes_are_not_sent(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        pack(value)
