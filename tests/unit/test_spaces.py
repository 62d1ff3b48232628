"""How observations enter a batch and actions leave it, and the words for whatever breaks its space's contract."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from gymnasium import spaces

from rl_eval.errors import ConfigError, EnvError, PolicyError
from rl_eval.policies.inference.spaces import ActionReader, ObservationBatch
from tests.refused import refused

ROWS = 3
ALL = np.ones(ROWS, bool)

NESTED = spaces.Dict(
    {
        "body": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-np.inf, np.inf, (), np.float64))),
        "camera": spaces.Box(0, 255, (2, 3, 1), np.uint8),
        "mode": spaces.Discrete(4, start=-2),
        "switches": spaces.MultiBinary((2, 2)),
        "wheels": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    }
)
SPACES = {
    "box": spaces.Box(-1, 1, (4,), np.float32),
    "box float64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "scalar box": spaces.Box(-1, 1, (), np.float32),
    "integer box": spaces.Box(-5, 5, (3,), np.int32),
    "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from 3": spaces.Discrete(5, start=3),
    "multi discrete": spaces.MultiDiscrete([2, 3, 4]),
    "multi discrete from 1": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "multi binary": spaces.MultiBinary(3),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))),
    "nested": NESTED,
}
UNBATCHABLE = {
    "sequence": spaces.Sequence(spaces.Discrete(2)),
    "graph": spaces.Graph(spaces.Discrete(2), None),
    "inside a dict": spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}),
}


def samples(space: gym.Space[Any], count: int = ROWS) -> list[Any]:
    space.seed(0)
    return [space.sample() for _ in range(count)]


def contains(leaf: gym.Space[Any], value: Any) -> bool:
    return bool(leaf.contains(np.asarray(value) if isinstance(leaf, spaces.Box) else value))


def leaf_at(nested: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        nested = nested[part]
    return nested


def batch_of(space: gym.Space[Any]) -> ObservationBatch:
    batch = ObservationBatch(space, ROWS)
    for row, observation in enumerate(samples(space)):
        batch.write(row, observation)
    return batch


def assert_only_the_middle_changed(batch: ObservationBatch, space: gym.Space[Any]) -> None:
    for ours, theirs in zip(tree.flatten(batch.arrays), tree.flatten(batch_of(space).arrays), strict=True):
        assert (ours[[0, 2]] == theirs[[0, 2]]).all()


# ------------------------------------------------------------------------------ observations


@pytest.mark.parametrize("name", SPACES)
def test_observations_lie_in_their_rows(name: str) -> None:
    """Each row holds its observation, in the structure, shapes and dtypes of the space, to the last bit."""
    space = SPACES[name]
    batch = batch_of(space)
    for path, leaf in tree.flatten_with_path(batch.structure):
        array = leaf_at(batch.arrays, path)
        assert array.shape == (ROWS, *leaf.shape)
        assert array.dtype == leaf.dtype
        for row, observation in enumerate(samples(space)):
            np.testing.assert_array_equal(array[row], leaf_at(observation, path), strict=False)


@pytest.mark.parametrize("name", SPACES)
def test_observations_are_copied(name: str) -> None:
    """An environment that reuses its observation's memory changes nothing, and the arrays stay the same objects."""
    space = SPACES[name]
    batch = ObservationBatch(space, ROWS)
    arrays = [id(array) for array in tree.flatten(batch.arrays)]
    observation = tree.map_structure(np.array, samples(space)[0])
    batch.write(1, observation)
    before = [array.copy() for array in tree.flatten(batch.arrays)]
    for leaf in tree.flatten(observation):
        np.asarray(leaf)[...] = 1
    assert all((ours == then).all() for ours, then in zip(tree.flatten(batch.arrays), before, strict=True))
    assert [id(array) for array in tree.flatten(batch.arrays)] == arrays


@pytest.mark.parametrize("name", SPACES)
def test_clearing_a_row_leaves_the_others(name: str) -> None:
    """A cleared row is zero in every leaf; its neighbours stay."""
    batch = batch_of(SPACES[name])
    batch.clear(1)
    assert not any(array[1].any() for array in tree.flatten(batch.arrays))
    assert_only_the_middle_changed(batch, SPACES[name])


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (SPACES["box"], [0.5, 1, 0, -1]),
        (SPACES["box"], np.array([0.5, 1, 0, -1])),
        (SPACES["box"], np.array([1, 0, 0, 1])),
        (SPACES["box"], torch.tensor([0.5, 1, 0, -1])),
        (SPACES["box float64"], np.ones((2, 2), np.float32)),
        (SPACES["scalar box"], 0.5),
        (SPACES["scalar box"], np.float64(0.5)),
        (SPACES["discrete"], 3),
        (SPACES["discrete"], np.int8(3)),
        (SPACES["discrete"], np.array(3)),
        (SPACES["multi binary"], [True, False, True]),
        (SPACES["multi discrete"], (1, 2, 3)),
        (SPACES["tuple"], [1, [0.5, 0.5]]),
        (SPACES["image"], np.full((4, 5, 3), 200)),
    ],
)
def test_what_means_the_same_is_accepted(space: gym.Space[Any], observation: Any) -> None:
    """Lists, tensors, Python numbers and other widths are read as what they say."""
    batch = ObservationBatch(space, ROWS)
    batch.write(1, observation)
    written = [array[1] for array in tree.flatten(batch.arrays)]
    leaves = tree.flatten(tree.map_structure_up_to(batch.structure, np.asarray, observation))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(written, leaves, strict=True))


def dict_with(**changes: Any) -> dict[str, Any]:
    return dict(samples(NESTED)[0]) | changes


WRONG_OBSERVATIONS = {
    "longer": (SPACES["box"], np.zeros(5), "observation"),
    "more dimensions": (SPACES["box"], np.zeros((1, 4)), "observation"),
    "broadcastable": (SPACES["box"], np.zeros(1), "observation"),
    "scalar": (SPACES["box"], 0.0, "observation"),
    "none": (SPACES["box"], None, "observation"),
    "list with a none": (SPACES["box"], [0.0, None, 0.0, 0.0], "observation"),
    "string": (SPACES["box"], "hello", "observation"),
    "complex": (SPACES["box"], np.zeros(4, complex), "observation"),
    "ragged": (SPACES["box"], [[1.0], [1.0, 2.0]], "observation"),
    "a dict for a box": (SPACES["box"], {"a": np.zeros(4)}, "observation"),
    "floats for an image": (SPACES["image"], np.full((4, 5, 3), 0.5), "observation"),
    "floats for an integer box": (SPACES["integer box"], np.full(3, 0.5), "observation"),
    "one-hot for a discrete": (SPACES["discrete"], np.zeros(5, int), "observation"),
    "missing key": (NESTED, {k: v for k, v in dict_with().items() if k != "mode"}, "observation['mode']"),
    "short tuple": (NESTED, dict_with(body=(np.zeros(2),)), "observation['body'][1]"),
    "array for a dict": (NESTED, np.zeros(4), "observation['body'][0]"),
    "wrong shape inside": (NESTED, dict_with(camera=np.zeros((2, 2))), "observation['camera']"),
    "none inside": (NESTED, dict_with(mode=None), "observation['mode']"),
    "string inside": (NESTED, dict_with(body=(np.zeros(2), "x")), "observation['body'][1]"),
}


@pytest.mark.parametrize("name", WRONG_OBSERVATIONS)
def test_an_observation_outside_its_contract_is_an_error_with_its_place(name: str) -> None:
    """A wrong shape, kind or structure is the environment's fault; neighbouring lanes never notice."""
    space, observation, key = WRONG_OBSERVATIONS[name]
    batch = batch_of(space)
    with refused(EnvError, key):
        batch.write(1, observation)
    assert_only_the_middle_changed(batch, space)


@pytest.mark.parametrize("name", UNBATCHABLE)
def test_a_space_that_cannot_be_batched_is_a_config_error(name: str) -> None:
    """Sequences and graphs have no fixed shape: the message names the key and the remedy. Actions are no texts."""
    with refused(ConfigError, "observation_space"):
        ObservationBatch(UNBATCHABLE[name], ROWS)
    with refused(ConfigError, "action_space"):
        ActionReader(UNBATCHABLE[name], "clip")
    with refused(ConfigError, "action_space"):
        ActionReader(spaces.Text(3), "clip")


# ------------------------------------------------------------------------------ NaN and infinity


@pytest.mark.parametrize("path", [("body", 0), ("body", 1)])
def test_nan_is_found_in_live_rows_only(path: tuple[Any, ...]) -> None:
    """A NaN in any floating leaf is found in its row; in a row that is not live it does not matter."""
    batch = batch_of(NESTED)
    assert batch.nonfinite_rows(ALL) == []
    leaf_at(batch.arrays, path)[[0, 2]] = np.nan
    assert batch.nonfinite_rows(ALL) == [0, 2]
    assert batch.nonfinite_rows(np.array([False, True, True])) == [2]
    assert batch.nonfinite_rows(np.array([False, True, False])) == []
    batch.clear(0)
    assert batch.nonfinite_rows(ALL) == [2]


def test_infinities_are_found_as_nan_is() -> None:
    """The words tell them from a NaN; values near the end of float32 overflow a sum, and are finite."""
    batch = ObservationBatch(SPACES["box float64"], ROWS)
    for row, value in enumerate((np.inf, -np.inf, np.nan)):
        batch.write(row, np.full((2, 2), value))
    assert batch.nonfinite_rows(ALL) == [0, 1, 2]
    assert ["infinite" in batch.describe_nonfinite(row) for row in range(ROWS)] == [True, True, False]
    nested, huge = batch_of(NESTED), ObservationBatch(SPACES["box"], ROWS)
    nested.arrays["body"][1][2] = np.nan
    assert "observation['body'][1]" in nested.describe_nonfinite(2)
    for row in range(ROWS):
        huge.write(row, np.full(4, 3e38 * (-1) ** row, np.float32))
    assert huge.nonfinite_rows(ALL) == []


def test_each_leaf_outside_of_its_bounds_is_noted_once_until_notes_are_forgotten() -> None:
    """One leaf's note hides no other leaf's, and rows that are not live have none."""
    batch = ObservationBatch(spaces.Dict(near=spaces.Box(-1, 1, (2,)), far=spaces.Box(-1, 1, (2,))), ROWS)
    noted: list[tuple[int, str, str]] = []
    batch.note = lambda *note: noted.append(note)
    live = np.arange(ROWS) > 0
    near, far = batch.arrays["near"], batch.arrays["far"]

    def look(times: int = 17) -> list[tuple[int, str, str]]:
        noted.clear()
        for _ in range(times):
            batch.look_outside(live)
        return noted

    near[0] = 5
    assert look() == []
    near[1, 1] = 5
    said = "5.0, with bounds -1.0 and 1.0"
    assert look() == [(1, "observation['near'] is outside of its space", said)]
    assert look() == []
    far[2] = 5
    assert look() == [(2, "observation['far'] is outside of its space", said)]
    batch.forget_notes()
    assert len(look(times=1)) == 2


# ------------------------------------------------------------------------------ made-up observations


@pytest.mark.parametrize("name", [*SPACES, "wide"])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_made_up_observations_are_inside_the_space_and_vary(name: str, scale: float) -> None:
    """What a policy is probed with is something that the environment could have returned."""
    space = spaces.Box(0, 2**64 - 1, (2,), np.uint64) if name == "wide" else SPACES[name]
    batch = ObservationBatch(space, ROWS)
    made_up = batch.sample(40, np.random.default_rng(0), scale)
    for path, leaf in tree.flatten_with_path(batch.structure):
        array = leaf_at(made_up, path)
        assert array.dtype == leaf.dtype
        assert all(contains(leaf, row) for row in array)
        assert len(np.unique(array.reshape(40, -1), axis=0)) > 1


# ------------------------------------------------------------------------------ actions


@pytest.mark.parametrize("name", SPACES)
def test_actions_of_the_space_pass_unchanged(name: str) -> None:
    """A batch of actions comes out as one action per row, each inside the space and with its value."""
    space = SPACES[name]
    chosen = samples(space)
    batch = tree.map_structure(lambda *leaves: np.stack(leaves), *chosen)
    reader = ActionReader(space, "clip")
    split = reader.split(reader.read(batch, ALL))
    for row in range(ROWS):
        action = split[row]
        for path, leaf in tree.flatten_with_path(reader.structure):
            part = leaf_at(action, path)
            assert contains(leaf, part), (path, part)
            np.testing.assert_array_equal(part, leaf_at(chosen[row], path))


@pytest.mark.parametrize("mode", ["clip", "unsquash", "none"])
def test_lists_and_tensors_are_actions_too(mode: Any) -> None:
    """Whatever holds the numbers of an array is read as one; a gradient does not matter."""
    reader = ActionReader(spaces.Box(-1, 1, (2,)), mode)
    values = [[0.5, -0.5]] * ROWS
    for actions in (values, torch.tensor(values), torch.tensor(values, requires_grad=True), np.array(values)):
        read = reader.read(actions, ALL)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, np.array(values, np.float32))
    discrete = ActionReader(spaces.Discrete(3), "clip")
    for actions in ([0, 2, 1], torch.tensor([0, 2, 1]), np.array([0, 2, 1], np.int8)):
        assert list(discrete.read(actions, ALL)) == [0, 2, 1]
    assert list(ActionReader(spaces.Discrete(2), "clip").read(np.array([True, False, True]), ALL)) == [1, 0, 1]


BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))


HALF = spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([np.inf, np.inf], np.float32))
DEEP = spaces.Dict({"a": spaces.Tuple((BOX, spaces.Discrete(2))), "b": spaces.Discrete(3)})


@pytest.mark.parametrize(
    ("mode", "space", "given", "read"),
    [
        ("clip", BOX, [[-9, -9], [9, 90], [1.5, 3]], [[-2, 0], [2, 10], [1.5, 3]]),
        ("clip", HALF, [[-7, -7]] * ROWS, [[0, -7]] * ROWS),
        ("unsquash", BOX, [[-1, -1], [1, 3], [0, 0.5]], [[-2, 0], [2, 10], [0, 7.5]]),
        ("none", BOX, [[99, 99]] * ROWS, [[99, 99]] * ROWS),
    ],
)
def test_actions_are_put_into_the_bounds(mode: Any, space: spaces.Box, given: Any, read: Any) -> None:
    """Clipped, mapped onto them from [-1, 1], or passed as they are; the policy's own array stays as it was."""
    actions = np.array(given, np.float64)
    found = ActionReader(space, mode).read(actions, ALL)
    assert (found.tolist(), found.dtype, actions.tolist()) == (read, space.dtype, given)


@pytest.mark.parametrize("mode", ["clip", "unsquash", "none"])
def test_a_reader_tells_that_it_clipped(mode: str) -> None:
    """Of rows that count, and not by rounding alone; who passes actions on does not clip."""
    reader = ActionReader(spaces.Box(-1, 1, (2,), np.float32), mode)  # type: ignore[arg-type]
    inside = np.full((ROWS, 2), 1 + 1e-7)
    outside, first = inside.copy(), np.arange(ROWS) == 0
    outside[0, 1] = 1.2
    for actions, live, expected in [(inside, ALL, False), (outside, ~first, False), (outside, first, mode != "none")]:
        reader.read(actions, live)
        assert reader.clipped == expected


@pytest.mark.parametrize(
    ("space", "chosen"),
    [
        (spaces.Discrete(3, dtype=np.int8), [0, 2, 1]),
        (spaces.Discrete(3, dtype=np.uint16), [0, 2, 1]),
        (spaces.Discrete(3), np.array([0, 2, 1], np.int32)),
        (spaces.MultiDiscrete([3, 2], dtype=np.int16), [[0, 1], [2, 0], [1, 1]]),
        (spaces.MultiBinary(2), [[0, 1], [1, 0], [1, 1]]),
    ],
)
def test_whole_actions_have_the_dtype_of_the_space(space: gym.Space[Any], chosen: Any) -> None:
    """The space contains no others, and gymnasium's checker fails an environment that is given one.

    Those that have it are not copied, as in nearly every step of every evaluation.
    """
    reader = ActionReader(space, "clip")
    read = reader.read(chosen, ALL)
    assert reader.read(read, ALL) is read
    assert read.dtype == space.dtype
    np.testing.assert_array_equal(read, chosen)
    assert all(space.contains(action) for action in read)


@pytest.mark.parametrize(
    ("space", "mode", "key"),
    [
        (spaces.Dict({}), "clip", "action_space"),
        (spaces.Tuple(()), "clip", "action_space"),
        (spaces.Dict({"a": spaces.Tuple(())}), "clip", "action_space"),
        (spaces.Dict({"a": HALF}), "unsquash", "policy.actions"),
    ],
)
def test_an_action_space_that_cannot_be_acted_in_is_a_config_error(space: Any, mode: Any, key: str) -> None:
    """A batch of actions without parts has no rows; half-bounded boxes cannot be mapped onto."""
    with refused(ConfigError, key):
        ActionReader(space, mode)


WRONG_ACTIONS = {
    "too few rows": (spaces.Discrete(3), np.zeros(2, int), "action"),
    "too many rows": (spaces.Discrete(3), np.zeros(4, int), "action"),
    "a column": (spaces.Discrete(3), np.zeros((3, 1), int), "action"),
    "logits": (spaces.Discrete(2), np.zeros((3, 2)), "action"),
    "one action": (spaces.Discrete(3), 1, "action"),
    "no action": (spaces.Discrete(3), None, "action"),
    "too few dimensions": (BOX, np.zeros(3), "action"),
    "too wide": (BOX, np.zeros((3, 3)), "action"),
    "floats for integers": (spaces.Discrete(3), np.zeros(3), "action"),
    "strings for integers": (spaces.Discrete(3), np.array(["0"] * 3), "action"),
    "strings for a box": (BOX, np.array([["0", "0"]] * 3), "action"),
    "objects for a box": (BOX, np.array([[None, None]] * 3), "action"),
    "complex for a box": (BOX, np.zeros((3, 2), complex), "action"),
    "ragged": (BOX, [[0.0], [0.0, 1.0], [0.0]], "action"),
    "above": (spaces.Discrete(3), np.array([0, 3, 1]), "action"),
    "below": (spaces.Discrete(3, start=1), np.array([1, 0, 1]), "action"),
    "above one part": (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [1, 2], [2, 0]]), "action"),
    "no bit": (spaces.MultiBinary(2), np.array([[0, 1], [0, 2], [0, 0]]), "action"),
    "nan": (BOX, np.array([[0, 0], [0, np.nan], [0, 0]]), "action"),
    "infinite": (BOX, np.array([[0, 0], [np.inf, 0], [0, 0]]), "action"),
    "nan for integers": (spaces.Discrete(3), np.array([0, np.nan, 0]), "action"),
    "array for a dict": (spaces.Dict({"a": BOX}), np.zeros((3, 2)), "action"),
    "missing part": (spaces.Dict({"a": BOX, "b": BOX}), {"a": np.zeros((3, 2))}, "action"),
    "another part": (spaces.Dict({"a": BOX}), {"b": np.zeros((3, 2))}, "action"),
    "short tuple": (spaces.Tuple((BOX, BOX)), (np.zeros((3, 2)),), "action"),
    "wrong inside": (DEEP, {"a": (np.zeros((3, 2)), [0, 5, 0]), "b": [0, 0, 0]}, "action['a'][1]"),
}


@pytest.mark.parametrize("mode", ["clip", "unsquash", "none"])
@pytest.mark.parametrize("name", WRONG_ACTIONS)
def test_actions_outside_their_contract_are_the_policys_fault(name: str, mode: Any) -> None:
    """A wrong shape, dtype, structure or value is a PolicyError that says what was returned and what was due."""
    space, actions, key = WRONG_ACTIONS[name]
    with refused(PolicyError, key):
        ActionReader(space, mode).read(actions, ALL)


@pytest.mark.parametrize("name", ["above", "below", "above one part", "no bit", "nan", "infinite", "wrong inside"])
def test_rows_that_are_not_live_may_hold_anything(name: str) -> None:
    """A dead lane's row is garbage in, garbage out, and nobody's fault."""
    space, actions, _ = WRONG_ACTIONS[name]

    def is_read(dead: int) -> bool:
        with suppress(PolicyError):
            ActionReader(space, "clip").read(actions, np.arange(ROWS) != dead)
            return True
        return False

    assert sum(map(is_read, range(ROWS))) == 1


@pytest.mark.parametrize("container", [dict, OrderedDict], ids=["dict", "OrderedDict"])
@pytest.mark.parametrize("sequence", [tuple, list], ids=["tuple", "list"])
def test_nested_actions_may_come_in_any_container(container: Any, sequence: Any) -> None:
    """A mapping is a mapping and a sequence a sequence; each environment gets dicts and tuples of its own."""
    reader = ActionReader(DEEP, "clip")
    actions = container(a=sequence([np.full((ROWS, 2), 9.0), np.array([0, 1, 0])]), b=np.array([2, 1, 0]))
    split = reader.split(reader.read(actions, ALL))
    assert len(split) == ROWS
    assert split[1]["a"][0].tolist() == [2, 9]
    assert (split[1]["a"][1], split[1]["b"]) == (1, 1)
    assert DEEP.contains({"a": tuple(split[1]["a"]), "b": split[1]["b"]})


# ------------------------------------------------------------------------------ integers in a Box

BYTES = spaces.Box(0, 255, (1,), np.uint8)
WHOLE = spaces.Box(-3, 3, (1,), np.int64)


@pytest.mark.parametrize(
    ("space", "mode", "given"),
    [(BYTES, "none", 300), (BYTES, "none", -1), (BYTES, "none", 1e20), (WHOLE, "none", 2.7), (WHOLE, "clip", 0.99)],
)
def test_an_action_of_integers_is_neither_cut_off_nor_wrapped_around(space, mode, given) -> None:
    """300 is not 44, and 0.99 is not 0. In a row without an episode, anything is allowed."""
    with refused(PolicyError, key="action", value=given):
        ActionReader(space, mode).read(np.array([[given]]), np.ones(1, bool))
    ActionReader(space, mode).read(np.array([[given]]), np.zeros(1, bool))


@pytest.mark.parametrize(
    ("mode", "given", "due"),
    [
        ("none", 2.0, 2),
        ("clip", 7, 3),
        ("clip", 7.5, 3),
        ("unsquash", 0.99, 3),
        ("unsquash", 0.1, 0),
        ("unsquash", -1, -3),
    ],
)
def test_an_action_of_integers_is_the_nearest_one(mode, given, due) -> None:
    read = ActionReader(WHOLE, mode).read(np.array([[given]]), np.ones(1, bool))
    assert (read.dtype, read.tolist()) == (np.int64, [[due]])
