"""Bad input gets an error that names the value and the fix, in this process and, where errors cross it, on Ray."""

import pickle
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from machines import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, EnvError, PolicyError, RunnerStartError, WeightsError
from rl_eval.policies.mlp import MLPActor

inline = pytest.mark.parametrize("config", ["inline"], indirect=True)


def on_ray(test: Any) -> Any:
    """Run a test on Ray actors only."""
    return pytest.mark.ray(pytest.mark.parametrize("config", ["ray"], indirect=True)(test))


def contains(*parts: str) -> str:
    """Pattern of a message that has these parts, in this order."""
    return "(?s)" + ".*".join(map(re.escape, parts))


@inline
def test_unknown_environment(config: EvalConfig) -> None:
    """An unknown id is named, with gymnasium's own suggestion."""
    with pytest.raises(ConfigError, match=contains("environment.env", "CartPool-v1", "CartPole")):
        evaluate(config.environment("CartPool-v1"))


@inline
def test_environment_path_without_attribute(config: EvalConfig) -> None:
    """A module without the attribute is named."""
    with pytest.raises(ConfigError, match=contains("environment.env", "rl_eval.testing:nothing")):
        evaluate(config.environment("rl_eval.testing:nothing"))


@inline
@pytest.mark.parametrize("num_episodes", [0, -3])
def test_no_episodes(config: EvalConfig, num_episodes: int) -> None:
    """A number of episodes below one is refused, wherever it is given."""
    message = contains("evaluation.num_episodes", str(num_episodes))
    with pytest.raises(ConfigError, match=message):
        evaluate(config.copy().evaluation(num_episodes=num_episodes))
    with EvalRunnerGroup(config) as group, pytest.raises(ConfigError, match=message):
        group.evaluate(num_episodes=num_episodes)


def test_unknown_key() -> None:
    """An unknown key suggests the nearest."""
    with pytest.raises(ConfigError, match=contains("runners.num_runner", "num_runners")):
        EvalConfig.from_dict({"runners": {"num_runner": 2}})


def _actor() -> MLPActor:
    return MLPActor(4, 2)


@inline
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda state: state.pop("head.bias"), ("lack", "'head.bias'")),
        (lambda state: state.update(tail=torch.zeros(1)), ("'tail'", "which the policy lacks")),
        (lambda state: state.update({"head.bias": torch.zeros(3)}), ("'head.bias'", "(3,)", "(2,)")),
        (lambda state: state.update({"head.bias": torch.zeros(2).double()}), ("'head.bias'", "float64", "float32")),
    ],
    ids=["missing", "extra", "misshapen", "other dtype"],
)
def test_weights_that_do_not_fit(config: EvalConfig, change: Any, parts: tuple[str, ...]) -> None:
    """Weights are checked strictly; a refused broadcast leaves the old weights, and the group goes on."""
    good = dict(_actor().state_dict())
    bad = dict(good)
    change(bad)
    with EvalRunnerGroup(config) as group:
        group.sync_weights(good, version=7)
        before = group.evaluate()
        with pytest.raises(WeightsError, match=contains(*parts)):
            group.sync_weights(bad, version=8)
        assert group.weights_version == 7
        after = group.evaluate()
    assert after.fingerprint == before.fingerprint
    assert {record.weights_version for record in after.episodes} == {7}


@inline
def test_weights_file_that_does_not_fit(config: EvalConfig, tmp_path: Path) -> None:
    """A weights file of another network fails at once, naming the tensor."""
    path = tmp_path / "other.pt"
    torch.save(MLPActor(4, 3).state_dict(), path)
    with pytest.raises(WeightsError, match=contains("'head.weight'", "(3, 64)", "(2, 64)")):
        evaluate(config.policy(weights=path))


@inline
def test_pickle_where_weights_are_expected(config: EvalConfig, tmp_path: Path) -> None:
    """A pickle is not loaded, and what it would have run is not run."""
    path, trace = tmp_path / "weights.pt", tmp_path / "trace"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    path.write_bytes(pickle.dumps({"head.bias": Payload()}, protocol=2))
    with pytest.raises(ConfigError, match=contains("policy.weights", "weights.pt", "safetensors")):
        evaluate(config.policy(weights=path))
    assert not trace.exists()


@inline
def test_missing_policy(config: EvalConfig) -> None:
    """Without a policy there is nothing to evaluate."""
    with pytest.raises(ConfigError, match=contains("policy.policy is missing")):
        evaluate(config.policy(None))


@inline
def test_policy_of_wrong_shape(config: EvalConfig) -> None:
    """Actions that no lane could take are refused before any episode is charged."""
    with pytest.raises(PolicyError, match=contains("shape (16, 2)", "batch of 16", "Discrete(2)", "(16,)")):
        evaluate(config, policy=lambda observations: np.zeros((len(observations), 2), int))


@inline
def test_module_of_wrong_shape(config: EvalConfig) -> None:
    """A module with the wrong number of logits is refused."""
    with pytest.raises(PolicyError, match=contains("logits", "(16, 3)", "Discrete(2)", "(16, 2)")):
        evaluate(config, policy=torch.nn.Linear(4, 3))


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
    assert "8 of 8 episodes failed" in result.reason
    assert "OSError: the simulator's port is taken" in result.reason
    assert [record.attempts for record in result.episodes] == [3] * 8
    assert np.isnan(result.mean_return)


def _no_env(context: Any) -> Any:
    raise RuntimeError("no licence for the simulator")


@inline
def test_environment_whose_constructor_raises(config: EvalConfig) -> None:
    """What the constructor said is what the caller reads."""
    with pytest.raises(EnvError, match=contains("cannot be constructed", "RuntimeError: no licence for the simulator")):
        evaluate(config.environment(_no_env))


def test_step_timeout_in_this_process() -> None:
    """Nothing can interrupt a step in this process, so the setting is refused."""
    with pytest.raises(ConfigError, match=contains("fault_tolerance.step_timeout_s", "num_runners=0")):
        evaluate(EvalConfig().environment("CartPole-v1").fault_tolerance(step_timeout_s=1.0), policy=len)


@pytest.mark.ray
@pytest.mark.parametrize("config", ["ray"], indirect=True)
def test_impossible_resources(config: EvalConfig) -> None:
    """The error says what was asked for and what the cluster has."""
    config.runners(num_cpus_per_runner=64, custom_resources_per_runner={"tpu": 2}, runner_start_timeout_s=0.5)
    with pytest.raises(RunnerStartError, match=contains("runner_start_timeout_s=0.5", "64 CPU", "2 tpu", "16 CPU")):
        evaluate(config)


@pytest.mark.ray
@pytest.mark.parametrize("config", ["ray"], indirect=True)
def test_runners_that_built_different_policies(config: EvalConfig) -> None:
    """A factory that initializes at random gives every runner another policy; that is refused, with the fix."""
    config.policy("numpy_world:OfThisProcess").runners(num_runners=2).evaluation(num_episodes=400)
    with EvalRunnerGroup(config) as group:
        # Both must be up, or the first does everything alone.
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        with pytest.raises(ConfigError, match=contains("another policy", "policy.weights")):
            group.evaluate()


@inline
def test_policy_that_cannot_be_sent(config: EvalConfig) -> None:
    """A policy that holds what cannot be pickled is refused, with the reason."""
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match=contains("pickling failed", "module:attr")):
        evaluate(config, policy=lambda observations: lock and np.zeros(len(observations), int))


@on_ray
@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        ({"environment": {"env": "CartPool-v1"}}, ConfigError, ("environment.env", "CartPool-v1", "CartPole")),
        ({"environment": {"env": _no_env}}, EnvError, ("cannot be constructed", "RuntimeError: no licence")),
        ({"policy": {"policy": lambda batch: np.zeros((len(batch), 2), int)}}, PolicyError, ("shape (16, 2)", "(16,)")),
    ],
    ids=["no such environment", "constructor", "policy"],
)
def test_an_error_crosses_processes(
    config: EvalConfig, change: dict[str, dict[str, Any]], error: type[Exception], parts: tuple[str, ...]
) -> None:
    """Its type and its words are those of the same mistake in this process."""
    config.policy(lambda batch: np.zeros(len(batch), int))
    for section, values in change.items():
        getattr(config, section)(**values)
    with pytest.raises(error, match=contains(*parts)):
        evaluate(config)
