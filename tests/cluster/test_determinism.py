"""The determinism check on real runners: episodes are compared across processes."""

import pytest
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup


@pytest.mark.parametrize("depends", [pytest.param(False, marks=pytest.mark.slow), True])
def test_episodes_run_again_in_another_process(ray_cluster: None, depends: bool) -> None:
    """What differs between processes is invisible to a process that checks itself."""
    config = EvalConfig().environment("workloads:OwnProcess", env_kwargs={"depends": depends}).policy("workloads:zeros")
    config.evaluation(num_episodes=200).runners(num_runners=2, num_envs_per_runner=2)
    with EvalRunnerGroup(config) as group:
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        found = group.evaluate().determinism
    assert (found.checked, found.elsewhere) == (4, 4)
    assert found.passed is not depends
    if depends:
        assert found.first is not None
        assert (found.first.what, found.first.step, found.first.cause) == ("reward", 1, "environment")
        assert found.remedy == ""
