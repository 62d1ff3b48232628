"""Models of Stable-Baselines3 evaluated by rl_eval and by SB3 itself."""

import copy
import io
import os
import pickle
import random
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3")

import gymnasium as gym
import numpy as np
import torch
from sb3_worlds import ACTIONS, DATA, OBSERVATIONS, Rewards, reads_data, their_returns
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize, VecTransposeImage

from rl_eval import EvalConfig, evaluate, evaluate_policy
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.integrations.sb3 import as_policy, as_weights, for_environment, load_policy, models, portable
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.weights import snapshot_weights

ALGORITHMS = {
    "PPO": lambda env, policy, **kwargs: PPO(policy, env, n_steps=64, batch_size=32, n_epochs=2, **kwargs),
    "A2C": lambda env, policy, **kwargs: A2C(policy, env, **kwargs),
    "DQN": lambda env, policy, **kwargs: DQN(policy, env, buffer_size=300, learning_starts=40, **kwargs),
    "SAC": lambda env, policy, **kwargs: SAC(policy, env, buffer_size=300, learning_starts=40, **kwargs),
    "TD3": lambda env, policy, **kwargs: TD3(policy, env, buffer_size=300, learning_starts=40, **kwargs),
}


def make_model(algorithm="PPO", observation="vector", action="discrete", wrap=lambda venv: venv, envs=1, **kwargs):
    """Build a model whose initial actions are worth comparing: the last layer is not near zero."""
    venv = wrap(DummyVecEnv([lambda: Rewards(observation, action)] * envs))
    space = venv.observation_space
    policy = "MultiInputPolicy" if isinstance(space, gym.spaces.Dict) else kwargs.pop("policy", "MlpPolicy")
    model = ALGORITHMS[algorithm](venv, policy, device="cpu", seed=3, **kwargs)
    if hasattr(model.policy, "action_net"):
        with torch.no_grad():
            model.policy.action_net.weight *= 200
    return model


def config_of(observation="vector", action="discrete", episodes=12, **policy):
    return (
        EvalConfig()
        .environment(Rewards, env_kwargs={"observation": observation, "action": action})
        .policy(**policy)
        .runners(num_envs_per_runner=5)
        .evaluation(num_episodes=episodes, seed=5)
    )


def our_returns(result):
    assert result.status == "complete", result.reason
    return [(record.episode_return, record.length) for record in result.episodes]


def copies_of(result):
    """How many rows the reference forward pass of this machine has."""
    return 1 if result.provenance["numerics"]["reference"] == "row" else 16


def seeds_of(result):
    return [record.seed for record in result.episodes]


def rows(space, count, seed=0):
    rng = np.random.default_rng(seed)
    from sb3_worlds import _drawn

    drawn = [_drawn(space, rng) for _ in range(count)]
    if isinstance(space, gym.spaces.Dict):
        return {key: np.stack([each[key] for each in drawn]) for key in space.spaces}
    return np.stack(drawn)


def global_state():
    return (
        random.getstate(),
        pickle.dumps(np.random.get_state()),  # noqa: NPY002
        torch.random.get_rng_state().numpy().tobytes(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        dict(os.environ),
    )


# ---------------------------------------------------------------------- the same numbers as SB3's own evaluation


@reads_data
@pytest.mark.parametrize(
    ("env_id", "name", "statistics"),
    [
        ("CartPole-v1", "cartpole_ppo_early.zip", None),
        ("Hopper-v5", "hopper_ppo_final.zip", "hopper_ppo_final_vecnormalize.pkl"),
    ],
)
def test_trained_policies_have_the_returns_that_sb3_finds(env_id, name, statistics):
    kwargs = {"path": str(DATA / name)} | ({"vecnormalize": str(DATA / statistics)} if statistics else {})
    config = (
        EvalConfig()
        .environment(env_id)
        .policy("rl_eval.integrations.sb3:load_policy", policy_kwargs=kwargs)
        .evaluation(num_episodes=10, seed=3)
    )
    result = evaluate(config)

    def wrap(venv):
        if statistics is None:
            return venv
        venv = VecNormalize.load(str(DATA / statistics), venv)
        venv.training = venv.norm_reward = False
        return venv

    model = PPO.load(DATA / name, device="cpu")
    theirs = their_returns(model, lambda: gym.make(env_id), seeds_of(result), wrap, copies_of(result))
    assert our_returns(result) == theirs
    assert len(set(theirs)) > 3


@pytest.mark.parametrize(
    ("algorithm", "observation", "action", "kwargs"),
    [
        ("PPO", "vector", "discrete", {}),
        ("PPO", "double", "box", {}),
        ("PPO", "matrix", "multi_discrete", {}),
        ("PPO", "discrete", "multi_binary", {}),
        ("PPO", "vector", "box", {"use_sde": True}),
        ("PPO", "vector", "box", {"use_sde": True, "policy_kwargs": {"squash_output": True}}),
        ("A2C", "multi_discrete", "box", {}),
        ("A2C", "multi_binary", "discrete", {}),
        ("DQN", "vector", "discrete", {}),
        ("DQN", "image", "discrete", {"policy": "CnnPolicy"}),
        ("SAC", "vector", "box", {}),
        ("SAC", "vector", "box", {"use_sde": True}),
        ("TD3", "dict_of_boxes", "box", {}),
        ("PPO", "dict", "discrete", {}),
        ("PPO", "image_first", "discrete", {"policy": "CnnPolicy"}),
        ("PPO", "image", "box", {"policy": "CnnPolicy"}),
        ("PPO", "color", "box", {"policy": "CnnPolicy"}),
    ],
)
def test_every_algorithm_and_space_acts_as_sb3_predicts(algorithm, observation, action, kwargs):
    model = make_model(algorithm, observation, action, **kwargs)
    result = evaluate(config_of(observation, action), model)
    env = lambda: Rewards(observation, action)  # noqa: E731
    assert our_returns(result) == their_returns(model, env, seeds_of(result), copies=copies_of(result))


STACK = 3
WRAPPERS = {
    "stack": ("vector", lambda v: VecFrameStack(v, STACK)),
    "stack_first": ("matrix", lambda v: VecFrameStack(v, STACK, channels_order="first")),
    "normalize": ("double", VecNormalize),
    "stack_then_normalize": ("vector", lambda v: VecNormalize(VecFrameStack(v, STACK))),
    "normalize_then_stack": ("double", lambda v: VecFrameStack(VecNormalize(v, clip_obs=0.5), STACK)),
    "stack_then_transpose": ("image", lambda v: VecTransposeImage(VecFrameStack(v, STACK))),
    "transpose_then_stack": ("image", lambda v: VecFrameStack(VecTransposeImage(v), STACK)),
    "stack_rows": ("image", lambda v: VecTransposeImage(VecFrameStack(v, STACK, channels_order="first"))),
    "stack_channels_first": ("image_first", lambda v: VecFrameStack(v, STACK)),
    "dict_stack_then_normalize_one": (
        "dict_of_boxes",
        lambda v: VecNormalize(VecTransposeImage(VecFrameStack(v, STACK)), norm_obs_keys=["speed"]),
    ),
    "dict_normalize_one_then_stack": (
        "dict_of_boxes",
        lambda v: VecTransposeImage(VecFrameStack(VecNormalize(v, norm_obs_keys=["speed"]), STACK)),
    ),
    "color_stack": ("color", lambda v: VecTransposeImage(VecFrameStack(v, STACK))),
    "rewards_only": ("vector", lambda v: VecNormalize(v, norm_obs=False)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_the_training_environment_are_done_as_sb3_does_them(name):
    observation, wrap = WRAPPERS[name]
    cnn = {"policy": "CnnPolicy"} if observation.startswith(("image", "color")) else {}
    # A Box of actions shows the last bits that an argmax hides.
    model = make_model("PPO", observation, "box", wrap=wrap, **cnn)
    model.learn(64)
    result = evaluate(config_of(observation, "box", episodes=8), model)

    def evaluation_env(venv):
        wrapped = wrap(venv)
        own = model.get_vec_normalize_env()
        layer = wrapped
        while own is not None and not isinstance(layer, VecNormalize):
            layer = layer.venv
        if own is not None:
            layer.training = layer.norm_reward = False
            layer.obs_rms = copy.deepcopy(getattr(own, "obs_rms", None))
        return wrapped

    env = lambda: Rewards(observation, "box")  # noqa: E731
    # The one order of wrappers whose memory layout rl_eval cannot tell from the spaces.
    last = name == "transpose_then_stack"
    theirs = their_returns(model, env, seeds_of(result), evaluation_env, copies_of(result), channels_last=last)
    assert our_returns(result) == theirs


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize(("algorithm", "action"), [("PPO", "box"), ("SAC", "box"), ("DQN", "discrete")])
def test_a_batch_of_any_size_has_the_bits_that_sb3_has_for_it(algorithm, action, count):
    model = make_model(algorithm, "vector", action)
    policy = as_policy(model, PolicySection(), OBSERVATIONS["vector"], ACTIONS[action])
    batch = rows(OBSERVATIONS["vector"], count)
    ours, _ = policy.act(batch, None, np.ones(count, bool), None)
    theirs, _ = model.predict(batch, deterministic=True)
    assert ours.tobytes() == theirs.astype(ours.dtype).tobytes()


def test_layout_does_not_matter_with_stacked_frames():
    model = make_model("PPO", "image", wrap=lambda v: VecFrameStack(v, 4), policy="CnnPolicy")
    prints = {
        evaluate(config_of("image", episodes=9).runners(num_envs_per_runner=lanes), model).fingerprint
        for lanes in (1, 4, 20)
    }
    assert len(prints) == 1


# ---------------------------------------------------------------------- spaces that do not fit


def test_observations_that_no_wrapper_explains_are_an_error_with_both_spaces():
    model = make_model("PPO", "vector")
    with pytest.raises(
        ConfigError, match=r"trained on observations of Box.*\(5,\).*environment's are of Box.*\(2, 3\)"
    ):
        evaluate(config_of("matrix"), model)


def test_other_actions_are_an_error_with_both_spaces():
    model = make_model("PPO", "vector", "discrete")
    with pytest.raises(ConfigError, match=r"trained with actions of Discrete\(4\).*MultiBinary\(3\)"):
        evaluate(config_of("vector", "multi_binary"), model)


def test_floats_where_bytes_are_due_are_an_error():
    model = make_model("PPO", "image_first", policy="CnnPolicy")
    with pytest.raises(ConfigError, match="float32 is not uint8"):
        as_policy(model, PolicySection(), gym.spaces.Box(0, 255, (2, 40, 36), np.float32), ACTIONS["discrete"])


def test_statistics_of_another_shape_are_an_error():
    model = make_model("PPO", "vector", wrap=VecNormalize)
    model.get_vec_normalize_env().obs_rms.mean = np.zeros(3)
    with pytest.raises(ConfigError, match=r"VecNormalize statistics have shape \(3,\)"):
        as_policy(model, PolicySection(), OBSERVATIONS["vector"], ACTIONS["discrete"])


def test_unsquashing_twice_is_an_error():
    with pytest.raises(ConfigError, match=r"policy.actions"):
        evaluate(config_of("vector", "box", actions="unsquash"), make_model("SAC", action="box"))


# ---------------------------------------------------------------------- sampling


def drawn(model, action, count=4000, **kwargs):
    """Sample many times for one observation, with the streams of many episodes."""
    policy = as_policy(model, PolicySection(deterministic=False), OBSERVATIONS["vector"], ACTIONS[action])
    batch = np.repeat(rows(OBSERVATIONS["vector"], 1), count, 0)
    noise = EpisodeNoise(np.arange(count), np.zeros(count, np.int64))
    actions, _ = policy.act(batch, None, np.ones(count, bool), noise)
    return torch.as_tensor(batch), actions


def test_discrete_actions_are_drawn_with_the_policys_probabilities():
    model = make_model("PPO")
    with torch.no_grad():
        model.policy.action_net.weight /= 100
    batch, actions = drawn(model, "discrete")
    probabilities = model.policy.get_distribution(batch[:1]).distribution.probs[0].detach().numpy()
    shares = np.bincount(actions, minlength=4) / len(actions)
    assert np.all(
        np.abs(shares - probabilities) < 4 * np.sqrt(probabilities * (1 - probabilities) / len(actions)) + 1e-9
    )


def test_multi_discrete_and_multi_binary_actions_are_drawn_part_by_part():
    for action in ("multi_discrete", "multi_binary"):
        model = make_model("PPO", action=action)
        with torch.no_grad():
            model.policy.action_net.weight /= 100
        batch, actions = drawn(model, action)
        with torch.no_grad():
            found = model.policy.get_distribution(batch[:1]).distribution
        if action == "multi_discrete":
            means = [float((part.probs[0] * torch.arange(part.probs.shape[1])).sum()) for part in found]
        else:
            means = found.probs[0].tolist()
        spread = actions.std(0) / np.sqrt(len(actions))
        assert np.all(np.abs(actions.mean(0) - means) < 4 * spread + 1e-9)
        assert abs(np.corrcoef(actions[:, 0], actions[:, 1])[0, 1]) < 0.06


def test_gaussian_actions_are_the_mean_and_the_episodes_own_noise():
    model = make_model("PPO", action="box")
    batch, actions = drawn(model, "box", 50)
    found = model.policy.get_distribution(batch).distribution
    noise = EpisodeNoise(np.arange(50), np.zeros(50, np.int64)).normal(2)
    due = found.loc + torch.from_numpy(noise).float() * found.scale
    assert np.array_equal(actions, np.clip(due.detach().numpy(), ACTIONS["box"].low, ACTIONS["box"].high))


def test_squashed_actions_are_drawn_before_the_squashing():
    model = make_model("SAC", action="box")
    batch, actions = drawn(model, "box", 50)
    mean, log_std, _ = model.policy.actor.get_action_dist_params(batch)
    noise = EpisodeNoise(np.arange(50), np.zeros(50, np.int64)).normal(2)
    squashed = np.tanh(mean.detach().numpy() + np.exp(log_std.detach().numpy()) * noise)
    np.testing.assert_allclose(actions, model.policy.unscale_action(squashed), rtol=1e-5, atol=1e-6)
    assert len(np.unique(actions[:, 0])) > 40


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_dqn_explores_with_its_rate_of_the_moment(rate):
    model = make_model("DQN")
    model.exploration_rate = rate
    batch, actions = drawn(model, "discrete")
    greedy = int(model.predict(batch[:1].numpy(), deterministic=True)[0][0])
    due = 1 - rate * 3 / 4
    assert abs((actions == greedy).mean() - due) < 4 * np.sqrt(due * (1 - due) / len(actions)) + 1e-9


def test_td3_predicts_the_same_either_way():
    model = make_model("TD3", action="box")
    batch, actions = drawn(model, "box", 16)
    assert np.array_equal(actions, model.predict(batch.numpy(), deterministic=False)[0])


def test_sampling_repeats_itself_and_leaves_global_generators_alone():
    model = make_model("PPO", action="box")
    config = config_of(action="box", deterministic=False)
    before = global_state()
    first = evaluate(config, model)
    assert global_state() == before
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    assert evaluate(config.copy().runners(num_envs_per_runner=2), model).fingerprint == first.fingerprint
    assert first.fingerprint != evaluate(config_of(action="box"), model).fingerprint


class OwnWay(ActorCriticPolicy):
    def _predict(self, observation, deterministic=False):
        return 3 - super()._predict(observation, deterministic)


class OwnPredict(ActorCriticPolicy):
    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return super().predict(observation, state, episode_start, deterministic)


class OwnModel(PPO):
    def predict(self, *args, **kwargs):
        return super().predict(*args, **kwargs)


def test_a_policy_with_its_own_way_is_followed():
    """When it is sampled, too: its draws are the episode's."""
    model = make_model("PPO", policy=OwnWay)
    result = evaluate(config_of(), model)
    assert our_returns(result) == their_returns(model, Rewards, seeds_of(result), copies=copies_of(result))
    assert np.array_equal(drawn(model, "discrete")[1], 3 - drawn(make_model("PPO"), "discrete")[1])


def test_what_predicts_in_a_way_of_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"OwnPredict has a predict\(\) of its own"):
        evaluate(config_of(), make_model("PPO", policy=OwnPredict))
    model = OwnModel("MlpPolicy", DummyVecEnv([Rewards]), n_steps=64, device="cpu")
    with pytest.raises(ConfigError, match=r"OwnModel has a predict\(\) of its own"):
        evaluate(config_of(), model)


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
        ("PPO", "image", "discrete", {"policy": "CnnPolicy", "wrap": lambda v: VecFrameStack(v, 2)}),
    ],
)
def test_a_saved_model_is_the_live_one(tmp_path, algorithm, observation, action, kwargs):
    model = make_model(algorithm, observation, action, **kwargs).learn(64)
    live = evaluate(config_of(observation, action), model)
    factory = config_of(observation, action, policy="rl_eval.integrations.sb3:load_policy")
    saved = evaluate(factory.policy(policy_kwargs=save(model, tmp_path)))
    assert saved.fingerprint == live.fingerprint
    assert (
        evaluate(config_of(observation, action), load_policy(**save(model, tmp_path))).fingerprint == live.fingerprint
    )


@reads_data
def test_the_command_line_evaluates_a_zip_file(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from rl_eval import EvalResult
    from rl_eval.cli import app

    monkeypatch.chdir(tmp_path)
    kwargs = {"path": str(DATA / "cartpole_ppo_early.zip")}
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    config.policy("rl_eval.integrations.sb3:load_policy", policy_kwargs=kwargs)
    Path("config.yaml").write_text(config.to_yaml())
    told = CliRunner().invoke(app, ["run", "config.yaml", "--output", "out"])
    assert told.exit_code == 0, told.output
    assert EvalResult.load("out").fingerprint == evaluate(config).fingerprint


def test_a_model_that_needs_a_newer_numpy_says_so(tmp_path, monkeypatch):
    def read(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'numpy._core'", name="numpy._core")

    (tmp_path / "model.zip").touch()
    monkeypatch.setattr(models, "load_from_zip_file", read)
    with pytest.raises(ConfigError, match="It was saved with NumPy 2: install numpy>=2"):
        load_policy(tmp_path / "model.zip")


def test_loading_touches_nothing_global(tmp_path):
    model = make_model("SAC", action="box").learn(64)
    kwargs = save(model, tmp_path)
    before = global_state()
    load_policy(**kwargs)
    assert global_state() == before


def test_a_relative_path_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    make_model().save(tmp_path / "model.zip")
    monkeypatch.chdir(tmp_path)
    load_policy("model.zip")
    with pytest.raises(ConfigError, match=f"no file 'other.zip' in {tmp_path}"):
        load_policy("other.zip")


def test_files_that_are_something_else_are_errors(tmp_path):
    (tmp_path / "model.zip").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        load_policy(tmp_path / "model.zip")
    make_model().save(tmp_path / "good.zip")
    (tmp_path / "vn.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(ConfigError, match="holds a list, not a VecNormalize"):
        load_policy(tmp_path / "good.zip", tmp_path / "vn.pkl")
    with pytest.raises(ConfigError, match="there is no file"):
        load_policy(tmp_path / "good.zip", tmp_path / "none.pkl")


@pytest.mark.parametrize("algorithm", ["PPO", "A2C"])
def test_a_model_whose_normalizer_is_missing_is_refused(tmp_path, algorithm):
    """The zip file tells: it keeps an observation from before it was normalized."""
    model = make_model(algorithm, action="box", wrap=lambda v: VecFrameStack(VecNormalize(v), 2)).learn(64)
    kwargs = save(model, tmp_path)
    with pytest.raises(ConfigError, match=r"trained with a VecNormalize.* Give the file that venv.save\(\) wrote"):
        load_policy(kwargs["path"])
    assert len(load_policy(**kwargs).vecnormalize) == 1


def test_a_live_model_whose_normalizer_is_missing_is_refused(tmp_path):
    """A loaded model has no environment; with one, or by its policy alone, it is evaluated."""
    trained = make_model(action="box", wrap=VecNormalize).learn(64)
    loaded = type(trained).load(save(trained, tmp_path)["path"], device="cpu")
    with pytest.raises(ConfigError, match=r"PPO was trained with a VecNormalize.* Load it with .*load_policy"):
        evaluate(config_of(action="box"), loaded)
    with pytest.raises(ConfigError, match=r"or give model\.policy if it normalized rewards only"):
        evaluate_policy(loaded, DummyVecEnv([lambda: gym.make("Pendulum-v1")]))
    assert len(for_environment(loaded, trained.get_env()).vecnormalize) == 1
    assert evaluate(config_of(action="box"), loaded.policy).status == "complete"
    loaded.set_env(trained.get_env())
    assert (
        evaluate(config_of(action="box"), loaded).fingerprint == evaluate(config_of(action="box"), trained).fingerprint
    )


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "SAC", "TD3"])
def test_a_model_without_a_normalizer_is_asked_for_none(tmp_path, algorithm):
    """Algorithms with a replay buffer keep such an observation in any case."""
    make_model(algorithm, action="box").learn(64).save(tmp_path / "model.zip")
    assert len(load_policy(tmp_path / "model.zip").vecnormalize) == 0


def test_a_normalizer_of_rewards_need_not_be_there(tmp_path):
    model = make_model(action="box", wrap=lambda v: VecNormalize(v, norm_obs=False)).learn(64)
    path = save(model, tmp_path)["path"]
    with pytest.raises(ConfigError, match="give False if it normalized rewards only"):
        load_policy(path)
    saved = evaluate(config_of(action="box"), load_policy(path, vecnormalize=False))
    assert saved.fingerprint == evaluate(config_of(action="box"), model).fingerprint


def test_statistics_that_have_seen_nothing_are_refused(tmp_path):
    model = make_model(wrap=VecNormalize)
    with pytest.raises(WeightsError, match="uninitialized"):
        snapshot_weights(model, 1)
    with pytest.raises(ConfigError, match="uninitialized"):
        evaluate(config_of(), model)
    with pytest.raises(ConfigError, match="uninitialized"):
        load_policy(**save(model, tmp_path))


# ---------------------------------------------------------------------- the trainer


@pytest.mark.parametrize(
    ("algorithm", "action"),
    [("PPO", "box"), ("A2C", "multi_discrete"), ("SAC", "box"), ("TD3", "box"), ("DQN", "discrete")],
)
def test_a_model_trains_on_as_if_it_had_not_been_evaluated(algorithm, action):
    def trained(evaluated: bool):
        model = make_model(algorithm, "vector", action, wrap=VecNormalize)
        model.learn(64)
        if evaluated:
            model.policy.set_training_mode(True)
            before, modes = global_state(), [module.training for module in model.policy.modules()]
            evaluate(config_of("vector", action), model)
            snapshot_weights(model, 1)
            assert global_state() == before
            assert [module.training for module in model.policy.modules()] == modes
        model.policy.set_training_mode(True)
        model.learn(64, reset_num_timesteps=False)
        return {name: tensor.clone() for name, tensor in as_weights(model).items()}

    plain, evaluated = trained(False), trained(True)
    assert plain.keys() == evaluated.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, evaluated[name]), name


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


def test_the_statistics_do_not_move_during_an_evaluation():
    model = make_model("PPO", wrap=VecNormalize).learn(64)
    before = snapshot_weights(model, 1).digest
    policy = as_policy(model, PolicySection(), OBSERVATIONS["vector"], ACTIONS["discrete"])
    inside = snapshot_weights(policy.module, 1).digest
    policy.act(rows(OBSERVATIONS["vector"], 16), None, np.ones(16, bool), None)
    assert snapshot_weights(policy.module, 1).digest == inside == before
    assert snapshot_weights(model, 1).digest == before
