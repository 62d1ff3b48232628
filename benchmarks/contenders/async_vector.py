"""gymnasium's ``AsyncVectorEnv`` in a plain loop that takes equally many episodes from each environment."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks.contenders import base
from benchmarks.scenarios import env_factory


def _play(envs: Any, quota: int) -> list[float]:
    """Step all environments until each has ended ``quota`` episodes; the returns of these."""
    returns: list[float] = []
    sums, done = np.zeros(envs.num_envs), np.zeros(envs.num_envs, np.int64)
    actions = np.zeros(envs.num_envs, np.int64)
    envs.reset(seed=0)
    while (done < quota).any():
        _, rewards, terminations, truncations, _ = envs.step(actions)
        sums += rewards
        for env in np.flatnonzero(terminations | truncations):
            if done[env] < quota:
                returns.append(float(sums[env]))
            done[env] += 1
            sums[env] = 0.0
    return returns


def faults(params: base.Params) -> dict[str, Any]:
    """Evaluate once, and close."""
    from gymnasium.vector import AsyncVectorEnv

    params["strike"]["spare"] = os.getpid()
    envs = AsyncVectorEnv([env_factory("faults", params)] * params["envs"], context="spawn")
    returns = _play(envs, params["episodes"] // params["envs"])
    row = base.evaluated(len(returns), sum(returns) / len(returns))
    envs.close()
    return row


if __name__ == "__main__":
    base.run({"faults": faults})
