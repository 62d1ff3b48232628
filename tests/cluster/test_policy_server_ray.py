"""A policy on a server that all runners call, whose process is killed while episodes run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from tests.remote_policy import Kills, Remote, Server

pytestmark = pytest.mark.usefixtures("ray_cluster")

EPISODES, STRUCK = 40, 21


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


def config_of(server: Server, runners: int, struck: int = -1, patience_s: float = 0.0) -> EvalConfig:
    return (
        EvalConfig()
        .environment(Kills, env_kwargs={"pid": server.process.pid, "struck": struck})
        .policy(Remote(server.port, patience_s))
        .runners(num_runners=runners, num_envs_per_runner=2)
        .evaluation(num_episodes=EPISODES)
        .fault_tolerance(max_runner_restarts=20)
    )


def start_after_death(server: Server, seconds: float, gain: float = 1.0) -> None:
    def start() -> None:
        server.process.wait()
        time.sleep(seconds)
        server.kill()
        server.start(gain)

    threading.Thread(target=start, daemon=True).start()


@pytest.mark.parametrize("seconds", [1, *(pytest.param(long, marks=pytest.mark.slow) for long in (10, 60))])
def test_runners_wait_for_a_server_that_is_away(server: Server, seconds: float) -> None:
    """All of them lose it at the same time, and no episode is charged."""
    expected = evaluate(config_of(server, 0)).fingerprint
    start_after_death(server, seconds)
    result = evaluate(config_of(server, 2, STRUCK))
    assert (result.status, result.fingerprint) == ("complete", expected)
    assert not any(record.faults for record in result.episodes)


def test_runners_notice_that_another_policy_answers(server: Server) -> None:
    """Every episode that counts is of the first policy, which both runners have probed before the server dies."""
    full = evaluate(config_of(server, 0))
    with EvalRunnerGroup(config_of(server, 2, STRUCK, patience_s=60.0)) as group:
        group.foreach_runner(lambda runner: runner.runner_index, timeout_s=120.0)
        assert group.evaluate(num_episodes=STRUCK).status == "complete"
        start_after_death(server, 0.0, gain=-1.0)
        result = group.evaluate()
    assert result.status == "partial"
    kept = result.table.filled
    assert result.table.set_aside.any()
    assert result.table.outcomes(kept).tobytes() == full.table.outcomes(kept).tobytes()
