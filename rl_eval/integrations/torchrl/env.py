"""Adapter that converts a TorchRL environment to a :class:`gymnasium.Env`.

=================  =============================================================================================
item               rule
=================  =============================================================================================
seed               ``set_seed(seed, static_seed=True)``, then ``reset()``; same episode as ``env.rollout``
observation        the keys of ``observation_spec`` as a nested Dict; a single key without a Dict
bookkeeping        keys of ``RewardSum``, ``StepCounter`` and ``InitTracker`` are left out; policies get ``is_init``
reward             the reward key, one number per step
terminated         the terminated key; without one, done and not truncated
truncated          the truncated key; without one, False
normalizers        frozen; an error without statistics
=================  =============================================================================================

If a ``GymEnv`` has only bookkeeping transforms and ``DoubleToFloat``, runners step its gymnasium environment directly,
without tensordicts. Seeds and ends of episodes are the same. Rewards are rounded to the dtype of the reward spec.

=====================================  ===================================================
spec                                   space
=====================================  ===================================================
``Bounded``, ``Unbounded``             ``Box`` of its shape and dtype
``Categorical`` / ``OneHot`` action    ``Discrete``
``MultiCategorical`` / ``MultiOneHot`` ``MultiDiscrete``
``Binary`` action                      ``MultiBinary``
discrete observations                  ``Box`` of the policy's input tensor
``Composite``                          ``Dict``
=====================================  ===================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, SupportsFloat, final

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.integrations.torchrl.normalizers import check_initialized, freeze_normalizers
from rl_eval.integrations.torchrl.policy import Key, array_of, nested, path_of

_BOOKKEEPING: Final = {"RewardSum": "out_keys", "StepCounter": "step_count_keys", "InitTracker": "init_keys"}
"""Transforms that only track the progress of an episode, and the attributes with their output keys."""


def as_env(
    env: EnvBase,
    observation_keys: Sequence[Key] | None = None,
    reward_key: Key | None = None,
    done_key: Key | None = None,
    *,
    check_normalizers: bool = True,
    as_recorded: bool = False,
) -> gym.Env[Any, Any]:
    """Convert a TorchRL environment to a gymnasium environment.

    Args:
        env: Single environment, built for the evaluation. Its normalizers are frozen.
        observation_keys: Keys of the ``observation_spec`` that policies see; by default, all keys except those for
            bookkeeping.
        reward_key: Key of the reward; by default, the only reward key.
        done_key: Key of the done flag that ends an episode; by default, the key at the root.
        check_normalizers: Whether to reject normalizers without statistics. Pass False if the statistics arrive later.
        as_recorded: Whether to act like TorchRL's collectors. Policies then see all keys, including bookkeeping, under
            their original names. Actions have the form of their spec and are not checked.

    Raises:
        ConfigError: The environment is a batch, has several agents, or has a normalizer without statistics.
    """
    refuse_batch(env)
    freeze_normalizers(env)
    if check_normalizers:
        check_initialized(env, "the environment", "environment.env")
    seen = list(env.full_observation_spec.keys(True, True)) if as_recorded else seen_keys(env)
    if observation_keys is reward_key is done_key is None and (not as_recorded or seen == ["observation"]):
        bare = _bare_gym(env)
        if bare is not None:
            return bare
    keys = seen if observation_keys is None else [unravel_key(key) for key in observation_keys]
    return TorchRLEnv(env, keys, reward_key, done_key, as_recorded)


def refuse_batch(env: EnvBase) -> None:
    """Reject an environment that steps several episodes at once.

    Raises:
        ConfigError: The environment is a batch.
    """
    if env.batch_size:
        problem = f"the TorchRL environment is a batch of shape {tuple(env.batch_size)}"
        fix = "Build single environments."
        raise ConfigError(problem, key="environment.env", value=tuple(env.batch_size), fix=fix)


@final
class TorchRLEnv(gym.Env[Any, Any]):
    """A gymnasium environment around a TorchRL environment; see :func:`as_env`.

    Attributes:
        env: The TorchRL environment.
    """

    def __init__(
        self, env: EnvBase, keys: Sequence[Key], reward_key: Key | None, done_key: Key | None, as_recorded: bool
    ) -> None:
        self.env = env
        self.render_mode = getattr(_gym_inside(env), "render_mode", None)
        only = keys[0] if len(keys) == 1 and isinstance(keys[0], str) else None
        if as_recorded and only != "observation":
            only = None
        self._paths = {key: () if only else path_of(key) for key in keys}
        self.observation_space = nested_space(
            {path: observation_space(env.full_observation_spec[key]) for key, path in self._paths.items()}
        )
        self._action_key = env.action_keys[0] if len(env.action_keys) == 1 else None
        spec = env.full_action_spec if self._action_key is None else env.full_action_spec[self._action_key]
        spec = unbounded(spec) if as_recorded else spec
        self.action_space = action_space(spec)
        self._write_action = action_writer(spec)
        self._reward_key = _single(env, "reward", env.reward_keys, reward_key)
        self._ends = _end_keys(env, done_key)
        self._current: TensorDictBase | None = None

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with torch.no_grad():
            if seed is not None:
                self.env.set_seed(seed, static_seed=True)
            self._current = self.env.reset()
        return self._observe(self._current), {}

    @override
    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step. After the last step of an episode, the caller must reset the environment."""
        assert self._current is not None, "step() was called before reset()"
        written = self._write_action(action)
        self._current.update(written if self._action_key is None else {self._action_key: written})
        with torch.no_grad():
            stepped = self.env.step(self._current)
            following = stepped.get("next")
            self._current = self.env.step_mdp(stepped)
        return self._observe(following), following.get(self._reward_key).item(), *self._ends(following), {}

    @override
    def render(self) -> Any:
        """Return a frame of the inner gymnasium environment.

        Raises:
            NotImplementedError: No inner environment renders.
        """
        inner = _gym_inside(self.env)
        return super().render() if inner is None else inner.render()

    @override
    def close(self) -> None:
        self.env.close(raise_if_closed=False)

    def _observe(self, data: TensorDictBase) -> Any:
        return nested({path: array_of(data.get(key)) for key, path in self._paths.items()})


@final
class _BareGym(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper of the gymnasium environment inside a ``GymEnv``. Episodes are the same as in the ``GymEnv``."""

    def __init__(self, env: EnvBase, inner: gym.Env[Any, Any], max_steps: int | None) -> None:
        super().__init__(inner)
        self.torchrl_env = env
        self._max_steps = max_steps or 0
        self._steps = 0
        self._step = inner.step  # Bound once, for speed.
        self._reward_type = torch.empty((), dtype=env.reward_spec.dtype).numpy().dtype.type
        key = next(iter(seen_keys(env)))
        space = observation_space(env.full_observation_spec[key])
        self._cast: Any = None if space.dtype == inner.observation_space.dtype else space.dtype
        if self._cast is not None:
            self.observation_space = space

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            # TorchRL seeds with one reset and starts the episode with another.
            self.env.reset(seed=seed)
        self._steps = 0
        observation, info = self.env.reset()
        return observation if self._cast is None else observation.astype(self._cast), info

    @override
    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._step(action)
        self._steps += 1
        if self._cast is not None:
            observation = observation.astype(self._cast)
        truncated = truncated or self._steps == self._max_steps
        return observation, self._reward_type(reward), terminated, truncated, info

    @override
    def close(self) -> None:
        self.torchrl_env.close(raise_if_closed=False)


def _bare_gym(env: EnvBase) -> gym.Env[Any, Any] | None:
    """Return a wrapper of the inner gymnasium environment; None if its episodes could differ from those of ``env``."""
    from torchrl.envs.libs.gym import GymEnv, GymWrapper

    transforms, base = peel(env)
    limits = [transform.max_steps for transform in transforms if getattr(transform, "max_steps", None) is not None]
    inner = getattr(base, "_env", None)
    plain = (
        all(
            type(transform).__name__ in {*_BOOKKEEPING, "DoubleToFloat"} and getattr(transform, "update_done", True)
            for transform in transforms
        )
        and type(base) in (GymEnv, GymWrapper)
        and isinstance(inner, gym.Env)
        and not base.info_dict_reader
        and base.wrapper_frame_skip == 1
        and isinstance(inner.observation_space, gym.spaces.Box)
        and isinstance(inner.action_space, (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete))
        and base.device in (None, torch.device("cpu"))
        and not base.reward_spec.shape[1:]
    )
    return _BareGym(env, inner, min(limits, default=None)) if plain and inner is not None else None


def peel(env: Any) -> tuple[list[Any], Any]:
    """Return the transforms of an environment (the last is the outermost), and the environment inside all of them."""
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
    """Return the keys of the observations, without bookkeeping."""
    hidden = {
        unravel_key(key)
        for transform in peel(env)[0]
        for key in getattr(transform, _BOOKKEEPING.get(type(transform).__name__, ""), ())
    }
    return [key for key in env.full_observation_spec.keys(True, True) if key not in hidden]


def _single(env: EnvBase, what: str, keys: Sequence[Key], given: Key | None) -> Key:
    """Return the key of the reward or of the done flag, after a check that its value is one number per step."""
    usual = keys[0] if len(keys) == 1 else what if what in keys else None
    key = usual if given is None else unravel_key(given)
    if key is None or key not in keys:
        problem = f"{what}_key is {given!r}, but the TorchRL environment has {list(keys)}"
        raise ConfigError(problem, key=f"{what}_key", value=given, fix="Pass one of these keys.")
    shape = (env.full_reward_spec if what == "reward" else env.full_done_spec)[key].shape
    if shape.numel() != 1:
        problem = f"{what} {key!r} has shape {tuple(shape)}, but rl_eval needs one value per step, not one per agent"
        fix = "Select one key, or use policy.policies."
        raise ConfigError(problem, key=f"{what}_key", value=tuple(shape), fix=fix)
    return key


def _end_keys(env: EnvBase, given: Key | None) -> Callable[[TensorDictBase], tuple[bool, bool]]:
    """Return a function that reads the terminated and truncated flags of a step."""
    keys = [unravel_key(key) for key in env.full_done_spec.keys(True, True)]
    ends = {name: [key for key in keys if path_of(key)[-1] == name] for name in ("done", "terminated")}
    done = _single(env, "done", ends["done"] or ends["terminated"], given)
    terminated, truncated = (unravel_key((*path_of(done)[:-1], name)) for name in ("terminated", "truncated"))

    def read(data: TensorDictBase) -> tuple[bool, bool]:
        over = bool(data.get(done).item())
        if terminated in keys:
            ended = bool(data.get(terminated).item())
            return ended, bool(data.get(truncated).item()) if truncated in keys else over and not ended
        cut = truncated in keys and bool(data.get(truncated).item())
        return over and not cut, cut  # A done flag alone means terminated.

    return read


# ------------------------------------------------------------------ spaces of specs, and actions as tensors


def nested_space(spaces: Mapping[tuple[str, ...], gym.Space[Any]]) -> gym.Space[Any]:
    """Return the space of a value that :func:`~.policy.nested` builds from values of these spaces."""

    def made(tree: Any) -> gym.Space[Any]:
        return gym.spaces.Dict({name: made(part) for name, part in tree.items()}) if isinstance(tree, dict) else tree

    return made(nested(spaces))


def observation_space(spec: TensorSpec) -> gym.spaces.Box:
    """Return the space of one leaf of the observations, with its shape and dtype.

    Raises:
        ConfigError: The spec has no fixed shape, or its dtype is bfloat16.
    """
    if any(size < 0 for size in spec.shape) or not hasattr(spec, "dtype") or spec.dtype is None:
        problem = f"the observation spec {spec} has no fixed shape, so its tensors do not form a batch"
        raise ConfigError(problem, key="environment.env")
    if spec.dtype is torch.bfloat16:
        fix = "Add a DTypeCastTransform to the environment."
        raise ConfigError(
            "an observation has the dtype bfloat16, which NumPy does not have",
            key="environment.env",
            value="bfloat16",
            fix=fix,
        )
    shape, dtype = tuple(spec.shape), torch.empty((), dtype=spec.dtype).numpy().dtype.type
    low: Any = -np.inf
    high: Any = np.inf
    if isinstance(spec, Bounded):
        bounds = spec.space.low, spec.space.high
        low, high = (np.broadcast_to(bound.cpu().numpy(), shape).astype(dtype) for bound in bounds)
    elif dtype == np.bool_:
        low, high = 0, 1
    elif np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return gym.spaces.Box(low, high, shape, dtype)


def action_space(spec: TensorSpec) -> gym.Space[Any]:
    """Return the gymnasium space of an action spec.

    Raises:
        ConfigError: No gymnasium space matches the spec.
    """
    if isinstance(spec, Composite):
        return gym.spaces.Dict({key: action_space(part) for key, part in spec.items()})
    if isinstance(spec, Binary):
        return gym.spaces.MultiBinary(tuple(spec.shape))
    if isinstance(spec, (MultiOneHot, MultiCategorical)):
        sizes = torch.as_tensor(spec.nvec).cpu().numpy()
        return gym.spaces.MultiDiscrete(sizes if isinstance(spec, MultiOneHot) else sizes.reshape(tuple(spec.shape)))
    if isinstance(spec, OneHot) or (isinstance(spec, Categorical) and spec.shape.numel() == 1):
        return gym.spaces.Discrete(int(spec.n))
    if isinstance(spec, Categorical):
        return gym.spaces.MultiDiscrete(np.full(tuple(spec.shape), int(spec.n)))
    if isinstance(spec, (Bounded, Unbounded)):
        return observation_space(spec)
    name = type(spec).__name__
    raise ConfigError(f"actions of the spec {name} have no gymnasium space", key="environment.env", value=name)


def unbounded(spec: TensorSpec) -> TensorSpec:
    """Return a spec without bounds, with the same shapes and dtypes."""
    if isinstance(spec, Composite):
        return Composite({key: unbounded(part) for key, part in spec.items()})
    return Unbounded(shape=spec.shape, device=spec.device, dtype=spec.dtype)


def action_writer(spec: TensorSpec) -> Callable[[Any], Any]:
    """Return a function that converts an action of the space to tensors of the spec."""
    if isinstance(spec, Composite):
        writers = {key: action_writer(part) for key, part in spec.items()}
        return lambda action: {key: write(action[key]) for key, write in writers.items()}
    shape, dtype, device = spec.shape, spec.dtype, spec.device
    if isinstance(spec, (OneHot, MultiOneHot)):
        sizes = list(spec.nvec) if isinstance(spec, MultiOneHot) else [int(spec.n)]
        starts = np.cumsum([0, *sizes[:-1]])

        def write(action: Any) -> torch.Tensor:
            vector = torch.zeros(sum(sizes), dtype=dtype)
            vector[torch.as_tensor(starts + np.ravel(action))] = 1
            return vector.reshape(shape).to(device)

        return write
    return lambda action: torch.as_tensor(np.asarray(action), dtype=dtype).reshape(shape).to(device)
