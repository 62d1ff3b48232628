"""Files of SB3's ``policy.save``, and zips with attributes that this Python cannot read."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("sb3_contrib")

from sb3_worlds import make_model
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy

from rl_eval import EvalConfig, evaluate
from rl_eval.config.model_files import described
from rl_eval.config.policy_sources import named_source, scheme_of, schemes
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3 import as_policy, load_policy
from tests.refused import refused, untold

KINDS = {
    "PPO": ("vector", "discrete"),
    "A2C": ("dict", "box"),
    "DQN": ("vector", "discrete"),
    "SAC": ("vector", "box"),
    "TD3": ("vector", "box"),
    "QRDQN": ("vector", "discrete"),
    "TQC": ("vector", "box"),
    "CrossQ": ("vector", "box"),
    "MaskablePPO": ("vector", "discrete"),
    "ARS": ("vector", "box"),
}


def numbers(policy: Any) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in policy.state_dict().items()}


# ---------------------------------------------------------------------- files of policy.save


@pytest.mark.parametrize("algorithm", KINDS)
def test_the_file_of_a_policy_is_the_policy(tmp_path: Path, algorithm: str) -> None:
    model = make_model(algorithm, *KINDS[algorithm], policy="MlpPolicy")
    model.policy.save(str(tmp_path / "policy.pt"))
    loaded = load_policy(tmp_path / "policy.pt")
    np.testing.assert_equal(numbers(loaded), numbers(model.policy))
    assert type(loaded).predict is type(model.policy).predict
    seen = model.get_env().reset()
    expected, _ = model.predict(seen, deterministic=True)
    np.testing.assert_array_equal(loaded.predict(seen, deterministic=True)[0], expected)


def test_a_file_of_a_policy_is_recognised_and_asks_for_trust(tmp_path: Path) -> None:
    file = tmp_path / "policy.bin"
    make_model().policy.save(str(file))
    assert scheme_of(described(file)) is schemes()["sb3"]
    source = named_source(str(file))
    assert source is not None
    assert source.pickled == str(file)


class Own(ActorCriticPolicy):
    """A policy with another network, whose weights have other names."""

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.gain = torch.nn.Parameter(torch.ones(1))


def test_the_class_of_a_policy_that_its_file_does_not_name_can_be_set(tmp_path: Path) -> None:
    env = gym.make("CartPole-v1")
    model = PPO(Own, env, n_steps=64, seed=0)
    model.policy.save(str(tmp_path / "own.pt"))
    with refused(ConfigError, "policy.policy_kwargs.custom_objects.policy_class"):
        load_policy(tmp_path / "own.pt")
    loaded = load_policy(tmp_path / "own.pt", custom_objects={"policy_class": f"{__name__}:Own"})
    np.testing.assert_equal(numbers(loaded), numbers(model.policy))


def test_a_result_says_which_class_was_read(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0)
    model.policy.save(str(tmp_path / "policy.pt"))
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    result = evaluate(config, str(tmp_path / "policy.pt"))
    assert result.fingerprint == evaluate(config, model).fingerprint
    assert any("ActorCriticPolicy" in note for note in result.notes)


# ---------------------------------------------------------------------- attributes that cannot be read

UNREADABLE = {
    "TypeError": b"\x80\x04cbuiltins\nint\nX\x01\x00\x00\x00aX\x01\x00\x00\x00b\x86(K\x01K\x02K\x03tR.",
    "AttributeError": b"\x80\x04cgymnasium\nno_such_name_here\n.",
    "ModuleNotFoundError": b"\x80\x04cmissing_module_xyz\nthing\n.",
}
"""Pickles that raise the errors of another version of Python, of a library, and of a missing module."""
OF_THE_TRAINING = ("learning_rate", "lr_schedule", "clip_range", "_last_obs", "_last_episode_starts", "ep_info_buffer")
SPACES = ("observation_space", "action_space")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("saved") / "model.zip"
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0, policy_kwargs={"activation_fn": torch.nn.ReLU})
    model.save(path)
    return model, path


def without(path: Path, names: tuple[str, ...], error: str, folder: Path) -> Path:
    changed = folder / "changed.zip"
    pickled = {":type:": "<class 'x'>", ":serialized:": base64.b64encode(UNREADABLE[error]).decode()}
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(changed, "w") as out:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "data":
                content = json.dumps(json.loads(content) | dict.fromkeys(names, pickled)).encode()
            out.writestr(name, content)
    return changed


@pytest.mark.parametrize("error", UNREADABLE)
def test_attributes_of_the_training_are_not_read(saved: tuple[Any, Path], tmp_path: Path, error: str) -> None:
    model, path = saved
    loaded = load_policy(without(path, OF_THE_TRAINING, error, tmp_path))
    np.testing.assert_equal(numbers(loaded), numbers(model.policy))


@pytest.mark.parametrize("error", UNREADABLE)
def test_spaces_that_cannot_be_read_are_those_of_the_environment(
    saved: tuple[Any, Path], tmp_path: Path, error: str
) -> None:
    model, path = saved
    changed = without(path, SPACES, error, tmp_path)
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    result = evaluate(config, str(changed))
    assert result.fingerprint == evaluate(config, model).fingerprint
    assert sum(error in note for note in result.notes) == len(SPACES)
    with refused(ConfigError, "policy.policy_kwargs.custom_objects.observation_space"):
        load_policy(changed)
    given = load_policy(changed, custom_objects={name: getattr(model, name) for name in SPACES})
    np.testing.assert_equal(numbers(given), numbers(model.policy))


def test_images_of_the_environment_are_transposed_as_in_training(tmp_path: Path) -> None:
    model = make_model("PPO", "image", policy="CnnPolicy")
    model.save(tmp_path / "model.zip")
    changed = without(tmp_path / "model.zip", SPACES, "TypeError", tmp_path)
    env = model.get_env().envs[0].unwrapped
    loaded = load_policy(changed, observation_space=env.observation_space, action_space=env.action_space)
    assert loaded.observation_space == model.observation_space
    np.testing.assert_equal(numbers(loaded), numbers(model.policy))


def test_an_environment_with_other_spaces_is_refused(saved: tuple[Any, Path], tmp_path: Path) -> None:
    changed = without(saved[1], SPACES, "TypeError", tmp_path)
    with refused(ConfigError, "policy.policy_kwargs.path", value=str(changed)):
        evaluate(EvalConfig().environment("Acrobot-v1").evaluation(num_episodes=1), str(changed))


def test_a_missing_module_is_named(saved: tuple[Any, Path], tmp_path: Path) -> None:
    changed = without(saved[1], ("policy_kwargs",), "ModuleNotFoundError", tmp_path)
    with refused(ConfigError, "policy.policy_kwargs.custom_objects.policy_kwargs") as caught:
        load_policy(changed)
    assert untold(str(caught.value), "missing_module_xyz", "PYTHONPATH") == []


@pytest.mark.parametrize("error", UNREADABLE)
def test_arguments_of_a_policy_are_never_guessed(saved: tuple[Any, Path], tmp_path: Path, error: str) -> None:
    model, path = saved
    changed = without(path, ("policy_kwargs",), error, tmp_path)
    with refused(ConfigError, "policy.policy_kwargs.custom_objects.policy_kwargs"):
        load_policy(changed)
    given = load_policy(changed, custom_objects={"policy_kwargs": {"activation_fn": "torch.nn:ReLU"}})
    assert given.activation_fn is torch.nn.ReLU
    spaces = model.observation_space, model.action_space
    acting = as_policy(given, PolicySection(policy="unused"), *spaces)
    seen = np.stack([spaces[0].sample() for _ in range(16)]).clip(-5, 5)
    expected, _ = model.predict(seen, deterministic=True)
    np.testing.assert_array_equal(acting.act(seen, None, np.ones(16, bool), None)[0], expected)


# ---------------------------------------------------------------------- on the command line

NETS = """
import torch
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
class Mine(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 8)
        self.net = torch.nn.Linear(4, 8)
    def forward(self, seen):
        return torch.tanh(self.net(seen))
"""


@pytest.mark.process
def test_the_advice_for_a_missing_module_helps(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        folder.mkdir()
    (project / "mynets.py").write_text(NETS)
    save = (
        "import mynets; from stable_baselines3 import PPO; "
        "m = PPO('MlpPolicy', 'CartPole-v1', n_steps=64, policy_kwargs={'features_extractor_class': mynets.Mine}); "
        "m.save('../model.zip'); m.policy.save('../policy.pt')"
    )
    subprocess.run([sys.executable, "-c", save], cwd=project, check=True)

    def run(file: str, folder: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rl_eval", "run", "--env", "CartPole-v1", "--policy", f"../{file}", "--trust"]
        end = ("-n", "2", "-q", "-o", "out", "--force", *more)
        return subprocess.run(
            [*command, *end], cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=False
        )

    failed = run("policy.pt", elsewhere)
    assert failed.returncode == 2
    assert untold(failed.stderr, "mynets", "PYTHONPATH") == []
    assert run("policy.pt", project).returncode == 0
    path = os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])
    assert run("model.zip", elsewhere, PYTHONPATH=path).returncode == 0
    changed = without(tmp_path / "model.zip", ("policy_kwargs",), "TypeError", tmp_path)
    custom = "policy.policy_kwargs.custom_objects={policy_kwargs: {features_extractor_class: 'mynets:Mine'}}"
    assert run(changed.name, project, "--set", custom).returncode == 0
