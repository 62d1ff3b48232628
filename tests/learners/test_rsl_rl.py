"""Models of rsl_rl, from runners and from run folders, beside plain loops of the library's own inference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rsl_rl")

import gymnasium as gym
import numpy as np
import torch
import yaml
from acting_world import ours, play
from rsl_rl.models import RNNModel
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from rl_eval import EvalConfig, evaluate
from rl_eval.config.policy_sources import named_source
from rl_eval.errors import ConfigError
from rl_eval.integrations.rsl_rl import load_policy
from tests.refused import refused

torch.set_num_threads(1)

GAUSSIAN = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
ACTOR = {
    "class_name": "MLPModel",
    "hidden_dims": [16, 8],
    "activation": "tanh",
    "obs_normalization": True,
    "distribution_cfg": GAUSSIAN,
}
CRITIC = {**ACTOR, "distribution_cfg": None}
TRAINING = {
    "num_steps_per_env": 16,
    "save_interval": 1000,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "clip_actions": 0.1,
    "actor": ACTOR,
    "critic": CRITIC,
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 1,
        "num_mini_batches": 1,
        "schedule": "fixed",
        "rnd_cfg": None,
        "symmetry_cfg": None,
    },
}


class Pendulums:
    """Environments as rsl_rl needs them."""

    num_envs, num_actions, max_episode_length, device, cfg = 4, 1, 200, "cpu", {}

    def __init__(self) -> None:
        self._envs = gym.make_vec("Pendulum-v1", num_envs=4, vectorization_mode="sync")
        self.episode_length_buf = torch.zeros(4, dtype=torch.long)
        self._seen, _ = self._envs.reset(seed=0)

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": torch.as_tensor(self._seen)}, batch_size=[4])

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        self._seen, rewards, ended, cut, _ = self._envs.step(np.clip(actions.numpy(), -2, 2))
        over = torch.as_tensor(ended | cut).long()
        extras = {"time_outs": torch.as_tensor(cut), "log": {}}
        return self.get_observations(), torch.as_tensor(rewards, dtype=torch.float32), over, extras


def run(folder: Path, name: str) -> OnPolicyRunner:
    """Return a runner after its training. Its run folder has Isaac Lab's layout."""
    torch.manual_seed(0)
    runner = OnPolicyRunner(Pendulums(), copy.deepcopy(TRAINING), log_dir=None, device="cpu")
    runner.learn(3)
    runner.save(str(folder / name))
    (folder / "params").mkdir()
    (folder / "params/agent.yaml").write_text(yaml.dump({**TRAINING, "betas": (0.9, 0.999)}))
    return runner


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[OnPolicyRunner, Path]:
    folder = tmp_path_factory.mktemp("run")
    return run(folder, "model_3.pt"), folder


def config_of(**policy: Any) -> EvalConfig:
    made = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=4, seed=6)
    return made.policy(**policy) if policy else made


def theirs(result: Any, model: Any, bound: float = 2.0) -> list[Any]:
    @torch.no_grad()
    def chosen(block: Any, seed: int, step: int) -> Any:
        if step == 0:
            model.reset()
        output = model(TensorDict({"policy": torch.as_tensor(block)}, batch_size=[len(block)]))
        return output[0].clamp(-bound, bound).numpy()

    return play(result, gym.make("Pendulum-v1"), chosen)


def test_a_run_folder_and_a_runner_act_as_the_inference_policy(trained: Any) -> None:
    runner, folder = trained
    result = evaluate(config_of(policy=str(folder / "model_3.pt")))
    model = runner.get_inference_policy()
    assert ours(result) == theirs(result, model, 0.1)
    assert evaluate(config_of().runners(num_envs_per_runner=1), runner).fingerprint == result.fingerprint
    assert config_of(policy=str(folder / "model_3.pt")).build().policy.file_digests.keys() == {"path", "cfg"}
    without = evaluate(config_of(), model)
    assert ours(without) == theirs(without, model)
    assert ours(without) != ours(result)


@pytest.mark.ray
def test_runners_act_as_the_inference_policy(trained: Any, ray_cluster: None) -> None:
    runner, _ = trained
    expected = evaluate(config_of(), runner).fingerprint
    assert evaluate(config_of().runners(num_runners=2, num_envs_per_runner=8), runner).fingerprint == expected


def test_samples_come_from_the_episodes_own_noise(trained: Any) -> None:
    runner, _ = trained
    config = config_of(deterministic=False)
    result = evaluate(config, runner)
    assert evaluate(config.runners(num_envs_per_runner=3), runner).fingerprint == result.fingerprint
    assert ours(result) != ours(evaluate(config_of(), runner))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_recurrent_model_has_a_state_per_episode(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    shape = {"rnn_type": kind, "rnn_hidden_dim": 6, "rnn_num_layers": 2}
    actor = {**ACTOR, **shape, "class_name": "RNNModel"}
    arguments = {name: value for name, value in actor.items() if name != "class_name"}
    arguments["distribution_cfg"] = {**GAUSSIAN, "class_name": "rsl_rl.modules.GaussianDistribution"}
    seen = TensorDict({"policy": torch.zeros(1, 3)}, batch_size=[1])
    model = RNNModel(seen, {"actor": ["policy"]}, "actor", 1, **arguments)
    torch.save({"actor_state_dict": model.state_dict()}, tmp_path / "model_1.pt")
    config = config_of(policy=f"rsl_rl:{tmp_path}/model_1.pt", policy_kwargs={"cfg": {"actor": actor}})
    result = evaluate(config)
    for mine, own in zip(ours(result), theirs(result, model.eval()), strict=True):
        assert mine == pytest.approx(own, rel=1e-5)  # A pass has 16 rows, the loop one.
    assert evaluate(config_of(), model).fingerprint == result.fingerprint


def former(saved: Any) -> dict[str, Any]:
    """Return a checkpoint as rsl_rl 2 saved it."""
    actor = saved["actor_state_dict"]
    network = {name.replace("mlp.", "actor."): one for name, one in actor.items() if name.startswith("mlp.")}
    critic = {f"critic.{name}": one for name, one in network.items()}
    model = {**network, **critic, "std": actor["distribution.std_param"]}
    statistics = {name[15:]: one for name, one in actor.items() if name.startswith("obs_normalizer.")}
    return {"model_state_dict": model, "obs_norm_state_dict": statistics, "iter": 3, "infos": None}


FORMER_TRAINING = """
seed: 42
num_steps_per_env: 24
empirical_normalization: true
obs_groups: {}
policy:
  class_name: ActorCritic
  init_noise_std: 1.0
  noise_std_type: scalar
  actor_hidden_dims: [16, 8]
  critic_hidden_dims: [16, 8]
  activation: tanh
algorithm:
  class_name: PPO
  betas: !!python/tuple [0.9, 0.999]
clip_actions: null
"""


def test_a_run_folder_of_a_former_version_acts_as_that_of_the_present_one(trained: Any, tmp_path: Path) -> None:
    runner, folder = trained
    torch.save(former(torch.load(folder / "model_3.pt")), tmp_path / "model_3.pt")
    (tmp_path / "params").mkdir()
    (tmp_path / "params/agent.yaml").write_text(FORMER_TRAINING)
    result = evaluate(config_of(policy=str(tmp_path / "model_3.pt")))
    assert ours(result) == ours(evaluate(config_of(), runner.get_inference_policy()))


def load(folder: Path, observation: gym.Space | None = None, **kwargs: Any) -> Any:
    pendulum = gym.make("Pendulum-v1")
    return load_policy(
        folder / "model_3.pt", observation or pendulum.observation_space, pendulum.action_space, **kwargs
    )


def test_a_file_without_its_configuration_asks_for_the_activation(trained: Any, tmp_path: Path) -> None:
    runner, folder = trained
    with refused(ConfigError, "policy.policy_kwargs.activation") as caught:
        load(folder)
    assert "[16, 8]" in caught.value.problem
    assert load(folder, activation="tanh").state_dict().keys() == load(folder, cfg=TRAINING).state_dict().keys()
    runner.save(str(tmp_path / "model_3.pt"))
    with refused(ConfigError, "policy.policy_kwargs.activation"):
        evaluate(config_of(policy=str(tmp_path / "model_3.pt")))


def test_a_configuration_of_another_training_is_an_error(trained: Any) -> None:
    _, folder = trained
    with refused(ConfigError, "policy.policy_kwargs.cfg", value="mlp.0.bias") as caught:
        load(folder, cfg={**TRAINING, "actor": {**ACTOR, "hidden_dims": [32]}})
    assert "[16, 8]" in caught.value.problem
    assert "[32]" in caught.value.problem
    with refused(ConfigError, "policy.policy_kwargs.cfg"):
        load(folder, gym.spaces.Box(-1, 1, (4,)), cfg=TRAINING)
    with refused(ConfigError, "environment.env", value="policy"):
        load(folder, gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (3,))}), cfg=TRAINING)


@pytest.mark.parametrize("name", ["os.system", "my_pkg.models:Actor", "rsl_rl.utils.utils:os.system"])
def test_a_class_from_outside_of_rsl_rl_needs_trust(trained: Any, tmp_path: Path, name: str) -> None:
    _, folder = trained
    assert named_source(str(folder / "model_3.pt")).pickled is None
    (tmp_path / "params").mkdir()
    (tmp_path / "model_3.pt").write_bytes((folder / "model_3.pt").read_bytes())
    for actor in ({**ACTOR, "class_name": name}, {**ACTOR, "distribution_cfg": {"class_name": name}}):
        (tmp_path / "params/agent.yaml").write_text(yaml.dump({**TRAINING, "actor": actor}))
        assert named_source(str(tmp_path / "model_3.pt")).pickled == str(tmp_path / "params/agent.yaml")
    assert named_source(str(folder / "model_3.pt"), ["cfg"]).pickled


@pytest.mark.parametrize(
    "tag", ["object/apply:os.system [touch seen]", "name:os.system", "module:os", "object:os.x {}"]
)
def test_a_configuration_with_objects_of_python_is_an_error(trained: Any, tmp_path: Path, tag: str) -> None:
    _, folder = trained
    config = tmp_path / "agent.yaml"
    config.write_text(f"actor: !!python/{tag}\n")
    with refused(ConfigError, str(config)):
        load(folder, cfg=str(config))


class Touches:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_code_of_a_checkpoint_is_not_run(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not repeat torch's advice to load the file without protection."""
    monkeypatch.chdir(tmp_path)
    _, folder = trained
    torch.save({**torch.load(folder / "model_3.pt"), "infos": Touches()}, tmp_path / "model_3.pt")
    with refused(ConfigError, "policy.policy_kwargs.path") as caught:
        load(tmp_path, activation="tanh")
    assert "weights_only" not in str(caught.value)
    assert not Path("touched").exists()
