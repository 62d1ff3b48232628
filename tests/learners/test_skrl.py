"""Agents of skrl, in memory and from checkpoints, beside plain loops of the library's own inference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skrl")

import cloudpickle
import gymnasium as gym
import skrl_models
import torch
import yaml
from acting_world import ours, play
from skrl.agents.torch.dqn import DQN, DQN_CFG
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.runner.torch import Runner
from skrl_models import Actor, Chooser, Remembering, Values

from rl_eval import EvalConfig, evaluate
from rl_eval.config.policy_sources import named_source
from rl_eval.errors import ConfigError
from rl_eval.integrations.skrl import load_policy, portable
from tests.refused import refused

torch.set_num_threads(1)

PENDULUM, CARTPOLE = (gym.make(name) for name in ("Pendulum-v1", "CartPole-v1"))


def agent_of(steps: int) -> PPO:
    """Return an agent after its training."""
    torch.manual_seed(0)
    env = wrap_env(gym.make_vec("Pendulum-v1", num_envs=2), verbose=False)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    models = {"policy": Actor(**spaces, state_space=None, device="cpu"), "value": Values(**spaces)}
    scaled = {"size": env.observation_space, "device": "cpu"}
    config = PPO_CFG(
        rollouts=64, observation_preprocessor=RunningStandardScaler, observation_preprocessor_kwargs=scaled
    )
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=64, num_envs=2, device="cpu")
    agent = PPO(models=models, memory=memory, cfg=config, **spaces, state_space=None, device="cpu")
    training = {"timesteps": steps, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    SequentialTrainer(env=env, agents=agent, cfg=training).train()
    agent.enable_training_mode(False, apply_to_models=True)
    return agent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PPO, Path]:
    agent = agent_of(steps=192)
    path = tmp_path_factory.mktemp("run") / "agent_192.pt"
    agent.save(str(path))
    return agent, path


def config_of(env: str = "Pendulum-v1", **policy: Any) -> EvalConfig:
    made = EvalConfig().environment(env).evaluation(num_episodes=4 if env == "Pendulum-v1" else 12, seed=6)
    return made.policy(**policy) if policy else made


def theirs(result: Any, agent: Any, env: gym.Env = PENDULUM) -> list[Any]:
    """Play the episodes of a result as skrl's trainer does in an evaluation."""

    @torch.no_grad()
    def chosen(block: Any, seed: int, step: int) -> Any:
        actions, outputs = agent.act(torch.as_tensor(block), None, timestep=0, timesteps=1)
        action = outputs.get("mean_actions", actions)[0].numpy()
        return action if isinstance(env.action_space, gym.spaces.Box) else action.item()

    return play(result, env, chosen)


def test_an_agent_and_its_checkpoint_act_as_in_an_evaluation_by_skrl(trained: Any) -> None:
    agent, path = trained
    result = evaluate(config_of(policy=f"skrl:skrl_models:Actor@{path}"))
    assert ours(result) == theirs(result, agent)
    assert evaluate(config_of().runners(num_envs_per_runner=1), agent).fingerprint == result.fingerprint
    assert ours(evaluate(config_of(), agent.policy)) != ours(result)


@pytest.mark.ray
def test_an_agent_acts_in_runners(trained: Any, ray_cluster: None) -> None:
    cloudpickle.register_pickle_by_value(skrl_models)  # Runners cannot import it.
    agent, _ = trained
    expected = evaluate(config_of(), agent).fingerprint
    assert evaluate(config_of().runners(num_runners=2, num_envs_per_runner=8), agent).fingerprint == expected


def test_samples_come_from_the_episodes_own_noise(trained: Any) -> None:
    agent, _ = trained
    config, before = config_of(deterministic=False), torch.random.get_rng_state()
    result = evaluate(config, agent)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert evaluate(config.runners(num_envs_per_runner=3), agent).fingerprint == result.fingerprint
    assert ours(result) != ours(evaluate(config_of(), agent))


def runner_config() -> dict[str, Any]:
    """Return a configuration as Isaac Lab has it for skrl."""
    network = [{"name": "net", "input": "OBSERVATIONS", "layers": [16], "activations": "elu"}]
    model = {"network": network, "output": "ACTIONS"}
    return {
        "seed": 4,
        "models": {
            "separate": False,
            "policy": {"class": "GaussianMixin", "clip_actions": False, "initial_log_std": 0.0, **model},
            "value": {"class": "DeterministicMixin", "clip_actions": False, "network": network, "output": "ONE"},
        },
        "memory": {"class": "RandomMemory", "memory_size": -1},
        "agent": {
            "class": "PPO",
            "rollouts": 16,
            "observation_preprocessor": "RunningStandardScaler",
            "observation_preprocessor_kwargs": {"clip_threshold": 0.5},
            "value_preprocessor": "RunningStandardScaler",
            "value_preprocessor_kwargs": None,
            "experiment": {"write_interval": 0, "checkpoint_interval": 0},
        },
        "trainer": {"class": "SequentialTrainer", "timesteps": 32, "close_environment_at_exit": False},
    }


def runner_of(config: Any) -> Runner:
    """Return a runner after its training."""
    quiet = {"disable_progressbar": True, "headless": True, **config["trainer"]}
    runner = Runner(wrap_env(gym.make("Pendulum-v1"), verbose=False), {**copy.deepcopy(config), "trainer": quiet})
    runner.run("train")
    return runner


def test_a_run_folder_acts_as_its_runner_and_needs_trust(tmp_path: Path) -> None:
    config = runner_config()
    runner = runner_of(config)
    for name in ("params", "checkpoints"):
        (tmp_path / name).mkdir()
    path, beside = tmp_path / "checkpoints/agent_32.pt", tmp_path / "params/agent.yaml"
    runner.agent.save(str(path))
    beside.write_text(yaml.dump(config))
    runner.agent.enable_training_mode(False, apply_to_models=True)
    result = evaluate(config_of(policy=str(path)))
    assert ours(result) == theirs(result, runner.agent)
    assert evaluate(config_of(policy=f"skrl:{beside}@{path}")).fingerprint == result.fingerprint
    assert evaluate(config_of(), runner).fingerprint == result.fingerprint
    assert named_source(str(path)).pickled == str(beside)
    assert named_source(str(path), ["cfg"]).pickled


def discrete(kind: Any, config: Any, **models: Any) -> Any:
    spaces = {"observation_space": CARTPOLE.observation_space, "action_space": CARTPOLE.action_space}
    torch.manual_seed(1)
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    made = {name: model(**spaces) for name, model in models.items()}
    agent = kind(models=made, cfg=config, **spaces, device="cpu")
    agent.init()
    agent.enable_training_mode(False, apply_to_models=True)
    return agent


def test_a_q_network_and_a_categorical_policy_take_their_best_action(tmp_path: Path) -> None:
    for agent, model in (
        (discrete(DQN, DQN_CFG(), q_network=Values, target_q_network=Values), Values),
        (discrete(PPO, PPO_CFG(), policy=Chooser, value=Values), Chooser),
    ):
        agent.save(str(tmp_path / "agent.pt"))
        result = evaluate(config_of("CartPole-v1", policy=f"skrl:skrl_models:{model.__name__}@{tmp_path}/agent.pt"))
        network = portable(agent).model.net

        def best(block: Any, seed: int, step: int, network: Any = network) -> int:
            with torch.no_grad():
                return int(network(torch.as_tensor(block)).argmax(1)[0])

        assert ours(result) == play(result, CARTPOLE, best)
        assert evaluate(config_of("CartPole-v1"), agent).fingerprint == result.fingerprint


def test_a_recurrent_model_has_a_state_per_episode(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Remembering(PENDULUM.observation_space, PENDULUM.action_space)
    torch.save({"policy": model.state_dict()}, tmp_path / "agent.pt")
    result = evaluate(config_of(policy=f"skrl:skrl_models:Remembering@{tmp_path}/agent.pt"))
    states: list[Any] = []

    @torch.no_grad()
    def chosen(block: Any, seed: int, step: int) -> Any:
        states[:] = states if step else [torch.zeros(2, len(block), 6) for _ in range(2)]
        _, outputs = model.act({"observations": torch.as_tensor(block), "rnn": states})
        states[:] = outputs["rnn"]
        return outputs["mean_actions"][0].clamp(-2, 2).numpy()

    assert ours(result) == play(result, PENDULUM, chosen)
    assert evaluate(config_of(), model).fingerprint == result.fingerprint


def test_an_unknown_preprocessor_a_foreign_file_and_a_missing_network_are_errors(trained: Any, tmp_path: Path) -> None:
    agent, path = trained
    saved = torch.load(path)
    saved["state_preprocessor"] = saved.pop("observation_preprocessor")
    torch.save(saved, tmp_path / "agent.pt")
    made = {"observation_space": PENDULUM.observation_space, "action_space": PENDULUM.action_space, "model": Actor}
    with refused(ConfigError, "policy.policy_kwargs.preprocessor", value="observation_preprocessor"):
        load_policy(tmp_path / "agent.pt", **made)
    assert load_policy(tmp_path / "agent.pt", **made, preprocessor="state_preprocessor").scaler is not None
    assert load_policy(tmp_path / "agent.pt", **made, preprocessor=None).scaler is None
    with refused(ConfigError, "policy.policy"):
        evaluate(config_of(policy=str(tmp_path / "agent.pt")))
    with refused(ConfigError, "policy.policy_kwargs.path"):
        load_policy(path, **{**made, "model": "skrl_models:Chooser"})
    with refused(ConfigError, "environment.env"):
        evaluate(config_of("MountainCarContinuous-v0"), agent)


def test_bounds_of_actions_move_with_the_model(trained: Any) -> None:
    agent, _ = trained
    assert portable(agent).double().model._g_max_actions.dtype == torch.float64
