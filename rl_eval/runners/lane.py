"""Environment slots (lanes) of a runner, with the sums over each attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from rl_eval.records.determinism import TraceRecorder
from rl_eval.records.episode import Lease
from rl_eval.records.generators import GeneratorSensor
from rl_eval.runners.environment import episode_hook
from rl_eval.supervision.flight_recorder import STEP, FlightRecorder

if TYPE_CHECKING:
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
    """Reading of the inference clock at the start, minus the seconds for which the attempt waited for late answers."""
    asked: float = 0.0
    """Time of the last request to a policy that answers later."""
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
