"""``torchrl.collectors.distributed.RayEvalWorker``, with :class:`rl_eval.Evaluator` behind its calls.

The calls and the keys ``reward`` and ``frames`` are TorchRL's. The number is not: ``reward`` is the mean return of
complete episodes, where TorchRL's is the mean reward per step of one.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from rl_eval.config.builder import EvalConfig
from rl_eval.integrations.torchrl.arguments import ArgumentError, plain_key, runner_settings, with_rules
from rl_eval.integrations.torchrl.evaluator import EvaluationFailed
from rl_eval.integrations.torchrl.frames import FirstEpisodeFrames
from rl_eval.integrations.torchrl.keys import Key
from rl_eval.integrations.torchrl.making import EnvMaker, PolicyMaker
from rl_eval.integrations.torchrl.scope import forget_scope
from rl_eval.training.evaluator import Evaluator

if TYPE_CHECKING:
    from rl_eval.execution.handle import EvalHandle
    from rl_eval.results.result import EvalResult
    from rl_eval.video import VideoSettings

__all__ = ["RayEvalWorker"]

_REWARD: Final = ("next", "reward")
_logger = logging.getLogger(__name__)

_NAMESPACE: Final = "rl_eval"
"""Of the names of workers."""


@final
class RayEvalWorker:
    """An actor of Ray that evaluates the weights it is sent, one request at a time.

    Args:
        init_fn: Called first in the actor's process, before torch is imported; None for nothing.
        env_maker: Builds an environment; called in the actor, once per environment.
        policy_maker: Called with an environment; builds the policy.
        num_gpus: GPUs of the actor.
        reward_keys: Which reward counts, where the environment has several.
        name: Name under which other processes reach the worker with :meth:`from_name`; it then outlives this one.
        num_episodes: Episodes per request.
        num_envs: Environments that step together; by default 8 or ``num_episodes`` if less, and 1 with ``init_fn``.
        num_runners: Actors that share the work.
        seed: Root seed of the episodes: every request runs the same ones.
        videos: Which episodes to record after each request, and where.
        **remote_kwargs: ``num_cpus``, ``memory``, ``resources``, ``label_selector`` and ``runtime_env`` of the actor.

    Raises:
        ArgumentError: An argument is wrong, or cannot be honoured.
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
        self._token = uuid.uuid4().hex
        key = plain_key("reward_keys", reward_keys, "reward")
        maker = PolicyMaker(None, policy_maker, self._token, "deterministic")
        config = (
            EvalConfig()
            .environment(EnvMaker(env_maker, None, self._token, key))
            .policy(
                "rl_eval.integrations.torchrl.making:make_policy",
                policy_kwargs={"maker": maker},
                # Noise is there for requests that ask for it; the others leave it alone.
                deterministic=False,
            )
            .evaluation(num_episodes=num_episodes, seed=seed, observers=(FirstEpisodeFrames,))
            .runners(num_envs_per_runner=num_envs or (1 if init_fn is not None else min(8, num_episodes)))
            .runners(**runner_settings(num_runners, num_gpus, init_fn, remote_kwargs, "remote_kwargs"))
        )
        evaluator = Evaluator(
            config,
            backend="ray",
            busy_policy="latest",
            videos=videos,
            name=name,
            namespace=_NAMESPACE,
            detached=name is not None,
        )
        self._start(evaluator, name)

    @classmethod
    def from_name(cls, name: str, *, reward_keys: Key = _REWARD) -> RayEvalWorker:
        """Reach a named worker that any process created.

        Raises:
            ArgumentError: ``reward_keys`` is given: the worker reads the reward that it was created with.
        """
        if reward_keys != _REWARD:
            raise ArgumentError(
                f"reward_keys is {reward_keys!r}, but the worker {name!r} reads the reward that it was created with: "
                "leave it out"
            )
        worker = object.__new__(cls)
        worker._token = ""
        worker._start(Evaluator.from_name(name, namespace=_NAMESPACE, busy_policy="latest"), None)
        return worker

    def _start(self, evaluator: Evaluator, owned: str | None) -> None:
        self._evaluator: Evaluator | None = evaluator
        self._owned = owned
        self._handle: EvalHandle | None = None

    def submit(
        self,
        weights: Any,
        max_steps: int | None,
        *,
        deterministic: bool = True,
        break_when_any_done: bool = True,
    ) -> None:
        """Start an evaluation; an earlier one that was not polled is cancelled.

        Args:
            weights: The policy's; None evaluates those that it has.
            max_steps: Step limit of every episode; None is no limit.
            deterministic: Take the mode of the policy's distribution, or sample it.
            break_when_any_done: Accepted for compatibility: each episode runs in an environment of its own, to its end.

        Raises:
            WeightsError: The weights are none.
        """
        if self._evaluator is None:
            raise ArgumentError("the worker is shut down: create a new one")
        if self._handle is not None:
            self._handle.cancel()
        mode = "deterministic" if deterministic else "random"
        self._handle = self._evaluator.submit(with_rules(weights, None, max_steps, mode))

    def poll(self, timeout: float | None = 0) -> dict[str, Any] | None:
        """Return the result of the last request, once; None while it runs, and without one.

        Args:
            timeout: Longest wait, in seconds; None waits for it.

        Returns:
            ``reward`` (mean return per episode), ``reward_std``, ``reward_per_step`` (TorchRL's ``reward``), ``length``
            (mean steps per episode), ``count`` (episodes), ``weights_version``, every metric of rl_eval, and
            ``frames``: a uint8 tensor of shape (T, height, width, 3), one frame after each step of episode 0, up to
            a gibibyte; None if the environment's ``render_mode`` is not ``rgb_array``.

        Raises:
            EvaluationFailed: Too many episodes failed to give a number.
            EvalError: It could not run at all. It is raised once; the worker can be used again.
        """
        if self._handle is None:
            return None
        handle = self._handle
        try:
            result = handle.result(timeout)
        except TimeoutError:
            if not handle.done():
                return None
            self._handle = None
            raise
        except BaseException:
            self._handle = None
            raise
        self._handle = None
        return _as_reply(result)

    def shutdown(self) -> None:
        """End the worker, within seconds, also while it works; may be called again.

        What :meth:`from_name` has returned ends alone, and leaves the worker to the others.
        """
        evaluator, self._evaluator, self._handle = self._evaluator, None, None
        if evaluator is not None:
            evaluator.shutdown()
            if self._owned is not None:
                from rl_eval.training.service.directory import end_service

                end_service(self._owned, _NAMESPACE)
        forget_scope(self._token)


def _as_reply(result: EvalResult) -> dict[str, Any]:
    if result.status == "failed":
        raise EvaluationFailed(f"the evaluation failed: {result.reason}")
    numbers = result.metrics
    count = int(numbers["num_episodes"])
    frames = result.artifacts.get(0, {}).get(FirstEpisodeFrames.__qualname__)
    _warn_of_the_return()
    return {
        **numbers,
        "reward": numbers["episode_return_mean"],
        "reward_std": numbers["episode_return_std"] if count > 1 else 0.0,
        "reward_per_step": numbers["episode_return_mean"] / numbers["episode_len_mean"],
        "length": numbers["episode_len_mean"],
        "count": count,
        "frames": None if frames is None else torch.from_numpy(np.asarray(frames)),
    }


@cache
def _warn_of_the_return() -> None:
    """Warn, once in a process, of what an import line alone has changed."""
    _logger.warning(
        "RayEvalWorker of rl_eval: 'reward' is the mean return per episode. TorchRL's 'reward' is the mean reward per "
        "step, which is 'reward_per_step' here"
    )
