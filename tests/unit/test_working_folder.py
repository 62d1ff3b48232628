"""Environments that change the working directory: relative paths of the caller count from the caller's folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, Evaluator, NewBest, evaluate, load, replay
from rl_eval.policies.mlp import MLPActor
from rl_eval.recording.video import VideoSettings, record_videos
from rl_eval.supervision.caller import current_folder, working_in
from rl_eval.training.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from tests.refused import untold
from tests.unit.cli_world import call

WANDERER = '''
import os
from pathlib import Path

import gymnasium as gym
import numpy as np


class Wanderer(gym.Env):
    """Goes to the folder of its assets, in the constructor or in each step; its failing episodes are every third."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, when, assets, flag=None, render_mode=None):
        self.when, self.assets, self.flag, self.render_mode = when, assets, flag, render_mode
        self._wander("construct")

    def _wander(self, when):
        if self.when == when:
            os.chdir(self.assets)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.fails = self.flag is not None and os.path.exists(self.flag) and seed % 3 == 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self._wander("step")
        if self.fails:
            raise RuntimeError("the simulator broke")
        self.steps += 1
        observation = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return observation, float(observation[0] * (2 * action - 1)), self.steps == 4, False, {}

    def render(self):
        return np.full((16, 16, 3), 10 * self.steps, np.uint8)


def first_action(threshold_file, offset_file="threshold.txt"):
    """A factory that reads files of the caller."""
    threshold = float(Path(threshold_file).read_text()) + float(Path(offset_file).read_text())
    return lambda observations: (observations[:, 0] > threshold).astype(np.int64)
'''


@pytest.fixture(params=["construct", "step"])
def when(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the caller, beside the folder of the simulator's assets, in which nothing is written."""
    home, assets = tmp_path / "home", tmp_path / "assets"
    for folder in (home, assets):
        folder.mkdir()
    (home / "wanderer.py").write_text(WANDERER)
    (home / "threshold.txt").write_text("0.25")
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    for module in ("wanderer", "dice", "wandering_dice"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    yield home
    assert list(assets.iterdir()) == []


def config(when: str, **kwargs: Any) -> EvalConfig:
    return (
        EvalConfig()
        .environment(
            "wanderer:Wanderer", env_kwargs={"when": when, "assets": str(Path.cwd().parent / "assets"), **kwargs}
        )
        .policy("wanderer:first_action", policy_kwargs={"threshold_file": "threshold.txt"})
        .runners(num_envs_per_runner=2)
        .evaluation(num_episodes=5)
    )


def watched(seen: list[Path]) -> Callable[[Any], Any]:
    """Return a factory of environments that note the working directory of each step."""

    def factory(context: Any) -> Any:
        from wanderer import Wanderer

        class Watched(Wanderer):
            def step(self, action: Any) -> Any:
                seen.append(Path.cwd())
                return super().step(action)

        return Watched(**context)

    return factory


def options(when: str, **kwargs: Any) -> list[str]:
    """Options of a command that say the same."""
    assets = Path.cwd().parent / "assets"
    given = {"when": when, "assets": assets, **kwargs}
    flags = [f"environment.env_kwargs.{key}={value}" for key, value in given.items()]
    flags += ["policy.policy_kwargs.threshold_file=threshold.txt", "runners.num_envs_per_runner=2"]
    sets = [part for flag in flags for part in ("--set", flag)]
    return ["--env", "wanderer:Wanderer", "--policy", "wanderer:first_action", "-n", "6", *sets]


# Python, in the caller's thread


def test_evaluate_and_save(home: Path, when: str) -> None:
    """Log, result and the caller's working directory; the policy's file is found, too."""
    result = evaluate(config(when), output="log")
    assert Path.cwd() == home
    result.save("out")
    assert load(home / "log").fingerprint == load(home / "out").fingerprint == result.fingerprint


def test_the_environment_keeps_its_own_working_directory(home: Path) -> None:
    """It is where it went in its last call, as in a loop of its own."""
    seen: list[Path] = []
    evaluate(config("construct").environment(watched(seen)))
    assert {*seen} == {home.parent / "assets"}


def test_an_environment_that_stays_follows_the_caller(home: Path) -> None:
    """A group without a thread has no working directory of its own before an environment has chosen one."""
    seen: list[Path] = []
    (home / "below").mkdir()
    with EvalRunnerGroup(config("never").environment(watched(seen)), threaded=False) as group:
        group.evaluate()
        os.chdir("below")
        group.evaluate()
    assert {*seen} == {home, home / "below"}


def test_a_warm_group(home: Path, when: str) -> None:
    """Evaluations and samples of a group without a thread."""
    with EvalRunnerGroup(mlp(when), threaded=False) as group:
        for name in ("first", "second"):
            group.evaluate(output=name)
        group.sample(1, storage="batch")
    assert Path.cwd() == home
    assert_there(home, "first/manifest.json", "second/manifest.json", "batch")


def test_a_group_with_a_thread(home: Path, when: str) -> None:
    """Paths count from where the group was made, since the thread's environment moves the whole process."""
    with EvalRunnerGroup(mlp(when)) as group:
        for name in ("first", "second"):
            group.evaluate(output=name)
        assert Path.cwd() == home.parent / "assets"
        group.sample(1, storage="batch")
    assert_there(home, "first/manifest.json", "second/manifest.json", "batch")


@pytest.mark.process
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_loggers_callbacks_and_videos(home: Path, when: str, backend: Any) -> None:
    """All that an evaluator writes, at the first evaluation and later."""
    errors: list[BaseException] = []
    loggers = [CSVLogger("curve.csv"), JSONLinesLogger("curve.jsonl"), TensorBoardLogger("board")]
    videos = VideoSettings("first:1", "films")
    best = NewBest(save="best.safetensors")
    with Evaluator(
        mlp(when), backend=backend, loggers=loggers, videos=videos, on_result=best, on_error=errors.append
    ) as evaluator:
        for _ in range(2):
            evaluator.evaluate(MLPActor(2, 2))
    assert errors == []
    assert_there(home, "curve.csv", "curve.jsonl", "board/eval", "films/step_0", "films/step_1", "best.safetensors")


@pytest.mark.process
def test_replays_and_videos_of_a_result(home: Path, when: str) -> None:
    """Both build a runner of their own."""
    result = evaluate(config(when))
    assert replay(result, 1).identical
    assert Path.cwd() == home
    record_videos(result, "first:1", "films")
    assert Path.cwd() == home
    assert_there(home, "films")


def mlp(when: str) -> EvalConfig:
    """A policy with weights."""
    return config(when).policy("rl_eval.policies.mlp:make_mlp", policy_kwargs={})


def assert_there(home: Path, *names: str) -> None:
    missing = [name for name in names if not (home / name).exists()]
    assert missing == []


# The command line


def test_run_writes_where_it_was_started(home: Path, when: str) -> None:
    """Log and result, with names that the user knows; the same command continues there."""
    outcome = call("run", *options(when), "--output", "log")
    assert outcome.exit_code == 0, outcome.output
    assert "saved in log; " in outcome.stdout
    assert EvalResult.load(home / "log").fingerprint == load(home / "log").fingerprint
    again = call("run", *options(when), "--output", "log")
    assert str(load(home / "log")) in again.stdout
    assert untold(again.stderr, "log") == []


def test_run_by_default(home: Path, when: str) -> None:
    """In ``runs``, with its link."""
    outcome = call("run", *options(when))
    assert outcome.exit_code == 0, outcome.output
    place = f"runs/{(home / 'runs/latest').readlink()}"
    assert f"saved in {place}; " in outcome.stdout
    assert load(home / "runs" / "latest").status == "complete"
    assert call("show").exit_code == 0


@pytest.mark.process
def test_retry_replay_video_export(home: Path, when: str) -> None:
    """Commands that run episodes again."""
    (home / "flag").touch()
    flag = [*options(when, flag=home / "flag"), "--set", "fault_tolerance.max_attempts_per_episode=1"]
    assert call("run", *flag, "--output", "log").exit_code == 1
    (home / "flag").unlink()
    assert call("run", "--retry", "log").exit_code == 0
    assert load(home / "log").status == "complete"
    assert call("replay", "log", "--episodes", "0-1").exit_code == 0
    assert call("replay", "log", "--video", "--episodes", "0", "-o", "films").exit_code == 0
    assert call("replay", "log", "--video", "--episodes", "0").exit_code == 0
    outcome = call("export", "log", "--to", "npz", "-o", "steps.npz")
    assert outcome.exit_code == 0, outcome.output
    assert_there(home, "films", "log/videos", "steps.npz")
    assert Path.cwd() == home


def test_watch_with_a_relative_file_for_all_checkpoints(home: Path, when: str) -> None:
    """The output, and the policy's files at the second checkpoint as at the first."""
    (home / "ckpts").mkdir()
    for step in (1, 2):
        (home / "ckpts" / f"threshold_{step}.txt").write_text(f"0.{step}")
    args = ["--as", "policy.policy_kwargs.threshold_file", "--once", "--poll-s", "0.01", "-o", "curve"]
    args += ["--held-out", "2"]
    outcome = call("watch", "ckpts/*.txt", *options(when), *args)
    assert outcome.exit_code == 0, outcome.output
    assert len((home / "curve" / "curve.csv").read_text().splitlines()) == 3


@pytest.mark.process
def test_doctor_and_plan(home: Path, when: str) -> None:
    """The policy's file is there in each check."""
    for command in ("doctor", "plan"):
        outcome = call(command, *options(when))
        assert outcome.exit_code == 0, outcome.output
    assert Path.cwd() == home


# The rule itself


def test_the_former_folder_is_restored_after_an_error(home: Path) -> None:
    with pytest.raises(ZeroDivisionError), working_in(str(home.parent / "assets")):
        1 / (current_folder() == str(home))
    assert current_folder() == str(home)


def test_a_removed_working_directory_is_nobodys(home: Path) -> None:
    """Work goes on in the folder that is there."""
    gone = home / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert current_folder() is None
    with working_in(None):
        os.chdir(home)
    assert current_folder() == str(home)
    assert np.isfinite(evaluate(config("construct", assets=str(home))).mean_return)
