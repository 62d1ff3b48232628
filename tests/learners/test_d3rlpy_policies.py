"""Policies of d3rlpy: algorithms in memory, and the files of ``algo.save``."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("d3rlpy")

from d3rlpy import algos, preprocessing
from d3rlpy.models import EncoderFactory, PixelEncoderFactory, QRQFunctionFactory, register_encoder_factory
from d3rlpy.serializable_config import CONFIG_STORAGE
from own_loops import check_equal_to_loop

from rl_eval import EvalConfig, evaluate
from rl_eval.config.model_files import described
from rl_eval.config.policy_sources import schemes
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations import d3rlpy as ours
from rl_eval.policies import adapt_policy
from rl_eval.weights import snapshot_weights
from rl_eval.wrappers import LastReward
from tests.refused import untold

DISCRETE = ("DQN", "DoubleDQN", "NFQ", "DiscreteBC", "DiscreteBCQ", "DiscreteCQL", "DiscreteSAC")
CONTINUOUS = ("AWAC", "BC", "CQL", "CalQL", "DDPG", "IQL", "PLAS", "PLASWithPerturbation", "PRDC", "ReBRAC", "SAC")
CONTINUOUS += ("TD3", "TD3PlusBC")
RANDOM = ("BCQ", "BEAR", "CRR")
SPACE = gym.spaces.Box(-2, 2, (3,))
PIXELS = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)
ACTIONS = {True: gym.spaces.Discrete(2), False: gym.spaces.Box(-2, 2, (2,))}


def made(name: str, shape: tuple[int, ...] = (3,), actions: int = 2, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    algo = getattr(algos, f"{name}Config")(**kwargs).create()
    algo.create_impl(shape, actions)
    return algo


def file_of(algo: Any, folder: Path) -> Path:
    path = folder / "model.d3"
    algo.save(str(path))
    return path


def check_predicts(algo: Any, folder: Path, space: gym.spaces.Box, actions: gym.Space[Any]) -> None:
    seen = np.stack([space.sample() for _ in range(16)])
    live, section = np.ones(16, bool), PolicySection(policy="unused")
    for value in (algo, ours.load_policy(file_of(algo, folder))):
        policy = adapt_policy(section, space, actions, value)
        chosen, _ = policy.act(seen, None, live, None)
        np.testing.assert_array_equal(chosen, algo.predict(seen))
        assert chosen.dtype == actions.dtype
        assert any(len(np.unique(part)) > 1 for part in policy.probe_outputs(seen))


@pytest.mark.parametrize("name", DISCRETE + CONTINUOUS)
def test_algorithms_act_as_their_predict(tmp_path: Path, name: str) -> None:
    check_predicts(made(name), tmp_path, SPACE, ACTIONS[name in DISCRETE])


SCALERS: dict[str, dict[str, Any]] = {
    "min_max": {
        "observation_scaler": preprocessing.MinMaxObservationScaler(np.full(3, -1.7), np.full(3, 2.3)),
        "action_scaler": preprocessing.MinMaxActionScaler(np.full(2, -1.5), np.full(2, 0.7)),
    },
    "standard": {"observation_scaler": preprocessing.StandardObservationScaler(np.full(3, 0.1), np.full(3, 0.3))},
}


@pytest.mark.parametrize("scaler", SCALERS)
def test_scalers_of_a_config_are_used(tmp_path: Path, scaler: str) -> None:
    check_predicts(made("TD3", **SCALERS[scaler]), tmp_path, SPACE, ACTIONS[False])


def test_images_and_distributional_critics_are_supported(tmp_path: Path) -> None:
    kwargs = {"observation_scaler": preprocessing.PixelObservationScaler(), "q_func_factory": QRQFunctionFactory()}
    algo = made("DQN", PIXELS.shape, encoder_factory=PixelEncoderFactory([[4, 8, 4]], 8), **kwargs)
    check_predicts(algo, tmp_path, PIXELS, ACTIONS[True])


@pytest.mark.parametrize(("env", "name", "actions"), [("CartPole-v1", "DQN", 2), ("Pendulum-v1", "SAC", 1)])
def test_object_and_file_have_the_episodes_of_a_loop(tmp_path: Path, env: str, name: str, actions: int) -> None:
    shape = gym.make(env).observation_space.shape
    assert shape is not None
    algo = made(name, shape, actions)
    file = str(file_of(algo, tmp_path))
    check_equal_to_loop(env, [algo, file], lambda seen: algo.predict(seen[None])[0])


def test_sampled_actions_use_the_noise_of_the_episode(tmp_path: Path) -> None:
    config = EvalConfig().environment("Pendulum-v1", env_kwargs={"max_episode_steps": 10})
    config.policy(deterministic=False).evaluation(num_episodes=3)
    for name in ("SAC", "BCQ"):
        algo = made(name, actions=1)
        found = {evaluate(config.copy().runners(num_envs_per_runner=slots), algo).fingerprint for slots in (1, 3)}
        assert len(found) == 1


def test_weights_of_a_training_reach_its_copy() -> None:
    algo = made("SAC")
    copied = ours.portable(algo)
    digest = snapshot_weights(copied, 0).digest
    assert digest == snapshot_weights(algo, 0).digest
    with torch.no_grad():
        next(algo.impl.policy.parameters()).add_(1)
    assert snapshot_weights(copied, 0).digest == digest != snapshot_weights(algo, 0).digest


@pytest.mark.parametrize("name", RANDOM)
def test_predict_that_draws_actions_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        adapt_policy(PolicySection(policy="unused"), SPACE, ACTIONS[False], ours.portable(made(name)))
    assert (caught.value.key, caught.value.value) == ("policy.deterministic", True)


def test_what_is_no_policy_of_observations_is_refused(tmp_path: Path) -> None:
    transformer = made("DecisionTransformer")
    for value in (transformer, transformer.as_stateful_wrapper(target_return=1.0)):
        with pytest.raises(ConfigError) as caught:
            ours.portable(value)
        assert caught.value.value == type(value).__name__
    with pytest.raises(ConfigError, match="DecisionTransformer") as caught:
        ours.load_policy(file_of(transformer, tmp_path))
    assert caught.value.value == "DecisionTransformer"
    with pytest.raises(ConfigError) as caught:
        ours.portable(algos.DQNConfig().create())
    assert caught.value.value == "DQN"

    class Own(algos.DQN):
        """An algorithm that a user changed."""

    own = Own(algos.DQNConfig(), False, False)
    own.create_impl((3,), 2)
    with pytest.raises(ConfigError) as caught:
        ours.portable(own)
    assert caught.value.value == "Own"


class Remembering:
    """A decision transformer with the former steps of each episode in its state, as its error advises."""

    def __init__(self, algo: Any, target: float) -> None:
        self.algo, self.target = algo, target

    def initial_state(self, batch_size: int) -> Any:
        length = self.algo.config.context_size
        shapes = {"observations": (3,), "actions": (1,), "rewards": (1,), "returns_to_go": (1,), "timesteps": ()}
        return {name: np.zeros((batch_size, length, *shape), np.float32) for name, shape in shapes.items()}

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        reward = observations["last_reward"]
        step = state["timesteps"][:, -1] + 1
        first = (step == 1)[:, None]
        rest = np.where(first, self.target, state["returns_to_go"][:, -1]) - reward
        new = {"observations": observations["observation"], "actions": np.zeros_like(reward), "rewards": reward}
        new |= {"returns_to_go": rest, "timesteps": step}
        state = {name: np.concatenate([state[name][:, 1:], new[name][:, None]], 1) for name in state}
        for row in np.flatnonzero(live):
            known = {name: part[row, -int(min(step[row], part.shape[1])) :] for name, part in state.items()}
            known["timesteps"] = known["timesteps"].astype(np.int64)
            state["actions"][row, -1] = self.algo.predict(algos.TransformerInput(**known))
        return state["actions"][:, -1].copy(), state


def test_the_advice_for_a_decision_transformer_has_the_episodes_of_d3rlpy() -> None:
    torch.manual_seed(3)
    algo = algos.DecisionTransformerConfig(context_size=5, num_heads=1, num_layers=1).create()
    algo.create_impl((3,), 1)
    limit = {"max_episode_steps": 12}
    config = EvalConfig().environment("Pendulum-v1", env_kwargs=limit, wrappers=[LastReward])
    config.evaluation(num_episodes=3)
    policy = Remembering(algo, -100.0)
    one, many = (evaluate(config.copy().runners(num_envs_per_runner=slots), policy) for slots in (1, 3))
    assert one.fingerprint == many.fingerprint
    env, wrapped = gym.make("Pendulum-v1", **limit), algo.as_stateful_wrapper(target_return=-100.0)
    for episode in one.episodes:
        wrapped.reset()
        observation, _ = env.reset(seed=int(episode.seed))
        reward, total, over = 0.0, 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(wrapped.predict(observation, reward))
            total, over = total + reward, terminated or truncated
        assert episode.episode_return == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("observations", "actions"),
    [(gym.spaces.Box(-2, 2, (4,)), ACTIONS[True]), (SPACE, gym.spaces.Discrete(3)), (SPACE, ACTIONS[False])],
)
def test_other_spaces_than_those_of_the_training_are_refused(observations: Any, actions: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        adapt_policy(PolicySection(policy="unused"), observations, actions, ours.portable(made("DQN")))
    assert caught.value.key == "environment.env"


@dataclasses.dataclass()
class OwnFactory(EncoderFactory):
    """A factory of a user."""

    def create(self, observation_shape: Any) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh())

    @staticmethod
    def get_type() -> str:
        return "own"


def registered() -> Any:
    """Load the file as the error about an unknown encoder advises."""
    if "own" not in CONFIG_STORAGE[EncoderFactory].config_list:
        register_encoder_factory(OwnFactory)
    return ours.load_policy("model.d3")


def test_the_advice_for_an_encoder_of_a_user_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    algo = made("DQN", encoder_factory=OwnFactory())
    file = file_of(algo, tmp_path)
    with pytest.raises(ConfigError) as caught:
        ours.portable(algo)
    assert untold(caught.value.fix, "register_encoder_factory") == []
    with pytest.raises(ConfigError) as caught:
        ours.load_policy(file)
    assert untold(caught.value.fix, "register_encoder_factory", "rl_eval.integrations.d3rlpy.load_policy") == []
    loaded = adapt_policy(PolicySection(policy=f"{__name__}:registered"), SPACE, ACTIONS[True])
    seen = np.stack([SPACE.sample() for _ in range(16)])
    np.testing.assert_array_equal(loaded.act(seen, None, np.ones(16, bool), None)[0], algo.predict(seen))
    assert ours.portable(algo).algo is not algo


# ---------------------------------------------------------------------- files


class Attack:
    """A pickle of it creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_runs_nothing(tmp_path: Path) -> None:
    file, touched = file_of(made("DQN"), tmp_path), tmp_path / "touched"
    content = pickle.loads(file.read_bytes())
    weights = io.BytesIO()
    torch.save({"q_funcs": Attack(touched)}, weights)
    outer = {"torch": b"", "config": Attack(touched), "version": "2.8.1"}
    for changed in (outer, {**content, "torch": weights.getvalue()}):
        file.write_bytes(pickle.dumps(changed))
        with pytest.raises(ConfigError) as caught:
            ours.load_policy(file)
        assert caught.value.key == "policy.policy_kwargs.path"
    file.write_bytes(pickle.dumps({**content, "extra": Attack(touched)}))
    ours.load_policy(file)
    assert not touched.exists()


def test_damaged_files_are_errors_that_name_them(tmp_path: Path) -> None:
    """A config may ask for networks that do not fit into the memory."""
    file = file_of(made("DQN"), tmp_path)
    content, whole = pickle.loads(file.read_bytes()), file.read_bytes()
    config = json.loads(content["config"])
    config["config"]["params"]["encoder_factory"] = {
        "type": "vector",
        "params": {"hidden_units": [2**20, 2**20], "activation": "relu"},
    }
    huge = pickle.dumps({**content, "config": json.dumps(config)})
    other = pickle.dumps({**content, "config": content["config"].replace('"dqn"', '"unknown"')})
    for damaged in (whole[: len(whole) // 2], whole[:10], b"", huge, other, pickle.dumps({"torch": 1})):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError) as caught:
            ours.load_policy(file)
        assert (caught.value.key, caught.value.value) == ("policy.policy_kwargs.path", str(file))


def test_a_file_is_recognized_by_its_content(tmp_path: Path) -> None:
    file = file_of(made("SAC"), tmp_path).rename(tmp_path / "renamed.bin")
    assert [name for name, scheme in schemes().items() if scheme.recognises(described(file))] == ["d3rlpy"]
    assert dataclasses.asdict(schemes()["d3rlpy"].source("", file, ()))["pickled"] is None
    weights = tmp_path / "weights.pt"
    torch.save(made("SAC").impl.policy.state_dict(), weights)
    assert not schemes()["d3rlpy"].recognises(described(weights))
