"""Which factories draw weights that no other run has, in a process that has imported torch."""

from collections import OrderedDict

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from rl_eval.config.settings import PolicySection
from rl_eval.policies import adapt_policy, has_random_weights

BOX, DISCRETE = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)


class Net(torch.nn.Module):
    """Layers that draw their weights, and a parameter and a buffer that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, observations):
        return self.layers(observations - self.mean) * self.scale


def saved() -> OrderedDict[str, torch.Tensor]:
    return OrderedDict((name, torch.full_like(one, 0.5)) for name, one in Net().state_dict().items())


SAVED = saved()


def loaded() -> Net:
    net = Net()
    net.load_state_dict(SAVED)
    return net


def assigned() -> Net:
    net = Net()
    net.load_state_dict(SAVED, assign=True)
    return net


def on_meta() -> Net:
    with torch.device("meta"):
        net = Net()
    net.load_state_dict(SAVED, assign=True)
    return net


def copied() -> Net:
    net = Net()
    for name, one in net.named_parameters():
        one.data.copy_(SAVED[name])
    return net


def sliced() -> Net:
    net = Net()
    with torch.no_grad():
        for name, one in net.named_parameters():
            one[:] = SAVED[name]
    return net


def replaced() -> Net:
    net = Net()
    for name, one in net.named_parameters():
        one.data = SAVED[name].clone()
    return net


def from_arrays() -> Net:
    net = Net()
    for name, one in net.named_parameters():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(SAVED[name].numpy()).flatten(), [one])
    return net


def beside_a_trace() -> Net:
    with FakeTensorMode():
        Net()
    return loaded()


def seeded() -> Net:
    torch.manual_seed(3)
    return Net()


def constant() -> Net:
    net = Net()
    for one in net.parameters():
        torch.nn.init.constant_(one, 0.1)
    return net


def drawn() -> Net:
    return Net()


def partly() -> Net:
    net = Net()
    net.load_state_dict({name: one for name, one in SAVED.items() if name != "layers.2.weight"}, strict=False)
    return net


def orthogonal() -> Net:
    net = Net()
    for one in net.parameters():
        (torch.nn.init.orthogonal_ if one.ndim > 1 else torch.nn.init.zeros_)(one)
    return net


def scaled() -> Net:
    net = loaded()
    net.scale = torch.nn.Parameter(torch.randn(2) * 0.1)
    return net


def buffered() -> Net:
    net = loaded()
    net.mean = torch.rand(4)
    return net


def moved() -> Net:
    return Net().double().float()


@pytest.mark.parametrize(
    "factory",
    [loaded, assigned, on_meta, copied, sliced, replaced, from_arrays, beside_a_trace, seeded, constant],
    ids=lambda one: one.__name__,
)
def test_weights_that_are_replaced_or_seeded_are_not_called_random(factory) -> None:
    assert not noted(factory)


@pytest.mark.parametrize("factory", [drawn, partly, orthogonal, scaled, buffered, moved], ids=lambda one: one.__name__)
def test_a_factory_that_draws_any_weight_is_noticed(factory) -> None:
    assert noted(factory)


def noted(factory) -> bool:
    before = torch.random.get_rng_state()
    policy = adapt_policy(PolicySection(policy=f"{__name__}:{factory.__name__}"), BOX, DISCRETE)
    assert torch.equal(before, torch.random.get_rng_state())
    return has_random_weights(policy)
