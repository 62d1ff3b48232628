"""Descriptions of Python objects in a config: other data, another description; the same data, the same description."""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_eval import EvalConfig, EvalResult, compare, evaluate
from rl_eval.config.objects import UNNAMEABLE, describe_object, name_of
from rl_eval.errors import ComparisonError, ConfigError, LogMismatch
from rl_eval.recording.replay import replay
from tests.refused import refused


class Level(enum.Enum):
    EASY = 3
    HARD = 6


@dataclass
class Track:
    length: int
    walls: list[int] = field(default_factory=list)


class Trainer:
    """An object that changes during a training, and compares by identity."""

    def __init__(self, value: object = 0) -> None:
        self.steps = value
        self.lock = threading.Lock()

    def __call__(self) -> gym.Env[Any, Any]:
        return gym.make("CartPole-v1")


class Unreadable:
    """An object that compares by value and cannot be pickled."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unreadable)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def capturing(value: object) -> Callable[[], object]:
    return lambda: value


def by_default(value: object) -> Callable[[], object]:
    return lambda other=value: other


def nested(value: object) -> Callable[[], object]:
    inner = capturing(value)
    return lambda: inner


def recursive(value: object) -> Callable[[], object]:
    def count() -> object:
        return value or count

    return count


PAIRS: dict[str, tuple[object, object]] = {
    "path": (Path("3"), Path("6")),
    "enum": (Level.EASY, Level.HARD),
    "dataclass": (Track(3), Track(6)),
    "nested dataclass": (Track(3, [1]), Track(3, [2])),
    "tensor": (torch.zeros(3), torch.ones(3)),
    "range": (range(3), range(6)),
    "bytes": (b"3", b"6"),
    "space": (gym.spaces.Discrete(3), gym.spaces.Discrete(6)),
    "captured": (capturing(3), capturing(6)),
    "captured path": (capturing([Path("3")]), capturing([Path("6")])),
    "captured twice": (nested(3), nested(6)),
    "recursive": (recursive(3), recursive(6)),
    "default": (by_default(3), by_default(6)),
    "partial": (functools.partial(gym.make, "CartPole-v1"), functools.partial(gym.make, "Acrobot-v1")),
    "partial of a partial": tuple(functools.partial(functools.partial(Track, n), walls=[]) for n in (3, 6)),  # type: ignore[dict-item]
    "attributes": (Trainer(3), Trainer(6)),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_other_data_have_another_description(one: object, other: object) -> None:
    assert name_of(one) == name_of(other)
    assert describe_object(one) == describe_object(one)
    assert describe_object(one) != describe_object(other)
    assert str(describe_object(one)).startswith(f"{name_of(one)}, digest ")
    assert UNNAMEABLE.search(describe_object(one))


@pytest.mark.parametrize(
    "value", [Track, gym.make, len, list.append, [].append, object(), "a:b", 3, 0.5, True, None, torch.nn.Linear]
)
def test_what_a_name_determines_has_no_digest(value: object) -> None:
    assert describe_object(value) == name_of(value)


@pytest.mark.parametrize("make", [capturing, by_default, nested, lambda value: functools.partial(Track, value)])
def test_a_captured_object_that_changes_has_no_part_in_it(make: Callable[[object], object]) -> None:
    """A lambda that captured a trainer is the same environment before and after a training step."""
    trainer = Trainer()
    before = describe_object(make(trainer))
    trainer.steps = 100
    assert describe_object(make(trainer)) == before
    assert describe_object(make(np.random.default_rng(0))) == describe_object(make(np.random.default_rng(1)))


def test_a_field_that_is_not_compared_has_no_part_in_it() -> None:
    @dataclass
    class Named:
        size: int
        token: str = field(compare=False)

    assert describe_object(Named(3, "a")) == describe_object(Named(3, "b"))
    assert describe_object(Named(3, "a")) != describe_object(Named(6, "a"))


@pytest.mark.parametrize("make", [capturing, by_default, lambda method: functools.partial(method, 0)])
def test_the_object_of_a_captured_method_has_no_part_in_it(make: Callable[[object], object]) -> None:
    trainer = Trainer()
    before = describe_object(make(trainer.__call__))
    trainer.steps = 100
    assert describe_object(make(trainer.__call__)) == before


def test_data_that_contain_themselves_are_described() -> None:
    @dataclass
    class Node:
        name: str
        parent: Any = None
        children: list[Any] = field(default_factory=list)
        late: int = field(init=False)

    def tree(leaf: str) -> Node:
        root = Node("root")
        root.children.append(Node(leaf, root))
        return root

    ring: dict[str, Any] = {}
    ring["self"] = [ring]
    assert describe_object(capturing(ring)) == describe_object(capturing(ring))
    assert describe_object(tree("a")) == describe_object(tree("a"))
    assert describe_object(tree("a")) != describe_object(tree("b"))
    assert describe_object(capturing(tree("a"))) != describe_object(capturing(tree("b")))


def test_a_space_that_was_sampled_is_the_same_space() -> None:
    space = gym.spaces.Box(0, 1, (2,))
    before = describe_object(space)
    space.sample()
    assert describe_object(space) == before


def test_data_that_cannot_be_read_have_the_name_of_their_class() -> None:
    @dataclass
    class Locked:
        lock: Any = field(default_factory=threading.Lock)

    def late() -> object:
        return later

    assert describe_object(capturing(Locked())) == describe_object(capturing(Locked()))
    assert describe_object(capturing(Unreadable())) == describe_object(capturing(Unreadable()))
    assert describe_object(late) == name_of(late)
    later = 3
    assert describe_object(late) != name_of(late)


@pytest.mark.process
def test_another_process_has_the_same_descriptions() -> None:
    code = (
        "from tests.unit.test_objects import PAIRS, describe_object\n"
        "print([describe_object(value) for pair in PAIRS.values() for value in pair])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([describe_object(value) for pair in PAIRS.values() for value in pair])


# ------------------------------------------------------------------------------ in an evaluation


class Goal(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, goal: Path) -> None:
        self.goal = float(goal.name)

    def reset(self, **given: Any) -> Any:
        super().reset(**given)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), self.goal + self.np_random.random(), True, False, {}


def configured(goal: str, form: str) -> EvalConfig:
    config = EvalConfig().evaluation(num_episodes=12).policy("random")
    if form == "env_kwargs":
        return config.environment(Goal, env_kwargs={"goal": Path(goal)})
    if form == "partial":
        return config.environment(functools.partial(Goal, Path(goal)))
    return config.environment(lambda: Goal(Path(goal)))


class Counting:
    """A factory that changes with each environment."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> gym.Env[Any, Any]:
        self.made += 1
        return Goal(Path("3"))


def test_a_factory_that_changes_while_it_is_evaluated_is_described_once(tmp_path: Path) -> None:
    config = EvalConfig().environment(Counting()).evaluation(num_episodes=12).policy("random")
    config.environment(env_reuse="episode").runners(num_runners=0, num_envs_per_runner=1)
    result = evaluate(config, output=tmp_path)
    result.save(tmp_path)
    assert EvalResult.load(tmp_path).fingerprint == result.fingerprint


@pytest.mark.parametrize("form", ["env_kwargs", "partial", "lambda"])
def test_results_of_other_objects_are_neither_compared_nor_continued(form: str, tmp_path: Path) -> None:
    first = evaluate(configured("3", form), output=tmp_path)
    with refused(ComparisonError):
        compare(first, evaluate(configured("6", form)))
    with refused(LogMismatch):
        evaluate(configured("6", form), output=tmp_path)
    assert evaluate(configured("3", form), output=tmp_path).fingerprint == first.fingerprint
    with refused(ConfigError):
        replay(first, 0, trust=True)
    assert replay(first, 0, config=configured("3", form)).identical
