"""Callback that evaluates a model during ``learn``: results are logged and kept, and the best model is saved.

The evaluation runs beside the training. At a due step the weights are copied and submitted; training goes on, and the
result is taken in at the first training step after it is there, under the step that it belongs to.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EventCallback
from stable_baselines3.common.logger import KVWriter

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError
from rl_eval.execution.handle import EvalHandle
from rl_eval.integrations.sb3.arrays import EvaluationArrays
from rl_eval.integrations.sb3.best_model import BestModel, Candidate
from rl_eval.results.result import EvalResult
from rl_eval.training.evaluator import Evaluator
from rl_eval.training.schedule import EvalSchedule

__all__ = ["EvalCallback"]

_DEFAULT_FREQUENCY: Final = 10_000
_KEPT: Final = 100

_logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Open:
    """An evaluation whose result has not been taken in."""

    step: int
    handle: EvalHandle
    candidate: Candidate | None
    """The model as it was submitted, until it is known whether it is the best."""

    def discard(self) -> None:
        """Remove the candidate, unless it has become the best model."""
        if self.candidate is not None:
            self.candidate.discard()


@final
class EvalCallback(EventCallback):  # type: ignore[misc]
    """Evaluates the model during training without stopping it.

    In place of SB3's class of the same name: the first argument says how to evaluate and replaces ``eval_env``, and the
    others mean what they mean there. A due evaluation that finds the last one still running waits for it, and then
    takes the weights of that moment. The final policy is always evaluated, before ``learn`` returns. What a callback, a
    writer of SB3's logger or a full disk raises is logged, and training goes on.

    Args:
        evaluator: What to evaluate in and how; its policy is the model. An :class:`~rl_eval.Evaluator` is used as it
            is and left open; of a config, one is made when training starts and shut down when it ends.
        callback_on_new_best: Triggered after a new best mean. ``callback.parent.best_mean_reward`` has it; the model
            has trained on since it was evaluated.
        callback_after_eval: Triggered after every evaluation, likewise.
        n_eval_episodes: Number of episodes; by default as configured.
        eval_freq: Evaluate every so many calls of the callback, each of which is one step of every training
            environment; by default 10000.
        every_steps: Evaluate every so many training steps instead, whatever the number of environments.
        log_path: Folder of ``evaluations.npz``, which has the arrays that SB3's has, of all evaluations. Failed
            episodes are NaN. After more than 100 evaluations it may lack the last 1 % of them until the training ends.
        best_model_save_path: Folder of ``best_model.zip`` and, with a ``VecNormalize``, of
            ``best_model_vecnormalize.pkl``: the model as it was when it was submitted. Both are links into one folder
            and change together, so a kill leaves the old pair or the new one.
        deterministic: Take the mode of the policy's distribution; by default as configured.
        verbose: 1 prints each result.
        on_error: Called with the error of an evaluation that could not run; by default it is raised, which ends the
            training.
        final_timeout_s: Longest wait for open evaluations at the end of the training, in seconds.

    Raises:
        ConfigError: The arguments contradict each other.
    """

    def __init__(
        self,
        evaluator: EvalConfig | EvalSettings | Evaluator,
        callback_on_new_best: BaseCallback | None = None,
        callback_after_eval: BaseCallback | None = None,
        n_eval_episodes: int | None = None,
        eval_freq: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
        best_model_save_path: str | os.PathLike[str] | None = None,
        deterministic: bool | None = None,
        verbose: int = 1,
        *,
        every_steps: int | None = None,
        on_error: Callable[[BaseException], object] | None = None,
        final_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(callback_after_eval, verbose=verbose)
        if not isinstance(evaluator, (EvalConfig, EvalSettings, Evaluator)):
            raise ConfigError(
                f"the first argument is a {type(evaluator).__name__}: give an EvalConfig, such as "
                "EvalConfig().environment(ID), or an Evaluator; environments are built from it"
            )
        if eval_freq is not None and every_steps is not None:
            raise ConfigError(f"eval_freq is {eval_freq} and every_steps is {every_steps}: give one of them")
        for key, value in (("eval_freq", eval_freq), ("every_steps", every_steps)):
            if value is not None and value < 1:
                raise ConfigError(f"{key} is {value}: give at least 1")
        self.callback_on_new_best = callback_on_new_best
        if callback_on_new_best is not None:
            callback_on_new_best.parent = self
        self._given = _with_episodes(evaluator, n_eval_episodes, deterministic)
        self.evaluator: Evaluator | None = None
        self._eval_freq = eval_freq or _DEFAULT_FREQUENCY
        self._every_steps = every_steps
        self._on_error = on_error
        self._final_timeout_s = final_timeout_s
        self._schedule = EvalSchedule()
        self._open: deque[_Open] = deque()
        self._log_path = None if log_path is None else Path(log_path).absolute()
        self._arrays = None if self._log_path is None else EvaluationArrays(self._log_path / "evaluations.npz")
        self._best = None if best_model_save_path is None else BestModel(Path(best_model_save_path).absolute())
        self.best_mean_reward = -np.inf
        self.last_mean_reward = -np.inf
        self.results: list[tuple[int, EvalResult]] = []
        """Training step and result of the last 100 evaluations, in order."""

    # ------------------------------------------------------------------ what SB3 calls

    def _init_callback(self) -> None:
        if self._log_path is not None:
            self._log_path.mkdir(parents=True, exist_ok=True)
        if self._best is not None:
            self._best.prepare()
        if self.callback_on_new_best is not None:
            self.callback_on_new_best.init_callback(self.model)

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._release()  # Of a training that was interrupted.
        given = self._given
        self.evaluator = given if isinstance(given, Evaluator) else Evaluator(given, self.model)
        steps_per_call = self.training_env.num_envs
        self._schedule = EvalSchedule(self._every_steps or self._eval_freq * steps_per_call)
        self._schedule.load_state_dict({"last_step": self.num_timesteps})

    def _on_step(self) -> bool:
        go_on = self._take_in()
        # After the last step the model is updated once more: what it is then is the final policy of this step.
        if self.num_timesteps < self.model._total_timesteps:
            self._schedule.update(self, self.model, self.num_timesteps)
        return go_on

    def _on_training_end(self) -> None:
        try:
            self._finish()
        finally:
            self._release()
            if self._arrays is not None:
                _attempt("writing evaluations.npz", self._arrays.write, None)

    # ------------------------------------------------------------------ submitting

    def submit(self, weights: Any = None, step: int | None = None) -> EvalHandle:
        """Submit the model; called by the schedule, for which this callback stands before the evaluator.

        Args:
            weights: The model.
            step: Its training step.

        Raises:
            EvaluatorBusy: An earlier evaluation is running.
            WeightsError: The ``VecNormalize`` of the training environment has not seen an observation.
        """
        assert self.evaluator is not None
        assert step is not None
        handle = self.evaluator.submit(weights, step)
        self._open.append(_Open(step, handle, self._save_candidate(step)))
        return handle

    def _save_candidate(self, step: int) -> Candidate | None:
        """Save the model beside the best one, since it will have changed when its result is there."""
        best = self._best
        return None if best is None else _attempt("saving the model", lambda: best.save(self.model, step), None)

    def _finish(self) -> None:
        try:
            self._schedule.finish(self, self.model, self.num_timesteps, self._final_timeout_s)
        except Exception as error:
            # That of an evaluation is called when its result is taken in.
            if not any(each.handle.exception() is error for each in self._open):
                raise
        self._take_in()
        if self._schedule.unfinished:
            raise TimeoutError(
                f"the evaluations of steps {self._schedule.unfinished} are not done "
                f"{self._final_timeout_s} s after the end of the training (final_timeout_s)"
            )

    def _release(self) -> None:
        """Let go of what belongs to one training."""
        while self._open:
            self._open.popleft().discard()
        if self.evaluator is not None and self.evaluator is not self._given:
            self.evaluator.shutdown()
        self.evaluator = None

    # ------------------------------------------------------------------ results

    def _take_in(self) -> bool:
        """Take in what is done, in order; return whether training goes on."""
        go_on = True
        while self._open and self._open[0].handle.done():
            first = self._open.popleft()
            try:
                error = first.handle.exception()
                if error is None:
                    go_on = self._take_in_one(first, first.handle.result()) and go_on
                elif self._on_error is None:
                    raise error
                else:
                    _attempt("on_error", partial(self._on_error, error), None)
            finally:
                first.discard()
        return go_on

    def _take_in_one(self, done: _Open, result: EvalResult) -> bool:
        if not len(result.episodes) and result.stopped_early:
            return True  # Cancelled before it began, as an Evaluator does whose busy_policy is "latest".
        self.results.append((done.step, result))
        del self.results[:-_KEPT]
        self.last_mean_reward = result.mean_return
        self._log(done.step, result)
        go_on = True
        # A result that lacks episodes speaks of those that happened to finish: it is no record to beat.
        if result.status == "complete" and result.mean_return > self.best_mean_reward:
            self.best_mean_reward = result.mean_return
            self._keep(done.candidate, result)
            if self.callback_on_new_best is not None:
                go_on = _attempt("callback_on_new_best", self.callback_on_new_best.on_step, default=True)
        return bool(_attempt("callback_after_eval", self._on_event, default=True)) and go_on

    def _keep(self, candidate: Candidate | None, result: EvalResult) -> None:
        if self.verbose:
            print("New best mean reward!")  # noqa: T201
        if candidate is not None and self._best is not None:
            facts = {"mean_reward": result.mean_return, "fingerprint": result.fingerprint}
            _attempt("keeping the best model", partial(self._best.keep, candidate, facts), None)

    def _log(self, step: int, result: EvalResult) -> None:
        values = _logged(result)
        if self.verbose:
            self._print(step, result)
        # Straight to the writers: record() and dump() would write what the training has recorded so far as well,
        # under a step that it does not belong to.
        excluded: dict[str, tuple[str, ...]] = dict.fromkeys(values, ()) | {"time/total_timesteps": ("tensorboard",)}
        for writer in self.logger.output_formats:
            if isinstance(writer, KVWriter):
                row = {**values, "time/total_timesteps": step}
                _attempt(type(writer).__name__, partial(writer.write, row, excluded, step), None)
        if self._arrays is not None:
            _attempt("writing evaluations.npz", partial(self._arrays.add, step, result), None)

    @staticmethod
    def _print(step: int, result: EvalResult) -> None:
        spread, lengths = result.aggregates.std, result.metrics["episode_len_mean"]
        print(f"Eval num_timesteps={step}, episode_reward={result.mean_return:.2f} +/- {spread:.2f}")  # noqa: T201
        print(f"Episode length: {lengths:.2f}")  # noqa: T201
        if result.status != "complete":
            print(f"Evaluation {result.status}: {result.reason}")  # noqa: T201


def _with_episodes(
    evaluator: EvalConfig | EvalSettings | Evaluator, num_episodes: int | None, deterministic: bool | None
) -> EvalSettings | Evaluator:
    if isinstance(evaluator, Evaluator):
        if num_episodes is not None or deterministic is not None:
            raise ConfigError("n_eval_episodes and deterministic are settings of the Evaluator that was given")
        return evaluator
    settings = evaluator.build() if isinstance(evaluator, EvalConfig) else evaluator
    values = {name: dict(section) for name, section in settings}
    # Its own policy, if it has one, gives way to the model.
    values["policy"] |= {"policy": None, "policy_kwargs": {}, "weights": None}
    if num_episodes is not None:
        values["evaluation"]["num_episodes"] = num_episodes
    if deterministic is not None:
        values["policy"]["deterministic"] = deterministic
    return EvalConfig.from_dict(values).build()


def _logged(result: EvalResult) -> dict[str, float]:
    """Return the numbers of a result by the names that SB3 has, and by ours where it has none."""
    metrics = result.metrics
    values = {
        "eval/mean_reward": metrics["episode_return_mean"],
        "eval/mean_reward_ci_low": metrics["episode_return_ci_low"],
        "eval/mean_reward_ci_high": metrics["episode_return_ci_high"],
        "eval/std_reward": metrics["episode_return_std"],
        "eval/mean_ep_length": metrics["episode_len_mean"],
        "eval/num_episodes": metrics["num_episodes"],
        "eval/num_failed_episodes": metrics["num_failed_episodes"],
    }
    if result.success_rate is not None:
        values["eval/success_rate"] = result.success_rate
    return values


def _attempt(what: str, function: Callable[[], Value], default: Value) -> Value:
    """Call what must not end the training; its error is logged."""
    try:
        return function()
    except Exception:
        _logger.exception("%s failed; training goes on", what)
        return default
