"""Runners whose policy is on a server of openpi's protocol, which is away for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.cli.progress import progress_line
from rl_eval.errors import ConfigError, PolicyUnavailable
from rl_eval.execution import agreement
from tests.openpi_world import Openpi
from tests.refused import refused, untold

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def server() -> Iterator[Openpi]:
    server = Openpi("dies", FAULT_AT="400", SECONDS_OF_ROW="0.002")
    yield server
    server.kill()


def back_after_death(server: Openpi, seconds: float, gain: float = 1.0) -> None:
    def start() -> None:
        server.process.wait()
        time.sleep(seconds)
        server.kill()
        server.mode = "det"
        server.start(gain)

    threading.Thread(target=start, daemon=True).start()


def config_of(server: Openpi, runners: int, patience_s: float) -> EvalConfig:
    config = server.config(runners, 2, patience_s=patience_s).evaluation(num_episodes=40)
    return config.fault_tolerance(max_runner_restarts=20)


@pytest.mark.parametrize("runners", [0, 2])
@pytest.mark.parametrize("patience_s", [0.0, 30.0])
@pytest.mark.parametrize("seconds", [1, *(pytest.param(long, marks=pytest.mark.slow) for long in (10, 60))])
def test_a_server_that_is_away_changes_nothing(server: Openpi, seconds: float, patience_s: float, runners: int) -> None:
    """The client tries again, and then runners are replaced."""
    other = Openpi()
    expected = evaluate(config_of(other, 0, 0.0)).fingerprint
    other.kill()
    back_after_death(server, seconds)
    result = evaluate(config_of(server, runners, patience_s))
    assert (result.status, result.fingerprint) == ("complete", expected)
    assert not any(record.faults or record.attempts > 1 for record in result.episodes)


@pytest.mark.parametrize("runners", [0, 2])
def test_a_server_that_is_away_is_named_while_the_evaluation_waits(server: Openpi, runners: int) -> None:
    """Nothing else is guessed, and a server that is back ends it."""
    other = Openpi()
    expected = evaluate(config_of(other, 0, 0.0)).fingerprint
    other.kill()
    with EvalRunnerGroup(config_of(server, runners, 0.0)) as group:
        handle = group.submit()
        server.process.wait()
        while "[Errno 111]" not in (progress := handle.progress()).unavailable:
            assert not handle.done()
            time.sleep(0.02)
        long = replace(progress, seconds=1000.0, waiting="simulators wait for the policy")
        line = progress_line(progress.phase, 1000.0, long, runners)
        assert not untold(line, f"127.0.0.1:{server.port}", "[Errno 111]")
        assert len(untold(line, "max_episode_steps", "simulators", "left")) == 3
        server.kill()
        server.mode = "det"
        server.start()
        result = handle.result()
    assert (result.status, result.fingerprint) == ("complete", expected)
    assert not handle.progress().unavailable


@pytest.mark.parametrize("runners", [0, 2])
def test_a_server_that_no_runner_reaches_at_the_start_is_the_error(server: Openpi, runners: int) -> None:
    """After one try of each. The next evaluation of the group tries again, as a training needs it."""
    server.kill()
    with EvalRunnerGroup(server.config(runners, patience_s=0.0)) as group:
        with refused(PolicyUnavailable, "policy.policy", value=f"127.0.0.1:{server.port}") as seen:
            group.evaluate()
        assert seen.value.fix
        server.start()
        assert group.evaluate().status == "complete"


@pytest.mark.parametrize("runners", [0, 2])
def test_another_policy_at_the_address_is_noticed(server: Openpi, runners: int) -> None:
    """In mid-run, or between the two rounds of a probe."""
    back_after_death(server, 0.5, gain=-1.0)
    status = "refused"
    with suppress(ConfigError):
        status = evaluate(config_of(server, runners, 30.0)).status
    assert status != "complete"


def test_runners_share_the_addresses_evenly(server: Openpi) -> None:
    other = Openpi()
    config = server.config(2, 2).policy(f"openpi://127.0.0.1:{server.port},127.0.0.1:{other.port}")
    with EvalRunnerGroup(config) as group:
        used = group.foreach_runner(attrgetter("policy.server"), 300.0)
    other.kill()
    assert len({*used}) == 2


def test_a_complete_run_is_not_that_of_another_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of the last probes is not that of this question, for which a slow server needs time."""
    server = Openpi()
    expected = evaluate(server.config(2, 2), output=tmp_path).fingerprint
    monkeypatch.setattr(agreement, "_PATIENCE_S", 0.0)
    assert evaluate(server.config(2, 2), output=tmp_path).fingerprint == expected
    server.kill()
    server.start(-1.0)
    with refused(ConfigError, "policy.policy", value=f"openpi://127.0.0.1:{server.port}"):
        evaluate(server.config(2, 2), output=tmp_path)
    server.kill()
