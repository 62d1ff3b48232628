"""One policy acts from the first episode to the last, in every kind of runner. Otherwise its episodes do not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from tests.unit.games_world import TicTacToe

PROBE = 150
"""More calls than the probe makes, and fewer than 100 episodes need."""


class Turncoat:
    """Policy that becomes another one after some calls, which the probe does not see."""

    calls = 0

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, None]:
        self.calls += 1
        turned = self.calls > PROBE
        if isinstance(observations, dict):
            return self._move(observations["action_mask"], turned), None
        return ((observations[:, 2] > 0) ^ turned).astype(np.int64), None

    @staticmethod
    def _move(masks: Any, turned: bool) -> Any:
        return masks.shape[1] - 1 - masks[:, ::-1].argmax(1) if turned else masks.argmax(1)


class Guesser(Turncoat):
    """Policy that does not repeat itself."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, None]:
        return np.random.default_rng().integers(0, 2, len(observations)), None


def config(env: Any, lanes: int = 1, runner: str = "vector") -> EvalConfig:
    chosen = EvalConfig().environment(env).policy(Turncoat()).evaluation(num_episodes=100)
    return chosen.runners(num_envs_per_runner=lanes, runner=runner)


RUNNERS = {
    "single": config("CartPole-v1", 1, "single_agent"),
    "vector": config("CartPole-v1", 3),
    "batched": config("CartPole-v1", 3, "batched").environment(env_kwargs={"vectorization_mode": "sync"}),
    "agents": config(lambda context: TicTacToe(), 2, "multi_agent"),
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_policy_that_changes_is_noticed(runner: str) -> None:
    """No episode counts, since the change may have come before any of them. The next evaluation has one policy."""
    with EvalRunnerGroup(RUNNERS[runner]) as group:
        first, second = group.evaluate(), group.evaluate()
    assert (first.status, len(first.episodes), first.table.set_aside.sum()) == ("partial", 0, 100)
    assert (second.status, len(second.episodes)) == ("complete", 100)
    ours, theirs = (dict(result.provenance["numerics"]) for result in (first, second))
    changed = [key for key in ours if ours[key] != theirs[key]]
    assert changed == ["outputs"]
    assert all(key["outputs"] in first.reason for key in (ours, theirs))


def test_a_policy_that_cannot_be_checked_has_a_note() -> None:
    """It does not repeat itself, so no difference says anything."""
    result = evaluate(config("CartPole-v1").policy(Guesser(), allow_nondeterministic=True))
    assert (result.status, len(result.episodes)) == ("complete", 100)
    assert len(result.provenance["notes"]) >= 1
