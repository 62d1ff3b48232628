"""Samples of CartPole's steps, with the data in the caller's hands: rl_eval, TorchRL and RLlib, one per process.

The policy is the same network for all, and takes its argmax. Frames are counted in what the caller got.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import base, rl_eval_, rllib, torchrl_parts

_BATCH = 20_000
"""Frames of a batch while memory is watched."""


def ours(params: base.Params) -> dict[str, Any]:
    """Time ``group.sample`` on Ray actors."""
    config = rl_eval_.make_config("throughput", {**params, "episodes": 1})
    options = {"num_env_steps": params["frames"], "mode": "truncate_episodes"}
    with rl_eval_.warm_group(config, params) as group:
        return _timed(lambda: len(group.sample(**options)))


def torchrl(params: base.Params) -> dict[str, Any]:
    """Time TorchRL's ``RayCollector``, whose collectors are Ray actors, each with a ``SerialEnv``."""
    from torchrl.collectors.distributed import RayCollector

    with base.ray_cluster(num_cpus=params["runners"] + 1):
        collector = RayCollector(
            [torchrl_parts.env_maker("throughput", params)] * params["runners"],
            torchrl_parts.policy_maker("throughput"),
            frames_per_batch=params["frames"],
            total_frames=-1,
            num_collectors=params["runners"],
            remote_configs={"num_cpus": 1, "num_gpus": 0, "memory": 1e9},
            ray_init_config={"ignore_reinit_error": True},
        )
        batches = iter(collector)
        row = _timed(lambda: next(batches).numel())
        collector.shutdown(shutdown_ray=False)
    return row


def rllib_runners(params: base.Params) -> dict[str, Any]:
    """Time RLlib's ``EnvRunnerGroup`` with ``synchronous_parallel_sample``, as its algorithms sample."""
    from ray.rllib.env.env_runner_group import EnvRunnerGroup
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

    fragment = -(-params["frames"] // (params["runners"] * params["envs"]))
    config = rllib._config("throughput", {**params, "runners": 0, "episodes": 1})
    config.env_runners(
        num_env_runners=params["runners"],
        num_envs_per_env_runner=params["envs"],
        rollout_fragment_length=fragment,
        explore=False,
    )
    with base.ray_cluster(num_cpus=params["runners"] + 1):
        group = EnvRunnerGroup(config=config, local_env_runner=False)

        def take() -> int:
            parts = synchronous_parallel_sample(
                worker_set=group, max_env_steps=params["frames"], concat=False, _uses_new_env_runners=True
            )
            return sum(len(episode) for part in parts for episode in part)

        row = _timed(take)
        group.stop()
    return row


def recording(params: base.Params) -> dict[str, Any]:
    """Run the same episodes with and without recording, in turn, in this process; seconds are CPU seconds."""
    import torch

    from rl_eval import EvalRunnerGroup

    torch.set_num_threads(1)
    made = rl_eval_.make_config("throughput", {**params, "runners": 0})
    config = made.policy(deterministic=not params["drawn"]).evaluation(determinism_check=0)
    with EvalRunnerGroup(config, threaded=False) as group:
        plain = functools.partial(_evaluated, group, params["episodes"])
        sampled = functools.partial(_sampled, group, params["episodes"])
        seconds: dict[str, list[float]] = {"unrecorded": [], "recorded": []}
        for _ in range(params["rounds"]):
            for name, play in (("unrecorded", plain), ("recorded", sampled)):
                started = time.process_time()
                frames = play()
                seconds[name].append(time.process_time() - started)
    rates = {name: frames / min(spent) for name, spent in seconds.items()}
    return {"rates": rates, "cost": 1 - rates["recorded"] / rates["unrecorded"], "frames": frames}


def memory(params: base.Params) -> dict[str, Any]:
    """Stream frames, and read the resident memory of driver and runners as they come."""
    config = rl_eval_.make_config("throughput", {**params, "episodes": 1})
    found, frames = [], 0
    with rl_eval_.warm_group(config, params) as group:
        runners = group.foreach_runner(_process_id)
        every = params["frames"] // 10
        for batch in group.iter_samples(num_env_steps=_BATCH, mode="truncate_episodes", as_arrays=True):
            frames += len(batch["action"])
            if frames >= every * (len(found) + 1):
                found.append([frames, _resident(os.getpid()), sum(map(_resident, runners))])
            if frames >= params["frames"]:
                break
    return {"resident": found}


def _evaluated(group: Any, episodes: int) -> int:
    return int(group.evaluate(num_episodes=episodes).counted_rows["length"].sum())


def _sampled(group: Any, episodes: int) -> int:
    group.sampler.restart()
    return len(group.sample(episodes, as_arrays=True)["action"])


def _timed(take: Callable[[], int]) -> dict[str, Any]:
    """Take a batch to warm up, and three for the row."""
    take()
    frames, seconds = base.timed(lambda: sum(take() for _ in range(3)))
    return {"frames": frames, "seconds": seconds, "steps_per_second": frames / seconds}


def _process_id(runner: Any) -> int:
    del runner
    return os.getpid()


def _resident(process: int) -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    base.run({"ours": ours, "torchrl": torchrl, "rllib": rllib_runners, "recording": recording, "memory": memory})
