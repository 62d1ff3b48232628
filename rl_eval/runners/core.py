"""Core of all runners: settings, policy, weights, queue and report, without the environments.

:class:`~rl_eval.runners.base.EvalRunner` adds environments that are stepped one at a time.
:class:`~rl_eval.runners.batched.runner.BatchedEvalRunner` adds a simulator that steps all slots in one call.
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
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from rl_eval.config.references import named_factories
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, EnvError, EpisodeTimeout, EvalError, UsageError, WeightsError, summary_of
from rl_eval.errors.redaction import learn
from rl_eval.policies import adapt_policy, has_random_weights
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.protocol import Inference
from rl_eval.policies.inference.spaces import TEXTS
from rl_eval.protocols import Policy
from rl_eval.records.episode import (
    EpisodeRecord,
    EpisodeSpec,
    Fault,
    FaultCause,
    Lease,
    Outcome,
    Phase,
    RunReport,
    Truncation,
    first_seen,
    record_of,
)
from rl_eval.records.generators import GeneratorSensor
from rl_eval.records.guarantee import NUMERICS, is_served
from rl_eval.runners.environment import import_env
from rl_eval.runners.facts import RunnerFacts
from rl_eval.runners.metrics import metric_functions, scalar_columns
from rl_eval.runners.observers import Factory, ObservedSlot
from rl_eval.runners.report import PendingReport
from rl_eval.runners.values import ValueReader
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.caller import current_folder, end_fork, survivable, working_in
from rl_eval.supervision.flight_recorder import CONSTRUCT, flight_recorder
from rl_eval.weights import WeightsSnapshot, apply_weights, module_of, weights_of

if TYPE_CHECKING:
    from rl_eval.policies.inference.sweep_log import SweepLog

Result = TypeVar("Result")


class Attempt(NamedTuple):
    """Live attempt of a slot."""

    lease: Lease
    length: int
    """Number of steps so far."""
    started: float
    """Reading of ``perf_counter`` at its start."""


class RunnerCore(abc.ABC):
    """Base class of runners. It owns the policy, the queue of leases and the next report.

    A subclass owns the environments, reports whether episodes are live, and drops live episodes.

    Args:
        settings: Settings of the evaluation.
        runner_index: Position in the group, from 0.
        policy: A policy object, used instead of the configured one.

    Raises:
        ConfigError: Environment or policy cannot be built as configured.
        EnvError: The environment's constructor raised on every attempt.
    """

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        """Reject RLlib's call of an ``env_runner_cls``."""
        if "env_creator" in keywords:
            problem = f"env_runner_cls is {cls.__name__}, a runner that evaluates and collects no data for training"
            fix = "Remove env_runner_cls. To evaluate with this runner, set runners.runner of an EvalConfig."
            raise ConfigError(problem, key="env_runner_cls", value=cls.__name__, fix=fix)
        return super().__new__(cls)

    def __init__(self, settings: EvalSettings, runner_index: int, policy: Any = None) -> None:
        # At most 30 attributes, including those of a subclass. With more, CPython looks up each one in a dict, which
        # adds to the time that the runner itself needs for a step (``python -m benchmarks.attributes``).
        self.settings = settings
        learn(settings.model_dump())  # This process redacts its secrets in errors and reports.
        self.runner_index = runner_index
        self._pending = PendingReport(self._info_keys(settings), metric_functions(settings.evaluation))
        self._values = ValueReader(self._pending.info_keys, settings.evaluation, self._pending.note)
        self.queue: deque[Lease] = deque()
        self._max_steps = settings.evaluation.max_episode_steps or math.inf
        self._gamma = settings.evaluation.gamma
        self._discounting = self._gamma != 1.0
        self._inference_clock = 0.0
        self._recorder = flight_recorder(self.facts.lanes(settings))
        self._lifetime = {"episodes": 0, "faults": 0, "env_steps": 0, "close_errors": 0}
        self._next_expiry = 0.0
        self._weights_version = 0
        self._observers = named_factories("evaluation.observers", settings.evaluation.observers)
        home = current_folder()
        try:
            self._observation_space, self._action_space = self._first_spaces()
            # Paths of the policy are relative to the user's folder, even if an environment changed the folder.
            with working_in(home):
                self._policy = self.make_policy(policy)
            self._has_random_weights = has_random_weights(self._policy)
            self._inference = self.make_inference()
            self._inference.keeps_outputs = bool(self._observers)
            if self._inference.observations.has_texts:
                # These episodes do not depend on the plan, and neither does the numerics key.
                plan = EpisodePlan(TEXTS, conditions=settings.evaluation.conditions)
                specs = [plan[index] for index in range(TEXTS)]
                observations = self._first_built(partial(self._first_observations, specs), "reset")
                self._inference.observations.learn_texts(observations)
        except BaseException:
            self.stop()  # The process may build another runner, so no environment may stay open.
            raise

    facts: ClassVar[RunnerFacts] = RunnerFacts()

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        """Return the names of the ``info`` scalars and of the metrics in the records."""
        return scalar_columns(settings.evaluation)

    @classmethod
    def _info_keys(cls, settings: EvalSettings) -> tuple[str, ...]:
        """Return the columns that are known before an environment is built. Columns of agents are not known then."""
        return scalar_columns(settings.evaluation) if cls.facts.agents else cls.columns(settings)

    # ------------------------------------------------------------------ to override

    @abc.abstractmethod
    def run(
        self, leases: Sequence[Lease] = (), budget_s: float = 0.1, reclaim: Sequence[int] = (), abort: bool = False
    ) -> RunReport:
        """Run leases, as :meth:`rl_eval.runners.Runner.run` does. Check the budget after every reset and step."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Close all environments, and drop the policy."""

    @abc.abstractmethod
    def _first_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Build an environment and return its spaces."""

    @abc.abstractmethod
    def _first_observations(self, specs: Sequence[EpisodeSpec]) -> Sequence[Any]:
        """Return first observations of episodes, which the first environment begins one after the other."""

    @property
    def _busy(self) -> bool:
        """Whether an episode or a block is live."""
        return bool(self._units())

    @abc.abstractmethod
    def _live_slots(self) -> Sequence[int]:
        """Return the slots with a live attempt, in ascending order."""

    @abc.abstractmethod
    def _attempt(self, slot: int) -> Attempt | None:
        """Return the live attempt of a slot; None if the slot is free."""

    @abc.abstractmethod
    def _progress(self) -> tuple[npt.NDArray[np.void], float]:
        """Return the progress of the live attempts, and the seconds that their steps took."""

    @abc.abstractmethod
    def _free(self, slots: Sequence[int]) -> None:
        """End the attempts of these slots, and count their steps."""

    def _units(self) -> Sequence[int]:
        """Return one slot of each live lease. A lease of a block has many slots."""
        return self._live_slots()

    def _held(self, slot: int) -> Attempt | None:
        """Return the attempt of the lease that a slot works for; None if there is none."""
        return self._attempt(slot)

    def _drop(self, slot: int) -> None:
        """End the attempt of the lease that a slot works for."""
        self._free([slot])

    def _spoil(self, slot: int) -> None:  # noqa: B027  # A simulator decides itself.
        """Use the environment of a slot for no other attempt, because an attempt in it failed."""

    def make_policy(self, policy: Any = None) -> Policy:
        """Build the policy."""
        return adapt_policy(self.settings.policy, self._observation_space, self._action_space, policy)

    def make_inference(self) -> Inference:
        """Build the inference, which applies the policy to all live lanes."""
        spaces = self._observation_space, self._action_space
        return RowInference(self._policy, *spaces, self.lanes, self.settings.policy)

    def weighted_module(self, snapshot: WeightsSnapshot) -> Any:
        """Return the module that receives the weights; None if the policy has no module."""
        return module_of(self._policy)

    # ------------------------------------------------------------------ control

    def set_weights(self, snapshot: WeightsSnapshot) -> int:
        """Copy weights into the policy in place, and return their version.

        Raises:
            EvalError: An episode is live; the group must drain or abort first.
            WeightsError: The weights do not fit the policy, or the policy has no weights.
        """
        self._refuse_while_live("weights")
        module = self.weighted_module(snapshot)
        if module is None:
            kind = type(self._policy).__name__
            problem = f"the policy is a {kind}, not an nn.Module, and has no weights to set"
            fix = "Pass an nn.Module, or a Policy with an attribute `module`."
            raise WeightsError(problem, key="policy", value=kind, runner=self.runner_index, fix=fix)
        apply_weights(snapshot, module, self._inference.act_once)
        self._weights_version, self._has_random_weights = snapshot.version, False
        self._inference.numerics = {}  # Probe the policy again before the next episode.
        return snapshot.version

    def _refuse_while_live(self, what: str) -> None:
        if self._busy:
            problem = f"{what} cannot change while an episode is live"
            raise EvalError(problem, key=what, runner=self.runner_index, fix="Drain or abort the evaluation first.")

    def observe(self, factories: Mapping[str, Factory]) -> None:
        """Add observers to those of ``evaluation.observers``, from the next episode on.

        Args:
            factories: Factories that build an observer for an environment, by artifact name; empty to remove the
                factories of an earlier call.

        Raises:
            EvalError: An episode is live.
        """
        self._refuse_while_live("observers")
        self._observers = {**named_factories("evaluation.observers", self.settings.evaluation.observers), **factories}
        self._inference.keeps_outputs = bool(self._observers)

    @property
    def weights_version(self) -> int:
        """Version of the policy's weights; 0 before any were set."""
        return self._weights_version

    def metrics(self) -> dict[str, float]:
        """Return lifetime counters: ``episodes``, ``faults``, ``env_steps``, ``close_errors``."""
        return dict(self._lifetime)

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.facts.lanes(self.settings)

    @property
    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation space and action space."""
        return self._observation_space, self._action_space

    @property
    def inference(self) -> Inference:
        """Inference for all live lanes, as :meth:`make_inference` built it."""
        return self._inference

    @property
    def policy(self) -> Policy:
        """The policy in use, with its current weights."""
        return self._policy

    def apply(self, function: Callable[[Any], Result]) -> Result:
        """Call a function with this runner, in the runner's process."""
        return function(self)

    @property
    def extra(self) -> dict[str, Callable[[], Any]]:
        """Functions that return the data of an aspect for each report, by aspect. A report has them in ``extra``."""
        return self._pending.extra

    # ------------------------------------------------------------------ episodes

    def accept(self, leases: Sequence[Lease] = (), reclaim: Sequence[int] = (), abort: bool = False) -> bool:
        """Accept the leases and requests of one call.

        Returns:
            Whether to report immediately. If there are several runners, each one reports its numerics key before its
            first record. So the group uses the key of most runners, not the key of the fastest runner. The key of a
            server is in the log before its first episode begins.
        """
        if abort:
            self._abort()
        probing = not self._inference.numerics
        if probing:
            # Probe before the leases are queued. A probe that raises fails the evaluation, and leases of a failed
            # evaluation must not run in the next evaluation.
            self._inference.probe()
            self._inference.numerics |= self._bound_to()
            built = self._built_weights()
            self.extra[NUMERICS] = lambda: built
            if self._has_random_weights:
                self._pending.note(
                    f"{self.settings.policy.policy} draws the weights at random, so no other run can repeat this "
                    "result. Pass weights (policy.weights, --weights), or seed torch in the policy's factory"
                )
        self.queue.extend(leases)
        if reclaim:
            wanted = set(reclaim)
            self._pending.returned += [lease.index for lease in self.queue if lease.index in wanted]
            self.queue = deque(lease for lease in self.queue if lease.index not in wanted)
        return probing and (self.settings.runners.num_runners > 1 or is_served(self._inference.numerics))

    def _bound_to(self) -> dict[str, Any]:
        """Return the entries that the environments add to the numerics key."""
        return {}

    def _built_weights(self) -> str:
        """Return the digest of the weights with which the policy was built.

        The digest is empty if other weights were set since then, or if there is only one runner.
        """
        if self._weights_version == 0 and self.settings.runners.num_runners > 1:
            with suppress(Exception):  # Uninitialized weights have no content.
                if (built := weights_of(self._policy)) is not None:
                    return built.digest
        return ""

    def _first_built(self, build: Callable[[], Result], what: str = "constructed") -> Result:
        """Return the result of ``build``; if it raises, try again, at most ``max_attempts_per_episode`` times in total.

        Raises:
            ConfigError: The environment or the policy cannot be built as configured.
            EnvError: Every attempt raised.
        """
        attempts, section = self.settings.fault_tolerance.max_attempts_per_episode, self.settings.environment
        import_env(section)
        for attempt in range(1, attempts + 1):
            try:
                self._recorder.enter(CONSTRUCT)
                built = build()
                break
            except UsageError:
                raise
            except survivable() as error:
                if attempt == attempts:
                    raise EnvError(
                        f"environment.env is {section.env!r}, which cannot be {what} ({attempts} attempts): "
                        f"{summary_of(error)}",
                        key="environment.env",
                        value=section.env,
                        runner=self.runner_index,
                    ) from error
        self._recorder.idle()
        return built

    def _overdue(self, seconds: float, index: int) -> EpisodeTimeout:
        """Return the error of an attempt that exceeds its wall-clock limit."""
        key, limit = "fault_tolerance.episode_timeout_s", self.settings.fault_tolerance.episode_timeout_s
        text = f"the attempt ran {seconds:.1f} s, longer than {key}={limit}"
        return EpisodeTimeout(text, key=key, value=limit, episode=index, runner=self.runner_index)

    def _abort(self) -> None:
        self._pending.returned += [lease.index for lease in self.queue]
        self.queue.clear()
        self._drop_live()

    def _drop_live(self) -> None:
        """End all live attempts without a fault. The next report gives their leases back."""
        for slot in self._units():
            if (attempt := self._held(slot)) is not None:
                self._pending.returned.append(attempt.lease.index)
                self._drop(slot)

    def _expire(self) -> None:
        """End attempts that exceed their wall-clock limit. Check ten times a second, between steps."""
        now = perf_counter()
        if now < self._next_expiry:
            return
        self._next_expiry, limit = now + 0.1, self.settings.fault_tolerance.episode_timeout_s or math.inf
        for slot in self._live_slots():
            if (attempt := self._attempt(slot)) is not None and now - attempt.started > limit:
                self.fail(slot, "timeout", "run", self._overdue(now - attempt.started, attempt.lease.index))

    def _reject_nan(self) -> None:
        """Record a fault for each attempt with a NaN or infinite observation, before the policy sees it."""
        observations, live = self._inference.observations, self._inference.live
        for slot in observations.nonfinite_rows(live):
            error = EnvError(observations.describe_nonfinite(slot), key="observation")
            observations.clear(slot)
            if (attempt := self._attempt(slot)) is not None:  # Otherwise its block has failed.
                self._fail_alone(slot, "step" if attempt.length else "reset", error)
        observations.look_outside(live)

    def _note_observation(self, slot: int, text: str, shown: str) -> None:
        """Add a note on the observation of a slot."""
        if (attempt := self._attempt(slot)) is not None:
            self._pending.note(first_seen(text, attempt.lease.index, attempt.length, shown))

    def fail(self, slot: int, cause: FaultCause, phase: Phase, error: BaseException, *, charged: bool = True) -> None:
        """Record a fault and end the attempt. The group decides where the episode runs again.

        Args:
            slot: Slot of the attempt.
            cause: Cause of the fault.
            phase: Call that failed.
            error: The original error.
            charged: False if other episodes may have caused the error.
        """
        if (attempt := self._held(slot)) is None:
            return
        if cause == "policy":
            # The row stays in the batch until the slot's next attempt. It must not make the policy fail a second time.
            self._inference.observations.clear(slot)
        else:
            self._spoil(slot)
        place = cause, phase, attempt.length
        self._add_fault(attempt.lease, place, error, perf_counter() - attempt.started, charged=charged)
        self._drop(slot)

    def _fail_alone(self, slot: int, phase: Phase, error: EnvError) -> None:
        """Record the fault of an episode whose slot returned an invalid value."""
        self.fail(slot, "env", phase, error)

    def report(self) -> RunReport:
        """Return a report of everything since the last report."""
        self._recorder.idle()
        inference = self._inference
        report = self._pending.take(*self._progress(), self._weights_version, inference, self._read_sweeps())
        self._lifetime["episodes"] += len(report.rows)
        self._lifetime["env_steps"] += report.env_steps
        inference.forget_notes()
        return report

    def _row(
        self,
        lease: Lease,
        sums: tuple[float, float, int],
        ended: tuple[bool, bool],
        success: tuple[int, int],
        seconds: tuple[float, float, float],
    ) -> tuple[Any, ...]:
        """Return the row of a completed attempt, in the order of :data:`~rl_eval.records.episode.COLUMNS`.

        Building a tuple is faster than building a NumPy record.

        Args:
            lease: The lease of the attempt.
            sums: Return, discounted return and number of steps. Without a discount, the second is not read.
            ended: Whether the environment reached a terminal state, and whether it cut the episode short.
            success: Success at any step and at the last report: 1 or 0; -1 without a report.
            seconds: Seconds inside ``reset``, inside ``step`` and in the policy.
        """
        spec, (total, discounted, length), (terminated, truncated) = lease.spec, sums, ended
        cut = Truncation.ENVIRONMENT if truncated else Truncation.NONE
        if not (terminated or truncated):
            cut = Truncation.MAX_EPISODE_STEPS
        return (
            spec.index, spec.seed, total, discounted if self._discounting else total, length,
            terminated, bool(cut), cut, success[0], success[1], Outcome.COMPLETED, lease.attempt,
            self.runner_index, self._weights_version, seconds[0], seconds[1], seconds[2],
        )  # fmt: skip

    def _record(self, lease: Lease, row: tuple[Any, ...], info: Sequence[float]) -> EpisodeRecord:
        """Return the record of a completed attempt, for observers."""
        named = dict(zip(self._pending.info_keys, info, strict=True))
        return record_of(row, named, condition=lease.spec.condition_id)

    def _add_fault(
        self,
        lease: Lease,
        place: tuple[FaultCause, Phase, int],
        error: BaseException,
        seconds: float,
        *,
        charged: bool = True,
    ) -> None:
        """Add the fault of an attempt to the report.

        Args:
            lease: The lease, with the number of the attempt.
            place: Cause of the fault, phase of the attempt, and number of steps that the attempt had completed.
            error: The original error.
            seconds: Seconds since the attempt started.
            charged: False if other episodes may have caused the error.
        """
        (cause, phase, step), (error_type, message, traceback) = place, Fault.describe(error)
        self._pending.faults.append(
            Fault(
                index=lease.index,
                seed=lease.seed,
                attempt=lease.attempt,
                cause=cause,
                phase=phase,
                step=step,
                error_type=error_type,
                message=message,
                traceback=traceback,
                runner=self.runner_index,
                node=socket.gethostname(),
                seconds=seconds,
                charged=charged,
            )
        )
        self._lifetime["faults"] += 1

    def _new_sensor(self) -> GeneratorSensor | None:
        """Return a sensor for an environment in this process; None if a sensor could be wrong."""
        return GeneratorSensor.of_this_process(self._add_generator)

    def _add_generator(self, change: str) -> None:
        """Report that an environment changed a global random generator."""
        self._pending.generators[change] = None

    def _observed(self, slot: int, env: Any) -> ObservedSlot | None:
        """Build the observers of a slot for an environment; return None if there are none."""
        if not self._observers:
            return None
        idle, note = self._recorder.idle, self._pending.note
        return ObservedSlot(env, self._observers, slot, idle, self._outputs_of, note, self._sweep_log)

    def _outputs_of(self, slot: int) -> Any:
        return self._inference.outputs(slot)

    def _sweep_log(self) -> SweepLog | None:
        inference = self._inference
        return inference.sweep_log() if self.facts.sweeps and isinstance(inference, RowInference) else None

    def _read_sweeps(self) -> list[tuple[str, Mapping[int, Any]]]:
        """Return the artifacts that observers make from the log of sweeps: pairs of observer name and artifacts."""
        sweeps: SweepLog | None = getattr(self._inference, "sweeps", None)
        taken = () if sweeps is None else sweeps.take()
        return [(name, one.read_sweeps(steps)) for recorders, steps in taken for name, one in recorders.items()]

    def _drop_policy(self) -> None:
        """Drop the policy, which may be large. Reference cycles keep the runner until the garbage collector runs."""
        end_fork()  # A process that ``close`` of an environment has forked.
        self._recorder.idle()
        with suppress(AttributeError):  # A second call finds them deleted.
            del self._policy, self._inference
