"""Lane of a runner: one environment slot, and the sums of the attempt that it runs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import gymnasium as gym

from rl_eval.records.determinism import TraceRecorder
from rl_eval.records.episode import EpisodeSpec, Lease, Outcome, Progress, Row, Truncation
from rl_eval.runners.observers import ObservedSlot
from rl_eval.supervision.flight_recorder import STEP, FlightRecorder

__all__ = ["Lane", "episode_hook"]


class Lane:
    """One environment slot of a runner.

    Args:
        index: Position in the runner, and row in its batch.
        num_info_keys: Number of info scalars to keep.
        observe: Builds the observers of an environment; None without.
    """

    __slots__ = (
        "attempt",
        "begin_episode",
        "discount",
        "discounted_return",
        "env",
        "episode_return",
        "index",
        "inference_started",
        "info",
        "lease",
        "length",
        "num_info_keys",
        "observe",
        "observed",
        "reset",
        "reset_seconds",
        "spare",
        "stale",
        "started",
        "step",
        "step_seconds",
        "stepping",
        "success_at_end",
        "success_once",
        "trace",
        "unreported",
    )

    def __init__(
        self, index: int, num_info_keys: int, observe: Callable[[int, Any], ObservedSlot] | None = None
    ) -> None:
        self.index = index
        self.num_info_keys = num_info_keys
        self.observe = observe
        self.observed: ObservedSlot | None = None
        self.env: gym.Env[Any, Any] | None = None
        self.step: Callable[[Any], Any] = _no_env
        self.reset: Callable[..., Any] = _no_env
        self.begin_episode: Callable[[int, int, int], None] | None = None
        self.spare: gym.Env[Any, Any] | None = None
        """The lane's own environment, while another one serves an episode that needs a fresh one."""
        self.trace: TraceRecorder | None = None
        self.lease: Lease | None = None
        self.attempt = 0
        self.length = 0
        self.stale = False
        """Whether its environment must not serve another attempt."""
        self.unreported = False
        """Whether its last attempt has ended and the group does not know yet."""
        self.stepping = FlightRecorder.mark(STEP, index)
        """What the flight recorder shows during a step, less the number of steps."""

    def attach(self, env: gym.Env[Any, Any]) -> None:
        """Take an environment; bound methods save lookups in the loop."""
        self.env, self.step, self.reset = env, env.step, env.reset
        self.begin_episode = episode_hook(env)
        self.observed = self.observe and self.observe(self.index, env)

    def watch(self, observe: Callable[[int, Any], ObservedSlot] | None) -> None:
        """Have other observers from now on, or none."""
        self.observe = observe
        self.observed = observe(self.index, self.env) if observe is not None and self.env is not None else None

    def set_aside(self) -> None:
        """Keep the environment for later: some can be built once only, or take long to build."""
        self.spare = self.detach()

    def start_trace(self, content: Callable[[Any], bytes]) -> None:
        """Trace the attempt that begins.

        Args:
            content: What the policy is given of an observation.
        """
        assert self.env is not None
        self.trace = TraceRecorder(self.env.reset, self.env.step, content)
        self.reset, self.step = self.trace.reset, self.trace.step

    def begin_observing(self, observation: Any) -> None:
        """Let the observers see the attempt that was reset."""
        assert self.lease is not None
        assert self.observed is not None
        spec = EpisodeSpec(self.lease.index, self.lease.seed, self.lease.seating)
        self.step = self.observed.begin(self.step, spec, self.attempt, observation)

    def unwrap(self) -> None:
        """Let the environment be called directly again."""
        self.trace = None
        if self.env is not None:
            self.step, self.reset = self.env.step, self.env.reset

    def detach(self) -> gym.Env[Any, Any] | None:
        """Give the environment up; what was set aside takes its place."""
        env, self.env, self.step, self.reset, self.begin_episode = self.env, None, _no_env, _no_env, None
        self.stale = False
        if self.spare is not None:
            self.attach(self.spare)
            self.spare = None
        return env

    def begin(self, inference_clock: float) -> None:
        """Zero the sums: an attempt starts."""
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
        self.started = perf_counter()

    def progress(self) -> Progress:
        """Say how far the attempt is."""
        assert self.lease is not None
        return Progress(self.lease.index, self.attempt, self.length)

    def row(
        self, terminated: bool, cut: Truncation, runner: int, version: int, inference_clock: float
    ) -> tuple[float, ...]:
        """Return the completed attempt as a :data:`rl_eval.records.episode.Row`."""
        assert self.lease is not None
        row: tuple[float, ...] = Row(
            index=self.lease.index,
            seed=self.lease.seed,
            episode_return=self.episode_return,
            discounted_return=self.discounted_return,
            length=self.length,
            terminated=terminated,
            truncated=bool(cut),
            truncated_by=cut,
            success_once=self.success_once,
            success_at_end=self.success_at_end,
            outcome=Outcome.COMPLETED,
            attempts=self.attempt,
            runner=runner,
            weights_version=version,
            reset_seconds=self.reset_seconds,
            step_seconds=self.step_seconds,
            inference_seconds=inference_clock - self.inference_started,
        )
        return row


def _no_env(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the lane has no environment")


def episode_hook(env: gym.Env[Any, Any]) -> Callable[[int, int, int], None] | None:
    """Find :meth:`rl_eval.EpisodeAware.begin_episode`, also under gymnasium's wrappers."""
    if isinstance(env, gym.Env):
        return env.get_wrapper_attr("begin_episode") if env.has_wrapper_attr("begin_episode") else None
    return getattr(env, "begin_episode", None)
