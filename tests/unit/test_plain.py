"""Plain data: what JSON gives back equal, and in which leaves two trees differ."""

from __future__ import annotations

import json
import math
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_eval.records.episode import COLUMNS, ROW, EpisodeRecord, EpisodeTable, Outcome, Row, failed_row
from rl_eval.records.plain import ABSENT, Difference, convert, differences, leaves, plain

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


class Level(IntEnum):
    HIGH = 3


@given(TREES)
def test_plain_data_survives_strict_json(tree: Any) -> None:
    """What is plain is the same after a file, and plain again."""
    made = plain(tree)
    assert json.loads(json.dumps(made, allow_nan=False)) == made == plain(made)


def test_everything_has_a_plain_form() -> None:
    """NaN is None, infinity and the unknown are text, arrays and sets lists, keys text."""
    tree = {1: (np.float32(0.5), np.arange(2)), "s": {"b", "a"}, "n": [math.nan, -math.inf], "p": Path("x")}
    assert plain(tree) == {"1": [0.5, [0, 1]], "s": ["a", "b"], "n": [None, "-inf"], "p": "x"}
    assert json.dumps(plain(Level.HIGH)) == "3"


def test_a_leaf_is_converted_with_its_key() -> None:
    """The key is dotted; the items of a list have that of the list; names of keys can be kept."""
    found = convert({"a": {1: [object, 2.5]}}, lambda key, value: (key, type(value)), name=lambda name: name)
    assert found == {"a": {1: [("a.1", type), ("a.1", float)]}}
    assert list(leaves({"a": {"b": [1, 2]}, "c": None})) == [("a.b", 1), ("a.b", 2), ("c", None)]


@given(TREES, TREES)
def test_trees_differ_in_leaves_exactly_if_they_are_not_equal(one: Any, other: Any) -> None:
    """Swapping the sides swaps the values and keeps the keys."""
    one, other = plain(one), plain(other)
    found = list(differences(one, other))
    assert (not found) == (one == other)
    swapped = [(leaf.key, leaf.b, leaf.a) for leaf in differences(other, one)]
    assert sorted(map(repr, swapped)) == sorted(repr(tuple(leaf)) for leaf in found)


def test_a_difference_names_its_leaf() -> None:
    """Nested keys are dotted, a list is one leaf, and what a side lacks is absent."""
    ours, theirs = {"a": {"b": 1, "c": [1, 2]}, "d": 0}, {"a": {"b": 1, "c": [1]}, "e": 0}
    assert list(differences(ours, theirs)) == [
        Difference("a.c", [1, 2], [1]),
        Difference("d", 0, ABSENT),
        Difference("e", ABSENT, 0),
    ]


# ------------------------------------------------------------------------------ the columns of a record


def test_a_row_is_made_by_name_and_read_as_a_record() -> None:
    """What is not given has the value of a failed episode; codes become words."""
    table = EpisodeTable(2)
    values = {"index": 1, "seed": 7, "episode_return": 2.5, "length": 4, "truncated_by": 2, "success_once": 0}
    table.fill(np.array([Row(**values, outcome=Outcome.COMPLETED)], ROW))
    table.fill(failed_row(0, 5, 3, 9))
    record, failed = table.record(1), table.record(0)
    assert (record.truncated_by, record.success_once, record.success_at_end) == ("max_episode_steps", False, None)
    assert (record.outcome, record.episode_return, record.runner) == ("completed", 2.5, -1)
    assert (failed.outcome, failed.attempts, failed.weights_version, failed.length) == ("failed", 3, 9, 0)
    assert math.isnan(failed.episode_return)
    assert all(type(getattr(record, name)) in (int, float, bool, str, type(None)) for name in COLUMNS)
    assert [*COLUMNS, "faults", "info", "condition"] == list(EpisodeRecord.__dataclass_fields__)
