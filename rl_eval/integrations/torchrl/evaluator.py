"""TorchRL's ``Evaluator`` and ``RayEvalWorker`` on top of :class:`rl_eval.Evaluator`.

The signatures and the result keys are those of TorchRL, so only the import line changes. The numbers are those of
rl_eval: returns of complete episodes that are chosen before they run. An argument without a counterpart in
rl_eval raises an error that names the argument.

``reward`` of :class:`RayEvalWorker` is the mean return per episode. In TorchRL, it is the mean reward per step.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from rl_eval.errors import EvalError, EvaluatorBusy, UsageError
from rl_eval.integrations.torchrl.arguments import (
    ArgumentError,
    config_of,
    mode_of,
    one_of,
    refuse,
    runner_settings,
    take_rest,
    with_rules,
)
from rl_eval.integrations.torchrl.making import FirstEpisodeFrames, dump_transforms
from rl_eval.integrations.torchrl.policy import Key
from rl_eval.training.evaluator import Evaluator as _Evaluator

if TYPE_CHECKING:
    from rl_eval.execution.handle import EvalHandle
    from rl_eval.recording.video_selection import VideoSettings
    from rl_eval.results.result import EpisodeSequence, EvalPoint, EvalResult
    from rl_eval.training.loggers import Logger


_REWARD: Final = ("next", "reward")
_DONE: Final = ("next", "done")
_MAX_UNREAD: Final = 1000
_NAMESPACE: Final = "rl_eval"
"""Ray namespace in which names of workers are unique."""

_LAST: Final = {
    "episode_reward": ("episode_return", torch.float64),
    "step_count": ("length", torch.int64),
    "terminated": ("terminated", torch.bool),
    "truncated": ("truncated", torch.bool),
}
"""Keys under ``next`` for ``metrics_fn``, each with the field of the record and the dtype."""

_logger = logging.getLogger(__name__)


class EvaluationPending(EvaluatorBusy, RuntimeError):
    """Rejected because a result is pending or unread. The error is a ``RuntimeError``, as in TorchRL."""


class EvaluationFailed(EvalError, RuntimeError):
    """Too many episodes failed, so there are no metrics. The text contains the first error."""


@final
class Evaluator:
    """Evaluator of policies in a TorchRL environment.

    :meth:`evaluate` waits for its result. :meth:`trigger_eval` starts an evaluation that runs during training.

    Args:
        env: An environment, or a callable that builds an environment. Backends with other processes need a callable.
        policy: The policy. Pass either ``policy`` or ``policy_factory``.
        policy_factory: Function that builds the policy, on all backends. It is called with the environment, or without
            arguments if it takes none.
        num_trajectories: Exact number of episodes per evaluation, chosen before they run.
        max_steps: Step limit of every episode.
        log_prefix: Prefix of every metric.
        reward_keys: Key of the reward, if the environment has several rewards.
        done_keys: Key of the done flag that ends an episode, if the environment has several done flags.
        device: Device of the evaluation policy; by default, the CPU.
        exploration_type: ``DETERMINISTIC``, ``MODE``, ``MEAN``, ``MEDIAN`` or ``RANDOM``. TorchRL's global setting does
            not change.
        metrics_fn: Function that returns more metrics. Its argument is a tensordict with one row per episode and the
            keys ``("next", "episode_reward")``, ``("next", "step_count")``, ``("next", "done")``, ``("next",
            "terminated")`` and ``("next", "truncated")``.
        dump_video: Whether to call ``dump(step=...)`` of the environment's transforms after each evaluation. Transforms
            that record video are rejected; pass ``videos`` instead.
        on_result: Function that is called for every result, with a flat tensordict of the metrics. It runs in a thread
            of the evaluator.
        busy_policy: Effect of :meth:`trigger_eval` if the evaluator is busy: ``skip`` (return False), ``error`` (raise
            an error) or ``queue`` (evaluate afterwards).
        backend: ``thread``, ``process`` or ``ray``. Both ``process`` and ``ray`` use Ray actors.
        init_fn: Function that is called first in the actor's process, before torch is imported.
        num_gpus: Number of GPUs of each actor.
        ray_kwargs: ``num_cpus``, ``resources``, ``label_selector`` and ``runtime_env`` of each actor.
        seed: Root seed. Every evaluation runs the same episodes.
        num_envs: Number of environments that step together. The default is 8, or ``num_trajectories`` if it is smaller.
            With ``init_fn``, the default is 1, because simulators that need ``init_fn`` often allow one instance per
            process.
        num_runners: Number of actors, for the backends ``process`` and ``ray``.
        on_error: Function that is called with the error of an evaluation or a callback. Without it, ``poll`` and
            ``wait`` raise the error of an evaluation, and other errors are logged.
        loggers: Loggers of the results.
        videos: Selection of episodes to record after each evaluation, and their folder.
        **rest: Other arguments of TorchRL, which are rejected unless they are None. ``frames_per_batch``,
            ``collector_cls`` and ``collector_kwargs`` need a collector. ``weight_sync_schemes`` would have no effect,
            because weights are sent once per request, with their version.

    Raises:
        ArgumentError: An argument is wrong or not supported.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        log_prefix: str = "eval",
        reward_keys: Key = _REWARD,
        done_keys: Key = _DONE,
        device: torch.device | str | None = None,
        exploration_type: Any = "deterministic",
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDictBase], object] | None = None,
        busy_policy: str = "skip",
        backend: str = "thread",
        init_fn: Callable[[], object] | None = None,
        num_gpus: float = 0,
        ray_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        num_envs: int | None = None,
        num_runners: int = 1,
        on_error: Callable[[BaseException], object] | None = None,
        loggers: Iterable[Logger] = (),
        videos: VideoSettings | None = None,
        **rest: Any,
    ) -> None:
        take_rest("Evaluator", rest)
        remote = one_of("backend", backend, ("thread", "process", "ray")) != "thread"
        one_of("busy_policy", busy_policy, ("skip", "error", "queue"))
        if policy is None and policy_factory is None:
            raise ArgumentError("there is no policy", key="policy", fix="Pass policy or policy_factory.")
        if remote and isinstance(env, EnvBase):
            name, fix = type(env).__name__, "Pass a callable that builds the environment."
            raise ArgumentError(f"env is a {name}, which another process cannot build", key="env", value=name, fix=fix)
        for name, value in {"init_fn": init_fn, "num_gpus": num_gpus, "ray_kwargs": ray_kwargs}.items():
            refuse(
                name, None if remote else value or None, 'backend="thread" runs in this process. Use "process" or "ray"'
            )
        config = config_of(env, policy, policy_factory, mode_of(exploration_type), device, reward_keys, done_keys)
        config.evaluation(num_episodes=num_trajectories, max_episode_steps=max_steps, seed=seed)
        config.runners(num_envs_per_runner=_lanes(num_envs, num_trajectories, init_fn))
        if remote:
            config.runners(**runner_settings("ray_kwargs", ray_kwargs, num_runners, num_gpus, init_fn))
        self._prefix, self._metrics_fn, self._busy_policy = log_prefix, metrics_fn, busy_policy
        self._on_result, self._on_error = on_result, on_error
        self._outcomes: weakref.WeakKeyDictionary[EvalResult, dict[str, Any] | Exception] = weakref.WeakKeyDictionary()
        self._changed = threading.Condition()
        """Condition that guards ``_triggered``. It is notified when a result was delivered."""
        self._triggered: deque[EvalHandle] = deque(maxlen=_MAX_UNREAD)
        """Evaluations that ``trigger_eval`` started and whose results are unread, in the order of their start."""
        self._evaluator = _Evaluator(
            config,
            backend="ray" if remote else "thread",
            busy_policy="queue" if busy_policy == "queue" else "skip",
            on_result=self._take_in,
            on_error=self._take_in_error,
            log_prefix=log_prefix,
            loggers=loggers,
            videos=videos,
            after=dump_transforms if dump_video else None,
        )

    # ------------------------------------------------------------------ TorchRL's methods

    def evaluate(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Evaluate and return the metrics.

        Args:
            weights: An ``nn.Module``, a state dict or a ``TensorDict``; by default, the weights that were sent last.
            step: Training step; by default, one more than the last step.
            weights_dict: More models by name: ``policy``, and transforms such as ``env.transform[0]``.

        Raises:
            EvaluationFailed: Too many episodes failed, so there are no metrics.
            WeightsError: The weights do not fit.
        """
        result = self._evaluator.evaluate(with_rules(weights, weights_dict), step)
        # The evaluator calls _take_in() before it returns.
        outcome = self._outcomes.pop(result)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Start an evaluation; return whether it was accepted. See :meth:`evaluate`.

        Raises:
            EvaluationPending: The evaluator is busy or has a thousand unread results, and ``busy_policy`` is ``error``.
        """
        try:
            if len(self._triggered) >= _MAX_UNREAD and self._on_result is None:
                problem = f"{_MAX_UNREAD} results are unread. Call poll() or wait()"
                raise EvaluationPending(problem, key="poll", value=_MAX_UNREAD)
            with self._changed:
                self._triggered.append(self._evaluator.submit(with_rules(weights, weights_dict), step))
        except EvaluatorBusy as error:
            if self._busy_policy == "error":
                raise EvaluationPending(str(error), key=error.key, value=error.value) from error
            return False
        return True

    def poll(self, timeout: float | None = 0) -> dict[str, Any] | None:
        """Return the oldest unread result of :meth:`trigger_eval`; None if there is none after ``timeout`` seconds.

        Raises:
            EvaluationFailed: Too many episodes failed. Raised only without ``on_error``.
            Exception: Error of the evaluation. Raised only without ``on_error``.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._triggered or self._delivered(self._triggered[0]), timeout)
            if not self._triggered or not self._delivered(self._triggered[0]):
                return None
            handle = self._triggered.popleft()
        outcome = handle.exception() or self._outcomes.pop(handle.result(), None)
        if not isinstance(outcome, BaseException):
            return outcome
        if self._on_error is None:
            raise outcome
        return None

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the next result of :meth:`trigger_eval`. Return None if no result is pending, or after ``timeout``.

        Raises:
            UsageError: A callback called this method. Results are delivered only after the callback returns.
        """
        self._evaluator.drain(0)
        return self.poll(timeout)

    @property
    def pending(self) -> bool:
        """Whether an evaluation has no result yet. If false, :meth:`poll` returns the results without waiting."""
        return self._evaluator.pending

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop all evaluations and runners. Further calls have no effect."""
        with self._changed:
            self._triggered = deque((handle for handle in self._triggered if handle.done()), _MAX_UNREAD)
        self._evaluator.shutdown(timeout)
        with self._changed:
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that a continued run needs.

        Raises:
            EvaluationPending: A result is pending. Or there is no ``on_result``, and a result is unread.
        """
        self._check_idle("saved")
        return dict(self._evaluator.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`, or of TorchRL's evaluator.

        Raises:
            EvaluationPending: A result is pending. Or there is no ``on_result``, and a result is unread.
        """
        self._check_idle("replaced")
        if "step_counter" in state_dict:
            state_dict = {"step": state_dict["step_counter"], "weights_version": 0}
        self._evaluator.load_state_dict(state_dict)

    def _check_idle(self, what: str) -> None:
        unread = 0 if self._on_result is not None else len(self._triggered)
        if self.pending or unread:
            problem = f"the state cannot be {what} while a result is pending or unread ({unread} results are unread)"
            raise EvaluationPending(problem, key="state", value=unread, fix="Call wait().")

    @staticmethod
    def extract_weights(policy: torch.nn.Module) -> TensorDictBase:
        """Return a copy of a module's weights, on the CPU."""
        weights: TensorDictBase = TensorDict.from_module(policy).data.detach().clone().cpu()
        return weights

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ results

    def _take_in(self, point: EvalPoint) -> None:
        """Convert a result to TorchRL's metrics and pass them to the callback."""
        try:
            outcome: dict[str, Any] | Exception = self._metrics(point)
        except Exception as error:
            outcome = error
        self._outcomes[point.result] = outcome
        try:
            if isinstance(outcome, Exception):
                if self._on_error is not None:
                    self._on_error(outcome)
            elif self._on_result is not None:
                self._on_result(_as_tensordict(outcome))
        finally:
            with self._changed:
                self._changed.notify_all()

    def _take_in_error(self, error: BaseException) -> None:
        with self._changed:
            self._changed.notify_all()
            raised = any(handle.exception() is error for handle in self._triggered)
        if self._on_error is not None:
            self._on_error(error)
        elif not raised:  # poll() raises the errors of evaluations in _triggered.
            _logger.error("%s: %s", type(error).__name__, error, exc_info=error)

    def _delivered(self, handle: EvalHandle) -> bool:
        return handle.done() and (handle.exception() is not None or handle.result() in self._outcomes)

    def _metrics(self, point: EvalPoint) -> dict[str, Any]:
        """Return the metrics with TorchRL's names, and the metrics of rl_eval."""
        numbers, reward = _numbers_of(point.result)
        named = {
            **reward,
            "num_episodes": int(numbers["num_episodes"]),
            "episode_length": numbers["episode_len_mean"],
            "fps": numbers["env_steps_per_second"],
            "step": point.step,
        }
        custom = {} if self._metrics_fn is None else _measure(self._metrics_fn, point.result.episodes)
        return {f"{self._prefix}/{name}": value for name, value in {**numbers, **named, **custom}.items()}


def _lanes(num_envs: int | None, num_episodes: int, init_fn: Any) -> int:
    return num_envs or (1 if init_fn is not None else min(8, num_episodes))


def _numbers_of(result: EvalResult) -> tuple[Mapping[str, float], dict[str, float]]:
    """Return the metrics of a result, and TorchRL's ``reward`` and ``reward_std``."""
    if result.status == "failed":
        raise EvaluationFailed(f"the evaluation failed: {result.reason}", key="status", value=result.status)
    numbers = result.metrics
    spread = numbers["episode_return_std"] if numbers["num_episodes"] > 1 else 0.0
    return numbers, {"reward": numbers["episode_return_mean"], "reward_std": spread}


def _measure(metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]], episodes: EpisodeSequence) -> dict[str, Any]:
    """Call the user's metrics function with one row per episode: the values at the last step of the episode."""
    records = [record for record in episodes if math.isfinite(record.episode_return)]
    last = {
        ("next", name): torch.from_numpy(np.array([[float(getattr(record, field))] for record in records])).to(dtype)
        for name, (field, dtype) in _LAST.items()
    }
    last["next", "done"] = torch.ones(len(records), 1, dtype=torch.bool)
    try:
        return dict(metrics_fn(TensorDict(last, batch_size=[len(records)])))
    except KeyError as error:
        problem = f"metrics_fn reads {error}, but its argument has only the keys {list(last)}, with one row per episode"
        raise ArgumentError(problem, key="metrics_fn", value=str(error)) from error


def _as_tensordict(metrics: Mapping[str, Any]) -> TensorDictBase:
    """Return metrics in the form of TorchRL's callbacks. Numbers become tensors; other values do not change."""
    values = {
        name: torch.as_tensor(value) if isinstance(value, (bool, int, float, torch.Tensor)) else NonTensorData(value)
        for name, value in metrics.items()
    }
    return TensorDict(values, batch_size=[])


@final
class RayEvalWorker:
    """Ray actor that evaluates weights, one request at a time.

    Args:
        init_fn: Function that is called first in the actor's process, before torch is imported; None for no function.
        env_maker: Function that builds an environment. The actor calls it once per environment.
        policy_maker: Function that builds the policy. Its argument is an environment.
        num_gpus: Number of GPUs of the actor.
        reward_keys: Key of the reward, if the environment has several rewards.
        name: Name of the worker, for :meth:`from_name` in other processes. A named worker survives this process.
        num_episodes: Number of episodes per request.
        num_envs: Number of environments that step together. The default is 8, or ``num_episodes`` if it is smaller.
            With ``init_fn``, the default is 1.
        num_runners: Number of actors.
        seed: Root seed. Every request runs the same episodes.
        videos: Selection of episodes to record after each request, and their folder.
        **remote_kwargs: ``num_cpus``, ``memory``, ``resources``, ``label_selector`` and ``runtime_env`` of the actor.

    Raises:
        ArgumentError: An argument is wrong or not supported.
    """

    def __init__(
        self,
        init_fn: Callable[[], object] | None,
        env_maker: Callable[[], Any],
        policy_maker: Callable[[Any], Any],
        *,
        num_gpus: float = 0,
        reward_keys: Key = _REWARD,
        name: str | None = None,
        num_episodes: int = 10,
        num_envs: int | None = None,
        num_runners: int = 1,
        seed: int = 0,
        videos: VideoSettings | None = None,
        **remote_kwargs: Any,
    ) -> None:
        config = (
            config_of(env_maker, None, policy_maker, "deterministic", reward_keys=reward_keys)
            .evaluation(num_episodes=num_episodes, seed=seed, observers=(FirstEpisodeFrames,))
            .runners(num_envs_per_runner=_lanes(num_envs, num_episodes, init_fn))
            .runners(**runner_settings("remote_kwargs", remote_kwargs, num_runners, num_gpus, init_fn))
        )
        options: Any = {"name": name, "detached": name is not None, "videos": videos}
        self._start(_Evaluator(config, backend="ray", busy_policy="latest", **options), name)

    @classmethod
    def from_name(cls, name: str, *, reward_keys: Key = _REWARD) -> RayEvalWorker:
        """Connect to a named worker of any process.

        Raises:
            ArgumentError: ``reward_keys`` is set, but a worker uses the reward key with which it was created.
        """
        why = f"the worker {name!r} uses the reward key with which it was created"
        refuse("reward_keys", reward_keys, why, unless=_REWARD)
        worker = object.__new__(cls)
        worker._start(_Evaluator.from_name(name, busy_policy="latest"), None)
        return worker

    def _start(self, evaluator: _Evaluator, owned: str | None) -> None:
        self._evaluator: _Evaluator | None = evaluator
        self._owned = owned
        self._handle: EvalHandle | None = None

    def submit(
        self, weights: Any, max_steps: int | None, *, deterministic: bool = True, break_when_any_done: bool = True
    ) -> None:
        """Start an evaluation. An earlier evaluation whose result was not polled is cancelled.

        Args:
            weights: Weights of the policy; None for the current weights.
            max_steps: Step limit of every episode; None for no limit.
            deterministic: Whether actions are deterministic. If not, they are sampled from the policy's distribution.
            break_when_any_done: Not used, because each episode runs to its end in a separate environment.

        Raises:
            WeightsError: The value does not contain weights.
        """
        if self._evaluator is None:
            raise UsageError("the worker is shut down", key="shutdown", fix="Create a new worker.")
        if self._handle is not None:
            self._handle.cancel()
        mode = "deterministic" if deterministic else "random"
        self._handle = self._evaluator.submit(with_rules(weights, None, max_steps, mode))

    def poll(self, timeout: float | None = 0) -> dict[str, Any] | None:
        """Return the result of the last request.

        Return None if the evaluation is still running, if there is no request, or if its result was already returned.

        Args:
            timeout: Maximum waiting time, in seconds; None for no limit.

        Returns:
            ``reward`` (mean return per episode), ``reward_std``, ``reward_per_step`` (TorchRL's ``reward``), ``length``
            (mean steps per episode), ``count`` (episodes), ``weights_version``, every metric of rl_eval, and
            ``frames``. The value of ``frames`` is a uint8 tensor of shape (T, height, width, 3), with one frame after
            each step of episode 0, up to a gibibyte. It is None if the environment's ``render_mode`` is not
            ``rgb_array``.

        Raises:
            EvaluationFailed: Too many episodes failed, so there are no metrics.
            EvalError: The evaluation could not run. The error is raised once, and the worker can be used again.
        """
        handle = self._handle
        if handle is None:
            return None
        with suppress(Exception):  # The last line asks for the result again.
            handle.result(timeout)
        if not handle.done():
            return None
        self._handle = None
        return _as_reply(handle.result())

    def shutdown(self) -> None:
        """Terminate the worker within seconds, even during an evaluation. Further calls have no effect.

        If :meth:`from_name` returned this object, this call only disconnects the object. The worker continues for
        other processes.
        """
        evaluator, self._evaluator, self._handle = self._evaluator, None, None
        if evaluator is not None:
            evaluator.shutdown()
            if self._owned is not None:
                from rl_eval.training.service.client import end_service

                end_service(self._owned, _NAMESPACE)


def _as_reply(result: EvalResult) -> dict[str, Any]:
    numbers, reward = _numbers_of(result)
    frames = result.artifacts.get(0, {}).get(FirstEpisodeFrames.__qualname__)
    _warn_of_the_return()
    return {
        **numbers,
        **reward,
        "reward_per_step": numbers["episode_return_mean"] / numbers["episode_len_mean"],
        "length": numbers["episode_len_mean"],
        "count": int(numbers["num_episodes"]),
        "frames": None if frames is None else torch.from_numpy(np.asarray(frames)),
    }


@cache
def _warn_of_the_return() -> None:
    """Warn once per process that ``reward`` has another meaning than in TorchRL."""
    _logger.warning(
        "RayEvalWorker of rl_eval: 'reward' is the mean return per episode. TorchRL's 'reward' is the mean reward per "
        "step, which is 'reward_per_step' here"
    )
