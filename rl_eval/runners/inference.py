"""Which rows share a forward pass, so that a row's result does not depend on its neighbours.

A matrix product may give a row other last bits at another batch size or position. The result of a row is
therefore *defined* as that of a block of :data:`BLOCK` rows, provided that blocks are position-invariant on
this machine, and as that of a batch of one otherwise. Before its first episode a runner probes which holds,
and whether one pass over all lanes gives the same bits as blocks do; if not, it computes by blocks.
What the probe found, with a digest of the outputs, is the runner's *numerics key*: runners whose keys differ
do not work on one evaluation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from typing import Any, Final, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.errors import ConfigError, PolicyError
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Policy
from rl_eval.runners.spaces import ActionReader, ObservationBatch

__all__ = ["BLOCK", "Inference"]

BLOCK: Final = 16
"""Rows of the reference block."""

_POOL: Final = 4 * BLOCK
"""Made-up observations that the probe works with."""
_PROBE_ROUNDS: Final = 4

Array = npt.NDArray[Any]


class Inference:
    """The policy, applied to all live lanes at once.

    Args:
        policy: Maps batches to batches.
        observation_space: Space of one observation.
        action_space: Space of one action.
        lanes: Number of lanes; rows beyond them pad the last block.
        deterministic: Give the policy no noise.
        actions: How Box actions are made to fit.
    """

    def __init__(
        self,
        policy: Policy,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        lanes: int,
        *,
        deterministic: bool,
        actions: Literal["clip", "unsquash", "none"],
    ) -> None:
        self._policy = policy
        self._deterministic = deterministic
        self._reader = ActionReader(action_space, actions)
        self._rows = -(-lanes // BLOCK) * BLOCK
        self.observations = ObservationBatch(observation_space, self._rows)
        self.live = np.zeros(self._rows, bool)
        self._seeds = np.zeros(self._rows, np.int64)
        self._steps = np.zeros(self._rows, np.int64)
        self._fresh_state = self._initial_state()
        self._state = self._copy(self._fresh_state)
        self._chunk = self._rows
        self.numerics: dict[str, Any] = {}
        """The numerics key; empty until :meth:`probe`."""

    # ------------------------------------------------------------------ episodes

    def begin(self, lane: int, seed: int) -> None:
        """Start an episode: fresh recurrent state, noise from the episode's seed."""
        self.live[lane] = True
        self._seeds[lane] = seed
        self._steps[lane] = 0
        if self._state is not None:
            with _inference_mode():
                tree.map_structure(
                    lambda ours, fresh: _assign(ours, slice(lane, lane + 1), fresh[lane : lane + 1]),
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
        with _inference_mode():
            try:
                actions = self._act_by_chunks(self._chunk)
                errors: dict[int, Exception] = {}
            except Exception:
                actions, errors = self._act_alone()
        self._steps += self.live
        return self._reader.split(actions), errors

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
        errors: dict[int, Exception] = {}
        parts = []
        copies = min(self._chunk, BLOCK)
        for lane in map(int, np.flatnonzero(self.live)):
            try:
                actions, state = self._forward(np.full(copies, lane), np.ones(copies, bool))
            except Exception as error:
                errors[lane] = error
                continue
            if self._state is not None:
                self._keep_state(lane, lane + 1, _slice(state, slice(0, 1)))
            parts.append((lane, _slice(actions, slice(0, 1))))
        return self._gather(parts), errors

    def _gather(self, parts: list[tuple[int, Any]]) -> Any:
        """Lay chunks of actions into one batch."""
        if not parts:
            return tree.map_structure(lambda leaf: np.zeros((self._rows, *(leaf.shape or ()))), self._reader.structure)
        batch = tree.map_structure(lambda leaf: np.zeros((self._rows, *leaf.shape[1:]), leaf.dtype), parts[0][1])
        for start, actions in parts:
            tree.map_structure(
                lambda whole, part, start=start: _assign(whole, slice(start, start + len(part)), part), batch, actions
            )
        return batch

    def _forward(self, rows: Any, live: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
        """Act for some rows (a slice or indices; None for all), of which those of ``live`` count."""
        observations = self.observations.arrays if rows is None else _slice(self.observations.arrays, rows)
        rows = slice(None) if rows is None else rows
        # A policy may change its state in place and fail, so it gets a copy.
        state = None if self._state is None else self._copy(_slice(self._state, rows))
        noise = None if self._deterministic else EpisodeNoise(self._seeds[rows], self._steps[rows])
        actions, state = self._policy.act(observations, state, live, noise)
        return self._reader.read(actions, live), state

    # ------------------------------------------------------------------ recurrent state

    def _initial_state(self) -> Any:
        make = getattr(self._policy, "initial_state", None)
        if make is None:
            return None
        with _inference_mode():
            return make(self._rows)

    def _copy(self, state: Any) -> Any:
        if state is None:
            return None
        with _inference_mode():
            return tree.map_structure(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else np.array(leaf), state)

    def _keep_state(self, start: int, stop: int, state: Any) -> None:
        if self._state is not None:
            tree.map_structure(lambda ours, new: _assign(ours, slice(start, stop), new), self._state, state)

    # ------------------------------------------------------------------ the probe

    def probe(self) -> None:
        """Find out which rows may share a forward pass, and write the numerics key.

        Raises:
            ConfigError: The policy cannot act as configured.
            PolicyError: The policy's actions do not fit the action space, on any observation.
        """
        with _inference_mode():
            verdict, digest = self._judge()
        self._chunk = {"whole": self._rows, "block": BLOCK, "row": 1}[verdict]
        self.numerics = {
            "reference": "row" if verdict == "row" else f"block of {BLOCK}",
            "outputs": digest,
        } | _machine(self._policy)

    def _judge(self) -> tuple[Literal["whole", "block", "row"], str]:
        # Nothing here but the last test depends on the number of lanes, so the key does not either.
        observations = self.observations.sample(_POOL, np.random.default_rng(0))
        garbage = self.observations.sample(_POOL, np.random.default_rng(1), scale=100.0)
        self._check_shapes(_slice(observations, slice(0, BLOCK)))
        try:
            reference = self._reference(observations)
            if not self._invariant(observations, garbage, reference, BLOCK):
                return "row", _digest(self._outputs(observations, np.array([0]), [0]))
            digest = _digest(reference[:BLOCK])
            whole = self._invariant(observations, garbage, reference, self._rows)
        except ConfigError:
            raise
        except Exception:
            # A policy may reject made-up observations. Alone in its batch, a row depends on nothing else.
            return "row", ""
        return ("whole" if whole else "block"), digest

    def _check_shapes(self, observations: Any) -> None:
        live = np.zeros(BLOCK, bool)
        noise = None if self._deterministic else EpisodeNoise(np.zeros(BLOCK, np.int64), np.zeros(BLOCK, np.int64))
        state = None if self._fresh_state is None else _slice(self._copy(self._fresh_state), slice(0, BLOCK))
        try:
            actions, following = self._policy.act(observations, state, live, noise)
        except (ConfigError, PolicyError):
            raise
        except Exception:
            return
        self._reader.read(actions, live)
        if state is not None and following is None:
            raise PolicyError("the policy has initial_state(), but its act() returned no next state")

    def _reference(self, observations: Any) -> list[bytes]:
        """Bytes of every pool row, computed in blocks."""
        rows: list[bytes] = []
        for start in range(0, _POOL, BLOCK):
            rows += self._outputs(observations, np.arange(start, start + BLOCK), range(BLOCK))
        return rows

    def _invariant(self, observations: Any, garbage: Any, reference: list[bytes], size: int) -> bool:
        """Whether pool rows give their reference bytes at every position of a batch, amid garbage."""
        rng = np.random.default_rng(size)
        for _ in range(_PROBE_ROUNDS):
            kept = rng.random(size) < 0.5
            for mask in (kept, ~kept):
                chosen, junk = rng.integers(0, _POOL, size), rng.integers(0, _POOL, size)
                batch = tree.map_structure(
                    lambda good, bad, chosen=chosen, junk=junk, mask=mask: np.where(
                        mask.reshape(-1, *[1] * (good.ndim - 1)), good[chosen], bad[junk]
                    ),
                    observations,
                    garbage,
                )
                positions = np.flatnonzero(mask)
                outputs = self._outputs(batch, np.arange(size), positions, seeds=chosen)
                if any(out != reference[chosen[position]] for out, position in zip(outputs, positions, strict=True)):
                    return False
        return True

    def _outputs(
        self, observations: Any, rows: npt.NDArray[np.int64], wanted: Any, seeds: npt.NDArray[np.int64] | None = None
    ) -> list[bytes]:
        """Everything that the policy computes for the wanted rows of a batch, as bytes."""
        batch = tree.map_structure(lambda leaf: leaf[rows], observations)
        size = len(rows)
        seeds = rows if seeds is None else seeds
        noise = None if self._deterministic else EpisodeNoise(seeds, np.zeros(size, np.int64))
        state = None if self._fresh_state is None else _slice(self._copy(self._fresh_state), slice(0, size))
        live = np.zeros(size, bool)
        live[list(wanted)] = True
        actions, state = self._policy.act(batch, state, live, noise)
        computed = [actions, state]
        raw = getattr(self._policy, "probe_outputs", None)
        if raw is not None:
            # An argmax hides last bits, so the probe looks at what it is taken of.
            computed.append(raw(batch))
        leaves = [
            np.asarray(leaf.cpu() if hasattr(leaf, "cpu") else leaf)
            for leaf in tree.flatten(computed)
            if leaf is not None
        ]
        return [b"".join(leaf[row].tobytes() for leaf in leaves if leaf.ndim and len(leaf) == size) for row in wanted]


def _assign(target: Any, rows: slice, values: Any) -> None:
    target[rows] = values


def _slice(nested: Any, rows: Any) -> Any:
    return tree.map_structure(lambda leaf: leaf[rows], nested)


def _digest(rows: list[bytes]) -> str:
    return hashlib.sha256(b"".join(rows)).hexdigest()[:16]


def _inference_mode() -> contextlib.AbstractContextManager[Any]:
    """Enter the inference mode of torch where torch is in use; a policy without torch does not make us import it."""
    torch = sys.modules.get("torch")
    return torch.inference_mode() if torch is not None else contextlib.nullcontext()


def _machine(policy: Policy) -> dict[str, Any]:
    """Say what computes the policy: torch if it is a module, whether or not something else has loaded torch."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(getattr(policy, "module", policy), torch.nn.Module):
        return {"numpy": np.__version__}
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "num_threads": torch.get_num_threads(),
    }
