"""Configs of RLlib with several agents as ours: its modules act as they do in RLlib, each for its own agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ormsgpack")  # ray.rllib comes with ray; this comes with ray[rllib] alone.

import gymnasium as gym
import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.connectors.env_to_module import (
    FlattenObservations,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule, MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole, MultiAgentPendulum
from rllib_worlds import pipelines_of, ppo, saved

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.integrations.rllib import (
    as_policies,
    as_weights,
    eval_config_of,
    evaluation_function,
    portable,
    session_of,
)
from rl_eval.integrations.rllib.policy import Pipelines
from tests.refused import refused

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

LOADER = "rl_eval.integrations.rllib:load_policy"
DETERMINISTIC = {"explore": False, "num_envs_per_env_runner": 16}


def by_parity(agent_id: int, episode: Any, **kwargs: Any) -> str:
    return ("even", "odd")[agent_id % 2]


def several(env: Any, num_agents: int, connector: Any = None, mapping: Any = by_parity) -> PPOConfig:
    """Two modules of different sizes."""
    modules = {
        "even": RLModuleSpec(model_config={"fcnet_hiddens": [16]}),
        "odd": RLModuleSpec(model_config={"fcnet_hiddens": [24, 8]}),
    }
    return (
        ppo(env, connector)
        .environment(env, env_config={"num_agents": num_agents})
        .multi_agent(policies=set(modules), policy_mapping_fn=mapping)
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=modules))
        .debugging(seed=2)
        .evaluation(
            evaluation_interval=1,
            evaluation_duration=12,
            evaluation_config=DETERMINISTIC,
            custom_evaluation_function=evaluation_function(),
        )
    )


def filters(env: Any = None, spaces: Any = None, device: Any = None) -> Any:
    return [FlattenObservations(multi_agent=True), MeanStdFilter(multi_agent=True)]


@pytest.fixture(scope="module")
def cartpoles(ray_cluster: None, tmp_path_factory: Any) -> Iterator[tuple[PPO, Path]]:
    """Three agents, two of which share a module."""
    yield from saved(sampled(several(MultiAgentCartPole, 3)), tmp_path_factory.mktemp("cartpoles"))


@pytest.fixture(scope="module")
def pendulums(ray_cluster: None, tmp_path_factory: Any) -> Iterator[tuple[PPO, Path]]:
    """Two agents with Box actions, each behind a filter with statistics of its own, which have seen 200 steps."""
    yield from saved(sampled(several(MultiAgentPendulum, 2, filters)), tmp_path_factory.mktemp("pendulums"))


def sampled(config: PPOConfig) -> PPO:
    algorithm = config.build_algo()
    algorithm.env_runner.sample(num_timesteps=200)
    return algorithm


class InRLlib:
    """RLlib's own loop over one environment of several agents: its MultiRLModule, its pipelines, frozen filters."""

    def __init__(self, path: Path) -> None:
        self.module = MultiRLModule.from_checkpoint(str(path / "learner_group" / "learner" / "rl_module"))
        self.env_to_module, self.module_to_env = pipelines_of(path)

    def play(self, env: Any, seed: int) -> dict[int, float]:
        """Return the returns of the agents in one episode."""
        episode = MultiAgentEpisode(
            observation_space=env.observation_spaces,
            action_space=env.action_spaces,
            agent_to_module_mapping_fn=by_parity,
        )
        observations, infos = env.reset(seed=seed)
        episode.add_env_reset(observations=observations, infos=infos)
        returns = dict.fromkeys(env.possible_agents, 0.0)
        while not episode.is_done:
            common: dict[str, Any] = {"rl_module": self.module, "explore": False}
            common |= {"episodes": [episode], "shared_data": {"vector_env_episodes_map": {}}}
            found = self.module.forward_inference(self.env_to_module(batch={}, **common))
            found = self.module_to_env(batch=found, **common)
            (actions,) = found[Columns.ACTIONS]
            (for_env,) = found.get(Columns.ACTIONS_FOR_ENV, [actions])
            observations, rewards, terminateds, truncateds, infos = env.step(for_env)
            episode.add_env_step(observations, actions, rewards, infos, terminateds=terminateds, truncateds=truncateds)
            for agent, reward in rewards.items():
                returns[agent] += float(reward)
        return returns


def returns_of(result: EvalResult) -> list[dict[int, float]]:
    """The agents' returns, by episode."""
    assert result.status == "complete", result.reason
    episodes = [result.agents[result.agents["index"] == record.index] for record in result.episodes]
    return [{int(agent): float(value) for agent, value in rows[["agent", "return"]]} for rows in episodes]


def test_returns_are_those_of_rllibs_own_loop(cartpoles: Any) -> None:
    """Every agent, every episode: same modules, same seeds, ``explore=False``; live and from the checkpoint."""
    algorithm, path = cartpoles
    result = evaluate(eval_config_of(algorithm.config), algorithm)
    rllib, world = InRLlib(path), MultiAgentCartPole({"num_agents": 3})
    assert returns_of(result) == [rllib.play(world, record.seed) for record in result.episodes]
    assert len({value for found in returns_of(result) for value in found.values()}) > 8
    assert evaluate(from_checkpoint(algorithm, path)).fingerprint == result.fingerprint
    assert {(row["agent"], row["policy"]) for row in result.agents} == {("0", "even"), ("1", "odd"), ("2", "even")}


def test_agents_keep_their_own_filters_and_actions(pendulums: Any) -> None:
    """Flattening, statistics by agent and unsquashing, as in RLlib up to the last bits of a batch of another size."""
    algorithm, path = pendulums
    result = evaluate(eval_config_of(algorithm.config), algorithm)
    rllib, world = InRLlib(path), MultiAgentPendulum({"num_agents": 2})
    for record, ours in zip(result.episodes[:2], returns_of(result), strict=False):
        assert rllib.play(world, record.seed) == pytest.approx(ours, rel=1e-4)
    policies = as_policies(algorithm, ("even", "odd"))
    means = [policies[name].module.state_dict()["env_to_module.MeanStdFilter.mean_0"] for name in ("even", "odd")]
    assert not torch.equal(*means)
    assert evaluate(from_checkpoint(algorithm, path)).fingerprint == result.fingerprint


def from_checkpoint(algorithm: PPO, path: Path) -> EvalConfig:
    policies = {
        name: {"policy": LOADER, "policy_kwargs": {"path": str(path), "module_id": name}} for name in ("even", "odd")
    }
    return eval_config_of(algorithm.config).policy(policies=policies)


def test_weights_are_sent_by_policy(cartpoles: Any) -> None:
    """Those of an Algorithm all at once, or some by id; policies that are not named keep theirs."""
    algorithm, _ = cartpoles
    config = eval_config_of(algorithm.config)
    with EvalRunnerGroup(config, algorithm, threaded=False) as group:
        before = group.evaluate()
        sent = as_weights(algorithm)["even"]
        lengths = []
        for action in range(2):
            group.sync_weights({"even": always(action, sent)})
            found = group.evaluate().agents
            lengths.append([found[found["agent"] == agent]["length"].tolist() for agent in "012"])
        of_odd = before.agents[before.agents["agent"] == "1"]["length"].tolist()
        for agent, (left, right) in enumerate(zip(*lengths, strict=True)):
            assert left == right == of_odd if agent == 1 else left != right
        group.sync_weights(algorithm)
        assert group.evaluate().fingerprint == before.fingerprint
        with refused(WeightsError) as caught:
            group.sync_weights({"neither": sent})
        assert caught.value.key.startswith("neither.")


def always(action: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a module that always chooses one of two actions: no input counts, and the last bias decides."""
    changed = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    (last,) = (name for name, tensor in changed.items() if name.startswith("pi.") and tensor.shape == (2,))
    changed[last][action] = 1.0
    return changed


def test_an_algorithm_evaluates_its_own_policies(cartpoles: Any) -> None:
    """RLlib's custom evaluation function, with numbers by agent and by module under RLlib's keys."""
    algorithm, _ = cartpoles
    numbers = algorithm.evaluate()["env_runners"]
    result = session_of(algorithm).last.result
    assert result.fingerprint == evaluate(eval_config_of(algorithm.config), algorithm).fingerprint
    for part, column in (("agent", "agent"), ("module", "policy")):
        names = set(result.agents[column].tolist())
        assert set(numbers[f"num_{part}_steps_sampled"]) == set(numbers[f"{part}_episode_returns_mean"]) == names
        assert sum(numbers[f"num_{part}_steps_sampled"].values()) == result.agents["length"].sum()
        assert numbers[f"{part}_episode_return_mean"] == numbers[f"{part}_episode_returns_mean"]
    assert numbers["policy_reward_mean"] == numbers["module_episode_returns_mean"]


# ------------------------------------------------------------------------------ what cannot be taken over


class Shared(MultiRLModule):
    """Its parts could share anything."""


def by_episode(agent_id: int, episode: Any, **kwargs: Any) -> str:
    return ("even", "odd")[hash(episode.id_) % 2]


def test_what_cannot_be_taken_over_is_named(cartpoles: Any) -> None:
    algorithm, _ = cartpoles
    modules = MultiRLModuleSpec(multi_rl_module_class=Shared, rl_module_specs={"even": RLModuleSpec()})
    shared = several(MultiAgentCartPole, 2).rl_module(rl_module_spec=modules)
    with refused(ConfigError, "rl_module_spec"):
        eval_config_of(shared)
    random = eval_config_of(several(MultiAgentCartPole, 3, mapping=by_episode))
    with refused(ConfigError, "policy.policy_mapping_fn", episode=0):
        evaluate(random, algorithm)
    assert evaluate(random.policy(policy_mapping_fn=by_parity), algorithm).status == "complete"
    with refused(ConfigError, "policy.policies"):
        portable(algorithm)
    with refused(ConfigError, "policy.policies", value="evne"):
        evaluate(EvalConfig().environment("CartPole-v1").policy(policies={"evne": {}}), algorithm)
    with refused(ConfigError, "policy"):
        portable(algorithm.env_runner.module)
    with refused(ConfigError, "policy.policies.odd.policy", value="x:y"):
        evaluation_function(eval_config_of(algorithm.config).policy(policies={"odd": {"policy": "x:y"}}))


@pytest.mark.parametrize(
    ("agents", "piece", "key", "value"),
    [
        (3, MeanStdFilter(multi_agent=True), "policy_mapping_fn", "even"),
        (2, PrevActionsPrevRewards(multi_agent=True), "env_to_module", "PrevActionsPrevRewards"),
    ],
)
def test_connectors_that_cannot_be_divided_are_named(agents: int, piece: Any, key: str, value: str) -> None:
    config = several(MultiAgentCartPole, agents, lambda env=None, spaces=None, device=None: piece)
    env = MultiAgentCartPole({"num_agents": agents})
    spaces = gym.spaces.Dict(env.observation_spaces), gym.spaces.Dict(env.action_spaces)
    env_to_module = config.build_env_to_module_connector(spaces={INPUT_ENV_SINGLE_SPACES: spaces})
    with refused(ConfigError, key, value=value):
        Pipelines(env_to_module, ModuleToEnvPipeline(*spaces, connectors=[])).policy("even", torch.nn.Linear(4, 2), {})
