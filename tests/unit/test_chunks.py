"""Action chunks: the episodes are those of a loop by hand, and the policy is asked once per ``execute`` steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents_world import Crowd, by_kind
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from typing_extensions import override

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.cli.checks import check_policy
from rl_eval.errors import ConfigError, LogMismatch, PolicyError
from rl_eval.wrappers import Normalized
from tests.chunk_world import (
    CASES,
    HORIZON,
    Answer,
    Arm,
    Asked,
    by_hand,
    by_hand_of,
    config,
    make_net,
    net_answer,
    numpy_answer,
    plan_ahead,
    played,
    sampled_answer,
)
from tests.refused import refused, untold

ANSWERS: dict[str, tuple[Answer, dict[str, Any]]] = {
    "numpy": (numpy_answer, {"policy": plan_ahead}),
    "torch": (net_answer, {}),
    "sampled": (sampled_answer, {"policy_kwargs": {"sampled": True}, "deterministic": False}),
}


@pytest.mark.parametrize(("execute", "delay"), CASES)
@pytest.mark.parametrize("kind", ANSWERS)
def test_episodes_are_those_of_a_loop_by_hand(kind: str, execute: int, delay: int) -> None:
    """With as many lanes as a pass has rows, and with one or more."""
    answer, policy = ANSWERS[kind]
    results = [evaluate(config(execute, delay, lanes).policy(**policy)) for lanes in (1, 8, 20)]
    assert played(results[0]) == by_hand_of(results[0], execute, delay, answer)
    assert len({result.fingerprint for result in results}) == 1
    assert all(result.determinism.passed for result in results)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("execute", "delay"),
    [case if case in [(4, 3), (4, 4)] else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_slots_in_processes_of_their_own(kind: str, execute: int, delay: int) -> None:
    """They ask one by one, so that the rows of a pass are due at different times."""
    answer, policy = ANSWERS[kind]
    result = evaluate(config(execute, delay, 3, runner="subprocess").policy(**policy).evaluation(determinism_check=0))
    assert played(result) == by_hand_of(result, execute, delay, answer)


@pytest.mark.parametrize(("execute", "delay"), CASES)
def test_the_policy_is_asked_once_per_execute_steps(execute: int, delay: int) -> None:
    """The rows of the later episodes are counted, because the probe needs as many for any number of episodes."""
    rows, results = [], []
    for count in (5, 20):
        Asked.counts.clear()
        made = config(execute, delay, lanes=1).evaluation(num_episodes=count, determinism_check=0)
        results.append(evaluate(made, Asked()))
        rows.append(sum(Asked.counts))
    lengths = [one.length for one in results[1].episodes][5:]
    assert any(length % execute for length in lengths) or execute == 1
    assert rows[1] - rows[0] == sum(math.ceil(length / execute) for length in lengths)


def test_a_pass_without_a_row_that_is_due_is_not_made() -> None:
    """All lanes begin together, and no episode ends within the steps that are counted."""
    passes = []
    for steps in (1, 8, 9):
        Asked.counts.clear()
        made = config(8, 0, lanes=4).evaluation(num_episodes=4, max_episode_steps=steps, determinism_check=0)
        evaluate(made.environment(Endless), Asked())
        passes.append(len(Asked.counts))
    assert passes == [passes[0], passes[0], passes[0] + 1]


class Endless(Arm):
    """Arm whose episodes do not end."""

    @override
    def reset(self, **keywords: Any) -> Any:
        found = super().reset(**keywords)
        self.length = 10**6
        return found


def test_a_network_may_return_chunks_of_discrete_actions() -> None:
    """Logits of eight actions per row; the draws of a step are those of its seed, as in a loop by hand."""

    class Moves(Arm):
        action_space = gym.spaces.Discrete(3, start=5)

        @override
        def step(self, action: Any) -> Any:
            return super().step(np.array([action - 6.0, 0.0]))

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, HORIZON * 3), torch.nn.Unflatten(1, (HORIZON, 3)))
    for deterministic in (True, False):
        made = [config(4, 3, lanes).environment(Moves).policy(deterministic=deterministic) for lanes in (1, 20)]
        results = [evaluate(one, net) for one in made]
        assert results[0].fingerprint == results[1].fingerprint
        assert results[0].determinism.passed


def test_the_state_of_a_recurrent_policy_advances_only_with_its_answers() -> None:
    """It adds up what it is asked for, which a loop by hand does as well."""

    class Sums:
        def initial_state(self, batch_size: int) -> Any:
            return torch.zeros(batch_size, 4)

        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
            state += torch.as_tensor(observations)  # In place: rows that are not due keep theirs nevertheless.
            return plan_ahead(state.numpy()), state

    def loop(seed: int) -> tuple[float, int]:
        total = np.zeros((16, 4), np.float32)

        def answer(observations: Any, noise: Any) -> Any:
            total[...] += observations
            return plan_ahead(total)

        return by_hand(seed, 4, 3, answer)

    result = evaluate(config(4, 3), Sums())
    assert played(result) == [loop(one.seed) for one in result.episodes]


def test_observations_are_normalized_before_the_policy_is_asked() -> None:
    mean, var = np.arange(4.0), np.full(4, 2.0)

    def answer(observations: Any, noise: Any) -> Any:
        return plan_ahead(((observations - mean) / np.sqrt(var + 1e-8)).astype(np.float32))

    result = evaluate(config(4, 3), Normalized(plan_ahead, mean, var))
    assert played(result) == by_hand_of(result, 4, 3, answer)


def test_a_policy_may_have_no_state() -> None:
    """An adapter of a library returns None for a model without memory."""

    class Stateless(Asked):
        def initial_state(self, batch_size: int) -> None:
            return None

    result = evaluate(config(4, 3), Stateless())
    assert played(result) == by_hand_of(result, 4, 3, numpy_answer)


@pytest.mark.parametrize("inference", ["exact", "batched"])
def test_a_batched_runner(inference: str) -> None:
    made = config(4, 3, lanes=3, runner="batched").policy(inference=inference)
    made.environment(lambda num_envs: SyncVectorEnv([Arm] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP))
    result = evaluate(made, plan_ahead)
    assert played(result) == by_hand_of(result, 4, 3, numpy_answer)


def test_blocks_of_episodes() -> None:
    """The width decides about them, as it does without chunks."""
    made = config(4, 3, lanes=3, runner="batched", block=2)
    made.environment(lambda num_envs: SyncVectorEnv([Arm] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP))
    results = [evaluate(made, plan_ahead) for _ in range(2)]
    assert results[0].fingerprint == results[1].fingerprint
    assert [result.determinism.passed for result in results] == [True, True]


def test_agents_with_and_without_chunks() -> None:
    """The chunk of an agent begins with its own first step, whenever it comes."""

    def later(body: Any) -> Any:
        return (np.abs(body[:, :1] * 7 + np.arange(4)) % 4).astype(int)

    def at_once(body: Any) -> Any:
        return later(body)[:, 0]

    def by_hand_of_all(seed: int) -> float:
        world = Crowd()
        seen, total, asked = world.reset(seed=seed)[0], 0.0, dict[str, tuple[int, dict[int, Any]]]()
        while world.agents:
            actions = {}
            for agent in world.agents:
                age, chunks = asked.get(agent, (0, {}))
                if age % 2 == 0:
                    chunks[age] = later(seen[agent][None])[0]
                used = max((one for one in chunks if one + 1 <= age), default=0)
                actions[agent] = chunks[used][age - used] if "hawk" in agent else at_once(seen[agent][None])[0]
                asked[agent] = age + 1, chunks
            seen, rewards, *_ = world.step(actions)
            total += sum(rewards.values())
        return total

    made = EvalConfig().environment(Crowd).evaluation(num_episodes=20)
    policies = {"hawk": {"policy": later, "chunk": {"execute": 2, "delay": 1}}, "dove": at_once}
    made.policy(policies=policies, policy_mapping_fn=by_kind)
    results = [evaluate(made.runners(num_envs_per_runner=lanes)) for lanes in (1, 5)]
    assert results[0].fingerprint == results[1].fingerprint
    found = [one.episode_return for one in results[0].episodes]
    assert found == pytest.approx([by_hand_of_all(one.seed) for one in results[0].episodes])


def test_a_failure_costs_no_more_than_the_attempt_of_its_row(tmp_path: Path) -> None:
    """The policy fails once in the middle of some episodes, and the environment in others."""
    seen = set[bytes]()

    def fails(observations: Any) -> Any:
        for row in observations:
            if row[0] > 1.5 and row.tobytes() not in seen:
                seen.add(row.tobytes())
                raise RuntimeError("out of memory")
        return plan_ahead(observations)

    made = config(4, 3).policy(chunk={"execute": 4, "delay": 3, "horizon": 8})
    whole = evaluate(made, plan_ahead)
    result = evaluate(made.fault_tolerance(max_attempts_per_episode=20), fails)
    assert result.faults
    assert result.status == "complete"
    assert played(result) == played(whole)


def test_the_chunk_belongs_to_the_evaluation(tmp_path: Path) -> None:
    """A log is not continued with another one, and results name it. The length of a chunk is the policy's."""
    made = config(4, 3).policy(plan_ahead)
    first = evaluate(made, output=tmp_path)
    assert first.provenance["config"]["policy"]["chunk"] == {"execute": 4, "delay": 3, "horizon": None}
    with refused(LogMismatch):
        evaluate(config(4, 4).policy(plan_ahead), output=tmp_path)
    same = made.policy(chunk={"execute": 4, "delay": 3, "horizon": 8})
    assert evaluate(same, output=tmp_path).fingerprint == first.fingerprint


# ------------------------------------------------------------------------------ what is refused


WRONG = {
    "a delay above execute": {"execute": 3, "delay": 4},
    "too many steps": {"execute": 9},
    "too long a delay": {"execute": 5, "delay": 4},
    "a delay above half a chunk": {"delay": 5},
}


@pytest.mark.parametrize("chunk", WRONG.values(), ids=WRONG)
def test_a_chunk_that_does_not_fit_is_an_error_with_its_horizon(chunk: dict[str, int]) -> None:
    with refused(ConfigError, "policy.chunk") as caught:
        evaluate(config(1, 0).policy(chunk=chunk), plan_ahead)
    assert not untold(str(caught.value), HORIZON, *chunk.values())


@pytest.mark.parametrize(
    ("chunk", "key"),
    [(8, "policy.chunk"), ({"execute": 0}, "policy.chunk.execute"), ({"steps": 3}, "policy.chunk.steps")],
)
def test_a_value_that_is_no_chunk_names_its_key(chunk: Any, key: str) -> None:
    with refused(ConfigError, key):
        EvalConfig().environment(Arm).policy(chunk=chunk).build()


@pytest.mark.parametrize("policy", [plan_ahead, make_net()])
def test_chunks_without_the_key_are_an_error_that_proposes_it(policy: Any) -> None:
    """The proposed value works."""
    made = config(8, 0).policy(chunk=None)
    with refused(PolicyError) as caught:
        evaluate(made, policy)
    assert "policy.chunk: {execute: 8}" in caught.value.fix
    assert evaluate(made.policy(chunk={"execute": 8}), policy).status == "complete"


def test_actions_that_are_no_chunks_are_an_error() -> None:
    for act in (lambda seen: np.zeros((len(seen), 2)), lambda seen: np.zeros((len(seen), 8, 3))):
        with refused(PolicyError, "action"):
            evaluate(config(1, 0), act)
    with refused(PolicyError, "action", value="(16, 8, 2)"):
        evaluate(config(1, 0).policy(chunk={"execute": 1, "horizon": 4}), plan_ahead)


@pytest.mark.parametrize("horizon", [HORIZON, 16])
@pytest.mark.parametrize("section", [{}, {"horizon": HORIZON}])
def test_a_chunk_before_the_batch_is_named(horizon: int, section: dict[str, int]) -> None:
    """With 16 actions, the shape is that of a batch of chunks, and only a single observation shows it."""
    if section and horizon == 16:
        section = {"horizon": 16}

    def swapped(observations: Any) -> Any:
        return np.repeat(observations[None, :, :1], horizon, axis=0)

    with pytest.raises((ConfigError, PolicyError)) as caught:
        evaluate(EvalConfig().environment("Pendulum-v1").policy(chunk=section), swapped)
    assert "swapaxes" in caught.value.fix
    assert caught.value.key in ("action", "policy.policy")


def test_a_policy_that_rejects_generated_observations_needs_the_horizon() -> None:
    def strict(observations: Any) -> Any:
        if not (np.abs(observations[:, 2:]) < 5).all() or not observations.any(1).all() or len(observations) == 16:
            raise ValueError("not an observation of this robot")
        return plan_ahead(observations)

    with refused(ConfigError, "policy.chunk.horizon"):
        evaluate(config(4, 3), strict)
    result = evaluate(config(4, 3).policy(chunk={"execute": 4, "delay": 3, "horizon": 8}), strict)
    assert played(result) == by_hand_of(result, 4, 3, numpy_answer)


def test_a_function_of_one_observation_is_recognized() -> None:
    with refused(PolicyError, "policy.policy"):
        evaluate(config(4, 3), lambda seen: plan_ahead(np.array([list(map(float, seen))]))[0])


# ------------------------------------------------------------------------------ objects of other libraries


class Queue:
    """An object with a queue of actions for one episode, as those of LeRobot."""

    def select_action(self, batch: Any) -> Any:
        raise AssertionError

    def reset(self) -> None:
        raise AssertionError


class QueueNet(Queue, torch.nn.Module):
    """The same as a module, whose ``forward`` returns the loss of a training."""

    @override
    def forward(self, batch: Any) -> Any:
        return torch.zeros(()), {}


@pytest.mark.parametrize("policy", [Queue(), QueueNet()])
def test_an_object_with_a_queue_of_actions_is_refused(policy: Any) -> None:
    with refused(ConfigError, "policy.policy", value=type(policy).__name__) as caught:
        evaluate(config(4, 3), policy)
    assert "predict_action_chunk" in caught.value.fix


class Predicts(Queue):
    """An object that is asked for whole chunks, with a batch of tensors."""

    def predict_action_chunk(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(plan_ahead(batch.numpy()))


class PredictsNet(QueueNet):
    """The same as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def predict_action_chunk(self, batch: torch.Tensor) -> torch.Tensor:
        chunks: torch.Tensor = self.net(batch)
        return chunks


@pytest.mark.parametrize(("policy", "answer"), [(Predicts(), numpy_answer), (PredictsNet(), net_answer)])
def test_an_object_that_predicts_chunks_is_a_chunk_policy(policy: Any, answer: Answer) -> None:
    result = evaluate(config(4, 3), policy)
    assert played(result) == by_hand_of(result, 4, 3, answer)


def test_weights_reach_a_policy_of_chunks() -> None:
    other = make_net()
    with torch.no_grad():
        other.body[2].bias += 0.3
    with EvalRunnerGroup(config(4, 3)) as group:
        group.sync_weights(other.state_dict())
        result = group.evaluate()

    def answer(observations: Any, noise: Any) -> Any:
        return other(torch.from_numpy(observations)).numpy()

    with torch.no_grad():
        assert played(result) == by_hand_of(result, 4, 3, answer)


# ------------------------------------------------------------------------------ rl-eval doctor


def proposals(made: EvalConfig) -> list[str]:
    return [f"{found.text} {found.fix}" for found in check_policy(made.build()) if "chunk" in found.text]


def test_doctor_measures_a_request_only_for_chunks() -> None:
    [found] = proposals(config(4, 0))
    assert "policy.chunk" in found
    assert not proposals(config(4, 0).policy(lambda seen: plan_ahead(seen)[:, 0], chunk=None))
