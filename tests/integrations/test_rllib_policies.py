"""RLModules with their connectors act as they do in RLlib, from a live Algorithm and from its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ormsgpack")  # ray.rllib comes with ray; this comes with ray[rllib] alone.

import gymnasium as gym
import numpy as np
import torch
import tree
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.connectors.common.frame_stacking import FrameStacking
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import (
    FlattenObservations,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from ray.rllib.connectors.env_to_module.observation_preprocessor import SingleAgentObservationPreprocessor
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import unbatch
from rllib_worlds import mean_std, pipelines_of, ppo, saved, train

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.integrations.rllib import as_weights, load_policy, policy_of_module, portable, versioned_weights
from rl_eval.weights import apply_weights, snapshot_weights
from tests.refused import refused

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:gymnasium.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

LOADER = "rl_eval.integrations.rllib:load_policy"


@pytest.fixture(scope="module")
def pendulum(ray_cluster: None, tmp_path_factory: Any) -> Iterator[tuple[PPO, Path]]:
    """A Box-action policy behind a MeanStdFilter, with action unsquashing."""
    yield from saved(train(ppo("Pendulum-v1", mean_std), 3), tmp_path_factory.mktemp("pendulum"))


@pytest.fixture(scope="module")
def cartpole(ray_cluster: None, tmp_path_factory: Any) -> Iterator[tuple[PPO, Path]]:
    yield from saved(train(ppo("CartPole-v1"), 3), tmp_path_factory.mktemp("cartpole"))


@pytest.fixture(scope="module")
def recurrent(ray_cluster: None, tmp_path_factory: Any) -> Iterator[tuple[PPO, Path]]:
    config = ppo("CartPole-v1", None, use_lstm=True, lstm_cell_size=16, max_seq_len=8)
    yield from saved(train(config, 4), tmp_path_factory.mktemp("recurrent"))


def config_for(env: Any, path: Path, **changes: Any) -> EvalConfig:
    return (
        EvalConfig()
        .environment(env)
        .policy(LOADER, policy_kwargs={"path": str(path)}, **changes)
        .runners(num_envs_per_runner=16)
        .evaluation(num_episodes=12, seed=5)
    )


class InRLlib:
    """The inference loop of RLlib's documentation, over a batch of environments: its module, its pipelines.

    Lanes whose episode is over start another, as those of a vector environment do, so that the batch keeps its size.
    """

    def __init__(self, path: Path) -> None:
        self.module = RLModule.from_checkpoint(str(path / "learner_group" / "learner" / "rl_module" / "default_policy"))
        self.env_to_module, self.module_to_env = pipelines_of(path)

    def returns(self, make_env: Any, seeds: list[int], rows: int) -> list[float]:
        """Play the episodes of these seeds, at most ``rows`` of them, in a batch of ``rows``."""
        envs = [make_env() for _ in range(rows)]
        episodes = [self.begin(env, (seeds * rows)[lane]) for lane, env in enumerate(envs)]
        found: dict[int, float] = {}
        while not all(lane in found for lane in range(len(seeds))):
            for lane, (env, acted) in enumerate(zip(envs, self.act(episodes), strict=True)):
                self.step(env, episodes[lane], *acted)
                if episodes[lane].is_done:
                    rewards = [float(reward) for reward in episodes[lane].get_rewards()]
                    found.setdefault(lane, float(np.cumsum(rewards)[-1]))
                    episodes[lane] = self.begin(env, lane)
        return [found[lane] for lane in range(len(seeds))]

    def begin(self, env: gym.Env[Any, Any], seed: int) -> SingleAgentEpisode:
        episode = SingleAgentEpisode(observation_space=env.observation_space, action_space=env.action_space)
        observation, info = env.reset(seed=seed)
        episode.add_env_reset(observation=observation, infos=info)
        return episode

    def act(self, episodes: list[SingleAgentEpisode]) -> list[tuple[Any, Any, dict[str, Any]]]:
        common = {"episodes": episodes, "rl_module": self.module, "explore": False, "shared_data": {}}
        inputs = self.env_to_module(batch={}, **common)
        found = self.module_to_env(batch=self.module.forward_inference(inputs), **common)
        actions = found.pop(Columns.ACTIONS)
        for_env = found.pop(Columns.ACTIONS_FOR_ENV, actions)
        pick = [{key: value[lane] for key, value in found.items()} for lane in range(len(episodes))]
        return list(zip(unbatch(actions), unbatch(for_env), pick, strict=True))

    def step(self, env: Any, episode: SingleAgentEpisode, action: Any, for_env: Any, extra: dict[str, Any]) -> None:
        observation, reward, terminated, truncated, info = env.step(for_env)
        episode.add_env_step(
            observation,
            action,
            reward,
            info,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=extra,
        )


def reference_rows(result: Any) -> int:
    """How many rows share the forward pass that the result's floats are defined by."""
    return 1 if result.provenance["numerics"]["reference"] == "row" else 16


# ------------------------------------------------------------------------------ the same numbers as RLlib


@pytest.mark.parametrize(
    ("name", "env"), [("pendulum", "Pendulum-v1"), ("cartpole", "CartPole-v1"), ("recurrent", "CartPole-v1")]
)
def test_returns_are_those_of_rllibs_own_inference_loop(request: Any, name: str, env: str) -> None:
    """Same policy, same reset seeds, explore=False, a batch of as many rows: equal to the last bit.

    A matrix product of one row alone has other last bits than one of sixteen, and an episode carries them on; so with
    one environment RLlib's returns differ by as little as that.
    """
    _, path = request.getfixturevalue(name)
    result = evaluate(config_for(env, path))
    ours, seeds = [record.episode_return for record in result.episodes], [record.seed for record in result.episodes]
    rllib = InRLlib(path)
    assert rllib.returns(lambda: gym.make(env), seeds, reference_rows(result)) == ours
    assert len(set(ours)) > 2
    assert [rllib.returns(lambda: gym.make(env), [seed], 1)[0] for seed in seeds[:3]] == pytest.approx(
        ours[:3], rel=1e-5
    )


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("name", "env"), [("pendulum", "Pendulum-v1"), ("cartpole", "CartPole-v1"), ("recurrent", "CartPole-v1")]
)
def test_the_layout_changes_nothing(request: Any, name: str, env: str, deterministic: bool) -> None:
    """3 lanes or 16: the same fingerprint, also where actions are sampled."""
    _, path = request.getfixturevalue(name)
    wide = config_for(env, path, deterministic=deterministic)
    narrow = wide.copy().runners(num_envs_per_runner=3)
    assert evaluate(wide).fingerprint == evaluate(narrow).fingerprint


# ------------------------------------------------------------------------------ checkpoints


def test_live_algorithm_and_checkpoint_agree(pendulum: Any) -> None:
    """The Algorithm passed as a policy, its checkpoint, and its weights sent to another policy: one fingerprint."""
    algorithm, path = pendulum
    config = config_for("Pendulum-v1", path)
    from_checkpoint = evaluate(config).fingerprint
    assert evaluate(config.copy().policy(f"rllib:{path}", policy_kwargs={})).fingerprint == from_checkpoint
    assert evaluate(config, algorithm).fingerprint == from_checkpoint
    policy = portable(algorithm)
    with torch.no_grad():
        for tensor in [*policy.module.parameters(), *policy.module.buffers()]:
            tensor.zero_()
    with EvalRunnerGroup(config, policy) as group:
        assert group.submit().result().fingerprint != from_checkpoint
        weights, version = versioned_weights(algorithm)
        group.sync_weights(weights, version)
        result = group.evaluate()
    assert result.fingerprint == from_checkpoint
    assert {record.weights_version for record in result.episodes} == {3}


def test_an_algorithm_with_an_lstm_and_its_checkpoint_agree(recurrent: Any) -> None:
    """RLlib's stateful modules keep their value function for inference."""
    algorithm, path = recurrent
    config = config_for("CartPole-v1", path)
    stored = evaluate(config).fingerprint
    assert evaluate(config, algorithm).fingerprint == stored
    with EvalRunnerGroup(config, portable(algorithm)) as group:
        group.sync_weights(*versioned_weights(algorithm))
        assert group.evaluate().fingerprint == stored


def test_runners_in_other_processes_load_the_checkpoint(cartpole: Any) -> None:
    _, path = cartpole
    config = config_for("CartPole-v1", path)
    remote = config.copy().runners(num_runners=2, num_envs_per_runner=4)
    assert evaluate(remote).fingerprint == evaluate(config).fingerprint


@pytest.mark.parametrize("place", ["absent", "above", "part", "empty", "old stack"])
def test_a_folder_that_is_no_checkpoint_is_named(cartpole: Any, tmp_path: Path, place: str) -> None:
    _, path = cartpole
    if place == "old stack":
        (tmp_path / "rllib_checkpoint.json").write_text('{"type": "Algorithm", "checkpoint_version": "1.2"}')
    part = path / "learner_group" / "learner" / "rl_module" / "default_policy"
    folder = {"absent": tmp_path / "absent", "above": path.parent, "part": part}.get(place, tmp_path)
    with refused(ConfigError, "policy.policy_kwargs.path", value=str(folder)):
        load_policy(folder)


def test_another_module_or_environment_is_refused(cartpole: Any) -> None:
    algorithm, path = cartpole
    with refused(ConfigError, "policy.policy_kwargs.module_id", value="default_polic"):
        load_policy(path, module_id="default_polic")
    with refused(ConfigError, "environment.env"):
        evaluate(config_for("Pendulum-v1", path))
    with refused(ConfigError, "environment.env"):
        evaluate(config_for("Pendulum-v1", path), portable(algorithm))


# ------------------------------------------------------------------------------ weights


def test_filter_statistics_travel_exactly(pendulum: Any) -> None:
    """In float64, and the trainer's filter is not changed by what is evaluated."""
    algorithm, path = pendulum
    before = algorithm.env_runner._env_to_module.get_state()
    weights = as_weights(algorithm)
    stat = algorithm.env_runner._env_to_module.connectors[0]._filters[None].running_stats
    assert weights["env_to_module.MeanStdFilter.mean_0"].dtype is torch.float64
    assert np.array_equal(weights["env_to_module.MeanStdFilter.mean_0"].numpy(), stat.mean)
    policy = load_policy(path)
    apply_weights(snapshot_weights(algorithm, 1), policy.module)
    evaluate(config_for("Pendulum-v1", path), algorithm)
    assert algorithm.env_runner._env_to_module.get_state() == before


def test_an_untrained_filter_is_an_error() -> None:
    """Standard deviations of nothing would make every observation an extreme one."""
    algorithm = ppo("Pendulum-v1", mean_std).build_algo()
    with refused(WeightsError, "MeanStdFilter", value=0):
        as_weights(algorithm)
    with refused(WeightsError, "MeanStdFilter", value=0):
        portable(algorithm)
    algorithm.stop()


def test_a_bare_module_has_default_connectors_if_its_user_says_so(cartpole: Any) -> None:
    """The module that RLlib hands out, passed as a policy, is the Algorithm's policy where nothing is in front."""
    algorithm, path = cartpole
    config = config_for("CartPole-v1", path)
    module = algorithm.get_module()
    assert evaluate(config, policy_of_module(module)).fingerprint == evaluate(config).fingerprint
    with refused(ConfigError, "policy"):
        evaluate(config, module)


def test_a_copy_does_not_follow_the_training(cartpole: Any) -> None:
    """Weights are of the moment they were taken; building the policy draws from nobody's generator."""
    algorithm, _ = cartpole
    states = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    policy, weights = portable(algorithm), as_weights(algorithm)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    for name, tensor in algorithm.env_runner.module.state_dict().items():
        assert torch.equal(policy.module.state_dict()[name], tensor)
        assert weights[name].data_ptr() != tensor.data_ptr()
        assert policy.module.state_dict()[name].data_ptr() != tensor.data_ptr()


# ------------------------------------------------------------------------------ connector pieces, one by one


class Halve(SingleAgentObservationPreprocessor):
    def preprocess(self, observation: Any, episode: Any) -> Any:
        return (observation * 0.5).astype(np.float32)


class Nosy(SingleAgentObservationPreprocessor):
    def preprocess(self, observation: Any, episode: Any) -> Any:
        return observation * len(episode.get_rewards())


class Strange(ConnectorV2):
    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        return batch


class Mixed(gym.Env[Any, Any]):
    """Nested observations and, as asked, nested actions; its rewards show both."""

    def __init__(self, config: Any = None) -> None:
        pair = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([2, 4])])
        self.observation_space = gym.spaces.Dict({"box": gym.spaces.Box(-2.0, 2.0, (2, 2), np.float32), "pair": pair})
        self.action_space = (config or {}).get("action_space", gym.spaces.MultiDiscrete([3, 2]))

    def _observe(self) -> Any:
        draw = self.np_random
        pair = draw.integers(3), draw.integers([2, 4])
        return {"box": draw.uniform(-2, 2, (2, 2)).astype(np.float32), "pair": pair}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = 5
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        flat = np.concatenate([np.ravel(leaf) for leaf in tree.flatten(action)])
        return self._observe(), float(flat.sum()), self._left == 0, False, {}


class Pixels(gym.Env[Any, Any]):
    """Frames of one channel; the reward is what a stack of them says."""

    def __init__(self, config: Any = None) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4, 4, 1), np.float32)
        self.action_space = gym.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = 6
        return self.np_random.uniform(-1, 1, (4, 4, 1)).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        return self.np_random.uniform(-1, 1, (4, 4, 1)).astype(np.float32), float(action), self._left == 0, False, {}


def pieces(*kinds: Any) -> Any:
    return lambda env=None, spaces=None, device=None: [kind() for kind in kinds]


flatten, halve = pieces(FlattenObservations), pieces(Halve, MeanStdFilter)
flatten_then_filter = pieces(FlattenObservations, MeanStdFilter)
stack = pieces(lambda: FrameStacking(num_frames=3))


@pytest.mark.parametrize(
    ("env", "connector", "env_config", "model"),
    [
        (Mixed, flatten, {}, {}),
        (Mixed, flatten_then_filter, {"action_space": gym.spaces.Discrete(4)}, {}),
        (Mixed, flatten, {"action_space": gym.spaces.Box(-3.0, 5.0, (3,), np.float32)}, {}),
        (
            Mixed,
            flatten,
            {"action_space": gym.spaces.Dict({"a": gym.spaces.Discrete(3), "b": gym.spaces.Discrete(5)})},
            {},
        ),
        ("Pendulum-v1", halve, {}, {}),
        (Pixels, stack, {}, {"conv_filters": [[4, [2, 2], 2]], "fcnet_hiddens": [8]}),
    ],
    ids=["flatten", "flatten_then_filter", "box", "nested_actions", "preprocessor", "frames"],
)
def test_each_connector_piece_gives_rllibs_actions(
    env: Any, connector: Any, env_config: Any, model: Any, tmp_path: Path
) -> None:
    """Flattening, filters on nested spaces, users' preprocessors, frame stacking, nested actions."""
    learner = (lambda *spaces: FrameStacking(num_frames=3, as_learner_connector=True)) if connector is stack else None
    settings = ppo(env, connector, **model).environment(env, env_config=env_config)
    algorithm = train(settings.training(learner_connector=learner), 1)
    path = Path(algorithm.save_to_path(str(tmp_path)))

    def make(context: Any = None) -> gym.Env[Any, Any]:
        return gym.make(env) if isinstance(env, str) else env(env_config)

    config = config_for(make, path)
    result = evaluate(config)
    seeds = [record.seed for record in result.episodes]
    assert InRLlib(path).returns(make, seeds, reference_rows(result)) == [
        record.episode_return for record in result.episodes
    ]
    assert evaluate(config, algorithm).fingerprint == result.fingerprint
    algorithm.stop()


@pytest.mark.parametrize(
    ("piece", "key", "value"),
    [
        (Strange, "env_to_module", "Strange"),
        (PrevActionsPrevRewards, "env_to_module", "PrevActionsPrevRewards"),
        (Nosy, "Nosy", "get_rewards"),
    ],
)
def test_a_piece_that_cannot_be_applied_is_named(piece: Any, key: str, value: str) -> None:
    algorithm = ppo("CartPole-v1", pieces(piece, FlattenObservations)).build_algo()
    with refused(ConfigError, key, value=value):
        evaluate(EvalConfig().environment("CartPole-v1").evaluation(num_episodes=1), algorithm)
    algorithm.stop()


def test_a_users_piece_behind_the_module_is_named() -> None:
    algorithm = ppo("CartPole-v1").env_runners(module_to_env_connector=lambda env, spaces: Strange()).build_algo()
    with refused(ConfigError, "module_to_env", value="Strange"):
        portable(algorithm)
    algorithm.stop()


# ------------------------------------------------------------------------------ sampling
