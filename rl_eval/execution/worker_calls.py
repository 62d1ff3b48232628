"""Worker interface of a group: calls on environments, policies, filters and state of its runners."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rl_eval.atomic_write import write_atomically
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError, EvalError
from rl_eval.policies.filters import DEFAULT_POLICY, Filter, MeanStdFilter, filters_of, merged, with_filters
from rl_eval.policies.saved_state import unpack_state
from rl_eval.runners.worker import FILTER_ARTIFACT

if TYPE_CHECKING:
    from rl_eval.execution.group_weights import GroupWeights
    from rl_eval.execution.handle import EvalHandle
    from rl_eval.results.result import EvalResult
    from rl_eval.runners import EvalRunner

__all__ = ["NO_STATISTICS", "GroupCallbacks", "WorkerCalls", "tell_result"]

NO_STATISTICS: Final = (
    "policy.observation_filter is MeanStdFilter, but there are no statistics: set policy.filters to a file of them, or "
    "call group.sync_filters(...) or group.warm_up_filters() before the evaluation"
)

Result = TypeVar("Result")


class GroupCallbacks:
    """Callbacks of a group, to derive from.

    They are called in a thread of the group, or in the one that cancels an evaluation, and must return soon.
    What an episode does is for observers (``evaluation.observers``), which are where it runs.
    """

    def on_sample_end(self, result: EvalResult) -> None:
        """An evaluation has a result."""

    def on_runner_restart(self, runner_index: int) -> None:
        """A runner is started in place of one that was lost."""


def tell_result(callbacks: GroupCallbacks, handle: EvalHandle) -> None:
    """Call back with the result of an evaluation, if it has one."""
    if handle.exception() is None:
        callbacks.on_sample_end(handle.result())


class WorkerCalls(abc.ABC):
    """Methods of a group over its runners' environments, policies, filters and state."""

    settings: EvalSettings
    _weights: GroupWeights

    # ------------------------------------------------------------------ environments and policies

    def foreach_env(self, function: Callable[[Any], Result]) -> list[list[Result]]:
        """Call a function with every environment that is built; return the results by runner and slot."""
        return self.foreach_runner(lambda runner: runner.foreach_env(function))

    def for_policy(self, function: Callable[[Any], Result], policy_id: str = DEFAULT_POLICY) -> list[Result]:
        """Call a function with a policy on every runner; return the results by runner."""
        return self.foreach_runner(lambda runner: runner.for_policy(function, policy_id))

    def foreach_policy(self, function: Callable[[Any, str], Result]) -> list[list[Result]]:
        """Call a function with every policy and its name on every runner; return the results by runner."""
        return self.foreach_runner(lambda runner: runner.foreach_policy(function))

    # ------------------------------------------------------------------ filters

    def get_filters(self) -> dict[str, Filter]:
        """Return the filters that the next evaluation uses, by the names of their policies."""
        return self._filters

    def sync_filters(self, filters: Mapping[str, Filter], version: int | None = None) -> int:
        """Send filters to all runners, with the weights that they have, as a new version of these.

        Args:
            filters: By the names of their policies; those that are not named stay.
            version: Number that stamps the records; by default one more than the last.

        Returns:
            The version.

        Raises:
            ConfigError: ``policy.observation_filter`` gives the policy none.
            WeightsError: The statistics do not fit the policy's observations; runners keep what they have.
        """
        if unknown := sorted(set(filters) - set(self._filters)):
            raise ConfigError(
                f"sync_filters: policy {unknown[0]!r} has no filter; set policy.observation_filter to MeanStdFilter "
                f"to give {DEFAULT_POLICY!r} one"
            )
        snapshot = None if self._weights.posted is None else self._weights.posted.snapshot
        return self.sync_weights(with_filters(snapshot, {**self._filters, **filters}, 0), version)

    def warm_up_filters(
        self, num_episodes: int | None = None, seed: int | None = None, first_index: int | None = None
    ) -> dict[str, Filter]:
        """Collect the filters' statistics anew, and freeze them.

        All observations that are acted upon in the episodes count, and are not filtered meanwhile. The statistics are
        merged in the order of the episodes, so they are a function of policy, environment and plan alone.

        Args:
            num_episodes: How many; by default as many as an evaluation has.
            seed: Root seed; by default as configured.
            first_index: Where the plan begins; by default behind the configured one, so that no episode is both.

        Raises:
            ConfigError: There is no filter.
            EvalError: An episode failed, or it was cancelled; the filters have no statistics then.
        """
        if not self._filters:
            raise ConfigError("warm_up_filters: set policy.observation_filter to MeanStdFilter to have a filter")
        settings = self._warm_up_settings(num_episodes, seed, first_index)
        self.sync_filters({DEFAULT_POLICY: MeanStdFilter()})
        result = self._run_warm_up(settings)
        if result.status != "complete":
            raise EvalError(f"the warm-up of the filters is {result.status}: {result}")
        found = [result.artifacts[record.index][FILTER_ARTIFACT] for record in result.episodes]
        self.sync_filters({DEFAULT_POLICY: merged(found)})
        return self.get_filters()

    def _warm_up_settings(self, num_episodes: int | None, seed: int | None, first_index: int | None) -> EvalSettings:
        section = self.settings.evaluation
        held_out = section.first_index + section.num_episodes
        values = {
            "num_episodes": section.num_episodes if num_episodes is None else num_episodes,
            "seed": section.seed if seed is None else seed,
            "first_index": held_out if first_index is None else first_index,
            "determinism_check": 0.0,
        }
        return with_values(self.settings, evaluation=values)

    @property
    def _filters(self) -> dict[str, Filter]:
        """Filters that were sent last, by the names of their policies; empty for policies without one."""
        if self.settings.policy.observation_filter == "NoFilter" or self._weights.posted is None:
            return {}
        return filters_of(self._weights.posted.snapshot)

    @property
    def _lacks_statistics(self) -> bool:
        return any(one == MeanStdFilter() for one in self._filters.values())

    # ------------------------------------------------------------------ state

    def save(self, path: str | Path) -> None:
        """Write weights, filters and their version to a safetensors file.

        How far an evaluation is stands in its log: give ``run_dir`` to continue it.

        Raises:
            WeightsError: The weights have extra state that is no tensor.
        """
        place = self._located(path)
        state = self.apply_to_one(lambda runner: runner.save())
        write_atomically(place, lambda temporary: temporary.write_bytes(state))

    def restore(self, path: str | Path) -> int:
        """Send the weights and filters of a file of :meth:`save` to all runners; return their version.

        Raises:
            WeightsError: They do not fit, or it is another kind of file.
            ConfigError: It cannot be read.
        """
        try:
            snapshot, _ = unpack_state(Path(self._located(path)).read_bytes())
        except OSError as error:
            raise ConfigError(f"restore: {str(path)!r} cannot be read: {error.strerror or error}") from None
        return self.sync_weights(snapshot, snapshot.version) if snapshot.entries else self.weights_version

    # ------------------------------------------------------------------ what the group has

    @abc.abstractmethod
    def foreach_runner(self, function: Callable[[EvalRunner], Result]) -> list[Result]:
        """Call a function with every runner that is up, where it lives; return the results by position."""

    @abc.abstractmethod
    def apply_to_one(self, function: Callable[[EvalRunner], Result], timeout_s: float = 600.0) -> Result:
        """Call a function with one runner that is up, where it lives, between evaluations; return its result."""

    @abc.abstractmethod
    def sync_weights(self, weights: Any, version: int | None = None) -> int:
        """Send weights to all runners and wait until each that is up has acknowledged them."""

    @property
    @abc.abstractmethod
    def weights_version(self) -> int:
        """Version of the weights that the next evaluation uses."""

    @abc.abstractmethod
    def _located(self, place: str | os.PathLike[str]) -> str:
        """Return the absolute path of a place that the caller names; a URI stays as it is."""

    @abc.abstractmethod
    def _run_warm_up(self, settings: EvalSettings) -> EvalResult:
        """Run the episodes of a warm-up."""
