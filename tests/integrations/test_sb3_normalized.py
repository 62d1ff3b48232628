"""Models of Stable-Baselines3 with and without a VecNormalize: the same rule through every door.

A cell is right if it equals a loop of ``predict`` with the model's own statistics. Otherwise it is refused, or the
result has a note: a wrong number never comes without a word.
"""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3")

import gymnasium as gym
import numpy as np
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from typer.testing import CliRunner

from rl_eval import EvalConfig, EvalResult, evaluate, evaluate_policy, load
from rl_eval.cli import app
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3 import EvalCallback, load_policy
from rl_eval.integrations.sb3.files import facts_of, trained_normalized, unknown

STEPS, EPISODES = 256, 2
ALGORITHMS = {
    "PPO": (PPO, {"n_steps": 64}, "Pendulum-v1"),
    "SAC": (SAC, {}, "Pendulum-v1"),
    "TD3": (TD3, {}, "Pendulum-v1"),
    "DQN": (DQN, {}, "CartPole-v1"),
    "SAC, unbounded": (SAC, {}, "Drift-v0"),
}
OF_FILES = ["command line", "config", "load_policy", "watch"]


@dataclass
class Trained:
    algorithm: type[BaseAlgorithm]
    env: str
    file: Path
    """Beside its statistics, if it was trained with some."""
    alone: Path
    """The same without its statistics."""
    expected: np.ndarray
    """Returns of a loop of ``predict`` with the model's own statistics."""

    @property
    def config(self) -> EvalConfig:
        return config_for(self.env)


class Drift(gym.Env):
    """Unbounded observations of type float32, from which a model does not show whether they were normalized."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.normal(50, 20, 3).astype(np.float32)
        return self.position, {}

    def step(self, action):
        self.position = (0.9 * self.position + 5 + 3 * self.np_random.normal(size=3)).astype(np.float32)
        return self.position, float(action[0]), False, False, {}


gym.register("Drift-v0", Drift, max_episode_steps=20)


def config_for(env: str) -> EvalConfig:
    return EvalConfig().environment(env).evaluation(num_episodes=EPISODES)


def own_loop(model: BaseAlgorithm, env: str, normalizer: VecNormalize | None) -> np.ndarray:
    world, returns = gym.make(env), []
    for spec in config_for(env).build().plan():
        observation, done, total = world.reset(seed=spec.seed)[0], False, 0.0
        while not done:
            seen = observation if normalizer is None else normalizer.normalize_obs(observation)
            observation, reward, terminated, truncated, _ = world.step(model.predict(seen, deterministic=True)[0])
            done, total = terminated or truncated, total + float(reward)
        returns.append(total)
    return np.array(returns)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return models by algorithm and whether they were trained with a VecNormalize; each is trained once."""
    made = {}

    def get(name: str, normalized: bool) -> Trained:
        if (name, normalized) not in made:
            made[name, normalized] = train(name, normalized, tmp_path_factory.mktemp(name))
        return made[name, normalized]

    return get


def train(name: str, normalized: bool, folder: Path) -> Trained:
    algorithm, kwargs, env = ALGORITHMS[name]
    venv = DummyVecEnv([lambda: gym.make(env)])
    normalizer = venv = VecNormalize(venv) if normalized else venv
    model = algorithm("MlpPolicy", venv, seed=3, device="cpu", policy_kwargs={"net_arch": [16]}, **kwargs)
    model.learn(STEPS)
    (folder / "alone").mkdir()
    for file in (folder / "model.zip", folder / "alone" / "model.zip"):
        model.save(file)
    if normalized:
        normalizer.save(str(folder / "model_vecnormalize.pkl"))
    expected = own_loop(model, env, normalizer if normalized else None)
    assert not normalized or not np.allclose(expected, own_loop(model, env, None), rtol=1e-2), "the cell shows nothing"
    return Trained(algorithm, env, folder / "model.zip", folder / "alone" / "model.zip", expected)


def on_the_command_line(one: Trained, file: Path) -> EvalResult:
    arguments = ["run", "--env", one.env, "--policy", str(file), "--trust", "-n", str(EPISODES), "-o", "out"]
    done = CliRunner().invoke(app, arguments)
    if done.exit_code == 2:
        raise ConfigError(done.output)
    assert done.exit_code == 0, done.output
    return load("out")


def in_a_watch(one: Trained, file: Path) -> EvalResult:
    options = ["--env", one.env, "-n", str(EPISODES), "--trust", "--once", "--poll-s", "0.02", "--held-out", "0"]
    done = CliRunner().invoke(app, ["watch", f"{file.parent}/*.zip", *options, "-o", "seen", "--json"])
    points = json.loads(done.stdout)
    if not points or points[0].get("evaluation") is None:
        raise ConfigError(done.output)
    return load(Path("seen", "evaluations", points[0]["evaluation"]))


THROUGH = {
    "command line": on_the_command_line,
    "config": lambda one, file: evaluate(one.config.policy(f"sb3:{file}")),
    "load_policy": lambda one, file: evaluate(one.config, load_policy(file)),
    "live": lambda one, file: evaluate(one.config, one.algorithm.load(file, device="cpu")),
    "evaluate_policy": lambda one, file: (
        evaluate_policy(one.algorithm.load(file, device="cpu"), one.env, EPISODES).result
    ),
    "watch": in_a_watch,
}


def outcome(door: str, one: Trained, file: Path) -> str:
    """Return ``right``, ``refused`` or ``wrong``, with ``, noted`` if the result has a note about statistics."""
    try:
        result = THROUGH[door](one, file)
    except ConfigError as error:
        return "refused" if "VecNormalize" in str(error) else f"refused for another reason: {error}"
    right = np.allclose(result.table.rows["episode_return"], one.expected, rtol=1e-3)
    noted = any("VecNormalize" in note for note in result.notes)
    return ("right" if right else "wrong") + (", noted" if noted else "")


@pytest.mark.parametrize("door", THROUGH)
@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_door_gives_a_wrong_number_without_a_word(
    algorithm, normalized, door, trained, tmp_path, monkeypatch, caplog
):
    """With the statistics beside the file, as SB3's callbacks save them."""
    monkeypatch.chdir(tmp_path)
    unknown.cache_clear()
    one = trained(algorithm, normalized)
    shown = trained_normalized(facts_of(one.file))
    assert shown in ({True, None} if normalized else {False, None})
    with caplog.at_level(logging.WARNING):
        found = outcome(door, one, one.file)
    if normalized and door in OF_FILES:
        assert found == "right, noted"
    elif shown is None:
        assert found == ("wrong, noted" if normalized else "right, noted")
        assert "VecNormalize" in caplog.text
    else:
        assert found == ("refused" if normalized else "right")


@pytest.mark.parametrize("door", OF_FILES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_file_without_its_statistics_is_refused_or_noted(algorithm, door, trained, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    unknown.cache_clear()
    one = trained(algorithm, True)
    with caplog.at_level(logging.WARNING):
        found = outcome(door, one, one.alone)
    if trained_normalized(facts_of(one.alone)):
        assert found == "refused"
    else:
        assert found == "wrong, noted"
        assert "VecNormalize" in caplog.text


def test_a_normalizer_that_appears_after_the_evaluation_repeats_it(trained, tmp_path, monkeypatch):
    """An off-policy model does not show that it needs one, and its trainer writes the replay buffer before it."""
    monkeypatch.chdir(tmp_path)
    one = trained("SAC, unbounded", True)
    Path("run").mkdir()
    shutil.copy(one.file, "run")
    assert outcome("watch", one, Path("run/model.zip")) == "wrong, noted"
    shutil.copy(one.file.with_name("model_vecnormalize.pkl"), "run")
    assert outcome("watch", one, Path("run/model.zip")) == "right, noted"


def test_a_normalizer_that_is_half_written_is_read_again(trained, tmp_path, monkeypatch):
    """The model itself has not changed for a long time; the exit code 0 says that it has a score."""
    monkeypatch.chdir(tmp_path)
    one = trained("SAC, unbounded", True)
    Path("run").mkdir()
    shutil.copy(one.file, "run")
    os.utime("run/model.zip", (1e9, 1e9))
    normalizer = one.file.with_name("model_vecnormalize.pkl")
    Path("run", normalizer.name).write_bytes(normalizer.read_bytes()[:-100])
    arguments = ["watch", "run/*.zip", "--env", one.env, "-n", str(EPISODES), "--trust", "--once", "--poll-s", "0.02"]
    torn = CliRunner().invoke(app, [*arguments, "-o", "seen"])
    assert (torn.exit_code, "tried again" in torn.output) == (1, True), torn.output
    shutil.copy(normalizer, "run")
    whole = CliRunner().invoke(app, [*arguments, "-o", "seen", "--json"])
    assert whole.exit_code == 0, whole.output
    point = json.loads(whole.stdout)[0]
    assert np.allclose(
        load(Path("seen", "evaluations", point["evaluation"])).mean_return, one.expected.mean(), rtol=1e-3
    )


def test_a_result_says_whether_observations_are_normalized(trained):
    """Unless the model shows that it was trained without a VecNormalize."""
    one = trained("PPO", True)
    model = one.algorithm.load(one.file, device="cpu")
    statistics = one.file.with_name("model_vecnormalize.pkl")
    venv = VecNormalize.load(str(statistics), DummyVecEnv([lambda: gym.make(one.env)]))
    noted = {
        "of model_vecnormalize.pkl": [load_policy(one.file), load_policy(one.file, statistics)],
        "of the environment": [one.algorithm.load(one.file, venv, device="cpu")],
        "are not normalized": [model.policy, load_policy(one.file, False)],
    }
    for text, policies in noted.items():
        for policy in policies:
            [note] = evaluate(one.config, policy).notes
            assert text in note
    assert "of the environment" in evaluate_policy(model, venv, EPISODES).result.notes[0]


def test_a_model_that_trains_on_shows_its_environment(trained, caplog):
    """A loaded model does not, until it is trained."""
    one = trained("SAC", False)
    model = SAC.load(one.file, env=gym.make(one.env), device="cpu")
    assert trained_normalized(vars(model)) is None
    callback = EvalCallback(one.config, every_steps=64, verbose=0)
    model.learn(64, callback=callback)
    assert [result.notes for _, result in callback.results] == [[]]
    assert evaluate(one.config, model).notes == []
    assert not caplog.text
