"""The limit: ``env.step`` in a plain loop, two processes, no policy network, nothing recorded."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from benchmarks.contenders import base
from benchmarks.scenarios import env_factory, heuristic


def episodes_loop(env: Any, seeds: range, act: Callable[[Any], Any] = heuristic) -> tuple[int, float]:
    """Play one episode per seed; return the steps and the sum of rewards."""
    steps, total = 0, 0.0
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            steps += 1
            total += reward
            over = terminated or truncated
    return steps, total


def _always(space: Any) -> Callable[[Any], Any]:
    action = np.zeros(space.shape, space.dtype)[()]
    return lambda _: action


def _process(rank: int, params: base.Params, start: Barrier, results: Queue[Any]) -> None:
    env = env_factory(params["scenario"], params)()
    act = heuristic if params["scenario"] == "throughput" else _always(env.action_space)
    share = params["episodes"] // params["runners"]
    episodes_loop(env, range(max(1, share // 10)), act)
    start.wait()
    begin = time.monotonic()
    steps, total = episodes_loop(env, range(rank * share, (rank + 1) * share), act)
    results.put((begin, time.monotonic(), steps, total, share))


def throughput(params: base.Params) -> dict[str, Any]:
    """Time from the first process's first reset to the last one's last step."""
    context = mp.get_context("spawn")
    start, results = context.Barrier(params["runners"]), context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, params, start, results)) for rank in range(params["runners"])
    ]
    for process in processes:
        process.start()
    rows = [results.get() for _ in processes]
    for process in processes:
        process.join()
    begins, ends, steps, totals, shares = zip(*rows, strict=True)
    episodes = sum(shares)
    return base.steps_row(sum(steps), max(ends) - min(begins), episodes, sum(totals) / episodes)


if __name__ == "__main__":
    base.run({"throughput": throughput, "simulators": throughput})
