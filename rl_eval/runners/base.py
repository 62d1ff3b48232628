"""Base of all runners: leases become records, and a fault of one environment never stops the runner.

A subclass decides only the order in which its lanes are stepped, in :meth:`EvalRunner.run`. Everything that makes a
record trustworthy is in this class. An exception of the environment ends the attempt. The runner reports a fault with
the original error, closes that environment and builds a new one before the next attempt. The group decides whether
and where the episode runs again.
"""

from __future__ import annotations

import abc
import math
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import gymnasium as gym

from rl_eval.config.settings import DEFAULT_LANES, EvalSettings
from rl_eval.errors import EnvError, EpisodeTimeout, EvalError, UsageError, WeightsError, summary_of
from rl_eval.errors.redaction import learn
from rl_eval.policies import adapt_policy, has_random_weights
from rl_eval.policies.inference.inference import Inference
from rl_eval.protocols import Policy
from rl_eval.records.episode import (
    EpisodeRecord,
    Fault,
    FaultCause,
    Lease,
    Phase,
    RunReport,
    Truncation,
    first_seen,
    record_of,
)
from rl_eval.runners.environment import ValueReader, broken_step, construct_env, import_env, read_reset, time_limit
from rl_eval.runners.lane import Lane, PendingReport
from rl_eval.runners.observers import Factory, ObservedSlot, observer_factories
from rl_eval.supervision.caller import current_folder, survivable, working_in
from rl_eval.supervision.flight_recorder import CLOSE, CONSTRUCT, NOW, RESET, SINCE, flight_recorder
from rl_eval.weights import WeightsSnapshot, apply_weights, module_of, weights_of

if TYPE_CHECKING:
    from rl_eval.policies.inference.sweep_log import SlotLog, SweepLog


Result = TypeVar("Result")


class EvalRunner(abc.ABC):
    """Owner of environments and a policy that turns leases into records.

    Args:
        settings: Settings of the evaluation.
        runner_index: Position in the group, from 0.
        policy: A policy object, used instead of the configured one.

    Raises:
        ConfigError: Environment or policy cannot be built as configured.
        EnvError: The environment's constructor raised on every attempt.
    """

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        # At most 30 attributes with those of a subclass: with more, CPython looks each up in a dict, which adds 5 % to
        # a step without the environment's share.
        self.settings = settings
        learn(settings.model_dump())  # This process redacts its secrets in errors and reports.
        self.runner_index = runner_index
        # The columns of agents are known when an environment has been built.
        keys = settings.evaluation.info_keys if self.several_agents else self.columns(settings)
        self._pending = PendingReport(keys)
        self._values = ValueReader(self._pending.info_keys, self._pending.note)
        self._observers = observer_factories(settings.evaluation.observers)
        observe = self._observe if self._observers else None
        self._lanes = [Lane(index, len(self._pending.info_keys), observe) for index in range(settings.runners.lanes)]
        self._queue: deque[Lease] = deque()
        self._max_steps = settings.evaluation.max_episode_steps or math.inf
        self._gamma = settings.evaluation.gamma
        self._renewing = settings.environment.env_reuse == "episode"
        self._discounting = self._gamma != 1.0
        self._inference_clock = 0.0
        self._recorder = flight_recorder(len(self._lanes))
        self._cells, self._clock = self._recorder.cells, self._recorder.clock
        self._lifetime = {"episodes": 0, "faults": 0, "env_steps": 0, "close_errors": 0}
        self._spent = 0
        """Lanes that may not begin an attempt before the next report."""
        self._turn_started = 0.0
        self._next_expiry = 0.0
        self._weights_version = 0
        home = current_folder()
        self._observation_space, self._action_space = self._first_spaces()
        with working_in(home):  # Paths of the policy are relative to the user's folder, even if an environment left it.
            self._policy = self.make_policy(policy)
        self._has_random_weights = has_random_weights(self._policy)
        self._inference = self.make_inference()
        self._inference.keeps_outputs = bool(self._observers)
        self._write_observation = self._inference.observations.write
        self._inference.observations.note = self._note_observation

    default_lanes: ClassVar[int] = DEFAULT_LANES
    max_lanes: ClassVar[int | None] = None
    needs_processes: ClassVar[bool] = False
    several_agents: ClassVar[bool] = False
    acts_in_sweeps: ClassVar[bool] = False
    """Whether every live lane takes one step after each call of the policy."""

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        """Return the names of the ``info`` scalars in the records."""
        return settings.evaluation.info_keys

    # ------------------------------------------------------------------ to override

    @abc.abstractmethod
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        """Run leases, as :meth:`rl_eval.runners.Runner.run` does. Check the budget after every reset and step."""

    def make_env(self, lane_index: int) -> gym.Env[Any, Any]:
        """Build the environment of a lane."""
        runners = self.settings.runners.num_runners
        return construct_env(self.settings.environment, self.runner_index, lane_index, runners)

    def make_policy(self, policy: Any = None) -> Policy:
        """Build the policy."""
        section = self.settings.policy
        if policy is not None:
            section = section.model_copy(update={"policy": policy, "policy_kwargs": {}})
        return adapt_policy(section, self._observation_space, self._action_space)

    def make_inference(self) -> Any:
        """Build an :class:`Inference`, or an object with its members, that applies the policy to all live lanes."""
        spaces = self._observation_space, self._action_space
        return Inference(self._policy, *spaces, len(self._lanes), self.settings.policy)

    def weighted_module(self, snapshot: WeightsSnapshot) -> Any:
        """Return the module that receives the weights; None without one."""
        return module_of(self._policy)

    # ------------------------------------------------------------------ control

    def set_weights(self, snapshot: WeightsSnapshot) -> int:
        """Copy weights into the policy in place, and return their version.

        Raises:
            EvalError: An episode is live; the group must drain or abort first.
            WeightsError: The weights do not fit the policy, or it has none.
        """
        self._refuse_while_live("weights")
        module = self.weighted_module(snapshot)
        if module is None:
            kind = type(self._policy).__name__
            raise WeightsError(
                f"the policy is a {kind}, not an nn.Module, and has no weights to set",
                key="policy",
                value=kind,
                runner=self.runner_index,
                fix="Pass an nn.Module, or a Policy with an attribute `module`.",
            )
        apply_weights(snapshot, module)
        self._weights_version, self._has_random_weights = snapshot.version, False
        self._inference.numerics = {}  # Probe it again before its next episode.
        return snapshot.version

    def _refuse_while_live(self, what: str) -> None:
        if any(lane.lease is not None for lane in self._lanes):
            raise EvalError(
                f"{what} cannot change while an episode is live",
                key=what,
                runner=self.runner_index,
                fix="Drain or abort the evaluation first.",
            )

    @property
    def weights_version(self) -> int:
        """Version of the policy's weights; 0 before any were set."""
        return self._weights_version

    def observe(self, factories: Mapping[str, Factory]) -> None:
        """Add observers to those of ``evaluation.observers``, from the next episode on.

        Args:
            factories: Factories that build an observer for an environment, by artifact name; empty to remove them.

        Raises:
            EvalError: An episode is live.
        """
        self._refuse_while_live("observers")
        self._observers = {**observer_factories(self.settings.evaluation.observers), **factories}
        self._inference.keeps_outputs = bool(self._observers)
        for lane in self._lanes:
            lane.watch(self._observe if self._observers else None)

    def metrics(self) -> dict[str, float]:
        """Return lifetime counters: ``episodes``, ``faults``, ``env_steps``, ``close_errors``."""
        return dict(self._lifetime)

    @property
    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation space and action space."""
        return self._observation_space, self._action_space

    @property
    def inference(self) -> Any:
        """Inference for all live lanes, as :meth:`make_inference` built it."""
        return self._inference

    @property
    def policy(self) -> Policy:
        """The policy in use, with its current weights."""
        return self._policy

    def foreach_env(self, function: Callable[[Any], Result]) -> list[Result]:
        """Call a function with each environment that is built, in the order of the slots; return the results.

        The runner builds one environment at the start and each other one before its slot's first episode. A function
        that changes an environment makes results depend on the time of the call.
        """
        return [function(lane.env) for lane in self._lanes if lane.env is not None]

    def apply(self, function: Callable[[Any], Result]) -> Result:
        """Call a function with this runner, in the runner's process."""
        return function(self)

    def stop(self) -> None:
        """Close all environments, and drop the policy."""
        for lane in self._lanes:
            while lane.env is not None or lane.spare is not None:
                self._close(lane)
        self._recorder.idle()
        # Reference cycles keep a runner until the garbage collector runs, and a policy may be large.
        with suppress(AttributeError):  # A second call finds them deleted.
            del self._policy, self._inference

    # ------------------------------------------------------------------ episodes

    def _accept(self, leases: Sequence[Lease], reclaim: Sequence[int], abort: bool) -> bool:
        """Take the leases and requests of one call.

        Returns:
            Whether to report at once. One of several runners reports its numerics key before any records, so that the
            group keeps the key of most runners, not that of the fastest.
        """
        if abort:
            self._abort()
        probing = not self._inference.numerics
        if probing:
            # Before the leases: a probe that raises fails the evaluation, and its leases must not run in the next one.
            self._inference.probe()
            self._pending.built_weights = self._built_weights()
            if self._has_random_weights:
                self._pending.note(
                    f"{self.settings.policy.policy} draws the weights at random, so no other run can repeat this "
                    "result. Pass weights (policy.weights, --weights), or seed them in the policy"
                )
        self._queue.extend(leases)
        if reclaim:
            wanted = set(reclaim)
            self._pending.returned += [lease.index for lease in self._queue if lease.index in wanted]
            self._queue = deque(lease for lease in self._queue if lease.index not in wanted)
        return probing and self.settings.runners.num_runners > 1

    def _built_weights(self) -> str:
        """Digest of the weights that the policy was built with; empty after new weights, or for a single runner."""
        if self._weights_version == 0 and self.settings.runners.num_runners > 1:
            with suppress(Exception):  # Uninitialized weights have no content.
                if (built := weights_of(self._policy)) is not None:
                    return built.digest
        return ""

    def _abort(self) -> None:
        self._pending.returned += [lease.index for lease in self._queue]
        self._queue.clear()
        for lane in self._lanes:
            if lane.lease is not None:
                self._pending.returned.append(lane.lease.index)
                self._pending.count(lane)
                self._free(lane)

    def _expire(self) -> None:
        """End attempts that exceed their wall-clock limit. Check ten times a second, between steps."""
        limit = self.settings.fault_tolerance.episode_timeout_s
        now = perf_counter()
        if limit is None or now < self._next_expiry:
            return
        self._next_expiry = now + 0.1
        for lane in self._lanes:
            if lane.lease is not None and now - lane.started > limit:
                text = (
                    f"the attempt ran {now - lane.started:.1f} s, longer than fault_tolerance.episode_timeout_s={limit}"
                )
                self._fault(
                    lane,
                    "timeout",
                    "run",
                    EpisodeTimeout(
                        text,
                        key="fault_tolerance.episode_timeout_s",
                        value=limit,
                        episode=lane.lease.index,
                        runner=self.runner_index,
                    ),
                )

    def _begin(self, lane: Lane) -> bool:
        """Try to start the next queued attempt in a free lane; return whether it is live."""
        lane.lease = self._queue.popleft()
        lane.attempt = lane.lease.attempt
        return self._try_env_reset(lane)

    @staticmethod
    def _may_begin(lane: Lane) -> bool:
        """Whether a lane is free to begin an attempt.

        After an attempt, its outcome must be reported before the environment is closed: ``close`` may hang or kill
        the process, and a finished episode would be lost.
        """
        return lane.lease is None and not (lane.stale and lane.unreported)

    def _try_env_reset(self, lane: Lane) -> bool:
        """Reset the lane's environment with its episode's seed; build it first if necessary.

        Returns:
            Whether the attempt started. If not, its fault is recorded.
        """
        assert lane.lease is not None
        if lane.stale:
            self._close(lane)
        if lane.lease.fresh:
            lane.set_aside()
        lane.begin(self._inference_clock)
        self._recorder.begin(lane.index, lane.lease.index, lane.lease.seed, lane.attempt)
        phase: Phase = "construct"
        try:
            if lane.env is None:
                self._recorder.enter(CONSTRUCT, lane.index)
                lane.attach(self._construct(lane.index))
            if lane.lease.traced:
                lane.start_trace(self._inference.observations.content)
            phase, reset_started = "reset", perf_counter()
            self._recorder.enter(RESET, lane.index)
            if lane.begin_episode is not None:
                lane.begin_episode(lane.lease.index, lane.lease.seed, lane.attempt)
            observation = read_reset(lane.reset(seed=lane.lease.seed))
            self._write_observation(lane.index, observation)
        except survivable() as error:
            self._fault(lane, "env", phase, error)
            return False
        lane.reset_seconds = perf_counter() - reset_started
        self._pending.reset_seconds += lane.reset_seconds
        self._inference.begin(lane.index, lane.lease.seed)
        if lane.observed is not None and not lane.lease.fresh:
            lane.begin_observing(observation)
        return True

    def _try_env_step(self, lane: Lane, action: Any) -> bool:
        """Step the lane's environment and add the step to the sums of its attempt.

        Returns:
            Whether the attempt continues. If not, its record or fault is written.
        """
        self._clock[SINCE] = self._turn_started
        self._cells[NOW] = lane.stepping + lane.length
        try:
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
            self._fault(lane, "env", "step", error)
            return False
        return True

    def _finish(self, lane: Lane, terminated: bool, truncated: bool) -> None:
        if not math.isfinite(lane.episode_return):
            raise EnvError(
                f"the sum of the rewards is {lane.episode_return}: they are too large for a float",
                key="reward",
                value=lane.episode_return,
                episode=lane.lease.index if lane.lease else None,
                runner=self.runner_index,
            )
        if not self._discounting:
            lane.discounted_return = lane.episode_return
        lane.step_seconds += perf_counter() - self._turn_started
        cut = Truncation.ENVIRONMENT if truncated else Truncation.NONE
        if not (terminated or truncated):
            cut = Truncation.MAX_EPISODE_STEPS
        self._write_row(lane, terminated, cut)

    def _fault(self, lane: Lane, cause: FaultCause, phase: Phase, error: BaseException) -> None:
        """Record a fault and end the attempt. The group decides where the episode runs again."""
        assert lane.lease is not None
        error_type, message, traceback = Fault.describe(error)
        self._pending.faults.append(
            Fault(
                index=lane.lease.index,
                seed=lane.lease.seed,
                attempt=lane.attempt,
                cause=cause,
                phase=phase,
                step=lane.length,
                error_type=error_type,
                message=message,
                traceback=traceback,
                runner=self.runner_index,
                node=socket.gethostname(),
                seconds=perf_counter() - lane.started,
            )
        )
        self._lifetime["faults"] += 1
        self._pending.count(lane)
        lane.stale = lane.stale or cause != "policy"
        self._free(lane)

    def _note_observation(self, row: int, text: str, shown: str) -> None:
        """Add a note on the observation of a lane."""
        lane = self._lanes[row]
        assert lane.lease is not None
        self._pending.note(first_seen(text, lane.lease.index, lane.length, shown))

    def _charge_policy(self, lane: Lane, error: Exception) -> None:
        """Record a fault of the policy in a lane."""
        # The row stays in the batch until the lane starts again. It must not make the policy fail a second time.
        self._inference.observations.clear(lane.index)
        self._fault(lane, "policy", "act", error)

    def _reject_nan(self) -> None:
        """Record a fault for each environment with a NaN or infinite observation, before the policy sees it."""
        observations, live = self._inference.observations, self._inference.live
        for row in observations.nonfinite_rows(live):
            lane, text = self._lanes[row], observations.describe_nonfinite(row)
            observations.clear(row)
            self._fault(lane, "env", "step" if lane.length else "reset", EnvError(text, key="observation"))
        observations.look_outside(live)

    def _write_row(self, lane: Lane, terminated: bool, cut: Truncation) -> None:
        assert lane.lease is not None
        pending = self._pending
        if lane.trace is not None:
            pending.traces[lane.lease.index] = lane.trace.trace
        row = lane.row(terminated, cut, self.runner_index, self._weights_version, self._inference_clock)
        pending.rows.append(row)
        pending.infos.append(lane.info)
        pending.count(lane)
        if lane.observed is not None and not lane.lease.fresh:
            self._collect(lane, row)
        self._lifetime["episodes"] += 1
        self._free(lane)

    def _observe(self, slot: int, env: Any) -> ObservedSlot:
        """Build the observers of an environment."""
        outputs = partial(self._inference_outputs, slot)
        log = partial(self._slot_log, slot)
        return ObservedSlot(env, self._observers, self._recorder.idle, outputs, self._pending.note, log)

    @property
    def _sweeps(self) -> SweepLog | None:
        return getattr(self._inference, "sweeps", None)

    def _slot_log(self, slot: int) -> SlotLog | None:
        inference = self._inference
        return inference.slot_log(slot) if self.acts_in_sweeps and isinstance(inference, Inference) else None

    def _inference_outputs(self, slot: int) -> Any:
        return self._inference.outputs(slot)

    def _collect(self, lane: Lane, row: tuple[Any, ...]) -> None:
        """Store the artifacts that observers return for a completed episode."""
        assert lane.observed is not None
        for name, artifact in lane.observed.end(row, partial(self._record, lane, row)).items():
            self._pending.artifacts[name][row[0]] = artifact

    def _record(self, lane: Lane, row: tuple[Any, ...]) -> EpisodeRecord:
        return record_of(row, dict(zip(self._pending.info_keys, lane.info, strict=True)))

    def _read_sweeps(self) -> list[tuple[str, Mapping[int, Any]]]:
        """Return the artifacts that recorders make of finished episodes in the log of sweeps, by name."""
        taken = () if self._sweeps is None else self._sweeps.take()
        return [(name, one.read_sweeps(steps)) for recorders, steps in taken for name, one in recorders.items()]

    def _free(self, lane: Lane) -> None:
        assert lane.lease is not None
        lane.stale = lane.stale or self._renewing or lane.lease.fresh
        if lane.trace is not None or lane.observed is not None:
            lane.unwrap()
            if self._sweeps is not None:
                self._sweeps.end(lane.index)
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

    def _report(self) -> RunReport:
        """Return a report of everything since the last report."""
        self._recorder.idle()
        self._spent = 0
        for lane in self._lanes:
            lane.unreported = False
        inference = self._inference
        report = self._pending.take(
            self._lanes, self._weights_version, inference.numerics, inference.notes, self._read_sweeps()
        )
        self._lifetime["env_steps"] += report.env_steps
        inference.forget_notes()
        return report

    # ------------------------------------------------------------------ construction

    def _construct(self, lane_index: int) -> gym.Env[Any, Any]:
        """Build an environment, and record its build time."""
        started = perf_counter()
        env = self.make_env(lane_index)
        self._pending.constructed(perf_counter() - started)
        self._note_limit(time_limit(env))
        return env

    def _note_limit(self, environments: int | None) -> None:
        """Note that the environment ends episodes before ``max_episode_steps``."""
        if environments is not None and environments < self._max_steps < math.inf:
            self._pending.standing_note = (
                f"evaluation.max_episode_steps is {self._max_steps:,}, but the environment ends episodes after "
                f"{environments:,} steps. Raise its own limit: pass max_episode_steps in env_kwargs to gymnasium.make"
            )

    def _first_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Build the first lane's environment and return its spaces."""
        attempts = self.settings.fault_tolerance.max_attempts_per_episode
        import_env(self.settings.environment)
        for attempt in range(1, attempts + 1):
            try:
                self._recorder.enter(CONSTRUCT)
                env = self._construct(0)
                break
            except UsageError:
                raise
            except survivable() as error:
                if attempt == attempts:
                    raise EnvError(
                        f"environment.env is {self.settings.environment.env!r}: it cannot be constructed "
                        f"({attempts} attempts): {summary_of(error)}",
                        key="environment.env",
                        value=self.settings.environment.env,
                        runner=self.runner_index,
                    ) from error
        self._recorder.idle()
        self._lanes[0].attach(env)
        return env.observation_space, env.action_space
