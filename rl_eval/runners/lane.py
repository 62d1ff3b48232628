"""Environment slots (lanes) of a runner, with the sums over each attempt; and the runner's next report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.records.determinism import DETERMINISM, TracedRuns, TraceRecorder
from rl_eval.records.episode import (
    ROW,
    Fault,
    Lease,
    RunReport,
    without_place,
)
from rl_eval.records.generators import GeneratorSensor
from rl_eval.runners.environment import episode_hook
from rl_eval.runners.metrics import MetricFunction, write_metrics
from rl_eval.supervision.flight_recorder import STEP, FlightRecorder

if TYPE_CHECKING:
    from rl_eval.policies.inference.protocol import Inference
    from rl_eval.runners.observers import ObservedSlot


def _no_env(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the slot has no environment")


@dataclass(slots=True, eq=False)
class Lane:
    """One environment slot of a runner."""

    index: int
    """Position in the runner, and row in its batch."""
    num_info_keys: int
    """Number of info scalars to keep."""
    observe: Callable[[int, Any], ObservedSlot | None]
    """Builds the observers of an environment; returns None if there are none."""
    sensor: GeneratorSensor | None
    """Sensor of global random generators, shared by all lanes; None if it is no longer needed."""
    observers: ObservedSlot | None = None
    """Observers of the environment; None for an environment of the determinism check."""
    observed: ObservedSlot | None = None
    """Observers of the attempt; None for an episode that runs to be compared."""
    env: gym.Env[Any, Any] | None = None
    step: Callable[[Any], Any] = _no_env
    reset: Callable[..., Any] = _no_env
    begin_episode: Callable[[int, int, int], None] | None = None
    spare: gym.Env[Any, Any] | None = None
    """The lane's usual environment, set aside while an episode runs in a new environment; otherwise None."""
    trace: TraceRecorder | None = None
    lease: Lease | None = None
    length: int = 0
    episode_return: float = 0.0
    discounted_return: float = 0.0
    discount: float = 1.0
    success_once: int = -1
    success_at_end: int = -1
    info: list[float] = field(default_factory=list)
    started: float = 0.0
    reset_seconds: float = 0.0
    step_seconds: float = 0.0
    inference_started: float = 0.0
    stale: bool = False
    """Whether the lane's environment must not be used for another attempt."""
    unreported: bool = False
    """Whether the lane's last attempt has ended but is not reported yet."""
    stepping: int = field(init=False)
    """State in the flight recorder during a step, without the number of steps."""

    def __post_init__(self) -> None:
        self.stepping = FlightRecorder.mark(STEP, self.index)

    def attach(self, env: gym.Env[Any, Any]) -> None:
        """Set the lane's environment. Store its methods to save lookups in the loop."""
        self.env, self.begin_episode = env, episode_hook(env)
        self._bind()
        self.watch()

    def _bind(self) -> None:
        """Store the environment's methods, which the sensor calls if there is one."""
        assert self.env is not None
        self.step, self.reset = self.env.step, self.env.reset
        if self.sensor is not None:
            self.step = partial(self.sensor.call, "step", self.step)
            self.reset = partial(self.sensor.call, "reset", self.reset)

    def watch(self) -> None:
        """Build the observers of the environment."""
        fresh = self.lease is not None and self.lease.how.fresh
        self.observers = None if fresh or self.env is None else self.observe(self.index, self.env)
        self._choose_observers()

    def _choose_observers(self) -> None:
        self.observed = None if self.lease is not None and self.lease.how.again else self.observers

    def set_aside(self) -> None:
        """Keep the environment for later attempts: some environments take long to build, or can be built only once."""
        self.spare = self.detach()

    def start_trace(self, content: Callable[[Any], bytes]) -> None:
        """Trace the attempt that is about to start.

        Args:
            content: Takes an observation; returns, as bytes, the values that the policy receives.
        """
        self.trace = TraceRecorder(self.reset, self.step, content)
        self.reset, self.step = self.trace.reset, self.trace.step

    def end_trace(self) -> None:
        """Remove the trace around the environment's methods."""
        self.trace = None
        if self.env is not None:
            self._bind()

    def detach(self) -> gym.Env[Any, Any] | None:
        """Remove and return the environment; the one that was set aside replaces it."""
        env, self.env, self.step, self.reset, self.begin_episode = self.env, None, _no_env, _no_env, None
        self.stale = False
        if self.spare is not None:
            self.attach(self.spare)
            self.spare = None
        return env

    def begin(self, inference_clock: float) -> None:
        """Set the sums to zero at the start of an attempt. Remove the sensor if it is no longer needed."""
        if self.sensor is not None and self.length and self.sensor.finished():
            self.sensor = None
            if self.env is not None:
                self._bind()
        self.episode_return = 0.0
        self.discounted_return = 0.0
        self.discount = 1.0
        self.length = 0
        self.success_once = -1
        self.success_at_end = -1
        self.info = [float("nan")] * self.num_info_keys
        self.reset_seconds = 0.0
        self.step_seconds = 0.0
        self.inference_started = inference_clock
        self._choose_observers()
        self.started = perf_counter()

    def progress(self) -> tuple[int, int, int]:
        """Return the progress of the attempt, in the order of :data:`~rl_eval.records.episode.PROGRESS`."""
        assert self.lease is not None
        return self.lease.index, self.lease.attempt, self.length


@final
class PendingReport:
    """Content of a runner's next report, collected until :meth:`take`.

    Args:
        info_keys: Names of the ``info`` scalars and of the metrics in each row.
        metrics: Functions of the metrics, by name; None for no metrics.
    """

    def __init__(self, info_keys: tuple[str, ...], metrics: Mapping[str, MetricFunction] | None = None) -> None:
        self.info_keys = info_keys
        self._metrics = metrics
        self.tracing = TracedRuns()
        self.extra: dict[str, Callable[[], Any]] = {DETERMINISM: self.tracing.take}
        """Functions that return the data of an aspect for a report, by aspect."""
        self._under_way = (0, 0.0)
        """Steps of live attempts that earlier reports have counted: their number, and their seconds."""
        self.standing_note = ""
        """Text of a note in every report, and so in every evaluation of the runner; empty for no note."""
        self.generators: dict[str, None] = {}
        """Changes of global random generators by an environment so far, as keys, without duplicates."""
        self._begin()

    def _begin(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.infos: list[list[float]] = []
        self.faults: list[Fault] = []
        self.returned: list[int] = []
        self.artifacts: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._notes: dict[str, str] = {}
        self.env_steps = 0
        self.reset_seconds = self.step_seconds = self.inference_seconds = 0.0

    def __bool__(self) -> bool:
        """Whether an attempt has ended."""
        return bool(self.rows or self.faults)

    def note(self, text: str) -> None:
        """Add a note. If notes differ only in the place (the episode and step), keep the first one."""
        self._notes.setdefault(without_place(text), text)

    def count(self, steps: int, seconds: float) -> None:
        """Count the steps of an attempt that has ended, and the seconds that these steps took."""
        self.env_steps += steps
        self.step_seconds += seconds

    def keep(self, index: int, artifacts: Mapping[str, Any]) -> None:
        """Store the artifacts of an episode, by observer name."""
        for name, artifact in artifacts.items():
            self.artifacts[name][index] = artifact

    def extend(self, completed: PendingReport) -> None:
        """Add the rows, info scalars and artifacts of completed episodes."""
        self.rows += completed.rows
        self.infos += completed.infos
        for name, artifacts in completed.artifacts.items():
            self.artifacts[name].update(artifacts)

    def take(
        self,
        live: npt.NDArray[np.void],
        live_seconds: float,
        weights_version: int,
        inference: Inference,
        artifacts: Sequence[tuple[str, Mapping[int, Any]]],
    ) -> RunReport:
        """Return the report, and start the next one.

        Args:
            live: Progress of the live attempts, one row of ``PROGRESS`` each. The report counts their steps so far.
            live_seconds: Seconds that these steps took.
            weights_version: Version of the policy's weights.
            inference: Inference of the runner, with its numerics key and its notes.
            artifacts: Artifacts in addition to :attr:`artifacts`.
        """
        under_way = int(live["step"].sum()), live_seconds
        infos = np.array(self.infos, np.float64).reshape(len(self.rows), len(self.info_keys))
        if self._metrics:
            write_metrics(self._metrics, self.rows, self.info_keys, infos, self.note)
        report = RunReport(
            rows=np.array(self.rows, ROW),
            infos=infos,
            faults=tuple(self.faults),
            progress=live,
            returned=tuple(self.returned),
            env_steps=self.env_steps + under_way[0] - self._under_way[0],
            reset_seconds=self.reset_seconds,
            step_seconds=self.step_seconds + under_way[1] - self._under_way[1],
            inference_seconds=self.inference_seconds,
            weights_version=weights_version,
            numerics=inference.numerics,
            probes=inference.probes,
            extra={name: data() for name, data in self.extra.items()},
            notes=(*inference.notes, *filter(None, [self.standing_note]), *self._notes.values()),
            generators=tuple(self.generators),
            artifacts=(*self.artifacts.items(), *artifacts),
        )
        self._under_way = under_way
        self._begin()
        return report
