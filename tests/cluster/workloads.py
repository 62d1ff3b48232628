"""The evaluations whose result must not depend on the layout."""

from pathlib import Path
from typing import Any

from rl_eval import EvalConfig

WEIGHTS = Path(__file__).parents[2] / "configs" / "weights"
MLP = "rl_eval.policies.mlp:make_mlp"


def cartpole(**faults: Any) -> EvalConfig:
    """CartPole with the early policy, whose returns vary."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:flaky", env_kwargs={"env": "CartPole-v1", **faults})
        .policy(MLP, weights=WEIGHTS / "cartpole_ppo_early.safetensors")
        .evaluation(num_episodes=60)
    )


def hopper(**faults: Any) -> EvalConfig:
    """Hopper with sampled actions behind a frozen normalizer."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:flaky", env_kwargs={"env": "Hopper-v5", **faults})
        .policy(
            MLP,
            policy_kwargs={"normalize_observations": True},
            weights=WEIGHTS / "hopper_ppo_final.safetensors",
            deterministic=False,
        )
        .evaluation(num_episodes=20, max_episode_steps=200)
    )


def dict_observation(**faults: Any) -> EvalConfig:
    """A nested Dict observation and a policy of plain numpy."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:dict_observation", env_kwargs={"env": "CartPole-v1", **faults})
        .policy("rl_eval.testing:make_dict_policy")
        .evaluation(num_episodes=60)
    )


def recurrent(**faults: Any) -> EvalConfig:
    """A GRU whose actions are sampled."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:flaky", env_kwargs={"env": "CartPole-v1", **faults})
        .policy("rl_eval.testing:make_gru", deterministic=False)
        .evaluation(num_episodes=60)
    )


WORKLOADS = {f.__name__: f for f in (cartpole, hopper, dict_observation, recurrent)}
