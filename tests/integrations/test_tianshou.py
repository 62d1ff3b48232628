"""Policies of Tianshou beside plain loops of their own calls on the same seeds."""

import pytest

pytest.importorskip("tianshou")

import torch
from acting_world import ACTIONS, Rewards, config_of, ours, play
from tianshou.algorithm import Reinforce
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.iqn import IQNPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch
from tianshou.utils.net.common import Net, Recurrent
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousActorProbabilistic
from tianshou.utils.net.discrete import DiscreteActor, ImplicitQuantileNetwork
from torch.distributions import Independent, Normal

from rl_eval import evaluate
from rl_eval.errors import ConfigError
from tests.refused import refused

DISCRETE, BOX = ACTIONS["discrete"], ACTIONS["box"]


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


def kind(policy):
    return "discrete" if policy.action_space == DISCRETE else "box"


def theirs(result, policy):
    """Play the episodes of a result as a collector does."""

    def chosen(block, seed, step):
        with torch.no_grad():
            act = policy(Batch(obs=block, info=Batch())).act
        return policy.map_action(act.numpy() if isinstance(act, torch.Tensor) else act)[0]

    return play(result, Rewards("vector", kind(policy)), chosen)


@pytest.mark.parametrize("make", [reinforce, gaussian, sac, dqn, ddpg])
def test_a_policy_has_the_returns_of_its_own_calls(make):
    policy = build(make)
    result = evaluate(config_of("vector", kind(policy)), policy)
    assert ours(result) == theirs(result, policy)


def test_an_algorithm_stands_for_its_policy_and_is_left_as_it_was():
    policy = build(reinforce)
    policy.deterministic_eval = False
    algorithm = Reinforce(policy=policy, optim=AdamOptimizerFactory(lr=1e-3)).train()
    modes = [module.training for module in algorithm.modules()]
    result = evaluate(config_of("vector", kind(policy)), algorithm)
    assert [module.training for module in algorithm.modules()] == modes
    assert policy.deterministic_eval is False
    assert ours(result) == ours(evaluate(config_of("vector", kind(policy)), build(reinforce)))


@pytest.mark.parametrize("make", [reinforce, gaussian, sac])
def test_samples_come_from_the_episodes_own_noise(make):
    policy = build(make)
    before = torch.random.get_rng_state()
    config = config_of("vector", kind(policy), deterministic=False)
    result = evaluate(config, policy)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert evaluate(config.runners(num_envs_per_runner=20), policy).fingerprint == result.fingerprint
    assert ours(result) != theirs(result, policy)


def test_samples_of_a_policy_that_is_sure_are_its_modes():
    policy = build(reinforce)
    with torch.no_grad():
        for weight in policy.actor.last.parameters():
            weight.mul_(1e6)
    result = evaluate(config_of("vector", kind(policy), deterministic=False), policy)
    policy.deterministic_eval = False
    assert ours(result) == theirs(result, policy)


def test_other_actions_and_recurrent_policies_are_refused():
    config = config_of()
    with refused(ConfigError, "policy"):
        evaluate(config, build(sac))
    model = Recurrent(layer_num=1, state_shape=5, action_shape=4, hidden_layer_size=8)
    with refused(ConfigError, "policy"):
        evaluate(config, DiscreteQLearningPolicy(model=model, action_space=DISCRETE).eval())


def test_quantiles_that_are_drawn_have_no_most_likely_value():
    """The median quantile would choose another action than the mean of the quantiles."""
    net_of = ImplicitQuantileNetwork(preprocess_net=net(16), action_shape=4)
    policy = IQNPolicy(model=net_of, action_space=DISCRETE, sample_size=8, online_sample_size=4, target_sample_size=4)
    config = config_of("vector", "discrete")
    with refused(ConfigError, key="policy.deterministic"):
        evaluate(config, policy)
    assert evaluate(config.policy(deterministic=False), policy).status == "complete"
