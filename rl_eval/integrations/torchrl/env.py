"""TorchRL environment as a :class:`gymnasium.Env`.

=================  =============================================================================================
what               rule
=================  =============================================================================================
seed               ``set_seed(seed, static_seed=True)``, then ``reset()``: an episode is that of ``env.rollout``
observation        the keys of ``observation_spec`` as a Dict, nested keys nested; a single key as it is
bookkeeping        what ``RewardSum``, ``StepCounter`` and ``InitTracker`` write is left out; policies get ``is_init``
reward             the reward key, one number per step
terminated         the terminated key; without one, done where it is not truncated
truncated          the truncated key; without one, False
normalizers        frozen, and an error when they have no statistics
=================  =============================================================================================

A ``GymEnv`` under bookkeeping transforms (and ``DoubleToFloat``) alone is not stepped through tensordicts at all: its
gymnasium environment is stepped, with the same seeds, rewards rounded to the dtype of the reward spec, and the same
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsFloat, final

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from torchrl.envs import EnvBase

from rl_eval.errors import ConfigError
from rl_eval.integrations.torchrl.keys import Key, nested
from rl_eval.integrations.torchrl.normalizers import check_initialized, freeze_normalizers
from rl_eval.integrations.torchrl.spaces import action_space, action_writer, observation_space, unbounded

__all__ = ["TorchRLEnv", "as_array", "as_env", "nested_space", "peel", "seen_keys"]

_BOOKKEEPING: Final = frozenset({"RewardSum", "StepCounter", "InitTracker"})


def as_env(
    env: EnvBase,
    *,
    observation_keys: Sequence[Key] | None = None,
    reward_key: Key | None = None,
    done_key: Key | None = None,
    check_normalizers: bool = True,
    as_recorded: bool = False,
) -> gym.Env[Any, Any]:
    """Read a TorchRL environment as a gymnasium one.

    Args:
        env: A single environment, made for the evaluation: its normalizers are frozen.
        observation_keys: Which keys of its ``observation_spec`` policies see; by default all but bookkeeping.
        reward_key: Which reward counts; by default the only one there is.
        done_key: Which done flag ends an episode; by default the one at the root.
        check_normalizers: Refuse normalizers without statistics now; False when they arrive later.
        as_recorded: Show all keys, bookkeeping included, under their own names, and pass actions on in the form of
            their spec, unchecked, as TorchRL's collectors do.

    Raises:
        ConfigError: It is a batch of environments, has several agents, or a normalizer without statistics.
    """
    if env.batch_size:
        raise ConfigError(
            f"the TorchRL environment is a batch of shape {tuple(env.batch_size)}; rl_eval runs each episode in an "
            "environment of its own: give a factory of single ones (batch_size=[]), and say how many step together "
            "with runners.num_envs_per_runner"
        )
    freeze_normalizers(env)
    if check_normalizers:
        check_initialized(env, "the environment")
    if as_recorded and observation_keys is None:
        every: list[Key] = list(env.full_observation_spec.keys(True, True))
        observation_keys = None if every == ["observation"] else every
    if observation_keys is None and reward_key is None and done_key is None and (bare := _bare_gym(env)) is not None:
        return bare
    return TorchRLEnv(env, observation_keys, reward_key, done_key, as_recorded=as_recorded)


@final
class TorchRLEnv(gym.Env[Any, Any]):
    """A gymnasium environment around a TorchRL one; see :func:`as_env`.

    Attributes:
        env: The TorchRL environment.
    """

    def __init__(
        self,
        env: EnvBase,
        observation_keys: Sequence[Key] | None = None,
        reward_key: Key | None = None,
        done_key: Key | None = None,
        *,
        as_recorded: bool = False,
    ) -> None:
        self.env = env
        self.render_mode = getattr(_gym_inside(env), "render_mode", None)
        keys = seen_keys(env) if observation_keys is None else [unravel_key(key) for key in observation_keys]
        specs = {key: env.full_observation_spec[key] for key in keys}
        self._paths = [(key, key if isinstance(key, tuple) else (key,)) for key in specs]
        spaces: dict[tuple[str, ...], gym.Space[Any]] = {
            path: observation_space(specs[key]) for key, path in self._paths
        }
        alone = (
            len(specs) == 1 and isinstance(next(iter(specs)), str) and not (as_recorded and "observation" not in specs)
        )
        self._only = next(iter(specs)) if alone else None
        self.observation_space = next(iter(spaces.values())) if self._only else nested_space(spaces)
        self._action_keys = list(env.action_keys)
        actions = env.full_action_spec
        spec = actions[self._action_keys[0]] if len(self._action_keys) == 1 else actions
        spec = unbounded(spec) if as_recorded else spec
        self.action_space = action_space(spec)
        self._write_action = action_writer(spec)
        self._reward_key = _single(env, "reward", env.reward_keys, reward_key)
        self._ends = _end_keys(env, done_key)
        self._current: TensorDictBase | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        with torch.no_grad():
            if seed is not None:
                self.env.set_seed(seed, static_seed=True)
            self._current = self.env.reset()
        return self._observe(self._current), {}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step once; an environment that says it is done is not stepped again before a reset."""
        assert self._current is not None, "reset() comes before step()"
        current, written = self._current, self._write_action(action)
        if len(self._action_keys) == 1:
            current.set(self._action_keys[0], written)
        else:
            current.update(written)
        with torch.no_grad():
            stepped = self.env.step(current)
            following = stepped.get("next")
            self._current = self.env.step_mdp(stepped)
        reward = following.get(self._reward_key)
        terminated, truncated = self._ends(following)
        return self._observe(following), reward.item(), terminated, truncated, {}

    def render(self) -> Any:
        """Return the picture of the gymnasium environment inside.

        Raises:
            NotImplementedError: There is none that renders.
        """
        inner = _gym_inside(self.env)
        if inner is None:
            raise NotImplementedError(f"{type(self.env).__name__} has no gymnasium environment inside to render")
        return inner.render()

    def close(self) -> None:
        """Close the TorchRL environment."""
        if not self.env.is_closed:
            self.env.close(raise_if_closed=False)

    def _observe(self, data: TensorDictBase) -> Any:
        if self._only is not None:
            return as_array(data.get(self._only))
        return nested({path: as_array(data.get(key)) for key, path in self._paths})


@final
class _BareGym(gym.Wrapper[Any, Any, Any, Any]):
    """The gymnasium environment of a ``GymEnv``, with what its bookkeeping would have changed."""

    def __init__(self, env: EnvBase, inner: gym.Env[Any, Any], max_steps: int | None) -> None:
        super().__init__(inner)
        self.torchrl_env = env
        self._max_steps = max_steps or 0
        self._steps = 0
        self._step = inner.step  # Bound once: this is the loop that counts.
        self._reward_type = torch.empty((), dtype=env.reward_spec.dtype).numpy().dtype.type
        key = next(iter(seen_keys(env)))
        space = observation_space(env.full_observation_spec[key])
        self._cast: Any = None if space.dtype == inner.observation_space.dtype else space.dtype
        if self._cast is not None:
            self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            # TorchRL seeds by a reset, and starts the episode by another.
            self.env.reset(seed=seed)
        self._steps = 0
        observation, info = self.env.reset()
        return observation if self._cast is None else observation.astype(self._cast), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._step(action)
        self._steps += 1
        if self._steps == self._max_steps:
            truncated = True
        if self._cast is not None:
            observation = observation.astype(self._cast)
        return observation, self._reward_type(reward), terminated, truncated, info

    def close(self) -> None:
        self.torchrl_env.close(raise_if_closed=False)


def _bare_gym(env: EnvBase) -> gym.Env[Any, Any] | None:
    """Return the gymnasium environment to step, if tensordicts would add nothing to it."""
    from torchrl.envs.libs.gym import GymEnv, GymWrapper

    limits: list[int] = []
    for transform in peel(env)[0]:
        if type(transform).__name__ not in _BOOKKEEPING | {"DoubleToFloat"}:
            return None
        limit = getattr(transform, "max_steps", None)
        if limit is not None:
            if not (getattr(transform, "update_done", True)):
                return None
            limits.append(int(limit))
    base: Any = peel(env)[1]
    inner = getattr(base, "_env", None)
    plain = (
        type(base) in (GymEnv, GymWrapper)
        and isinstance(inner, gym.Env)
        and not base.info_dict_reader
        and base.wrapper_frame_skip == 1
        and isinstance(inner.observation_space, gym.spaces.Box)
        and isinstance(inner.action_space, (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete))
        and base.device in (None, torch.device("cpu"))
        and not base.reward_spec.shape[1:]
    )
    return _BareGym(env, inner, min(limits, default=None)) if plain and inner is not None else None


def peel(env: EnvBase) -> tuple[list[Any], EnvBase]:
    """Return the transforms of an environment, outermost last, and the environment under them."""
    from torchrl.envs import Compose, TransformedEnv

    found: list[Any] = []
    while isinstance(env, TransformedEnv):
        transform = env.transform
        found = [*(transform if isinstance(transform, Compose) else [transform]), *found]
        env = env.base_env
    return found, env


def _gym_inside(env: Any) -> Any:
    inner = getattr(peel(env)[1], "_env", None)
    return inner if hasattr(inner, "render") else None


def seen_keys(env: EnvBase) -> list[Key]:
    """Return the keys of the observations, without what only says how far the episode is."""
    hidden: set[Key] = set()
    for transform in peel(env)[0]:
        name = type(transform).__name__
        if name == "RewardSum":
            hidden |= set(map(unravel_key, transform.out_keys))
        elif name == "StepCounter":
            hidden |= set(map(unravel_key, transform.step_count_keys))
        elif name == "InitTracker":
            hidden |= set(map(unravel_key, transform.init_keys))
    return [key for key in env.full_observation_spec.keys(True, True) if key not in hidden]


def nested_space(spaces: dict[tuple[str, ...], gym.Space[Any]]) -> gym.spaces.Dict:
    """Return the space of what :func:`~.keys.nested` makes of values of these spaces."""
    grouped: dict[str, Any] = {}
    for path, space in spaces.items():
        if len(path) == 1:
            grouped[path[0]] = space
        else:
            grouped.setdefault(path[0], {})[path[1:]] = space
    return gym.spaces.Dict(
        {name: nested_space(part) if isinstance(part, dict) else part for name, part in grouped.items()}
    )


def _single(env: EnvBase, what: str, keys: Sequence[Key], given: Key | None) -> Key:
    """Return the one key of a kind, which holds one number."""
    usual = keys[0] if len(keys) == 1 else what if what in keys else None
    key = usual if given is None else unravel_key(given)
    if key is None or key not in keys:
        raise ConfigError(
            f"the TorchRL environment has the {what}s {list(keys)}, of which {given!r} is none: rl_eval evaluates a "
            f"single agent here. Name the one that counts with {what}_key, or make an environment of one agent"
        )
    shape = (env.full_reward_spec if what == "reward" else env.full_done_spec)[key].shape
    if shape.numel() != 1:
        raise ConfigError(
            f"{what} {key!r} of the TorchRL environment has shape {tuple(shape)}, one number per agent: rl_eval "
            "evaluates a single agent here, and does not add agents together. Sum or select them in a transform of the "
            "environment"
        )
    return key


def _end_keys(env: EnvBase, given: Key | None) -> Callable[[TensorDictBase], tuple[bool, bool]]:
    """Return the function that reads whether a step ended the episode, and how."""
    spec = env.full_done_spec
    keys = [unravel_key(key) for key in spec.keys(True, True)]
    dones = [key for key in keys if _leaf(key) == "done"] or [key for key in keys if _leaf(key) == "terminated"]
    done = _single(env, "done", dones, given)
    prefix = done[:-1] if isinstance(done, tuple) else ()
    terminated, truncated = (unravel_key((*prefix, name)) for name in ("terminated", "truncated"))
    has_terminated, has_truncated = terminated in keys, truncated in keys

    def read(data: TensorDictBase) -> tuple[bool, bool]:
        cut = has_truncated and bool(data.get(truncated).item())
        over = bool(data.get(done).item())
        ended = bool(data.get(terminated).item()) if has_terminated else over and not cut
        # A flag of its own, such as that of an environment that knows done alone, ends the episode as well.
        return ended or (over and not cut and not ended), cut

    return read


def _leaf(key: Key) -> str:
    return key[-1] if isinstance(key, tuple) else key


def as_array(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array of this process."""
    return np.asarray(tensor.detach().cpu().numpy())
