"""Protocols of users' objects: policies, environments that know their episode, contexts."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


class EnvContext(dict[str, Any]):
    """Argument of an environment factory: the configured keyword arguments, and the position of the environment.

    Index fields are for ports, devices and folders. If an environment's *behaviour* depends on them,
    the result depends on the number of runners and environments.

    Args:
        kwargs: ``env_kwargs`` of the config, which become the items of this dict.
        runner_index: Index of the runner, from 0.
        lane_index: Index of the environment slot inside the runner, from 0.
        num_runners: Configured number of runners.
        remote: Whether the slot has a separate process.
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
    """Random numbers for the actions of each lane's episode. They do not depend on the process."""

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return the next ``count`` uniform numbers in (0, 1) for the step of each lane, shape (batch, count)."""

    def normal(self, count: int) -> npt.NDArray[np.float64]:
        """Return the next ``count`` standard normal numbers for the step of each lane, shape (batch, count)."""


@runtime_checkable
class Policy(Protocol):
    """Map from a batch of observations to a batch of actions.

    A policy may also implement :class:`Recurrent`, :class:`Probeable`, :class:`ReportsConnections`,
    :class:`ActionLogProb`, :class:`Deferred` and :class:`TakesDeviceArrays`.
    """

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        r"""Choose actions.

        Args:
            observations: Batch in the structure of the observation space; each leaf is an array of
                shape (batch, \\*leaf_shape). Rows of lanes that are not live contain old values.
            state: State from the last call, with the rows of new episodes reset; None without
                ``initial_state``.
            live: Mask of lanes that run an episode, shape (batch,).
            noise: Randomness of each lane's episode; None when ``deterministic`` is set.

        Returns:
            Actions, a batch in the structure of the action space, and the next state.

        Raises:
            PolicyUnavailable: The policy cannot act for now. Another runner replaces the runner after a pause, and no
                episode uses up an attempt. Any other exception uses up an attempt of the episodes whose rows cause it.
        """


@runtime_checkable
class Recurrent(Protocol):
    """Policy with a recurrent state, which is reset at the start of every episode."""

    def initial_state(self, batch_size: int) -> Any:
        """Return the state of new episodes: nested arrays or tensors with the leading dimension ``batch_size``."""


@runtime_checkable
class Probeable(Protocol):
    """Policy that shows the numbers from which it chooses actions."""

    def probe_outputs(self, observations: Any) -> list[Any]:
        """Return arrays such as logits, with a leading batch dimension.

        The probe compares their bits, which an argmax would hide.
        """


class ReportsConnections(Protocol):
    """Policy that calls a server, and reports when it has opened a new connection.

    After the last episode, every policy is probed again. A policy of this kind is also probed after each new
    connection, so that fewer episodes are set aside if another policy answers there.
    """

    connections: int
    """Number of connections that the policy has opened."""


class Answer(NamedTuple):
    """Answer of a :class:`Deferred` policy to the rows of one request, or to some of them.

    A second answer to a row is ignored. If several rows have one error, each of them is sent again in its own request.
    """

    request: int
    """Number of the request."""
    actions: Any = None
    """Actions, with a row for each row of the answer."""
    state: Any = None
    """Next state of these rows; None for a policy without state."""
    error: BaseException | None = None
    """Error for all rows of the answer; then there are no actions."""
    rows: Any = None
    """Places of these rows in the request; None for all of its rows."""


@runtime_checkable
class Deferred(Protocol):
    """Policy whose answers come later, such as the client of a server. Its ``act`` sends a request and waits.

    A runner with one process per environment sends rows when they are ready, and waits for answers and environments
    together. A vector runner steps one half of its environments while the other half waits for answers. If the policy
    has a method ``ended(state)``, it is called with the row of the state when an episode ends, and with the state of an
    answer that comes after the end.
    """

    def send(self, observations: Any, state: Any, noise: NoiseSource | None) -> int:
        """Send a request, without waiting; return its number.

        Args:
            observations: Batch in the structure of the observation space, with a row for each episode that needs an
                action.
            state: State of these rows; None without ``initial_state``.
            noise: Randomness of these rows; None if ``deterministic`` is set.
        """

    def received(self) -> list[Answer]:
        """Return the answers since the last call, without waiting.

        Raises:
            PolicyUnavailable: The policy cannot answer for now; see :meth:`Policy.act`.
        """

    def fileno(self) -> int:
        """Return the file descriptor that can be read when an answer may have come."""


class TakesDeviceArrays(Protocol):
    """Policy that takes observations in the arrays of a batched simulator: NumPy, torch or JAX, on their device.

    It gets these arrays if ``policy.inference`` and ``runners.runner`` are ``batched``. Otherwise it gets NumPy arrays.
    """

    takes_device_arrays: ClassVar[bool]
    """Must be True."""


@runtime_checkable
class ActionLogProb(Protocol):
    """Policy that returns the log-probability of any action, given only the observation."""

    def log_prob(self, observations: Any, actions: Any) -> npt.NDArray[np.float64]:
        """Return the log-probabilities of actions under the current policy; log-densities for a Box space.

        Args:
            observations: Batch in the structure of the observation space.
            actions: Batch in the structure of the action space.

        Returns:
            One number per row, shape (batch,), summed over the parts of an action; -inf for an action that the policy
            never takes.
        """


@runtime_checkable
class EpisodeAware(Protocol):
    """Environment that receives the next episode and attempt before each reset.

    It is for test environments that inject faults by (episode, attempt). Any other environment must not
    depend on the attempt. Otherwise its episodes would not be a function of the seed.
    """

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Receive the episode that the next ``reset`` starts.

        Args:
            index: Index of the episode, counted from the first episode of the root seed. So the index does not depend
                on ``evaluation.first_index``.
            seed: Seed of the episode.
            attempt: Number of the attempt, from 1.
        """
