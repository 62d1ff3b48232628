"""A policy on a server, whose process is killed while episodes run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pyarrow.parquet as pq
import pytest

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.errors import PolicyUnavailable
from rl_eval.log import read_log, writer
from rl_eval.protocols import EnvContext
from rl_eval.records.episode import Outcome
from rl_eval.records.parquet import read_episodes
from rl_eval.results.loading import load
from tests.refused import refused, untold
from tests.remote_policy import Remote, Reporting, Server

pytestmark = pytest.mark.process

EPISODES, STRUCK = 12, 7


Strikes = dict[tuple[int, int], Callable[[], object]]
"""What happens to the server, once, by episode and step; step 0 is the end of the episode."""


STRIKES: Strikes = {}


class _Strikes(gym.Wrapper[Any, Any, Any, Any]):
    """Finished episodes are reported before something happens."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(gym.make("CartPole-v1", max_episode_steps=60))
        self._index, self._steps = -1, 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self._index, self._steps = index, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if (self._index, self._steps + 1) in STRIKES:
            time.sleep(0.2)  # Longer than a slice, so the runner reports next.
        self._strike(self._steps)
        step = super().step(action)
        if step[2] or step[3]:
            self._strike(0)
        return step

    def _strike(self, step: int) -> None:
        if strike := STRIKES.pop((self._index, step), None):
            strike()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


def config(
    policy: Any, strike: Callable[[], object] | Strikes | None = None, lanes: int = 3, **faults: Any
) -> EvalConfig:
    STRIKES.clear()
    STRIKES.update({(STRUCK, 3): strike} if callable(strike) else strike or {})
    return (
        EvalConfig()
        .environment(_Strikes)
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


OTHER = -1.0
"""Gain of another policy."""


def replaced(server: Server, gain: float = OTHER) -> Callable[[], None]:
    """Return a function that replaces the server by one with another policy, or with the same."""

    def swap() -> None:
        server.kill()
        server.start(gain)

    return swap


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


def test_episodes_before_the_first_segment_of_the_log_are_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is partial, as without a log, and the same call continues the folder."""
    expected = undisturbed(server).fingerprint
    monkeypatch.setattr(writer, "FLUSH_SECONDS", (3600.0, 3600.0))
    result = evaluate(config(Remote(server.port), server.kill, 1, max_runner_restarts=0), output=tmp_path)
    assert (result.status, len(result.episodes)) == ("partial", STRUCK)
    server.start()
    result = evaluate(config(Remote(server.port), lanes=1), output=tmp_path)
    assert (result.status, result.fingerprint) == ("complete", expected)


def test_a_server_that_was_never_there_is_the_error_of_the_policy(server: Server) -> None:
    server.kill()
    with refused(PolicyUnavailable, "port"):
        evaluate(config(Remote(server.port), max_runner_restarts=1))


# ------------------------------------------------------------------------------ one policy for all episodes


def digests(server: Server) -> list[str]:
    """Return the digests of the outputs of both policies, and start the first."""
    found = []
    for gain in (OTHER, 1.0):
        replaced(server, gain)()
        found.append(undisturbed(server).provenance["numerics"]["outputs"])
    return found


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("policy", [Remote, Reporting])
def test_a_server_with_another_policy_is_noticed(server: Server, policy: type[Remote], lanes: int) -> None:
    """No episode since the last probe counts, whether or not the policy reports that it connects again."""
    other, first = digests(server)
    result = evaluate(config(policy(server.port, 60.0), replaced(server), lanes))
    assert (result.status, len(result.episodes)) == ("partial", 0)
    assert not untold(result.reason, other, first)
    assert not untold("".join(result.provenance["notes"]), other, first)
    assert not result.determinism.checked


def test_a_server_with_the_same_policy_is_the_same(server: Server) -> None:
    """After a reported connection, the episodes before it are known to be of the policy."""
    expected = undisturbed(server)
    for policy in (Remote, Reporting):
        result = evaluate(config(policy(server.port, 60.0), replaced(server, 1.0)))
        assert (result.status, result.fingerprint) == ("complete", expected.fingerprint)
        assert result.provenance["notes"] == expected.provenance["notes"]


def test_episodes_before_an_equal_probe_count(server: Server) -> None:
    """A reported connection to the same policy proves the episodes before it, and only later ones are set aside."""
    strikes: Strikes = {(STRUCK, 3): replaced(server, 1.0), (STRUCK + 2, 3): replaced(server)}
    full = undisturbed(server)
    result = evaluate(config(Reporting(server.port, 60.0), strikes, 1))
    assert result.status == "partial"
    assert [record.index for record in result.episodes] == list(range(STRUCK))
    assert result.table.outcomes(slice(STRUCK)).tobytes() == full.table.outcomes(slice(STRUCK)).tobytes()
    assert result.table.set_aside.sum() > 0


def test_what_is_set_aside_stays_in_the_log_and_runs_again(server: Server, tmp_path: Path) -> None:
    """With the first policy, the run that continues has the result of the undisturbed run."""
    full = undisturbed(server)
    result = evaluate(config(Remote(server.port, 60.0), replaced(server)), output=tmp_path)
    assert result.status == "partial"
    found, kept = read_log(tmp_path), load(tmp_path)
    assert (len(found.rows), len(found.set_aside)) == (0, EPISODES)
    assert (kept.status, len(kept.episodes)) == ("partial", 0)
    written = [read_episodes(pq.read_table(path))[0] for path in tmp_path.glob("segments/*-episodes-*")]
    assert sum(int((rows["outcome"] == Outcome.COMPLETED).sum()) for rows in written) == EPISODES
    replaced(server, 1.0)()
    again = evaluate(config(Remote(server.port, 60.0)), output=tmp_path)
    assert (again.status, again.fingerprint) == ("complete", full.fingerprint)
    assert load(tmp_path).fingerprint == full.fingerprint
    assert not again.audit_mismatches


def test_a_group_whose_server_was_replaced_between_evaluations_goes_on(server: Server) -> None:
    """A policy that reports connections is probed again at the first call; each result has one policy."""
    other, first = digests(server)
    with EvalRunnerGroup(config(Reporting(server.port, 60.0))) as group:
        one = group.evaluate()
        replaced(server)()
        two = group.evaluate()
    assert [one.status, two.status] == ["complete", "complete"]
    assert [result.provenance["numerics"]["outputs"] for result in (one, two)] == [first, other]


def test_a_server_that_is_away_at_the_end_is_a_note(server: Server) -> None:
    """The result is complete; that its policy was not checked is said."""
    result = evaluate(config(Remote(server.port), {(EPISODES - 1, 0): server.kill}, 1))
    assert result.status == "complete"
    assert any(str(server.port) in note for note in result.provenance["notes"])
