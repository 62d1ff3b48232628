"""Worker interface of a runner: what RLlib's rollout workers offer besides sampling, where it serves evaluation."""

from __future__ import annotations

import abc
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import gymnasium as gym

from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EvalError, WeightsError, nearest
from rl_eval.policies.filters import (
    DEFAULT_POLICY,
    Filter,
    FilteredPolicy,
    MeanStdFilter,
    NoFilter,
    ObservationMoments,
    check_fits,
)
from rl_eval.policies.saved_state import pack_state, unpack_state
from rl_eval.protocols import Policy
from rl_eval.records.episode import Lease
from rl_eval.runners.lane import Lane
from rl_eval.runners.observers import Factory, ObservedSlot
from rl_eval.weights import WeightsSnapshot

__all__ = ["FILTER_ARTIFACT", "WorkerInterface"]

FILTER_ARTIFACT = "observation_filter"
"""Name of the artifacts from which a filter's statistics are merged."""

Result = TypeVar("Result")


class WorkerInterface(abc.ABC):
    """Methods of a runner over its environments, policies, filters and state, for use between evaluations."""

    settings: EvalSettings
    runner_index: int
    _lanes: list[Lane]
    _queue: deque[Lease]
    _observers: dict[str, Factory]
    _observation_space: gym.Space[Any]
    _policy: Policy
    _given_policy: Any

    # ------------------------------------------------------------------ environments and policies

    def foreach_env(self, function: Callable[[Any], Result]) -> list[Result]:
        """Call a function with each environment that is built, in the order of the slots; return the results.

        One environment is built with the runner, the others as their slots begin an episode. A function that changes
        an environment makes the results depend on when it was called.
        """
        return [function(lane.env) for lane in self._lanes if lane.env is not None]

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policies by id, without their filters."""
        return {DEFAULT_POLICY: self._policy.policy if isinstance(self._policy, FilteredPolicy) else self._policy}

    def get_policy(self, policy_id: str = DEFAULT_POLICY) -> Policy:
        """Return a policy, without its filter.

        Raises:
            EvalError: None has this name.
        """
        policies = self.policies
        if policy_id not in policies:
            raise EvalError(f"no policy is called {policy_id!r}: {nearest(policy_id, policies)}")
        return policies[policy_id]

    def for_policy(self, function: Callable[[Policy], Result], policy_id: str = DEFAULT_POLICY) -> Result:
        """Call a function with a policy; return the result."""
        return function(self.get_policy(policy_id))

    def foreach_policy(self, function: Callable[[Policy, str], Result]) -> list[Result]:
        """Call a function with each policy and its name; return the results."""
        return [function(policy, name) for name, policy in self.policies.items()]

    # ------------------------------------------------------------------ filters

    def get_filters(self) -> dict[str, Filter]:
        """Return the filters by the names of their policies."""
        return {DEFAULT_POLICY: self._policy.filter if isinstance(self._policy, FilteredPolicy) else NoFilter()}

    def sync_filters(self, filters: Mapping[str, Filter]) -> None:
        """Replace filters, which then stay as they are.

        Raises:
            EvalError: An episode is live.
            WeightsError: A policy is unknown or has no filter, or the statistics do not fit its observations.
        """
        self._refuse_while_live("filters")
        for name, one in filters.items():
            self.get_policy(name)
            if not isinstance(self._policy, FilteredPolicy):
                raise WeightsError(
                    f"policy {name!r} has no filter: set policy.observation_filter to MeanStdFilter to give it one"
                )
            check_fits(one, self._observation_space)
            self._policy.filter = one
        self._forget_numerics()
        self._collect_moments()

    def _refuse_while_live(self, what: str) -> None:
        if any(lane.lease is not None for lane in self._lanes):
            raise EvalError(f"{what} cannot change while an episode is live: drain or abort the evaluation first")

    def _collect_moments(self) -> None:
        """Observe what a filter without statistics needs; a filter that has some is frozen, and nothing is observed."""
        collecting = isinstance(self._policy, FilteredPolicy) and self._policy.filter == MeanStdFilter()
        if collecting == (FILTER_ARTIFACT in self._observers):
            return
        if collecting:
            self._observers[FILTER_ARTIFACT] = ObservationMoments
        else:
            del self._observers[FILTER_ARTIFACT]
        for lane in self._lanes:
            lane.observe = self._observe if self._observers else None
            if lane.env is not None:
                lane.attach(lane.env)

    # ------------------------------------------------------------------ state

    def save(self) -> bytes:
        """Return weights, filters and the leases that are not done, as the bytes of a safetensors file.

        Raises:
            WeightsError: The weights have extra state that is no tensor.
        """
        live = [lane.lease for lane in self._lanes if lane.lease is not None]
        return pack_state(self._policy, self.weights_version, [list(lease) for lease in [*live, *self._queue]])

    def restore(self, state: bytes) -> None:
        """Go on from what :meth:`save` returned: an episode that was live begins again, and gives the same row.

        Raises:
            EvalError: It has episodes that are not done.
            WeightsError: The weights do not fit, or it is no saved state.
        """
        if self._queue or any(lane.lease is not None for lane in self._lanes):
            raise EvalError("a runner's state cannot be restored while it has episodes: abort or finish them first")
        snapshot, leases = unpack_state(state)
        if snapshot.entries:
            self.set_weights(snapshot)
        saved = (Lease(*lease) for lease in leases)
        self._queue = deque(lease._replace(seating=lease.seating and tuple(lease.seating)) for lease in saved)

    # ------------------------------------------------------------------ where it runs

    @classmethod
    def as_remote(
        cls,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> Any:
        """Return this class as a class of Ray actors; ``.remote(settings, runner_index, policy)`` starts one.

        A group does this for its runners, and restarts them: this is for a runner that is driven by hand.

        Args:
            num_cpus: CPUs that Ray reserves for an actor.
            num_gpus: GPUs, or a fraction of one.
            memory: Heap memory, in bytes.
            resources: Custom resources by name.
        """
        import ray

        asked = {"num_cpus": num_cpus, "num_gpus": num_gpus, "memory": memory, "resources": resources}
        given = {name: value for name, value in asked.items() if value is not None}
        return ray.remote(**given)(cls) if given else ray.remote(cls)

    def creation_args(self) -> dict[str, Any]:
        """Return the arguments that this runner was built with."""
        return {"settings": self.settings, "runner_index": self.runner_index, "policy": self._given_policy}

    def get_node_ip(self) -> str:
        """Return the IP address of this runner's node."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            return str(ray.util.get_node_ip_address())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # Reserved for documentation; a datagram socket sends nothing yet.
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"

    def find_free_port(self) -> int:
        """Return a TCP port that nothing on this runner's node listens on, for now."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])

    # ------------------------------------------------------------------ what the runner has

    @property
    @abc.abstractmethod
    def weights_version(self) -> int:
        """Version of the weights that the policy has; 0 before any were set."""

    @abc.abstractmethod
    def set_weights(self, snapshot: WeightsSnapshot) -> int:
        """Copy weights into the policy in place, and return their version."""

    @abc.abstractmethod
    def _observe(self, slot: int, env: Any) -> ObservedSlot:
        """Build the observers of an environment."""

    @abc.abstractmethod
    def _forget_numerics(self) -> None:
        """Probe the policy again before its next episode."""
