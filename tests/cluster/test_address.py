"""Where the cluster is, and who may shut it down."""

import re

import pytest
import ray
import torch

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError, RunnerStartError


@pytest.fixture(autouse=True)
def _no_cluster() -> None:
    assert not ray.is_initialized()


def test_unreachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where no cluster answers is named."""
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=1, address="127.0.0.1:9")
    with pytest.raises(RunnerStartError, match=re.escape("runners.address='127.0.0.1:9'")):
        evaluate(config, policy=torch.nn.Linear(4, 2))
    assert not ray.is_initialized()


def test_a_local_cluster_ends_with_the_group_that_started_it() -> None:
    """Without an address a cluster is started, and shut down."""
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=1).evaluation(num_episodes=4)
    result = evaluate(config, policy=torch.nn.Linear(4, 2))
    assert result.status == "complete"
    assert not ray.is_initialized()


def test_a_cluster_of_the_caller_is_left_running() -> None:
    """A group uses the cluster that its caller is connected to, and leaves it alone; another address is refused."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        config = EvalConfig().environment("CartPole-v1").runners(num_runners=1).evaluation(num_episodes=4)
        assert evaluate(config, policy=torch.nn.Linear(4, 2)).status == "complete"
        assert ray.is_initialized()
        with pytest.raises(ConfigError, match="connected to"):
            evaluate(config.runners(address="127.0.0.1:9"), policy=torch.nn.Linear(4, 2))
    finally:
        ray.shutdown()
