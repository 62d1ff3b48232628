"""Runner with one process per environment. A slow environment does not delay the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from time import perf_counter
from typing import Any, ClassVar, Final, TypeVar, final

import gymnasium as gym
from typing_extensions import override

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, EpisodeTimeout
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.pass_times import PassTimes
from rl_eval.records.episode import EpisodeSpec, Lease, Phase, RunReport
from rl_eval.runners.base import LEAST_WAIT_S, LOOK_S, EvalRunner
from rl_eval.runners.facts import RunnerFacts
from rl_eval.runners.interpreter import PYTHON, interpreter_of, is_ours
from rl_eval.runners.lane import Lane
from rl_eval.runners.slot_process import CallLimit, SlotEnv, SlotProcess, slot_env_of, value_of
from rl_eval.runners.slot_worker import BEGIN, CONSTRUCT
from rl_eval.runners.values import read_reset

_GRACE_S: Final = 5.0
"""Seconds to wait for the reply to an abandoned request, before the process is killed."""
_STOP_S: Final = 2.0

Result = TypeVar("Result")


@final
class SubprocessEvalRunner(EvalRunner):
    """Runner with one process per slot, and one forward pass for all slots that wait for an action.

    Use it for simulators that take milliseconds per step, especially if the time per step varies. Records are the same
    as those of any other runner, since an action does not depend on the other rows of its forward pass. If a slot's
    process ends (by a signal, ``os._exit`` or a deadline), its episode gets a fault; other slots continue. The
    processes end with the runner.
    """

    _inference: RowInference
    facts: ClassVar[RunnerFacts] = RunnerFacts(unit="process")

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        self._slots = [
            SlotProcess(interpreter_of(settings, runner_index, lane_index), self._add_generator)
            for lane_index in range(self.facts.lanes(settings))
        ]
        self._coming: dict[int, SlotEnv] = {}
        """New environments, by slot, until their first reset has returned."""
        self._num_envs = 0
        self._versions: dict[str, str] = {}
        """Versions of the packages in another interpreter, from the first environment."""
        self._asking: dict[int, None] = {}
        """Slots that wait for an action, in the order of their replies."""
        self._times = PassTimes(len(self._slots), patient=settings.policy.inference != "batched")
        self._ready_since = 0.0
        """Time since which slots wait for the next pass."""
        self._actions: dict[int, Any] = {}
        self._outputs: dict[int, Any] = {}
        try:
            self._slots[0].start(
                _start_limit(settings)
            )  # The imports of the process are not time of the first construction.
            super().__init__(settings, runner_index, policy)
            self._defer()
        except BaseException:
            self._end_processes()
            raise

    @override
    def _first_observations(self, specs: Sequence[EpisodeSpec]) -> list[Any]:
        env: Any = self.slots[0].env
        found = []
        for spec in specs:
            slot_env_of(env).begin(spec, _constructor_limit(self.settings))
            found.append(read_reset(env.reset(**spec.reset_arguments)))
        return found

    # ------------------------------------------------------------------ the loop

    @override
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        deadline = perf_counter() + budget_s
        if self.accept(leases, reclaim, abort):
            return self.report()
        patience = LEAST_WAIT_S
        while True:
            self._enforce_deadlines()
            self._refill()
            self._act()
            if not (self._awaited or any(slot.busy for slot in self._slots)):
                if not (self.queue or self._asking):
                    break
            else:
                self._receive(max(deadline - perf_counter(), patience))
            patience = 0.0
            if perf_counter() >= deadline or self._starving():
                # The slots continue while this runner reports.
                self._refill()
                self._act()
                break
        return self.report()

    def _refill(self) -> None:
        """Send the resets of queued episodes to free slots."""
        for lane in self.slots if self.queue else ():
            if self.queue and lane.lease is None and not self._slots[lane.index].busy:
                self.begin(lane)

    def begin(self, lane: Lane) -> bool:
        """Send the reset of the next queued attempt. The attempt starts when the reply comes."""
        lane.lease = self.queue.popleft()
        lane.begin(self._inference_clock)
        if lane.stale or lane.lease.how.fresh:  # The process never has two environments.
            self._close(lane)
        coming = None if lane.env is not None else self._numbered(lane.index)
        if coming is not None:
            self._coming[lane.index] = coming
        (coming or slot_env_of(lane.env)).ask_reset(lane.lease)
        return True

    def _act(self) -> None:
        """Choose actions for all slots that wait for one, and send them."""
        self._expire()
        self._reject_nan()
        if self._requests is None:
            actions: Iterable[tuple[Lane, Any]] = self._acted() if self._asking and self._patience() <= 0 else ()
        else:
            actions = self._exchanged() if self._asking or self._requests.awaited else ()
        for lane, action in actions:
            self._send_action(lane, action)

    def _patience(self) -> float:
        """Return for how many seconds the policy waits for more slots, as a slow pass takes as long for fewer rows.

        A pass begins with a full block, after half of the last pass's time, or if no environment is busy. The actions
        do not depend on it, since rows do not depend on each other. With ``policy.inference`` ``batched``, they may.
        """
        if not self._times.slow or len(self._asking) >= self._full or not any(slot.busy for slot in self._slots):
            return 0.0
        return self._ready_since + self._times.last_s / 2 - perf_counter()

    @property
    def _full(self) -> int:
        """Number of slots with which a pass is full."""
        return self._times.full(self._inference.rows_per_pass)

    def _acted(self) -> list[tuple[Lane, Any]]:
        """Run a pass for slots that wait, at most a full one; return pairs of slot and action."""
        self._inference.in_blocks = self._times.slow
        waiting = sorted(list(self._asking)[: self._full])
        for index in waiting:
            del self._asking[index]
        started = perf_counter()
        self._inference.ask(waiting)
        actions = list(self._answered())
        self._ready_since = perf_counter()
        seconds = self._ready_since - started
        self._times.note(len(waiting), seconds)
        self._pending.inference_seconds += seconds
        self._inference_clock += seconds / sum(lane.lease is not None for lane in self.slots)
        return actions

    def _exchanged(self) -> Iterator[tuple[Lane, Any]]:
        """Send the rows of slots that wait for an action; yield pairs of slot and action for answers.

        The time of an episode in the policy is the time for which it waited for answers.
        """
        now, asking = perf_counter(), sorted(self._asking)
        self._asking.clear()
        for index in asking:
            self.slots[index].asked = now
        if asking:
            self._inference.ask(asking)
        for lane, action in self._answered():
            waited = perf_counter() - lane.asked
            self._pending.inference_seconds += waited
            lane.inference_started -= waited
            yield lane, action

    def _send_action(self, lane: Lane, action: Any) -> None:
        # Other slots act before the reply comes, so keep a copy of the values for observers.
        self._actions[lane.index] = copy.deepcopy(action)
        if lane.observed is not None:
            self._outputs[lane.index] = copy.deepcopy(self._inference.outputs(lane.index))
        slot_env_of(lane.env).ask_step(action)

    def _receive(self, timeout_s: float) -> None:
        """Wait for replies, and process those that have come."""
        busy = [lane for lane in self.slots if self._slots[lane.index].busy]
        found = [lane for lane in busy if self._slots[lane.index].has_stash]
        if not found:
            lane_of: dict[Any, Lane] = {self._slots[lane.index].connection: lane for lane in busy}
            policy = [self._requests.policy.fileno()] if self._requests is not None and self._requests.awaited else []
            if self._asking:
                timeout_s = min(timeout_s, max(self._patience(), 0.0))
            ready = wait([*lane_of, *policy], min(timeout_s, LOOK_S))
            found = [lane_of[one] for one in ready if one in lane_of]
        for lane in found:
            self._take(lane)
        self._recorder.idle()

    def _take(self, lane: Lane) -> None:
        """Process the reply of a slot: its episode starts, continues or ends."""
        slot = self._slots[lane.index]
        doing, asked = slot.doing, slot.since
        reply = slot.poll()
        if reply is None or lane.lease is None:
            return
        self._turn_started = perf_counter()
        (self._coming.get(lane.index) or slot_env_of(lane.env)).reply = reply
        if doing == BEGIN:
            self._check_versions(slot.facts.get("provenance", self._versions))
            started = slot.since  # After the construction, if the process first built an environment.
            alive = self._try_env_reset(lane)
            if alive:
                waited = perf_counter() - started
                self._pending.reset_seconds += waited - lane.reset_seconds
                lane.started, lane.reset_seconds = started, waited
        else:
            lane.step_seconds += reply.seconds or perf_counter() - asked
            alive = self._try_env_step(lane, self._actions.pop(lane.index))
        if alive:
            if not self._asking:
                self._ready_since = perf_counter()
            self._asking[lane.index] = None

    def _check_versions(self, versions: dict[str, str]) -> None:
        """Raise if the interpreter of a slot has other versions than that of the first environment."""
        if versions != self._versions:
            problem = f"{PYTHON}: one slot has {versions}, but the first one had {self._versions}"
            raise ConfigError(problem, key=PYTHON, value=versions, fix="Use one installation for all slots.")

    def _starving(self) -> bool:
        """Whether to report early: half the slots are idle and no leases are queued."""
        if self.queue or not self._pending:
            return False
        return 2 * sum(lane.lease is None for lane in self.slots) >= len(self.slots)

    # ------------------------------------------------------------------ deadlines

    def _enforce_deadlines(self) -> None:
        """Kill each process that exceeds a time limit, and record a fault of its episode."""
        now = perf_counter()
        for lane, slot in zip(self.slots, self._slots, strict=True):
            if not slot.busy:
                continue
            if slot.abandoned:
                if now - slot.since > _GRACE_S:
                    slot.kill()
            elif (found := self._limit(slot)) is not None and now - slot.since > found.seconds and not slot.has_reply:
                if slot.closing:
                    slot.ask_again()
                else:
                    self._charge_deadline(lane, slot, found)

    def _limit(self, slot: SlotProcess) -> CallLimit | None:
        """Return the lowest time limit of a request; None if no limit is set.

        The start of a process is always limited. So is a constructor.
        """
        if not slot.started:
            return _start_limit(self.settings)
        faults = self.settings.fault_tolerance
        keys = ("reset_timeout_s" if slot.doing == BEGIN else "step_timeout_s", "runner_timeout_s")
        found = [CallLimit(f"fault_tolerance.{key}", limit) for key in keys if (limit := getattr(faults, key))]
        if not found and slot.constructing:
            found = [_start_limit(self.settings)]
        return min(found, key=lambda limit: limit.seconds, default=None)

    def _charge_deadline(self, lane: Lane, slot: SlotProcess, limit: CallLimit) -> None:
        phase: Phase = "reset" if slot.doing == BEGIN else "step"
        slot.kill()
        self._discard(lane)
        assert lane.lease is not None
        error = EpisodeTimeout(
            f"the {phase} took longer than {limit.key}={limit.seconds:g}; the process was terminated",
            key=limit.key,
            value=limit.seconds,
            episode=lane.lease.index,
            runner=self.runner_index,
        )
        self.fail(lane.index, "timeout", phase, error)

    @override
    def _expire(self) -> None:
        for lane, slot in zip(self.slots, self._slots, strict=True):
            if slot.constructing:
                lane.started = perf_counter()  # Construction does not count as time of an episode.
        super()._expire()

    def _discard(self, lane: Lane) -> None:
        """Drop the pending requests of an attempt."""
        self._coming.pop(lane.index, None)
        self._asking.pop(lane.index, None)
        self._actions.pop(lane.index, None)

    @override
    def _end(self, lane: Lane) -> None:
        slot = self._slots[lane.index]
        if slot.busy:  # The attempt ends before its reply comes.
            slot.abandon()
        self._discard(lane)
        super()._end(lane)

    # ------------------------------------------------------------------ environments

    @override
    def _new_sensor(self) -> None:
        return None  # The process of a slot has its own sensor.

    def make_env(self, lane_index: int) -> gym.Env[Any, Any]:
        """Return the environment that was built in the slot's process.

        Raises:
            BaseException: The constructor raised it.
        """
        env: Any = self._coming.pop(lane_index, None)
        if env is None:
            env = self._numbered(lane_index)
            env.build(_constructor_limit(self.settings))
        elif env.reply.phase == CONSTRUCT:
            if (lease := self.slots[lane_index].lease) is not None and lease.how.fresh:
                self._slots[lane_index].kill()  # A new process may be able to build the next environment.
            value_of(env.reply)
        section = self.settings.environment
        ours = {f"environment.wrappers[{place}]": one for place, one in enumerate(section.wrappers) if is_ours(one)}
        return env if section.python is None or not ours else env.wrapped(ours)  # type: ignore[no-any-return]

    def _construct(self, lane_index: int) -> gym.Env[Any, Any]:
        env = self.make_env(lane_index)
        slot = self._slots[lane_index]
        self._versions = self._versions or slot.facts.get("provenance", {})
        self._pending.tracing.constructed(slot.build_seconds)
        self._note_limit(slot.facts["time_limit"])
        return env

    def _numbered(self, lane_index: int) -> SlotEnv:
        self._num_envs += 1
        return SlotEnv(self._slots[lane_index], self._num_envs)

    @override
    def _bound_to(self) -> dict[str, Any]:
        """Return the versions of the packages of another interpreter."""
        return {f"environment/{name}": value for name, value in self._versions.items()}

    @override
    def _outputs_of(self, slot: int) -> Any:
        return self._outputs.get(slot)

    @override
    def foreach_env(self, function: Callable[[Any], Result] | str) -> list[Result]:
        """Call a function with each environment in its process; see :meth:`EvalRunner.foreach_env`.

        Args:
            function: The function, or the name of an attribute. Another interpreter takes only a name.
        """
        return [env.get(function) if isinstance(function, str) else env.call(function) for env in self._envs()]

    def _envs(self) -> Iterator[SlotEnv]:
        for lane in self.slots:
            if lane.env is not None:
                yield slot_env_of(lane.env)

    def stop(self) -> None:
        """Close all environments and end their processes."""
        super().stop()
        self._end_processes()

    def _end_processes(self) -> None:
        for slot in self._slots:
            slot.finish()
        deadline = perf_counter() + _STOP_S
        for slot in self._slots:
            slot.join(deadline - perf_counter())


def _start_limit(settings: EvalSettings) -> CallLimit:
    return CallLimit("runners.runner_start_timeout_s", settings.runners.runner_start_timeout_s)


def _constructor_limit(settings: EvalSettings) -> CallLimit:
    """Return the time limit of the first constructor."""
    limit = settings.fault_tolerance.reset_timeout_s
    return CallLimit("fault_tolerance.reset_timeout_s", limit) if limit else _start_limit(settings)
