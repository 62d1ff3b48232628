"""Minari data sets of finished runs, read back by d3rlpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup
from rl_eval.recording.export import export_trajectories

pytest.importorskip("minari")
pytest.importorskip("d3rlpy")

EPISODES = 5


def without_last_observations(made: Any) -> Any:
    """Return what d3rlpy makes data sets with, given the observations that it expects.

    d3rlpy 2.8.1 gives it the T + 1 observations of Minari's episodes of T steps, so that those of the second episode
    are one step late, and so on.
    """

    def repaired(*, observations: Any, terminals: Any, timeouts: Any, **rest: Any) -> Any:
        ends = np.flatnonzero(terminals | timeouts)
        assert len(observations) == len(terminals) + len(ends)
        kept = np.delete(observations, ends + 1 + np.arange(len(ends)), axis=0)
        return made(observations=kept, terminals=terminals, timeouts=timeouts, **rest)

    return repaired


def push(seen: Any) -> Any:
    return (seen[:, 2] > 0).astype(np.int64)


@pytest.mark.parametrize("limit", [None, 40])
def test_minari_data_are_read_by_d3rlpy(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """Every episode has its observations, actions and rewards, and is said to be terminated where it was."""
    from d3rlpy import datasets

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setattr(datasets, "MDPDataset", without_last_observations(datasets.MDPDataset))
    kwargs = {} if limit is None else {"max_episode_steps": limit}
    made = EvalConfig().environment("CartPole-v1", env_kwargs=kwargs).policy(push).evaluation(num_episodes=EPISODES)
    with EvalRunnerGroup(made, threaded=False) as group:
        result, expected = group.evaluate(), group.sample(EPISODES, as_arrays=True)
    export_trajectories(result, "minari", "cartpole/push-v0", config=made)
    data, _ = datasets.get_minari("cartpole/push-v0")
    assert len(data.episodes) == EPISODES
    for index, episode in enumerate(data.episodes):
        mine = expected["collector.index"] == index
        np.testing.assert_array_equal(episode.observations, expected["observation"][mine])
        np.testing.assert_array_equal(episode.actions[:, 0], expected["action"][mine])
        np.testing.assert_array_equal(episode.rewards[:, 0], expected["next.reward"][mine])
        assert episode.terminated == expected["next.terminated"][mine][-1]
    assert all(episode.terminated for episode in data.episodes) == (limit is None)
