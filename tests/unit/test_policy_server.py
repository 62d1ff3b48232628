"""A policy on a server, whose process is killed while episodes run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import pytest

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.errors import PolicyUnavailable
from tests.refused import refused
from tests.remote_policy import Remote, Server

pytestmark = pytest.mark.process

EPISODES, STRUCK = 12, 7


class _Strikes(gym.Wrapper[Any, Any, Any, Any]):
    """In the third step of an episode, once, something happens to the server. Finished episodes are reported before."""

    def __init__(self, strike: list[Callable[[], object]]) -> None:
        super().__init__(gym.make("CartPole-v1", max_episode_steps=60))
        self._strike, self._index, self._steps = strike, -1, 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self._index, self._steps = index, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._index == STRUCK and self._strike:
            if self._steps == 2:
                time.sleep(0.2)  # Longer than a slice, so the runner reports next.
            elif self._steps == 3:
                self._strike.pop()()
        return super().step(action)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


def config(policy: Any, strike: Callable[[], object] | None = None, lanes: int = 3, **faults: Any) -> EvalConfig:
    pending = [] if strike is None else [strike]
    return (
        EvalConfig()
        .environment(lambda context: _Strikes(pending))
        .policy(policy)
        .runners(num_envs_per_runner=lanes)
        .evaluation(num_episodes=EPISODES)
        .fault_tolerance(**faults)
    )


def away(server: Server, seconds: float) -> Callable[[], None]:
    """Return a function that kills the server, which is back after some seconds."""

    def kill() -> None:
        server.kill()

        def back() -> None:
            time.sleep(seconds)
            server.start()

        threading.Thread(target=back, daemon=True).start()

    return kill


def undisturbed(server: Server) -> EvalResult:
    return evaluate(config(Remote(server.port)))


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("seconds", [1, *(pytest.param(long, marks=pytest.mark.slow) for long in (10, 60))])
def test_a_server_that_is_away_for_a_while_changes_nothing(server: Server, seconds: float, lanes: int) -> None:
    """A new runner begins after a pause, and the episodes that ran start over."""
    expected = undisturbed(server).fingerprint
    result = evaluate(config(Remote(server.port), away(server, seconds), lanes, max_runner_restarts=20))
    assert (result.status, result.fingerprint) == ("complete", expected)
    assert not any(record.faults or record.attempts > 1 for record in result.episodes)


def test_without_its_server_an_evaluation_ends_with_the_finished_episodes(server: Server) -> None:
    """The reason has the address."""
    full = undisturbed(server)
    result = evaluate(config(Remote(server.port), server.kill, 1, max_runner_restarts=2))
    assert result.status == "partial"
    assert str(server.port) in result.reason
    assert [record.index for record in result.episodes] == list(range(STRUCK))
    assert [record.episode_return for record in result.episodes] == [
        record.episode_return for record in full.episodes[:STRUCK]
    ]


def test_a_server_that_was_never_there_is_the_error_of_the_policy(server: Server) -> None:
    server.kill()
    with refused(PolicyUnavailable, "port"):
        evaluate(config(Remote(server.port), max_runner_restarts=1))
