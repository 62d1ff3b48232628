"""Videos: which episodes are chosen, what they show, and that neither the evaluation nor the trainer notices."""

import importlib.util
import itertools
import os
import queue
import random
import re
import subprocess
import tracemalloc
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch

from rl_eval.cli.exits import ExitCode
from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ClusterError, ConfigError, EnvError, WeightsError
from rl_eval.execution.evaluate import evaluate
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.recording.video import (
    Encoder,
    Video,
    VideoSettings,
    follow_up_videos,
    gif,
    record_videos,
    record_with_group,
    select_episodes,
)
from rl_eval.recording.video_selection import captions, videos_of
from rl_eval.records.episode import Fault
from tests.refused import refused, untold
from tests.unit.cli_world import call, printed
from tests.unit.render_world import world

pytestmark = pytest.mark.process

toys = pytest.fixture(world)


def config(env="tests.unit.render_world:painted", **env_kwargs):
    return (
        EvalConfig()
        .environment(env, env_kwargs=env_kwargs)
        .policy("tests.unit.render_world:ones")
        .runners(num_envs_per_runner=4)
        .evaluation(num_episodes=12, seed=3)
        .fault_tolerance(max_attempts_per_episode=2)
    )


def decoded(path) -> list[np.ndarray]:
    """Return the frames of a video, as ffmpeg reads them back."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-fps_mode", "passthrough"]
    kind = ["-f", "image2pipe", "-c:v", "ppm", "-"]
    content = subprocess.run([*command, *kind], capture_output=True, check=True).stdout
    frames = []
    while content:
        magic, width, height, depth, rest = re.split(rb"\s", content, maxsplit=4)
        assert (magic, depth) == (b"P6", b"255")
        size = int(width) * int(height) * 3
        frames.append(np.frombuffer(rest[:size], np.uint8).reshape(int(height), int(width), 3))
        content = rest[size:]
    return frames


def recorded(source, select="first", folder="videos", **options) -> list[Video]:
    return record_videos(source, select, folder, **options)


# ------------------------------------------------------------------------------ what is on a video


def test_a_video_has_the_frame_of_the_reset_and_one_per_step(toys):
    """In their order: each is five shades lighter than the one before."""
    result = evaluate(config())
    for video in recorded(result, "first:3"):
        frames = decoded(video.path)
        assert video.identical
        assert video.path.parent == Path.cwd() / "videos"
        value = result.table.record(video.index).episode_return
        assert video.path.name == f"episode_{video.index}_seed_{video.seed}_return_{value:.6g}.mp4"
        assert len(frames) == video.frames == result.table.record(video.index).length + 1
        assert [round(float(frame.mean()) / 5) for frame in frames] == list(range(len(frames)))
        assert frames[0].shape == (32, 48, 3) == (video.height, video.width, 3)


@pytest.mark.parametrize("driver", [None, "alsa"])
def test_a_video_opens_no_sound_device(toys, monkeypatch, driver):
    """Unless a driver is set; and the variables of the process stay as they were."""
    monkeypatch.delenv("SDL_AUDIODRIVER", raising=False)
    if driver:
        monkeypatch.setenv("SDL_AUDIODRIVER", driver)
    result = evaluate(config())
    before = dict(os.environ)
    recorded(result)
    assert {key for name, key in toys.EVENTS if name == "sound"} == {driver or "dummy"}
    assert dict(os.environ) == before


def test_a_video_of_cartpole(tmp_path):
    """A real renderer: 600 x 400 pixels, and no two neighbouring frames alike."""
    settings = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    result = evaluate(settings, net)
    (video,) = record_videos(result, "best", tmp_path, policy=net)
    frames = decoded(video.path)
    assert video.identical
    assert len(frames) == video.length + 1 == int(result.metrics["episode_return_max"]) + 1
    assert (video.width, video.height, video.fps) == (600, 400, 50)
    assert all((one != other).any() for one, other in itertools.pairwise(frames))


def test_odd_sizes_are_padded_and_not_scaled(toys):
    """Players want even ones."""
    (video,) = recorded(evaluate(config("tests.unit.render_world:Odd")))
    assert (video.height, video.width) == (33, 47)
    frame = decoded(video.path)[-1]
    assert frame.shape == (34, 48, 3)
    assert abs(float(frame[:32, :46].mean()) - 5 * video.length) < 3
    assert frame[33].mean() < 20


@pytest.mark.parametrize(("asked", "named", "expected"), [(None, 20, 20), (7, 20, 7), (None, None, 30)])
def test_frames_per_second(toys, monkeypatch, asked, named, expected):
    """Those of the environment's metadata, unless others are asked for or it names none."""
    monkeypatch.setattr(toys.Painted, "metadata", {"render_modes": ["rgb_array"], "render_fps": named})
    (video,) = recorded(evaluate(config()), fps=asked)
    assert video.fps == expected
    assert imageio_ffmpeg.count_frames_and_secs(str(video.path)) == (
        video.frames,
        pytest.approx(video.frames / expected, abs=0.1),
    )


def test_a_long_episode_is_cut_and_still_compared(toys):
    """The frames end, the episode does not."""
    result = evaluate(config())
    (video,) = recorded(result, "first", max_frames=3)
    assert video.cut
    assert video.frames == len(decoded(video.path)) == 3
    assert video.identical
    assert video.length == result.table.record(0).length > 3
    (whole,) = recorded(result, "first", max_frames=video.length + 1)
    assert not whole.cut


def test_frames_do_not_pile_up(tmp_path):
    """Six hundred frames of 0.7 MB go through, and a few are in memory."""
    encoder = Encoder(tmp_path / "video.mp4", 30)
    frame = np.zeros((480, 480, 3), np.uint8)
    tracemalloc.start()
    for _ in range(600):
        encoder.write(frame)
    encoder.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * frame.nbytes
    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "video.mp4"))[0] == 600


def test_a_failed_episode_is_recorded_up_to_its_fault(toys):
    """At the attempt that was its last."""
    result = evaluate(config(fails=[4, 7]))
    videos = recorded(result, "failed")
    assert [video.index for video in videos] == [4, 7]
    for video in videos:
        assert video.identical
        assert not video.completed
        assert video.attempt == 2
        assert video.frames == len(decoded(video.path)) == 3
        assert video.name == f"episode_{video.index}_seed_{video.seed}_failed.mp4"


def test_an_animation_for_pages_that_play_no_video(toys):
    """Its first frame is the video's."""
    (video,) = recorded(evaluate(config()))
    content = gif(video.content, fps=20)
    assert content.startswith(b"GIF89a")
    Path("video.gif").write_bytes(content)
    assert len(decoded("video.gif")) == video.frames


# ------------------------------------------------------------------------------ who notices


def test_the_evaluation_renders_nothing_and_is_the_same(toys):
    """Its environments are built without a render mode, with videos or without, and step as often."""
    unchecked = config().evaluation(determinism_check=0)
    with EvalRunnerGroup(unchecked) as group:
        plain = group.evaluate()
        steps = toys.EVENTS["step", None]
        videos = record_with_group(group, plain, VideoSettings("every:2", "videos"), 10)
        counters = group.get_metrics()
        again = group.evaluate()
    assert again.fingerprint == plain.fingerprint == evaluate(unchecked).fingerprint
    assert len(videos) == 6
    assert {video.path.parent for video in videos} == {Path.cwd() / "videos" / "step_10"}
    assert toys.EVENTS["render", None] == 0
    assert toys.EVENTS["render", "rgb_array"] == sum(video.frames for video in videos)
    assert counters["env_steps"] == steps == plain.timing.env_steps == again.timing.env_steps
    assert toys.EVENTS["built", "rgb_array"] == toys.EVENTS["closed", "rgb_array"] == 6
    assert toys.EVENTS["built", None] == toys.EVENTS["closed", None] == 8


def test_a_video_with_the_weights_of_its_evaluation(toys):
    """The runner's policy is shared, and its weights are those that were sent."""
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 2)
    with EvalRunnerGroup(config(), net) as group:
        torch.nn.init.constant_(net.bias, 1.0)
        group.sync_weights(net, 7)
        result = group.evaluate()
        (video,) = record_with_group(group, result, VideoSettings("worst", "videos"), 1)
        assert video.identical
        group.sync_weights(net, 8)
        with refused(WeightsError, "weights_version", value=8, episode=0):
            record_with_group(group, result, VideoSettings("worst", "videos"), 1)


def test_videos_are_made_before_the_next_weights_arrive(toys):
    """Also when those are waiting already; what there is no video of is told in its place."""
    net = torch.nn.Linear(1, 2)
    told: queue.SimpleQueue = queue.SimpleQueue()
    videos = follow_up_videos(VideoSettings("first,failed", "videos"), told.put)
    with EvalRunnerGroup(config(fails=[4], broken_at=None), net) as group:
        first = group.submit(weights=net, version=1, follow_up=videos)
        torch.nn.init.constant_(net.bias, 5.0)
        second = group.submit(weights=net, version=2, follow_up=videos)
        for handle in (first, second):
            videos = [future.result() for future in told.get(timeout=60)]
            assert [video.index for video in videos] == [0, 4]
            assert all(video.identical for video in videos)
            assert videos[0].episode_return == handle.result().table.record(0).episode_return
    assert not Path("videos").exists()


def test_generators_and_modes_of_the_process_are_left_alone(toys):
    """Those of a trainer that records in its own process."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.5)).train()
    result = evaluate(config(), net)

    def state():
        generators = random.getstate(), repr(np.random.get_state()), torch.random.get_rng_state().tolist()  # noqa: NPY002
        return generators, net.training, torch.is_grad_enabled(), torch.get_num_threads()

    before = state()
    assert recorded(result, "first", policy=net)[0].identical
    assert state() == before


# ------------------------------------------------------------------------------ what cannot be recorded


@pytest.mark.parametrize("env", ["tests.unit.render_world:deaf", "tests.unit.render_world:Blind"])
def test_an_environment_that_does_not_render_is_a_clear_error(toys, env):
    """Of the video; the evaluation is as it was, and so is the next."""
    with EvalRunnerGroup(config(env)) as group:
        result = group.evaluate()
        with refused(ConfigError, "environment.env", value="rgb_array") as caught:
            record_with_group(group, result, VideoSettings("first:3", "videos"), 1)
        assert untold(str(caught.value), "render_mode=None", "render_modes") == []
        errors: list[Exception] = []
        assert record_with_group(group, result, VideoSettings("first:3", "videos"), 1, errors.append) == []
        assert [type(error) for error in errors] == [ConfigError]
        assert group.evaluate().fingerprint == result.fingerprint
    assert not Path("videos").exists()


def test_a_factory_that_renders_anyway_is_recorded(toys):
    """It refuses the mode in its context."""
    (video,) = recorded(evaluate(config("tests.unit.render_world:strict")))
    assert video.identical
    assert video.frames == video.length + 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"broken_at": 2}, "after 2 frames, RuntimeError: the renderer broke"),
        (
            {"growing": True},
            r"after 1 frames, EnvError: render\(\) returned a frame of shape \(33, 48, 3\) after one of",
        ),
    ],
)
def test_a_renderer_that_fails_costs_the_video_alone(toys, kwargs, message):
    """The others are tried; the runner works on."""
    with EvalRunnerGroup(config(**kwargs)) as group:
        result = group.evaluate()
        errors: list[Exception] = []
        assert record_with_group(group, result, VideoSettings("first:2", "videos"), 1, errors.append) == []
        assert [type(error) for error in errors] == [EnvError, EnvError]
        with refused(EnvError, "render"):
            raise errors[0]
        assert group.evaluate().fingerprint == result.fingerprint
    assert toys.EVENTS["closed", "rgb_array"] == 2


def test_an_encoder_that_fails_is_told(toys, monkeypatch):
    """With its own words."""
    monkeypatch.setattr("rl_eval.recording.video._EVEN", "no_such_filter")
    with refused(EnvError, "render"):
        recorded(evaluate(config()))


def test_an_encoder_that_hangs_is_killed(tmp_path, monkeypatch):
    """It reads nothing, so its pipe is full after some frames; or it does not end."""
    (tmp_path / "ffmpeg").write_text("#!/bin/sh\nexec sleep 3600\n")
    (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(tmp_path / "ffmpeg"))
    for size, act in ((480, Encoder.write), (4, lambda encoder, frame: (encoder.write(frame), encoder.close()))):
        with refused(ClusterError, "ffmpeg", value=-9):
            act(Encoder(tmp_path / "video.mp4", 30, patience_s=0.2), np.zeros((size, size, 3), np.uint8))


@pytest.mark.parametrize("frame", [None, np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), [np.zeros(3)]])
def test_what_is_no_frame_is_refused(tmp_path, frame):
    """With its shape and type."""
    with refused(EnvError, "render"):
        Encoder(tmp_path / "video.mp4", 30).write(frame)


def test_an_episode_that_killed_its_runner_is_not_asked_for_again(toys):
    """It would do it once more."""
    result = evaluate(config(fails=[4]))
    lethal = Fault(4, int(result.plan.seeds[4]), 2, "runner", "step", 2, "RunnerLost", "gone", "", 0, "here", 0.1)
    result.table.add_fault(lethal)
    with (
        EvalRunnerGroup(config(fails=[4])) as group,
        refused(EnvError, episode=4),
    ):
        record_with_group(group, result, VideoSettings("failed", "videos"), 1)


def test_without_the_encoder_the_extra_is_named(toys, monkeypatch):
    """Before anything runs."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "imageio_ffmpeg" else find(name))
    for fails in (VideoSettings, lambda: recorded("nowhere"), lambda: Encoder(Path("video.mp4"), 30)):
        with refused(ConfigError, "imageio-ffmpeg") as caught:
            fails()
        assert "rl-eval[video]" in caught.value.fix


# ------------------------------------------------------------------------------ from a folder


# ------------------------------------------------------------------------------ the command


RECORD = ("replay", "run", "--video")


def test_the_command_records_where_reports_find_the_videos(toys):
    """With code 0 if all came out as recorded; the run stays what it is; a run elsewhere has no such folder."""
    result = evaluate(config(fails=[2]), output="run")
    outcome = call(*RECORD, "--select", "best,failed", "--max-frames", 4, "--fps", 5)
    assert outcome.exit_code == 0, outcome.output
    best = select_episodes(result, "best", 1)[0]
    assert [*videos_of(result, "run")] == sorted([2, best])
    assert all(path.name in outcome.stdout for path in Path("run/videos").iterdir())
    assert call("report", "run").exit_code == 0
    assert all(f'href="run/videos/episode_{index}_' in Path("report.html").read_text() for index in (2, best))
    assert evaluate(config(fails=[2]), output="run").fingerprint == result.fingerprint
    assert call("replay", "s3://bucket/run", "--video").exit_code == ExitCode.USAGE


def test_a_report_records_and_shows_the_worst_the_median_and_the_best(toys):
    """Beside each other, in this order; what has a video is not recorded again, and a run elsewhere cannot be."""
    result = evaluate(config(), output="run")
    assert call("report", "run").exit_code == 0
    assert "<video" not in Path("report.html").read_text()
    outcome = call("report", "run", "--videos", "--trust")
    assert outcome.exit_code == 0, outcome.output
    found = captions(result)
    page = Path("report.html").read_text()
    sources = re.findall(r'<video[^>]* src="run/videos/episode_(\d+)_', page)
    assert [*map(int, sources)] == [*found] == select_episodes(result, "worst,median,best", 3)
    assert all(text in page for text in found.values())
    times = {path: path.stat().st_mtime_ns for path in Path("run/videos").iterdir()}
    assert len(times) == len(found) == 3
    first = min(times)
    first.unlink()
    assert call("report", "run", "--videos", "--trust").exit_code == 0
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == {first}
    assert Path("report.html").read_text() == page
    assert call("report", "s3://bucket/run", "--videos", "--trust").exit_code == ExitCode.USAGE


def test_the_command_records_episodes_by_their_indices(toys):
    """All of them, however many a selection may have; a different one is code 1."""
    evaluate(config(), output="run")
    outcome = call(*RECORD, "--episodes", "5,0", "-o", "videos", "--max-episodes", 1, "--json")
    assert outcome.exit_code == 0, outcome.output
    made = printed("replay --video", outcome.stdout)
    assert [(one["index"], Path(one["path"]).exists()) for one in made] == [(5, True), (0, True)]
    toys.SHIFT = 1.0
    outcome = call(*RECORD, "--episodes", "0", "-o", "videos", "--json")
    assert outcome.exit_code == ExitCode.PARTIAL
    assert [one["differences"] for one in printed("replay --video", outcome.stdout)] == [["episode_return"]]


@pytest.mark.parametrize(
    "args",
    [["--select", "bset"], ["--max-episodes", "0"], ["--select", "failed"], ["--select", "best", "--episodes", "3"]],
)
def test_wrong_usage_is_2_for_the_command(toys, args):
    evaluate(config(), output="run")
    outcome = call(*RECORD, *args)
    assert outcome.exit_code == ExitCode.USAGE
    assert args[0] in outcome.stderr or "bset" in outcome.stderr
    assert not Path("run/videos").exists()
