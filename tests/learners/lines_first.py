"""What the lines on functions, modules, and the libraries of the integrations need."""

from pathlib import Path

import pytest
import torch

NET = """
from torch import nn


def make():
    return nn.Linear(4, 2)
"""
ACTOR = """
from tensordict.nn import TensorDictModule
from torch import nn


def make():
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
"""
AGENT = """
import torch
from torch import nn


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.actor = nn.Linear(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
        self.critic = nn.Linear(envs.single_observation_space.shape[0], 1)

    def get_action_and_value(self, x, action=None):
        probs = torch.distributions.Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)
"""


def weights():
    Path("my_net.py").write_text(NET)
    torch.save(torch.nn.Linear(4, 2).state_dict(), "net.pt")
    return {}


def whole():
    torch.save(torch.nn.Linear(4, 2), "whole.pt")
    return {}


def sb3():
    model = pytest.importorskip("stable_baselines3").PPO("MlpPolicy", "CartPole-v1")
    model.save("model.zip")
    return {"model": model}


def rllib():
    pytest.importorskip("ormsgpack")
    from ray.rllib.algorithms.ppo import PPOConfig

    algorithm = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).build_algo()
    algorithm.save_to_path(str(Path("checkpoint").resolve()))
    return {"ppo": algorithm}


def torchrl():
    pytest.importorskip("torchrl")
    Path("my_actor.py").write_text(ACTOR)
    import my_actor

    actor = my_actor.make()
    torch.save(actor.state_dict(), "actor.pt")
    return {"actor": actor}


def cleanrl():
    import gymnasium as gym

    from rl_eval.integrations.cleanrl import AgentPolicy

    Path("ppo.py").write_text(AGENT)
    import ppo

    agent = ppo.Agent(gym.make_vec("CartPole-v1", num_envs=2))
    torch.save(agent.state_dict(), "ppo.cleanrl_model")
    return {"agent": agent, "AgentPolicy": AgentPolicy}


def tianshou():
    pytest.importorskip("tianshou")
    import gymnasium as gym
    from tianshou.algorithm import Reinforce
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor

    net = Net(state_shape=4, action_shape=0, hidden_sizes=[16])
    actor = DiscreteActor(preprocess_net=net, action_shape=2, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, action_space=gym.spaces.Discrete(2))
    return {"algorithm": Reinforce(policy=policy, optim=AdamOptimizerFactory())}


class Right:
    def act(self, observations, state, live, noise):
        return (observations[:, 3] > 0).astype(int), state


BEFORE = {
    "rl-eval run --env CartPole-v1 --policy torch:my_net:make@net.pt": weights,
    "rl-eval run --env CartPole-v1 --policy whole.pt --trust": whole,
    "rl-eval run --env CartPole-v1 --policy model.zip --trust": sb3,
    "rl-eval run --env CartPole-v1 --policy checkpoint --trust": rllib,
    "rl-eval run --env CartPole-v1 --policy torchrl:my_actor:make@actor.pt": torchrl,
    "rl-eval run --env CartPole-v1 --policy cleanrl:ppo:Agent@ppo.cleanrl_model": cleanrl,
    'evaluate("CartPole-v1", lambda observations: (observations[:, 3] > 0).astype(int))': dict,
    'evaluate("CartPole-v1", module)': lambda: {"module": torch.nn.Linear(4, 2)},
    'evaluate("CartPole-v1", policy)': lambda: {"policy": Right()},
    'evaluate("CartPole-v1", model)': sb3,
    'evaluate("CartPole-v1", ppo)': rllib,
    'evaluate("CartPole-v1", actor)': torchrl,
    'evaluate("CartPole-v1", algorithm)': tianshou,
    'evaluate("CartPole-v1", AgentPolicy(agent))': cleanrl,
}
"""What makes each line ready."""
