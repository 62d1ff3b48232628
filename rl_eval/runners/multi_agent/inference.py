"""Inference for agents of many episodes: one batched forward pass per policy over all slots.

Every agent has a row in its policy's batch until its episode ends. Each policy has a
:class:`~rl_eval.policies.inference.inference.RowInference`, which makes each row independent of the other rows. Its
lanes are the rows of this module. Noise comes from the episode's seed and the agent's seat, so it does not depend on
the number of runners and environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from rl_eval.config.settings import PolicySection
from rl_eval.errors import EnvError, PolicyError, UsageError
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.protocol import NO_ANSWERS, Answers
from rl_eval.policies.inference.spaces import copy_batch, take_rows
from rl_eval.protocols import Policy
from rl_eval.scheduling.plan import GAMMA, mix

_SEAT: Final = np.uint64(0xA0761D6478BD642F)


def seat_seeds(seed: int, seats: int) -> list[int]:
    """Return a noise seed for each seat in an episode. The seeds are distinct and have 63 bits."""
    keys = mix(np.full(seats, seed, np.uint64) + _SEAT)
    own = mix(keys + np.arange(1, seats + 1, dtype=np.uint64) * GAMMA)
    return [int(value) for value in own >> np.uint64(1)]


@final
class PolicyInference(RowInference):
    """Inference of one policy for its agents in all slots.

    Args:
        policy: Maps batches to batches.
        spaces: Observation space and action space of the policy's agents.
        rows: Maximum number of agents for which the policy acts at the same time, over all slots.
        section: Settings of the policy.
    """

    def __init__(
        self, policy: Policy, spaces: tuple[gym.Space[Any], gym.Space[Any]], rows: int, section: PolicySection
    ) -> None:
        super().__init__(policy, *spaces, rows, section)
        self.free = list(range(rows))[::-1]
        """Rows without an agent. The next agent gets the last row of the list."""
        self.holders: dict[int, tuple[int, Any]] = {}
        """Lane and agent of each row with an agent."""
        self.chosen: Sequence[Any] = ()
        """Last chosen actions, by row."""
        self._masks = _masks_of(spaces, self.observations.arrays)

    def choose(self) -> dict[int, BaseException]:
        """Choose actions for the live rows; return the errors of rows without a valid action."""
        chosen, errors = self.act()
        self.chosen = copy_batch(chosen)  # The policy may play other agents, too, and return the same arrays.
        if self._masks is not None:
            self._refuse_illegal(errors)
        return errors

    def _refuse_illegal(self, errors: dict[int, BaseException]) -> None:
        assert self._masks is not None
        masks, start = self._masks
        rows = np.array([row for row in np.flatnonzero(self.live).tolist() if row not in errors], np.int64)
        if not len(rows):
            return
        moves = np.asarray(self.chosen)[rows] - start
        for row, move in zip(rows[masks[rows, moves] == 0], moves[masks[rows, moves] == 0], strict=True):
            errors.setdefault(
                int(row),
                PolicyError(
                    f"the action mask does not allow the action {int(move) + start}. It allows "
                    f"{(np.flatnonzero(masks[row]) + start).tolist()}",
                    key="action",
                    value=int(move) + start,
                    fix="Read observation['action_mask'] in the policy, or remove the mask from the observation to "
                    "let the environment decide.",
                ),
            )

    @override
    def _keep_state(self, rows: Any, state: Any) -> None:
        """Store the new state of rows that have acted; the state of a waiting agent does not change."""
        acted = np.flatnonzero(self.live[rows])
        super()._keep_state(np.arange(len(self.live))[rows][acted], take_rows(state, acted))


class _Place(NamedTuple):
    """Row of an agent."""

    inference: PolicyInference
    row: int


@final
class AgentsInference:
    """Inference for all agents in all slots. For one agent per slot, see :class:`RowInference`.

    Args:
        build: Takes the id of a policy, and builds an inference for it. Called again if all rows are in use.
        names: Ids of the policies.
        agents: Agents in the order of seats, each with the id of a policy that acts for this agent in some episode.
        lanes: Number of slots.
    """

    def __init__(
        self, build: Callable[[str], PolicyInference], names: Sequence[str], agents: Mapping[Any, str], lanes: int
    ) -> None:
        self._build = build
        self._keeps_outputs = False
        self._policies = {name: [self._listening(build(name))] for name in names}
        """Inferences of each policy, by id. A policy has more than one if the first had no free row."""
        self._agents = dict(agents)
        self._seats: list[dict[Any, tuple[str, int]]] = [{} for _ in range(lanes)]
        """Policy and noise seed of each agent, by lane."""
        self._places: list[dict[Any, _Place]] = [{} for _ in range(lanes)]
        """Rows of the agents that have appeared, by lane."""
        self._acting: list[list[tuple[Any, PolicyInference, int]]] = [[] for _ in range(lanes)]
        """Agents that must act, each with its inference and its row there, by lane."""
        self.live = np.zeros(lanes, bool)
        self.observations = self
        self.note: Callable[[int, str, str], None] = lambda *_: None
        """Called with the lane, a description of an unusual observation, and the value."""
        self.numerics: dict[str, Any] = {}
        """The numerics key; empty until :meth:`probe`."""
        self.probes = 0
        self._answers = NO_ANSWERS

    # ------------------------------------------------------------------ episodes

    def seat(self, lane: int, seed: int, policies: Sequence[str]) -> None:
        """Set the policy of each seat in the next episode of a lane."""
        seeds = seat_seeds(seed, len(policies))
        self._seats[lane] = dict(zip(self._agents, zip(policies, seeds, strict=True), strict=True))

    def begin(self, lane: int, seed: int) -> None:
        """Start an episode. :meth:`seat` and :meth:`write` must be called first."""
        self.live[lane] = True

    def end(self, lane: int) -> None:
        """Free the lane and the rows of its agents."""
        self.live[lane] = False
        self._acting[lane] = []
        for inference, row in self._places[lane].values():
            inference.end(row)
            del inference.holders[row]
            inference.free.append(row)
        self._places[lane] = {}

    def act(self) -> tuple[list[dict[Any, Any]], dict[int, BaseException]]:
        """Choose an action for every agent that must act.

        Returns:
            Actions by lane and agent, and the error of each lane in which a policy failed.
        """
        errors: dict[int, BaseException] = {}
        probes = 0
        for inference in self._inferences():
            if inference.live.any():
                for row, error in inference.choose().items():
                    lane, agent = inference.holders[row]
                    errors.setdefault(lane, _of_agent(agent, error))
            probes += inference.probes
        if probes != self.probes:
            self._join_numerics()
        return [{agent: at.chosen[row] for agent, at, row in acting} for acting in self._acting], errors

    def ask(self, lanes: Sequence[int]) -> None:
        """Choose the actions of all live lanes; ``lanes`` must be all of them."""
        self._answers = lanes, *self.act()

    def answered(self) -> Answers:
        """Return the answers since the last call."""
        answers, self._answers = self._answers, NO_ANSWERS
        return answers

    @property
    def keeps_outputs(self) -> bool:
        """Whether the additional outputs of policies are kept for observers."""
        return self._keeps_outputs

    @keeps_outputs.setter
    def keeps_outputs(self, wanted: bool) -> None:
        """Set whether the additional outputs of all policies are kept."""
        self._keeps_outputs = wanted
        for inference in self._inferences():
            inference.keeps_outputs = wanted

    def outputs(self, lane: int) -> dict[Any, Any]:
        """Return the additional outputs of the policies, by agent."""
        return {agent: inference.outputs(row) for agent, inference, row in self._acting[lane]}

    # ------------------------------------------------------------------ observations

    def write(self, lane: int, observations: Mapping[Any, Any]) -> None:
        """Write the observations of the agents that must act next. Only these agents act.

        Raises:
            EnvError: An observation does not fit its space.
        """
        for _, inference, row in self._acting[lane]:
            inference.live[row] = False
        places = self._places[lane]
        self._acting[lane] = acting = []
        for agent, observation in observations.items():
            inference, row = places.get(agent) or self._join(lane, agent)
            try:
                inference.observations.write(row, observation)
            except EnvError as error:
                problem = f"agent {agent!r}: {error.problem}"
                raise EnvError(problem, key=error.key, value=error.value, fix=error.fix) from error
            inference.live[row] = True
            acting.append((agent, inference, row))

    @property
    def has_texts(self) -> bool:
        """Whether a part of some agent's observation is a text."""
        return any(inference.observations.has_texts for inference in self._inferences())

    def learn_texts(self, observations: Sequence[Any]) -> None:
        """Probe each policy with the texts of its agents that act first in these episodes."""
        for name, pages in self._policies.items():
            own = [seen for one in observations for agent, seen in one.items() if self._agents[agent] == name]
            pages[0].observations.learn_texts(own)

    def content(self, observations: Mapping[Any, Any]) -> bytes:
        """Return, as bytes for a trace, the content of the observations as policies receive them."""
        parts = [
            str(agent).encode() + self._policies[self._agents[agent]][0].observations.content(observation)
            for agent, observation in observations.items()
        ]
        return b"".join(parts)

    def clear(self, lane: int) -> None:
        """Set the rows of a lane to zero, because policies must not see its observations."""
        for _, inference, row in self._acting[lane]:
            inference.observations.clear(row)

    def nonfinite_rows(self, live: npt.NDArray[np.bool_]) -> list[int]:
        """Return the lanes with a NaN or infinite observation of an agent."""
        found = {
            inference.holders[row][0]
            for inference in self._inferences()
            for row in inference.observations.nonfinite_rows(inference.live)
        }
        return sorted(found)

    def describe_nonfinite(self, lane: int) -> str:
        """Return a description of the NaN or infinite part of an agent's observation."""
        for agent, inference, row in self._acting[lane]:
            if row in inference.observations.nonfinite_rows(inference.live):
                return f"agent {agent!r}: {inference.observations.describe_nonfinite(row)}"
        raise AssertionError(lane)

    def look_outside(self, live: npt.NDArray[np.bool_]) -> None:
        """Add notes on observations outside of their spaces."""
        for inference in self._inferences():
            inference.observations.look_outside(inference.live)

    def forget_notes(self) -> None:
        """Allow the same notes to be reported again."""
        for inference in self._inferences():
            inference.forget_notes()

    # ------------------------------------------------------------------ the probe

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how each policy is computed, for readers of the result."""
        found = {
            name: dict.fromkeys(note for page in pages for note in page.notes) for name, pages in self._policies.items()
        }
        if len(found) == 1:
            return tuple(*found.values())
        return tuple(f"policy {name!r}: {note}" for name, notes in found.items() for note in notes)

    def probe(self) -> None:
        """Probe every policy, and write the numerics key.

        Raises:
            ConfigError: A policy cannot act as configured, or gives different results for the same call.
            PolicyError: The actions of a policy do not fit the action space of its agents.
        """
        for name, pages in self._policies.items():
            for page in pages:
                _probe(name, page)
        self.numerics = self._joined_numerics()

    def act_once(self, other: bool) -> None:
        """Act on generated observations with every policy, with ``other`` on different ones. Ignore errors."""
        for inference in self._inferences():
            inference.act_once(other)

    def probe_again(self) -> None:
        """Compute the outputs of the probe again for every policy."""
        for inference in self._inferences():
            inference.probe_again()
        self._join_numerics()

    def _join_numerics(self) -> None:
        """Update the numerics key, because a policy was probed again."""
        # A new dict, because callers compare it with the former one.
        self.numerics = self.numerics | self._joined_numerics()
        self.probes = sum(inference.probes for inference in self._inferences())

    def _joined_numerics(self) -> dict[str, Any]:
        # A single policy has the same key as with one agent.
        only = len(self._policies) == 1
        return {
            key if only else f"{name}/{key}": value
            for name, pages in self._policies.items()
            for key, value in pages[0].numerics.items()
        }

    # ------------------------------------------------------------------ rows

    def _join(self, lane: int, agent: Any) -> _Place:
        """Assign a row to an agent that appears for the first time in its episode."""
        name, seed = self._seats[lane][agent]
        inference = next((page for page in self._policies[name] if page.free), None) or self._add_page(name)
        row = inference.free.pop()
        inference.begin(row, seed)
        inference.holders[row] = lane, agent
        self._places[lane][agent] = place = _Place(inference, row)
        return place

    def _add_page(self, name: str) -> PolicyInference:
        """Add rows for a policy that acts for more agents at a time than in the first episodes of the plan."""
        page = self._listening(self._build(name))
        page.observations.texts = self._policies[name][0].observations.texts
        page.probe()
        self._policies[name].append(page)
        return page

    def _listening(self, page: PolicyInference) -> PolicyInference:
        def note(row: int, what: str, shown: str) -> None:
            lane, agent = page.holders[row]
            self.note(lane, f"{what} (agent {agent!r})", shown)

        page.observations.note = note
        page.keeps_outputs = self._keeps_outputs
        return page

    def _inferences(self) -> list[PolicyInference]:
        return [page for pages in self._policies.values() for page in pages]


def _masks_of(spaces: tuple[gym.Space[Any], gym.Space[Any]], arrays: Any) -> tuple[npt.NDArray[Any], int] | None:
    """Return the action masks of all rows, and the action of a mask's first entry; None without action masks."""
    observations, actions = spaces
    if not isinstance(actions, gym.spaces.Discrete) or not isinstance(observations, gym.spaces.Dict):
        return None
    masks = arrays.get("action_mask")
    fits = isinstance(masks, np.ndarray) and masks.shape[1:] == (int(actions.n),)
    return (masks, int(actions.start)) if fits else None


def _of_agent(agent: Any, error: BaseException) -> BaseException:
    if not isinstance(error, PolicyError):
        return error
    return PolicyError(f"agent {agent!r}: {error.problem}", key=error.key, value=error.value, fix=error.fix)


def _probe(name: str, page: PolicyInference) -> None:
    """Probe a policy, and name it in errors."""
    try:
        page.probe()
    except (PolicyError, UsageError) as error:
        problem = f"policy {name!r}: {error.problem}"
        raise type(error)(problem, key=error.key, value=error.value, fix=error.fix) from error
