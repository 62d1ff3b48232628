"""Models of Stable-Baselines3 evaluated by rl_eval and by SB3 itself."""

import io
import pickle
from pathlib import Path

import pytest

pytest.importorskip("sb3_contrib")

import gymnasium as gym
from acting_world import Rewards, config_of
from sb3_worlds import Masked, make_model
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from rl_eval import evaluate, evaluate_policy
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.integrations.sb3 import as_weights, for_environment, load_policy, portable, saved_policies
from rl_eval.weights import snapshot_weights
from tests.cluster.trainer_state import compare, observe
from tests.refused import refused

# ---------------------------------------------------------------------- files


def save(model: BaseAlgorithm, folder: Path) -> dict[str, str]:
    model.save(folder / "model.zip")
    kwargs = {"path": str(folder / "model")}
    if (wrapper := model.get_vec_normalize_env()) is not None:
        wrapper.save(str(folder / "vn.pkl"))
        kwargs["vecnormalize"] = str(folder / "vn.pkl")
    return kwargs


@pytest.mark.parametrize(
    ("algorithm", "observation", "action", "kwargs"),
    [
        ("PPO", "vector", "discrete", {"wrap": VecNormalize}),
        ("A2C", "vector", "box", {"use_sde": True}),
        ("SAC", "vector", "box", {"use_sde": True}),
        ("SAC", "vector", "box", {}),
        ("TD3", "vector", "box", {}),
        ("DQN", "vector", "discrete", {}),
        ("RecurrentPPO", "vector", "discrete", {}),
        ("MaskablePPO", "vector", "discrete", {}),
        ("PPO", "image", "discrete", {"policy": "CnnPolicy", "wrap": lambda v: VecFrameStack(v, 2)}),
    ],
)
def test_a_saved_model_is_the_live_one(tmp_path, algorithm, observation, action, kwargs):
    model = make_model(algorithm, observation, action, **kwargs).learn(64)
    masks = algorithm == "MaskablePPO"
    config = config_of(observation, action, Masked if masks else Rewards, masks)
    live = evaluate(config, model).fingerprint
    assert evaluate(config, load_policy(**save(model, tmp_path))).fingerprint == live
    config.policy("rl_eval.integrations.sb3:load_policy", policy_kwargs=save(model, tmp_path))
    assert evaluate(config).fingerprint == live


def test_a_model_that_needs_a_newer_numpy_says_so(tmp_path, monkeypatch):
    def read(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'numpy._core'", name="numpy._core")

    (tmp_path / "model.zip").touch()
    monkeypatch.setattr(saved_policies, "attributes_of", read)
    with refused(ConfigError, "policy.policy_kwargs.path") as caught:
        load_policy(tmp_path / "model.zip")
    assert "numpy>=2" in caught.value.fix


def test_loading_touches_nothing_global(tmp_path):
    model = make_model("SAC", action="box").learn(64)
    kwargs = save(model, tmp_path)
    before = observe(model.policy)
    load_policy(**kwargs)
    compare(before, observe(model.policy))


def test_a_relative_path_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    make_model().save(tmp_path / "model.zip")
    monkeypatch.chdir(tmp_path)
    load_policy("model.zip")
    with refused(ConfigError, "policy.policy_kwargs.path", value="other.zip") as caught:
        load_policy("other.zip")
    assert str(tmp_path) in str(caught.value)


def test_files_that_are_something_else_are_errors(tmp_path):
    (tmp_path / "model.zip").write_bytes(b"no zip")
    with refused(ConfigError, "policy.policy_kwargs.path"):
        load_policy(tmp_path / "model.zip")
    make_model().save(tmp_path / "good.zip")
    (tmp_path / "vn.pkl").write_bytes(pickle.dumps([1]))
    with refused(ConfigError, "policy.policy_kwargs.vecnormalize", value=str(tmp_path / "vn.pkl")):
        load_policy(tmp_path / "good.zip", tmp_path / "vn.pkl")
    with refused(ConfigError, "policy.policy_kwargs.vecnormalize", value=str(tmp_path / "none.pkl")):
        load_policy(tmp_path / "good.zip", tmp_path / "none.pkl")


def test_a_live_model_whose_normalizer_is_missing_is_refused(tmp_path):
    """A loaded model has no environment; with one, or by its policy alone, it is evaluated."""
    trained = make_model(action="box", wrap=VecNormalize).learn(64)
    loaded = type(trained).load(save(trained, tmp_path)["path"], device="cpu")
    with refused(ConfigError, "policy", value="PPO"):
        evaluate(config_of(action="box"), loaded)
    with refused(ConfigError, "policy", value="PPO"):
        evaluate_policy(loaded, DummyVecEnv([lambda: gym.make("Pendulum-v1")]))
    assert len(for_environment(loaded, trained.get_env()).vecnormalize) == 1
    assert evaluate(config_of(action="box"), loaded.policy).status == "complete"
    loaded.set_env(trained.get_env())
    assert (
        evaluate(config_of(action="box"), loaded).fingerprint == evaluate(config_of(action="box"), trained).fingerprint
    )


def test_a_normalizer_of_rewards_need_not_be_there(tmp_path):
    model = make_model(action="box", wrap=lambda v: VecNormalize(v, norm_obs=False)).learn(64)
    path = save(model, tmp_path)["path"]
    with refused(ConfigError, "policy.policy_kwargs.vecnormalize", value=None):
        load_policy(path)
    saved = evaluate(config_of(action="box"), load_policy(path, vecnormalize=False))
    assert saved.fingerprint == evaluate(config_of(action="box"), model).fingerprint


def test_statistics_that_have_seen_nothing_are_refused(tmp_path):
    model = make_model(wrap=VecNormalize)
    with refused(WeightsError, "vecnormalize"):
        snapshot_weights(model, 1)
    with refused(ConfigError, "vecnormalize"):
        evaluate(config_of(), model)
    with refused(ConfigError, "vecnormalize"):
        load_policy(**save(model, tmp_path))


# ---------------------------------------------------------------------- the trainer


def test_a_copy_shares_nothing_with_its_model():
    model = make_model("PPO", wrap=VecNormalize).learn(64)
    detached = portable(model)
    theirs = {tensor.data_ptr() for tensor in [*model.policy.parameters(), *model.policy.buffers()]}
    assert not theirs & {tensor.data_ptr() for tensor in [*detached.parameters(), *detached.buffers()]}
    assert detached.optimizer is None
    assert len(pickle.dumps(detached)) < 200_000
    assert set(as_weights(model)) == set(dict(detached.state_dict()))


def test_weights_that_are_sent_are_those_of_the_moment():
    from rl_eval import EvalRunnerGroup

    model = make_model("PPO", action="box", wrap=VecNormalize).learn(64)
    with EvalRunnerGroup(config_of(action="box"), model) as group:
        first = group.evaluate()
        frozen = io.BytesIO()
        model.save(frozen)
        model.learn(64, reset_num_timesteps=False)
        assert group.evaluate().fingerprint == first.fingerprint
        handle = group.submit(weights=model)
        due = evaluate(config_of(action="box"), model).fingerprint
        model.learn(64, reset_num_timesteps=False)
        assert handle.result().fingerprint == due
        assert due != first.fingerprint
