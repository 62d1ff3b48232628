"""The few shapes that users' objects take: policies, environments that know their episode, contexts."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


class EnvContext(dict[str, Any]):
    """Argument of an environment factory: the configured kwargs, and the place where it runs.

    Index fields are for ports, devices and folders. An environment whose *behaviour* depends on them
    makes the result depend on the layout.

    Args:
        kwargs: ``env_kwargs`` of the config; they are the items of this dict.
        runner_index: Index of the runner, from 0.
        lane_index: Index of the environment slot inside the runner, from 0.
        num_runners: Number of runners asked for.
        remote: Whether the slot has a process of its own.
    """

    def __init__(
        self, kwargs: dict[str, Any], runner_index: int, lane_index: int, num_runners: int, remote: bool = False
    ) -> None:
        super().__init__(kwargs)
        self.runner_index = runner_index
        self.lane_index = lane_index
        self.num_runners = num_runners
        self.remote = remote


class NoiseSource(Protocol):
    """Random numbers that belong to the episode of each lane, not to the process."""

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return numbers in (0, 1), shape (batch, count): the next ones of each lane's step."""

    def normal(self, count: int) -> npt.NDArray[np.float64]:
        """Return standard normal numbers, shape (batch, count)."""


@runtime_checkable
class Policy(Protocol):
    """Maps a batch of observations to a batch of actions.

    It may be :class:`Recurrent`, :class:`Probeable` and :class:`ActionLogProb` as well.
    """

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        r"""Choose actions.

        Args:
            observations: Batch in the structure of the observation space; each leaf is an array of
                shape (batch, \\*leaf_shape). Rows of lanes that are not live hold old values.
            state: What the last call returned, with the rows of new episodes reset; None without
                ``initial_state``.
            live: Mask of lanes that run an episode, shape (batch,).
            noise: Randomness of each lane's episode; None when ``deterministic`` is set.

        Returns:
            Actions, a batch in the structure of the action space, and the next state.

        Raises:
            PolicyUnavailable: It cannot act for now: the runner ends, and no episode is charged. What else it raises
                is charged to the episodes whose rows it fails on.
        """


@runtime_checkable
class Recurrent(Protocol):
    """A policy with a state of its own in every episode."""

    def initial_state(self, batch_size: int) -> Any:
        """Return the state of fresh episodes: nested arrays or tensors, of a leading dimension ``batch_size``."""


@runtime_checkable
class Probeable(Protocol):
    """A policy that shows what it chooses actions by."""

    def probe_outputs(self, observations: Any) -> list[Any]:
        """Return arrays such as logits, with a leading batch dimension: an argmax hides last bits from the probe."""


@runtime_checkable
class ActionLogProb(Protocol):
    """A policy that says how probable an action is, whoever took it; it depends on the observation alone."""

    def log_prob(self, observations: Any, actions: Any) -> npt.NDArray[np.float64]:
        """Return log-probabilities (log-densities in a Box) of actions, as the policy would choose them now.

        Args:
            observations: Batch in the structure of the observation space.
            actions: Batch in the structure of the action space.

        Returns:
            One number per row, summed over the parts of an action, shape (batch,); -inf for an action never taken.
        """


@runtime_checkable
class EpisodeAware(Protocol):
    """An environment that is given which attempt follows, before each reset.

    Meant for test environments that inject faults by (episode, attempt). An environment whose
    behaviour depends on the attempt otherwise is not a function of its seed.
    """

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Take note of the episode that the next ``reset`` starts."""
