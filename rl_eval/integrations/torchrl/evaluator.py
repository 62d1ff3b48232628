"""Decides how the calls of ``torchrl.collectors.Evaluator`` are answered by :class:`rl_eval.Evaluator`.

The signature and the result keys are TorchRL's, so that an import line is all that changes. The numbers are rl_eval's:
true returns over complete episodes that were chosen before they ran. What has no meaning here is an error that names
it.
"""

from __future__ import annotations

import copy
import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from rl_eval.config import EvalConfig
from rl_eval.errors import ConfigError, EvalError, EvaluatorBusy, WeightsError, nearest
from rl_eval.evaluator import Evaluator as _Evaluator
from rl_eval.integrations.torchrl.making import EnvMaker, PolicyMaker
from rl_eval.integrations.torchrl.policy import Key, portable
from rl_eval.integrations.torchrl.scope import Rules, forget_scope, statistics_of

if TYPE_CHECKING:
    from rl_eval.loggers import Logger
    from rl_eval.point import EvalPoint
    from rl_eval.result import EpisodeSequence, EvalResult
    from rl_eval.video import VideoSettings

__all__ = [
    "ArgumentError",
    "EvaluationFailed",
    "EvaluationPending",
    "Evaluator",
    "plain_key",
    "runner_settings",
    "with_rules",
]

_BACKENDS: Final = {"thread": "thread", "process": "ray", "ray": "ray"}
_BUSY: Final = ("skip", "error", "queue")
_MODES: Final = ("deterministic", "mode", "mean", "median", "random")
_RAY_KWARGS: Final = {
    "num_cpus": "num_cpus_per_runner",
    "resources": "custom_resources_per_runner",
    "label_selector": "label_selector",
    "runtime_env": "runtime_env",
}


class ArgumentError(ConfigError, ValueError):
    """An argument is wrong, or cannot be honoured; it is named. Also a ``ValueError``, as in TorchRL."""


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
        dump_video: Accepted for compatibility; recorders in the environment are refused, ``videos`` records.
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
        on_error: Called with what an evaluation or a callback raised; without it, ``poll`` and ``wait`` raise the error
            of an evaluation, and that of a callback is logged.
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
        _refuse(
            "there is no collector here: episodes run one by one in num_envs environments",
            frames_per_batch=frames_per_batch,
            collector_cls=collector_cls,
            collector_kwargs=collector_kwargs,
        )
        _refuse("weights are sent once per request, to all runners", weight_sync_schemes=weight_sync_schemes)
        _check(env, policy, policy_factory, backend, busy_policy, init_fn, num_gpus, ray_kwargs)
        self._prefix, self._metrics_fn = log_prefix, metrics_fn
        self._on_result, self._on_error = on_result, on_error
        self._outcomes: weakref.WeakKeyDictionary[EvalResult, dict[str, Any] | Exception] = weakref.WeakKeyDictionary()
        self._token = uuid.uuid4().hex
        live_env = None if callable(env) and not _is_env(env) else env
        mode = _mode_of(exploration_type)
        config = (
            EvalConfig()
            .environment(
                EnvMaker(
                    None if live_env is not None else env,
                    _copy_of(live_env),
                    self._token,
                    plain_key("reward_keys", reward_keys, "reward"),
                    plain_key("done_keys", done_keys, "done"),
                )
            )
            .policy(
                "rl_eval.integrations.torchrl.making:make_policy",
                policy_kwargs={
                    "maker": PolicyMaker(_own(policy), policy_factory, self._token, mode, str(device or "cpu"))
                },
                deterministic=mode != "random",
                device=str(device or "cpu"),
            )
            .evaluation(num_episodes=num_trajectories, max_episode_steps=max_steps, seed=seed)
            .runners(num_envs_per_runner=num_envs or (1 if init_fn is not None else min(8, num_trajectories)))
        )
        if _BACKENDS[backend] == "ray":
            config.runners(**runner_settings(num_runners, num_gpus, init_fn, ray_kwargs))
        self._evaluator = _Evaluator(
            config,
            backend=_BACKENDS[backend],  # type: ignore[arg-type]
            busy_policy=busy_policy,  # type: ignore[arg-type]
            on_result=self._hear,
            on_error=on_error,
            log_prefix=log_prefix,
            loggers=loggers,
            videos=videos,
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
        # The evaluator has called _hear() before it returned.
        outcome = self._outcomes.pop(result)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Start an evaluation and tell whether it was accepted; see :meth:`evaluate`.

        Raises:
            EvaluationPending: It was refused, and ``busy_policy`` is ``error``.
        """
        try:
            return self._evaluator.trigger_eval(with_rules(weights, weights_dict), step)
        except EvaluatorBusy as error:
            raise EvaluationPending(str(error)) from error

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """Return the oldest unread result of :meth:`trigger_eval`, or None.

        Raises:
            EvaluationFailed: Too many of its episodes failed; without ``on_error`` only.
            Exception: What the evaluation raised; without ``on_error`` only.
        """
        return self._take(self._evaluator.poll(timeout))

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the next result; return None if none is pending, or not in time; see :meth:`poll`."""
        return self._take(self._evaluator.wait(timeout))

    @property
    def pending(self) -> bool:
        """Whether a result is still to come; once False, :meth:`poll` has what there is."""
        return self._evaluator.pending

    def shutdown(self, timeout: float = 5.0) -> None:
        """End what runs and everything that was started; may be called again."""
        self._evaluator.shutdown(timeout)
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
        unread = 0 if self._on_result is not None else len(self._outcomes)
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

    def _hear(self, point: EvalPoint) -> None:
        """Turn a result into TorchRL's metrics, and give them to the callback."""
        try:
            outcome: dict[str, Any] | Exception = self._metrics(point)
        except Exception as error:
            outcome = error
        self._outcomes[point.result] = outcome
        if isinstance(outcome, dict):
            if self._on_result is not None:
                self._on_result(_as_tensordict(outcome))
        elif self._on_error is not None:
            self._on_error(outcome)

    def _take(self, point: EvalPoint | None) -> dict[str, Any] | None:
        outcome = None if point is None else self._outcomes.pop(point.result)
        if isinstance(outcome, Exception):
            if self._on_error is None:
                raise outcome
            return None
        return outcome

    def _metrics(self, point: EvalPoint) -> dict[str, Any]:
        """Name the numbers as TorchRL does, and add ours.

        Raises:
            EvaluationFailed: There are none.
        """
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


def with_rules(
    weights: Any, weights_dict: Mapping[str, Any] | None = None, max_steps: int | None = None, mode: str | None = None
) -> dict[str, Any] | None:
    """Return what to send for a request; None when everything stays as it is.

    Args:
        weights: The policy's, unless ``weights_dict`` has them.
        weights_dict: Models by name.
        max_steps: Step limit of the episodes.
        mode: How actions are taken.

    Raises:
        WeightsError: A name is none that could be sent, or a transform has no statistics.
    """
    models = dict(weights_dict or {})
    policy = models.pop("policy", weights)
    if unknown := [name for name in models if not name.startswith("env.")]:
        raise WeightsError(
            f"weights_dict has {unknown}: known are 'policy', and transforms of the environment, as 'env.transform[0]'"
        )
    statistics = {name.removeprefix("env."): statistics_of(name, model) for name, model in models.items()}
    if policy is None and not statistics and max_steps is None and mode is None:
        return None
    sent = {} if policy is None else {"policy": policy}
    rules = Rules(None if policy is None else _count_tensors(policy), statistics, max_steps, mode)
    return {**sent, "_extra_state": rules}


def plain_key(name: str, key: Key, default: str) -> Key | None:
    """Return a key of TorchRL's step data as the environment's specs have it; None for the default one.

    Raises:
        ArgumentError: It is no key of what a step returns.
    """
    path = (key,) if isinstance(key, str) else tuple(key)
    if path in {("next", default), (default,)}:
        return None
    if path[0] != "next" or len(path) < 2:
        raise ArgumentError(f"{name} is {key!r}: give the key that a step writes, such as ('next', {default!r})")
    return path[1:] if len(path) > 2 else path[1]


def runner_settings(
    num_runners: int, num_gpus: float, init_fn: Callable[[], object] | None, ray_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Translate Ray's options of an actor into those of runners.

    Raises:
        ArgumentError: One has no counterpart, or is given twice.
    """
    given = dict(ray_kwargs or {})
    if "num_gpus" in given:
        raise ArgumentError("ray_kwargs has 'num_gpus': give it as the argument num_gpus, once")
    if unknown := sorted(set(given) - set(_RAY_KWARGS)):
        raise ArgumentError(f"ray_kwargs has {unknown}, which runners have not: {nearest(unknown[0], _RAY_KWARGS)}")
    settings = {_RAY_KWARGS[name]: value for name, value in given.items()}
    if init_fn is not None:
        settings["init_fn"] = init_fn
    return {"num_runners": num_runners, "num_gpus_per_runner": num_gpus, **settings}


def _check(
    env: Any,
    policy: Any,
    policy_factory: Any,
    backend: str,
    busy_policy: str,
    init_fn: Any,
    num_gpus: float,
    ray_kwargs: Any,
) -> None:
    if backend not in _BACKENDS:
        raise ArgumentError(f"backend is {backend!r}: {nearest(str(backend), _BACKENDS)}")
    if busy_policy not in _BUSY:
        raise ArgumentError(f"busy_policy is {busy_policy!r}: {nearest(str(busy_policy), _BUSY)}")
    if (policy is None) == (policy_factory is None):
        raise ArgumentError("give one of policy and policy_factory, and not both")
    if backend == "thread":
        for name, value in {"init_fn": init_fn, "num_gpus": num_gpus, "ray_kwargs": ray_kwargs}.items():
            if value:
                raise ArgumentError(
                    f'{name} is {value!r}, but backend="thread" starts no process: use "process" or "ray"'
                )
    elif not callable(env) or _is_env(env):
        raise ArgumentError(
            f'env is a {type(env).__name__}, but backend="{backend}" builds it in another process: give a callable'
        )


def _refuse(why: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(f"{name} is {value!r}, which cannot be honoured: {why}. Leave it out")


def _is_env(value: Any) -> bool:
    import gymnasium as gym
    from torchrl.envs import EnvBase

    return isinstance(value, (EnvBase, gym.Env))


def _copy_of(env: Any) -> Any:
    """Copy a live environment, which stays the caller's."""
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise ArgumentError(
            f"env is an environment that cannot be copied ({error}): give a callable that builds one"
        ) from error


def _own(policy: Any) -> Any:
    return portable(policy) if isinstance(policy, torch.nn.Module) else policy


def _mode_of(exploration_type: Any) -> str:
    name = str(getattr(exploration_type, "name", exploration_type)).lower()
    if name not in _MODES:
        raise ArgumentError(f"exploration_type is {exploration_type!r}: {nearest(name, _MODES)}")
    return name


def _count_tensors(weights: Any) -> int:
    if isinstance(weights, torch.nn.Module):
        parameters, buffers = (
            weights.named_parameters(remove_duplicate=False),
            weights.named_buffers(remove_duplicate=False),
        )
        return sum(1 for _ in parameters) + sum(1 for _ in buffers)
    if isinstance(weights, torch.Tensor):
        return 1
    if isinstance(weights, Mapping) or hasattr(weights, "flatten_keys"):
        return sum(_count_tensors(value) for name, value in weights.items() if not str(name).endswith("_extra_state"))
    return 0


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
