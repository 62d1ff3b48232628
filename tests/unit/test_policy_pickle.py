"""A policy without its weights, and with them again."""

import pickle

import pytest
import torch
from torch import nn

from rl_eval.backends.pickling import pickle_without_weights, unpickle_with_weights
from rl_eval.weights import snapshot_weights, weights_of


class Policy(nn.Module):
    def __init__(self, size: int = 1000) -> None:
        super().__init__()
        self.first = nn.Linear(4, size)
        self.tied = nn.Linear(4, size)
        self.tied.weight = self.first.weight
        self.register_buffer("mean", torch.arange(size, dtype=torch.float64))
        self.register_buffer("volatile", torch.ones(size, dtype=torch.bfloat16), persistent=False)
        self.turned = nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.told = self.first.bias  # One more name of the same tensor.
        self.plain = torch.full((7,), 3.0)

    def forward(self, observations):
        return self.first(observations)


def round_trip(policy, weights=None):
    data = pickle_without_weights(policy, policy)
    return data, unpickle_with_weights(data, weights_of(policy) if weights is None else weights)


def test_the_tensors_are_those_of_the_snapshot_and_not_in_the_pickle() -> None:
    policy = Policy(100_000)
    data, twin = round_trip(policy)
    assert len(data) < 10_000 < len(pickle.dumps(policy))
    for name, tensor in policy.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor), name
    assert torch.equal(twin.volatile, policy.volatile)
    assert torch.equal(twin.plain, policy.plain)
    ours = {(name, one.requires_grad, one.stride()) for name, one in policy.named_parameters()}
    assert {(name, one.requires_grad, one.stride()) for name, one in twin.named_parameters()} == ours


def test_shared_tensors_stay_shared_and_nothing_is_shared_with_the_original() -> None:
    policy = Policy()
    _, twin = round_trip(policy)
    assert twin.tied.weight is twin.first.weight
    assert twin.told is twin.first.bias
    with torch.no_grad():
        twin.first.weight.zero_()
    assert policy.first.weight.abs().sum() > 0


def test_the_snapshot_counts_and_not_later_weights() -> None:
    policy = Policy()
    snapshot, former = weights_of(policy), policy.first.weight.clone()
    with torch.no_grad():
        policy.first.weight.fill_(7.0)
    _, twin = round_trip(policy, snapshot)
    assert torch.equal(twin.first.weight, former)


@pytest.mark.parametrize("lacking", ["name", "shape", "dtype"])
def test_weights_that_do_not_fit_are_refused_later(lacking) -> None:
    """When they are set, as they are before the first episode."""
    policy = Policy()
    state = {name: tensor for name, tensor in policy.state_dict().items() if (name, lacking) != ("mean", "name")}
    state["mean"] = {"shape": torch.ones(3, dtype=torch.float64), "dtype": torch.ones(1000)}.get(lacking)
    weights = snapshot_weights({name: tensor for name, tensor in state.items() if tensor is not None}, 1)
    _, twin = round_trip(policy, weights)
    assert torch.equal(twin.mean, torch.zeros(1000, dtype=torch.float64))
    assert torch.equal(twin.first.weight, policy.first.weight)


def test_several_policies() -> None:
    policies = {"a": Policy(), "b": nn.Linear(2, 2), "c": len}
    _, twins = round_trip(policies)
    assert torch.equal(twins["a"].first.weight, policies["a"].first.weight)
    assert torch.equal(twins["b"].weight, policies["b"].weight)
    assert twins["c"] is len


def test_a_policy_without_weights_is_pickled_as_it_is() -> None:
    assert unpickle_with_weights(pickle_without_weights({"a": [1]}, None), None) == {"a": [1]}


class Marked(torch.Tensor):
    """A subclass, whose class is part of what it is."""


def test_tensors_that_are_more_than_their_values_stay_in_the_pickle() -> None:
    module = nn.Module()
    module.register_buffer("marked", torch.ones(3).as_subclass(Marked))
    module.weight = nn.Parameter(torch.ones(3))
    module.weight.note = "kept"
    _, twin = round_trip(module)
    assert type(twin.marked) is Marked
    assert torch.equal(twin.weight, module.weight)
