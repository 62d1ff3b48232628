"""The canonical digest of a value: equal in every process, and another for another value."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import random
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_eval.records.plain import canonical_digest
from rl_eval.weights import snapshot_weights
from tests.unit.test_weights import Statistics as WeightsWithState


class Rule(enum.Enum):
    MEAN = "mean"
    LAST = "last"


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Statistics:
    mean: Any
    names: set[str]


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


VALUES: dict[str, Any] = {
    "nothing": None,
    "scalars": [True, 1, 1.0, 1j, "1", b"1", float("nan"), float("inf"), -0.0, ...],
    "mapping": {"b": 1, "a": {"d": [1, 2], "c": (1, 2)}, 3: None},
    "sets": {"names": {f"name{i}" for i in range(50)}, "frozen": frozenset({"a", "b", ("c", 1)})},
    "mapping with a default": defaultdict(list, {"b": [1], "a": []}),
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "deque": deque([1, 2, 3], maxlen=5),
    "array": np.arange(6.0).reshape(2, 3),
    "view": np.arange(12.0).reshape(3, 4)[:, ::2],
    "objects": np.array([{"b": {1, 2}, "a": 1}, None], object),
    "records": np.zeros(2, [("a", "<i4"), ("b", "<f8")]),
    "numpy scalar": np.float32(0.5),
    "tensor": {"mean": torch.arange(3.0), "nested": [(torch.ones(2, dtype=torch.bfloat16),)]},
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "complex": torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "empty": torch.zeros(0, 3),
    "enum": Rule.MEAN,
    "named tuple": Pair(1, torch.ones(1)),
    "dataclass": Statistics(torch.zeros(2), {"a", "b", "c"}),
    "slots": Slotted({"x", "y", "z"}),
    "generator": np.random.default_rng(7),
    "random": random.Random(7),
    "types": [int, Statistics, torch.float32, torch.device("cpu"), np.add, len],
    "path": Path("a/b"),
    "bytes": bytearray(b"abc"),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_was_pickled_has_the_digest_of_what_comes_back(name: str) -> None:
    value = VALUES[name]
    digest = canonical_digest(value)
    assert len(digest) == 16
    assert canonical_digest(pickle.loads(pickle.dumps(value))) == digest


def test_different_values_have_different_digests() -> None:
    assert len({canonical_digest(value) for value in VALUES.values()}) == len(VALUES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ("1", b"1"),
        ([1], (1,)),
        ([1, 2], [2, 1]),
        ([[1], 2], [[1, 2]]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ({"a"}, frozenset({"a"})),
        (np.zeros(2), np.zeros((1, 2))),
        (np.zeros(2), np.zeros(2, np.int64)),
        (np.float64(0.0), np.float64(-0.0)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (Rule.MEAN, Rule.LAST),
        (Pair(1, 2), (1, 2)),
        (Statistics(0, {"a"}), Statistics(0, {"b"})),
        (Slotted(1), Slotted(2)),
        (np.random.default_rng(7), np.random.default_rng(8)),
        (OrderedDict(a=1), {"a": 1}),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    ],
)
def test_a_small_difference_is_another_digest(one: Any, other: Any) -> None:
    assert canonical_digest(one) != canonical_digest(other)


@pytest.mark.process
def test_every_process_computes_the_same_digests() -> None:
    """Another hash seed, other addresses and another order of filling change neither these nor those of weights."""
    script = "junk = [object() for _ in range(12345)]\nfrom tests.unit.test_canonical import digests\nprint(*digests())"
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == digests()


def digests() -> list[str]:
    """Return the digests of all values, and of weights whose extra state has tensors and sets."""
    return [canonical_digest(value).hex() for value in VALUES.values()] + [
        snapshot_weights(WeightsWithState(), 1).digest
    ]


def test_sharing_and_the_order_of_filling_do_not_matter_but_cycles_end() -> None:
    shared = torch.ones(2)
    assert canonical_digest([shared, shared]) == canonical_digest([torch.ones(2), torch.ones(2)])
    assert canonical_digest({"a": 1, "b": 2}) == canonical_digest({"b": 2, "a": 1})
    once: list[Any] = [1]
    once.append(once)
    twice: list[Any] = [1]
    twice.append([twice])
    assert canonical_digest(once) == canonical_digest(pickle.loads(pickle.dumps(once))) != canonical_digest(twice)


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        canonical_digest({"stream": sys.stdout})


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(TREES, TREES)
def test_two_trees_have_one_digest_exactly_if_they_are_written_alike(one: Any, other: Any) -> None:
    alike = _written(one) == _written(other)
    assert (canonical_digest(one) == canonical_digest(other)) is alike


def _written(tree: Any) -> str:
    """Write a tree so that only equal ones, also in their types, come out alike."""
    if isinstance(tree, dict):
        return "{" + ",".join(f"{key!r}:{_written(tree[key])}" for key in sorted(tree)) + "}"
    return "[" + ",".join(map(_written, tree)) + "]" if isinstance(tree, list) else repr(tree)
