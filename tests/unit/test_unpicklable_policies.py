"""Policies that cannot be pickled, evaluated in the process that has them."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, LogMismatch
from rl_eval.recording.replay import replay
from tests.refused import refused

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
CONFIG = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=5, seed=3, max_episode_steps=30)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)

    def forward(self, observations):
        return 2 * torch.tanh(3 * self.layer(observations))


class Session:
    """Object that owns a lock, as sessions of inference libraries do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.net = Net()

    def __call__(self, observations):
        with self.lock, torch.no_grad():
            return self.net(torch.as_tensor(observations)).numpy()


class Acting:
    def __init__(self) -> None:
        self.session = Session()

    def act(self, observations, state, live, noise):
        return self.session(observations), None


class Inside(nn.Module):
    """Module with a part that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(Net())

    def forward(self, observations):
        return self.part(observations)


class Locked(Net):
    """Module that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def exported():
    batch = ({0: torch.export.Dim("batch")},)
    return torch.export.export(Net(), (torch.zeros(4, 3),), dynamic_shapes=batch).module()


def a_function():
    session = Session()
    return lambda observations: session(observations) + 0.0


MAKES = {
    "traced": lambda: torch.jit.trace(Net(), torch.zeros(4, 3)),
    "scripted": lambda: torch.jit.script(Net()),
    "inside a module": Inside,
    "session": Session,
    "object that acts": Acting,
    "function": a_function,
}


@pytest.fixture(scope="module")
def expected():
    return evaluate(CONFIG, Net()).fingerprint


@pytest.mark.parametrize("name", MAKES)
def test_a_policy_in_this_process_need_not_be_pickled(name, expected):
    policy = MAKES[name]()
    if isinstance(policy, nn.Module):
        policy.train()
    before = torch.get_rng_state(), torch.is_grad_enabled()
    result = evaluate(CONFIG, policy)
    assert (result.status, result.fingerprint) == ("complete", expected)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.is_grad_enabled() is before[1]
    if isinstance(policy, nn.Module):
        assert policy.training
        assert result.provenance["weights"]["digest"]
    else:
        assert result.provenance["weights"]["digest"] is None
    assert result.provenance["identity"]["policy"].endswith(type(policy).__qualname__ if name != "function" else "")
    assert replay(result, 2, config=CONFIG, policy=policy, trust=True).identical


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_module_is_evaluated(expected):
    assert evaluate(CONFIG, exported()).fingerprint == expected


def test_weights_go_to_the_copy():
    """The caller's module keeps its own."""
    policy, other = torch.jit.script(Net()), Net()
    before = policy.layer.weight.clone()
    with torch.no_grad():
        other.layer.weight += 1
    with EvalRunnerGroup(CONFIG, policy) as group:
        group.sync_weights(other.state_dict())
        result = group.evaluate()
    assert torch.equal(policy.layer.weight, before)
    assert result.fingerprint == evaluate(CONFIG, other).fingerprint


def test_a_module_that_cannot_be_copied_is_rejected():
    """A runner would set the mode and the weights of the caller's own."""
    with refused(ConfigError, "the policy"):
        evaluate(CONFIG, Locked())


def test_the_log_of_a_policy_without_a_digest_needs_consent(tmp_path):
    """Another object of the same class may act otherwise."""
    session = Session()
    first = evaluate(CONFIG, session, output=tmp_path / "log")
    assert evaluate(CONFIG, session, output=tmp_path / "log").fingerprint == first.fingerprint
    with refused(LogMismatch, "output"):
        evaluate(CONFIG, Session(), output=tmp_path / "log")
    again = evaluate(CONFIG, Session(), output=tmp_path / "log", accept_code_change=True)
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(again.table.rows["episode_return"], first.table.rows["episode_return"])
