"""Drop-in for ``torchrl.collectors.distributed.RayCollector`` on top of :meth:`rl_eval.EvalRunnerGroup.sample`.

The signature and the layout of batches are TorchRL's, so that an import line is all that changes. The data are
rl_eval's: the frames of a plan of episodes, in its order, exactly as many as asked, whatever the number of workers and
whichever of them died. What has no meaning here is an error that names it.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from tensordict.nn import TensorDictModuleBase

from rl_eval.config.builder import EvalConfig
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.integrations.torchrl.arguments import ArgumentError, is_env, mode_of, own_policy, refuse, with_rules
from rl_eval.integrations.torchrl.arguments import runner_settings as settings_of_remotes
from rl_eval.integrations.torchrl.making import EnvMaker, PolicyMaker
from rl_eval.integrations.torchrl.scope import forget_scope
from rl_eval.integrations.torchrl.uniform import UNIFORM

__all__ = ["RayCollector"]

_ONE_VERSION: Final = "all frames of a batch come from one version of the weights, on all workers"
_NO_INNER: Final = "there is no inner collector; runners step the environments"


@final
class RayCollector:
    """Iterable over batches of frames that actors of Ray collect.

    A batch has ``frames_per_batch`` frames, one after the other in the order of the plan; an episode that a batch
    cuts goes on in the next. Rewards are float32, as TorchRL's losses need them.

    Args:
        create_env_fn: A callable that builds one environment, or a list of the same one for each collector; an
            environment is copied.
        policy: The policy; without one, actions are random. It is copied: send new weights with
            :meth:`update_policy_weights_`.
        policy_factory: Called with the environment, or with nothing if it takes nothing; exclusive with ``policy``.
        trust_policy: Not used: what a policy is, is seen by its class.
        frames_per_batch: Frames of a batch, exactly.
        total_frames: The iterator stops with the batch that reaches them; negative for no end.
        device: Device of the policy and of the batches, unless the next ones say otherwise.
        storing_device: Device of the batches; by default the CPU.
        env_device: Only the CPU.
        policy_device: Device of the policy in its runners; by default the CPU.
        max_frames_per_traj: Steps after which an episode is truncated; negative for no limit.
        init_random_frames: Frames at the beginning whose actions are random, rounded up to whole batches; the policy
            begins with a new episode.
        reset_at_each_iter: Begin every batch with a new episode; what is left of the last one is dropped.
        postproc: Called with every batch; its result is what the iterator gives.
        split_trajs: Give every trajectory a row of its own, padded, with a ``("collector", "mask")``.
        exploration_type: ``RANDOM``, ``DETERMINISTIC``, ``MODE``, ``MEAN`` or ``MEDIAN``; it is never set globally.
        collector_class: Not used: there is no inner collector.
        collector_kwargs: Refused, for the same reason.
        num_workers_per_collector: Environments that step together in each runner.
        sync: Not used: batches are the same either way.
        ray_init_config: Arguments of ``ray.init``, called if Ray is not running.
        remote_configs: ``num_cpus``, ``num_gpus``, ``resources``, ``label_selector`` and ``runtime_env`` of each actor.
        num_collectors: Actors that collect; by default the length of ``create_env_fn``, and 0, which is none but this
            process, is possible too.
        update_after_each_batch: Send the weights of ``policy`` after every batch, before the next one is collected.
        max_weight_update_interval: Send them after so many batches at the latest; negative for never.
        replay_buffer: Extended with every batch; the iterator then gives None.
        weight_updater: Refused: weights travel by :meth:`update_policy_weights_`, once for all workers.
        weight_sync_schemes: Not used, for the same reason.
        weight_recv_schemes: Refused, for the same reason.
        use_env_creator: Not used.
        no_cuda_sync: Not used: there is none.
        trajs_per_batch: Whole trajectories of a batch, instead of a number of frames.
        pre_collect_hook: Called before every batch.
        post_collect_hook: Called with every batch after ``postproc``.
        seed: Root seed of the episodes.

    Raises:
        ArgumentError: An argument is wrong, or cannot be honoured.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Any = None,
        trust_policy: bool | None = None,
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
        collector_class: Any = None,
        collector_kwargs: Any = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        replay_buffer: Any = None,
        weight_updater: Any = None,
        weight_sync_schemes: Any = None,
        weight_recv_schemes: Any = None,
        use_env_creator: bool = False,
        no_cuda_sync: bool | None = None,
        trajs_per_batch: int | None = None,
        pre_collect_hook: Callable[[], object] | None = None,
        post_collect_hook: Callable[[Any], object] | None = None,
        seed: int = 0,
    ) -> None:
        refuse(_NO_INNER, collector_kwargs=collector_kwargs or None)
        refuse(
            "weights travel once for all workers",
            weight_updater=weight_updater,
            weight_recv_schemes=weight_recv_schemes,
        )
        if policy is not None and policy_factory is not None:
            raise ArgumentError("give one of policy and policy_factory, and not both")
        refuse("environments are stepped on the CPU", env_device=None if str(env_device) == "cpu" else env_device)
        if frames_per_batch < 1:
            raise ArgumentError(f"frames_per_batch is {frames_per_batch}: give at least 1")
        self.frames_per_batch, self.total_frames = int(frames_per_batch), int(total_frames)
        self.split_trajs, self.reset_at_each_iter, self.postproc = split_trajs, reset_at_each_iter, postproc
        self.init_random_frames = max(0, int(init_random_frames or 0))
        self.trajs_per_batch = trajs_per_batch
        self.replay_buffer = replay_buffer
        self._hooks = pre_collect_hook, post_collect_hook
        self._interval = 0 if update_after_each_batch else max_weight_update_interval
        self._storing_device = storing_device if storing_device is not None else device
        self._frames = self._batches = self._unsent = 0
        self._iterator: Iterator[Any] | None = None
        self._policy, self._token = policy, uuid.uuid4().hex
        self._mode = _mode_of(policy, policy_factory, exploration_type)
        factory, count = _one_factory(create_env_fn, num_collectors)
        self._start_ray(ray_init_config, count)
        limit = max_frames_per_traj if max_frames_per_traj and max_frames_per_traj > 0 else None
        policy_device = policy_device if policy_device is not None else device
        maker = PolicyMaker(
            own_policy(policy),
            _first(policy_factory),
            self._token,
            UNIFORM if self._random else self._mode,
            str(policy_device or "cpu"),
        )
        template = factory if is_env(factory) else None
        config = (
            EvalConfig()
            .environment(EnvMaker(None if template is not None else factory, template, self._token))
            .policy(
                "rl_eval.integrations.torchrl.making:make_policy", policy_kwargs={"maker": maker}, deterministic=False
            )
            .runners(num_envs_per_runner=num_workers_per_collector, **_remotes(count, remote_configs))
            .evaluation(seed=seed, max_episode_steps=limit)
        )
        self._group = EvalRunnerGroup(config)
        self._was_random = self._random
        self._held: tuple[Any, Mapping[str, Any] | None] = None, None
        """Weights that wait for the end of the random frames."""

    @staticmethod
    def _start_ray(config: Mapping[str, Any] | None, count: int) -> None:
        if config and count:
            import ray

            if not ray.is_initialized():
                ray.init(**config)

    # ------------------------------------------------------------------ collecting

    def __iter__(self) -> Iterator[Any]:
        """Collect batches until there are ``total_frames``."""
        while self.total_frames < 0 or self._frames < self.total_frames:
            yield self._collect()

    iterator = __iter__

    def next(self) -> Any:
        """Return the next batch, or None when there are ``total_frames``."""
        self._iterator = self._iterator or iter(self)
        return next(self._iterator, None)

    @property
    def _random(self) -> bool:
        """Whether the next batch has random actions."""
        return self._mode == UNIFORM or self._frames < self.init_random_frames

    def _collect(self) -> Any:
        if self._interval >= 0 and self._unsent >= max(1, self._interval):
            self.update_policy_weights_()
        before, after = self._hooks
        if before is not None:
            before()
        anew = self.reset_at_each_iter
        if self._was_random and not self._random:
            self._was_random, anew = False, True
            self._group.sync_weights(with_rules(*self._held, mode=self._mode))
        if anew:
            self._group.sampler.skip_rest()
        batch = self._group.sample(self.trajs_per_batch, **self._amount(), split_trajs=self.split_trajs)
        self._frames += int(batch["collector", "mask"].sum()) if self.split_trajs else batch.numel()
        self._batches += 1
        batch["next", "reward"] = batch["next", "reward"].float()
        if self._storing_device is not None:
            batch = batch.to(self._storing_device)
        batch = batch if self.postproc is None else self.postproc(batch)
        if after is not None:
            after(batch)
        self._unsent += 1
        if self.replay_buffer is None:
            return batch
        self.replay_buffer.extend(batch)
        return None

    def _amount(self) -> dict[str, Any]:
        if self.trajs_per_batch is not None:
            return {}
        return {"num_env_steps": self.frames_per_batch, "mode": "truncate_episodes"}

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
        """Send weights to all workers; they act in every episode that begins afterwards.

        Args:
            policy_or_weights: A policy, a state dict or a ``TensorDict``; by default ``policy`` as it is now.
            weights: The same.
            policy: The same.
            worker_ids: Refused unless it names all workers: a batch has one version of the weights.
            model_id: Only ``"policy"``.
            weights_dict: Several models: ``"policy"``, and transforms of the environment as ``"env.transform[0]"``.

        Raises:
            ArgumentError: An argument cannot be honoured.
            WeightsError: The weights do not fit the policy.
        """
        if worker_ids is not None and set(_listed(worker_ids)) != set(range(self.num_workers)):
            refuse(_ONE_VERSION, worker_ids=worker_ids)
        refuse("there is one policy", model_id=None if model_id == "policy" else model_id)
        given = [one for one in (policy_or_weights, weights, policy) if one is not None]
        if len(given) > 1:
            raise ArgumentError("give the weights once: as policy_or_weights, weights or policy")
        sent = given[0] if given else None if weights_dict else self._policy
        if sent is None and not weights_dict:
            raise ArgumentError("there is no policy whose weights could be sent: give them")
        self._unsent = 0
        if self._random:
            self._held = copy.deepcopy(sent), weights_dict
        else:
            self._group.sync_weights(with_rules(sent, weights_dict, mode=self._mode))

    # ------------------------------------------------------------------ state

    @property
    def num_workers(self) -> int:
        """Number of runners."""
        return max(1, self._group.settings.runners.num_runners)

    @property
    def group(self) -> EvalRunnerGroup:
        """The group that collects: also for evaluations, and for ``add_runners``."""
        return self._group

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Begin the plan of another root seed.

        Args:
            seed: The root seed.
            static_seed: Not used: every episode has a seed of its own.

        Returns:
            The root seed.
        """
        self._group.sampler.restart(seed)
        return seed

    def state_dict(self) -> dict[str, Any]:
        """Return where it is in the plan, how much it has collected, and the weights of ``policy``."""
        state = {"sampler": self._group.sampler.state_dict(), "frames": self._frames, "iter": self._batches}
        if isinstance(self._policy, torch.nn.Module):
            state["policy_state_dict"] = self._policy.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another one was; weights go to ``policy`` and to all workers."""
        self._group.sampler.load_state_dict(state_dict["sampler"])
        self._frames, self._batches = state_dict["frames"], state_dict["iter"]
        self._was_random = self._random
        if isinstance(self._policy, torch.nn.Module) and "policy_state_dict" in state_dict:
            self._policy.load_state_dict(state_dict["policy_state_dict"])
            self.update_policy_weights_()

    @contextmanager
    def pause(self, timeout: float = 30.0, *, resume: bool = True) -> Iterator[None]:
        """Collect nothing inside of a ``with`` block, which is so anyway: a batch is collected when it is asked for.

        Args:
            timeout: Not used.
            resume: Not used.
        """
        self._group.sampler.stop_ahead()
        yield

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:
        """End all workers; may be called again.

        Args:
            timeout: Not used: it takes about ten seconds at most.
            shutdown_ray: Refused: the cluster may be others' too.
        """
        refuse("call ray.shutdown() yourself", shutdown_ray=shutdown_ray or None)
        self._group.stop()
        forget_scope(self._token)

    def __enter__(self) -> RayCollector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _mode_of(policy: Any, policy_factory: Any, exploration_type: Any) -> str:
    mode = mode_of(exploration_type)
    if policy is None and policy_factory is None:
        return UNIFORM
    plain = policy is not None and not isinstance(policy, TensorDictModuleBase)
    # A plain callable acts as it does: there is no distribution to draw from.
    return "deterministic" if plain and mode == "random" else mode


def _one_factory(create_env_fn: Any, num_collectors: int | None) -> tuple[Any, int]:
    """Return what builds an environment, and the number of runners."""
    factories = _listed(create_env_fn)
    if not factories:
        raise ArgumentError("create_env_fn is empty: give a callable that builds an environment")
    if any(one is not factories[0] for one in factories):
        raise ArgumentError(
            "create_env_fn has different callables, but an episode must not depend on the worker that runs it: give "
            "one callable, and num_collectors"
        )
    return factories[0], len(factories) if num_collectors is None else num_collectors


def _remotes(count: int, remote_configs: Any) -> dict[str, Any]:
    configs = _listed(remote_configs or {})
    if any(one != configs[0] for one in configs):
        raise ArgumentError("remote_configs differ, but all runners have the same resources: give one")
    config = dict(configs[0])
    num_gpus = config.pop("num_gpus", 0)
    return settings_of_remotes(count, num_gpus, None, config)


def _first(factories: Any) -> Any:
    given = _listed(factories)
    if any(one is not given[0] for one in given):
        raise ArgumentError("policy_factory has different callables, but all workers act alike: give one")
    return given[0]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
