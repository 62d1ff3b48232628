"""Worker interface of runners and groups: environments, policies, state, callbacks, and the runner's own place."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
import torch

from rl_eval import EvalConfig, EvalRunnerGroup, SingleAgentEvalRunner, VectorEvalRunner
from rl_eval.errors import ConfigError, EvalError, WeightsError
from rl_eval.execution.worker_calls import GroupCallbacks
from rl_eval.policies.filters import DEFAULT_POLICY, MeanStdFilter, NoFilter
from rl_eval.policies.mlp import MLPActor
from rl_eval.records.episode import Lease


def config(**runners: Any) -> EvalConfig:
    made = EvalConfig().environment("CartPole-v1").runners(**runners)
    return made.evaluation(num_episodes=6, max_episode_steps=20, determinism_check=0)


def lean(observations: Any) -> Any:
    return (observations[:, 2] > 0).astype(np.int64)


def leases(count: int) -> list[Lease]:
    plan = config().build().plan()
    return [Lease(index, plan[index].seed, 1, 0) for index in range(count)]


# ------------------------------------------------------------------------------ environments and policies


def test_functions_are_called_with_every_environment_and_policy() -> None:
    """On a runner, and through its group by runner."""
    with EvalRunnerGroup(config(num_envs_per_runner=3), lean, threaded=False) as group:
        assert group.foreach_env(lambda env: env.spec.id) == [["CartPole-v1"]]
        group.evaluate()
        assert group.foreach_env(lambda env: env.spec.id) == [["CartPole-v1"] * 3]
        assert group.for_policy(lambda policy: policy.function.__name__) == ["lean"]
        assert group.foreach_policy(lambda policy, name: (name, callable(policy.act))) == [[(DEFAULT_POLICY, True)]]
        with pytest.raises(EvalError, match="no policy is called 'default_polic': did you mean 'default_policy'"):
            group.for_policy(id, "default_polic")


def test_a_policy_is_shown_without_its_filter() -> None:
    """Its filter is got and synced beside it."""
    runner = VectorEvalRunner(config().policy(lean, observation_filter="MeanStdFilter").build(), 0)
    assert runner.get_policy().function is lean  # type: ignore[attr-defined]
    assert runner.get_filters() == {DEFAULT_POLICY: MeanStdFilter()}
    one = {DEFAULT_POLICY: MeanStdFilter.of(np.zeros(4), np.ones(4))}
    runner.run(leases(3), 0.0)
    with pytest.raises(EvalError, match="filters cannot change while an episode is live"):
        runner.sync_filters(one)
    runner.run((), 0.0, abort=True)
    runner.sync_filters(one)
    assert runner.get_filters() == one
    runner.stop()
    bare = VectorEvalRunner(config().policy(lean).build(), 0)
    assert bare.get_filters() == {DEFAULT_POLICY: NoFilter()}
    with pytest.raises(WeightsError, match="has no filter"):
        bare.sync_filters(one)
    bare.stop()


# ------------------------------------------------------------------------------ state


def rows_of(runner: Any, begun: Any = ()) -> dict[int, Any]:
    reports = [*begun, runner.run((), 0.0)]
    while reports[-1].progress or reports[-1].env_steps:
        reports.append(runner.run((), 0.05))
    rows = [row for report in reports for row in report.rows]
    assert len({int(row["index"]) for row in rows}) == len(rows)
    return {int(row["index"]): (row["episode_return"], row["length"], row["weights_version"]) for row in rows}


@pytest.mark.parametrize("cls", [VectorEvalRunner, SingleAgentEvalRunner])
def test_a_runner_goes_on_where_another_was_saved(cls: Any) -> None:
    """With its weights and filter, and with the episodes that were not done: the rows are those of one runner."""
    settings = config(num_envs_per_runner=1).policy(MLPActor(4, 2), observation_filter="MeanStdFilter").build()
    first, second, whole = (cls(settings, 0) for _ in range(3))
    with torch.no_grad():
        for parameter in first.get_policy().module.parameters():
            parameter.mul_(3.0)
    first.sync_filters({DEFAULT_POLICY: MeanStdFilter.of(np.full(4, 0.1), np.full(4, 0.5))})
    whole.restore(first.save())
    whole.run(leases(5), 0.0)
    due = rows_of(whole)
    begun = [first.run(leases(5), 0.0)]
    while not len(begun[-1].rows):
        begun.append(first.run((), 0.0))
    second.restore(first.save())
    got = rows_of(second, begun)
    assert sorted(due) == [0, 1, 2, 3, 4]
    assert got == due
    with pytest.raises(WeightsError, match="no state that save"):
        second.restore(b"12345678{}")
    saved = whole.save()
    whole.run(leases(2), 0.0)
    with pytest.raises(EvalError, match="while it has episodes"):
        whole.restore(saved)
    for runner in (first, second, whole):
        runner.stop()


def test_a_group_is_saved_and_restored(tmp_path: Any) -> None:
    """Into a safetensors file that any reader of such files reads; numbers and digests are the same."""
    from safetensors.torch import load_file

    path = tmp_path / "group.safetensors"
    made = config().policy(observation_filter="MeanStdFilter")
    with EvalRunnerGroup(made, MLPActor(4, 2), threaded=False) as group:
        group.warm_up_filters(4)
        group.sync_weights(MLPActor(4, 2), version=41)
        due = group.evaluate()
        group.save(path)
    assert "head.weight" in load_file(path)
    with EvalRunnerGroup(made, MLPActor(4, 2), threaded=False) as group:
        assert group.restore(path) == 41
        result = group.evaluate()
        with pytest.raises(ConfigError, match="cannot be read"):
            group.restore(tmp_path / "none")
    assert result.fingerprint == due.fingerprint
    assert result.provenance["weights"] == due.provenance["weights"]


def test_a_group_without_weights_has_nothing_to_restore(tmp_path: Any) -> None:
    """Its file is as good as any."""
    with EvalRunnerGroup(config(), lean, threaded=False) as group:
        group.save(tmp_path / "state")
        assert group.restore(tmp_path / "state") == 0
        assert group.evaluate().status == "complete"


# ------------------------------------------------------------------------------ callbacks


class Diary(GroupCallbacks):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def on_sample_end(self, result: Any) -> None:
        self.results.append(result.fingerprint)


def test_callbacks_hear_of_results() -> None:
    """Of each evaluation once; warm-ups are none."""
    diary = Diary()
    made = config().policy(lean, observation_filter="MeanStdFilter")
    with EvalRunnerGroup(made, threaded=False, callbacks=diary) as group:
        group.warm_up_filters(3)
        due = [group.evaluate().fingerprint, group.evaluate(seed=1).fingerprint]
    assert diary.results == due


# ------------------------------------------------------------------------------ where it runs


def test_a_runner_tells_its_arguments_its_address_and_a_free_port() -> None:
    """Its creation arguments build the same runner again."""
    settings = config(num_envs_per_runner=2).build()
    runner = VectorEvalRunner(settings, 3, lean)
    assert runner.creation_args() == {"settings": settings, "runner_index": 3, "policy": lean}
    again = VectorEvalRunner(**runner.creation_args())
    assert again.runner_index == 3
    with socket.socket() as server:
        server.bind((runner.get_node_ip(), runner.find_free_port()))
    runner.stop()
    again.stop()
