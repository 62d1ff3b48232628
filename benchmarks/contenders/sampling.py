"""Samples of CartPole's steps, with the data in the caller's hands: rl_eval, TorchRL and RLlib, one per process.

The policy is the same network for all, and takes its argmax. Frames are counted in what the caller got.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import base, rl_eval_, rllib, torchrl_parts

_NAME = "trajectory"
_BATCHES = 10
"""More than are taken."""
_BATCH = 20_000
"""Frames of a batch while memory is watched."""


def ours(params: base.Params) -> dict[str, Any]:
    """Time ``group.sample`` on Ray actors."""
    config = rl_eval_.make_config("throughput", {**params, "episodes": 1})
    options = {"num_env_steps": params["frames"], "mode": "truncate_episodes"}
    with rl_eval_.warm_group(config, params) as group:
        # What the first batch left over must not count.
        return _timed(lambda: len(group.sample(**options)), group.sampler.restart)


def torchrl(params: base.Params) -> dict[str, Any]:
    """Time TorchRL's ``RayCollector``, whose collectors are Ray actors, each with a ``SerialEnv``."""
    from torchrl.collectors.distributed import RayCollector

    with base.ray_cluster(num_cpus=params["runners"] + 1):
        collector = RayCollector(
            [torchrl_parts.env_maker("throughput", params)] * params["runners"],
            torchrl_parts.policy_maker("throughput"),
            frames_per_batch=params["frames"],
            total_frames=_BATCHES * params["frames"],
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
    """Run the same episodes with and without recording, in turn, in this process; seconds are CPU seconds.

    With it they end as the arrays of one batch.
    """
    import torch

    from rl_eval.runners import VectorEvalRunner
    from rl_eval.runners.trajectories import TrajectoryRecorder

    torch.set_num_threads(1)
    settings = rl_eval_.make_config("throughput", {**params, "runners": 0}).policy(deterministic=not params["drawn"])
    runners = {name: VectorEvalRunner(settings.build(), 0) for name in ("unrecorded", "recorded")}
    runners["recorded"].observe({_NAME: TrajectoryRecorder})
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(params["rounds"] + 1):
        for name, runner in runners.items():
            started = time.process_time()
            frames = _play(runner, params["episodes"])
            seconds[name].append(time.process_time() - started)
    rates = {name: frames / min(spent[1:]) for name, spent in seconds.items()}
    return {"rates": rates, "cost": 1 - rates["recorded"] / rates["unrecorded"], "frames": frames, "rounds": seconds}


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


def _play(runner: Any, episodes: int) -> int:
    """Run episodes, and make a batch of those that were recorded; return the number of frames."""
    from rl_eval.records.episode import Lease
    from rl_eval.runners.trajectories import Fragment, as_arrays

    plan = runner.settings.plan()
    reports = [runner.run([Lease(plan[index], 1) for index in range(episodes)])]
    while sum(len(report.rows) for report in reports) < episodes:
        reports.append(runner.run())
    frames = sum(report.env_steps for report in reports)
    kept = {index: one for report in reports for _, block in report.artifacts for index, one in block.items()}
    found = [kept[index] for index in sorted(kept)]
    if found and len(as_arrays([Fragment(one, 0, len(one)) for one in found])["action"]) != frames:
        raise RuntimeError("the batch has not all frames")
    return int(frames)


def _timed(take: Callable[[], int], clear: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Take a batch to warm up, and three for the row."""
    take()
    clear()
    spent = base.cpu_seconds()
    frames, seconds = base.timed(lambda: sum(take() for _ in range(3)))
    spent = base.cpu_seconds() - spent
    rates = {"steps_per_second": frames / seconds, "steps_per_cpu_second": frames / spent}
    return {"frames": frames, "seconds": seconds, **rates}


def _process_id(runner: Any) -> int:
    del runner
    return os.getpid()


def _resident(process: int) -> int:
    """Return the bytes of memory that a process has for itself, without pages of Ray's object store."""
    resident, shared = map(int, Path(f"/proc/{process}/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    base.run({"ours": ours, "torchrl": torchrl, "rllib": rllib_runners, "recording": recording, "memory": memory})
