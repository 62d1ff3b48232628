"""Bad input gets an error that names the value and the fix, in this process and, where errors cross it, on Ray."""

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, EnvError, EvalError, PolicyError, RunnerStartError, WeightsError
from rl_eval.policies.mlp import MLPActor
from tests.refused import refused

inline = pytest.mark.parametrize("config", ["inline"], indirect=True)


@inline
@pytest.mark.parametrize("num_episodes", [0, -3])
def test_no_episodes(config: EvalConfig, num_episodes: int) -> None:
    """A number of episodes below one is refused, wherever it is given."""
    with refused(ConfigError, "evaluation.num_episodes", value=num_episodes):
        evaluate(config.copy().evaluation(num_episodes=num_episodes))
    with EvalRunnerGroup(config) as group, refused(ConfigError, "evaluation.num_episodes", value=num_episodes):
        group.evaluate(num_episodes=num_episodes)


def _actor() -> MLPActor:
    return MLPActor(4, 2)


@inline
@pytest.mark.parametrize(
    ("change", "key", "parts"),
    [
        (lambda state: state.pop("head.bias"), "head.bias", ()),
        (lambda state: state.update(tail=torch.zeros(1)), "tail", ()),
        (lambda state: state.update({"head.bias": torch.zeros(3)}), "head.bias", ("(3,)", "(2,)")),
        (lambda state: state.update({"head.bias": torch.zeros(2).double()}), "head.bias", ("float64", "float32")),
    ],
    ids=["missing", "extra", "misshapen", "other dtype"],
)
def test_weights_that_do_not_fit(config: EvalConfig, change: Any, key: str, parts: tuple[str, ...]) -> None:
    """Weights are checked strictly; a refused broadcast leaves the old weights, and the group goes on."""
    good = dict(_actor().state_dict())
    bad = dict(good)
    change(bad)
    with EvalRunnerGroup(config) as group:
        group.sync_weights(good, version=7)
        before = group.evaluate()
        with refused(WeightsError, key) as caught:
            group.sync_weights(bad, version=8)
        assert all(part in str(caught.value) for part in (f"'{key}'", *parts))
        assert "policy.policy_kwargs" in caught.value.fix
        assert group.weights_version == 7
        after = group.evaluate()
    assert after.fingerprint == before.fingerprint
    assert {record.weights_version for record in after.episodes} == {7}


class _DivergesLater(torch.nn.Module):
    """Pushes the cart one way until the pole falls; returns NaN for angles beyond what the probe makes up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        # A random layer may happen to balance the pole.
        self.layer.load_state_dict({"weight": torch.zeros(2, 4), "bias": torch.tensor([100.0, 0.0])})

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layer(observations) + torch.where(observations[:, 2:3].abs() > 0.1, torch.nan, 0.0)


@inline
def test_policy_that_returns_nan(config: EvalConfig) -> None:
    """NaN logits are the policy's fault, in the episode where they occur, with the original error."""
    result = evaluate(config, policy=_DivergesLater())
    assert result.status == "failed"
    assert {fault.cause for fault in result.faults} == {"policy"}
    assert all("NaN" in fault.message for fault in result.faults)
    assert all(record.attempts == 3 and record.outcome == "failed" for record in result.episodes)


class _NeverResets(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> Any:
        raise OSError("the simulator's port is taken")

    def step(self, action: Any) -> Any:
        raise AssertionError


@inline
def test_environment_that_fails_every_reset(config: EvalConfig) -> None:
    """Attempts are bounded; every episode is recorded as failed, with the original error."""
    result = evaluate(config.environment(_NeverResets).fault_tolerance(fail_fast=False))
    assert result.status == "failed"
    assert re.match(r"8\D+8\D", result.reason)
    assert "OSError: the simulator's port is taken" in result.reason
    assert [record.attempts for record in result.episodes] == [3] * 8
    assert np.isnan(result.aggregates.mean)


def _no_env(context: Any) -> Any:
    raise RuntimeError("no licence for the simulator")


@pytest.mark.ray
@pytest.mark.parametrize("config", ["ray"], indirect=True)
def test_impossible_resources(config: EvalConfig) -> None:
    """The error says what was asked for and what the cluster has."""
    config.runners(num_cpus_per_runner=64, custom_resources_per_runner={"tpu": 2}, runner_start_timeout_s=0.5)
    with refused(RunnerStartError, "runners.runner_start_timeout_s", value=0.5) as caught:
        evaluate(config)
    assert all(asked in str(caught.value) for asked in ("64 CPU", "2 tpu"))


@pytest.mark.ray
@pytest.mark.parametrize("config", ["ray"], indirect=True)
def test_runners_that_built_different_policies(config: EvalConfig) -> None:
    """A factory that initializes at random gives every runner another policy; that is refused, with the fix."""
    config.policy("numpy_world:OfThisProcess").runners(num_runners=2).evaluation(num_episodes=400)
    with EvalRunnerGroup(config) as group:
        # Both must be up, or the first does everything alone.
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        with refused(ConfigError, "policy.weights"):
            group.evaluate()


@inline
def test_policy_that_cannot_be_sent(config: EvalConfig) -> None:
    """A policy that holds what cannot be pickled is refused by runners in other processes, with the reason."""
    import threading

    lock = threading.Lock()
    with refused(ConfigError, "the policy"):
        evaluate(
            config.copy().runners(num_runners=1), policy=lambda observations: lock and np.zeros(len(observations), int)
        )


@pytest.mark.parametrize(
    ("change", "error", "key", "value"),
    [
        ({"environment": {"env": "CartPool-v1"}}, ConfigError, "environment.env", "CartPool-v1"),
        ({"environment": {"env": _no_env}}, EnvError, "environment.env", None),
        ({"policy": {"policy": lambda batch: np.zeros((len(batch), 2), int)}}, PolicyError, "action", "(16, 2)"),
    ],
    ids=["no such environment", "constructor", "policy"],
)
def test_an_error_is_the_same_on_every_backend(
    config: EvalConfig, change: dict[str, dict[str, Any]], error: type[EvalError], key: str, value: Any
) -> None:
    """Its type and its fields cross processes."""
    config.policy(lambda batch: np.zeros(len(batch), int))
    for section, values in change.items():
        getattr(config, section)(**values)
    with refused(error, key) as caught:
        evaluate(config)
    assert value in (None, caught.value.value)
