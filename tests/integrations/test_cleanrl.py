"""Agents of CleanRL beside plain loops of their own methods on the same seeds, and what ``docs`` shows of it.

The networks are those of CleanRL's ``ppo.py``, ``ppo_continuous_action.py``, ``sac_continuous_action.py``, ``dqn.py``,
``c51.py`` and ``td3_continuous_action.py`` (MIT licence), but smaller.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from acting_world import ACTIONS, OBSERVATIONS, Rewards, config_of, ours, play
from torch import nn
from torch.distributions.categorical import Categorical
from torch.distributions.normal import Normal

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from rl_eval.integrations.cleanrl import AgentPolicy, load_agent
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.policies.noise import EpisodeNoise
from tests.refused import refused


def layers(envs, outputs):
    inputs = np.array(envs.single_observation_space.shape).prod()
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, int(outputs)))


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.critic = layers(envs, 1)
        self.actor = layers(envs, envs.single_action_space.n)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class ContinuousAgent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.critic = layers(envs, 1)
        self.actor_mean = layers(envs, np.prod(envs.single_action_space.shape))
        self.actor_logstd = nn.Parameter(torch.zeros(1, np.prod(envs.single_action_space.shape)))

    def get_action_and_value(self, x, action=None):
        action_mean = self.actor_mean(x)
        action_std = torch.exp(self.actor_logstd.expand_as(action_mean))
        probs = Normal(action_mean, action_std)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


def register_scale(module, env):
    low, high = env.single_action_space.low, env.single_action_space.high
    module.register_buffer("action_scale", torch.tensor((high - low) / 2.0, dtype=torch.float32))
    module.register_buffer("action_bias", torch.tensor((high + low) / 2.0, dtype=torch.float32))


class SACActor(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc_mean = layers(env, np.prod(env.single_action_space.shape))
        self.fc_logstd = layers(env, np.prod(env.single_action_space.shape))
        register_scale(self, env)

    def get_action(self, x):
        mean, log_std = self.fc_mean(x), -5 + 3.5 * (torch.tanh(self.fc_logstd(x)) + 1)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale + self.action_bias
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return action, log_prob.sum(1, keepdim=True), torch.tanh(mean) * self.action_scale + self.action_bias


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.network = layers(env, env.single_action_space.n)

    def forward(self, x):
        return self.network(x)


class C51(nn.Module):
    def __init__(self, env, n_atoms=101, v_min=-100, v_max=100):
        super().__init__()
        self.env = env
        self.n_atoms = n_atoms
        self.register_buffer("atoms", torch.linspace(v_min, v_max, steps=n_atoms))
        self.n = env.single_action_space.n
        self.network = layers(env, self.n * n_atoms)

    def get_action(self, x, action=None):
        pmfs = torch.softmax(self.network(x).view(len(x), self.n, self.n_atoms), dim=2)
        q_values = (pmfs * self.atoms).sum(2)
        if action is None:
            action = torch.argmax(q_values, 1)
        return action, pmfs[torch.arange(len(x)), action]


class TD3Actor(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc = layers(env, np.prod(env.single_action_space.shape))
        register_scale(self, env)

    def forward(self, x):
        return torch.tanh(self.fc(x)) * self.action_scale + self.action_bias


class LSTMAgent(Agent):
    def get_action_and_value(self, x, lstm_state, done, action=None):
        return super().get_action_and_value(x, action)


def build(kind, action, **kwargs):
    torch.manual_seed(1)
    envs = SimpleNamespace(single_observation_space=OBSERVATIONS["vector"], single_action_space=ACTIONS[action])
    return kind(envs, **kwargs).eval()


def loop(result, action, act):
    """Play the episodes of a result: ``act(x, seed, step)`` for copies of each observation, as CleanRL's evals do."""
    env = Rewards("vector", action)

    def chosen(block, seed, step):
        with torch.no_grad():
            taken = act(torch.Tensor(block), seed, step).numpy()[0]
        return taken.clip(env.action_space.low, env.action_space.high) if action == "box" else taken

    return play(result, env, chosen)


ACTS = {
    # Where the library samples, its agent is made so sure of itself that a sample is the mode.
    "ppo": (Agent, "discrete", lambda agent: agent.actor[2].weight.mul_(1e6), "get_action_and_value"),
    "ppo_continuous": (ContinuousAgent, "box", lambda agent: agent.actor_logstd.fill_(-80), "get_action_and_value"),
    "c51": (C51, "discrete", lambda agent: agent.network[2].weight.mul_(30), "get_action"),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_agent_has_the_returns_of_its_own_method(name):
    kind, action, sharpen, method = ACTS[name]
    agent = build(kind, action)
    with torch.no_grad():
        sharpen(agent)
    for deterministic in (True, False):
        result = evaluate(config_of("vector", action, deterministic=deterministic), AgentPolicy(agent))
        assert ours(result) == loop(result, action, lambda x, *_: getattr(agent, method)(x)[0])


def test_sac_acts_by_the_mean_that_it_returns():
    agent = build(SACActor, "box")
    result = evaluate(config_of(action="box"), AgentPolicy(agent))
    assert ours(result) == loop(result, "box", lambda x, *_: agent.get_action(x)[2])


@pytest.mark.parametrize(("kind", "action"), [(QNetwork, "discrete"), (TD3Actor, "box")])
def test_networks_of_values_and_actions_are_policies_as_they_are(kind, action):
    agent = build(kind, action)
    result = evaluate(config_of("vector", action), agent)
    own = (lambda x, *_: torch.argmax(agent(x), dim=1)) if kind is QNetwork else (lambda x, *_: agent(x))
    assert ours(result) == loop(result, action, own)
    with refused(ConfigError, "agent", value=kind.__name__):
        AgentPolicy(agent)


@pytest.mark.parametrize(("kind", "action"), [(Agent, "discrete"), (ContinuousAgent, "box"), (SACActor, "box")])
def test_what_an_agent_draws_comes_from_the_episodes_own_noise(kind, action):
    agent, config = AgentPolicy(build(kind, action)), config_of("vector", action, deterministic=False)
    before = torch.random.get_rng_state()
    result = evaluate(config, agent)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert evaluate(config.runners(num_envs_per_runner=20), agent).fingerprint == result.fingerprint
    assert ours(result) != ours(evaluate(config_of("vector", action), agent))


class Parts(gym.ObservationWrapper):
    """The world's observation in two parts."""

    observation_space = gym.spaces.Dict({"first": gym.spaces.Box(-9, 9, (2,)), "rest": gym.spaces.Box(-9, 9, (3,))})

    def observation(self, observation):
        return {"first": observation[:2], "rest": observation[2:]}


class AgentOfParts(nn.Module):
    """An agent that sees the same as the one inside."""

    def __init__(self, envs, agent):
        super().__init__()
        self.agent = agent

    def get_action_and_value(self, x):
        return self.agent.get_action_and_value(torch.cat([x["first"], x["rest"]], 1))


def test_an_agent_takes_observations_of_several_parts():
    whole = evaluate(config_of(), AgentPolicy(agent := build(Agent, "discrete")))
    parts = config_of().environment(lambda context: Parts(Rewards(**context)))
    assert evaluate(parts, AgentPolicy(AgentOfParts(None, agent))).fingerprint == whole.fingerprint


def test_an_agent_that_needs_more_than_environments_says_where_it_is_given(tmp_path):
    with refused(ConfigError, "policy.policy_kwargs.agent", value="AgentOfParts"):
        load_agent(AgentOfParts, tmp_path / "any.cleanrl_model", OBSERVATIONS["vector"], ACTIONS["discrete"])


def test_an_agent_with_a_memory_is_refused():
    with refused(ConfigError, "agent", value="LSTMAgent"):
        AgentPolicy(build(LSTMAgent, "discrete"))


FILES = {
    "ppo": (Agent, "discrete", lambda agent: agent.state_dict(), {}),
    "dqn": (QNetwork, "discrete", lambda agent: agent.state_dict(), {}),
    "td3": (TD3Actor, "box", lambda agent: (agent.state_dict(), {"qf1": torch.ones(1)}, {}), {}),
    "ppo and more": (
        Agent,
        "discrete",
        lambda agent: {"model": agent.state_dict(), "optimizer": {"state": {}}, "step": 7},
        {},
    ),
    "c51": (
        C51,
        "discrete",
        lambda agent: {"model_weights": agent.state_dict(), "args": {"n_atoms": 11}},
        {"n_atoms": 11},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_script_saves_is_the_live_agent(tmp_path, name):
    kind, action, saved, kwargs = FILES[name]
    agent = build(kind, action, **kwargs)
    path = tmp_path / f"{name}.cleanrl_model"
    torch.save(saved(agent), path)
    policy_kwargs = {"agent": kind, "path": str(path), "agent_kwargs": kwargs}
    loaded = evaluate(
        config_of("vector", action, policy="rl_eval.integrations.cleanrl:load_agent", policy_kwargs=policy_kwargs)
    )
    live = AgentPolicy(agent) if kind in (Agent, C51) else agent
    assert ours(loaded) == ours(evaluate(config_of("vector", action), live))


def test_an_agent_without_its_file_is_told_how_it_is_given():
    with refused(ConfigError, "policy.policy_kwargs", value="envs") as caught:
        evaluate(config_of(policy=f"{__name__}:Agent"))
    assert f"cleanrl:{__name__}:Agent@FILE" in caught.value.fix


def test_weights_of_another_agent_are_refused(tmp_path):
    torch.save(build(QNetwork, "discrete").state_dict(), tmp_path / "dqn.cleanrl_model")
    for name in ("dqn", "none"):
        with refused(ConfigError, "policy.policy_kwargs.path"):
            load_agent(Agent, tmp_path / f"{name}.cleanrl_model", OBSERVATIONS["vector"], ACTIONS["discrete"])


class Deterministic(nn.Module):
    """The actor of ``ddpg_continuous_action.py``, which reads the bounds of the whole vector environment."""

    def __init__(self, env):
        super().__init__()
        self.mean = layers(env, np.prod(env.single_action_space.shape))
        self.register_buffer("action_scale", torch.tensor((env.action_space.high - env.action_space.low) / 2.0))
        self.register_buffer("action_bias", torch.tensor((env.action_space.high + env.action_space.low) / 2.0))

    def forward(self, x):
        return torch.tanh(self.mean(x)) * self.action_scale + self.action_bias


def test_an_actor_of_ddpg_is_loaded(tmp_path):
    envs = gym.vector.SyncVectorEnv([lambda: Rewards("vector", "box")])
    actor = Deterministic(envs)
    torch.save((actor.state_dict(), {}), tmp_path / "ddpg.cleanrl_model")
    path = str(tmp_path / "ddpg.cleanrl_model")
    loaded = load_agent(Deterministic, path, OBSERVATIONS["vector"], ACTIONS["box"])
    seen = torch.randn(7, *OBSERVATIONS["vector"].shape)
    assert torch.equal(loaded(seen), actor(seen))


def test_normal_and_uniform_draws_in_any_form_use_the_episodes_noise():
    mean, noise = torch.zeros(3, 2), EpisodeNoise(np.arange(3), np.zeros(3, np.int64))
    before = torch.random.get_rng_state()
    with EpisodeDraws(np.ones(3, bool), noise):
        drawn = [
            torch.normal(mean, 0.1),
            torch.normal(0.0, torch.ones(3, 2)),
            torch.normal(0.0, 1.0, size=(3, 2)),
            torch.normal(0, 1, size=(3, 2)),
            mean.clone().uniform_(-1, to=1),
        ]
    assert torch.equal(torch.random.get_rng_state(), before)
    for numbers in drawn:
        assert numbers.shape == (3, 2)
        assert len(numbers.unique()) == 6
    assert drawn[0].abs().max() < 1


class BetaAgent(torch.nn.Module):
    """Agent of Pendulum whose actions have a Beta distribution, as many PPO agents of bounded spaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 2)

    def parameters_of(self, seen):
        return 1 + torch.nn.functional.softplus(4 * self.net(seen)).split(1, -1)[0], 2.0 + 0 * seen[:, :1]

    def get_action_and_value(self, seen, action=None):
        made = torch.distributions.Independent(torch.distributions.Beta(*self.parameters_of(seen)), 1)
        action = made.sample() if action is None else action
        return 4 * action - 2, made.log_prob(action), None, None


def test_an_agent_with_a_beta_distribution_acts_by_its_mode_and_by_the_episodes_noise():
    """Its episodes are those of its mode, and when sampled the same in all layouts."""
    agent = BetaAgent()

    def best(observations):
        with torch.no_grad():
            one, other = agent.parameters_of(torch.from_numpy(observations))
        return (4 * (one - 1) / (one + other - 2) - 2).numpy()

    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=5)
    result = evaluate(config, AgentPolicy(agent))
    np.testing.assert_allclose(result.returns, evaluate(config, best).returns, rtol=1e-4)
    sampled = [
        evaluate(config.copy().policy(deterministic=False).runners(num_envs_per_runner=lanes), AgentPolicy(agent))
        for lanes in (1, 8)
    ]
    assert len({one.fingerprint for one in sampled}) == 1
    assert sampled[0].mean_return != result.mean_return
