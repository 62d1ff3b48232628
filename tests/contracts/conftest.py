"""The contract suites run on every backend: in this process, and on Ray actors."""

import pytest

from rl_eval import EvalConfig

WEIGHTS_MODULE = "rl_eval.policies.mlp:make_mlp"


@pytest.fixture(params=["inline", pytest.param("ray", marks=pytest.mark.ray)])
def config(request: pytest.FixtureRequest) -> EvalConfig:
    """A small CartPole evaluation on one backend."""
    on_ray = request.param == "ray"
    if on_ray:
        request.getfixturevalue("ray_cluster")
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy(WEIGHTS_MODULE)
        .runners(num_runners=int(on_ray), num_envs_per_runner=4)
        .evaluation(num_episodes=8)
    )
