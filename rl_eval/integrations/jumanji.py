"""Environments of Jumanji as batched simulators, without its wrappers that restart episodes by themselves.

Needs ``pip install 'rl-eval[jumanji]'``.
"""

from __future__ import annotations

from typing import Any

import jumanji
from jumanji.specs import jumanji_specs_to_gym_spaces

from rl_eval.errors import ConfigError, nearest
from rl_eval.runners.batched.functional import FunctionalSimulator


def simulator(name: str, num_envs: int, **kwargs: Any) -> FunctionalSimulator:
    """Build the simulator of an environment of Jumanji.

    Observations with fields become dicts. An episode is terminated if its last discount is 0, else truncated.

    Args:
        name: Id, such as ``"Snake-v1"``.
        num_envs: Number of slots.
        kwargs: Arguments for ``jumanji.make``.

    Raises:
        ConfigError: The id is unknown, or the environment has a reward for each of several agents.
    """
    known = jumanji.registered_environments()
    if name not in known:
        raise ConfigError(
            f"environment.env is 'jumanji:{name}', which Jumanji does not know; {nearest(name, known)}",
            key="environment.env",
            value=f"jumanji:{name}",
        )
    env = jumanji.make(name, **kwargs)
    if env.reward_spec.shape:
        raise ConfigError(
            f"environment.env is 'jumanji:{name}', which has several agents, but a batched simulator has one",
            key="environment.env",
            value=f"jumanji:{name}",
        )

    def init(key: Any) -> tuple[Any, Any]:
        state, first = env.reset(key)
        return state, _plain(first.observation)

    def step(state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        state, now = env.step(state, action)
        terminated = now.discount == 0
        return state, _plain(now.observation), now.reward, now.last() & terminated, now.last() & ~terminated, now.extras

    spaces = jumanji_specs_to_gym_spaces(env.observation_spec), jumanji_specs_to_gym_spaces(env.action_spec)
    made = FunctionalSimulator(init, step, num_envs, *spaces)
    made.name = f"jumanji:{name}"
    return made


def _plain(observation: Any) -> Any:
    """Turn named tuples and dataclasses into dicts."""
    if hasattr(observation, "_asdict"):
        observation = observation._asdict()
    elif hasattr(observation, "__dataclass_fields__"):
        observation = vars(observation)
    else:
        return observation
    return {key: _plain(value) for key, value in observation.items()}
