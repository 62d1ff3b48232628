"""Answers that come later: rows that wait stop no environment, and a late answer is only for its own row."""

from __future__ import annotations

import math
import random
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from late_policy import Chunked, Now

from rl_eval import EvalConfig, evaluate
from rl_eval.config.settings import PolicySection
from rl_eval.errors import PolicyError
from rl_eval.policies import adapt_policy
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.late import Requests
from rl_eval.policies.normalization import NormalizedPolicy, by_path
from rl_eval.protocols import Answer
from rl_eval.runners import vector

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

    server = ""

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
        observations, state, noise = self.sent[request - 1]
        self.answers.append(Answer(request, *self.act(observations, state, None, noise and noise.take(slice(None)))))

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


class HeldChunks(Held, Chunked):
    """Policy with chunks whose answers a test releases."""


class Story:
    """Random story of a few lanes: requests, answers in any order, some of them twice, and episodes given up."""

    def __init__(self, number: int, chunk: dict[str, int] | None, lanes: int = 3) -> None:
        self.section = PolicySection(deterministic=False, chunk=chunk)
        self.policy = Held() if chunk is None else HeldChunks()
        self._random, self._lanes = random.Random(number), range(lanes)
        self._inference = self._inference_of(self.policy, lanes)
        assert self._inference.defer() is not None
        self._seeds, self._actions = [0] * lanes, [list[float]() for _ in self._lanes]
        self._left: dict[int, list[int]] = {}
        self.ended: list[tuple[int, list[float]]] = []
        for lane in self._lanes:
            self._begin(lane)

    def _inference_of(self, policy: Any, lanes: int) -> RowInference:
        return RowInference(adapt_policy(self.section, BOX, ACTIONS, policy), BOX, ACTIONS, lanes, self.section)

    def _begin(self, lane: int) -> None:
        self._seeds[lane], self._actions[lane] = self._random.randrange(5), []
        self._inference.begin(lane, self._seeds[lane])
        self._see(self._inference, lane, self._seeds[lane], self._actions[lane])

    @staticmethod
    def _see(inference: RowInference, lane: int, seed: int, actions: list[float]) -> None:
        seen = np.float32([seed, len(actions), sum(actions)])
        inference.observations.write(lane, np.sin(seen))

    def play(self, turns: int = 400) -> None:
        for _ in range(turns):
            turn = self._random.random()
            if turn < 0.05:
                lane = self._random.choice(self._lanes)
                self._inference.end(lane)
                self._begin(lane)
            elif turn < 0.4:
                self._ask()
            elif turn < 0.8:
                self._release()
            self._take()

    def _ask(self) -> None:
        assert self._inference.requests is not None
        ready = [lane for lane in self._lanes if not self._inference.requests.waiting[lane]]
        if ready:
            self._inference.ask(self._random.sample(ready, self._random.randint(1, len(ready))))
        for request in range(max(self._left, default=0) + 1, len(self.policy.sent) + 1):
            self._left[request] = list(range(len(self.policy.sent[request - 1][0])))

    def _release(self) -> None:
        if pending := [request for request, rows in self._left.items() if rows]:
            request = self._random.choice(pending)
            rows = self._random.sample(self._left[request], self._random.randint(1, len(self._left[request])))
            self.policy.release(request)
            whole = self.policy.answers.pop()
            answer = Answer(request, whole.actions[rows], whole.state[rows], rows=rows)
            self.policy.answers += [answer] * self._random.choice([1, 1, 2])
            self._left[request] = [row for row in self._left[request] if row not in rows]

    def _take(self) -> None:
        lanes, actions, errors = self._inference.answered()
        assert not errors
        for lane in lanes:
            self._actions[lane].append(float(actions[lane][0]))
            if len(self._actions[lane]) == 9:
                self.ended.append((self._seeds[lane], self._actions[lane]))
                self._inference.end(lane)
                self._begin(lane)
            self._see(self._inference, lane, self._seeds[lane], self._actions[lane])

    def expected(self, seed: int) -> list[float]:
        """Return the actions of an episode with the policy in the process."""
        inference = self._inference_of(Now() if self.section.chunk is None else Chunked(), 1)
        inference.begin(0, seed)
        actions: list[float] = []
        while len(actions) < 9:
            self._see(inference, 0, seed, actions)
            actions.append(float(inference.act()[0][0][0]))
        return actions


CHUNKS = [None, *({"execute": execute, "delay": delay} for execute, delay in ((1, 0), (1, 1), (3, 0), (3, 2), (4, 4)))]


def differing(chunk: dict[str, int] | None, stories: int) -> int:
    """Return the number of episodes that differ from those of the policy in the process."""
    count = found = 0
    for number in range(stories):
        story = Story(number, chunk)
        story.play()
        expected = [story.expected(seed) for seed in range(5)]
        found += sum(actions != expected[seed] for seed, actions in story.ended)
        count += len(story.ended)
    assert count > 2 * stories
    return found


@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_order_of_answers_gives_the_same_actions(chunk: dict[str, int] | None) -> None:
    assert differing(chunk, 15) == 0


def state_of_all_rows(patch: pytest.MonkeyPatch) -> None:
    taken = RowInference._taken

    def also(inference: RowInference, received: Any) -> Any:
        inference._keep_state(received.request.lanes[received.rows], received.answer.state)
        return taken(inference, received)

    patch.setattr(RowInference, "_taken", also)


def noise_twice(patch: pytest.MonkeyPatch) -> None:
    send = RowInference._send

    def twice(inference: RowInference, requests: Requests, lanes: Any) -> None:
        send(inference, requests, lanes)
        inference._steps[lanes[:1]] += 1

    patch.setattr(RowInference, "_send", twice)


def answer_of_another_attempt(patch: pytest.MonkeyPatch) -> None:
    ask = Requests.ask

    def same_number(requests: Requests, lanes: Any, *rest: Any) -> None:
        requests._numbers[lanes] = 0
        ask(requests, lanes, *rest)

    patch.setattr(Requests, "ask", same_number)


@pytest.mark.parametrize("chunk", [None, {"execute": 3, "delay": 2}])
@pytest.mark.parametrize("bug", [state_of_all_rows, noise_twice, answer_of_another_attempt])
def test_a_planted_fault_is_seen(bug: Any, chunk: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert differing(chunk, 15) > 0


def test_a_chunk_is_awaited_at_its_delay() -> None:
    """Until then, actions of the former chunk answer at once; the chunk of an episode that ended is dropped."""
    section = PolicySection(chunk={"execute": 3, "delay": 2})
    policy = HeldChunks()
    inference = RowInference(adapt_policy(section, BOX, ACTIONS, policy), BOX, ACTIONS, 1, section)
    assert inference.defer() is not None
    for _ in range(2):
        sent = len(policy.sent)
        inference.begin(0, seed=0)
        waits = []
        for step in range(6):
            inference.ask([0])
            found = inference.answered()[0]
            waits.append(not found)
            if not found:
                policy.release(len(policy.sent))
                assert inference.answered()[0] == [0]
            assert len(policy.sent) - sent == 1 + step // 3
        assert waits == [True, False, False, False, False, True]
        inference.ask([0])
        inference.end(0)
    policy.release(len(policy.sent))
    assert inference.answered()[0] == []


class Oldest(Held):
    """Policy that answers the oldest request when it is asked for answers."""

    sizes: ClassVar[list[int]] = []
    """Numbers of rows of the requests, in the order of the answers."""

    def received(self) -> list[Answer]:
        if len(self.gone) < len(self.sent):
            self.gone.append(0.0)
            self.release(len(self.gone))
            Oldest.sizes.append(len(self.sent[len(self.gone) - 1][0]))
        return super().received()

    def ended(self, state: Any) -> None:
        return None


@pytest.mark.parametrize(("slow_s", "later"), [(0.0, {1}), (math.inf, {4})])
def test_rows_of_slow_steps_are_sent_while_other_slots_step(
    slow_s: float, later: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector, "SLOW_S", slow_s)
    Oldest.sizes.clear()
    made = config("now", "vector", 4, deterministic=False).evaluation(determinism_check=0)
    assert evaluate(made, Oldest()).fingerprint == evaluate(made).fingerprint
    assert Oldest.sizes[0] == 4
    assert set(Oldest.sizes[1:]) == later


def test_the_time_of_late_answers_is_reported() -> None:
    made = config("late", "vector", 4, deterministic=True)
    assert evaluate(made).timing.waiting
    assert not evaluate(config("now", "vector", 4, deterministic=True)).timing.waiting


def test_a_normalized_policy_answers_later() -> None:
    section = PolicySection(deterministic=False)
    statistics = by_path(mean=np.full(3, 0.5), var=np.full(3, 4.0))
    policy = Held()
    found = NormalizedPolicy(policy, lambda: statistics)
    inference = RowInference(found, BOX, ACTIONS, 1, section)
    assert inference.defer() is not None
    inference.begin(0, seed=3)
    inference.observations.write(0, np.float32([1, 2, 3]))
    inference.ask([0])
    policy.release(1)
    lanes, actions, _ = inference.answered()
    local = RowInference(NormalizedPolicy(Now(), lambda: statistics), BOX, ACTIONS, 1, section)
    local.begin(0, seed=3)
    local.observations.write(0, np.float32([1, 2, 3]))
    assert (list(lanes), actions[0].tolist()) == ([0], local.act()[0][0].tolist())
    assert found.server == policy.server
    inference.end(0)
    assert len(policy.gone) == 1
