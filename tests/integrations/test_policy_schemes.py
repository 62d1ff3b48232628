"""Schemes of policies with the frameworks that they are for: the same episodes as with their objects."""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3")

import numpy as np
from safetensors.torch import save_file
from sb3_worlds import DATA, reads_data
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tensordict.nn import TensorDictModule
from typer.testing import CliRunner

from rl_eval import EvalConfig, evaluate, load
from rl_eval.cli import app
from rl_eval.cli.evaluated import policy_source
from rl_eval.errors import ConfigError
from tests.refused import refused, untold

CONFIG = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)


def returns(result):
    return result.table.rows["episode_return"]


def run(*arguments):
    done = CliRunner().invoke(app, ["run", "--env", "CartPole-v1", "-n", "4", "--output", "out", "--force", *arguments])
    assert done.exit_code == 0, done.output
    return done.output, returns(load("out"))


@reads_data
def test_a_model_of_sb3(tmp_path, monkeypatch):
    """In a file beside it, and on the command line without its ending."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA / "cartpole_ppo_early.zip", "model.zip")
    Path("config.yaml").write_text("policy: {policy: 'sb3:model.zip'}")
    expected = returns(evaluate(CONFIG, PPO.load("model.zip")))
    named = EvalConfig.from_yaml("config.yaml").environment("CartPole-v1").evaluation(num_episodes=4)
    assert (returns(evaluate(named)) == expected).all()
    said, found = run("--policy", "sb3:model", "--trust")
    assert untold(said, "Stable-Baselines3", "model.zip") == []
    assert (found == expected).all()


def test_a_folder_of_the_zoo(tmp_path, monkeypatch):
    """With the statistics that it keeps in the folder of the environment's name."""
    import gymnasium as gym

    monkeypatch.chdir(tmp_path)
    venv = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    model = PPO("MlpPolicy", venv, n_steps=64, seed=0).learn(64)
    folder = Path("ppo", "CartPole-v1_1")
    folder.mkdir(parents=True)
    model.save(folder / "CartPole-v1.zip")
    (folder / "CartPole-v1").mkdir()
    venv.save(str(folder / "CartPole-v1" / "vecnormalize.pkl"))
    said, found = run("--policy", str(folder), "--trust")
    assert "vecnormalize.pkl" in said
    assert (found == returns(evaluate(CONFIG, model))).all()
    assert (run("--policy", f"sb3:{folder}", "--trust")[1] == found).all()


@pytest.mark.parametrize("by", ["config", "options"])
def test_each_checkpoint_of_a_watch_has_its_own_normalizer(tmp_path, monkeypatch, by):
    """As SB3's callback saves them; also with a config that was written for one of them."""
    import gymnasium as gym

    monkeypatch.chdir(tmp_path)
    venv = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    model, expected = PPO("MlpPolicy", venv, n_steps=64, seed=0), []
    Path("runs").mkdir()
    for step in (64, 640):
        model.learn(64, reset_num_timesteps=False)
        model.save(f"runs/rl_model_{step}_steps.zip")
        venv.obs_rms.mean += 0.5
        venv.save(f"runs/rl_model_vecnormalize_{step}_steps.pkl")
        expected.append(evaluate(CONFIG, f"sb3:runs/rl_model_{step}_steps.zip").fingerprint)
    options = ["--env", "CartPole-v1", "-n", "4", "--trust"]
    if by == "config":
        written = CliRunner().invoke(app, ["init", "c.yaml", "--policy", "runs/rl_model_640_steps.zip", *options[:-1]])
        assert written.exit_code == 0, written.output
    arguments = ["c.yaml", "runs/*.zip"] if by == "config" else ["runs/*.zip", *options]
    done = CliRunner().invoke(app, ["watch", *arguments, "--once", "--poll-s", "0.02", "--held-out", "0", "--json"])
    assert done.exit_code == 0, done.output
    points = json.loads(done.stdout)
    assert [point["fingerprint"] for point in points] == expected
    assert len(set(expected)) == 2
    # The copies are gone, and the log names the trainer's files.
    again = ["replay", f"runs/eval/evaluations/{points[0]['evaluation']}", "--episodes", "0-3"]
    assert CliRunner().invoke(app, again).exit_code == 0
    Path("runs/rl_model_vecnormalize_640_steps.pkl").replace("runs/rl_model_vecnormalize_64_steps.pkl")
    changed = CliRunner().invoke(app, again)
    assert changed.exit_code == 2
    assert "vecnormalize" in changed.output


def test_a_module_of_torchrl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "from tensordict.nn import TensorDictModule\nfrom torch import nn\n\ndef make():\n"
    Path("my_actor.py").write_text(
        source + "    return TensorDictModule(nn.Linear(4, 2), in_keys=['observation'], out_keys=['action'])\n"
    )
    import my_actor

    actor = my_actor.make()
    assert isinstance(actor, TensorDictModule)
    save_file(actor.state_dict(), "actor.safetensors")
    expected = returns(evaluate(CONFIG, actor))
    said, found = run("--policy", "torchrl:my_actor:make@actor.safetensors")
    assert untold(said, "TorchRL", "my_actor:make", "actor.safetensors") == []
    assert (found == expected).all()
    assert np.isfinite(found).all()
    sys.modules.pop("my_actor")


@pytest.mark.parametrize("text", ["sb3:checkpoint", "checkpoint"])
def test_a_checkpoint_of_another_framework_is_not_taken_for_a_model(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").mkdir()
    with refused(ConfigError, "policy.policy", value="checkpoint"):
        policy_source(text)
    assert CliRunner().invoke(app, ["run", "--env", "CartPole-v1", "--policy", text]).exit_code == 2
