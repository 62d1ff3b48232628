"""The contract suites run on every backend: in this process, and on Ray actors."""

from collections.abc import Iterator

import pytest
import ray
from machines import local_cluster

from rl_eval import EvalConfig

WEIGHTS_MODULE = "rl_eval.policies.mlp:make_mlp"


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    if ray.is_initialized():
        yield
    else:
        with local_cluster():
            yield


@pytest.fixture(params=["inline", "ray"])
def config(request: pytest.FixtureRequest) -> EvalConfig:
    """A small CartPole evaluation on one backend."""
    on_ray = request.param == "ray"
    if on_ray:
        request.getfixturevalue("_cluster")
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy(WEIGHTS_MODULE)
        .runners(num_runners=int(on_ray), num_envs_per_runner=4)
        .evaluation(num_episodes=8)
    )
