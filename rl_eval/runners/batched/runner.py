"""Runner of one simulator that steps all slots in one call. The sums of all episodes are in arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree
from typing_extensions import override

from rl_eval.config.settings import EvalSettings, is_live_environment
from rl_eval.errors import ConfigError, EnvError, UsageError, summary_of
from rl_eval.policies.inference.device_arrays import kind_of
from rl_eval.policies.inference.device_observations import DeviceObservations
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.spaces import ObservationBatch, take_rows
from rl_eval.records.determinism import Trace, action_digest
from rl_eval.records.episode import EpisodeSpec, Lease, Phase, RunReport
from rl_eval.runners.batched.attempts import Attempts
from rl_eval.runners.batched.current_simulator import CurrentSimulator
from rl_eval.runners.batched.observed import ObservedBatch
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Reported
from rl_eval.runners.batched.trial import try_out
from rl_eval.runners.batched.vector_env import build_simulator
from rl_eval.runners.core import Attempt, RunnerCore
from rl_eval.runners.environment import check_condition_keys, takes_context
from rl_eval.runners.facts import RunnerFacts
from rl_eval.runners.observers import Factory
from rl_eval.runners.report import PendingReport
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.caller import survivable
from rl_eval.supervision.flight_recorder import ACT, ALL_LANES, CLOSE, CONSTRUCT, RESET, STEP

if TYPE_CHECKING:
    pass

Result = TypeVar("Result")
"""Keys of ``info`` that report success. If both are reported, the last one counts."""
_NUMERIC: Final = "biuf"
"""Kinds of dtypes whose arrays are read for all slots at once."""


class BatchedEvalRunner(RunnerCore):
    """Runner of a :class:`BatchSimulator`: one forward pass and one call of the simulator for all live slots.

    Episodes start in the order of the queue: a free slot gets the next lease, and is restarted with the lease's seed.
    A slot without a lease is masked: its steps are never counted. But the simulator also steps this slot. So if a call
    raises, each live episode is only *suspected* to be the cause; in a simulator of one slot, the cause is certain.
    After such a call, the simulator is built again. If one slot returns an invalid value, only the episode in this slot
    is suspected.
    """

    _inference: RowInference
    facts: ClassVar[RunnerFacts] = RunnerFacts(unit="batch", sweeps=True)

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        _check_supported(settings)
        count = self.facts.lanes(settings)
        self._leases: list[Lease | None] = [None] * count
        self._attempts = Attempts(count, len(self._info_keys(settings)))
        self._step_clock = 0.0
        self._traces: dict[int, Trace] = {}
        self._layout: dict[str, Any] = {}
        """Part of the numerics key that the simulator adds. It stays while the simulator must be built again."""
        self._borrowed = is_live_environment(settings.environment.env)
        """Whether the simulator is the caller's object, which the runner does not close."""
        only = self._borrowed or settings.environment.instances == "one"
        one_at_a_time = takes_context(settings.environment, count)
        self._simulator = CurrentSimulator(count, self._build, self._close, only=only, one_at_a_time=one_at_a_time)
        self._watched: ObservedBatch | None = None
        """Observers of the current simulator's slots; None if there are none."""
        self._sensor = self._new_sensor()
        super().__init__(settings, runner_index, policy)
        self._inference.observations.note = self._note_observation

    # ------------------------------------------------------------------ control

    @property
    @override
    def _busy(self) -> bool:
        return bool(len(self._attempts.slots))

    @override
    def make_inference(self) -> RowInference:
        section = self.settings.policy
        on_device = section.inference == "batched" and getattr(self._policy, "takes_device_arrays", False)
        observations = DeviceObservations if on_device else ObservationBatch
        return RowInference(self._policy, *self.spaces, self.lanes, section, observations)

    @override
    def _bound_to(self) -> dict[str, Any]:
        return self._layout

    @override
    def observe(self, factories: Mapping[str, Factory]) -> None:
        super().observe(factories)
        self._watched = None

    def foreach_env(self, function: Callable[[Any], Result]) -> list[Result]:
        """Call a function with the simulator of the configured width, if it is built; return the result in a list.

        The attribute ``env`` of the simulator is the vector environment, if there is one.
        """
        return [function(one)] if (one := self._simulator.configured) is not None else []

    @override
    def stop(self) -> None:
        self._simulator.close()
        self._drop_policy()

    @override
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = perf_counter() + budget_s
        if self.accept(leases, reclaim, abort):
            return self.report()
        while True:
            self._start()
            self._expire()
            self._reject_nan()
            if self._busy:
                self._sweep()
            elif not self.queue or self._pending:
                break
            if perf_counter() >= deadline or self._starving():
                break
        return self.report()

    def _starving(self) -> bool:
        """Whether to report early: half the slots are idle, and no lease is left."""
        return not self.queue and bool(self._pending) and 2 * len(self._attempts.slots) <= len(self._leases)

    # ------------------------------------------------------------------ simulators

    def _simulator_for(self, lease: Lease, num_slots: int) -> BatchSimulator:
        """Return the simulator for episodes that start; build it and its observers if necessary."""
        simulator = self._simulator.built(lease, num_slots)
        if self._observers and (self._watched is None or self._watched.simulator is not simulator):
            slots = [one for slot in range(simulator.num_envs) if (one := self._observed(slot, simulator)) is not None]
            self._watched = ObservedBatch(simulator, slots, self._inference)
        return simulator

    def _build(self, num_envs: int) -> BatchSimulator:
        self._recorder.enter(CONSTRUCT, lane_of_call(num_envs))
        started, section = perf_counter(), self.settings.environment
        runners = self.settings.runners.num_runners
        simulator = build_simulator(section, self.runner_index, runners, num_envs, blocks=self.facts.unit == "block")
        seconds = perf_counter() - started
        self._attempts.started += seconds  # Construction does not count as time of an episode.
        self._pending.tracing.constructed(seconds)
        return simulator

    @override
    def _first_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        simulator = self._simulator.configured = self._first_built(partial(self._build, len(self._leases)))
        self._pending.standing_note = simulator.note
        self._layout = self._layout_of(simulator)
        check_condition_keys(self.settings.evaluation.conditions, simulator.condition_keys)
        if not (simulator.trusted or self.facts.unit == "block"):
            self._try_out(simulator)
        return simulator.observation_space, simulator.action_space

    @override
    def _first_observations(self, specs: Sequence[EpisodeSpec]) -> list[Any]:
        simulator = self._simulator.configured
        assert simulator is not None
        if self.facts.unit == "block":
            batches = [take_rows(simulator.reset(specs[0].seed), slice(0, 1))]
        else:
            batches = [simulator.start(np.array([0]), [spec.at_position()]) for spec in specs]
        return [tree.map_structure(lambda leaf: leaf[0], batch) for batch in batches]

    def _layout_of(self, simulator: BatchSimulator) -> dict[str, Any]:
        if not simulator.couples_slots and self.settings.policy.inference != "batched":
            return {}
        return {"adapter": simulator.name, "num_envs": self.lanes, "guarantee": "conditions"}

    def _try_out(self, simulator: BatchSimulator) -> None:
        """Reject a simulator that breaks its contract.

        If the trial raises, build the simulator again before the first episode.
        """
        plan = EpisodePlan(simulator.num_envs, seed=1, conditions=self.settings.evaluation.conditions)
        try:
            if note := try_out(simulator, [plan[slot] for slot in range(len(plan))]):
                self._pending.standing_note = "; ".join(filter(None, (simulator.note, note)))
        except UsageError:
            self._simulator.close()
            raise
        except survivable() as error:
            self._pending.note(f"the trial of the simulator raised {summary_of(error)}")
            self._simulator.reject()

    def _close(self, simulator: BatchSimulator) -> None:
        self._watched = None
        if self._borrowed:
            return
        self._recorder.enter(CLOSE)
        try:
            simulator.close()
        except survivable():
            # A broken close() is not a fault of an episode, and the simulator is dropped in any case.
            self._lifetime["close_errors"] += 1
        self._recorder.idle()

    # ------------------------------------------------------------------ starts

    def _make_room(self, lease: Lease) -> bool:
        """Close the simulators that do not fit an episode; return whether it may start now."""
        return self._simulator.make_room(lease, idle=not (self._busy or self._pending))

    def _start(self) -> None:
        """Start queued episodes in free slots."""
        all_live = len(self._attempts.slots) == len(self._leases)
        if not self.queue or all_live or not self._make_room(self.queue[0]):
            return
        first, leases = self.queue[0], list[Lease]()
        slots = self._slots_for(first)
        if self._busy and (own := self._simulator.configured) is not None and len(slots) < own.min_free:
            return
        while len(leases) < len(slots) and self.queue and _alike(self.queue[0], first):
            leases.append(self.queue.popleft())
        if not leases:
            return
        slots = slots[: len(leases)]
        self._begin(slots, leases)
        for slot, lease in zip(slots, leases, strict=True):
            self._recorder.begin(slot, lease.index, lease.seed, lease.attempt)
        phase: Phase = "construct"
        try:
            simulator = self._simulator_for(first, len(slots))
            phase, started = "reset", perf_counter()
            self._recorder.enter(RESET, lane_of_call(simulator.num_envs))
            specs, rows = [lease.spec.at_position() for lease in leases], np.array(slots)
            self._inference.observations.adopt(rows, self._sensed("reset", simulator.start, rows, specs))
        except UsageError:
            raise
        except survivable() as error:
            self._fail_together(slots, phase, error)
            return
        seconds = perf_counter() - started
        self._pending.reset_seconds += seconds
        self._attempts.reset_seconds[slots] = seconds / len(slots)
        for slot, lease in zip(slots, leases, strict=True):
            self._begin_slot(slot, lease)
            if lease.how.traced:
                trace = self._traces[slot] = Trace()
                trace.begin(self._inference.observations.row_content(slot))

    def _sensed(self, method: str, function: Callable[..., Result], *args: Any) -> Result:
        """Call a method of the simulator, through the sensor if there is one."""
        return function(*args) if self._sensor is None else self._sensor.call(method, function, *args)

    def _slots_for(self, first: Lease) -> list[int]:
        """Return slots in which episodes like the next one may start."""
        if first.how.alone:
            return [0]
        free = np.flatnonzero(~self._attempts.live).tolist()
        # Episodes that run again run beside other episodes than before, even if the plan has only a few episodes.
        return free[: (len(self.queue) + 1) // 2] if first.how.fresh else free

    def _begin(self, slots: list[int], leases: list[Lease]) -> None:
        """Assign episodes to slots. Set all sums of these slots to zero."""
        for slot, lease in zip(slots, leases, strict=True):
            self._leases[slot] = lease
        self._attempts.begin(slots, leases, self._inference_clock, self._step_clock)

    def _begin_slot(self, slot: int, lease: Lease) -> None:
        """Begin an episode whose first observation is known."""
        self._inference.begin(slot, lease.seed)
        if self._watched is not None:
            self._watched.start(slot, lease)

    # ------------------------------------------------------------------ steps

    def _sweep(self) -> None:
        """Choose actions for all live slots, and step the simulator."""
        started, live = perf_counter(), len(self._attempts.slots)
        self._recorder.enter(ACT)
        actions, errors = self._inference.act_together() if live else (None, {})
        acted = perf_counter()
        self._pending.inference_seconds += acted - started
        self._inference_clock += (acted - started) / max(1, live)
        for slot, error in errors.items():
            self.fail(slot, "policy", "act", error)
        acting, simulator = self._attempts.slots, self._simulator.now
        if simulator is None or not self._busy:
            return
        # If all slots of a block restart in this step, any valid actions are sufficient.
        actions = _filled(actions, acting, simulator.num_envs) if len(acting) else _idle_actions(simulator)
        digests = self._digests(actions)
        if self._watched is not None:
            self._watched.act(actions)
        self._recorder.enter(STEP, lane_of_call(simulator.num_envs))
        try:
            step = self._sensed("step", simulator.advance, actions)
            self._inference.observations.adopt_step(step.observations, acting, simulator.num_envs)
            observed = self._watched.keys(step) if self._watched is not None else ()
            read = (key for _, key in self._values.places)
            reported = step.reported(dict.fromkeys((*self.settings.evaluation.success_keys, *read, *observed)))
        except survivable() as error:
            self._fail_together(acting.tolist(), "step", error)
            return
        self._step_clock += (perf_counter() - acted) / max(1, len(acting))
        self._add(step, reported, digests)

    def _digests(self, actions: Any) -> dict[int, int]:
        """Return the digests of the actions that are traced, by slot."""
        traced = [slot for slot, trace in self._traces.items() if not trace.full]
        return {slot: action_digest(tree.map_structure(lambda leaf, slot=slot: leaf[slot], actions)) for slot in traced}

    def _add(self, step: BatchStep, reported: Reported, digests: dict[int, int]) -> None:
        """Add a step and its infos to the sums of the live slots, and finish the episodes that it ends."""
        attempts, width = self._attempts, len(step.rewards)
        attempts.steps += 1
        rewards = step.rewards
        if len(attempts.slots) < width:
            rewards = np.where(attempts.live[:width], rewards, 0.0)
        if not math.isfinite(np.add.reduce(rewards)):
            rewards = self._without_nonfinite(rewards)
        attempts.add(rewards, self._gamma)
        if reported:
            self._read_infos(reported, len(rewards))
        if self._watched is not None:
            self._watched.step(step, reported)
        for slot, digest in digests.items():
            if slot in self._traces:
                content = self._inference.observations.row_content(slot)
                ended = step.terminated[slot], step.truncated[slot]
                self._traces[slot].add(digest, step.rewards[slot], *ended, content)
        ended_now = step.terminated | step.truncated
        if self._max_steps < math.inf:
            ended_now |= attempts.steps - attempts.began[:width] >= self._max_steps
        if np.logical_or.reduce(ended_now):
            self._end_attempts(ended_now, step)

    def _end_attempts(self, ended: npt.NDArray[np.bool_], step: BatchStep) -> None:
        """Finish the live episodes that a step ends; a return that is too large for a float is a fault."""
        attempts, width = self._attempts, len(ended)
        for slot in np.flatnonzero(ended & attempts.live[:width] & ~np.isfinite(attempts.returns[:width])).tolist():
            if attempts.live[slot]:  # Otherwise its block has failed.
                total = float(attempts.returns[slot])
                text = f"the sum of the rewards is {total}: the rewards are too large for a float"
                self._fail_alone(slot, "step", EnvError(text, key="reward", value=total))
        slots = np.flatnonzero(ended & attempts.live[:width]).tolist()
        if slots:
            self._finish(slots, step)

    def _without_nonfinite(self, rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Record a fault for each NaN or infinite reward; return the rewards with 0 in these slots."""
        finite = np.isfinite(rewards)
        for slot in np.flatnonzero(~finite).tolist():
            step, reward = self._attempts.length(slot), float(rewards[slot])
            text = f"the reward of step {step} is {reward}, which is not a finite number"
            self._fail_alone(slot, "step", EnvError(text, key="reward", value=reward))
        return np.where(finite, rewards, 0.0)

    def _read_infos(self, found: Reported, width: int) -> None:
        """Record success and the configured scalars of a step's infos."""
        flags = np.full(width, -1, np.int64)
        for key in reversed(self.settings.evaluation.success_keys):
            if key in found:
                self._read_flags(key, *found[key], flags)
        self._attempts.report_success(flags)
        for column, key in self._values.places:
            if key in found:
                self._read_scalars(column, key, *found[key])

    def _read_flags(
        self, key: str, values: npt.NDArray[Any], mask: npt.NDArray[np.bool_], flags: npt.NDArray[np.int64]
    ) -> None:
        """Write the reported flags of live slots."""
        wanted = mask & self._attempts.live[: len(mask)]
        if kind_of(values) == "b" and values.ndim == 1:
            flags[wanted] = values[wanted]
            return
        for slot in np.flatnonzero(wanted).tolist():
            lease = self._leases[slot]
            if values[slot] is None or lease is None:
                flags[slot] = -1
                continue
            place = lease.index, self._attempts.length(slot)
            flag = self._values.success(f"info[{key!r}]", values[slot], *place)
            flags[slot] = -1 if flag is None else int(flag)

    def _read_scalars(self, column: int, key: str, values: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> None:
        """Record the reported scalars of live slots."""
        wanted = mask & self._attempts.live[: len(mask)]
        if kind_of(values) in _NUMERIC and values.ndim == 1:
            self._attempts.infos[: len(mask), column][wanted] = values[wanted]
            if values.dtype != np.float64 and (simulator := self._simulator.now) and simulator.trusted:
                self._pending.note(
                    f"info {key!r} is an array of {values.dtype} for all slots; gymnasium converts the values of all "
                    "slots to the type of the first value"
                )
            return
        for slot in np.flatnonzero(wanted).tolist():
            if values[slot] is None:
                continue
            try:
                self._attempts.infos[slot, column] = self._values.info_scalar(key, values[slot])
            except EnvError as error:
                self._fail_alone(slot, "step", error)

    def _finish(self, slots: list[int], step: BatchStep) -> None:
        """Write the rows of completed episodes, and free their slots."""
        into = self._completed
        flags = zip(step.terminated[slots].tolist(), step.truncated[slots].tolist(), strict=True)
        infos = self._attempts.infos[slots].tolist()
        for slot, ended, info, sums in zip(slots, flags, infos, self._attempts.sums(slots), strict=True):
            lease = self._leases[slot]
            assert lease is not None
            length, total, discounted, once, at_end, reset_seconds, inference_clock, step_clock = sums
            seconds = reset_seconds, self._step_clock - step_clock, self._inference_clock - inference_clock
            row = self._row(lease, (total, discounted, length), ended, (once, at_end), seconds)
            into.rows.append(row)
            if self._watched is not None:
                into.keep(lease.index, self._watched.complete(slot, row, partial(self._record, lease, row, info)))
            if slot in self._traces:
                self._pending.tracing.traces[lease.index] = self._traces[slot].rows
        into.infos += infos
        if self._sensor is not None and self._sensor.finished():
            self._sensor = None
        self._free(slots)

    @property
    def _completed(self) -> PendingReport:
        """Destination of the rows of completed episodes."""
        return self._pending

    # ------------------------------------------------------------------ faults

    @override
    def _fail_alone(self, slot: int, phase: Phase, error: EnvError) -> None:
        """Record the fault of an episode whose slot returned an invalid value.

        If the slot is the cause, the episode completes in another slot or runner. After a second fault in the same
        slot, the simulator is not used again.
        """
        self._simulator.blame(slot)
        self.fail(slot, "env", phase, error, charged=self._simulator.one_slot)

    def _fail_together(self, slots: list[int], phase: Phase, error: BaseException) -> None:
        """Record the fault of a call for some slots, give back the other episodes, and drop the simulator.

        The simulator also steps slots without an episode, so the cause is certain only in a simulator of one slot.
        """
        certain = len(slots) == 1 and self._simulator.one_slot
        for slot in slots:
            self.fail(slot, "env", phase, error, charged=certain)
        self._drop_live()
        self._simulator.reject()

    @override
    def _live_slots(self) -> list[int]:
        slots: list[int] = self._attempts.slots.tolist()
        return slots

    @override
    def _attempt(self, slot: int) -> Attempt | None:
        lease = self._leases[slot]
        return (
            None if lease is None else Attempt(lease, self._attempts.length(slot), float(self._attempts.started[slot]))
        )

    @override
    def _free(self, slots: Sequence[int]) -> None:
        steps = len(slots) * self._attempts.steps - int(self._attempts.began[slots].sum())
        self._pending.count(steps, float((self._step_clock - self._attempts.step_clock[slots]).sum()))
        self._attempts.end(slots)
        for slot in slots:
            self._leases[slot] = None
            self._traces.pop(slot, None)
            if self._watched is not None:
                self._watched.end(slot)
            self._recorder.end(slot)
            self._inference.end(slot)

    @override
    def _progress(self) -> tuple[npt.NDArray[np.void], float]:
        seconds = (self._step_clock - self._attempts.step_clock[self._attempts.slots]).sum()
        return self._attempts.progress(), float(seconds)


def lane_of_call(num_envs: int) -> int:
    """Return the lane of a call for the flight recorder: all lanes, or lane 0 for a simulator of one slot."""
    return 0 if num_envs == 1 else ALL_LANES


def _alike(lease: Lease, first: Lease) -> bool:
    """Whether two episodes may start together in one simulator."""
    return (lease.how.fresh, lease.how.alone) == (first.how.fresh, first.how.alone)


def _filled(actions: Any, acting: npt.NDArray[np.int64], width: int) -> Any:
    """Return a copy of the actions of all slots. Slots without an episode get a valid action.

    Args:
        actions: Nested arrays with at least one row for each slot.
        acting: Slots with an episode.
        width: Number of slots.
    """
    if not isinstance(actions, np.ndarray):
        return tree.map_structure(lambda leaf: _filled(leaf, acting, width), actions)
    if len(acting) == width:
        return actions[:width].copy()
    filled = np.repeat(actions[acting[:1]], width, axis=0)
    filled[acting] = actions[acting]
    return filled


def _idle_actions(simulator: BatchSimulator) -> Any:
    """Return valid actions of all slots."""
    space = gym.vector.utils.batch_space(simulator.action_space, simulator.num_envs)
    space.seed(0)
    return space.sample()


def _check_supported(settings: EvalSettings) -> None:
    """Raise for settings of single environments.

    Raises:
        ConfigError: A setting of single environments is set.
    """
    environment = settings.environment
    unsupported = {
        "environment.wrappers": settings.runners.block and environment.wrappers,
        "environment.action_masks": environment.action_masks,
        "environment.env_reuse": environment.env_reuse == "episode" and "episode",
    }
    for key, value in unsupported.items():
        if value:
            problem = f"{key} applies to single environments, but runners.runner=batched steps all slots in one call"
            raise ConfigError(problem, key=key, value=value, fix="Remove the key, or set runners.runner: vector.")
    if "num_envs" in environment.env_kwargs:
        raise ConfigError(
            "environment.env_kwargs has num_envs, which runners.num_envs_per_runner sets",
            key="environment.env_kwargs.num_envs",
            value=environment.env_kwargs["num_envs"],
            fix="Set runners.num_envs_per_runner instead.",
        )
