"""What a runner asks of its node, and gets."""

from typing import Any

import pytest
from machines import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import RunnerStartError

pytestmark = pytest.mark.usefixtures("ray_cluster")


def config(**runners: Any) -> EvalConfig:
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("numpy_world:lean")
        .runners(num_runners=2, num_envs_per_runner=2, **runners)
        .evaluation(num_episodes=10)
    )


def test_runners_get_what_they_ask_for() -> None:
    """CPUs, a fraction of a GPU, custom resources, a node's label and a runtime environment reach the actor."""
    asked = config(
        num_cpus_per_runner=0.5,
        num_gpus_per_runner=0.25,
        custom_resources_per_runner={"simulator": 1},
        label_selector={"zone": "lab"},
        runtime_env={"env_vars": {"SIMULATOR_HOME": "/somewhere"}},
    )

    def look(runner: Any) -> tuple[dict[str, Any], str | None, str | None]:
        import os

        import ray

        resources = ray.get_runtime_context().get_assigned_resources()
        return resources, os.environ.get("SIMULATOR_HOME"), os.environ.get("OMP_NUM_THREADS")

    with EvalRunnerGroup(asked) as group:
        assert group.evaluate().status == "complete"
        seen = group.foreach_runner(look)
    for resources, home, threads in seen:
        assert (resources["CPU"], resources["GPU"], resources["simulator"]) == (0.5, 0.25, 1.0)
        assert (home, threads) == ("/somewhere", "1")


def test_a_label_that_no_node_has() -> None:
    """The error names the label."""
    with pytest.raises(RunnerStartError, match=r"labelled \{'zone': 'moon'\}"):
        evaluate(config(label_selector={"zone": "moon"}, runner_start_timeout_s=3))


def test_fewer_resources_than_runners() -> None:
    """Where only some runners fit, those do the work."""
    result = evaluate(config(num_cpus_per_runner=9))
    assert result.status == "complete"
    assert len({record.runner for record in result.episodes}) == 1


def test_runners_for_which_there_is_no_room_are_missing_in_the_result_with_the_reason() -> None:
    """Two simulators, three runners that want one each: two take part, and the result says why."""
    asked = config(custom_resources_per_runner={"simulator": 1}, num_cpus_per_runner=0.1).runners(num_runners=3)
    with EvalRunnerGroup(asked) as group:
        handle = group.submit(num_episodes=1_000_000)
        assert eventually(lambda: handle.progress().num_runners == 2)
        handle.cancel()
        (note,) = handle.result(60).provenance["notes"]
    assert note.startswith("2 of 3 runners took part: each runner asks for 0.1 CPU, 1 simulator; the cluster has")
    assert "2 simulator" in note
