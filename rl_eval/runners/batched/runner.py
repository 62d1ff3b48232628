"""Runner of one simulator that steps all slots in one call, with the sums of their episodes in arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Final, TypeVar, final

import gymnasium as gym
import numpy as np
import tree
from typing_extensions import override

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, EnvError, EpisodeTimeout, UsageError, summary_of
from rl_eval.records.determinism import Trace, action_digest
from rl_eval.records.episode import (
    EpisodeSpec,
    FaultCause,
    Lease,
    Outcome,
    Phase,
    Progress,
    RunReport,
    Truncation,
    first_seen,
)
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Flags
from rl_eval.runners.batched.vector_env import build_simulator
from rl_eval.runners.core import RunnerCore
from rl_eval.runners.environment import import_env
from rl_eval.supervision.caller import survivable
from rl_eval.supervision.flight_recorder import ACT, ALL_LANES, CLOSE, CONSTRUCT, RESET, STEP

Result = TypeVar("Result")
_SUCCESS: Final = ("is_success", "success")


@dataclass(slots=True)
class _Block:
    """Block of episodes that is running."""

    lease: Lease
    started: float
    next: int = 0
    """Number of its episodes that have started."""
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    infos: list[list[float]] = field(default_factory=list)

    def take(self) -> Lease:
        """Return the lease of the next episode."""
        offset, self.next = self.next, self.next + 1
        return self.lease._replace(index=self.lease.index + offset, seed=self.lease.block[offset], block=())

    @property
    def all_started(self) -> bool:
        """Whether every episode has started."""
        return self.next == len(self.lease.block)


@final
class BatchedEvalRunner(RunnerCore):
    """Runner of a :class:`BatchSimulator`: one forward pass and one call of the simulator for all live slots.

    The quota is by first started: a free slot gets the next lease, and is restarted with its seed. A slot without a
    lease is masked: its steps are never counted. An exception of a call for several slots is *suspected* for all of
    them, and the simulator is built again.

    With ``runners.block``, a lease is a block: one full reset seeds all its episodes, and a slot that restarts by
    itself runs the next one. A fault fails the block.
    """

    runs_blocks: ClassVar[bool] = True

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        _check_supported(settings)
        count, keys = settings.runners.lanes, len(self._info_keys(settings))
        self._leases: list[Lease | None] = [None] * count
        self._live: Flags = np.zeros(count, bool)
        self._lengths = np.zeros(count, np.int64)
        self._returns, self._discounted, self._discount = np.zeros(count), np.zeros(count), np.ones(count)
        self._success = np.full((2, count), -1, np.int64)
        """Success at any step, and at the last step that reported it."""
        self._infos = np.full((count, keys), np.nan)
        self._started, self._reset_seconds = np.zeros(count), np.zeros(count)
        self._clocks = np.zeros((2, count))
        """Readings of the inference clock and the step clock when the episodes started."""
        self._step_clock = 0.0
        self._traces: dict[int, Trace] = {}
        self._simulator: BatchSimulator | None = None
        self._spare: BatchSimulator | None = None
        """The runner's own simulator, while another one runs episodes that need a new one."""
        self._stale = False
        """Whether the simulator must not be used again."""
        self._blocks = settings.runners.block is not None
        self._block: _Block | None = None
        self._unused: list[int] = []
        """Slots of such a simulator that have run no episode."""
        super().__init__(settings, runner_index, policy)
        self._inference.observations.note = self._note_observation

    # ------------------------------------------------------------------ control

    @property
    @override
    def _any_live(self) -> bool:
        return bool(self._live.any())

    @override
    def _bound_to(self) -> dict[str, Any]:
        if not self._blocks or self._simulator is None:
            return {}
        width, block = self.settings.runners.lanes, self.settings.runners.block
        return {"guarantee": "layout", "adapter": self._simulator.name, "num_envs": width, "block": block}

    def foreach_env(self, function: Callable[[Any], Result]) -> list[Result]:
        """Call a function with the runner's own simulator, if it is built; return the result in a list."""
        own = self._spare or self._simulator
        return [function(own)] if own is not None else []

    @override
    def stop(self) -> None:
        self._close()
        self._simulator, self._spare = self._spare, None
        self._close()
        self._drop_policy()

    @override
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = perf_counter() + budget_s
        if self._accept(leases, reclaim, abort):
            return self._report()
        while True:
            if self._blocks:
                self._begin_block()
            else:
                self._restart()
            self._expire()
            self._reject_nan()
            if self._live.any() or self._block is not None:
                self._sweep()
            elif not self._queue or self._pending:
                break
            if perf_counter() >= deadline or self._starving():
                break
        return self._report()

    def _starving(self) -> bool:
        """Whether to report early: half the slots are idle, and no lease is left."""
        return not self._queue and bool(self._pending) and 2 * int(self._live.sum()) <= len(self._live)

    # ------------------------------------------------------------------ starts

    def _restart(self) -> None:
        """Start queued episodes in free slots."""
        if not self._queue:
            return
        free = self._free_slots(fresh=self._queue[0].fresh)
        slots = []
        while free and self._queue and self._queue[0].fresh == (self._spare is not None):
            slot, lease = free.pop(0), self._queue.popleft()
            self._begin(slot, lease)
            slots.append(slot)
        if not slots:
            return
        simulator, started = self._simulator, perf_counter()
        assert simulator is not None
        leases = [one for slot in slots if (one := self._leases[slot]) is not None]
        self._recorder.enter(RESET, slots[0] if len(slots) == 1 else ALL_LANES)
        try:
            specs = [EpisodeSpec(lease.index, lease.seed, lease.seating) for lease in leases]
            self._inference.observations.adopt(slots, simulator.restart(np.array(slots), specs))
        except survivable() as error:
            self._fail_together(slots, "reset", error)
            return
        seconds = perf_counter() - started
        self._pending.reset_seconds += seconds
        self._reset_seconds[slots] = seconds / len(slots)
        for slot, lease in zip(slots, leases, strict=True):
            self._inference.begin(slot, lease.seed)
            if lease.traced:
                trace = self._traces[slot] = Trace()
                trace.begin(self._inference.observations.row_content(slot))

    def _begin_block(self) -> None:
        """Reset the simulator for the next block, and start its first episodes."""
        if self._block is not None or not self._queue or (self._stale and self._pending):
            return
        if self._stale or self._simulator is None:
            self._replace(0)
        simulator, started = self._simulator, perf_counter()
        assert simulator is not None
        block = self._block = _Block(self._queue.popleft(), started)
        self._recorder.begin(0, block.lease.index, block.lease.seed, block.lease.attempt)
        self._recorder.enter(RESET)
        try:
            self._inference.observations.adopt(slice(0, simulator.num_envs), simulator.reset(block.lease.seed))
        except survivable() as error:
            self._fail_block("env", "reset", error)
            return
        self._pending.reset_seconds += perf_counter() - started
        for slot in range(min(simulator.num_envs, len(block.lease.block))):
            self._begin_in_block(slot, block)

    def _begin_in_block(self, slot: int, block: _Block) -> None:
        """Start the next episode of a block in a slot that has restarted."""
        lease = block.take()
        self._begin(slot, lease)
        self._reset_seconds[slot] = 0.0
        self._inference.begin(slot, lease.seed)
        # If the process dies, the block is lost.
        self._recorder.begin(slot, block.lease.index, block.lease.seed, block.lease.attempt)

    def _continue_block(self, step: BatchStep) -> None:
        """Start episodes in slots that have restarted; report the block when all its episodes have ended."""
        block = self._block
        if block is None:
            return
        if step.started is not None and not block.all_started:
            mask, observations = step.started
            slots = np.flatnonzero(mask & ~self._live[: len(mask)])[: len(block.lease.block) - block.next]
            self._inference.observations.adopt(slots, tree.map_structure(lambda leaf: leaf[slots], observations))
            for slot in slots.tolist():
                self._begin_in_block(slot, block)
        if block.all_started and not self._live.any():
            self._pending.rows += block.rows
            self._pending.infos += block.infos
            self._lifetime["episodes"] += len(block.rows)
            self._block = None

    def _begin(self, slot: int, lease: Lease) -> None:
        """Give a slot to an episode, with all sums at zero."""
        self._leases[slot], self._live[slot] = lease, True
        self._lengths[slot], self._returns[slot], self._discounted[slot], self._discount[slot] = 0, 0.0, 0.0, 1.0
        self._success[:, slot], self._infos[slot] = -1, np.nan
        self._started[slot], self._clocks[:, slot] = perf_counter(), (self._inference_clock, self._step_clock)
        self._recorder.begin(slot, lease.index, lease.seed, lease.attempt)

    def _free_slots(self, *, fresh: bool) -> list[int]:
        """Return the slots that may start an episode, in a simulator that is fit for it; build it if necessary.

        Episodes that need a new environment share a simulator that is as wide as there are such episodes.
        """
        fits = not self._stale and (bool(self._unused) if fresh else self._spare is None)
        if not fits and (self._live.any() or self._pending):
            return []  # A simulator is closed after its episodes have been reported: close() may hang or kill.
        if self._stale or not fits:
            self._replace(sum(lease.fresh for lease in self._queue) if fresh else 0)
        if fresh:
            free, self._unused = self._unused, []
            return free
        return np.flatnonzero(~self._live).tolist()

    def _replace(self, wanted: int) -> None:
        """Use another simulator: the runner's own, or a new one for ``wanted`` episodes, beside the runner's own."""
        if self._spare is not None or self._stale:
            self._close()
            self._simulator, self._spare, self._stale = self._spare, None, False
        if self._simulator is None:
            self._simulator = self._build(len(self._live))
        if wanted:
            self._spare = self._simulator
            self._simulator = self._build(min(wanted, len(self._live)))
            self._unused = list(range(self._simulator.num_envs))

    def _build(self, num_envs: int) -> BatchSimulator:
        self._recorder.enter(CONSTRUCT)
        started = perf_counter()
        runners = self.settings.runners.num_runners
        section = self.settings.environment
        simulator = build_simulator(section, self.runner_index, runners, num_envs, blocks=self._blocks)
        self._pending.constructed(perf_counter() - started)
        for note in simulator.notes:
            self._pending.note(note)
        self._recorder.idle()
        return simulator

    @override
    def _first_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        attempts, section = self.settings.fault_tolerance.max_attempts_per_episode, self.settings.environment
        import_env(section)
        for attempt in range(1, attempts + 1):
            try:
                self._simulator = self._build(len(self._live))
                break
            except UsageError:
                raise
            except survivable() as error:
                if attempt == attempts:
                    raise EnvError(
                        f"environment.env is {section.env!r}: it cannot be constructed ({attempts} attempts): "
                        f"{summary_of(error)}",
                        key="environment.env",
                        value=section.env,
                        runner=self.runner_index,
                    ) from error
        assert self._simulator is not None
        return self._simulator.observation_space, self._simulator.action_space

    # ------------------------------------------------------------------ steps

    def _sweep(self) -> None:
        """Choose actions for all live slots, and step the simulator."""
        started, live = perf_counter(), max(1, int(self._live.sum()))
        self._recorder.enter(ACT)
        actions, errors = self._inference.act_together()
        acted = perf_counter()
        self._pending.inference_seconds += acted - started
        self._inference_clock += (acted - started) / live
        for slot, error in errors.items():
            self._inference.observations.clear(slot)
            self._fault(slot, "policy", "act", error)
        acting, simulator = np.flatnonzero(self._live), self._simulator
        assert simulator is not None
        if len(acting):
            actions = _filled(actions, acting, simulator.num_envs)
        elif self._block is not None:
            actions = self._idle_actions(simulator)  # All slots restart in this step.
        else:
            return
        self._recorder.enter(STEP, int(acting[0]) if len(acting) == 1 else ALL_LANES)
        try:
            step = simulator.step(actions)
            self._inference.observations.adopt(slice(0, simulator.num_envs), step.observations)
        except survivable() as error:
            self._fail_together(acting.tolist(), "step", error)
            return
        self._step_clock += (perf_counter() - acted) / max(1, len(acting))
        self._add(step, actions)
        self._continue_block(step)

    def _idle_actions(self, simulator: BatchSimulator) -> Any:
        """Return valid actions of all slots, which have no effect."""
        space = gym.vector.utils.batch_space(simulator.action_space, simulator.num_envs)
        space.seed(0)
        return space.sample()

    def _add(self, step: BatchStep, actions: Any) -> None:
        """Add a step to the sums of the live slots, and finish the episodes that it ends."""
        width, count = len(step.rewards), len(self._live)
        rewards = np.zeros(count)
        rewards[:width] = np.where(self._live[:width], step.rewards, 0.0)
        self._lengths += self._live
        if not np.isfinite(rewards.sum()):
            for slot in np.flatnonzero(~np.isfinite(rewards)).tolist():
                text = f"the reward of step {self._lengths[slot]} is {rewards[slot]}, which is not a finite number"
                self._fault(slot, "env", "step", EnvError(text, key="reward", value=float(rewards[slot])))
                rewards[slot] = 0.0
        live = self._live[:width]
        self._returns += rewards
        if self._discounting:
            self._discounted += self._discount * rewards
            self._discount *= self._gamma
        self._read_infos(step)
        for slot, trace in self._traces.items():
            if not trace.full:
                chosen = action_digest(tree.map_structure(lambda leaf, slot=slot: leaf[slot], actions))
                content = self._inference.observations.row_content(slot)
                trace.add(chosen, step.rewards[slot], step.terminated[slot], step.truncated[slot], content)
        ended = step.terminated | step.truncated | (self._lengths[:width] >= self._max_steps)
        for slot in np.flatnonzero(live & ended).tolist():
            self._finish(slot, bool(step.terminated[slot]), bool(step.truncated[slot]))

    def _read_infos(self, step: BatchStep) -> None:
        """Record success and the configured scalars of the step's infos."""
        found = next((read for key in _SUCCESS if (read := step.values(key)) is not None), None)
        if found is not None:
            values, mask = found[0].astype(np.int64), found[1] & self._live[: len(step.rewards)]
            once, last = self._success[:, : len(mask)]
            last[mask] = values[mask]
            once[mask] = np.maximum(once[mask], values[mask])
        for column, key in enumerate(self._pending.info_keys):
            if (read := step.values(key)) is not None:
                mask = read[1] & self._live[: len(step.rewards)]
                self._infos[: len(mask), column][mask] = read[0][mask]

    def _finish(self, slot: int, terminated: bool, truncated: bool) -> None:
        """Write the row of a completed episode, and free its slot."""
        lease = self._leases[slot]
        assert lease is not None
        total = float(self._returns[slot])
        if not np.isfinite(total):
            text = f"the sum of the rewards is {total}: they are too large for a float"
            self._fault(slot, "env", "step", EnvError(text, key="reward", value=total))
            return
        cut = Truncation.ENVIRONMENT if truncated else Truncation.NONE
        if not (terminated or truncated):
            cut = Truncation.MAX_EPISODE_STEPS
        inference_seconds, step_seconds = (self._inference_clock, self._step_clock) - self._clocks[:, slot]
        once, last = self._success[:, slot].tolist()
        row = (
            *(lease.index, lease.seed, total, float(self._discounted[slot]) if self._discounting else total),
            *(int(self._lengths[slot]), terminated, bool(cut), cut, once, last, Outcome.COMPLETED, lease.attempt),
            *(self.runner_index, self._weights_version, self._reset_seconds[slot], step_seconds, inference_seconds),
        )
        if self._block is not None:
            self._block.rows.append(row)
            self._block.infos.append(self._infos[slot].tolist())
            self._free(slot)
            return
        self._pending.rows.append(row)
        self._pending.infos.append(self._infos[slot].tolist())
        if slot in self._traces:
            self._pending.traces[lease.index] = self._traces[slot].rows
        self._lifetime["episodes"] += 1
        self._free(slot)

    # ------------------------------------------------------------------ faults

    def _fault(self, slot: int, cause: FaultCause, phase: Phase, error: BaseException, *, charged: bool = True) -> None:
        """Record a fault, and free the slot; with blocks, fail the block."""
        if self._blocks:
            self._fail_block(cause, phase, error, slot)
            return
        lease = self._leases[slot]
        assert lease is not None
        place, seconds = (cause, phase, int(self._lengths[slot])), perf_counter() - float(self._started[slot])
        self._add_fault(lease, place, error, seconds, charged=charged)
        self._free(slot)

    def _fail_together(self, slots: list[int], phase: Phase, error: BaseException) -> None:
        """Record the fault of a call for some slots, give back the other episodes, and drop the simulator.

        Raises:
            BaseException: The error, if no slot had an episode: it is the simulator's own.
        """
        if self._blocks:
            self._fail_block("env", phase, error)
            return
        if not slots:
            raise error
        for slot in slots:
            self._fault(slot, "env", phase, error, charged=len(slots) == 1)
        self._drop_live()
        self._stale = True

    def _fail_block(self, cause: FaultCause, phase: Phase, error: BaseException, slot: int | None = None) -> None:
        """Record the fault of the block, with the steps of the slot that caused it, if there still is a block."""
        block, self._block = self._block, None
        if block is None:
            return
        place = cause, phase, int(self._lengths[slot]) if slot is not None else 0
        self._add_fault(block.lease, place, error, perf_counter() - block.started)
        for other in np.flatnonzero(self._live).tolist():
            self._free(other)
        self._stale = self._stale or cause != "policy"

    @override
    def _drop_live(self) -> None:
        if self._block is not None:
            self._pending.returned.append(self._block.lease.index)
            self._block = None
            for slot in np.flatnonzero(self._live).tolist():
                self._free(slot)
            return
        for slot in np.flatnonzero(self._live).tolist():
            lease = self._leases[slot]
            assert lease is not None
            self._pending.returned.append(lease.index)
            self._free(slot)

    def _free(self, slot: int) -> None:
        self._pending.count(int(self._lengths[slot]), self._step_clock - float(self._clocks[1, slot]))
        self._leases[slot], self._live[slot] = None, False
        self._traces.pop(slot, None)
        self._recorder.end(slot)
        self._inference.end(slot)

    def _close(self) -> None:
        """Close the simulator, if there is one."""
        simulator, self._simulator, self._unused = self._simulator, None, []
        if simulator is None:
            return
        self._recorder.enter(CLOSE)
        try:
            simulator.close()
        except survivable():
            # A broken close() is not a fault of an episode, and the simulator is dropped in any case.
            self._lifetime["close_errors"] += 1
        self._recorder.idle()

    def _expire(self) -> None:
        """End attempts that exceed their wall-clock limit. Check ten times a second, between steps."""
        limit, now = self.settings.fault_tolerance.episode_timeout_s, perf_counter()
        if limit is None or now < self._next_expiry:
            return
        self._next_expiry = now + 0.1
        key = "fault_tolerance.episode_timeout_s"
        for slot in np.flatnonzero(self._live & (now - self._started > limit)).tolist():
            text = f"the attempt ran {now - self._started[slot]:.1f} s, longer than {key}={limit}"
            self._fault(slot, "timeout", "run", EpisodeTimeout(text, key=key, value=limit, runner=self.runner_index))

    def _reject_nan(self) -> None:
        """Record a fault for each episode with a NaN or infinite observation, before the policy sees it."""
        observations = self._inference.observations
        for slot in observations.nonfinite_rows(self._inference.live):
            text = observations.describe_nonfinite(slot)
            observations.clear(slot)
            self._fault(slot, "env", "step" if self._lengths[slot] else "reset", EnvError(text, key="observation"))
        observations.look_outside(self._inference.live)

    # ------------------------------------------------------------------ the report

    def _note_observation(self, row: int, text: str, shown: str) -> None:
        """Add a note on the observation of a slot."""
        lease = self._leases[row]
        if lease is not None:
            self._pending.note(first_seen(text, lease.index, int(self._lengths[row]), shown))

    def _report(self) -> RunReport:
        """Return a report of everything since the last report."""
        self._recorder.idle()
        inference, slots = self._inference, np.flatnonzero(self._live)
        live = [
            Progress(lease.index, lease.attempt, int(self._lengths[slot]))
            for slot in slots.tolist()
            if (lease := self._leases[slot]) is not None
        ]
        if self._block is not None and not live:
            live = [Progress(self._block.lease.index, self._block.lease.attempt, 0)]
        seconds = float((self._step_clock - self._clocks[1, slots]).sum())
        report = self._pending.take(
            tuple(live), seconds, self._weights_version, inference.numerics, inference.notes, ()
        )
        self._lifetime["env_steps"] += report.env_steps
        inference.forget_notes()
        return report


def _filled(actions: Any, acting: Any, width: int) -> Any:
    """Return the actions of all slots; those without an episode get a valid one.

    Args:
        actions: Nested arrays with at least one row for each slot.
        acting: Slots with an episode.
        width: Number of slots.
    """
    if isinstance(actions, np.ndarray):
        if len(acting) == width:
            return actions[:width]
        filled = np.repeat(actions[acting[:1]], width, axis=0)
        filled[acting] = actions[acting]
        return filled
    return tree.map_structure(lambda leaf: _filled(leaf, acting, width), actions)


def _check_supported(settings: EvalSettings) -> None:
    """Raise for settings of single environments.

    Raises:
        ConfigError: One is set.
    """
    environment, evaluation = settings.environment, settings.evaluation
    unsupported = {
        "environment.wrappers": environment.wrappers,
        "environment.action_masks": environment.action_masks,
        "environment.env_reuse": environment.env_reuse == "episode" and "episode",
        "evaluation.observers": evaluation.observers,
    }
    for key, value in unsupported.items():
        if value:
            raise ConfigError(
                f"{key} applies to single environments, but runners.runner=batched steps all slots in one call",
                key=key,
                value=value,
                fix="Remove it, or set runners.runner: vector.",
            )
