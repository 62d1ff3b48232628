"""A rule ends an evaluation after the same episode, whatever the layout and whatever dies."""

import multiprocessing
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.errors import LogError
from rl_eval.log import read_log

SERVER = multiprocessing.get_context("forkserver")


class Alike:
    """Ends an evaluation when three episodes have fallen after the same number of steps, fewer than thirty."""

    most = 3

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()

    def after(self, k: int, rows: Any) -> str | None:
        length = int(rows["length"][-1])
        self.lengths[length] += length < 30
        return f"{self.most} episodes fell after {length} steps" if self.lengths[length] == self.most else None


class Later(Alike):
    """Needs more of them, so that a log has rows long before its answer."""

    most = 15


def config(rule: str = "Alike", num_episodes: int = 100, **faults: Any) -> EvalConfig:
    built = EvalConfig().environment("rl_eval.testing:faulty", env_kwargs={"env": "CartPole-v1", **faults})
    built.policy("numpy_world:lean").runners(num_envs_per_runner=1)
    return built.evaluation(num_episodes=num_episodes, rules=[f"test_rules:{rule}"])


def rows(folder: Path) -> int:
    """Return the number of rows in a log; 0 before it is one."""
    with suppress(LogError):
        return len(read_log(folder).rows)
    return 0


def check(result: EvalResult, expected: EvalResult) -> None:
    assert result.ended_by == expected.ended_by
    assert result.fingerprint == expected.fingerprint
    assert result.status == expected.status == "complete"
    assert [record.index for record in result.episodes] == list(range(len(expected.episodes)))


def test_any_layout_and_a_killed_runner_end_after_the_same_episode(ray_cluster: None, tmp_path: Path) -> None:
    """One environment, eight, and two runners with four each, one of which is killed."""
    expected = evaluate(config())
    assert expected.ended_by is not None
    assert len(expected.episodes) == expected.ended_by.after == 33
    check(evaluate(config().runners(num_envs_per_runner=8)), expected)
    killing = config(kind="sigkill", step=3, episodes=[20], folder=str(tmp_path))
    result = evaluate(killing.runners(num_runners=2, num_envs_per_runner=4))
    check(result, expected)
    assert result.provenance["runners_lost"] == 1
    assert result.determinism.passed
    assert all(index < 33 for index in result.determinism.mismatched)


@pytest.mark.process
def test_a_killed_driver_is_continued_to_the_same_end(tmp_path: Path) -> None:
    """Its log has a part of the prefix; the rule is asked from the first episode."""
    expected = evaluate(config("Later", 400))
    assert expected.ended_by is not None
    slow = config("Later", 400, kind="sleep", seconds=0.01, step=3, episodes=list(range(400)))
    slow.runners(num_envs_per_runner=8)
    child = SERVER.Process(target=evaluate, args=(slow,), kwargs={"output": tmp_path})
    child.start()
    assert eventually(lambda: rows(tmp_path))
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert 0 < rows(tmp_path) < expected.ended_by.after
    check(evaluate(slow, output=tmp_path), expected)
