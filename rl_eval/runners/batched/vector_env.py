"""Adapter of gymnasium's vector environments, and construction of a simulator from a config."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import tree
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.async_vector_env import AsyncState
from typing_extensions import override

from rl_eval.config.settings import EnvironmentSection, is_live_environment
from rl_eval.errors import ConfigError, EnvError
from rl_eval.policies.inference.device_arrays import like, numpy_of, with_rows
from rl_eval.policies.inference.spaces import has_texts, with_text_arrays
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.added import with_wrappers
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Flags, Slots
from rl_eval.runners.batched.trial import WITHOUT_RESTARTS
from rl_eval.runners.environment import attribute_of, build_env, episode_hook
from rl_eval.runners.running_statistics import check_frozen

_ALE: Final = "ale_py.vector_env"
_ALE_PROTOCOL: Final = (
    *("repeat_action_probability", "reward_clipping", "noop_max", "use_fire_reset", "episodic_life", "frameskip"),
    "stack_num",
)
"""Settings of ALE's vector environment that change returns."""
_ALE_SEED_MASK: Final = 0x7FFF_FFFF
_TRUSTED: Final = (gym.vector.SyncVectorEnv, AsyncVectorEnv)
"""Classes whose ``reset_mask`` is known to work."""
_FINAL: Final = ("final_obs", "final_info")
"""Keys of infos with the observations and infos of slots that were reset in the same call."""


@final
class VectorEnvSimulator(BatchSimulator):
    """Simulator around a gymnasium vector environment. It resets single slots with ``reset_mask`` and a seed per slot.

    Args:
        env: The environment. Its autoreset mode must be known; see :func:`_autoreset_mode`.
        blocks: Whether the environment is only reset as a whole, and its slots restart by themselves.

    Raises:
        ConfigError: The environment cannot reset single slots with a seed per slot.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], *, blocks: bool = False) -> None:
        self.env = env
        self.num_envs, self.name = env.num_envs, type(env).__name__
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        first: Any = next(iter(getattr(env, "envs", ())), env)
        self.condition_keys = getattr(env, "condition_keys", None) or attribute_of(first, "condition_keys") or ()
        self._is_ale = type(env).__module__ == _ALE
        if isinstance(env, VectorWrapper):
            problem = f"{type(env).__name__} wraps all slots at once, so an episode could depend on other slots"
            fix = "Wrap the single environments inside the function that builds them."
            raise ConfigError(problem, key="environment.env", value=type(env).__name__, fix=fix)
        self._mode = _autoreset_mode(env)
        self.trusted, self.restarts_idle = type(env) in _TRUSTED, self._mode is AutoresetMode.DISABLED
        if episode_hook(first) is not None:
            problem = "the environment has begin_episode(), which runners.runner=batched does not call"
            fix = "Set runners.runner: vector."
            raise ConfigError(problem, key="environment.env", value=type(first).__name__, fix=fix)
        self._has_texts = has_texts(self.observation_space)
        if self._has_texts and getattr(env, "shared_memory", False):
            problem = f"{type(env).__name__} changes texts in shared memory: it fills them up to max_length"
            fix = "Set vector_kwargs: {shared_memory: false} in environment.env_kwargs, or pass shared_memory=False."
            raise ConfigError(problem, key="environment.env", value=type(env).__name__, fix=fix)
        self._started, self._blocks = False, blocks
        self._first: Mapping[str, Any] = {}
        """Infos of the last reset."""
        self._has_infos = False
        """Whether any slot has reported an info."""
        self._ended: Flags = np.zeros(self.num_envs, bool)
        """Slots that ended and were not restarted."""
        if blocks and self._mode is AutoresetMode.DISABLED:
            problem = "runners.block needs slots that restart by themselves, but the autoreset mode is DISABLED"
            fix = "Build the vector environment with AutoresetMode.NEXT_STEP."
            raise ConfigError(problem, key="runners.block", fix=fix)
        if not (blocks or self.trusted):
            self._check_seeds()

    @override
    def restart(self, slots: Slots, specs: Sequence[EpisodeSpec]) -> Any:
        if specs[0].condition is None:
            observations = self._reset(slots, [spec.seed for spec in specs])
            return tree.map_structure(lambda leaf: leaf[slots], observations)
        rows = []
        for slot, spec in zip(slots, specs, strict=True):  # One call of reset() has the same options for all slots.
            observations = self._reset(np.array([slot]), [spec.seed], spec.reset_arguments["options"])
            rows.append(tree.map_structure(lambda leaf, slot=slot: np.array(numpy_of(leaf[slot])), observations))
        return tree.map_structure(lambda *leaves: np.stack(leaves), *rows)

    @override
    def reset(self, seed: int) -> Any:
        self._ended = np.zeros(self.num_envs, bool)
        return self._with_arrays(self.env.reset(seed=seed)[0])

    def _reset(self, slots: Slots, seeds: list[int], options: Mapping[str, Any] = {}) -> Any:
        """Reset some slots, or all slots at the first call; return the observations of all slots."""
        chosen = dict(zip(slots.tolist(), seeds, strict=True))
        if not self._started:
            # Slots without an episode run a copy of the first episode, so they raise only if this episode raises.
            chosen = dict.fromkeys(range(self.num_envs), seeds[0]) | chosen
            self._started = True
        mask = np.zeros(self.num_envs, bool)
        mask[list(chosen)] = True
        self._ended[mask] = False
        seed: Any = [chosen.get(slot) for slot in range(self.num_envs)]
        if self._is_ale:
            seed = np.array([_ale_seed(chosen[slot]) for slot in sorted(chosen)], np.int64)
        observations, self._first = self.env.reset(seed=seed, options={**options, "reset_mask": mask})
        return self._with_arrays(observations)

    @override
    def first_values(self, key: str) -> tuple[np.ndarray[Any, Any], Flags] | None:
        return _Values(self._first, self.num_envs)(key)

    @override
    def step(self, actions: Any) -> BatchStep:
        result = self.env.step(actions)
        observations, rewards, terminated, truncated = self._with_arrays(result[0]), *result[1:4]
        infos: Mapping[str, Any] = result[4]
        same_step, restarting = self._mode is AutoresetMode.SAME_STEP, self._ended
        if not same_step and any(key in infos for key in _FINAL):
            problem = f"{self.name} has final observations in its infos, but its autoreset mode is {self._mode.value}"
            fix = "Set its attribute autoreset_mode to AutoresetMode.SAME_STEP."
            raise EnvError(problem, key="autoreset_mode", value=self._mode.value, fix=fix)
        ended = self._ended = _flags(terminated) | _flags(truncated)
        restarted = ended if same_step else restarting
        started = (restarted, observations) if self._blocks and restarted.any() else None
        self._has_infos = self._has_infos or any(key.lstrip("_") not in _FINAL for key in infos)
        if same_step and ended.any():
            observations, infos = _before_autoreset(observations, infos, ended, self._has_infos, self._with_arrays)
        values = _Values(infos, self.num_envs)
        return BatchStep(observations, rewards, terminated, truncated, values, values.keys, started)

    def _with_arrays(self, observations: Any) -> Any:
        return with_text_arrays(self.observation_space, observations) if self._has_texts else observations

    @override
    def close(self) -> None:
        if isinstance(self.env, AsyncVectorEnv) and self.env._state is not AsyncState.DEFAULT:  # noqa: SLF001
            # A worker has died in a call. close() would wait for its reply for ever.
            self.env._state = AsyncState.DEFAULT  # noqa: SLF001
            self.env.close(terminate=True)
        else:
            self.env.close()

    def _check_seeds(self) -> None:
        """Reset all slots with a seed for each.

        Raises:
            ConfigError: The environment takes one seed for all slots.
        """
        try:
            self._reset(np.arange(self.num_envs), [0] * self.num_envs)
        except (TypeError, ValueError, AssertionError, gym.error.Error) as error:
            problem = f"{self.name} does not take a seed per slot ({error}), so an episode would depend on other slots"
            raise ConfigError(problem, key="environment.env", value=self.name, fix=WITHOUT_RESTARTS) from error


def _ale_seed(seed: int) -> int:
    """Return the seed that ALE's emulator gets in an episode of ``gymnasium.make``, with its sign removed.

    The sign must be removed, because the vector environment reads a negative number as "no seed". So half of the
    episodes equal those of ``gymnasium.make``, if nothing else is drawn at random.
    """
    return int(np.random.SeedSequence(seed).generate_state(2)[1]) & _ALE_SEED_MASK


def _flags(given: Any) -> Flags:
    """Return flags by slot as a NumPy array of bools, copied from the device if necessary."""
    return numpy_of(given).astype(bool, copy=False)


class _Values:
    """Values of a vector environment's infos by key; callable, for :attr:`BatchStep.values`."""

    def __init__(self, infos: Mapping[str, Any], num_envs: int) -> None:
        self._infos, self._num_envs = infos, num_envs

    @property
    def keys(self) -> list[str]:
        """Keys of infos with one value for each slot; some slots may not have reported them."""
        shape = (self._num_envs,)
        named = [(key, value) for key, value in self._infos.items() if not key.startswith("_")]
        return [key for key, one in named if isinstance(one, Mapping) or getattr(one, "shape", ())[:1] == shape]

    def __call__(self, key: str) -> tuple[np.ndarray[Any, Any], Flags] | None:
        if key not in self._infos:
            return None
        mask = self._infos.get(f"_{key}")
        reported = np.ones(self._num_envs, bool) if mask is None else _flags(mask)
        return _by_slot(self._infos[key], self._num_envs), reported


def _by_slot(values: Any, num_envs: int) -> np.ndarray[Any, Any]:
    """Return the values of an ``info`` key, one per slot. If the info is nested, each value is a dict."""
    if not isinstance(values, Mapping):
        return numpy_of(values)
    parts, whole = _Values(values, num_envs), np.empty(num_envs, object)
    found = {key: one for key in parts.keys if (one := parts(key)) is not None}
    whole[:] = [{key: part[slot] for key, (part, mask) in found.items() if mask[slot]} for slot in range(num_envs)]
    return whole


def _before_autoreset(
    observations: Any,
    infos: Mapping[str, Any],
    ended: Flags,
    has_infos: bool,
    with_arrays: Callable[[Any], Any],
) -> tuple[Any, Mapping[str, Any]]:
    """Return a step's observations and infos, with the values before the reset in slots that this step reset.

    Raises:
        EnvError: The final observations are missing; or the final infos are missing, but the environment has infos.
    """
    final_observations, final_info = infos.get("final_obs"), infos.get("final_info")
    if final_observations is None:
        raise _lost("final_obs")
    if not isinstance(final_info, Mapping) and (has_infos or final_info is not None):
        raise _lost("final_info")
    # In slots that ended, the infos are those of the reset, so the masks exclude them.
    own = [key for key in infos if not key.startswith("_") and key not in _FINAL]
    masks = {f"_{key}": ~ended & _flags(infos.get(f"_{key}", ~ended)) for key in own}
    infos = {key: infos[key] for key in own} | masks
    slots = np.flatnonzero(ended)
    rows = with_arrays(_final_rows(final_observations, slots))
    whole = tree.map_structure(lambda leaf, last: with_rows(leaf, slots, like(last, leaf)), observations, rows)
    if not isinstance(final_info, Mapping):
        return whole, infos
    merged = dict(infos)
    for key in [key for key in final_info if not key.startswith("_")]:
        given, mask = _by_slot(final_info[key], len(ended)), _flags(final_info.get(f"_{key}", ended))
        former = _by_slot(merged[key], len(ended)) if key in merged else given
        values = np.array(former, np.result_type(former, given))
        values[mask] = given[mask]
        merged[key], merged[f"_{key}"] = values, _flags(merged.get(f"_{key}", np.zeros_like(mask))) | mask
    return whole, merged


def _lost(key: str) -> EnvError:
    """Return the error for infos in which a key of :data:`_FINAL` is missing or has another form."""
    problem = f"the vector environment resets a slot in the step that ends its episode, but the infos lack {key}"
    fix = (
        "Build it with autoreset_mode=AutoresetMode.NEXT_STEP, or return final_obs and final_info as gymnasium 1 does."
    )
    return EnvError(problem, key=key, fix=fix)


def _final_rows(final_observations: Any, slots: Slots) -> Any:
    """Return the final observations of some slots, shape (k, ...), from nested arrays or from an array of objects."""
    if isinstance(final_observations, np.ndarray) and final_observations.dtype.kind == "O":
        return tree.map_structure(_stacked, *final_observations[slots])
    return tree.map_structure(lambda leaf: leaf[slots], final_observations)


def _stacked(*rows: Any) -> Any:
    return list(rows) if isinstance(rows[0], str) else np.stack([numpy_of(row) for row in rows])


def build_simulator(
    section: EnvironmentSection, runner_index: int, num_runners: int, num_envs: int, *, blocks: bool = False
) -> BatchSimulator:
    """Build the simulator that a config names.

    ``environment.env`` is a gymnasium id for ``gymnasium.make_vec``, or a callable (or its ``"module:attr"``) with a
    parameter ``num_envs``. The callable returns a vector environment or a :class:`BatchSimulator`.

    Raises:
        ConfigError: The environment is unknown, does not step several slots, or cannot restart them one by one.
        Exception: The constructor raised it.
    """
    if _is_ale(section.env):
        section = section.model_copy(update={"env_kwargs": {"reward_clipping": False} | dict(section.env_kwargs)})
    built = build_env(section, runner_index, 0, num_runners, num_envs=num_envs)
    try:
        return with_wrappers(_adapted(built, section, num_envs, blocks=blocks), section.wrappers)
    except ConfigError:
        if not is_live_environment(section.env):
            with suppress(Exception):  # The rejection is the error to raise.
                built.close()
        raise


def _adapted(built: Any, section: EnvironmentSection, num_envs: int, *, blocks: bool) -> BatchSimulator:
    """Return the simulator for an object that a factory built: the object itself, or an adapter around it.

    Raises:
        ConfigError: The object does not step ``num_envs`` slots, or cannot restart them one by one.
    """
    if getattr(built, "num_envs", num_envs) != num_envs:
        problem = f"environment.env is {section.env!r}, which built {built.num_envs} slots instead of {num_envs}"
        fix = "Build exactly num_envs slots. The number can be lower than runners.num_envs_per_runner."
        raise ConfigError(problem, key="environment.env", value=built.num_envs, fix=fix)
    if isinstance(built, BatchSimulator):
        return built
    if not isinstance(built, VectorEnv):
        problem = (
            f"environment.env is {section.env!r}, which built a {type(built).__name__}, not a "
            "gymnasium.vector.VectorEnv"
        )
        fix = "Return a vector environment of num_envs slots, or set runners.runner: vector."
        raise ConfigError(problem, key="environment.env", value=type(built).__name__, fix=fix)
    check_frozen(built, "environment.env")
    simulator = VectorEnvSimulator(built, blocks=blocks)
    simulator.note = _described(built, section.env_kwargs)
    return simulator


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode of an environment, from its attribute or else from its own metadata.

    Metadata inherited from :class:`gymnasium.vector.VectorEnv` is ignored.

    Raises:
        ConfigError: The environment has neither a valid attribute nor valid metadata.
    """
    mode = getattr(env, "autoreset_mode", None)
    if mode is None and env.metadata is not VectorEnv.metadata:
        mode = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        problem = f"the autoreset mode of {type(env).__name__} is {mode!r}"
        fix = "Set its attribute autoreset_mode to a gymnasium.vector.AutoresetMode."
        raise ConfigError(problem, key="environment.env", value=type(env).__name__, fix=fix) from error


def _is_ale(env: Any) -> bool:
    """Whether an id belongs to ALE, whose vector environment clips rewards by default."""
    module, _, name = env.rpartition(":") if isinstance(env, str) else ("", "", "")
    with suppress(ImportError):  # The construction of the environment raises it again.
        if module:
            importlib.import_module(module)
    return name in gym.registry and str(gym.registry[name].vector_entry_point).startswith(_ALE)


def _described(env: VectorEnv[Any, Any, Any], kwargs: Mapping[str, Any]) -> str:
    """Return a note with the name of the simulator and, for ALE, the settings of its preprocessing."""
    text = f"all slots are stepped by one {type(env).__name__}"
    if type(env).__module__ != _ALE:
        return text
    defaults = {name: one.default for name, one in inspect.signature(type(env)).parameters.items()}
    spec: Mapping[str, Any] = env.spec.kwargs if env.spec is not None else {}
    given = {name: dict(kwargs).get(name, spec.get(name, defaults.get(name))) for name in _ALE_PROTOCOL}
    return f"{text}, with {', '.join(f'{name}={value}' for name, value in given.items())}"
