"""Base of the runners of single environments. A fault of one environment never stops the runner.

A subclass decides only the order in which its lanes are stepped, in :meth:`EvalRunner.run`. Everything that makes a
record trustworthy is in this class. An exception of the environment ends the attempt. The runner reports a fault with
the original error, closes that environment and builds a new one before the next attempt. The group decides whether
and where the episode runs again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EnvError
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.late import Requests
from rl_eval.records.episode import PROGRESS, EpisodeSpec, Phase, RunReport
from rl_eval.runners.core import Attempt, RunnerCore
from rl_eval.runners.environment import (
    attribute_of,
    check_condition_keys,
    construct_env,
    episode_hook,
    takes_context,
    time_limit,
)
from rl_eval.runners.lane import Lane
from rl_eval.runners.observers import Factory
from rl_eval.runners.values import broken_step, read_reset
from rl_eval.supervision.caller import survivable
from rl_eval.supervision.flight_recorder import ACT, CLOSE, CONSTRUCT, NOW, RESET, SINCE, FlightRecorder

Result = TypeVar("Result")
LEAST_WAIT_S: Final = 0.05
"""Seconds that a call may wait for its first reply or answer, even if its budget is smaller."""
LOOK_S: Final = 0.1
"""Longest wait between two checks of the deadlines, in seconds."""
_ACTING: Final = FlightRecorder.mark(ACT, 0)
"""State in the flight recorder during a call of the policy."""


class EvalRunner(RunnerCore):
    """Runner with environments and a policy. It turns leases into records.

    Args:
        settings: Settings of the evaluation.
        runner_index: Position in the group, from 0.
        policy: A policy object, used instead of the configured one.

    Raises:
        ConfigError: Environment or policy cannot be built as configured.
        EnvError: The environment's constructor raised on every attempt.
    """

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        num_keys = len(self._info_keys(settings))
        lanes, sensor = range(self.facts.lanes(settings)), self._new_sensor()
        self.slots = [Lane(index, num_keys, self._observed, sensor) for index in lanes]
        self._renewing = settings.environment.env_reuse == "episode"
        self._spent = 0
        """Number of lanes that may not begin an attempt before the next report."""
        self._turn_started = 0.0
        self._requests: Requests | None = None
        """Requests to a policy that answers later; None if the runner waits for each answer."""
        super().__init__(settings, runner_index, policy)
        self._cells, self._clock = self._recorder.cells, self._recorder.clock
        self._write_observation = self._inference.observations.write
        self._inference.observations.note = self._note_observation

    # ------------------------------------------------------------------ to override

    def make_env(self, lane_index: int) -> gym.Env[Any, Any]:
        """Build the environment of a lane."""
        runners = self.settings.runners.num_runners
        return construct_env(self.settings.environment, self.runner_index, lane_index, runners)

    @property
    def _uses_indices(self) -> bool:
        """Whether an environment may use a port, a device or a folder that belongs to its runner and lane.

        Then the lane's environment is closed before another one is built.
        """
        own = type(self).make_env.__module__.startswith(f"{__package__}.")
        return not own or takes_context(self.settings.environment)

    @override
    def _first_observations(self, specs: Sequence[EpisodeSpec]) -> list[Any]:
        return self.foreach_env(partial(_begun, specs=specs))[0]

    # ------------------------------------------------------------------ control

    @override
    def observe(self, factories: Mapping[str, Factory]) -> None:
        super().observe(factories)
        for lane in self.slots:
            lane.watch()

    def foreach_env(self, function: Callable[[Any], Result]) -> list[Result]:
        """Call a function with each environment that is built, in the order of the slots; return the results.

        The runner builds the environment of the first slot at the start. It builds the environment of any other slot
        before the slot's first episode. If a function changes an environment, results depend on the time of the call.
        """
        return [function(lane.env) for lane in self.slots if lane.env is not None]

    @override
    def stop(self) -> None:
        for lane in self.slots:
            while lane.env is not None or lane.spare is not None:
                self._close(lane)
        self._drop_policy()

    # ------------------------------------------------------------------ episodes

    @override
    def _live_slots(self) -> list[int]:
        return [lane.index for lane in self.slots if lane.lease is not None]

    @override
    def _attempt(self, slot: int) -> Attempt | None:
        lane = self.slots[slot]
        return None if lane.lease is None else Attempt(lane.lease, lane.length, lane.started)

    @override
    def _spoil(self, slot: int) -> None:
        self.slots[slot].stale = True

    def begin(self, lane: Lane) -> bool:
        """Try to start the next queued attempt in a free lane; return whether the attempt started."""
        lane.lease = self.queue.popleft()
        return self._try_env_reset(lane)

    def choose_actions(self) -> Iterable[tuple[Lane, Any]]:
        """Ask the policy for an action of every live slot; return pairs of slot and action.

        Attempts that exceed their time limit, or have a NaN observation, end before. A failure of the policy ends the
        attempt for which it failed.
        """
        if perf_counter() >= self._next_expiry:
            self._expire()
        self._reject_nan()
        live = [lane.index for lane in self.slots if lane.lease is not None]
        if not live:
            return ()
        started = perf_counter()
        self._clock[SINCE] = started
        self._cells[NOW] = _ACTING
        inference = self._inference
        inference.ask(live)
        rows, actions, errors = inference.answered()
        seconds = perf_counter() - started
        self._pending.inference_seconds += seconds
        self._inference_clock += seconds / len(live)
        for row, error in errors.items():
            self.fail(row, "policy", "act", error)
        if len(rows) == len(self.slots) and not errors:
            return zip(self.slots, actions, strict=False)
        return iter([(self.slots[row], actions[row]) for row in rows if row not in errors])

    def _defer(self) -> None:
        """Do not wait for the answers of a policy that answers later."""
        if isinstance(self._inference, RowInference):
            self._requests = self._inference.defer()

    @property
    def _awaited(self) -> int:
        """Number of slots that wait for a late answer."""
        return 0 if self._requests is None else self._requests.awaited

    def _answered(self) -> Iterator[tuple[Lane, Any]]:
        """Yield pairs of slot and action for the answers that have come.

        A failure of the policy ends the attempt for which it failed.
        """
        rows, actions, errors = self._inference.answered()
        for row in rows:
            if row in errors:
                self.fail(row, "policy", "act", errors[row])
            else:
                yield self.slots[row], actions[row]

    def step(self, lane: Lane, action: Any) -> bool:
        """Step the environment of a slot; return whether its attempt continues."""
        self._turn_started = started = perf_counter()
        alive = self._try_env_step(lane, action)
        if alive:
            lane.step_seconds += perf_counter() - started
        return alive

    @staticmethod
    def may_begin(lane: Lane) -> bool:
        """Whether a lane is free to begin an attempt.

        The outcome of an attempt must be reported before the environment is closed: ``close`` may hang or kill the
        process, and then a finished episode would be lost.
        """
        return lane.lease is None and not (lane.stale and lane.unreported)

    def _try_env_reset(self, lane: Lane) -> bool:
        """Reset the lane's environment with its episode's seed; build it first if necessary.

        Returns:
            Whether the attempt started. If not, its fault is recorded.
        """
        assert lane.lease is not None
        spec, attempt, how = lane.lease.spec, lane.lease.attempt, lane.lease.how
        if lane.stale:
            self._close(lane)
        if how.fresh and self._uses_indices:
            self._close(lane)
        elif how.fresh:
            lane.set_aside()
        lane.begin(self._inference_clock)
        self._recorder.begin(lane.index, spec.index, spec.seed, attempt)
        phase: Phase = "construct"
        try:
            if lane.env is None:
                self._recorder.enter(CONSTRUCT, lane.index)
                lane.attach(self._construct(lane.index))
            if how.traced:
                lane.start_trace(self._inference.observations.content)
            phase, reset_started = "reset", perf_counter()
            self._recorder.enter(RESET, lane.index)
            if lane.begin_episode is not None:
                lane.begin_episode(spec.position, spec.seed, attempt)
            observation = read_reset(lane.reset(**spec.reset_arguments))
            self._write_observation(lane.index, observation)
        except survivable() as error:
            self.fail(lane.index, "env", phase, error)
            return False
        lane.reset_seconds = perf_counter() - reset_started
        self._pending.reset_seconds += lane.reset_seconds
        self._inference.begin(lane.index, spec.seed)
        if lane.observed is not None:
            lane.observed.start(spec, attempt, observation)
        return True

    def _try_env_step(self, lane: Lane, action: Any) -> bool:
        """Step the lane's environment and add the step to the sums of its attempt.

        Returns:
            Whether the attempt continues. If not, its record or fault is written.
        """
        self._clock[SINCE] = self._turn_started
        self._cells[NOW] = lane.stepping + lane.length
        observed = lane.observed
        try:
            if observed is not None and observed.told:
                observed.act(action)
            result = lane.step(action)
            try:
                observation, reward, terminated, truncated, info = result
            except (TypeError, ValueError):
                raise broken_step(result) from None
            lane.length += 1
            if type(reward) is not float or reward - reward != 0.0:  # Infinity and NaN give NaN.
                reward = self._values.reward(lane, reward)
            lane.episode_return += reward
            if self._discounting:
                lane.discounted_return += lane.discount * reward
                lane.discount *= self._gamma
            if info or type(info) is not dict:
                self._values.read_info(lane, info)
            if observed is not None:
                observed.step(observation, reward, terminated, truncated, info)
            if terminated is not False or truncated is not False or lane.length >= self._max_steps:
                if type(terminated) is not bool:
                    terminated = self._values.flag("terminated", terminated)
                if type(truncated) is not bool:
                    truncated = self._values.flag("truncated", truncated)
                if terminated or truncated or lane.length >= self._max_steps:
                    self._finish(lane, terminated, truncated)
                    return False
            self._write_observation(lane.index, observation)
        except survivable() as error:
            self.fail(lane.index, "env", "step", error)
            return False
        return True

    def _finish(self, lane: Lane, terminated: bool, truncated: bool) -> None:
        if not math.isfinite(lane.episode_return):
            raise EnvError(
                f"the sum of the rewards is {lane.episode_return}: the rewards are too large for a float",
                key="reward",
                value=lane.episode_return,
                episode=lane.lease.index if lane.lease else None,
                runner=self.runner_index,
            )
        lane.step_seconds += perf_counter() - self._turn_started
        self._write_row(lane, terminated, truncated)

    def _write_row(self, lane: Lane, terminated: bool, truncated: bool) -> None:
        assert lane.lease is not None
        pending = self._pending
        if lane.trace is not None:
            pending.tracing.traces[lane.lease.index] = lane.trace.trace
        row = self._row(
            lane.lease,
            (lane.episode_return, lane.discounted_return, lane.length),
            (terminated, truncated),
            (lane.success_once, lane.success_at_end),
            (lane.reset_seconds, lane.step_seconds, self._inference_clock - lane.inference_started),
        )
        pending.rows.append(row)
        pending.infos.append(lane.info)
        if lane.observed is not None:
            pending.keep(
                lane.lease.index, lane.observed.complete(row, partial(self._record, lane.lease, row, lane.info))
            )
        self._free([lane.index])

    @override
    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._end(self.slots[slot])

    def _end(self, lane: Lane) -> None:
        assert lane.lease is not None
        self._pending.count(lane.length, lane.step_seconds)
        lane.stale = lane.stale or self._renewing or lane.lease.how.fresh
        if lane.trace is not None:
            lane.end_trace()
        if lane.observed is not None:
            lane.observed.end()
        lane.lease = None
        lane.unreported = True
        self._spent += lane.stale
        self._recorder.end(lane.index)
        self._inference.end(lane.index)

    def _close(self, lane: Lane) -> None:
        env = lane.detach()
        if env is not None:
            self._recorder.enter(CLOSE, lane.index, lane.length)
            try:
                env.close()
            except survivable():
                # A broken close() is not a fault of an episode, and the environment is dropped in any case.
                self._lifetime["close_errors"] += 1

    @override
    def report(self) -> RunReport:
        self._spent = 0
        for lane in self.slots:
            lane.unreported = False
        if self._requests is not None and self.settings.policy.chunk is None:  # With chunks, episodes go on.
            self._pending.answer_seconds += self._requests.seconds()
        return super().report()

    @override
    def _progress(self) -> tuple[npt.NDArray[np.void], float]:
        live = [lane for lane in self.slots if lane.lease is not None]
        progress = np.array([lane.progress() for lane in live], PROGRESS)
        return progress, sum(lane.step_seconds for lane in live)

    # ------------------------------------------------------------------ construction

    def _construct(self, lane_index: int) -> gym.Env[Any, Any]:
        """Build an environment, and record its build time."""
        started = perf_counter()
        env = self.make_env(lane_index)
        seconds = perf_counter() - started
        for lane in self.slots:
            lane.started += seconds  # Construction does not count as time of an episode.
        self._pending.tracing.constructed(seconds)
        self._note_limit(time_limit(env))
        return env

    def _note_limit(self, environments: int | None) -> None:
        """Add a note if the environment's own limit, in steps, is lower than ``max_episode_steps``."""
        if environments is not None and environments < self._max_steps < math.inf:
            self._pending.standing_note = (
                f"evaluation.max_episode_steps is {self._max_steps:,}, but the environment ends episodes after "
                f"{environments:,} steps. Raise the environment's own limit: for a gymnasium id, set max_episode_steps "
                "in environment.env_kwargs"
            )

    @override
    def _first_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Build the first lane's environment and return its spaces."""
        env = self._first_built(partial(self._construct, 0))
        check_condition_keys(self.settings.evaluation.conditions, attribute_of(env, "condition_keys"))
        self.slots[0].attach(env)
        return env.observation_space, env.action_space


def _begun(env: gym.Env[Any, Any], specs: Sequence[EpisodeSpec]) -> list[Any]:
    """Begin an episode for each spec, and return its first observation."""
    hook, found = episode_hook(env), []
    for spec in specs:
        if hook is not None:
            hook(spec.position, spec.seed, 1)
        found.append(read_reset(env.reset(**spec.reset_arguments)))
    return found
