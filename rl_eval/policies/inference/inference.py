"""Inference in batches. Rows share a forward pass only if the result of a row does not depend on the other rows.

The last bits of a row in a matrix product may depend on the size of the batch and on the row's position. So the result
of a row is *defined* as its result in a block of :data:`BLOCK` rows, if its position in the block makes no difference
on this machine. Otherwise it is defined as its result in a batch of one. Before its first episode, a runner probes
which definition applies. It also probes whether one pass over all lanes gives the same bits as blocks; if not, it
computes the rows in blocks. For few live rows, it uses the smallest passes in which the probe saw the bits of a block.
The findings of the probe, with a digest of the outputs, are the runner's *numerics key*.
Runners with different keys do not work on the same evaluation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.config.settings import PolicySection
from rl_eval.errors import PolicyError, PolicyUnavailable
from rl_eval.policies.inference.device_observations import DeviceObservations
from rl_eval.policies.inference.late import Received, Requests
from rl_eval.policies.inference.probe import BLOCK, Probe, buffers_kept, checked_answer
from rl_eval.policies.inference.protocol import NO_ANSWERS, Answers
from rl_eval.policies.inference.spaces import (
    ActionReader,
    ObservationBatch,
    assign_rows,
    copy_batch,
    no_grad,
    take_rows,
)
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Deferred, Policy, Recurrent
from rl_eval.supervision.caller import end_fork, survivable
from rl_eval.weights import module_of

if TYPE_CHECKING:
    from rl_eval.policies.inference.sweep_log import SweepLog


Array = npt.NDArray[Any]

_BATCHED: Final = (
    "policy.inference is batched, so the last bits of an action may depend on the number of runners and environments, "
    "and on faults"
)
_CLIPPED: Final = {
    "clip": "the policy returned actions outside of the bounds of the action space; these actions were clipped. With "
    "policy.actions=none, the environment gets actions without clipping",
    "unsquash": "the policy returned actions outside of [-1, 1], which is mapped onto the bounds of the action space; "
    "these actions were clipped",
}
"""Note on clipped actions, by value of ``policy.actions``."""
_ALL: Final = slice(None)


class RowInference:
    """One policy, applied to all live lanes at once. Each lane has a row in the policy's batches.

    Args:
        policy: Policy that acts on batches of observations.
        observation_space: Space of one observation.
        action_space: Space of one action.
        lanes: Number of lanes. The number of rows is this number, rounded up to a multiple of :data:`BLOCK`.
        section: Settings ``deterministic``, ``actions``, ``inference``, ``allow_nondeterministic`` and ``device``.
        observations: Class that stores the observations of all lanes.
    """

    in_blocks = False
    """Whether to compute at most a block of live rows in a block, even if one pass may have all rows."""

    def __init__(
        self,
        policy: Policy,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        lanes: int,
        section: PolicySection,
        observations: type[ObservationBatch] = ObservationBatch,
    ) -> None:
        self._policy = policy
        self._allow_nondeterministic = section.allow_nondeterministic
        self._deterministic = section.deterministic
        self._device = section.device
        self._reader = ActionReader(action_space, section.actions)
        self._lanes = lanes
        self._every_lane = slice(0, lanes)
        self._rows = -(-lanes // BLOCK) * BLOCK
        self.observations = observations(observation_space, self._rows)
        self.live = np.zeros(self._rows, bool)
        self._seeds = np.zeros(self._rows, np.int64)
        self._steps = np.zeros(self._rows, np.int64)
        with no_grad():
            self._fresh_state = policy.initial_state(self._rows) if isinstance(policy, Recurrent) else None
            _check_alike(policy, self._fresh_state)
        self._state = copy_batch(self._fresh_state)
        self._chunk = self._rows
        self._sizes: tuple[int, ...] = (BLOCK,)
        """Numbers of rows, up to a block, that a pass may have."""
        self._batched = section.inference == "batched"
        self._overwrites = False
        self.keeps_outputs = False
        """Whether to keep the policy's outputs for :meth:`outputs`."""
        self._computed: list[tuple[Any, Any]] = []
        """For each forward pass of the last :meth:`act`: its rows, and the policy's outputs for these rows."""
        self._num_live = 0
        self._answers = NO_ANSWERS
        self.requests: Requests | None = None
        """Requests to the policy, if the runner does not wait for its answers."""
        self._ended: Callable[[Any], object] | None = getattr(policy, "ended", None)
        self._outputs: dict[int, Any] | None = None
        """The same outputs by lane; None before :meth:`outputs` is called."""
        self.sweeps: SweepLog | None = None
        """Log of sweeps; None before the first call of :meth:`sweep_log`."""
        self.numerics: dict[str, Any] = {}
        """The numerics key; empty until :meth:`probe`."""
        self._acted = False
        """Whether the policy has acted on an observation of an environment."""
        self.probes = 0
        self._connections: int | None = None
        """Number of connections of the policy at the last probe; None if the policy does not report them."""
        self._verdict: tuple[str, ...] = ()
        self._of_the_policy: tuple[str, ...] = getattr(policy, "result_notes", ())

    # ------------------------------------------------------------------ episodes

    def begin(self, lane: int, seed: int) -> None:
        """Start an episode, with a new recurrent state and with noise from the episode's seed."""
        self._num_live += not self.live[lane]
        self.live[lane] = True
        self._seeds[lane] = seed
        self._steps[lane] = 0
        if self._fresh_state is None:
            return
        with no_grad():
            self._keep_state(slice(lane, lane + 1), take_rows(self._fresh_state, slice(lane, lane + 1)))

    def at_step(self, lane: int, step: int) -> None:
        """Set the number of steps of a lane's episode, for noise. The client of a server counts them."""
        self._steps[lane] = step

    def end(self, lane: int) -> None:
        """Free the lane."""
        self._num_live -= bool(self.live[lane])
        if self.live[lane] and self._ended is not None:
            self._ended(take_rows(self._state, slice(lane, lane + 1)))
        self.live[lane] = False
        if self.requests is not None:
            self.requests.waiting[lane] = False

    def act(self) -> tuple[Any, dict[int, BaseException]]:
        """Choose an action for every live lane.

        Returns:
            Actions, which can be indexed by lane, and the error of each lane for which the policy failed.
        """
        actions, errors = self.act_together()
        return self._reader.split(actions), errors

    def act_together(self) -> tuple[Any, dict[int, BaseException]]:
        """Choose an action for every live lane, as :meth:`act` does; return nested arrays of shape (rows, ...).

        Raises:
            PolicyError: At the first call, the policy takes a single observation, not a batch.
        """
        self._computed, self._outputs = [], None
        with no_grad():
            try:
                actions = self._act_in_parts()
                errors: dict[int, BaseException] = {}
            except PolicyUnavailable:
                raise
            except survivable():
                actions, errors = self._act_alone()
                first = next(iter(errors.values()), None)
                if not self._acted and isinstance(first, PolicyError) and first.key == "policy.policy":
                    raise first from None
        self._acted = True
        if not self._deterministic:
            self._steps += self.live
        if self.sweeps is not None and self.sweeps.wanted:
            self.sweeps.add(self.observations.arrays, actions, self._computed)
        if self._connections is not None and getattr(self._policy, "connections", None) != self._connections:
            self.probe_again()
        return actions, errors

    def defer(self) -> Requests | None:
        """Send the rows of :meth:`ask` without waiting for the answers, if the policy is :class:`Deferred`.

        Returns:
            The requests; None if the policy answers at once.
        """
        self.requests = Requests(self._policy, self._rows) if isinstance(self._policy, Deferred) else None
        return self.requests

    def ask(self, lanes: Sequence[int]) -> None:
        """Choose actions for some of the live lanes. Episodes in the other lanes do not advance.

        A row does not depend on the other rows, so its action is the same as in a pass over all rows. With
        ``policy.inference`` ``batched``, the last bits may differ.
        """
        if self.requests is not None:
            self._send(self.requests, np.array(lanes, np.int64))
            return
        if len(lanes) == self._num_live:
            actions, errors = self.act_together()
            self._answers = lanes, self._reader.split(actions), errors
            return
        live, former = self.live, copy_batch(self._state)
        self.live = np.zeros_like(live)
        self.live[lanes] = True
        try:
            self._answers = lanes, *self.act()
        finally:
            others, self.live = np.flatnonzero(~self.live), live
            with no_grad():
                self._keep_state(others, take_rows(former, others))

    def answered(self) -> Answers:
        """Return the answers since the last call. A local policy answers for all lanes of :meth:`ask`."""
        if self.requests is not None:
            return self._received(self.requests)
        answers, self._answers = self._answers, NO_ANSWERS
        return answers

    def _send(self, requests: Requests, lanes: npt.NDArray[np.int64]) -> None:
        noise = None if self._deterministic else EpisodeNoise(self._seeds[lanes], self._steps[lanes])
        if not self._deterministic:
            self._steps[lanes] += 1
        with no_grad():
            requests.ask(lanes, take_rows(self.observations.arrays, lanes), take_rows(self._state, lanes), noise)

    def _received(self, requests: Requests) -> Answers:
        """Return the answers that have come. Store the states of the lanes that wait for them."""
        errors: dict[int, BaseException] = {}
        parts = []
        with no_grad():
            for received in requests.received():
                lanes = received.lanes
                try:
                    parts.append((lanes, self._taken(received)))
                except PolicyUnavailable:
                    raise
                except survivable() as error:
                    if len(received.rows) > 1:  # One bad observation uses up an attempt of only one episode.
                        requests.ask_alone(received)
                        continue
                    errors |= {lane: self._explained(error, lane) for lane in lanes.tolist()}
                requests.waiting[lanes] = False
        answered = [lane for lanes, _ in parts for lane in lanes.tolist()]
        actions = self._reader.split(self._gather(parts)) if parts else ()
        if self._connections is not None and getattr(self._policy, "connections", None) != self._connections:
            self.probe_again()
        return [*answered, *errors], actions, errors

    def _taken(self, received: Received) -> Any:
        """Return the actions of the lanes that wait for an answer, and store their states."""
        answer, still = received.answer, received.still
        if answer.error is not None:
            raise answer.error
        actions, state = checked_answer(self._policy, (answer.actions, answer.state), self._state)
        actions = self._reader.read(actions, still)
        self._keep_state(received.lanes, take_rows(state, np.flatnonzero(still)))
        for row in np.flatnonzero(received.gone) if self._ended is not None else ():
            self._ended(take_rows(state, slice(row, row + 1)))  # type: ignore[misc]
        return take_rows(actions, still)

    @property
    def rows_per_pass(self) -> int | None:
        """Number of rows in one forward pass; None if one pass computes all lanes."""
        return None if self._batched or self._chunk == self._rows else self._chunk

    def outputs(self, lane: int) -> Any:
        """Return a lane's row of the policy's ``outputs`` after the last ``act``; None if the policy has none."""
        if self._outputs is None:
            self._outputs = {}
            for rows, computed in self._computed:
                places = np.arange(self._rows)[rows].tolist()
                self._outputs |= {at: take_rows(computed, row) for row, at in enumerate(places) if self.live[at]}
        return self._outputs.get(lane)

    def sweep_log(self) -> SweepLog | None:
        """Return the log of sweeps; None for nested arrays, for arrays on a device, and if answers come later."""
        from rl_eval.policies.inference.sweep_log import SweepLog

        space, observations = self._reader.structure, self.observations.arrays
        apart = isinstance(self.observations, DeviceObservations) or self.requests is not None
        if apart or isinstance(space, (dict, tuple)) or not isinstance(observations, np.ndarray):
            return None
        if self.sweeps is None:
            self.sweeps = SweepLog(observations, np.empty((self._rows, *(space.shape or ())), space.dtype))
        return self.sweeps

    def _act_in_parts(self) -> Any:
        """Run one forward pass for each part that has a live lane. Store the new states only if all passes succeed."""
        if self._chunk == self._rows and len(self._sizes) == 1 and not self.in_blocks:
            actions, state = self._forward(_ALL, self.live)
            self._keep_state(_ALL, state)
            return actions
        if self._batched:
            every = np.count_nonzero(self.live) == self._lanes
            rows = self._every_lane if every else np.flatnonzero(self.live)
            actions, state = self._forward(rows, self.live[rows])
            self._keep_state(rows, state)
            return actions if every else self._gather([(rows, actions)])
        done = []
        for rows in self._parts():
            actions, state = self._forward(rows, self.live[rows])
            done.append((rows, copy_batch(actions), copy_batch(state)))  # The next pass may return the same arrays.
        for rows, _, state in done:
            self._keep_state(rows, state)
        return self._gather([(rows, actions) for rows, actions, _ in done])

    def _parts(self) -> list[Any]:
        """Return the rows of each forward pass."""
        if len(self._sizes) == 1 and not (self.in_blocks and self._chunk > 1):
            chunks = [slice(start, start + self._chunk) for start in range(0, self._rows, self._chunk)]
            return [chunk for chunk in chunks if self.live[chunk].any()]
        count = np.count_nonzero(self.live)
        if count > BLOCK and self._chunk == self._rows:
            return [_ALL]
        blocks, rest = divmod(count, BLOCK)
        last = next(size for size in (0, *self._sizes) if size >= rest)
        # Live rows come first; rows without an episode fill up the last pass.
        rows = np.argsort(~self.live, kind="stable")[: blocks * BLOCK + last]
        return [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]

    def _act_alone(self) -> tuple[Any, dict[int, BaseException]]:
        """Find the rows on which the policy fails: run one pass per live lane, in a batch of copies of its row.

        The rows without an error get the same actions as in a pass over all rows, since a row does not depend on the
        other rows. With ``policy.inference`` ``batched``, the last bits may differ. One bad observation uses up an
        attempt of only one episode, for any number of lanes.
        """
        self._computed = []
        errors: dict[int, BaseException] = {}
        parts = []
        copies = 1 if self._ended is not None else min(self._chunk, BLOCK)  # A server forms its blocks itself.
        for lane in map(int, np.flatnonzero(self.live)):
            try:
                actions, state = self._forward(np.full(copies, lane), np.ones(copies, bool))
            except PolicyUnavailable:
                raise
            except survivable() as error:
                errors[lane] = self._explained(error, lane)
                continue
            self._keep_state(slice(lane, lane + 1), take_rows(state, slice(0, 1)))
            parts.append((slice(lane, lane + 1), copy_batch(take_rows(actions, slice(0, 1)))))
        return self._gather(parts), errors

    def _explained(self, error: BaseException, lane: int) -> BaseException:
        """Return a better error of the policy, if it can explain its error for a lane."""
        explained = getattr(self._policy, "explained", None)
        return explained(error, take_rows(self.observations.arrays, np.array([lane]))) if explained else error

    def _gather(self, parts: list[tuple[Any, Any]]) -> Any:
        """Combine the actions of some rows into one batch."""
        if not parts:
            return tree.map_structure(lambda leaf: np.zeros((self._rows, *(leaf.shape or ()))), self._reader.structure)
        batch = tree.map_structure(lambda leaf: np.zeros((self._rows, *leaf.shape[1:]), leaf.dtype), parts[0][1])
        for rows, actions in parts:
            _assign(batch, rows, actions)
        return batch

    def _forward(self, rows: Any, live: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
        """Act for some rows (a slice or indices); ``live`` marks the rows with an episode."""
        observations = self.observations.arrays if rows is _ALL else take_rows(self.observations.arrays, rows)
        if self._overwrites:
            # If the policy then fails, each row is computed again, from the environment's observations.
            observations = copy_batch(observations)
        # The policy gets a copy: it may change its state in place and then fail.
        state = copy_batch(take_rows(self._state, rows))
        noise = None if self._deterministic else EpisodeNoise(self._seeds[rows], self._steps[rows])
        actions, state = self._policy.act(observations, state, live, noise)
        end_fork()
        if self.keeps_outputs and (computed := getattr(self._policy, "outputs", None)) is not None:
            outputs = _checked_outputs(computed, len(live))
            self._computed.append((rows, copy_batch(outputs)))  # The next pass may write to the same arrays.
        return self._reader.read(actions, live), state

    def _keep_state(self, rows: Any, state: Any) -> None:
        if self._state is not None:
            _assign(self._state, rows, state)

    # ------------------------------------------------------------------ notes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for readers of the result, about how the policy is computed and how its actions are used."""
        clipped = (_CLIPPED[self._reader.mode],) if self._reader.clipped else ()
        return (*self._of_the_policy, *self._verdict, *clipped)

    def forget_notes(self) -> None:
        """Allow the same notes to be reported again."""
        self._reader.clipped = False
        self.observations.forget_notes()

    # ------------------------------------------------------------------ the probe

    def probe(self) -> None:
        """Probe which rows may share a forward pass and whether the policy repeats its results; set the numerics key.

        Raises:
            ConfigError: The policy cannot act as configured, or gives different results for the same call.
            PolicyError: The actions have the wrong structure, shape or dtype for the action space.
        """
        probe = self.new_probe()
        self._connections = None
        if self._batched:
            probe.check_shapes()
            # Whether the policy overwrites observations is not known, so rows are copied.
            self._chunk, self._verdict, self._overwrites = 1, (_BATCHED,), True
            width = {"guarantee": "conditions", "num_envs": self._lanes}
            self.numerics = {"reference": "batched", "outputs": ""} | width | self._machine()
            return
        found = probe.run()
        self._chunk = {"whole": self._rows, "block": BLOCK, "row": 1}[found.verdict]
        self._sizes, self._overwrites, self._verdict = found.sizes, found.overwrites, found.notes
        reference = "row" if found.verdict == "row" else f"block of {BLOCK}"
        promised = {} if found.repeats else {"guarantee": "conditions"}
        self.numerics = {"reference": reference, "outputs": found.outputs} | promised | self._machine()
        if found.outputs:
            self._connections = getattr(self._policy, "connections", None)

    def probe_again(self) -> None:
        """Compute the outputs of the probe again, and write their digest to the numerics key. Keep an empty digest.

        Raises:
            PolicyUnavailable: The policy cannot act for now.
        """
        if not self.numerics.get("outputs"):
            return
        digest = self.new_probe().digest_again("row" if self.numerics["reference"] == "row" else "block")
        self.numerics = self.numerics | {"outputs": digest}
        self._connections = getattr(self._policy, "connections", None)
        self.probes += 1

    def act_once(self, other: bool) -> None:
        """Act on generated observations, with ``other`` on different ones. Ignore an error of the policy."""
        with buffers_kept(self._policy):
            self.new_probe().act_once(other=other)

    def new_probe(self) -> Probe:
        """Return a probe of the policy with its current weights."""
        return Probe(
            self._policy,
            self.observations,
            copy(self._reader),  # Do not note that actions for generated observations were clipped.
            self._fresh_state,
            self._lanes,
            deterministic=self._deterministic,
            allow_nondeterministic=self._allow_nondeterministic,
        )

    def _machine(self) -> dict[str, Any]:
        """Return the version, settings and device of the policy's library: torch for a module, otherwise numpy.

        The client of a server has the facts about the server instead.
        """
        if announced := getattr(self._policy, "numerics", None):
            return {f"server/{name}": value for name, value in announced.items()}
        if module_of(self._policy) is None:
            return {"numpy": np.__version__, "device": self._device}
        torch = sys.modules["torch"]
        return {
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
            "num_threads": torch.get_num_threads(),
            "device": self._device,
        }


def _checked_outputs(outputs: Any, rows: int) -> dict[str, Any]:
    """Return the outputs of a policy besides its actions, without those that are None.

    Raises:
        PolicyError: The outputs are not a mapping of names to nested arrays with one row per observation.
    """
    fix = "Set outputs to a mapping of names to arrays with a row for each observation."
    if not isinstance(outputs, Mapping) or not all(isinstance(name, str) for name in outputs):
        problem = f"the outputs of the policy are {type(outputs).__name__}, not a mapping of names to arrays"
        raise PolicyError(problem, key="outputs", fix=fix)
    present = {name: value for name, value in outputs.items() if value is not None}
    if wrong := [np.shape(leaf) for leaf in tree.flatten(present) if not np.shape(leaf) or len(leaf) < rows]:
        problem = f"the outputs of the policy have an array of shape {wrong[0]} for a batch of {rows}"
        raise PolicyError(problem, key="outputs", fix=fix)
    return present


def _check_alike(policy: Policy, state: Any) -> None:
    """Check that all rows of a new recurrent state are equal, so that an episode does not depend on its row.

    Raises:
        PolicyError: Two rows differ.
    """
    for leaf in tree.flatten(state):
        if np.ndim(leaf) == 0 or (isinstance(leaf, np.ndarray) and leaf.dtype.hasobject):
            continue  # Equal objects can be unequal in Python.
        if not bool(((leaf == leaf[:1]) | (leaf != leaf)).all()):  # noqa: PLR0124  # NaN.
            problem = f"initial_state() of the policy {type(policy).__name__} returns rows that differ"
            fix = "Return the same state for each row: episodes start in any row."
            raise PolicyError(problem, key="initial_state", fix=fix)


def _assign(target: Any, rows: Any, values: Any) -> None:
    """Write some rows of every leaf."""
    tree.map_structure(lambda whole, part: assign_rows(whole, rows, part), target, values)
