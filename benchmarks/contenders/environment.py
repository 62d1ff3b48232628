"""rl_eval on one environment that others have published, in several layouts: a subprocess, since simulators crash."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from benchmarks.contenders import base

_PIXELS: Final = 4096
"""Numbers of one leaf of an observation that the policy looks at."""
_TURNS: Final = 7.0


def make(context: Any) -> gym.Env[Any, Any]:
    """Build what ``context`` names: an id of gymnasium after an import, or one of :data:`ADAPTERS`."""
    if context["module"]:
        importlib.import_module(context["module"])
    if context["id"] in ADAPTERS:
        return ADAPTERS[context["id"]](**context["kwargs"])
    env = gym.make(context["id"], disable_env_checker=True, **context["kwargs"])
    return WRAPPERS[context["wrap"]](env) if context["wrap"] else env


def _image_only(env: Any) -> Any:
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(env)


def _sum_of_rewards(env: Any) -> Any:
    from mo_gymnasium.wrappers import LinearReward

    return LinearReward(env)


WRAPPERS: Final[dict[str, Callable[[Any], Any]]] = {"image only": _image_only, "sum of rewards": _sum_of_rewards}


class _Crafter(gym.Env[Any, Any]):
    """crafter has the interface of old gym, and takes its seed when it is constructed."""

    def __init__(self) -> None:
        import crafter

        self._env = crafter.Env()
        self.observation_space = gym.spaces.Box(0, 255, self._env.observation_space.shape, np.uint8)
        self.action_space = gym.spaces.Discrete(self._env.action_space.n)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._env._seed, self._env._episode = seed, 0
        return self._env.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, done, info = self._env.step(int(action))
        return observation, float(reward), bool(done), False, info


class _Robosuite(gym.Env[Any, Any]):
    """robosuite draws from a generator that it is given when it is constructed."""

    def __init__(self, task: str) -> None:
        import robosuite
        from robosuite.wrappers import GymWrapper

        cameras = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False}
        self._env = GymWrapper(robosuite.make(task, robots="Panda", **cameras))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, self._env.observation_space.shape, np.float64)
        low, high = self._env.action_spec
        self.action_space = gym.spaces.Box(low.astype(np.float32), high.astype(np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._env.unwrapped.rng = np.random.default_rng(seed)
        return self._env.reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._env.step(action)


ADAPTERS: Final[dict[str, Callable[..., gym.Env[Any, Any]]]] = {"crafter": _Crafter, "robosuite": _Robosuite}


def make_policy(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Callable[[Any], Any]:
    """Fixed linear projections of the flattened observation, wrapped into the action space.

    Each row is multiplied and summed by itself, in an order that its neighbours do not change.
    """
    rng = np.random.default_rng(0)

    def choose(space: gym.Space[Any]) -> Callable[[Any], Any]:
        if isinstance(space, gym.spaces.Dict):
            parts = {name: choose(part) for name, part in space.spaces.items()}
            return lambda rows: {name: part(rows) for name, part in parts.items()}
        if isinstance(space, gym.spaces.Tuple):
            several = [choose(part) for part in space.spaces]
            return lambda rows: tuple(part(rows) for part in several)
        weights: dict[int, Any] = {}
        count = int(np.prod(space.shape or ()))

        def act(rows: npt.NDArray[np.float64]) -> Any:
            if not weights:
                weights[0] = rng.standard_normal((count, rows.shape[1])) * _TURNS / np.sqrt(rows.shape[1])
            turns = np.stack([(rows * one).sum(1) for one in weights[0]], axis=1)
            return _within(space, (turns - np.floor(turns)).reshape(len(rows), *(space.shape or ())))

        return act

    chosen = choose(action_space)
    return lambda observations: chosen(_flat(observation_space, observations))


def _flat(space: gym.Space[Any], batch: Any) -> npt.NDArray[np.float64]:
    """One row of float64 numbers per observation; of large leaves, evenly spaced ones."""
    if isinstance(space, gym.spaces.Dict):
        return np.concatenate([_flat(part, batch[name]) for name, part in space.spaces.items()], axis=1)
    if isinstance(space, gym.spaces.Tuple):
        return np.concatenate([_flat(part, leaf) for part, leaf in zip(space.spaces, batch, strict=True)], axis=1)
    rows = np.asarray(batch).reshape(len(batch), -1)
    return np.nan_to_num(rows[:, :: -(-rows.shape[1] // _PIXELS)].astype(np.float64), posinf=1.0, neginf=-1.0)


def _within(space: gym.Space[Any], share: npt.NDArray[np.float64]) -> Any:
    """Numbers in [0, 1) as actions."""
    if isinstance(space, gym.spaces.Box):
        low, high = np.maximum(space.low, -1.0), np.minimum(space.high, 1.0)
        low, high = (space.low, space.high) if (low >= high).any() else (low, high)
        return (low + share * (high - low)).astype(space.dtype)
    if isinstance(space, gym.spaces.Discrete):
        return (share * int(space.n)).astype(np.int64) + int(space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return (share * space.nvec).astype(np.int64) + space.start
    return (share < 0.5).astype(np.int8)


def environment(params: base.Params) -> dict[str, Any]:
    """Evaluate in every layout, and once with a new environment for every episode, as the truth.

    Where the layouts differ, or a result says that it is not a function of its seed, all of them get new environments.
    """
    begin = time.perf_counter()
    layouts = params["layouts"]
    truth = _evaluated(params, layouts[1], "episode")
    rows = [_row(layout, _evaluated(params, layout, "lane"), truth) for layout in layouts]
    fresh = [_row(layouts[1], truth, truth)]
    row = {"layouts": rows, "fresh": fresh, "cured": None}
    print("\n" + json.dumps({"status": "ok", **row}), flush=True)  # What follows may hang.
    if not _agree([*rows, *fresh]):
        fresh += [_row(layouts[place], _evaluated(params, layouts[place], "episode"), truth) for place in (0, -1)]
        row["cured"] = _agree(fresh)
    return row | {"seconds": time.perf_counter() - begin}


def _agree(rows: list[dict[str, Any]]) -> bool:
    return len({one["fingerprint"] for one in rows}) == 1 and all(one["passed"] is not False for one in rows)


def _evaluated(params: base.Params, layout: list[int], reuse: str) -> Any:
    from rl_eval import EvalConfig, evaluate

    runners, lanes = layout
    what = {key: params[key] for key in ("module", "id", "wrap", "kwargs")}
    config = (
        EvalConfig()
        .environment("benchmarks.contenders.environment:make", env_kwargs=what, env_reuse=reuse)
        .policy("benchmarks.contenders.environment:make_policy")
        .runners(
            num_runners=runners,
            num_envs_per_runner=lanes,
            num_cpus_per_runner=1,
            address=params["address"] if runners else None,
        )
        .evaluation(num_episodes=params["episodes"], max_episode_steps=params["steps"])
        .fault_tolerance(max_attempts_per_episode=1)
    )
    return evaluate(config)


def _row(layout: list[int], result: Any, truth: Any) -> dict[str, Any]:
    return {
        "layout": layout,
        "fingerprint": result.fingerprint,
        "status": result.status,
        "reason": result.reason,
        "differ": len(truth.table.mismatches(result.table.rows, result.table.infos)),
        "steps": int(result.table.rows["length"].sum()),
        "passed": result.determinism.passed,
        "determinism": str(result.determinism),
        "notes": list(result.notes),
    }


if __name__ == "__main__":
    base.run({"environment": environment})
