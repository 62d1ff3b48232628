"""The guarantee of a result: where it comes from, where it is shown, and the comparisons that it allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, compare, evaluate, replay
from rl_eval.errors import ComparisonError
from rl_eval.records.guarantee import guarantee_of
from tests.refused import refused
from tests.unit.results_world import make_result


def balance(observations: Any) -> Any:
    return (observations[:, 2] > 0).astype(int)


def config(inference: str, lanes: int = 4) -> EvalConfig:
    made = EvalConfig().environment("CartPole-v1").policy(balance, inference=inference)
    return made.runners(num_envs_per_runner=lanes).evaluation(num_episodes=12, determinism_check=0.5)


def with_numerics(**numerics: Any) -> EvalResult:
    plain = make_result()
    return make_result(provenance={**plain.provenance, "numerics": numerics})


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        ({}, "exact"),
        ({"reference": "row"}, "exact"),
        ({"guarantee": "conditions"}, "conditions"),
        ({"hawk/reference": "row", "dove/guarantee": "conditions"}, "conditions"),
        ({"guarantee": "layout", "dove/guarantee": "conditions"}, "layout"),
    ],
)
def test_the_weakest_part_decides(numerics: dict[str, Any], expected: str) -> None:
    assert guarantee_of(numerics) == expected


def test_every_result_has_a_guarantee(tmp_path: Path) -> None:
    """Also in JSON, in the table, and after it was saved; a batched policy cannot promise equal bits."""
    for inference, promised in (("exact", "exact"), ("batched", "conditions")):
        result = evaluate(config(inference), output=tmp_path / inference)
        assert result.guarantee == promised
        assert json.loads(result.to_json())["guarantee"] == promised
        assert f"{promised}:" in result.details
        assert ("\nguarantee" in str(result)) == (promised != "exact")
        result.save(tmp_path / promised)
        assert EvalResult.load(tmp_path / promised).guarantee == promised
        assert evaluate(config(inference), output=tmp_path / inference).guarantee == promised
        assert result.determinism.checked == (6 if promised == "exact" else 0)


def test_the_width_is_part_of_the_numerics_key_below_exact() -> None:
    """So a log of another width is not continued: a runner whose key differs takes no part."""
    assert evaluate(config("batched", lanes=3)).provenance["numerics"]["num_envs"] == 3
    assert "num_envs" not in evaluate(config("exact", lanes=3)).provenance["numerics"]


def test_a_replay_promises_what_the_run_did() -> None:
    assert replay(evaluate(config("exact")), 3, policy=balance).comparable
    assert not replay(evaluate(config("batched")), 3, policy=balance).comparable


def test_lanes_and_a_simulator_are_compared_below_exact() -> None:
    """They have the same starts; the class of the simulator is shown as a difference, since bits may depend on it."""
    made = EvalConfig().environment("Acrobot-v1").policy(lambda seen: (seen[:, 4] > 0) * 2, inference="batched")
    made.evaluation(num_episodes=6, max_episode_steps=20).runners(num_envs_per_runner=3)
    lanes, simulator = evaluate(made), evaluate(made.copy().runners(runner="batched"))
    compared = compare(lanes, simulator)
    assert compared.num_pairs == 6
    assert [one.key for one in compared.different_settings] == ["numerics.adapter"]


def test_pairs_need_equal_starts() -> None:
    """Equal indices are equal starts, unless the number of environments determines the episodes."""
    wide, narrow = (with_numerics(guarantee="layout", num_envs=count, block=64) for count in (64, 8))
    exact, conditions = make_result(), with_numerics(guarantee="conditions", num_envs=8)
    assert compare(wide, wide).num_pairs == compare(exact, conditions).num_pairs == 40
    with refused(ComparisonError, "numerics.num_envs"):
        compare(wide, narrow)
    with refused(ComparisonError, "numerics.guarantee"):
        compare(exact, wide)


class Varies:
    """Acts differently in each call."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        return self.generator.integers(0, 2, len(observations)), state


def test_a_policy_that_does_not_repeat_itself_promises_no_equal_records(tmp_path: Path) -> None:
    """The determinism check still measures it. A log continues in any layout. A policy that repeats itself is exact."""
    made = config("exact").policy(allow_nondeterministic=True).evaluation(num_episodes=6)
    result = evaluate(made, Varies(), output=tmp_path)
    assert (result.status, result.guarantee) == ("complete", "conditions")
    assert EvalResult.load(tmp_path).guarantee == "conditions"
    assert "num_envs" not in result.provenance["numerics"]
    assert result.determinism.passed is False
    assert not replay(result, 3, policy=Varies()).comparable
    assert evaluate(made, balance).guarantee == "exact"
