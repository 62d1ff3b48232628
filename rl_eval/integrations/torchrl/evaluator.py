"""Drop-in for ``torchrl.collectors.Evaluator`` on top of :class:`rl_eval.Evaluator`.

The signature and the result keys are TorchRL's, so that an import line is all that changes. The numbers are rl_eval's:
true returns over complete episodes that were chosen before they ran. What has no meaning here is an error that names
it.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.envs.utils import RandomPolicy

from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ClusterError, EvalError, EvaluatorBusy, UsageError
from rl_eval.integrations.torchrl.arguments import (
    BACKENDS,
    ArgumentError,
    check,
    copy_of,
    is_env,
    mode_of,
    own_policy,
    plain_key,
    refuse,
    runner_settings,
    with_rules,
)
from rl_eval.integrations.torchrl.keys import Key
from rl_eval.integrations.torchrl.making import EnvMaker, PolicyMaker, dump_transforms
from rl_eval.integrations.torchrl.scope import forget_scope
from rl_eval.training.evaluator import Evaluator as _Evaluator

if TYPE_CHECKING:
    from rl_eval.execution.handle import EvalHandle
    from rl_eval.loggers import Logger
    from rl_eval.results.point import EvalPoint
    from rl_eval.results.result import EpisodeSequence, EvalResult
    from rl_eval.video import VideoSettings

__all__ = ["EvaluationFailed", "EvaluationPending", "Evaluator"]

_MAX_UNREAD: Final = 1000

_logger = logging.getLogger(__name__)


class EvaluationPending(EvaluatorBusy, RuntimeError):
    """Another evaluation is pending. Also a ``RuntimeError``, as in TorchRL."""


class EvaluationFailed(EvalError, RuntimeError):
    """No number can be given: so many episodes failed. It holds what the first of them raised."""


@final
class Evaluator:
    """Evaluates policies in a TorchRL environment, at once or beside the training.

    Args:
        env: An environment, or a callable that builds one. Environments of other processes are built by a callable.
        policy: The policy; exclusive with ``policy_factory``.
        policy_factory: Called with the environment, or with nothing if it takes nothing; on all backends.
        num_trajectories: Episodes per evaluation; exactly so many, chosen before they run.
        max_steps: Step limit of every episode.
        frames_per_batch: Not used: there is no collector. So are the next two.
        collector_cls: Not used.
        collector_kwargs: Not used.
        weight_sync_schemes: Not used: weights travel once per request, with their version.
        log_prefix: Put before every metric.
        reward_keys: Which reward counts, where the environment has several.
        done_keys: Which done flag ends an episode, where the environment has several.
        device: Device of the evaluation policy; by default the CPU.
        exploration_type: ``DETERMINISTIC``, ``MODE``, ``MEAN``, ``MEDIAN`` or ``RANDOM``; it is never set globally.
        metrics_fn: Called with a tensordict of one row per episode, keys ``("next", "episode_reward")``,
            ``("next", "step_count")``, ``("next", "done")``, ``("next", "terminated")``, ``("next", "truncated")``.
        dump_video: Call ``dump(step=...)`` of the environment's transforms after each evaluation. Recorders are
            refused: ``videos`` records.
        on_result: Called with a flat tensordict of every result, in a thread of the evaluator.
        busy_policy: ``skip``, ``error`` or ``queue``.
        backend: ``thread``; ``process`` and ``ray`` are both actors of Ray.
        init_fn: Called first in the actor's process, before torch is imported.
        num_gpus: GPUs of each actor.
        ray_kwargs: ``num_cpus``, ``resources``, ``label_selector`` and ``runtime_env`` of each actor.
        seed: Root seed of the episodes: every evaluation runs the same ones.
        num_envs: Environments that step together; by default 8 or ``num_trajectories`` if less, and 1 with ``init_fn``,
            since simulators that need one are often alone in their process.
        num_runners: Actors that share the work, on ``process`` and ``ray``.
        on_error: Called with what an evaluation or a callback raised; without it the error is logged, and ``poll`` and
            ``wait`` raise that of an evaluation.
        loggers: Where results are logged besides.
        videos: Which episodes to record after each evaluation, and where.

    Raises:
        ArgumentError: An argument is wrong, or cannot be honoured.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        collector_cls: type | str | None = None,
        collector_kwargs: dict[str, Any] | None = None,
        weight_sync_schemes: dict[str, Any] | None = None,
        log_prefix: str = "eval",
        reward_keys: Key = ("next", "reward"),
        done_keys: Key = ("next", "done"),
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
    ) -> None:
        refuse(
            "there is no collector here: episodes run one by one in num_envs environments",
            frames_per_batch=frames_per_batch,
            collector_cls=collector_cls,
            collector_kwargs=collector_kwargs,
        )
        refuse("weights are sent once per request, to all runners", weight_sync_schemes=weight_sync_schemes)
        check(env, policy, policy_factory, backend, busy_policy, init_fn, num_gpus, ray_kwargs)
        self._prefix, self._metrics_fn, self._busy_policy = log_prefix, metrics_fn, busy_policy
        self._on_result, self._on_error = on_result, on_error
        self._outcomes: weakref.WeakKeyDictionary[EvalResult, dict[str, Any] | Exception] = weakref.WeakKeyDictionary()
        self._changed = threading.Condition()
        """Guards the next, and is notified when something was delivered."""
        self._triggered: deque[EvalHandle] = deque()
        """What ``trigger_eval`` has started and nobody has read, in order."""
        self._delivering: threading.Thread | None = None
        """The thread that calls back, while it does."""
        self._stopped = False
        self._token = uuid.uuid4().hex
        live_env = None if callable(env) and not is_env(env) else env
        mode = mode_of(exploration_type)
        config = (
            EvalConfig()
            .environment(
                EnvMaker(
                    None if live_env is not None else env,
                    copy_of(live_env),
                    self._token,
                    plain_key("reward_keys", reward_keys, "reward"),
                    plain_key("done_keys", done_keys, "done"),
                )
            )
            .policy(
                "rl_eval.integrations.torchrl.making:make_policy",
                policy_kwargs={
                    "maker": PolicyMaker(own_policy(policy), policy_factory, self._token, mode, str(device or "cpu"))
                },
                # A RandomPolicy needs noise, and a factory may make one; other policies leave it alone.
                deterministic=mode != "random" and policy_factory is None and not isinstance(policy, RandomPolicy),
                device=str(device or "cpu"),
            )
            .evaluation(num_episodes=num_trajectories, max_episode_steps=max_steps, seed=seed)
            .runners(num_envs_per_runner=num_envs or (1 if init_fn is not None else min(8, num_trajectories)))
        )
        if BACKENDS[backend] == "ray":
            config.runners(**runner_settings(num_runners, num_gpus, init_fn, ray_kwargs))
        self._evaluator = _Evaluator(
            config,
            backend=BACKENDS[backend],  # type: ignore[arg-type]
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
            weights: An ``nn.Module``, a state dict or a ``TensorDict``; by default those that were sent last.
            step: Training step; by default one more than the last.
            weights_dict: More models by name: ``policy``, and transforms such as ``env.transform[0]``.

        Raises:
            EvaluationFailed: Too many episodes failed to give a number.
            WeightsError: The weights do not fit.
        """
        result = self._evaluator.evaluate(with_rules(weights, weights_dict), step)
        # The evaluator has called _take_in() before it returned.
        outcome = self._outcomes.pop(result)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Start an evaluation; return whether it was accepted. See :meth:`evaluate`.

        Raises:
            EvaluationPending: It was refused, and ``busy_policy`` is ``error``; or a thousand results are unread.
        """
        try:
            if len(self._triggered) >= _MAX_UNREAD and self._on_result is None:
                raise EvaluationPending(f"{_MAX_UNREAD} results were not read: poll() or wait() for them")
            with self._changed:
                self._triggered.append(self._evaluator.submit(with_rules(weights, weights_dict), step))
                while self._on_result is not None and len(self._triggered) > _MAX_UNREAD:
                    self._triggered.popleft()
        except EvaluatorBusy as error:
            if self._busy_policy == "error":
                raise EvaluationPending(str(error)) from error
            return False
        return True

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """Return the oldest unread result of :meth:`trigger_eval`, or None.

        Raises:
            EvaluationFailed: Too many of its episodes failed; without ``on_error`` only.
            Exception: What the evaluation raised; without ``on_error`` only.
        """
        return self._read(timeout)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the next result; return None if none is pending, or not in time; see :meth:`poll`.

        Raises:
            UsageError: It is called in a callback, which results are waiting for.
        """
        if threading.current_thread() is self._delivering:
            raise UsageError("wait() in a callback would wait for that callback: use poll(), or on_result")
        return self._read(timeout)

    @property
    def pending(self) -> bool:
        """Whether a result is still to come; once False, :meth:`poll` has what there is."""
        return self._evaluator.pending

    def shutdown(self, timeout: float = 5.0) -> None:
        """End what runs and everything that was started; may be called again."""
        self._stopped = True
        self._evaluator.shutdown(timeout)
        with self._changed:
            self._changed.notify_all()
        forget_scope(self._token)

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run needs to go on counting steps.

        Raises:
            EvaluationPending: A result is pending, or was neither read nor given to ``on_result``.
        """
        self._check_idle("saved")
        return dict(self._evaluator.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, TorchRL's own included.

        Raises:
            EvaluationPending: As :meth:`state_dict`.
        """
        self._check_idle("replaced")
        if "step_counter" in state_dict:
            state_dict = {"step": state_dict["step_counter"], "weights_version": 0}
        self._evaluator.load_state_dict(state_dict)

    def _check_idle(self, what: str) -> None:
        unread = 0 if self._on_result is not None else len(self._triggered)
        if self.pending or unread:
            raise EvaluationPending(
                f"the state cannot be {what} while an evaluation is pending, or its result unread ({unread} are): "
                "wait() first"
            )

    @staticmethod
    def extract_weights(policy: torch.nn.Module) -> TensorDictBase:
        """Copy a module's weights to the CPU."""
        weights: TensorDictBase = TensorDict.from_module(policy).data.detach().clone().cpu()
        return weights

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ results

    def _take_in(self, point: EvalPoint) -> None:
        """Turn a result into TorchRL's metrics, and give them to the callback."""
        former, self._delivering = self._delivering, threading.current_thread()
        try:
            outcome = self._outcomes[point.result] = self._outcome_of(point)
            if isinstance(outcome, dict):
                if self._on_result is not None:
                    self._on_result(_as_tensordict(outcome))
            elif self._on_error is not None:
                self._on_error(outcome)
        finally:
            self._delivering = former
            with self._changed:
                self._changed.notify_all()

    def _outcome_of(self, point: EvalPoint) -> dict[str, Any] | Exception:
        try:
            return self._metrics(point)
        except Exception as error:
            return error

    def _take_in_error(self, error: BaseException) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._on_error is not None:
            self._on_error(error)
        elif not any(handle.exception() is error for handle in self._triggered):  # Which poll() raises.
            _logger.error("%s: %s", type(error).__name__, error, exc_info=error)

    def _read(self, timeout: float | None) -> dict[str, Any] | None:
        """Take the oldest result of ``trigger_eval``, once it was delivered."""
        with self._changed:
            self._changed.wait_for(lambda: not self._triggered or self._delivered(self._triggered[0]), timeout)
            if not self._triggered or not self._delivered(self._triggered[0]):
                return None
            handle = self._triggered.popleft()
        error = handle.exception()
        outcome = self._outcomes.pop(handle.result(), None) if error is None else error
        if isinstance(outcome, BaseException):
            if self._on_error is None and not (self._stopped and isinstance(outcome, ClusterError)):
                raise outcome
            return None
        return outcome

    def _delivered(self, handle: EvalHandle) -> bool:
        if not handle.done():
            return False
        return handle.exception() is not None or handle.result() in self._outcomes

    def _metrics(self, point: EvalPoint) -> dict[str, Any]:
        """Name the numbers as TorchRL does, and add ours."""
        result = point.result
        if result.status == "failed":
            raise EvaluationFailed(f"the evaluation of step {point.step} failed: {result.reason}")
        numbers = result.metrics
        count = int(numbers["num_episodes"])
        named = {
            "reward": numbers["episode_return_mean"],
            "reward_std": numbers["episode_return_std"] if count > 1 else 0.0,
            "num_episodes": count,
            "episode_length": numbers["episode_len_mean"],
            "fps": numbers["env_steps_per_second"],
            "step": point.step,
        }
        custom = {} if self._metrics_fn is None else _measure(self._metrics_fn, result.episodes)
        return {f"{self._prefix}/{name}": value for name, value in {**numbers, **named, **custom}.items()}


def _measure(metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]], episodes: EpisodeSequence) -> dict[str, Any]:
    """Call the user's metrics function with one row per episode, as of the episode's last step."""
    records = [record for record in episodes if math.isfinite(record.episode_return)]
    last = {
        "episode_reward": torch.tensor([record.episode_return for record in records], dtype=torch.float64),
        "step_count": torch.tensor([record.length for record in records]),
        "terminated": torch.tensor([record.terminated for record in records], dtype=torch.bool),
        "truncated": torch.tensor([record.truncated for record in records], dtype=torch.bool),
        "done": torch.ones(len(records), dtype=torch.bool),
    }
    rows = TensorDict(
        {("next", name): column.unsqueeze(-1) for name, column in last.items()}, batch_size=[len(records)]
    )
    try:
        return dict(metrics_fn(rows))
    except KeyError as error:
        raise ArgumentError(
            f"metrics_fn reads {error}: it gets one row per episode, with the keys {[('next', name) for name in last]}."
            " Steps are not kept; what an environment reports comes through evaluation.info_keys of an EvalConfig"
        ) from error


def _as_tensordict(metrics: Mapping[str, Any]) -> TensorDictBase:
    """Return metrics as callbacks of TorchRL get them; what is no number is kept as it is."""
    values = {
        name: torch.as_tensor(value) if isinstance(value, (bool, int, float, torch.Tensor)) else NonTensorData(value)
        for name, value in metrics.items()
    }
    return TensorDict(values, batch_size=[])
