"""Answers that come later: rows that wait stop no environment, and a late answer is only for its own row."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from late_policy import Now

from rl_eval import EvalConfig, evaluate
from rl_eval.config.settings import PolicySection
from rl_eval.errors import PolicyError
from rl_eval.policies.inference.inference import RowInference
from rl_eval.protocols import Answer

BOX = gym.spaces.Box(-9, 9, (3,), np.float32)
ACTIONS = gym.spaces.Box(-2, 2, (1,), np.float32)


def config(policy: str, runner: str, lanes: int, *, deterministic: bool) -> EvalConfig:
    made = EvalConfig().environment("Pendulum-v1").policy(f"late_policy:{policy}", deterministic=deterministic)
    made.runners(runner=runner, num_envs_per_runner=lanes)
    return made.evaluation(num_episodes=8, max_episode_steps=25)


@pytest.mark.process
@pytest.mark.parametrize("deterministic", [True, False])
def test_records_do_not_depend_on_the_time_of_answers(deterministic: bool) -> None:
    expected = evaluate(config("now", "vector", 4, deterministic=deterministic)).fingerprint
    for runner, lanes in (("subprocess", 4), ("subprocess", 1), ("vector", 4)):
        found = evaluate(config("late", runner, lanes, deterministic=deterministic))
        assert (found.fingerprint, found.status) == (expected, "complete")
        assert found.determinism.checked > 0 == len(found.determinism.mismatched)


@pytest.mark.process
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "chunk", [(4, 0), (3, 2), (4, 4), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 0), (5, 1)))]
)
def test_records_with_chunks_do_not_depend_on_the_time_of_answers(chunk: tuple[int, int], deterministic: bool) -> None:
    """The policy in the process has the same records, and it is asked as often."""

    def made(policy: str, runner: str, lanes: int) -> EvalConfig:
        execute, delay = chunk
        configured = config(policy, runner, lanes, deterministic=deterministic)
        return configured.policy(chunk={"execute": execute, "delay": delay}).evaluation(num_episodes=6)

    expected = evaluate(made("now_chunks", "vector", 2)).fingerprint
    for runner, lanes in (("subprocess", 3), ("vector", 3)):
        found = evaluate(made("late_chunks", runner, lanes))
        assert (found.fingerprint, found.status) == (expected, "complete")
        assert found.determinism.checked > 0 == len(found.determinism.mismatched)


class Held(Now):
    """Policy whose answers a test releases."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.answers: list[Answer] = []
        self.gone: list[float] = []
        self.refuses = float("nan")

    def send(self, observations: Any, state: Any, noise: Any) -> int:
        if self.refuses in observations:
            raise ValueError("not finite")
        self.sent.append((observations, state, noise))
        return len(self.sent)

    def release(self, request: int) -> None:
        self.answers.append(Answer(request, *self.act(*self.sent[request - 1][:2], None, self.sent[request - 1][2])))

    def received(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def fileno(self) -> int:
        return 0

    def ended(self, state: Any) -> None:
        self.gone.append(float(state.sum()))


def held(lanes: int = 3) -> tuple[Held, RowInference]:
    policy = Held()
    inference = RowInference(policy, BOX, ACTIONS, lanes, PolicySection(deterministic=False))
    assert inference.defer() is not None
    for lane in range(lanes):
        inference.begin(lane, seed=lane)
        inference.observations.write(lane, np.full(3, lane, np.float32))
    return policy, inference


def test_an_answer_for_a_lane_that_began_again_is_dropped() -> None:
    """The other lanes of the request get theirs; the state of the new episode stays new."""
    policy, inference = held()
    inference.ask([0, 1])
    inference.ask([2])
    inference.end(1)
    inference.begin(1, seed=9)
    policy.release(1)
    lanes, actions, errors = inference.answered()
    assert (list(lanes), errors, inference.requests.awaited) == ([0], {}, 1)
    assert np.shape(actions[0]) == (1,)
    inference.ask([1])
    assert policy.sent[2][1].tolist() == [[0.0] * 4]
    assert policy.sent[2][2].steps.tolist() == [0]
    policy.release(3)
    policy.release(2)
    assert sorted(inference.answered()[0]) == [1, 2]
    assert inference.answered()[0] == []
    assert inference.requests.awaited == 0


def test_an_ended_episode_is_told_to_the_policy_once() -> None:
    policy, inference = held(1)
    inference.ask([0])
    policy.release(1)
    inference.answered()
    inference.end(0)
    inference.end(0)
    assert len(policy.gone) == 1


def test_rows_of_a_failed_request_are_sent_again_alone() -> None:
    """One bad observation uses up an attempt of its own episode only, and the noise of the others does not advance."""
    policy, inference = held()
    inference.ask([0, 1, 2])
    policy.answers.append(Answer(1, error=PolicyError("no", key="act")))
    assert inference.answered()[0] == []
    assert [sent[2].steps.tolist() for sent in policy.sent] == [[0, 0, 0], [0], [0], [0]]
    assert [sent[0][:, 0].tolist() for sent in policy.sent[1:]] == [[0], [1], [2]]
    policy.answers.append(Answer(3, np.zeros((1, 7))))
    policy.release(2)
    policy.release(4)
    lanes, _, errors = inference.answered()
    assert (sorted(lanes), [*errors]) == ([0, 1, 2], [1])
    assert isinstance(errors[1], PolicyError)


def test_a_request_that_cannot_be_sent_is_an_error_of_its_row() -> None:
    policy, inference = held()
    policy.refuses = 1.0
    inference.ask([0, 1, 2])
    assert inference.answered()[0] == [1]
    assert [len(sent[0]) for sent in policy.sent] == [1, 1]


def test_rows_of_a_request_are_answered_one_by_one() -> None:
    """A second answer to a row, and an answer to an unknown request, change nothing."""
    policy, inference = held()
    inference.ask([2, 0, 1])
    policy.release(1)
    whole = policy.answers.pop()
    for row, found in ((1, [0]), (1, []), (0, [2])):
        policy.answers += [Answer(1, whole.actions[[row]], whole.state[[row]], rows=[row]), Answer(9, whole.actions)]
        assert inference.answered()[0] == found
    state = np.array(inference._state)
    policy.answers.append(whole)
    assert inference.answered()[0] == [1]
    assert inference.requests.awaited == 0
    assert np.array_equal(state[[0, 2]], inference._state[[0, 2]])


def test_a_policy_learns_of_the_end_before_its_first_answer() -> None:
    """Its answer carries the state by which the policy knows the episode."""
    policy, inference = held(1)
    inference.ask([0])
    inference.end(0)
    assert policy.gone == [0.0]
    policy.release(1)
    expected = float(policy.answers[0].state.sum())
    assert inference.answered()[0] == []
    assert policy.gone == [0.0, expected]
