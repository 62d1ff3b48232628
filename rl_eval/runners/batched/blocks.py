"""Runner of blocks of episodes: one reset seeds all slots, and each slot restarts by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Final, final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from rl_eval.errors import EnvError, UsageError
from rl_eval.policies.inference.spaces import take_rows
from rl_eval.records.determinism import Trace, action_digest
from rl_eval.records.episode import PROGRESS, Lease, Phase
from rl_eval.runners.batched.runner import BatchedEvalRunner, lane_of_call
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, Reported
from rl_eval.runners.core import Attempt
from rl_eval.runners.facts import RunnerFacts
from rl_eval.runners.report import PendingReport
from rl_eval.supervision.caller import survivable
from rl_eval.supervision.flight_recorder import RESET

_MAX_IDLE_STEPS: Final = 1_000
_TRACED_STEPS: Final = 1_000
"""Maximum number of steps of a block in its trace. A row of a trace takes less than 32 bytes."""
_ALL: Final = -1
"""Key of the digest of all slots' actions."""


@dataclass(slots=True)
class _Block:
    """Block of episodes that is running."""

    lease: Lease
    started: float
    completed: PendingReport
    """Completed episodes of the block. They are reported when the block ends."""
    next: int = 0
    """Number of episodes of the block that have started."""
    idle_steps: int = 0
    """Number of steps since the last live episode ended; 0 while an episode is live."""
    trace: Trace | None = None
    """Trace of all slots; None if the lease requests no trace."""

    def take(self, count: int) -> list[Lease]:
        """Return the leases of the next episodes, at most ``count``."""
        specs = self.lease.how.block[self.next : self.next + count]
        self.next += len(specs)
        held = self.lease.with_how(block=(), traced=False)
        return [held._replace(spec=spec) for spec in specs]

    @property
    def all_started(self) -> bool:
        """Whether every episode has started."""
        return self.next == len(self.lease.how.block)


@final
class BlockEvalRunner(BatchedEvalRunner):
    """Batched runner for ``runners.block``: a lease is a block of episodes.

    One full reset seeds all episodes of a block, and a slot that restarts by itself runs the block's next episode. A
    fault fails the whole block.
    """

    facts: ClassVar[RunnerFacts] = RunnerFacts(unit="block", conditions=False, sweeps=True)
    _block: _Block | None = None

    @override
    def _sweep_log(self) -> None:
        return None  # A block that fails withdraws its finished episodes; the log of sweeps cannot do that.

    @override
    def _layout_of(self, simulator: BatchSimulator) -> dict[str, Any]:
        runners = self.settings.runners
        layout = {"adapter": simulator.name, "num_envs": self.lanes}
        return layout | {"guarantee": "layout", "block": runners.block}

    @property
    @override
    def _completed(self) -> PendingReport:
        assert self._block is not None
        return self._block.completed

    @override
    def _start(self) -> None:
        """Reset the simulator for the next block, and start the block's first episodes."""
        if self._block is not None or not self.queue or not self._make_room(self.queue[0].with_how(alone=False)):
            return
        lease = self.queue.popleft().with_how(alone=False)
        self._block = _Block(lease, perf_counter(), PendingReport(self._pending.info_keys))
        self._hold_lane(lease)
        phase: Phase = "construct"
        try:
            simulator = self._simulator_for(lease, len(self._leases))
            phase, started = "reset", perf_counter()
            self._recorder.enter(RESET, lane_of_call(simulator.num_envs))
            observations = self._sensed("reset", simulator.reset, lease.seed)
            self._inference.observations.adopt(slice(0, simulator.num_envs), observations)
        except UsageError:
            raise
        except survivable() as error:
            self._fail_together((), phase, error)
            return
        self._pending.reset_seconds += perf_counter() - started
        self._start_episodes(list(range(simulator.num_envs)), self._block)
        if lease.how.traced:
            self._block.trace = Trace(_TRACED_STEPS + 1)
            self._block.trace.begin(self._inference.observations.row_content(self._attempts.slots))

    def _start_episodes(self, slots: list[int], block: _Block) -> None:
        """Start the next episodes of a block in slots that have restarted, until the block has no more episodes."""
        leases, held = block.take(len(slots)), block.lease
        slots = slots[: len(leases)]
        self._begin(slots, leases)
        for slot, lease in zip(slots, leases, strict=True):
            self._recorder.begin(slot, held.index, held.seed, held.attempt)  # If the process dies, the block fails.
            self._begin_slot(slot, lease)

    @override
    def _digests(self, actions: Any) -> dict[int, int]:
        trace = None if self._block is None else self._block.trace
        return {} if trace is None or trace.full else {_ALL: action_digest(actions)}

    def _trace(self, trace: Trace, step: BatchStep, digest: int) -> None:
        """Add a step of all slots to the trace of the block."""
        slots = self._attempts.slots
        rewards, terminated, truncated = (part[slots] for part in (step.rewards, step.terminated, step.truncated))
        parts = (
            self._inference.observations.row_content(slots),
            *(one.tobytes() for one in (rewards, terminated, truncated)),
        )
        trace.add(digest, rewards.sum(), terminated.any(), truncated.any(), b"".join(parts))

    @override
    def _add(self, step: BatchStep, reported: Reported, digests: dict[int, int]) -> None:
        if (block := self._block) is not None and block.trace is not None and _ALL in digests:
            self._trace(block.trace, step, digests.pop(_ALL))
        super()._add(step, reported, digests)
        if (block := self._block) is None:
            return
        if block.trace is not None and 0 < block.lease.how.steps < len(block.trace):
            self._report_trace(block)
            self._end_block()
            self._free(self._live_slots())
            return
        if step.started is not None and not block.all_started:
            mask, observations = step.started
            slots = np.flatnonzero(mask & ~self._attempts.live[: len(mask)])[: len(block.lease.how.block) - block.next]
            try:
                self._inference.observations.adopt(slots, take_rows(observations, slots))
            except survivable() as error:
                self._fail_together((), "step", error)
                return
            self._start_episodes(slots.tolist(), block)
        self._check_end(block)

    def _check_end(self, block: _Block) -> None:
        """Report the block if all its episodes have ended; fail the block if the slots no longer restart."""
        block.idle_steps = 0 if len(self._attempts.slots) else block.idle_steps + 1
        if block.idle_steps and block.all_started:
            self._report_trace(block)
            self._pending.extend(block.completed)
            self._end_block()
        elif block.idle_steps > _MAX_IDLE_STEPS:
            text = f"no episode was running, and no slot started one in {_MAX_IDLE_STEPS} steps"
            fix = "Return the mask and the first observations as BatchStep.started."
            if self._max_steps < math.inf:
                fix = (
                    "Set the step limit in the simulator instead of evaluation.max_episode_steps: a slot restarts only "
                    "when the simulator ends its episode."
                )
            self._fail_together((), "step", EnvError(text, key="started", fix=fix))

    def _report_trace(self, block: _Block) -> None:
        if block.trace is not None:
            self._pending.tracing.traces[block.lease.index] = block.trace.rows

    def _hold_lane(self, lease: Lease) -> None:
        """Begin a block in lane 0 of the flight recorder.

        If the process dies while no slot has an episode, the fault is attributed to the block.
        """
        self._recorder.begin(0, lease.index, lease.seed, lease.attempt)

    @override
    def _free(self, slots: Sequence[int]) -> None:
        super()._free(slots)
        if 0 in slots and self._block is not None:
            self._hold_lane(self._block.lease)

    def _end_block(self) -> None:
        self._block = None
        self._recorder.end(0)

    @property
    @override
    def _busy(self) -> bool:
        return self._block is not None

    @override
    def _units(self) -> list[int]:
        return [] if self._block is None else [0]

    @override
    def _held(self, slot: int) -> Attempt | None:
        if (block := self._block) is None:
            return None
        return Attempt(block.lease, self._attempts.length(slot) if self._attempts.live[slot] else 0, block.started)

    @override
    def _drop(self, slot: int) -> None:
        self._end_block()
        self._free(self._live_slots())

    @override
    def _spoil(self, slot: int) -> None:
        self._simulator.reject()

    @override
    def _fail_alone(self, slot: int, phase: Phase, error: EnvError) -> None:
        self.fail(slot, "env", phase, error)

    @override
    def _fail_together(self, slots: Sequence[int], phase: Phase, error: BaseException) -> None:
        self._free(self._live_slots())  # No single episode is the cause.
        self.fail(0, "env", phase, error)

    @override
    def _progress(self) -> tuple[npt.NDArray[np.void], float]:
        live, seconds = super()._progress()
        if self._block is None or len(live):
            return live, seconds
        return np.array([(self._block.lease.index, self._block.lease.attempt, 0)], PROGRESS), seconds
