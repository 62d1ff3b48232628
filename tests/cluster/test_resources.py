"""What a runner asks of its node, and gets."""

from typing import Any

import pytest
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, RunnerStartError
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("ray_cluster")


def config(**runners: Any) -> EvalConfig:
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("numpy_world:lean")
        .runners(**{"num_runners": 2, "num_envs_per_runner": 2, **runners})
        .evaluation(num_episodes=10)
    )


def test_runners_get_what_they_ask_for() -> None:
    """CPUs, a fraction of a GPU, custom resources, a node's label and a runtime environment reach the actor."""
    asked = config(
        num_runners=1,
        num_cpus_per_runner=0.5,
        num_gpus_per_runner=0.25,
        custom_resources_per_runner={"simulator": 1},
        label_selector={"zone": "lab"},
        runtime_env={"env_vars": {"SIMULATOR_HOME": "/somewhere"}},
    )

    def look(runner: Any) -> tuple[dict[str, Any], str | None, str | None, int]:
        import os
        import sys

        import ray

        resources = ray.get_runtime_context().get_assigned_resources()
        variables = os.environ.get("SIMULATOR_HOME"), os.environ.get("OMP_NUM_THREADS")
        return resources, *variables, sys.flags.hash_randomization

    with EvalRunnerGroup(asked) as group:
        assert group.evaluate().status == "complete"
        seen = group.foreach_runner(look)
    ((resources, home, threads, random_hashes),) = seen
    assert (resources["CPU"], resources["GPU"], resources["simulator"]) == (0.5, 0.25, 1.0)
    assert (home, threads, random_hashes) == ("/somewhere", "1", 0)


def test_runners_may_be_in_the_bundles_of_their_caller() -> None:
    """As those of a trial of Tune, whose bundles would be idle otherwise; without such bundles it is refused."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    asked = config(in_placement_group=True)

    @ray.remote(num_cpus=1)
    def trial() -> tuple[Any, list[Any], str]:
        def place(runner: Any) -> Any:
            import ray

            return ray.util.get_current_placement_group().id

        with EvalRunnerGroup(asked) as group:
            status = group.evaluate().status
            assert eventually(lambda: group.healthy_runner_ids == [0, 1])
            return ray.util.get_current_placement_group().id, group.foreach_runner(place), status

    group = ray.util.placement_group([{"CPU": 1}] * 3)
    ray.get(group.ready())
    own, theirs, status = ray.get(trial.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote())
    ray.util.remove_placement_group(group)
    assert theirs == [own] * 2
    assert status == "complete"
    with refused(ConfigError, "runners.in_placement_group", value=True):
        evaluate(asked)


def test_a_label_that_no_node_has() -> None:
    """The error names the label."""
    with refused(RunnerStartError, "runners.runner_start_timeout_s", value=0.5) as caught:
        evaluate(config(label_selector={"zone": "moon"}, runner_start_timeout_s=0.5))
    assert "moon" in str(caught.value)


def test_runners_that_run_do_not_lack_resources() -> None:
    """Where every process runs, a long start has other reasons than the free resources, which are then their own."""
    with EvalRunnerGroup(config()) as group:
        group.evaluate()
        assert eventually(lambda: "have their resources" in group._backend.shortage())


def test_runners_for_which_there_is_no_room_are_missing_in_the_result_with_the_reason() -> None:
    """Where only some runners fit, those do the work, and the result says why."""
    result = evaluate(config(num_cpus_per_runner=9, custom_resources_per_runner={"simulator": 1}))
    assert result.status == "complete"
    assert len({record.runner for record in result.episodes}) == 1
    (note,) = result.provenance["notes"]
    assert all(fact in note for fact in ("1 of 2 runners", "9 CPU, 1 simulator", "16 CPU"))
