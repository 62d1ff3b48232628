"""Whether the attributes of a model of Stable-Baselines3 show that it was trained with a ``VecNormalize``."""

import base64
import json
import pickle
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from rl_eval.bounded_read import FEW_MB
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3.files import facts_of, trained_normalized
from tests.refused import refused

BOUNDED = spaces.Box(-1, 1, (2,))
FREE = spaces.Box(-np.inf, np.inf, (2,))
NEAR, FAR = np.array([[0.5, -0.5]], np.float32), np.array([[0.5, -7.0]], np.float32)
MANY = {":serialized:": base64.b64encode(b"]" * 1_000_000).decode()}
"""A pickle of very many lists."""
ON, OFF = {}, {"buffer_size": 100}


def facts(kind, last, original, space=FREE):
    return {**kind, "_last_obs": last, "_last_original_obs": original, "observation_space": space}


TABLE = {
    "its environment has one": ({"_vec_normalize_env": object(), "env": object()}, True),
    "its environment has none": (facts(OFF, FAR, NEAR, BOUNDED) | {"env": object()}, False),
    "it was given an environment, and not trained there": (facts(OFF, None, NEAR) | {"env": object()}, None),
    "never trained": (facts(ON, None, None), False),
    "trained without, no replay buffer": (facts(ON, NEAR, None), False),
    "no replay buffer, and an original": (facts(ON, NEAR, NEAR + 1), True),
    "no replay buffer, saved again": (facts(ON, None, NEAR), True),
    "of rewards alone, no replay buffer": (facts(ON, NEAR.astype(float), NEAR.astype(float) + 1), False),
    "outside of the bounds": (facts(OFF, FAR, NEAR, BOUNDED), True),
    "outside by rounding": (facts(OFF, np.float32([[1.00001, 0]]), NEAR, BOUNDED), None),
    "an environment that exceeds its bounds": (facts(OFF, FAR, FAR + 1, BOUNDED), None),
    "float32 from float64": (facts(OFF, NEAR, NEAR.astype(np.float64)), True),
    "both float64": (facts(OFF, NEAR.astype(np.float64), FAR.astype(np.float64)), False),
    "images": (facts(OFF, np.zeros((1, 4, 4), np.uint8), np.ones((1, 4, 4), np.uint8)), False),
    "equal": (facts(OFF, NEAR, NEAR.copy()), False),
    "float32": (facts(OFF, NEAR, NEAR + 1), None),
    "stacked after it was normalized": (facts(ON, np.zeros((1, 4)), np.zeros((1, 2))), True),
    "saved again with a replay buffer": (facts(OFF, None, NEAR), None),
    "nothing known": ({}, None),
    "one key of several": (
        facts(
            OFF,
            {"a": NEAR, "b": FAR},
            {"a": NEAR, "b": NEAR},
            spaces.Dict({"a": FREE, "b": BOUNDED}),
        ),
        True,
    ),
    "no key of several": (facts(OFF, {"a": NEAR, "b": NEAR}, {"a": NEAR, "b": NEAR}), False),
    "an unknown key of several": (facts(OFF, {"a": NEAR, "b": NEAR}, {"a": NEAR, "b": NEAR + 1}), None),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_attributes_show(case):
    attributes, expected = TABLE[case]
    assert trained_normalized(attributes) is expected


def saved(path, **attributes):
    """Write a file as SB3 does."""
    data = {
        name: value
        if isinstance(value, (int, type(None)))
        else {":type:": str(type(value)), ":serialized:": base64.b64encode(pickle.dumps(value)).decode()}
        for name, value in attributes.items()
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps(data))
    return path


@pytest.mark.parametrize("case", [case for case in TABLE if not case.startswith("its env") and "given" not in case])
def test_a_file_shows_the_same(tmp_path, case):
    attributes, expected = TABLE[case]
    assert trained_normalized(facts_of(saved(tmp_path / "model.zip", **attributes))) is expected


class Runs:
    """An object whose pickle runs code."""

    def __reduce__(self):
        return pytest.fail, ("the file was run",)


def test_nothing_in_a_file_is_run(tmp_path):
    for value in (Runs(), {"a": Runs()}, SimpleNamespace(low=Runs()), spaces.Dict({"a": FREE})):
        path = saved(tmp_path / "model.zip", _last_obs=value, _last_original_obs=value, observation_space=value)
        assert trained_normalized({**facts_of(path), **OFF}) is None
        assert trained_normalized(facts_of(path)) is True


@pytest.mark.parametrize("content", [b"no json", b"[1]"])
def test_a_file_that_is_something_else_shows_nothing(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", content)
    assert facts_of(tmp_path / "model.zip") == {}
    assert facts_of(tmp_path / "none.zip") == {}


def test_the_observations_of_many_environments_are_read(tmp_path):
    """Their text has more than 4 MB."""
    many = np.zeros((4096, 200), np.float32)
    path = saved(tmp_path / "model.zip", _last_obs=many, _last_original_obs=many + 1, observation_space=FREE)
    assert path.stat().st_size > 2 * FEW_MB
    assert trained_normalized(facts_of(path)) is True


@pytest.mark.parametrize("text", [" " * (FEW_MB + 1), json.dumps({"_last_obs": MANY})])
def test_attributes_that_are_too_large_are_an_error(tmp_path, text):
    with zipfile.ZipFile(tmp_path / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", text)
    with refused(ConfigError, "policy.policy", value=str(tmp_path / "model.zip")):
        facts_of(tmp_path / "model.zip")


def test_observations_that_are_not_numbers_show_nothing():
    """A stranger's file may contain any array."""
    for last in (np.array([["a"]]), np.zeros((1, 2), "V0"), np.zeros((1, 2), object), np.zeros((1, 2), "M8[s]")):
        assert trained_normalized(facts(OFF, last, last, BOUNDED)) is None
