"""Inference in batches: rows share a forward pass only where a row's result does not depend on its neighbours.

A matrix product may give a row other last bits at another batch size or position. The result of a row is
therefore *defined* as that of a block of :data:`BLOCK` rows, provided that blocks are position-invariant on
this machine, and as that of a batch of one otherwise. Before its first episode a runner probes which holds,
and whether one pass over all lanes gives the same bits as blocks do; if not, it computes by blocks.
What the probe found, with a digest of the outputs, is the runner's *numerics key*: runners whose keys differ
do not work on one evaluation.
"""

from __future__ import annotations

import os
import sys
from copy import copy
from functools import partial
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.config.settings import PolicySection
from rl_eval.errors import PolicyUnavailable
from rl_eval.policies.inference.policy_memory import likely_cause, module_tensors_kept
from rl_eval.policies.inference.probe import BLOCK, Probe
from rl_eval.policies.inference.spaces import (
    ActionReader,
    ObservationBatch,
    assign_rows,
    copy_batch,
    no_grad,
    take_rows,
)
from rl_eval.policies.inference.sweep_log import SweepLog
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Policy, Recurrent
from rl_eval.weights import module_of

__all__ = ["BLOCK", "Inference"]

Array = npt.NDArray[Any]

_BATCHED: Final = (
    "policy.inference is batched: each forward pass has the rows that are live, so the last bits of an action may "
    "depend on the number of runners and lanes and on faults"
)
_CLIPPED: Final = {
    "clip": "the policy returned actions outside of the bounds of the action space, which were clipped into them; with "
    "policy.actions=none the environment gets them as they are",
    "unsquash": "the policy returned actions outside of [-1, 1], which is mapped onto the bounds of the action space: "
    "they were clipped",
}
"""By ``policy.actions``."""


class Inference:
    """The policy, applied to all live lanes at once.

    Args:
        policy: Maps batches to batches.
        observation_space: Space of one observation.
        action_space: Space of one action.
        lanes: Number of lanes; rows beyond them pad the last block.
        section: How it acts: ``deterministic``, ``actions``, ``inference``, ``allow_nondeterministic``; and where.
    """

    def __init__(
        self,
        policy: Policy,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        lanes: int,
        section: PolicySection,
    ) -> None:
        self._policy = policy
        self._allow_nondeterministic = section.allow_nondeterministic
        self._deterministic = section.deterministic
        self._device = section.device
        self._reader = ActionReader(action_space, section.actions)
        self._rows = -(-lanes // BLOCK) * BLOCK
        self.observations = ObservationBatch(observation_space, self._rows)
        self.live = np.zeros(self._rows, bool)
        self._seeds = np.zeros(self._rows, np.int64)
        self._steps = np.zeros(self._rows, np.int64)
        self._fresh_state = self._initial_state()
        self._state = copy_batch(self._fresh_state)
        self._chunk = self._rows
        self._batched = section.inference == "batched"
        self._overwrites = False
        self.keeps_outputs = False
        """Whether :meth:`outputs` will be asked for what the policy computes."""
        self._computed: list[tuple[Any, Any]] = []
        """Of the last :meth:`act`: rows of each forward pass, and what the policy computed for them besides actions."""
        self._outputs: dict[int, Any] | None = None
        """The same by lane, once it was asked for."""
        self.sweeps = self._sweep_log()
        """What records whole sweeps; None where observations or actions are nested."""
        self.numerics: dict[str, Any] = {}
        """The numerics key; empty until :meth:`probe`."""
        self._verdict: tuple[str, ...] = ()
        self._of_the_policy: tuple[str, ...] = getattr(policy, "result_notes", ())

    # ------------------------------------------------------------------ episodes

    def begin(self, lane: int, seed: int) -> None:
        """Start an episode: fresh recurrent state, noise from the episode's seed."""
        self.live[lane] = True
        self._seeds[lane] = seed
        self._steps[lane] = 0
        if self._state is not None:
            with no_grad():
                tree.map_structure(
                    lambda ours, fresh: assign_rows(ours, slice(lane, lane + 1), fresh[lane : lane + 1]),
                    self._state,
                    self._fresh_state,
                )

    def end(self, lane: int) -> None:
        """Free the lane."""
        self.live[lane] = False

    def act(self) -> tuple[Any, dict[int, Exception]]:
        """Choose an action for every live lane.

        Returns:
            Actions indexable by lane, and the error of each lane whose row the policy failed on.
        """
        self._computed, self._outputs = [], None
        with no_grad():
            try:
                actions = self._act_batched() if self._batched else self._act_by_chunks(self._chunk)
                errors: dict[int, Exception] = {}
            except PolicyUnavailable:
                raise
            except Exception:
                actions, errors = self._act_alone()
        self._steps += self.live
        if self.sweeps is not None and self.sweeps.wanted:
            self.sweeps.add(self.observations.arrays, actions, self._computed)
        return self._reader.split(actions), errors

    def act_on(self, ready: npt.NDArray[np.bool_]) -> tuple[Any, dict[int, Exception]]:
        """Choose an action for some of the live lanes; the episodes of the others stay where they are.

        A row does not depend on its neighbours, so each gets what it would have got in a pass over all.
        """
        others, live, former = np.flatnonzero(~ready), self.live, copy_batch(self._state)
        self.live = ready
        try:
            return self.act()
        finally:
            self.live = live
            if self._state is not None:
                with no_grad():
                    tree.map_structure(
                        lambda ours, kept: assign_rows(ours, others, take_rows(kept, others)), self._state, former
                    )

    @property
    def rows_per_pass(self) -> int | None:
        """Rows of one forward pass; None for all lanes at once."""
        return None if self._chunk == self._rows else self._chunk

    def outputs(self, lane: int) -> Any:
        """Return the row of what the policy's last ``act`` computed besides actions, None if it does not tell."""
        if self._outputs is None:
            self._outputs = {}
            for rows, computed in self._computed:
                places = np.arange(self._rows)[rows].tolist()
                self._outputs |= {at: take_rows(computed, row) for row, at in enumerate(places) if self.live[at]}
        return self._outputs.get(lane)

    def _sweep_log(self) -> SweepLog | None:
        space, observations = self._reader.structure, self.observations.arrays
        if isinstance(space, (dict, tuple)) or not isinstance(observations, np.ndarray):
            return None
        return SweepLog(observations, np.empty((self._rows, *(space.shape or ())), space.dtype))

    def _keep_outputs(self, rows: Any) -> None:
        if (computed := getattr(self._policy, "outputs", None)) is not None:
            self._computed.append((rows, computed))

    def _act_batched(self) -> Any:
        """One forward pass over the live rows, whatever their number."""
        rows = np.flatnonzero(self.live)
        actions, state = self._forward(rows, np.ones(len(rows), bool))
        if self._state is not None:
            tree.map_structure(lambda ours, new: assign_rows(ours, rows, new), self._state, state)
        batch = tree.map_structure(lambda leaf: np.zeros((self._rows, *leaf.shape[1:]), leaf.dtype), actions)
        tree.map_structure(lambda whole, part: assign_rows(whole, rows, part), batch, actions)
        return batch

    def _act_by_chunks(self, chunk: int) -> Any:
        """One forward pass per chunk that has a live lane; state changes only if all succeed."""
        if chunk == self._rows:
            actions, state = self._forward(None, self.live)
            self._keep_state(0, chunk, state)
            return actions
        parts = [
            (start, *self._forward(slice(start, start + chunk), self.live[start : start + chunk]))
            for start in range(0, self._rows, chunk)
            if self.live[start : start + chunk].any()
        ]
        for start, _, state in parts:
            self._keep_state(start, start + chunk, state)
        return self._gather([(start, actions) for start, actions, _ in parts])

    def _act_alone(self) -> tuple[Any, dict[int, Exception]]:
        """Find whose row the policy fails on: one pass per live lane, over copies of its row.

        The others get what they would have got anyway, since a row does not depend on its neighbours; so one
        bad observation costs one episode an attempt, in every layout.
        """
        self._computed = []
        errors: dict[int, Exception] = {}
        parts = []
        copies = min(self._chunk, BLOCK)
        for lane in map(int, np.flatnonzero(self.live)):
            try:
                actions, state = self._forward(np.full(copies, lane), np.ones(copies, bool))
            except PolicyUnavailable:
                raise
            except Exception as error:
                errors[lane] = error
                continue
            if self._state is not None:
                self._keep_state(lane, lane + 1, take_rows(state, slice(0, 1)))
            parts.append((lane, take_rows(actions, slice(0, 1))))
        return self._gather(parts), errors

    def _gather(self, parts: list[tuple[int, Any]]) -> Any:
        """Lay chunks of actions into one batch."""
        if not parts:
            return tree.map_structure(lambda leaf: np.zeros((self._rows, *(leaf.shape or ()))), self._reader.structure)
        batch = tree.map_structure(lambda leaf: np.zeros((self._rows, *leaf.shape[1:]), leaf.dtype), parts[0][1])
        for start, actions in parts:
            tree.map_structure(
                lambda whole, part, start=start: assign_rows(whole, slice(start, start + len(part)), part),
                batch,
                actions,
            )
        return batch

    def _forward(self, rows: Any, live: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
        """Act for some rows (a slice or indices; None for all), of which those of ``live`` count."""
        observations = self.observations.arrays if rows is None else take_rows(self.observations.arrays, rows)
        rows = slice(None) if rows is None else rows
        if self._overwrites:
            # Should it fail afterwards, each row is computed again, from what the environment gave.
            observations = copy_batch(observations)
        # A policy may change its state in place and fail, so it gets a copy.
        state = None if self._state is None else copy_batch(take_rows(self._state, rows))
        noise = None if self._deterministic else EpisodeNoise(self._seeds[rows], self._steps[rows])
        actions, state = self._policy.act(observations, state, live, noise)
        if self.keeps_outputs:
            self._keep_outputs(rows)
        return self._reader.read(actions, live), state

    # ------------------------------------------------------------------ recurrent state

    def _initial_state(self) -> Any:
        if not isinstance(self._policy, Recurrent):
            return None
        with no_grad():
            return self._policy.initial_state(self._rows)

    def _keep_state(self, start: int, stop: int, state: Any) -> None:
        if self._state is not None:
            tree.map_structure(lambda ours, new: assign_rows(ours, slice(start, stop), new), self._state, state)

    # ------------------------------------------------------------------ notes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the result needs to know about how the policy is computed, and its actions are used."""
        clipped = (_CLIPPED[self._reader.mode],) if self._reader.clipped else ()
        return (*self._of_the_policy, *self._verdict, *clipped)

    def forget_notes(self) -> None:
        """Note again what episodes showed before."""
        self._reader.clipped = False
        self.observations.forget_notes()

    # ------------------------------------------------------------------ the probe

    def probe(self) -> None:
        """Find out which rows may share a forward pass and whether the policy repeats itself; write the numerics key.

        Raises:
            ConfigError: The policy cannot act as configured, or gives other results each time it is asked.
            PolicyError: The policy's actions do not fit the action space, on any observation.
        """
        with no_grad():
            probe = self._new_probe()
            if self._batched:
                probe.check_shapes()
                self._chunk, self._verdict = 1, (_BATCHED,)
                self.numerics = {"reference": "batched", "outputs": ""} | self._machine()
                return
            found = probe.run()
        self._chunk = {"whole": self._rows, "block": BLOCK, "row": 1}[found.verdict]
        self._overwrites = found.overwrites
        self._verdict = found.notes
        self.numerics = {
            "reference": "row" if found.verdict == "row" else f"block of {BLOCK}",
            "outputs": found.outputs,
        } | self._machine()

    def likely_cause(self) -> str:
        """Return the likely reason why the policy does not repeat itself; empty if nothing that it keeps shows one."""
        probe = self._new_probe()
        with no_grad(), module_tensors_kept(self._policy):
            return likely_cause(self._policy, probe.act_once, partial(probe.act_once, other=True))

    def _new_probe(self) -> Probe:
        return Probe(
            self._policy,
            self.observations,
            copy(self._reader),  # Actions for made-up observations may be clipped.
            self._fresh_state,
            deterministic=self._deterministic,
            allow_nondeterministic=self._allow_nondeterministic,
        )

    def _machine(self) -> dict[str, Any]:
        """Say what computes the policy: torch if it is a module, whether or not something else has loaded torch."""
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
