"""Names of rollout workers over a group: environments, policies, state, callbacks, places of runners."""

from __future__ import annotations

import re
import socket
from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunner, EvalRunnerGroup, VectorEvalRunner
from rl_eval.errors import ConfigError, EvalError, WeightsError
from rl_eval.execution.group import GroupCallbacks
from rl_eval.integrations.rllib.filters import MeanStdFilter
from rl_eval.integrations.rllib.workers import RolloutWorkers
from rl_eval.policies.mlp import MLPActor
from rl_eval.wrappers import Normalized, frozen
from tests.refused import refused


def config(**runners: Any) -> EvalConfig:
    made = EvalConfig().environment("CartPole-v1").runners(**runners)
    return made.evaluation(num_episodes=6, max_episode_steps=20, determinism_check=0)


def lean(observations: Any) -> Any:
    return (observations[:, 2] > 0).astype(np.int64)


def test_the_base_class_has_the_names_of_an_env_runner() -> None:
    """Those that a runner of one's own overrides or calls."""
    names = [
        "make_env",
        "make_policy",
        "run",
        "metrics",
        "spaces",
        "stop",
        "apply",
        "foreach_env",
        "_try_env_reset",
        "_try_env_step",
    ]
    assert [name for name in names if not hasattr(EvalRunner, name)] == []


def test_functions_are_called_with_every_environment_and_policy() -> None:
    """Results are by runner; a policy comes without its filter."""
    policy = Normalized(lean, **frozen(MeanStdFilter.of(np.zeros(4), np.ones(4))))
    with EvalRunnerGroup(config(num_envs_per_runner=3), policy, threaded=False) as group:
        workers = RolloutWorkers(group)
        assert workers.foreach_env(lambda env: env.spec.id) == [["CartPole-v1"]]
        group.evaluate()
        assert workers.foreach_env(lambda env: env.spec.id) == [["CartPole-v1"] * 3]
        assert workers.for_policy(lambda one: one.function is lean) == [True]  # type: ignore[attr-defined]
        assert workers.foreach_policy(lambda one, name: (name, callable(one.act))) == [[("default_policy", True)]]
        with refused(EvalError, "policy_id", value="default_polic"):
            workers.for_policy(id, "default_polic")


def test_a_group_is_saved_and_restored(tmp_path: Any) -> None:
    """Into a safetensors file that any reader of such files reads; numbers and digests are the same."""
    from safetensors.torch import load_file

    path = tmp_path / "group.safetensors"
    one, two = (Normalized(MLPActor(4, 2), mean=np.zeros(4), var=np.full(4, var)) for var in (0.01, 0.04))
    with EvalRunnerGroup(config(), one, threaded=False) as group:
        group.sync_weights(two, version=41)
        due = group.evaluate()
        RolloutWorkers(group).save(path)
    assert "weights.head.weight" in load_file(path)
    with EvalRunnerGroup(config(), one, threaded=False) as group:
        workers = RolloutWorkers(group)
        assert workers.restore(path) == 41
        result = group.evaluate()
        with refused(ConfigError, "path"):
            workers.restore(tmp_path / "none")
        (tmp_path / "other").write_bytes(b"12345678{}")
        with refused(WeightsError, "path"):
            workers.restore(tmp_path / "other")
    assert result.fingerprint == due.fingerprint
    assert result.provenance["weights"] == due.provenance["weights"]
    with EvalRunnerGroup(config(), lean, threaded=False) as group:
        workers = RolloutWorkers(group)
        workers.save(path)
        assert workers.restore(path) == 0


def test_a_name_of_another_framework_is_an_error_that_names_ours() -> None:
    """On a group, and on its workers; a name that nobody knows is an ordinary error."""
    with EvalRunnerGroup(config(), lean, threaded=False) as group:
        workers = RolloutWorkers(group)
        for owner, name, ours in (
            (group, "foreach_env", "RolloutWorkers(group).foreach_env"),
            (group, "ping", "group.healthy_runner_ids"),
            (workers, "set_weights", "group.sync_weights"),
            (workers, "get_metrics", "group.get_metrics"),
        ):
            with pytest.raises(AttributeError, match=re.escape(ours)) as caught:
                getattr(owner, name)
            assert caught.value.name == name
        assert not hasattr(group, "no_such")
        assert not hasattr(workers, "no_such")


def test_weights_of_some_policies_can_be_asked_for() -> None:
    """With one policy, it has the default name."""
    with EvalRunnerGroup(config(), MLPActor(4, 2), threaded=False) as group:
        workers = RolloutWorkers(group)
        assert workers.get_weights(["default_policy"]).keys() == workers.get_weights().keys()
        assert workers.get_weights([]) == {}
        with refused(EvalError, "policy_id", value="hawk"):
            workers.get_weights(["hawk"])


def test_metrics_do_not_count_the_determinism_check() -> None:
    """Nor the faults and steps of its episodes."""
    with EvalRunnerGroup(config().evaluation(determinism_check="auto"), lean, threaded=False) as group:
        result = group.evaluate()
        assert result.determinism.checked
        metrics = group.get_metrics()
    assert (metrics["episodes"], metrics["env_steps"], metrics["faults"]) == (6, result.timing.env_steps, 0)
    assert metrics["close_errors"] == 0


def test_callbacks_hear_of_results() -> None:
    """Of each evaluation once."""
    results = []

    class Diary(GroupCallbacks):
        def on_sample_end(self, result: Any) -> None:
            results.append(result.fingerprint)

    with EvalRunnerGroup(config(), lean, threaded=False, callbacks=Diary()) as group:
        due = [group.evaluate().fingerprint, group.evaluate(seed=1).fingerprint]
    assert results == due


def test_runners_tell_their_arguments_their_address_and_a_free_port() -> None:
    """The arguments build the same runner again."""
    with EvalRunnerGroup(config(num_envs_per_runner=2).policy(f"{__name__}:lean"), threaded=False) as group:
        workers = RolloutWorkers(group)
        (arguments,), (address,), (port,) = workers.creation_args(), workers.get_node_ip(), workers.find_free_port()
    runner = VectorEvalRunner(**arguments)
    assert runner.settings == arguments["settings"]
    runner.stop()
    with socket.socket() as server:
        server.bind((address, port))
