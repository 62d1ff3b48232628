"""Environments of Jumanji as batched simulators, without Jumanji's wrappers that restart episodes by themselves.

This module needs ``pip install 'rl-eval[jumanji]'``.
"""

from __future__ import annotations

import functools
from typing import Any

import cloudpickle
import jumanji
from jumanji.specs import jumanji_specs_to_gym_spaces

from rl_eval.errors import ConfigError
from rl_eval.runners.batched.functional import FunctionalSimulator, Init, Step
from rl_eval.runners.environment import check_id


def simulator(name: str, num_envs: int, **kwargs: Any) -> FunctionalSimulator:
    """Build the simulator of an environment of Jumanji.

    Observations that are named tuples or dataclasses become dicts. An episode is terminated if its last discount is 0;
    otherwise, it is truncated.

    Args:
        name: Id, such as ``"Snake-v1"``.
        num_envs: Number of slots.
        kwargs: Arguments for ``jumanji.make``.

    Raises:
        ConfigError: The id is unknown, or the environment has a reward for each of several agents.
    """
    check_id(f"jumanji:{name}", "Jumanji", jumanji.registered_environments())
    env, init, step = _functions(name, cloudpickle.dumps(kwargs))
    if env.reward_spec.shape:
        problem = f"environment.env is 'jumanji:{name}', which has several agents, but a batched simulator has one"
        raise ConfigError(problem, key="environment.env", value=f"jumanji:{name}")
    seen, actions = map(jumanji_specs_to_gym_spaces, (env.observation_spec, env.action_spec))
    return FunctionalSimulator(init, step, num_envs, seen, actions, f"jumanji:{name}")


@functools.cache
def _functions(name: str, kwargs: bytes) -> tuple[Any, Init, Step]:
    """Return an environment, a function for its first state, and a function for its steps.

    All simulators of this environment share the functions, so that JAX compiles them once.

    Args:
        name: Id, such as ``"Snake-v1"``.
        kwargs: Arguments for ``jumanji.make``, pickled because the cache cannot hash lists and dicts.
    """
    env = jumanji.make(name, **cloudpickle.loads(kwargs))

    def init(key: Any) -> tuple[Any, Any]:
        state, first = env.reset(key)
        return state, _plain(first.observation)

    def step(state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        state, now = env.step(state, action)
        ended, terminal = now.last(), now.discount == 0
        return state, _plain(now.observation), now.reward, ended & terminal, ended & ~terminal, now.extras

    return env, init, step


def _plain(observation: Any) -> Any:
    """Return an observation as dicts, if it is a named tuple or a dataclass; otherwise, return it unchanged."""
    if hasattr(observation, "_asdict"):
        observation = observation._asdict()
    elif hasattr(observation, "__dataclass_fields__"):
        observation = vars(observation)
    else:
        return observation
    return {key: _plain(value) for key, value in observation.items()}
