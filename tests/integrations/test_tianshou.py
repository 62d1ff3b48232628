"""Policies of Tianshou beside plain loops of their own calls on the same seeds."""

import pytest

pytest.importorskip("tianshou")

import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm import Reinforce
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch
from tianshou.utils.net.common import Net, Recurrent
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousActorProbabilistic
from tianshou.utils.net.discrete import DiscreteActor
from torch.distributions import Independent, Normal

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError

EPISODES = 20
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (5,), np.float64)
DISCRETE = gym.spaces.Discrete(4)
BOX = gym.spaces.Box(np.array([-0.3, -2.0], np.float32), np.array([0.4, 5.0], np.float32))


class World(gym.Env):
    """Rewards depend on every action and observation, and so does the length."""

    observation_space = OBSERVATIONS

    def __init__(self, discrete):
        self.action_space = DISCRETE if discrete else BOX

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        self._last = self.np_random.normal(0.0, 2.0, 5)
        return self._last, {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, self.action_space.dtype)), action
        acted = float(np.dot(np.ravel(action).astype(np.float64), np.arange(1, np.size(action) + 1)))
        reward = float(np.cos(self._last.mean() + acted * 1.7) + acted * 1e-3)
        self._steps += 1
        self._last = self.np_random.normal(0.0, 2.0, 5)
        return self._last, reward, bool(self._steps > 5 and reward > 0.9), self._steps >= 12, {}


def net(outputs=0):
    return Net(state_shape=5, action_shape=outputs, hidden_sizes=[16])


def reinforce(**kwargs):
    actor = DiscreteActor(preprocess_net=net(), action_shape=4, softmax_output=False)
    return DiscreteActorPolicy(actor=actor, action_space=DISCRETE, **kwargs)


def gaussian():
    actor = ContinuousActorProbabilistic(preprocess_net=net(), action_shape=2, unbounded=True)
    return ProbabilisticActorPolicy(
        actor=actor, dist_fn=lambda both: Independent(Normal(*both), 1), action_space=BOX, action_bound_method="tanh"
    )


def sac():
    actor = ContinuousActorProbabilistic(preprocess_net=net(), action_shape=2, unbounded=True, conditioned_sigma=True)
    return SACPolicy(actor=actor, action_space=BOX)


def dqn():
    return DiscreteQLearningPolicy(model=net(4), action_space=DISCRETE)


def ddpg():
    actor = ContinuousActorDeterministic(preprocess_net=net(), action_shape=2)
    return ContinuousDeterministicPolicy(actor=actor, action_space=BOX)


def build(make, **kwargs):
    torch.manual_seed(1)
    policy = make(**kwargs)
    policy.deterministic_eval = True
    return policy.eval()


def config_of(policy, **section):
    return (
        EvalConfig()
        .environment(World, env_kwargs={"discrete": policy.action_space == DISCRETE})
        .policy(**section)
        .runners(num_envs_per_runner=7)
        .evaluation(num_episodes=EPISODES, seed=5)
    )


def ours(result):
    assert result.status == "complete", result.reason
    return [(record.seed, record.episode_return, record.length) for record in result.episodes]


def theirs(result, policy):
    """Play the episodes of a result as a collector does, on copies of each observation.

    A runner defines a row as that of a block of so many rows.
    """
    copies = 1 if result.provenance["numerics"]["reference"] == "row" else 16
    env, played = World(policy.action_space == DISCRETE), []
    for seed in (record.seed for record in result.episodes):
        (observation, _), rewards, over = env.reset(seed=seed), [], False
        while not over:
            with torch.no_grad():
                act = policy(Batch(obs=np.repeat(observation[None], copies, 0), info=Batch())).act
            actions = policy.map_action(act.numpy() if isinstance(act, torch.Tensor) else act)
            observation, reward, terminated, truncated, _ = env.step(actions[0])
            rewards.append(reward)
            over = terminated or truncated
        played.append((seed, np.cumsum(rewards)[-1], len(rewards)))
    assert len({total for _, total, _ in played}) == EPISODES
    return played


@pytest.mark.parametrize("make", [reinforce, gaussian, sac, dqn, ddpg])
def test_a_policy_has_the_returns_of_its_own_calls(make):
    policy = build(make)
    result = evaluate(config_of(policy), policy)
    assert ours(result) == theirs(result, policy)


def test_an_algorithm_stands_for_its_policy_and_is_left_as_it_was():
    policy = build(reinforce)
    policy.deterministic_eval = False
    algorithm = Reinforce(policy=policy, optim=AdamOptimizerFactory(lr=1e-3)).train()
    modes = [module.training for module in algorithm.modules()]
    result = evaluate(config_of(policy), algorithm)
    assert [module.training for module in algorithm.modules()] == modes
    assert policy.deterministic_eval is False
    assert ours(result) == ours(evaluate(config_of(policy), build(reinforce)))


@pytest.mark.parametrize("make", [reinforce, gaussian, sac])
def test_samples_come_from_the_episodes_own_noise(make):
    policy = build(make)
    before = torch.random.get_rng_state()
    config = config_of(policy, deterministic=False)
    result = evaluate(config, policy)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert evaluate(config.runners(num_envs_per_runner=20), policy).fingerprint == result.fingerprint
    assert ours(result) != theirs(result, policy)


def test_samples_of_a_policy_that_is_sure_are_its_modes():
    policy = build(reinforce)
    with torch.no_grad():
        for weight in policy.actor.last.parameters():
            weight.mul_(1e6)
    result = evaluate(config_of(policy, deterministic=False), policy)
    policy.deterministic_eval = False
    assert ours(result) == theirs(result, policy)


def test_other_actions_and_recurrent_policies_are_refused():
    config = config_of(build(reinforce))
    with pytest.raises(ConfigError, match=r"made for actions of Box.*environment's are of Discrete\(4\)"):
        evaluate(config, build(sac))
    model = Recurrent(layer_num=1, state_shape=5, action_shape=4, hidden_layer_size=8)
    with pytest.raises(ConfigError, match="recurrent state"):
        evaluate(config, DiscreteQLearningPolicy(model=model, action_space=DISCRETE).eval())
