"""Recorder of several agents: a column for each agent, with zeros where it is not there, and a mask that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.runners.multi_agent.team import TeamEnv
from rl_eval.trajectories.recorder import TrajectoryRecorder
from rl_eval.trajectories.rows import Rows, rows_of
from rl_eval.trajectories.trajectory import Key, Trajectory, agent_leaves

__all__ = ["TeamRecorder", "make_recorder"]


def make_recorder(env: Any, info_keys: Sequence[str] = (), *, compress_images: bool = False) -> Any:
    """Return the observer that records trajectories of an environment, of one agent or of several; see these."""
    recorder = TeamRecorder if isinstance(env, TeamEnv) else TrajectoryRecorder
    return recorder(env, info_keys, compress_images=compress_images)


@final
class TeamRecorder:
    """Observer whose artifact is the :class:`Trajectory` of an episode of several agents.

    Args:
        env: The environment that it sees.
        info_keys: Scalars of the step ``info`` to keep.
        compress_images: Compress images without loss as they come in.

    Raises:
        ConfigError: A space has parts that are no arrays of one shape.
    """

    def __init__(self, env: TeamEnv, info_keys: Sequence[str] = (), *, compress_images: bool = False) -> None:
        self._env = env
        self._agents = {agent: _Agent(agent, env, compress_images) for agent in env.agents}
        self._infos = {key: Rows((), np.dtype(np.float64)) for key in info_keys}
        self._rewards = Rows((), np.dtype(np.float64))
        self._steps = 0

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Mapping[Any, Any]) -> None:
        """See :class:`rl_eval.runners.EpisodeObserver`."""
        self._steps = 0
        for agent, columns in self._agents.items():
            columns.begin(observation.get(agent))

    def on_step(
        self,
        observation: Mapping[Any, Any],
        action: Mapping[Any, Any],
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Any,
        policy_outputs: Any,
    ) -> None:
        """See :class:`rl_eval.runners.EpisodeObserver`."""
        step = self._steps
        self._steps = step + 1
        self._rewards.write(step, reward)
        for agent, columns in self._agents.items():
            columns.act(step, action.get(agent), (policy_outputs or {}).get(agent))
            columns.rewards.write(step, self._env.rewards.get(agent, 0.0))
            columns.see(step + 1, observation.get(agent))
        for key, column in self._infos.items():
            column.write(step, np.asarray(info[key]).item() if key in info else np.nan)

    def on_episode_end(self, record: EpisodeRecord) -> Trajectory:
        """Return the trajectory of the attempt that completed."""
        steps, agents = self._steps, self._agents
        for agent, reward in self._env.unread.items():  # The episode was cut before it was the agent's turn.
            self._rewards.array[steps - 1] += reward
            agents[agent].rewards.array[steps - 1] += reward
        rewards = {f"reward/{agent}": columns.rewards for agent, columns in agents.items()}
        return Trajectory.of(
            record,
            observations={leaf.key: rows.taken(steps + 1) for one in agents.values() for leaf, rows in one.observed},
            actions={leaf.key: rows.taken(steps) for one in agents.values() for leaf, rows in one.acted},
            rewards=self._rewards.taken(steps),
            infos={key: column.taken(steps) for key, column in (self._infos | rewards).items()},
            outputs={key: rows.taken(steps) for one in agents.values() for key, rows in one.told.items()},
        )


class _Agent:
    """Columns of one agent."""

    def __init__(self, agent: Any, env: TeamEnv, compress_images: bool) -> None:
        seen, done = agent_leaves(agent, *env.spaces(agent))
        self.observed = [(leaf, rows_of(leaf, compress_images=compress_images)) for leaf in seen]
        self.acted = [(leaf, Rows(leaf.shape, leaf.dtype)) for leaf in done]
        self.rewards = Rows((), np.dtype(np.float64))
        self._root: Key = ("agents", str(agent))
        self._acting = Rows((), np.dtype(np.bool_))
        self.told: dict[Key, Rows] = {}
        """What its policy told, and whether it acted."""

    def begin(self, observation: Any) -> None:
        """Begin an episode."""
        self.told = {(*self._root, "acting"): self._acting}
        self.see(0, observation)

    def see(self, row: int, observation: Any) -> None:
        """Write what it sees; None if it sees nothing."""
        for leaf, rows in self.observed:
            rows.write(row, 0 if observation is None else leaf.read(observation))

    def _key(self, name: str) -> Key:
        """Return the key of an output; what is of the next step stands under ``next`` first, as everywhere."""
        path = tuple(name.split("."))
        return ("next", *self._root, *path[1:]) if path[0] == "next" else (*self._root, *path)

    def act(self, row: int, action: Any, outputs: Any) -> None:
        """Write what it does, and what its policy told; None if it does not act."""
        self._acting.write(row, action is not None)
        for leaf, rows in self.acted:
            rows.write(row, 0 if action is None else leaf.read(action))
        told = {self._key(name): value for name, value in (outputs or {}).items()}
        for key in told.keys() - self.told.keys():
            self.told[key] = Rows(np.shape(told[key]), np.asarray(told[key]).dtype)
            for former in range(row):
                self.told[key].write(former, 0)
        for key, rows in self.told.items():
            if rows is not self._acting:
                rows.write(row, told.get(key, 0))
