"""The limit: ``env.step`` in a plain loop, two processes, no policy network, nothing recorded."""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

from benchmarks.contenders import base
from benchmarks.scenarios import env_factory, heuristic


def episodes_loop(env: Any, seeds: range) -> tuple[int, float]:
    """Play one episode per seed with the heuristic; return the steps and the sum of rewards."""
    steps, total = 0, 0.0
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(heuristic(obs))
            steps += 1
            total += reward
            over = terminated or truncated
    return steps, total


def _process(rank: int, params: base.Params, start: Barrier, results: Queue[Any]) -> None:
    env = env_factory("throughput", params)()
    share = params["episodes"] // params["runners"]
    episodes_loop(env, range(max(1, share // 10)))
    start.wait()
    begin = time.monotonic()
    steps, total = episodes_loop(env, range(rank * share, (rank + 1) * share))
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
    base.run({"throughput": throughput})
