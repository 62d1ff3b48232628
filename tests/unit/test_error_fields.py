"""Errors carry fields, which survive pickling and Ray, and have no secrets."""

import copy
import pickle

import pytest

from rl_eval.errors import ConfigError, EvalError, LogMismatch


def make_error() -> EvalError:
    return ConfigError(
        "evaluation.seed is -1", key="evaluation.seed", value=-1, episode=3, runner=1, fix="Give a seed of 0 or more."
    )


def fields_of(error: EvalError) -> tuple[object, ...]:
    return type(error), str(error), error.key, error.value, error.episode, error.runner, error.fix


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_have_the_fields(copied) -> None:
    for error in (make_error(), LogMismatch("seed: 1 -> 2", "give another folder"), EvalError()):
        assert fields_of(copied(error)) == fields_of(error)


def test_the_fix_ends_the_text() -> None:
    assert str(make_error()) == "evaluation.seed is -1. Give a seed of 0 or more."
    assert str(ConfigError("It broke.", fix="Mend it.")) == "It broke. Mend it."
    assert str(ConfigError("It broke")) == "It broke"


def test_a_value_is_plain_and_has_no_secret() -> None:
    assert ConfigError("", value=[1, 2]).value == "[1, 2]"
    assert "hunter2" not in str(fields_of(ConfigError("no", value="s3://me:hunter2@host", fix="s3://me:hunter2@host")))
