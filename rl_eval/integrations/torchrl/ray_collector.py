"""Replacement for ``torchrl.collectors.distributed.RayCollector`` on top of :meth:`rl_eval.EvalRunnerGroup.sample`.

The signature and the layout of batches are those of TorchRL, so only the import line changes. The data come from a plan
of episodes, in the order of the plan, with the exact number of frames. They do not depend on the number of workers or
on crashes. An argument without a counterpart in rl_eval raises an error that names the argument.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from tensordict.nn import TensorDictModuleBase

from rl_eval.errors.other_names import no_attribute
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.integrations.torchrl.arguments import (
    ArgumentError,
    config_of,
    mode_of,
    refuse,
    runner_settings,
    same,
    take_rest,
    with_rules,
)
from rl_eval.integrations.torchrl.making import UNIFORM
from rl_eval.integrations.torchrl.normalizers import state_of

_JOIN_S: Final = 10.0


@final
class RayCollector:
    """Iterable over batches of frames that Ray actors collect.

    A batch has ``frames_per_batch`` consecutive frames, in the order of the plan. If a batch ends within an episode,
    the next batch continues the episode. Rewards are float32, as TorchRL's losses need them.

    Args:
        create_env_fn: A callable that builds one environment, or a list with the same callable for each collector. An
            environment is also accepted. It is copied.
        policy: The policy. Without a policy, actions are random. The policy is copied, so send new weights with
            :meth:`update_policy_weights_`.
        policy_factory: Function that builds the policy, in place of ``policy``. It is called with the environment, or
            without arguments if it takes none.
        frames_per_batch: Exact number of frames per batch.
        total_frames: Number of frames after which the iterator stops, at the end of a batch; negative for no limit.
        device: Default of ``storing_device`` and ``policy_device``. Each device may also be a list with the same device
            for each collector.
        storing_device: Device of the batches; by default, the CPU.
        env_device: Device of the environments, which can only be the CPU.
        policy_device: Device of the policy in the runners; by default, the CPU.
        max_frames_per_traj: Step limit of every episode; negative for no limit.
        init_random_frames: Number of frames with random actions at the start, rounded up to whole batches. After them,
            the policy starts with a new episode.
        reset_at_each_iter: Whether every batch starts with a new episode. The remaining steps of an unfinished episode
            are dropped.
        postproc: Function that is called with every batch. The iterator yields the function's result.
        split_trajs: Whether every trajectory gets a separate, padded row. The mask has the key
            ``("collector", "mask")``.
        exploration_type: ``RANDOM``, ``DETERMINISTIC``, ``MODE``, ``MEAN`` or ``MEDIAN``. TorchRL's global setting does
            not change.
        collector_kwargs: May contain ``device``, ``storing_device`` and ``policy_device``, equal to the arguments
            above. Other items are rejected, because there is no inner collector.
        num_workers_per_collector: Number of environments that step together in each runner.
        ray_init_config: Arguments of ``ray.init``, which is called if Ray is not running.
        remote_configs: ``num_cpus``, ``num_gpus``, ``memory``, ``resources``, ``label_selector`` and ``runtime_env`` of
            each actor.
        num_collectors: Number of actors; by default, the length of ``create_env_fn``. With 0, this process
            collects the frames.
        update_after_each_batch: Whether to send the weights of ``policy`` after every batch, before the next batch.
        max_weight_update_interval: Maximum number of batches between two automatic updates of the weights; negative for
            no automatic updates.
        replay_buffer: Replay buffer that is extended with every batch. The iterator then yields None.
        trajs_per_batch: Number of whole trajectories per batch, instead of a number of frames.
        pre_collect_hook: Function that is called before every batch.
        post_collect_hook: Function that is called with every batch, after ``postproc``.
        seed: Root seed of the episodes.
        **rest: Other arguments of TorchRL. ``weight_updater`` and ``weight_recv_schemes`` are rejected, because
            :meth:`update_policy_weights_` sends weights once to all workers. These arguments have no effect:
            ``trust_policy``, ``collector_class``, ``sync``, ``weight_sync_schemes``, ``use_env_creator`` and
            ``no_cuda_sync``.

    Raises:
        ArgumentError: An argument is wrong or not supported.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Any = None,
        frames_per_batch: int,
        total_frames: int = -1,
        device: Any = None,
        storing_device: Any = None,
        env_device: Any = None,
        policy_device: Any = None,
        max_frames_per_traj: int | None = -1,
        init_random_frames: int | None = -1,
        reset_at_each_iter: bool = False,
        postproc: Callable[[Any], Any] | None = None,
        split_trajs: bool = False,
        exploration_type: Any = "random",
        collector_kwargs: Any = None,
        num_workers_per_collector: int = 1,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        replay_buffer: Any = None,
        trajs_per_batch: int | None = None,
        pre_collect_hook: Callable[[], object] | None = None,
        post_collect_hook: Callable[[Any], object] | None = None,
        seed: int = 0,
        **rest: Any,
    ) -> None:
        take_rest("RayCollector", rest)
        where = _devices(
            env_device, collector_kwargs, device=device, storing_device=storing_device, policy_device=policy_device
        )
        if frames_per_batch < 1:
            problem, fix = f"frames_per_batch is {frames_per_batch}", "Pass at least 1."
            raise ArgumentError(problem, key="frames_per_batch", value=frames_per_batch, fix=fix)
        self.frames_per_batch, self.total_frames = int(frames_per_batch), int(total_frames)
        self.split_trajs, self.reset_at_each_iter, self.postproc = split_trajs, reset_at_each_iter, postproc
        self.init_random_frames = max(0, int(init_random_frames or 0))
        self.trajs_per_batch = trajs_per_batch
        self.replay_buffer = replay_buffer
        self._hooks = pre_collect_hook, post_collect_hook
        self._interval = 0 if update_after_each_batch else max_weight_update_interval
        self._storing_device = where["storing_device"]
        self._frames = self._batches = self._unsent = 0
        self._iterator: Iterator[Any] | None = None
        self._policy = policy
        policy_factory = same("policy_factory", policy_factory)
        self._mode = _acting_mode(policy, policy_factory, mode_of(exploration_type))
        several = len(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else 1
        count = several if num_collectors is None else num_collectors
        remotes = dict(same("remote_configs", remote_configs) or {})
        num_gpus = remotes.pop("num_gpus", 0)
        limits = [max_frames_per_traj] if max_frames_per_traj and max_frames_per_traj > 0 else []
        self._counts_steps = bool(limits)
        if self.total_frames >= 0 and trajs_per_batch is None:
            # Some episodes never end by themselves. The limit allows one more step than total_frames, so that the last
            # frame does not end its episode.
            limits.append(self.total_frames + 1)
        config = (
            config_of(
                same("create_env_fn", create_env_fn),
                policy,
                policy_factory,
                UNIFORM if self._random else self._mode,
                where["policy_device"],
                as_recorded=True,
            )
            .runners(num_envs_per_runner=num_workers_per_collector)
            .runners(**runner_settings("remote_configs", remotes, count, num_gpus))
            .evaluation(seed=seed, max_episode_steps=min(limits, default=None))
        )
        if ray_init_config and count:
            import ray

            if not ray.is_initialized():
                ray.init(**ray_init_config)
        self.group = EvalRunnerGroup(config)
        """Group that collects. It can also be used for evaluations and ``add_runners``."""
        self._was_random = self._random
        self._held: dict[str, Any] = {}
        """Models to send after the last batch with random actions, by their names in ``weights_dict``."""
        self._turn, self._line = threading.Lock(), threading.Lock()
        self._holder = 0
        """Id of the thread that collects, sends weights or pauses; 0 if there is none."""
        self._filling: Future[None] | None = None
        """Outcome of the thread that :meth:`start` started."""
        self._filler: threading.Thread | None = None

    # ------------------------------------------------------------------ collecting

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are collected."""
        while self.total_frames < 0 or self._frames < self.total_frames:
            with self._alone():
                batch = self._collect()
            yield batch

    iterator = __iter__

    def next(self) -> Any:
        """Return the next batch; None if ``total_frames`` are collected."""
        self._iterator = self._iterator or iter(self)
        return next(self._iterator, None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which no other thread collects, sends weights or pauses.

        Threads enter in order of arrival. Otherwise, the collecting thread would always enter first.
        """
        if self._holder == threading.get_ident():  # In a hook, or during a pause.
            yield
            return
        with self._line:
            self._turn.acquire()
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = 0
            self._turn.release()

    @property
    def _random(self) -> bool:
        """Whether the next batch has random actions."""
        return self._mode == UNIFORM or self._frames < self.init_random_frames

    def _collect(self) -> Any:
        if self._interval >= 0 and self._unsent >= max(1, self._interval) and isinstance(self._policy, torch.nn.Module):
            self.update_policy_weights_()
        before, after = self._hooks
        if before is not None:
            before()
        anew = self.reset_at_each_iter
        if self._was_random and not self._random:
            self._was_random, anew = False, True
            self.group.sync_weights(with_rules(None, self._held, mode=self._mode))
            self._held = {}
        if anew:
            self.group.sampler.skip_rest()
        amount: dict[str, Any] = {"num_env_steps": self.frames_per_batch, "mode": "truncate_episodes"}
        if self.trajs_per_batch is not None:
            amount = {"num_episodes": self.trajs_per_batch}
        batch = self.group.sample(**amount, split_trajs=self.split_trajs)
        self._frames += int(batch["collector", "mask"].sum()) if self.split_trajs else batch.numel()
        self._batches += 1
        batch["next", "reward"] = batch["next", "reward"].float()
        if self._counts_steps:
            _add_step_count(batch)
        batch.names = [*[None] * (batch.ndim - 1), "time"]
        batch = batch.to(self._storing_device)
        batch = batch if self.postproc is None else self.postproc(batch)
        if after is not None:
            after(batch)
        self._unsent += 1
        if self.replay_buffer is None:
            return batch
        self.replay_buffer.extend(batch)
        return None

    # ------------------------------------------------------------------ weights

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Send weights to all workers. Episodes that start after this call use these weights.

        Args:
            policy_or_weights: A policy, a state dict or a ``TensorDict``; by default, the current weights of
                ``policy``.
            weights: Another name of ``policy_or_weights``.
            policy: Another name of ``policy_or_weights``.
            worker_ids: Must be None or name all workers, because a batch has one version of the weights.
            model_id: Must be None or ``"policy"``.
            weights_dict: Several models by name: ``"policy"``, and transforms of the environment, such as
                ``"env.transform[0]"``. It excludes ``model_id`` and the other arguments with weights.

        Raises:
            ArgumentError: An argument is wrong or not supported, or two arguments exclude each other.
            WeightsError: The weights do not fit the policy.
        """
        self._check_filling()
        listed = worker_ids if isinstance(worker_ids, (list, tuple)) else [worker_ids]
        if set(listed) != set(range(self.num_workers)):
            refuse("worker_ids", worker_ids, "all frames of a batch come from one version of the weights")
        refuse("model_id", model_id, "there is one model, the policy", unless="policy")
        given = {"policy_or_weights": policy_or_weights, "weights": weights, "policy": policy}
        alone = {**given, "weights_dict": weights_dict, "model_id": None if weights_dict is None else model_id}
        if len(named := [name for name, value in alone.items() if value is not None]) > 1:
            fix = "Pass one of policy_or_weights, weights, policy and weights_dict, and model_id without weights_dict."
            raise ArgumentError(f"{' and '.join(named)} are set", key=named[-1], value=alone[named[-1]], fix=fix)
        sent = next((value for value in given.values() if value is not None), self._policy)
        if sent is None and not weights_dict:
            raise ArgumentError("there is no policy with weights to send", key="weights", fix="Pass the weights.")
        models = dict(weights_dict or {"policy": sent})
        with self._alone():
            self._unsent = 0
            if self._random:
                self._held |= copy.deepcopy(models)
            else:
                self.group.sync_weights(with_rules(None, models, mode=self._mode))

    # ------------------------------------------------------------------ state

    @property
    def num_workers(self) -> int:
        """Number of runners."""
        return max(1, self.group.settings.runners.num_runners)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Start over, with the plan of another root seed.

        Args:
            seed: The root seed.
            static_seed: Not used, because every episode has its own seed.

        Returns:
            The root seed.
        """
        self.group.sampler.restart(seed)
        return seed

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the plan, the numbers of collected frames and batches, and the weights in use.

        The weights are those of the next episode that the policy acts in: the weights that were sent last, or those of
        construction. The states of transforms that were sent are included.
        """
        with self._alone():
            models = self.group.apply_to_one(_models_of)
            models |= {name: state_of(model) for name, model in self._held.items()}
            state = {"sampler": self.group.sampler.state_dict(), "frames": self._frames, "iter": self._batches}
        if policy := models.pop("policy", None):
            state["policy_state_dict"] = policy
        return {**state, "env_state_dict": models}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from another collector's state. Load its weights into ``policy``, and send them to all workers."""
        models = dict(state_dict.get("env_state_dict", {}))
        if "policy_state_dict" in state_dict:
            models["policy"] = state_dict["policy_state_dict"]
            if isinstance(self._policy, torch.nn.Module):
                self._policy.load_state_dict(models["policy"])
        with self._alone():
            self.group.sampler.load_state_dict(state_dict["sampler"])
            self._frames, self._batches = state_dict["frames"], state_dict["iter"]
            self._was_random = self._random
            if models:
                self.update_policy_weights_(weights_dict=models)

    def start(self) -> None:
        """Fill the replay buffer in a thread, up to ``total_frames``.

        If the thread fails, its error is raised by the next call of :meth:`start`, :meth:`pause`, :meth:`shutdown` or
        :meth:`update_policy_weights_`.

        Raises:
            ArgumentError: There is no replay buffer.
        """
        if self.replay_buffer is None:
            problem, fix = "start() needs a replay buffer", "Pass replay_buffer, or iterate over the collector."
            raise ArgumentError(problem, key="replay_buffer", fix=fix)
        self._check_filling()
        if self._filling is None:
            self._filling = Future()
            self._filler = threading.Thread(None, self._fill, "rl_eval collector", (self._filling,), daemon=True)
            self._filler.start()

    def _fill(self, filling: Future[None]) -> None:
        try:
            for _ in self:
                pass
            filling.set_result(None)
        except BaseException as error:
            filling.set_exception(error)

    def _check_filling(self) -> None:
        """If the thread from :meth:`start` failed, raise its error. Later calls do not raise this error."""
        if self._filling is not None and self._filling.done():
            filling, self._filling = self._filling, None
            filling.result()

    @contextmanager
    def pause(self, timeout: float = 30.0, *, resume: bool = True) -> Iterator[None]:
        """Context in which no batch is collected. The current batch is finished before the context starts.

        Args:
            timeout: Not used, because the current batch is always finished.
            resume: Must be True. To stop collecting, call :meth:`shutdown`.
        """
        refuse("resume", resume, "shutdown() ends the collector", unless=True)
        self._check_filling()
        with self._alone():
            self.group.sampler.stop_ahead()
            yield

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:
        """Terminate all workers. Further calls have no effect.

        Args:
            timeout: Not used, because this call takes at most about ten seconds.
            shutdown_ray: Must be False, because the cluster may have other users.
        """
        refuse("shutdown_ray", shutdown_ray, "the cluster may have other users: call ray.shutdown()", unless=False)
        interrupted = self._filling is not None and not self._filling.done()
        self.group.stop()
        if self._filler is not None and self._filler is not threading.current_thread():
            self._filler.join(_JOIN_S)  # A thread that computes while the process exits can crash it.
        if not interrupted:
            self._check_filling()

    async def async_shutdown(self, shutdown_ray: bool = False) -> None:
        """Terminate all workers like :meth:`shutdown`, without blocking the event loop."""
        await asyncio.to_thread(self.shutdown, shutdown_ray=shutdown_ray)

    def __getattr__(self, name: str) -> Any:
        # There is no inner collector.
        raise no_attribute(self, name, "group.foreach_runner", "collector.group")

    def __enter__(self) -> RayCollector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _devices(env_device: Any, collector_kwargs: Any, **devices: Any) -> dict[str, torch.device]:
    """Return the torch device of each argument, by argument name. The default is ``device``, whose default is the CPU.

    Raises:
        ArgumentError: ``env_device`` is not the CPU, or ``collector_kwargs`` has other items than these devices.
    """
    refuse("env_device", same("env_device", env_device), "environments run on the CPU", unless="cpu")
    default = same("device", devices["device"]) or "cpu"
    where = {name: torch.device(same(name, given) or default) for name, given in devices.items()}
    for name, given in (same("collector_kwargs", collector_kwargs) or {}).items():
        refuse(f"collector_kwargs[{name!r}]", given, "runners of rl_eval step the environments", unless=where.get(name))
    return where


def _models_of(runner: Any) -> dict[str, dict[str, Any]]:
    """Return the states of a runner's policy and transforms, by their names in ``weights_dict``."""
    models: dict[str, dict[str, Any]] = runner.policy.models()
    return models


def _acting_mode(policy: Any, policy_factory: Any, mode: str) -> str:
    """Return the mode in which actions are chosen after the random frames.

    Without a policy, it is ``UNIFORM``. For a callable that is not a tensordict module, ``random`` becomes
    ``deterministic``.
    """
    if policy is None and policy_factory is None:
        return UNIFORM
    # A plain callable has no distribution to draw from.
    plain = policy is not None and not isinstance(policy, TensorDictModuleBase)
    return "deterministic" if plain and mode == "random" else mode


def _add_step_count(batch: Any) -> None:
    """Write the keys of TorchRL's ``StepCounter``, with 0 in padding, unless the environment has a ``StepCounter``."""
    keys = set(batch.keys(include_nested=True))
    if "step_count" in keys:
        return
    steps = batch["collector", "step"].unsqueeze(-1)
    after = steps + 1
    if ("collector", "mask") in keys:
        after = after * batch["collector", "mask"].unsqueeze(-1)
    batch["step_count"], batch["next", "step_count"] = steps, after
