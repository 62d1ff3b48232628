"""Models of Stable-Baselines3 and sb3-contrib act as their own ``predict`` does, on the same seeds."""

import copy

import pytest

pytest.importorskip("sb3_contrib")

import gymnasium as gym
import numpy as np
import torch
from acting_world import ACTIONS, OBSERVATIONS, Rewards, config_of, drawn, ours, play
from sb3_contrib import ARS, QRDQN
from sb3_worlds import DATA, Masked, Wrapped, make_model, predicted, reads_data
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize, VecTransposeImage
from stable_baselines3.sac.policies import Actor, SACPolicy

from rl_eval import EvalConfig, evaluate
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3 import as_policy, load_policy, portable
from rl_eval.policies.noise import EpisodeNoise
from tests.cluster.trainer_state import compare, observe
from tests.refused import refused, result_of

CNN = {"policy": "CnnPolicy"}
SQUASHED = {"use_sde": True, "policy_kwargs": {"squash_output": True}}
STACK = 3


@reads_data
@pytest.mark.parametrize(
    ("env_id", "name", "statistics"),
    [
        ("CartPole-v1", "cartpole_ppo_early.zip", None),
        ("Hopper-v5", "hopper_ppo_final.zip", "hopper_ppo_final_vecnormalize.pkl"),
    ],
)
def test_trained_policies_have_the_returns_of_their_own_predict(env_id, name, statistics):
    kwargs = {"path": str(DATA / name)} | ({"vecnormalize": str(DATA / statistics)} if statistics else {})
    config = EvalConfig().environment(env_id).evaluation(num_episodes=10, seed=3)
    result = evaluate(config.policy("rl_eval.integrations.sb3:load_policy", policy_kwargs=kwargs))
    wrap = (lambda venv: VecNormalize.load(str(DATA / statistics), venv)) if statistics else (lambda venv: venv)
    env = gym.make(env_id)
    model = PPO.load(DATA / name, env=wrap(DummyVecEnv([lambda: env])), device="cpu")
    assert ours(result) == play(result, Wrapped(env, wrap, model), predicted(model))


@pytest.mark.parametrize(
    ("algorithm", "observation", "action", "kwargs"),
    [
        ("PPO", "vector", "discrete", {}),
        ("PPO", "double", "box", {}),
        ("PPO", "matrix", "multi_discrete", {}),
        ("PPO", "discrete", "multi_binary", {}),
        ("PPO", "vector", "box", {"use_sde": True}),
        ("PPO", "vector", "box", SQUASHED),
        ("PPO", "dict", "discrete", {}),
        ("PPO", "image_first", "discrete", CNN),
        ("PPO", "image", "box", CNN),
        ("PPO", "color", "box", CNN),
        ("A2C", "multi_discrete", "box", {}),
        ("A2C", "multi_binary", "discrete", {}),
        ("DQN", "vector", "discrete", {}),
        ("DQN", "image", "discrete", CNN),
        ("SAC", "vector", "box", {}),
        ("SAC", "vector", "box", {"use_sde": True}),
        ("TD3", "dict_of_boxes", "box", {}),
        ("TRPO", "vector", "box", {}),
        ("QRDQN", "vector", "discrete", {}),
        ("TQC", "vector", "box", {}),
        ("CrossQ", "vector", "box", {}),
        ("ARS", "vector", "box", {}),
        ("RecurrentPPO", "vector", "discrete", {}),
        ("RecurrentPPO", "vector", "box", {"policy_kwargs": {"n_lstm_layers": 2, "enable_critic_lstm": False}}),
        (
            "RecurrentPPO",
            "vector",
            "multi_discrete",
            {"policy_kwargs": {"shared_lstm": True, "enable_critic_lstm": False}},
        ),
        ("RecurrentPPO", "vector", "box", {"use_sde": True}),
        ("MaskablePPO", "vector", "discrete", {}),
        ("MaskablePPO", "vector", "multi_discrete", {}),
        ("MaskablePPO", "vector", "multi_binary", {}),
    ],
)
def test_every_algorithm_and_space_acts_as_its_own_predict(algorithm, observation, action, kwargs):
    model, masks = make_model(algorithm, observation, action, **kwargs), algorithm == "MaskablePPO"
    env = (Masked if masks else Rewards)(observation, action)
    result = evaluate(config_of(observation, action, type(env), masks), model)
    assert ours(result) == play(result, env, predicted(model, env))


WRAPPERS = {
    "stack": ("vector", lambda v: VecFrameStack(v, STACK)),
    "stack_first": ("matrix", lambda v: VecFrameStack(v, STACK, channels_order="first")),
    "normalize": ("double", VecNormalize),
    "stack_then_normalize": ("vector", lambda v: VecNormalize(VecFrameStack(v, STACK))),
    "recurrent_stack_then_normalize": ("vector", lambda v: VecNormalize(VecFrameStack(v, STACK))),
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
    kwargs = CNN if observation.startswith(("image", "color")) else {}
    # A Box of actions shows the last bits that an argmax hides.
    model = make_model("RecurrentPPO" if "recurrent" in name else "PPO", observation, "box", wrap=wrap, **kwargs)
    model.learn(64)
    result = evaluate(config_of(observation, "box"), model)
    # The one order of wrappers whose memory layout rl_eval cannot tell from the spaces.
    env = Wrapped(Rewards(observation, "box"), wrap, model, channels_last=name == "transpose_then_stack")
    assert ours(result) == play(result, env, predicted(model))


def test_the_state_of_recurrent_ppo_counts():
    """Else a policy that forgets would pass the tests above."""
    model = make_model("RecurrentPPO", action="box")
    result = evaluate(config_of(action="box"), model)
    forgetful = copy.copy(model)
    forgetful.predict = lambda seen, state, episode_start, **more: model.predict(
        seen, None, np.ones(len(seen), bool), **more
    )
    assert ours(result) != play(result, Rewards("vector", "box"), predicted(forgetful))


# ---------------------------------------------------------------------- masks


class InfoMasked(gym.Wrapper):
    """Tells the same masks by ``info``, and has no method."""

    def has_wrapper_attr(self, name):
        return name != "action_masks" and super().has_wrapper_attr(name)

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return observation, info | {"action_mask": self.env.action_masks()}

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"action_mask": self.env.action_masks()}


def wrapped(context):
    return gym.wrappers.TimeLimit(gym.wrappers.OrderEnforcing(Masked(**context)), 1000)


def told(context):
    return InfoMasked(Masked(**context))


@pytest.mark.parametrize("env", [wrapped, told])
def test_masks_are_found_under_wrappers_and_in_info(env):
    model = make_model("MaskablePPO")
    plain = evaluate(config_of(env=Masked, masks=True), model)
    assert ours(evaluate(config_of(env=env, masks=True), model)) == ours(plain)


def test_maskable_ppo_without_masks_is_refused():
    model = make_model("MaskablePPO")
    with refused(ConfigError, "environment.action_masks", value=None):
        evaluate(config_of(), model)
    fault = result_of(evaluate, config_of(masks=True).evaluation(num_episodes=1), model).faults[0]
    assert (fault.cause, fault.error_type, "action_masks()" in fault.message) == ("env", "EnvError", True)
    with refused(ConfigError, "environment.action_masks", value=True):
        evaluate(config_of(action="box", masks=True), make_model("PPO", action="box"))


def test_masks_of_another_size_are_the_environments_fault():
    class Short(Masked):
        def action_masks(self):
            return super().action_masks()[:-1]

    masked = config_of(env=Short, masks=True).evaluation(num_episodes=1)
    fault = result_of(evaluate, masked, make_model("MaskablePPO")).faults[0]
    assert (fault.cause, fault.error_type, "Discrete(4)" in fault.message) == ("env", "EnvError", True)


# ---------------------------------------------------------------------- sampling


SAMPLED = {
    "PPO, discrete": ("PPO", "discrete", {}),
    "PPO, multi_discrete": ("PPO", "multi_discrete", {}),
    "PPO, multi_binary": ("PPO", "multi_binary", {}),
    "PPO, box": ("PPO", "box", {}),
    "SAC, box": ("SAC", "box", {}),
    "masked": ("MaskablePPO", "discrete", {}),  # Its environment asserts that each action is allowed.
    "recurrent gSDE": ("RecurrentPPO", "box", {"use_sde": True}),
    "SAC, gSDE": ("SAC", "box", {"use_sde": True}),
    "stacked": ("PPO", "box", {"wrap": lambda v: VecFrameStack(v, STACK)}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_does_not_depend_on_the_layout_and_leaves_global_generators_alone(name):
    algorithm, action, kwargs = SAMPLED[name]
    model, masks = make_model(algorithm, "vector", action, **kwargs), algorithm == "MaskablePPO"
    if action != "box":
        with torch.no_grad():
            model.policy.action_net.weight /= 200
    mode, config = (
        config_of("vector", action, Masked if masks else Rewards, masks, deterministic=choice)
        for choice in (True, False)
    )
    before = observe(model.policy)
    first = evaluate(config, model)
    compare(before, observe(model.policy))
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    for lanes in (1, 20):
        assert evaluate(config.copy().runners(num_envs_per_runner=lanes), model).fingerprint == first.fingerprint
        assert evaluate(mode.copy().runners(num_envs_per_runner=lanes), model).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [
        ("PPO", {}),
        ("PPO", {"squash_output": True}),
        ("PPO", {"full_std": False, "use_expln": True}),
        ("SAC", {}),
    ],
)
def test_gsde_explores_by_one_matrix_per_episode(algorithm, kwargs):
    """SB3's own ``predict``, once its matrix is the one that the episode's seed gives."""
    model = make_model(algorithm, action="box", use_sde=True, policy_kwargs={"net_arch": [9, 8], **kwargs})
    actor = getattr(model.policy, "actor", model.policy)
    result = evaluate(config_of(action="box", deterministic=False), model)

    def begin(seed, copies):
        distribution = actor.action_dist
        std = distribution.get_std(actor.log_std).detach()
        numbers = EpisodeNoise(np.array([seed]), np.array([0])).normal(std.numel())
        distribution.exploration_mat = torch.from_numpy(numbers).float().reshape(std.shape) * std
        distribution.exploration_matrices = distribution.exploration_mat.expand(copies, -1, -1)

    assert ours(result) == play(result, Rewards("vector", "box"), predicted(model, begin=begin, deterministic=False))


def sampled(model, action, count=4000):
    """Sample many times for one observation, with the streams of many episodes."""
    policy = as_policy(model, PolicySection(deterministic=False), OBSERVATIONS["vector"], ACTIONS[action])
    batch = np.repeat(drawn(OBSERVATIONS["vector"], np.random.default_rng(0))[None], count, 0)
    noise = EpisodeNoise(np.arange(count), np.zeros(count, np.int64))
    return torch.as_tensor(batch), policy.act(batch, None, np.ones(count, bool), noise)[0]


@pytest.mark.parametrize("algorithm", ["PPO", "SAC"])
def test_gaussian_actions_are_the_mean_and_the_episodes_own_noise(algorithm):
    """Those of SAC are squashed afterwards."""
    model = make_model(algorithm, action="box")
    batch, actions = sampled(model, "box", 50)
    noise = torch.from_numpy(EpisodeNoise(np.arange(50), np.zeros(50, np.int64)).normal(2)).float()
    with torch.no_grad():
        if algorithm == "PPO":
            found = model.policy.get_distribution(batch).distribution
            due = np.clip((found.loc + noise * found.scale).numpy(), ACTIONS["box"].low, ACTIONS["box"].high)
        else:
            mean, log_std, _ = model.policy.actor.get_action_dist_params(batch)
            due = model.policy.unscale_action(torch.tanh(mean + log_std.exp() * noise).numpy())
    assert np.array_equal(actions, due)


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_dqn_explores_with_its_rate_of_the_moment(rate):
    model = make_model("DQN")
    model.exploration_rate = rate
    batch, actions = sampled(model, "discrete")
    greedy = int(model.predict(batch[:1].numpy(), deterministic=True)[0][0])
    due = 1 - rate * 3 / 4
    assert abs((actions == greedy).mean() - due) < 4 * np.sqrt(due * (1 - due) / len(actions)) + 1e-9


def test_td3_predicts_the_same_either_way():
    model = make_model("TD3", action="box")
    batch, actions = sampled(model, "box", 16)
    assert np.array_equal(actions, model.predict(batch.numpy(), deterministic=False)[0])


# ---------------------------------------------------------------------- ways of one's own, and what does not fit


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
    assert ours(result) == play(result, Rewards(), predicted(model))
    assert np.array_equal(sampled(model, "discrete")[1], 3 - sampled(make_model("PPO"), "discrete")[1])


def test_what_predicts_in_a_way_of_its_own_is_refused():
    with refused(ConfigError, "policy", value="OwnPredict"):
        evaluate(config_of(), make_model("PPO", policy=OwnPredict))
    model = OwnModel("MlpPolicy", DummyVecEnv([Rewards]), n_steps=64, device="cpu")
    with refused(ConfigError, "policy", value="OwnModel"):
        evaluate(config_of(), model)


def other_statistics(venv):
    normalizer = VecNormalize(venv)
    normalizer.obs_rms.mean = np.zeros(3)
    return normalizer


@pytest.mark.parametrize(
    ("model", "config", "key", "value"),
    [
        (("PPO", "vector"), ("matrix",), "environment.env", OBSERVATIONS["matrix"]),
        (("PPO", "vector"), ("vector", "multi_binary"), "environment.env", ACTIONS["multi_binary"]),
        (("PPO", "image_first"), ("floats",), "environment.env", OBSERVATIONS["floats"]),
        (("PPO", "vector", "discrete", other_statistics), ("vector",), "environment.env", OBSERVATIONS["vector"]),
        (("SAC", "vector", "box"), ("vector", "box", Rewards, False), "policy.actions", "unsquash"),
    ],
)
def test_what_does_not_fit_is_named(model, config, key, value):
    actions = "unsquash" if model[0] == "SAC" else "clip"
    with refused(ConfigError, key, value=str(value)):
        evaluate(config_of(*config, actions=actions), make_model(*model))


# ------------------------------------------------------------------------------ parts of a user, and less common ones


class Residual(Actor):
    """A fixed action plus a small learned correction."""

    def forward(self, obs, deterministic=False):
        return torch.clamp(0.8 + 0.1 * super().forward(obs, deterministic), -1, 1)


class ResidualPolicy(SACPolicy):
    def make_actor(self, features_extractor=None):
        return Residual(**self._update_features_extractor(self.actor_kwargs, features_extractor))


class Narrow(DiagGaussianDistribution):
    """Its actions have a tenth of the noise."""

    def get_actions(self, deterministic=False):
        return self.mode() if deterministic else self.mode() + 0.1 * (self.sample() - self.mode())


class NarrowPolicy(ActorCriticPolicy):
    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_dist = Narrow(self.action_space.shape[0])


@pytest.mark.parametrize(("algorithm", "policy"), [(SAC, ResidualPolicy), (PPO, NarrowPolicy)])
def test_an_actor_and_a_distribution_of_a_user_sample_as_they_predict(algorithm, policy):
    model = algorithm(policy, Rewards("vector", "box"), seed=0, device="cpu")
    ones = np.repeat(OBSERVATIONS["vector"].sample()[None], 3_000, 0)
    acting = as_policy(model, PolicySection(deterministic=False), OBSERVATIONS["vector"], ACTIONS["box"])
    noise = EpisodeNoise(np.arange(3_000), np.zeros(3_000, np.int64))
    given, _ = acting.act(ones, acting.initial_state(3_000), np.ones(3_000, bool), noise)
    theirs, _ = model.predict(ones, deterministic=False)
    assert np.allclose(given.mean(0), theirs.mean(0), atol=0.05)
    assert np.allclose(given.std(0), theirs.std(0), rtol=0.1)


class Passing(ActorCriticPolicy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Renaming(ActorCriticPolicy):
    def __init__(self, observations, actions, schedule, **kwargs):
        super().__init__(observations, actions, schedule, **kwargs)


@pytest.mark.parametrize("policy", [Passing, Renaming])
def test_a_file_of_a_users_policy_is_loaded(policy, tmp_path):
    model = PPO(policy, "CartPole-v1", n_steps=32, batch_size=32, seed=0, device="cpu")
    model.save(tmp_path / "model.zip")
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    loaded = evaluate(config, load_policy(tmp_path / "model.zip"))
    assert loaded.fingerprint == evaluate(config, model).fingerprint


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_qrdqn_explores_with_its_rate_of_the_moment(rate):
    model = QRDQN("MlpPolicy", Rewards("vector", "discrete"), seed=0, device="cpu", learning_starts=0)
    model.exploration_rate = rate
    acting = as_policy(model, PolicySection(deterministic=False), OBSERVATIONS["vector"], ACTIONS["discrete"])
    ones = np.repeat(OBSERVATIONS["vector"].sample()[None], 400, 0)
    noise = EpisodeNoise(np.arange(400), np.zeros(400, np.int64))
    given, _ = acting.act(ones, acting.initial_state(400), np.ones(400, bool), noise)
    assert len(np.unique(given)) == (ACTIONS["discrete"].n if rate else 1)


def stacked(inner, outer):
    venv = DummyVecEnv([lambda: Rewards("vector", "discrete")])
    return VecNormalize(VecNormalize(venv, norm_obs=inner), norm_obs=outer)


def test_the_inner_one_of_two_normalizers_counts_if_the_outer_one_leaves_observations_alone():
    model = PPO("MlpPolicy", stacked(True, False), n_steps=32, batch_size=32, seed=0, device="cpu").learn(64)
    inner = model.get_vec_normalize_env().venv
    acting = as_policy(portable(model), PolicySection(), OBSERVATIONS["vector"], ACTIONS["discrete"])
    seen = np.stack([OBSERVATIONS["vector"].sample() for _ in range(50)])
    given, _ = acting.act(seen, acting.initial_state(50), np.ones(50, bool), None)
    theirs, _ = model.predict(inner.normalize_obs(seen), deterministic=True)
    np.testing.assert_array_equal(given, theirs)


@pytest.mark.parametrize("policy", ["MlpPolicy", "LinearPolicy"])
def test_a_file_of_ars_acts_as_the_model_in_memory(policy, tmp_path):
    model = ARS(policy, "CartPole-v1", n_delta=2, seed=0, device="cpu")
    model.save(tmp_path / "ars.zip")
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    path = {"path": str(tmp_path / "ars.zip")}
    stored = evaluate(config.copy().policy("rl_eval.integrations.sb3:load_policy", policy_kwargs=path))
    assert stored.fingerprint == evaluate(config, model).fingerprint
