"""gymnasium's vector environments in a plain loop that takes equally many episodes from each environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.contenders import base
from benchmarks.scenarios import env_factory
from benchmarks.worlds import WORLDS, Actor


def _play(envs: Any, quota: int, act: Callable[[Any], Any]) -> list[float]:
    """Step all environments until each has ended ``quota`` episodes; the returns of these."""
    returns: list[float] = []
    sums, done = np.zeros(envs.num_envs), np.zeros(envs.num_envs, np.int64)
    observations, _ = envs.reset(seed=0)
    while (done < quota).any():
        observations, rewards, terminations, truncations, _ = envs.step(act(observations))
        sums += rewards
        for env in np.flatnonzero(terminations | truncations):
            if done[env] < quota:
                returns.append(float(sums[env]))
            done[env] += 1
            sums[env] = 0.0
    return returns


def simulators(params: base.Params) -> dict[str, Any]:
    """Evaluate once to warm up and once for the row; the same step resets whoever is done."""
    import torch
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    torch.set_num_threads(1)
    actor, count = Actor(params["world"]), params["envs"]
    made = [env_factory("simulators", params)] * count
    mode = AutoresetMode.SAME_STEP
    if params["processes"]:
        envs: Any = AsyncVectorEnv(made, context="spawn", autoreset_mode=mode)
    else:
        envs = SyncVectorEnv(made, autoreset_mode=mode)
    _play(envs, 1, actor)
    returns, seconds = base.timed(lambda: _play(envs, params["episodes"] // count, actor))
    envs.close()
    return base.steps_row(len(returns) * WORLDS[params["world"]].steps, seconds, len(returns), float(np.mean(returns)))


def faults(params: base.Params) -> dict[str, Any]:
    """Evaluate once, and close."""
    from gymnasium.vector import AsyncVectorEnv

    params["strike"]["spare"] = os.getpid()
    envs = AsyncVectorEnv([env_factory("faults", params)] * params["envs"], context="spawn")
    returns = _play(envs, params["episodes"] // params["envs"], lambda rows: np.zeros(len(rows), np.int64))
    row = base.evaluated(len(returns), sum(returns) / len(returns))
    envs.close()
    return row


if __name__ == "__main__":
    base.run({"faults": faults, "simulators": simulators})
