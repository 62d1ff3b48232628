"""Runners as Ray actors, with crash reports of lost runners."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from rl_eval.backends import Backend, Call, Reply
from rl_eval.backends.agents import NodeAgents
from rl_eval.backends.connection import Connection, summarize
from rl_eval.backends.pickling import pickled, pickled_settings
from rl_eval.backends.requests import RunnerRequest, SetWeights, Start, Stop
from rl_eval.backends.runner_actor import Failure, RunnerActor
from rl_eval.config.settings import EvalSettings, RunnersSection, with_values
from rl_eval.errors import ClusterDied, ClusterError, ConfigError, RunnerLost
from rl_eval.supervision.flight_recorder import CrashReport, new_group
from rl_eval.supervision.node_agent import Deadlines
from rl_eval.weights import WeightsSnapshot

_LOSSES: Final = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    OutOfMemoryError,
    ObjectLostError,
    RuntimeEnvSetupError,
)
"""Ray's errors for a dead runner. Any other error concerns only one call."""

_INLINE_BYTES: Final = 90_000
"""Maximum size of a payload that is sent with a call; Ray allows 100 KB. Larger payloads go to the object store. But if
the raylet dies, Ray's client ends a process that owns objects in the store."""
_STOP_TIMEOUT_S: Final = 3.0
_AGENT_STOP_TIMEOUT_S: Final = 2.0
_CRASH_REPORT_TIMEOUT_S: Final = 5.0
"""Time limit for a crash report, in seconds. The process of a new agent needs up to two seconds to start. Without a
report, no episode uses up an attempt."""


@final
class RayBackend(Backend):
    """Backend with one Ray actor per runner, in an existing cluster or in a local cluster that stops with this backend.

    Args:
        settings: Settings of the runners.
        policy: Policy object, or None for the configured policy.
        lanes: Number of lanes per runner.

    Raises:
        ConfigError: Environment, policy or weights cannot be pickled.
        RunnerStartError: The cluster at ``runners.address`` cannot be reached.
    """

    def __init__(self, settings: EvalSettings, policy: Any, lanes: int) -> None:
        self._section = settings.runners
        init_fn = pickled(settings.runners.init_fn, "runners.init_fn")
        payload = _pickled(settings, policy)
        self.on_death = lambda _: None
        self._connection = Connection(settings.runners, lambda: self.on_death(self._died()))
        try:
            self.payload = _stored(payload)
            self._init_fn = init_fn
            runtime_env = self._connection.runtime_env(settings.runners)
            self._actor_class = ray.remote(RunnerActor).options(**_actor_options(settings.runners, runtime_env))
        except ConfigError:
            self._connection.close()
            raise
        except (TypeError, ValueError) as error:
            self._connection.close()
            raise ConfigError(
                f"runners: Ray rejected these resources, labels or runtime_env: {error}", key="runners"
            ) from error
        self._agents = NodeAgents(_deadlines(settings), runtime_env, at_once=_keeps_deadlines(settings))
        self._group = new_group()
        self._lanes = lanes
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, Call] = {}
        self._postmortems: dict[Any, tuple[Reply, float]] = {}
        """Replies for lost runners with a pending crash report, and the deadline of the report, by the call."""
        self._dying: set[int] = set()
        self._unreported_losses: list[Reply] = []
        """Replies for lost runners without a crash report that were not returned yet."""
        self._stopped = False

    @override
    def pack(self, settings: EvalSettings, policy: Any) -> Any:
        self._check_connection()
        return _stored(_pickled(settings, policy))

    @override
    def spawn(self, runner: int, index: int, weights: Any) -> None:
        if runner in self._dying:
            return  # Its loss is about to be reported.
        if runner not in self._actors:
            self._actors[runner] = self._actor_class.remote(self._init_fn, self._group, str(runner), self._lanes)
            self._agents.expect(runner, self._actors[runner])
        started = self._actors[runner].start.remote(index, weights, self.payload)
        self._calls[started] = Call(runner, Start(index, weights), 0)

    @override
    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        if self._stopped or runner in self._dying or runner not in self._actors:
            return
        self._calls[_sent(self._actors[runner], request)] = Call(runner, request, tag)

    @override
    def publish(self, weights: WeightsSnapshot) -> tuple[Any, WeightsSnapshot]:
        self._check_connection()
        if weights.buffer.nbytes < _INLINE_BYTES:
            return weights, weights
        ref = ray.put(weights)
        return ref, ray.get(ref)

    @override
    def wait(self, timeout_s: float) -> list[Reply]:
        self._check_connection()
        pending = [*self._calls, *self._postmortems, *self._agents.refs]
        ready = ray.wait(pending, num_returns=1, timeout=timeout_s if self.busy else 0)[0] if pending else []
        if ready and len(pending) > 1:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        replies = [reply for ref in ready if (reply := self._answered(ref)) is not None]
        replies += [*self._unanswered(time.monotonic()), *self._unreported_losses]
        self._unreported_losses = []
        return replies

    @property
    @override
    def busy(self) -> bool:
        return bool(self._calls or self._postmortems or self._unreported_losses)

    @override
    def kill(self, runner: int) -> None:
        actor = self._actors.pop(runner, None)
        self._drop_calls(runner)
        self._dying.discard(runner)
        if actor is not None:
            ray.kill(actor, no_restart=True)
            self._agents.end(runner)

    @override
    def terminate(self, runner: int, why: RunnerLost) -> None:
        if reply := self._lost(Call(runner, Stop(), 0), why):
            self._unreported_losses.append(reply)

    @override
    def shortage(self) -> str:
        if self._actors and all(map(self._agents.knows, self._actors)):
            return "all runners have their resources, and some still import or build environment and policy"
        selector = self._section.label_selector
        labels = f" on a node labelled {selector}" if selector else ""
        group = " in a bundle of the placement group" if self._section.in_placement_group else ""
        wanted = self._wanted()
        # Ray lists only resources with a free amount.
        free = {**dict.fromkeys(wanted, 0.0), **ray.available_resources()}
        return (
            f"each runner requests {_amounts(wanted)}{labels}{group}; "
            f"the cluster has {_amounts(ray.cluster_resources())} in total and {_amounts(free)} free"
        )

    @override
    def capacity(self) -> int | None:
        if self._section.label_selector or self._section.in_placement_group:
            return None
        there = ray.cluster_resources()
        return min((int(there.get(name, 0.0) / amount) for name, amount in self._wanted().items()), default=None)

    @override
    def starting(self, runners: Sequence[int]) -> str:
        up = sum(map(self._agents.knows, runners))
        if up:
            return f"{_count(up)} importing, building environment and policy"
        return f"starting {_count(len(runners))}"

    @override
    def leave(self) -> None:
        self._connection.watch.end()
        if self._connection.death:
            self._agents.end_on(self._connection.node_id)

    @override
    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if not self._connection.lost and not self._connection.death:  # Otherwise the actors are dead.
            self._end_actors()
        self.payload = None
        self._connection.close()

    def _end_actors(self) -> None:
        # A runner without a process has nothing to close, and would not answer.
        closing = [_sent(actor, Stop()) for runner, actor in self._actors.items() if self._agents.knows(runner)]
        if closing:
            # An environment that does not close in time is killed with its process.
            ray.wait(closing, num_returns=len(closing), timeout=_STOP_TIMEOUT_S)
        for runner in list(self._actors):
            self.kill(runner)
        self._agents.stop(_AGENT_STOP_TIMEOUT_S)

    def _check_connection(self) -> None:
        if self._connection.lost:
            raise ClusterError("Ray was shut down while this group was working", fix="Stop the group first.")
        if self._connection.death:
            raise self._died()

    def _died(self) -> ClusterDied:
        return ClusterDied(self._connection.death, key="runners.address", value=self._section.address)

    def _wanted(self) -> dict[str, float]:
        """Return the resources that each runner requests, by name."""
        section = self._section
        asked: dict[str, float] = {"CPU": section.num_cpus_per_runner, "GPU": section.num_gpus_per_runner}
        asked |= section.custom_resources_per_runner
        return {name: amount for name, amount in asked.items() if amount}

    # ------------------------------------------------------------------ answers

    def _answered(self, ref: Any) -> Reply | None:
        if ref in self._calls:
            return self._reply(ref)
        if ref in self._postmortems:
            return self._concluded(ref)
        self._agents.ended(ref)
        return None

    def _reply(self, ref: Any) -> Reply | None:
        call = self._calls.pop(ref)
        try:
            answer = ray.get(ref)
        except RayTaskError as error:  # The return value cannot be pickled.
            return Reply(call, error=error.cause if isinstance(error.cause, Exception) else error)
        except _LOSSES as error:
            if getattr(error, "actor_init_failed", False):
                return Reply(call, error=ClusterError(f"a runner's process cannot be set up: {summarize(error)}"))
            preempted = bool(getattr(error, "preempted", False))
            why = RunnerLost(f"the runner's process died: {summarize(error)}")
            why.__cause__ = error
            return self._lost(call, why, preempted=preempted)
        except RayError as error:
            return Reply(call, error=error)
        return Reply(call, error=answer.error()) if isinstance(answer, Failure) else Reply(call, answer)

    def _lost(self, call: Call, why: RunnerLost, *, preempted: bool = False) -> Reply | None:
        """Ask once for the crash report of a lost runner.

        Return None if the reply follows with the report, or if the loss is already known. If the process of the runner
        is unknown, there is no report, so return the reply immediately.
        """
        if call.runner in self._dying:
            return None
        self._drop_calls(call.runner)
        self._dying.add(call.runner)
        lost = Reply(call, error=why, lost=True, preempted=preempted)
        asked = self._agents.crash_report(call.runner)
        if asked is None:
            return lost
        self._postmortems[asked] = lost, time.monotonic() + _CRASH_REPORT_TIMEOUT_S
        return None

    def _concluded(self, ref: Any) -> Reply:
        lost, _ = self._postmortems.pop(ref)
        with suppress(RayError):  # The agent died too, as it does with its node.
            report: CrashReport = ray.get(ref)
            if lost.error is not None and isinstance(memory := lost.error.__cause__, OutOfMemoryError):
                report = replace(report, detail=f"killed by the memory monitor of Ray: {str(memory).splitlines()[0]}")
            lost = replace(lost, crash_report=report)
        return lost

    def _unanswered(self, now: float) -> list[Reply]:
        overdue = [ref for ref, (_, deadline) in self._postmortems.items() if now > deadline]
        return [self._postmortems.pop(ref)[0] for ref in overdue]

    def _drop_calls(self, runner: int) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if call.runner != runner}


def _pickled(settings: EvalSettings, policy: Any) -> bytes:
    """Pickle settings and policy without ``init_fn``, because ``init_fn`` must run before they are unpickled."""
    return pickled_settings(with_values(settings, runners={"init_fn": None}), policy, without_weights=True)


def _stored(payload: bytes) -> Any:
    """Return a small pickle itself, and for a large pickle its reference in the object store."""
    return payload if len(payload) < _INLINE_BYTES else ray.put(payload)


def _sent(actor: Any, request: RunnerRequest) -> Any:
    """Send a request, and return the reference of the answer."""
    if isinstance(request, SetWeights):
        # Ray fetches a reference only if it is an argument itself.
        return actor.set_weights.remote(request.weights)
    return actor.answer.remote(request)


def _actor_options(section: RunnersSection, runtime_env: dict[str, Any]) -> dict[str, Any]:
    resources = dict(section.custom_resources_per_runner)
    options: dict[str, Any] = {
        "num_cpus": section.num_cpus_per_runner,
        "num_gpus": section.num_gpus_per_runner,
        "memory": resources.pop("memory", None),
        "resources": resources,
        "scheduling_strategy": _placement(section),
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": runtime_env,
    }
    if section.label_selector:
        options["label_selector"] = dict(section.label_selector)
    return options


def _placement(section: RunnersSection) -> Any:
    """Return Ray's scheduling strategy: over all nodes, or in the placement group of the caller.

    Raises:
        ConfigError: The caller is not in a placement group.
    """
    if not section.in_placement_group:
        return "SPREAD"
    group = ray.util.get_current_placement_group()
    if group is None:
        problem = "runners.in_placement_group is true, but this process is not in a placement group"
        fix = "Remove the key, or evaluate in a Ray task or actor with a placement group, such as a Tune trial."
        raise ConfigError(problem, key="runners.in_placement_group", value=True, fix=fix)
    return PlacementGroupSchedulingStrategy(group)


def _deadlines(settings: EvalSettings) -> Deadlines:
    faults = settings.fault_tolerance
    return Deadlines(faults.reset_timeout_s, faults.step_timeout_s, faults.episode_timeout_s, faults.runner_timeout_s)


def _keeps_deadlines(settings: EvalSettings) -> bool:
    """Whether a deadline is configured that needs node agents. The silence of a runner is detected without agents."""
    faults = settings.fault_tolerance
    default = type(faults).model_fields["episode_timeout_s"].default
    given = (faults.reset_timeout_s, faults.step_timeout_s, faults.runner_timeout_s)
    return any(limit is not None for limit in given) or faults.episode_timeout_s not in (None, default)


def _count(runners: int) -> str:
    return f"{runners} runner" if runners == 1 else f"{runners} runners"


def _amounts(resources: dict[str, Any]) -> str:
    shown = [
        f"{amount / 2**30:.1f} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "object"))
    ]
    return ", ".join(shown) or "nothing"
