"""Players of rl_games, in memory and from checkpoints, beside plain loops of the players themselves."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rl_games")

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
import yaml
from acting_world import ours, play

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # The library compiles a network when it is imported.
    from rl_games.algos_torch import players
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.torch_runner import Runner

from rl_eval import EvalConfig, evaluate
from rl_eval.config.policy_sources import named_source
from rl_eval.errors import ConfigError
from rl_eval.integrations.rl_games import load_policy, portable
from tests.refused import refused

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")  # The library uses functions of torch that are deprecated.
PENDULUM, CARTPOLE = (gym.make(name) for name in ("Pendulum-v1", "CartPole-v1"))
CONTINUOUS = {
    "mu_activation": "None",
    "sigma_activation": "None",
    "mu_init": {"name": "default"},
    "sigma_init": {"name": "const_initializer", "val": 0},
    "fixed_sigma": True,
}
LSTM = {"name": "lstm", "units": 6, "layers": 2, "before_mlp": False, "concat_input": False, "layer_norm": False}


class Pendulums(IVecEnv):
    """Environments as rl_games needs them."""

    def __init__(self, num_actors: int) -> None:
        self._envs = gym.make_vec("Pendulum-v1", num_envs=num_actors, vectorization_mode="sync")

    def step(self, actions: Any) -> Any:
        seen, rewards, ended, cut, _ = self._envs.step(np.clip(actions, -2, 2))
        return seen, rewards.astype(np.float32), ended | cut, {}

    def reset(self) -> Any:
        return self._envs.reset(seed=0)[0]

    def get_env_info(self) -> Any:
        return {"action_space": PENDULUM.action_space, "observation_space": PENDULUM.observation_space}

    def get_number_of_agents(self) -> int:
        return 1


def training(folder: Path, **rnn: Any) -> dict[str, Any]:
    """Return a configuration in the form of Isaac Lab's."""
    mlp = {"units": [16], "activation": "elu", "initializer": {"name": "default"}}
    network = {"name": "actor_critic", "separate": False, "space": {"continuous": CONTINUOUS}, "mlp": mlp, **rnn}
    config = {
        "name": "pendulums",
        "env_name": "pendulums",
        "train_dir": str(folder),
        "full_experiment_name": "run",
        "device": "cpu",
        "device_name": "cpu",
        "ppo": True,
        "mixed_precision": False,
        "normalize_input": True,
        "normalize_value": True,
        "num_actors": 4,
        "reward_shaper": {"scale_value": 0.1},
        "normalize_advantage": True,
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": 1e-3,
        "lr_schedule": None,
        "score_to_win": 1e9,
        "max_epochs": 2,
        "save_best_after": 1000,
        "grad_norm": 1.0,
        "entropy_coef": 0.0,
        "truncate_grads": True,
        "e_clip": 0.2,
        "clip_value": True,
        "horizon_length": 32,
        "minibatch_size": 64,
        "mini_epochs": 1,
        "critic_coef": 1,
        "seq_length": 4,
        "bounds_loss_coef": 0.0,
        "torch_compile": False,
    }
    params = {"algo": {"name": "a2c_continuous"}, "model": {"name": "continuous_a2c_logstd"}, "network": network}
    return {"params": {"seed": 1, "load_checkpoint": False, **params, "config": config}}


def run(folder: Path, **rnn: Any) -> Path:
    """Return the run folder of a training in Isaac Lab's layout, with one checkpoint in its folder ``nn``."""
    vecenv.register("PENDULUMS", lambda name, number, **_: Pendulums(number))
    env_configurations.register("pendulums", {"vecenv_type": "PENDULUMS", "env_creator": lambda **_: None})
    config = training(folder, **rnn)
    runner = Runner()
    runner.load(copy.deepcopy(config))
    runner.run({"train": True, "play": False})
    torch.set_float32_matmul_precision("highest")  # The runner changes it for the whole process.
    (folder / "run/params").mkdir()
    (folder / "run/params/agent.yaml").write_text(yaml.dump({**config, "betas": (0.9, 0.999)}))
    return folder / "run"


@pytest.fixture(scope="module", params=[{}, {"rnn": LSTM}], ids=["mlp", "lstm"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs"), **request.param)


def checkpoint(run: Path) -> Path:
    return next((run / "nn").glob("last*.pth"))


def player_of(run: Path) -> Any:
    params = yaml.unsafe_load((run / "params/agent.yaml").read_text())["params"]
    spaces = {"action_space": PENDULUM.action_space, "observation_space": PENDULUM.observation_space}
    params["config"] |= {"env_info": spaces, "player": {"deterministic": True}}
    player = players.PpoPlayerContinuous(params)
    player.restore(str(checkpoint(run)))
    player.has_batch_dimension = True
    return player


def config_of(env: str = "Pendulum-v1", **policy: Any) -> EvalConfig:
    made = EvalConfig().environment(env).evaluation(num_episodes=4, seed=6)
    return made.policy(**policy) if policy else made


def theirs(result: Any, player: Any, env: gym.Env = PENDULUM) -> list[Any]:
    def chosen(block: Any, seed: int, step: int) -> Any:
        if step == 0:
            player.batch_size = len(block)
            player.reset()
        action = player.get_action(torch.as_tensor(block), True)[0].numpy()
        return action if isinstance(env.action_space, gym.spaces.Box) else action.item()

    return play(result, env, chosen)


def test_a_run_folder_and_a_player_act_as_the_player(trained: Path) -> None:
    result = evaluate(config_of(policy=str(checkpoint(trained))))
    assert ours(result) == theirs(result, player_of(trained))
    player = player_of(trained)
    assert evaluate(config_of().runners(num_envs_per_runner=1), player).fingerprint == result.fingerprint
    named = f"rl_games:{trained}/params/agent.yaml@{checkpoint(trained)}"
    assert config_of(policy=named).build().policy == config_of(policy=str(checkpoint(trained))).build().policy
    assert named_source(named).pickled is None


@pytest.mark.ray
def test_a_player_acts_in_runners(trained: Path, ray_cluster: None) -> None:
    player = player_of(trained)
    expected = evaluate(config_of(), player).fingerprint
    assert evaluate(config_of().runners(num_runners=2, num_envs_per_runner=8), player).fingerprint == expected


def test_samples_come_from_the_episodes_own_noise(trained: Path) -> None:
    player, before = player_of(trained), torch.random.get_rng_state()
    config = config_of(deterministic=False)
    result = evaluate(config, player)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert evaluate(config.runners(num_envs_per_runner=3), player).fingerprint == result.fingerprint
    assert ours(result) != ours(evaluate(config_of(), player))


def load(run: Path, space: gym.Space | None = None, **changed: Any) -> Any:
    config = yaml.unsafe_load((run / "params/agent.yaml").read_text())
    config["params"]["config"] |= changed.pop("config", {})
    config["params"] |= changed
    return load_policy(checkpoint(run), PENDULUM.observation_space, space or PENDULUM.action_space, config)


def test_actions_have_the_bounds_of_the_training(trained: Path) -> None:
    """They are rescaled to the action space, to the bound of Isaac Lab's wrapper, or to none."""
    unbounded = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    seen = torch.tensor([[0.5, 0.5, 30.0]])

    def acted(actor: Any) -> torch.Tensor:
        actor.eval().model.a2c_network.mu.bias.data.fill_(4.0)
        state = tuple(torch.zeros(layers, 1, units) for layers, units in actor.sizes)
        with torch.no_grad():
            return actor.step(seen, state, False)[0]

    assert acted(load(trained)) == 2.0
    assert acted(load(trained, unbounded, env={"clip_observations": 5.0, "clip_actions": 3.0})) == 3.0
    assert acted(load(trained, unbounded, config={"clip_actions": False})) > 3.0
    with refused(ConfigError, "policy.policy_kwargs.cfg"):
        load(trained, unbounded)
    clipped = load(trained, env={"clip_observations": 0.25})
    assert clipped._prepared(seen).max() == 0.25


def test_a_discrete_player_takes_its_best_action(tmp_path: Path) -> None:
    config = training(tmp_path)
    params = config["params"] | {"algo": {"name": "a2c_discrete"}, "model": {"name": "discrete_a2c"}}
    params["network"]["space"] = {"discrete": None}
    spaces = {"action_space": CARTPOLE.action_space, "observation_space": CARTPOLE.observation_space}
    made = copy.deepcopy(params)
    made["config"] |= {"env_info": spaces}
    torch.manual_seed(4)
    player = players.PpoPlayerDiscrete(made)
    player.has_batch_dimension = True
    scores = {"last_mean_rewards": np.float32(1.5), "frame": np.int64(3)}
    torch.save({"model": player.model.state_dict(), **scores}, tmp_path / "last.pth")
    (tmp_path / "c.yaml").write_text(yaml.dump({"params": params}))
    config = config_of("CartPole-v1", policy=f"rl_games:{tmp_path}/c.yaml@{tmp_path}/last.pth")
    result = evaluate(config.evaluation(num_episodes=20))
    assert ours(result) == theirs(result, player, CARTPOLE)


def test_other_algorithms_networks_and_files_are_errors(trained: Path, tmp_path: Path) -> None:
    with refused(ConfigError, "policy", value="sac"):
        load(trained, algo={"name": "sac"})
    with refused(ConfigError, "policy.policy_kwargs.path"):
        load(trained, gym.spaces.Box(-1, 1, (2,)))
    with refused(ConfigError, "policy.policy_kwargs.cfg"):
        load(trained, network={"name": "my_network"})
    (tmp_path / "last.pth").write_bytes(checkpoint(trained).read_bytes())
    with refused(ConfigError, "policy.policy"):
        evaluate(config_of(policy=str(tmp_path / "last.pth")))


def test_a_copy_of_a_player_can_be_pickled(trained: Path) -> None:
    player = player_of(trained)
    before = player.model.running_mean_std
    assert pickle.loads(cloudpickle.dumps(portable(player))).sizes == portable(player).sizes
    assert player.model.running_mean_std is before
