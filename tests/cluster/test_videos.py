"""Videos made by runners in processes of their own, and calls to one runner that end badly."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import imageio_ffmpeg
import pytest
from numpy_world import config as lean
from waiting import eventually

from rl_eval import EvalRunnerGroup, evaluate
from rl_eval.errors import ClusterError, ConfigError
from rl_eval.recording.video import VideoSettings, record_with_group
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("ray_cluster")


def frames_of(path: Path) -> int:
    return int(imageio_ffmpeg.count_frames_and_secs(str(path))[0])


@pytest.fixture(scope="module")
def group(ray_cluster) -> Iterator[EvalRunnerGroup]:
    """One runner, which every test leaves able to work."""
    config = lean(1, 4, 8).environment("rl_eval.testing:faulty", env_kwargs={"env": "CartPole-v1"})
    with EvalRunnerGroup(config) as made:
        yield made


@pytest.fixture(scope="module")
def before(group):
    """Result of the runner that came first."""
    return group.evaluate()


def test_videos_of_runners_and_the_evaluations_around_them(tmp_path):
    """The evaluation after the videos has the fingerprint and the steps of one without, from the same processes."""
    config = lean(2, 4, 12)
    with EvalRunnerGroup(config) as group:
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        before = group.evaluate()
        pids = group.foreach_runner(lambda runner: os.getpid())
        videos = record_with_group(group, before, VideoSettings("best,first:1", tmp_path), 500)
        after = group.evaluate()
        assert group.foreach_runner(lambda runner: os.getpid()) == pids
    assert after.fingerprint == before.fingerprint == evaluate(config.runners(num_runners=0)).fingerprint
    assert after.timing.env_steps == before.timing.env_steps
    assert len(videos) == 2
    for video in videos:
        record = before.table.record(video.index)
        assert video.identical
        assert video.episode_return == record.episode_return
        assert frames_of(video.path) == record.length + 1
        assert video.path.parent == tmp_path / "step_500"


def test_errors_cross_the_process_boundary_by_their_class(group, before, tmp_path):
    """A factory that does not know ``render_mode`` refuses it; the group works on."""
    with refused(ConfigError, "environment.env", value="rgb_array"):
        record_with_group(group, before, VideoSettings("first", tmp_path), 1)
    assert group.evaluate().fingerprint == before.fingerprint


def test_a_runner_that_dies_in_the_call_is_told_and_replaced(group, before):
    """The call is not sent again; the next evaluation is whole."""
    with refused(ClusterError, runner=0):
        group.apply_to_one(lambda runner: os.kill(os.getpid(), signal.SIGKILL))
    assert group.evaluate().fingerprint == before.fingerprint


def test_a_call_that_never_returns_is_given_up(group, before):
    """Its runner is replaced."""
    (pid,) = group.foreach_runner(lambda runner: os.getpid())
    with refused(ClusterError, "timeout_s", value=0.5):
        group.apply_to_one(lambda runner: time.sleep(3600), timeout_s=0.5)
    assert group.evaluate().fingerprint == before.fingerprint
    assert group.foreach_runner(lambda runner: os.getpid()) != [pid]


def test_a_function_that_cannot_travel_is_refused(group):
    """In the caller's thread."""
    lock = threading.Lock()
    with refused(ConfigError, "the function"):
        group.apply_to_one(lambda runner: lock)
