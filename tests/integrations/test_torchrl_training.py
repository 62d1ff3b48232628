"""A policy that TorchRL trains is worth here what its own rollout says, and evaluations beside it change nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torchrl")

import scipy.special  # noqa: F401 - Its import adds a filter of warnings, which is not ours.
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rl_eval import EvalConfig, evaluate
from rl_eval.integrations.torchrl import Evaluator
from tests.cluster.trainer_state import compare, observe

pytestmark = [
    pytest.mark.timeout(280),
    # The collectors of TorchRL warn of deprecations inside TorchRL.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrl_ppo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Import the example, whose training is real PPO."""
    spec = importlib.util.spec_from_file_location("torchrl_ppo_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_trained_policy_is_worth_what_rollout_says(example: ModuleType) -> None:
    """After some updates of PPO every episode's return, length and end equal those of ``env.rollout`` on its seed."""
    torch.manual_seed(0)
    policy = example.make_policy()
    untrained = [parameter.clone() for parameter in policy.parameters()]
    list(example.train(policy, 6 * example.FRAMES))
    assert not any(torch.equal(now, then) for now, then in zip(policy.parameters(), untrained, strict=True))
    config = EvalConfig().environment(lambda _: example.make_env()).evaluation(num_episodes=30, seed=3)
    result = evaluate(config, policy)
    assert result.status == "complete"
    env = example.make_env()
    for record in result.episodes:
        env.set_seed(record.seed, static_seed=True)
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            steps = env.rollout(1000, policy)["next"]
        assert record.episode_return == steps["reward"].sum().item()
        assert (record.length, record.terminated) == (len(steps), bool(steps["terminated"][-1]))
    assert len({record.episode_return for record in result.episodes}) > 5


def test_evaluations_beside_a_training_do_not_touch_it(example: ModuleType) -> None:
    """Nothing of the process or the policy moves; results have their steps, new weights, and the final policy."""
    evaluator = Evaluator(example.make_env, policy_factory=example.make_policy, num_trajectories=5, max_steps=50)
    try:
        results = []
        torch.manual_seed(0)
        policy = example.make_policy()
        for done in example.train(policy, 3 * example.FRAMES):
            before = observe(policy)
            assert evaluator.trigger_eval(policy, step=done)
            results.append(evaluator.wait(timeout=120.0))
            compare(before, observe(policy))
        final = evaluator.evaluate(policy, step=done)
    finally:
        evaluator.shutdown()
    assert [result["eval/step"] for result in results] == [example.FRAMES * (index + 1) for index in range(3)]
    versions = [result["eval/weights_version"] for result in results]
    assert versions == sorted(set(versions))
    assert final["eval/reward"] == results[-1]["eval/reward"]
