"""When a model is evaluated during ``learn``, and what becomes of the results: logged, kept, and the best one saved.

The evaluation runs beside the training. At a due step the weights are copied and submitted; training goes on, and the
result is taken in at the first training step after it is there, under the step that it belongs to.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EventCallback
from stable_baselines3.common.logger import KVWriter

from rl_eval.atomic_write import write_atomically
from rl_eval.config import EvalConfig
from rl_eval.errors import ConfigError
from rl_eval.eval_schedule import EvalSchedule
from rl_eval.evaluator import Evaluator
from rl_eval.handle import EvalHandle
from rl_eval.result import EvalResult
from rl_eval.settings import EvalSettings

__all__ = ["EvalCallback"]

_DEFAULT_FREQUENCY: Final = 10_000
_STATISTICS: Final = "_vecnormalize.pkl"


@dataclass(frozen=True)
class _Open:
    """An evaluation whose result has not been taken in."""

    step: int
    handle: EvalHandle
    candidate: Path | None
    """The model as it was submitted, until it is known whether it is the best."""


@final
class EvalCallback(EventCallback):  # type: ignore[misc]
    """Evaluates the model during training without stopping it.

    In place of SB3's class of the same name: the first argument says how to evaluate and replaces ``eval_env``, and the
    others mean what they mean there. A due evaluation that finds the last one still running waits for it, and then
    takes the weights of that moment. The final policy is always evaluated, before ``learn`` returns.

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
        log_path: Folder of ``evaluations.npz``, which has the arrays that SB3's has. Failed episodes are NaN.
        best_model_save_path: Folder of ``best_model.zip`` and, with a ``VecNormalize``, of
            ``best_model_vecnormalize.pkl``: the model as it was when it was submitted.
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
        self._log_path = None if log_path is None else Path(log_path)
        self._best_path = None if best_model_save_path is None else Path(best_model_save_path)
        self.best_mean_reward = -np.inf
        self.last_mean_reward = -np.inf
        self.results: list[tuple[int, EvalResult]] = []
        """Training step and result of every evaluation, in order."""

    # ------------------------------------------------------------------ what SB3 calls

    def _init_callback(self) -> None:
        for folder in (self._log_path, self._best_path):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
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

    def _save_candidate(self, step: int) -> Path | None:
        """Save the model beside the best one, since it will have changed when its result is there."""
        if self._best_path is None:
            return None
        candidate = self._best_path / f".candidate_{step}.zip"
        self.model.save(candidate)
        if (wrapper := self.model.get_vec_normalize_env()) is not None:
            _statistics_of(candidate).write_bytes(pickle.dumps(wrapper))
        return candidate

    def _finish(self) -> None:
        try:
            self._schedule.finish(self, self.model, self.num_timesteps, self._final_timeout_s)
        except Exception as error:
            # That of an evaluation is told when its result is taken in.
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
            _discard(self._open.popleft().candidate)
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
                    self._on_error(error)
            finally:
                _discard(first.candidate)
        return go_on

    def _take_in_one(self, done: _Open, result: EvalResult) -> bool:
        if not len(result.records) and result.stopped_early:
            return True  # Cancelled before it began, as an Evaluator does whose busy_policy is "latest".
        self.results.append((done.step, result))
        self.last_mean_reward = result.mean_return
        self._log(done.step, result)
        go_on = True
        # A result that lacks episodes speaks of those that happened to finish: it is no record to beat.
        if result.status == "complete" and result.mean_return > self.best_mean_reward:
            self.best_mean_reward = result.mean_return
            self._keep(done.candidate)
            if self.callback_on_new_best is not None:
                go_on = self.callback_on_new_best.on_step()
        return bool(self._on_event()) and go_on

    def _keep(self, candidate: Path | None) -> None:
        if self.verbose:
            print("New best mean reward!")  # noqa: T201
        if candidate is None:
            return
        best = candidate.with_name("best_model.zip")
        if _statistics_of(candidate).exists():
            _statistics_of(candidate).replace(_statistics_of(best))
        candidate.replace(best)

    def _log(self, step: int, result: EvalResult) -> None:
        values = _logged(result)
        if self.verbose:
            self._print(step, result)
        # Straight to the writers: record() and dump() would write what the training has recorded so far as well,
        # under a step that it does not belong to.
        excluded: dict[str, tuple[str, ...]] = dict.fromkeys(values, ()) | {"time/total_timesteps": ("tensorboard",)}
        for writer in self.logger.output_formats:
            if isinstance(writer, KVWriter):
                writer.write({**values, "time/total_timesteps": step}, excluded, step)
        if self._log_path is not None:
            _save_arrays(self._log_path / "evaluations.npz", self.results)

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


def _save_arrays(file: Path, results: list[tuple[int, EvalResult]]) -> None:
    """Write the arrays of SB3's ``evaluations.npz``; a reader sees the old file or the new one."""
    arrays: dict[str, Any] = {
        "timesteps": np.array([step for step, _ in results]),
        "results": np.array([_column(result, "episode_return") for _, result in results]),
        "ep_lengths": np.array([_column(result, "length") for _, result in results]),
    }
    if all(result.success_rate is not None for _, result in results):
        arrays["successes"] = np.array([_column(result, "success_at_end") > 0 for _, result in results])

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:  # To a path, numpy would add a suffix.
            np.savez(stream, **arrays)

    write_atomically(file, write)


def _column(result: EvalResult, name: str) -> Any:
    """Return one number per planned episode, NaN where it did not complete."""
    column = result.table.rows[name].astype(np.float64)
    column[~result.table.completed] = np.nan
    return column


def _statistics_of(model: Path) -> Path:
    return model.with_name(model.stem + _STATISTICS)


def _discard(candidate: Path | None) -> None:
    if candidate is not None:
        candidate.unlink(missing_ok=True)
        _statistics_of(candidate).unlink(missing_ok=True)
