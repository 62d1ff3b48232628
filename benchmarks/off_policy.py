"""Off-policy estimates against exact values: random tabular MDPs, the bias of each estimator, and its intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.ope import ActionValues, LoggedEpisodes, estimate

__all__ = ["TabularPolicy", "World", "measure", "random_world"]

Array = npt.NDArray[Any]

STATES: Final = 3
ACTIONS: Final = 2
HORIZON: Final = 3
GAMMA: Final = 0.9


@dataclass(frozen=True)
class TabularPolicy:
    """Acts by a table of probabilities, shape (states, actions); observations are states."""

    table: Array

    def act(self, observations: Array, state: Any, live: Array, noise: Any) -> tuple[Array, None]:
        """Choose actions by inverse CDF."""
        passed = self.table[observations].cumsum(1)[:, :-1] < noise.uniform(1)
        return passed.sum(1), None

    def log_prob(self, observations: Array, actions: Array) -> Array:
        """Return the logarithms of the table's entries."""
        with np.errstate(divide="ignore"):
            return np.log(self.table[observations, actions])


@dataclass(frozen=True)
class World:
    """An MDP of at most ``horizon`` steps, and two policies in it."""

    start: Array
    """Shape (states,)."""
    moves: Array
    """Shape (states, actions, states + 1); the last one ends the episode."""
    rewards: Array
    """Mean rewards, shape (states, actions)."""
    behaviour: Array
    """Shape (states, actions)."""
    target: Array
    horizon: int = HORIZON

    def values(self, gamma: float, policy: Array | None = None) -> tuple[Array, Array]:
        """Return the exact action values, shape (horizon, states, actions), and the exact value of a policy."""
        policy = self.target if policy is None else policy
        q, following = np.zeros((self.horizon, *self.rewards.shape)), np.zeros(len(self.start) + 1)
        for step in reversed(range(self.horizon)):
            q[step] = self.rewards + gamma * self.moves @ following
            following[:-1] = (policy * q[step]).sum(1)
        return q, self.start @ following[:-1]

    def action_values(self, episodes: LoggedEpisodes, gamma: float) -> ActionValues:
        """Return the exact values at logged steps."""
        q = self.values(gamma)[0][episodes.step_numbers(), episodes.observations]
        return ActionValues(q[np.arange(len(q)), episodes.actions], (self.target[episodes.observations] * q).sum(1))

    def trajectories(self) -> tuple[LoggedEpisodes, Array]:
        """Return every episode that can happen once, and their probabilities under the behaviour policy."""
        found = [part for state, p in enumerate(self.start) for part in self._from(state, 0, p)]
        rows = [(number, step, *row) for number, (_, walk) in enumerate(found) for step, row in enumerate(walk)]
        return self._logged(*np.array(rows).T), np.array([p for p, _ in found])

    def _from(self, state: int, step: int, p: float) -> Iterator[tuple[float, list[tuple[int, int, bool]]]]:
        for action, chosen in enumerate(self.behaviour[state]):
            for following, moved in enumerate(self.moves[state, action]):
                ends = following == len(self.start)
                mine = (state, action, ends)
                if ends:
                    yield p * chosen * moved, [mine]
                elif step + 1 < self.horizon:
                    yield from ((q, [mine, *rest]) for q, rest in self._from(following, step + 1, p * chosen * moved))
                elif following == 0:  # Where the time limit cuts, the next state is seen by nobody.
                    yield p * chosen * (1 - self.moves[state, action, -1]), [mine]

    def sample(self, count: int, rng: np.random.Generator, policy: Array | None = None) -> LoggedEpisodes:
        """Run episodes of a policy, by default the behaviour policy."""
        policy = self.behaviour if policy is None else policy
        state, alive = _draw(np.broadcast_to(self.start, (count, len(self.start))), rng), np.arange(count)
        columns: list[list[Array]] = [[], [], [], [], []]
        for step in range(self.horizon):
            action = _draw(policy[state], rng)
            following = _draw(self.moves[state, action], rng)
            ended = following == len(self.start)
            for column, part in zip(columns, (alive, np.full(len(alive), step), state, action, ended), strict=True):
                column.append(part)
            alive, state = alive[~ended], following[~ended]
        rows = [np.concatenate(column) for column in columns]
        order = np.lexsort((rows[1], rows[0]))
        return self._logged(*(column[order] for column in rows))

    def _logged(self, episode: Array, step: Array, state: Array, action: Array, ended: Array) -> LoggedEpisodes:
        last = np.append(episode[1:] != episode[:-1], True)
        return LoggedEpisodes.from_steps(
            {
                "episode": episode,
                "step": step,
                "observation": state,
                "action": action,
                "reward": self.rewards[state, action],
                "terminated": ended,
                "truncated": last & (ended == 0),
                "action_log_prob": np.log(self.behaviour[state, action]),
            }
        )


def _draw(probabilities: Array, rng: np.random.Generator) -> Array:
    passed = probabilities.cumsum(1)[:, :-1] < rng.random((len(probabilities), 1))
    return passed.sum(1)


def random_world(seed: int, *, closeness: float = 1.0) -> World:
    """Draw a world; the greater ``closeness``, the nearer are the two policies to uniform ones."""
    rng = np.random.default_rng(seed)

    def policy() -> Array:
        return 0.05 + 0.9 * rng.dirichlet(np.full(ACTIONS, closeness), STATES)

    return World(
        start=rng.dirichlet(np.ones(STATES)),
        moves=rng.dirichlet(np.ones(STATES + 1), (STATES, ACTIONS)),
        rewards=rng.normal(size=(STATES, ACTIONS)),
        behaviour=policy(),
        target=policy(),
    )


def measure(num_worlds: int = 150, sizes: Sequence[int] = (50, 200), repeats: int = 4) -> list[dict[str, Any]]:
    """Return one row per estimator and number of episodes: error, coverage of the intervals, refusals.

    Args:
        num_worlds: Random worlds.
        sizes: Numbers of episodes in the data.
        repeats: Data sets of each size in each world.
    """
    rows = []
    for size in sizes:
        found: dict[str, list[tuple[float, float, bool, bool]]] = {}
        for seed in range(num_worlds):
            for name, outcome in _outcomes(random_world(seed), size, repeats, seed):
                found.setdefault(name, []).append(outcome)
        rows += [{"estimator": name, "episodes": size, **_summary(np.array(seen))} for name, seen in found.items()]
    return rows


def _outcomes(world: World, size: int, repeats: int, seed: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield the error of each estimate, whether it was refused, and whether its interval held the truth."""
    truth, policy, rng = float(world.values(GAMMA)[1]), TabularPolicy(world.target), np.random.default_rng([seed, size])
    for _ in range(repeats):
        episodes = world.sample(size, rng)
        for one in estimate(episodes, policy, gamma=GAMMA, values=world.action_values(episodes, GAMMA)):
            if one.weights is not None:
                yield one.name, (one.value - truth, one.verdict != "identified", truth in one.interval)


def _summary(seen: Array) -> dict[str, Any]:
    kept = seen[seen[:, 1] == 0]
    return {
        "data_sets": len(seen),
        "refused": float(seen[:, 1].mean()),
        "bias": float(kept[:, 0].mean()),
        "bias_standard_error": float(kept[:, 0].std() / np.sqrt(max(1, len(kept)))),
        "rmse": float(np.sqrt((kept[:, 0] ** 2).mean())),
        "coverage": float(kept[:, 2].mean()),
    }
