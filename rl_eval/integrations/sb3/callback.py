"""Callback that evaluates a model during ``learn``, logs and stores the results, and saves the best model.

Evaluations run during training. At the same steps as SB3's callback, this callback copies the weights and submits them.
Training continues, unless two evaluations are already waiting. The callback processes a result at the first training
step after the end of the evaluation, and logs the result with the step of its weights.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, EventCallback
from stable_baselines3.common.logger import KVWriter
from typing_extensions import override

from rl_eval.atomic_write import write_atomically
from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError, EvaluatorBusy
from rl_eval.execution.environment_objects import environment_like
from rl_eval.execution.handle import EvalHandle
from rl_eval.integrations.sb3.best_model import BestModel, Candidate
from rl_eval.integrations.sb3.models import environment_settings
from rl_eval.results.result import EvalResult
from rl_eval.results.text import BIASED_BEST
from rl_eval.training.evaluator import Evaluator


@final
class EvaluationArrays:
    """Returns, lengths and successes of all evaluations, in a file that NumPy can load.

    Args:
        file: Path of the file. Each evaluation replaces the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._arrays: dict[str, list[Any]] = {"timesteps": [], "results": [], "ep_lengths": [], "successes": []}

    def add(self, step: int, result: EvalResult) -> None:
        """Add the numbers of an evaluation, and replace the file atomically."""
        columns = {"results": "episode_return", "ep_lengths": "length", "successes": "success_at_end"}
        if result.success_rate is None:
            self._arrays.pop("successes", None)
        for name, values in self._arrays.items():
            values.append(step if name == "timesteps" else _column(result, columns[name]))

        def write(temporary: Path) -> None:
            with temporary.open("wb") as stream:  # To a path, numpy would add a suffix.
                np.savez(stream, **self._arrays)  # type: ignore[arg-type]

        write_atomically(self._file, write)


def _column(result: EvalResult, name: str) -> Any:
    """Return one number per planned episode; NaN for an episode that did not complete."""
    column = result.table.rows[name].astype(np.float64)
    if name == "success_at_end":
        column = (column > 0).astype(np.float64)
    return np.where(result.table.completed, column, np.nan)


# ---------------------------------------------------------------------- the callback


_LOGGED: Final = {
    "mean_reward": "episode_return_mean",
    "mean_reward_ci_low": "episode_return_ci_low",
    "mean_reward_ci_high": "episode_return_ci_high",
    "std_reward": "episode_return_std",
    "mean_ep_length": "episode_len_mean",
    "num_episodes": "num_episodes",
    "num_failed_episodes": "num_failed_episodes",
}
"""Metrics of a result by their names in the logger. A metric that SB3 also logs has SB3's name."""

_KEPT: Final = 100
_MAX_WAITING: Final = 2
"""Maximum number of waiting evaluations. Each has a copy of the weights."""
_POLL_S: Final = 0.02

_logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Open:
    """Evaluation whose result is not processed yet."""

    step: int
    handle: EvalHandle
    candidate: Candidate | None
    """The submitted model, which may become the best model; None if no best model is saved."""

    def discard(self) -> None:
        """Remove the candidate, unless it has become the best model."""
        if self.candidate is not None:
            self.candidate.discard()


@final
class EvalCallback(EventCallback):  # type: ignore[misc]
    """Evaluates the model during training, at the same steps as SB3's class of the same name.

    The arguments are those of SB3's class. An evaluation uses the weights of its step, and runs while training
    continues. At most two more evaluations can wait. If a further evaluation is due, training waits. Errors of
    callbacks, of SB3's logger and of file writes (for example, on a full disk) are logged, and training continues.

    Args:
        eval_env: Environment, as for :func:`rl_eval.evaluate_policy`, or a config of the evaluation. An
            :class:`~rl_eval.Evaluator` is used without changes, and is not closed. Training waits while the
            evaluator is busy.
        callback_on_new_best: Callback that is triggered after a new best mean, which is in
            ``callback.parent.best_mean_reward``. The model then has newer weights than those that were evaluated.
        callback_after_eval: Callback that is triggered after every evaluation. Here, too, the model has newer weights.
        n_eval_episodes: Number of episodes; by default, the configured number, or 5 if ``eval_env`` is an environment.
        eval_freq: Number of calls between two evaluations. A call is one step of every training environment. By default
            10,000.
        log_path: Folder of ``evaluations.npz``, which has the same arrays as SB3's file, for all evaluations. Failed
            episodes are NaN.
        best_model_save_path: Folder of ``best_model.zip`` and, with a ``VecNormalize``, of
            ``best_model_vecnormalize.pkl``. Both have the state of the training step at which the evaluation was
            submitted. They are links into one folder and change together. So you find either the old pair or the new
            pair, even if the training is killed. Their mean is the highest of several means, so it is biased upward.
            Evaluate the model on other episodes before you quote a number.
        deterministic: Whether to use the mode of the policy's distribution; by default, the configured value.
        render: Must be False. Use ``rl-eval replay --render human`` or ``--video`` to see episodes of a run.
        verbose: 1 prints each result.
        warn: Not used, because a ``Monitor`` is not needed.
        every_steps: Number of training steps between two evaluations, in place of ``eval_freq``. An evaluation starts
            at the first call in each interval. Steps of all environments are added up.
        on_error: Function that is called with the error of an evaluation that could not run. By default, the error is
            raised, which ends the training.
        final_timeout_s: Maximum waiting time for open evaluations at the end of the training, in seconds.

    Raises:
        ConfigError: The arguments contradict each other, or the environment cannot be built again.
    """

    def __init__(
        self,
        eval_env: Any,
        callback_on_new_best: BaseCallback | None = None,
        callback_after_eval: BaseCallback | None = None,
        n_eval_episodes: int | None = None,
        eval_freq: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
        best_model_save_path: str | os.PathLike[str] | None = None,
        deterministic: bool | None = None,
        render: bool = False,
        verbose: int = 1,
        warn: bool = True,
        *,
        every_steps: int | None = None,
        on_error: Callable[[BaseException], object] | None = None,
        final_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(callback_after_eval, verbose=verbose)
        if render:
            fix = "Show episodes with rl-eval replay --render human or --video."
            raise ConfigError("render is True, which is not supported", key="render", value=True, fix=fix)
        if eval_freq is not None and every_steps is not None:
            both = f"eval_freq is {eval_freq} and every_steps is {every_steps}"
            raise ConfigError(both, key="every_steps", value=every_steps, fix="Set only one of the two.")
        for key, value in (("eval_freq", eval_freq), ("every_steps", every_steps)):
            if value is not None and value < 1:
                raise ConfigError(f"{key} is {value}", key=key, value=value, fix="Set the value to at least 1.")
        self.callback_on_new_best = callback_on_new_best
        if callback_on_new_best is not None:
            callback_on_new_best.parent = self
        self._given = _with_episodes(eval_env, n_eval_episodes, deterministic)
        self.evaluator: Evaluator | None = None
        self._eval_freq = eval_freq or 10_000
        self._every_steps = every_steps
        self._on_error = on_error
        self._final_timeout_s = final_timeout_s
        self._open: deque[_Open] = deque()
        self._log_path = None if log_path is None else Path(log_path).absolute()
        self._arrays = None if self._log_path is None else EvaluationArrays(self._log_path / "evaluations.npz")
        self._best = None if best_model_save_path is None else BestModel(Path(best_model_save_path).absolute())
        self._ends_with_parent = False
        self.best_mean_reward = -np.inf
        self.last_mean_reward = -np.inf
        self._is_success_buffer: list[bool] = []
        self.results: list[tuple[int, EvalResult]] = []
        """Training step and result of the last 100 evaluations, in order."""

    # ------------------------------------------------------------------ methods that SB3 calls

    @override
    def _init_callback(self) -> None:
        if self._log_path is not None:
            self._log_path.mkdir(parents=True, exist_ok=True)
        if self._best is not None:
            self._best.prepare()
        if self.callback_on_new_best is not None:
            self.callback_on_new_best.init_callback(self.model)

    @override
    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._release()  # Evaluations that an interrupted training left open.
        if isinstance(self.parent, EventCallback) and not self._ends_with_parent:
            self._end_with(self.parent)
        given = self._given
        self.evaluator = (
            given
            if isinstance(given, Evaluator)
            else Evaluator(
                with_values(given, environment=environment_settings(self.model)),
                self.model,
                busy_policy="queue",
                max_queue=_MAX_WAITING,
            )
        )

    @override
    def _on_step(self) -> bool:
        go_on = self._take_in()
        if self._due():
            while not self._submit():
                time.sleep(_POLL_S)
                go_on = self._take_in() and go_on
        return go_on

    @override
    def _on_training_end(self) -> None:
        give_up = time.monotonic() + self._final_timeout_s
        try:
            for each in self._open:
                with suppress(Exception):  # _take_in handles the error of an evaluation.
                    each.handle.result(max(0.0, give_up - time.monotonic()))
            self._take_in()
            if self._open:
                raise TimeoutError(
                    f"the evaluations of steps {[each.step for each in self._open]} are not done "
                    f"{self._final_timeout_s} s after the end of the training (final_timeout_s)"
                )
        finally:
            self._release()

    def _end_with(self, parent: EventCallback) -> None:
        """Make a parent call this callback at the end of the training. SB3's ``EventCallback`` does not do this."""
        own_end = parent._on_training_end  # noqa: SLF001  # SB3 calls only this method, in each callback.

        def end() -> None:
            try:
                own_end()  # The parent can evaluate once more, and then it calls this callback.
            finally:
                self.on_training_end()

        vars(parent)["_on_training_end"] = end
        self._ends_with_parent = True

    # ------------------------------------------------------------------ submitting

    def _due(self) -> bool:
        if self._every_steps is None:
            return bool(self.n_calls % self._eval_freq == 0)
        return bool(self.num_timesteps % self._every_steps < self.training_env.num_envs)

    def _submit(self) -> bool:
        """Submit the model of this step; return whether the evaluator accepted it.

        Raises:
            WeightsError: The ``VecNormalize`` of the training environment has not seen an observation.
        """
        assert self.evaluator is not None
        step = self.num_timesteps
        try:
            handle = self.evaluator.submit(self.model, step)
        except EvaluatorBusy:
            return False
        candidate, best = None, self._best
        if best is not None:  # The model will have changed by the time of the result.
            candidate = _attempt("saving the model", lambda: best.save(self.model, step), None)
        self._open.append(_Open(step, handle, candidate))
        return True

    def _release(self) -> None:
        """Drop open evaluations, and shut down the evaluator if this callback created it."""
        while self._open:
            self._open.popleft().discard()
        if self.evaluator is not None and self.evaluator is not self._given:
            self.evaluator.shutdown()
        self.evaluator = None

    # ------------------------------------------------------------------ results

    def _take_in(self) -> bool:
        """Process finished evaluations, in order. Return whether training continues."""
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
            return True  # Cancelled before its start, by an Evaluator with the busy_policy "latest".
        self.results.append((done.step, result))
        del self.results[:-_KEPT]
        self.last_mean_reward = result.aggregates.mean
        successes = result.counted_rows["success_at_end"]
        self._is_success_buffer = [bool(one) for one in successes if one >= 0]  # As in SB3's class.
        self._log(done.step, result)
        go_on = True
        # An incomplete result covers only the episodes that happened to finish, so it cannot be the best.
        if result.status == "complete" and result.aggregates.mean > self.best_mean_reward:
            self.best_mean_reward = result.aggregates.mean
            if self.verbose:
                print("New best mean reward!")  # noqa: T201
            if done.candidate is not None and self._best is not None:
                facts = {
                    "mean_reward": result.aggregates.mean,
                    "meaning": BIASED_BEST,
                    "fingerprint": result.fingerprint,
                }
                _attempt("keeping the best model", partial(self._best.keep, done.candidate, facts), None)
            if self.callback_on_new_best is not None:
                go_on = _attempt("callback_on_new_best", self.callback_on_new_best.on_step, default=True)
        return bool(_attempt("callback_after_eval", self._on_event, default=True)) and go_on

    def _log(self, step: int, result: EvalResult) -> None:
        values = _logged(result)
        if self.verbose:
            self._print(step, result)
        # Directly to the writers: record() and dump() would also write the training's records so far, under the wrong
        # step.
        excluded: dict[str, tuple[str, ...]] = dict.fromkeys(values, ()) | {"time/total_timesteps": ("tensorboard",)}
        for writer in self.logger.output_formats:
            if isinstance(writer, KVWriter):
                row = {**values, "time/total_timesteps": step}
                _attempt(type(writer).__name__, partial(writer.write, row, excluded, step), None)
        if self._arrays is not None:
            _attempt("writing evaluations.npz", partial(self._arrays.add, step, result), None)

    @staticmethod
    def _print(step: int, result: EvalResult) -> None:
        """Print the same lines as SB3. Standard deviations divide by n, as in SB3."""
        returns, lengths = (result.counted_rows[name] for name in ("episode_return", "length"))
        print(f"Eval num_timesteps={step}, episode_reward={result.aggregates.mean:.2f} +/- {_std(returns):.2f}")  # noqa: T201
        print(f"Episode length: {result.metrics['episode_len_mean']:.2f} +/- {_std(lengths):.2f}")  # noqa: T201
        if result.success_rate is not None:
            print(f"Success rate: {100 * result.success_rate:.2f}%")  # noqa: T201
        if result.status != "complete":
            print(f"Evaluation {result.status}: {result.reason}")  # noqa: T201


def _std(values: Any) -> float:
    return float(np.std(values)) if len(values) else math.nan


def _with_episodes(given: Any, num_episodes: int | None, deterministic: bool | None) -> EvalSettings | Evaluator:
    if isinstance(given, Evaluator):
        for key, value in (("n_eval_episodes", num_episodes), ("deterministic", deterministic)):
            if value is not None:
                fix = "Set this value in the config of the Evaluator."
                raise ConfigError(f"{key} is {value}, but eval_env is an Evaluator", key=key, value=value, fix=fix)
        return given
    if not isinstance(given, (EvalConfig, EvalSettings)):
        given = EvalConfig().environment(**environment_like(given, of_the_model=True)).evaluation(num_episodes=5)
    settings = given.build() if isinstance(given, EvalConfig) else given
    values = {name: dict(section) for name, section in settings}
    # The model replaces a policy of the config.
    values["policy"] |= {"policy": None, "policy_kwargs": {}, "weights": None}
    if num_episodes is not None:
        values["evaluation"]["num_episodes"] = num_episodes
    if deterministic is not None:
        values["policy"]["deterministic"] = deterministic
    return EvalConfig.from_dict(values).build()


def _logged(result: EvalResult) -> dict[str, float]:
    """Return the numbers of a result, by the names in the logger."""
    values = {f"eval/{name}": result.metrics[metric] for name, metric in _LOGGED.items()}
    return values if result.success_rate is None else {**values, "eval/success_rate": result.success_rate}


def _attempt(what: str, function: Callable[[], Value], default: Value) -> Value:
    """Call a function and return its result. If it raises an error, log the error and return ``default``."""
    try:
        return function()
    except Exception:
        _logger.exception("%s failed; training continues", what)
        return default
