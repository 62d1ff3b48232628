"""Policies of every kind: some that are functions of their observations, and many that look as if they were.

Each is a factory, so that every runner builds its own, with fixed weights. Sampling ones that do as they should draw
from the noise of their episode; the others draw from, count in, or keep what they should not.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rl_eval.policies.mlp import make_mlp
from rl_eval.testing import make_dict_policy, make_gru

__all__ = ["FACTORIES", "build"]

Factory = Callable[[gym.Space[Any], gym.Space[Any]], Any]

FACTORIES: Final[dict[str, Factory]] = {}
"""By name; most act in ``Pendulum-v1``, whose returns depend on the last bit of every action."""

_CALLS: Final = [0]


def build(name: str, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
    """Build a policy by its name: the ``"module:factory"`` of all of them."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return FACTORIES[name](observation_space, action_space)


def _kind(factory: Factory) -> Factory:
    FACTORIES[factory.__name__.removeprefix("_")] = factory
    return factory


class Acting:
    """A policy of the plain kind: ``forward`` maps observation tensors to actions in [-1, 1].

    Its module is not an attribute called ``module``, so nothing puts it into evaluation mode.
    """

    def __init__(self, net: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.net = net

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return 2.0 * torch.tanh(self.net(torch.as_tensor(observations))).numpy(), None


class Transformed(nn.Module):
    """A network whose observations or actions are changed on the way."""

    def __init__(self, body: nn.Module, before: Callable[..., Any] | None = None, after: Any = None) -> None:
        super().__init__()
        self.body = body
        self.before = before or (lambda x: x)
        self.after = after or (lambda x: x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.body(self.before(x)))
        return result


def _net(*middle: nn.Module, inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), *middle, nn.Linear(32, outputs))


def _weights(inputs: int = 3) -> Any:
    return np.random.default_rng(4).normal(size=inputs)


def _linear(observations: Any) -> Any:
    """A numpy policy: one action per row, as a sum in a fixed order."""
    return 2.0 * np.tanh((observations.astype(np.float64) * _weights()).cumsum(1)[:, -1:])


# ---------------------------------------------------------------------- functions of their observations


@_kind
def _network(observation_space: Any, action_space: Any) -> Any:
    return make_mlp(observation_space, action_space)


@_kind
def _sampled_network(observation_space: Any, action_space: Any) -> Any:
    return make_mlp(observation_space, action_space)


@_kind
def _logits(observation_space: Any, action_space: Any) -> Any:
    return make_mlp(observation_space, action_space)


@_kind
def _sampled_logits(observation_space: Any, action_space: Any) -> Any:
    return make_mlp(observation_space, action_space)


@_kind
def _numpy_function(observation_space: Any, action_space: Any) -> Any:
    return _linear


@_kind
def _dropout_in_evaluation_mode(observation_space: Any, action_space: Any) -> Any:
    return _net(nn.Dropout(0.5))


@_kind
def _batch_norm_in_evaluation_mode(observation_space: Any, action_space: Any) -> Any:
    return _net(nn.BatchNorm1d(32))


@_kind
def _layer_norm(observation_space: Any, action_space: Any) -> Any:
    return _net(nn.LayerNorm(32))


@_kind
def _frozen_normalizer(observation_space: Any, action_space: Any) -> Any:
    return make_mlp(observation_space, action_space, normalize_observations=True)


@_kind
def _bfloat16(observation_space: Any, action_space: Any) -> Any:
    return _net().to(torch.bfloat16)


@_kind
def _float64(observation_space: Any, action_space: Any) -> Any:
    return _net().double()


@_kind
def _torchscript(observation_space: Any, action_space: Any) -> Any:
    return torch.jit.script(_net())


@_kind
def _compiled(observation_space: Any, action_space: Any) -> Any:
    return torch.compile(_net())


@_kind
def _integer_observation(observation_space: Any, action_space: Any) -> Any:
    return nn.Embedding(int(observation_space.n), int(action_space.n))


@_kind
def _dict_observation(observation_space: Any, action_space: Any) -> Any:
    return make_dict_policy(observation_space)


@_kind
def _declared_recurrent(observation_space: Any, action_space: Any) -> Any:
    return make_gru(observation_space, action_space)


@_kind
def _declared_noise(observation_space: Any, action_space: Any) -> Any:
    class Noisy:
        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
            return _linear(observations) + 0.3 * noise.normal(1), None

    return Noisy()


@_kind
def _overwrites_arrays(observation_space: Any, action_space: Any) -> Any:
    def act(observations: Any) -> Any:
        observations -= 0.25
        observations /= 2.0
        return _linear(observations)

    return act


@_kind
def _overwrites_tensors(observation_space: Any, action_space: Any) -> Any:
    return Transformed(_net(), before=lambda x: x.sub_(0.25).div_(2.0))


@_kind
def _remembers_answers(observation_space: Any, action_space: Any) -> Any:
    answers: dict[bytes, Any] = {}

    def act(observations: Any) -> Any:
        return np.stack([answers.setdefault(row.tobytes(), _linear(row[None])[0]) for row in observations])

    return act


@_kind
def _keeps_its_last_logits(observation_space: Any, action_space: Any) -> Any:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _net()
            self.last = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.body(x)
            return self.last

    return Keeping()


@_kind
def _rejects_made_up_observations(observation_space: Any, action_space: Any) -> Any:
    def act(observations: Any) -> Any:
        length = np.hypot(observations[:, 0], observations[:, 1])
        if not np.allclose(length[length > 0], 1.0, atol=1e-3):
            raise ValueError("these are no sine and cosine")
        return _linear(observations)

    return act


# ---------------------------------------------------------------------- functions of their batch


@_kind
def _batch_norm_in_training_mode(observation_space: Any, action_space: Any) -> Any:
    return Acting(_net(nn.BatchNorm1d(32)))


@_kind
def _normalizes_across_rows(observation_space: Any, action_space: Any) -> Any:
    return Transformed(_net(), before=lambda x: x - x.mean(0))


@_kind
def _adds_the_position(observation_space: Any, action_space: Any) -> Any:
    return lambda observations: _linear(observations) + 1e-6 * np.arange(len(observations))[:, None]


@_kind
def _counts_live_rows(observation_space: Any, action_space: Any) -> Any:
    class Counting:
        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
            return _linear(observations) / live.sum(), None

    return Counting()


# ---------------------------------------------------------------------- no functions at all: chance


@_kind
def _dropout_in_training_mode(observation_space: Any, action_space: Any) -> Any:
    return Acting(_net(nn.Dropout(0.1)))


@_kind
def _forced_dropout(observation_space: Any, action_space: Any) -> Any:
    return Transformed(_net(), before=lambda x: nn.functional.dropout(x, 0.1, training=True))


@_kind
def _torchscript_with_dropout(observation_space: Any, action_space: Any) -> Any:
    return Acting(torch.jit.script(_net(nn.Dropout(0.1)).train()))


@_kind
def _torch_rand_in_forward(observation_space: Any, action_space: Any) -> Any:
    return Transformed(_net(), after=lambda x: x + 0.01 * torch.randn(x.shape))


@_kind
def _global_numpy_generator(observation_space: Any, action_space: Any) -> Any:
    return lambda x: _linear(x) + np.random.uniform(-1, 1, (len(x), 1))  # noqa: NPY002


@_kind
def _global_python_generator(observation_space: Any, action_space: Any) -> Any:
    return lambda x: _linear(x) + np.array([[random.random()] for _ in x])


@_kind
def _own_numpy_generator(observation_space: Any, action_space: Any) -> Any:
    rng = np.random.default_rng(0)
    return lambda x: _linear(x) + rng.normal(size=(len(x), 1))


@_kind
def _own_torch_generator(observation_space: Any, action_space: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return Transformed(_net(), after=lambda x: x + torch.rand(x.shape, generator=generator))


@_kind
def _own_python_generator(observation_space: Any, action_space: Any) -> Any:
    rng = random.Random(0)
    return lambda x: _linear(x) + np.array([[rng.gauss(0, 1)] for _ in x])


@_kind
def _samples_the_action_space(observation_space: Any, action_space: Any) -> Any:
    action_space.seed(0)
    return lambda x: np.stack([action_space.sample() for _ in x])


@_kind
def _epsilon_greedy(observation_space: Any, action_space: Any) -> Any:
    rng = np.random.default_rng(0)
    return lambda x: np.where(rng.random((len(x), 1)) < 0.1, 0.0, _linear(x))


@_kind
def _rare_epsilon(observation_space: Any, action_space: Any) -> Any:
    rng = np.random.default_rng(0)
    return lambda x: np.where(rng.random((len(x), 1)) < 1e-3, 0.0, _linear(x))


@_kind
def _rare_epsilon_of_the_global_generator(observation_space: Any, action_space: Any) -> Any:
    return lambda x: np.where(np.random.random((len(x), 1)) < 1e-3, 0.0, _linear(x))  # noqa: NPY002


@_kind
def _systems_randomness(observation_space: Any, action_space: Any) -> Any:
    return lambda x: _linear(x) + np.frombuffer(os.urandom(len(x)), np.uint8)[:, None] / 255.0


@_kind
def _reads_a_clock(observation_space: Any, action_space: Any) -> Any:
    return lambda x: _linear(x) * np.sin(time.perf_counter())


@_kind
def _hash_of_a_string(observation_space: Any, action_space: Any) -> Any:
    return lambda x: _linear(x) * (1 + hash("policy") % 7)


# ---------------------------------------------------------------------- no functions at all: memory


@_kind
def _counts_its_calls(observation_space: Any, action_space: Any) -> Any:
    calls = 0

    def act(observations: Any) -> Any:
        nonlocal calls
        calls += 1
        return _linear(observations) * (calls % 2)

    return act


@_kind
def _counts_its_calls_in_a_global(observation_space: Any, action_space: Any) -> Any:
    def act(observations: Any) -> Any:
        _CALLS[0] += 1
        return _linear(observations) * np.cos(0.01 * _CALLS[0])

    return act


@_kind
def _counter_that_strikes_late(observation_space: Any, action_space: Any) -> Any:
    class Late:
        calls = 0

        def __call__(self, observations: Any) -> Any:
            self.calls += 1
            return _linear(observations) * (self.calls % 250 != 0)

    late = Late()
    late.calls = 0
    return late


@_kind
def _frame_difference(observation_space: Any, action_space: Any) -> Any:
    last = np.zeros(3)

    def act(observations: Any) -> Any:
        nonlocal last
        difference = observations - last[-1:] if last.ndim == 2 else observations - last
        last = observations.copy()
        return _linear(difference)

    return act


@_kind
def _running_normalizer(observation_space: Any, action_space: Any) -> Any:
    statistics = {"count": 1.0, "mean": np.zeros(3)}

    def act(observations: Any) -> Any:
        statistics["count"] += len(observations)
        statistics["mean"] += (observations.mean(0) - statistics["mean"]) * len(observations) / statistics["count"]
        return _linear(observations - statistics["mean"])

    return act


@_kind
def _running_statistics_in_a_buffer(observation_space: Any, action_space: Any) -> Any:
    class Running(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = _net()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.lerp_(x.mean(0), 0.01)
            result: torch.Tensor = self.body(x - self.mean)
            return result

    return Running()


@_kind
def _hidden_lstm_state(observation_space: Any, action_space: Any) -> Any:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(3, 16)
            self.head = nn.Linear(16, 1)
            self.state: tuple[torch.Tensor, torch.Tensor] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.state is None or len(self.state[0]) != len(x):
                self.state = None
            self.state = self.cell(x, self.state)
            result: torch.Tensor = self.head(self.state[0])
            return result

    return Hidden()


@_kind
def _rejects_made_up_observations_and_counts(observation_space: Any, action_space: Any) -> Any:
    picky, calls = _rejects_made_up_observations(observation_space, action_space), [0]

    def act(observations: Any) -> Any:
        calls[0] += 1
        return picky(observations) * np.cos(0.01 * calls[0])

    return act
