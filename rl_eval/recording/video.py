"""Videos of chosen episodes, or a window that shows these episodes.

Each episode runs again in an environment that renders. A runner, in this process or in a group, gets a *sibling*: a
second runner in the same process, with one lane and a separate environment. The sibling uses the runner's policy and
weights and does not touch the runner's environments. An episode does not depend on the number of environments, so its
outcome is the same in the sibling. Frames are encoded as MP4 one by one, so memory never contains an uncompressed
video.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.atomic_write import write_bytes
from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ClusterError, ConfigError, EnvError, UsageError, WeightsError, summary_of
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.jobs import FollowUp
from rl_eval.recording.replay import Replay, Spectator, compared, lease_of, rebuilt_runner
from rl_eval.recording.video_selection import VideoSettings, check_encoder, select_episodes, video_name
from rl_eval.records.episode import EpisodeSpec, Lease, Outcome, different_columns, outcomes_of
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult
from rl_eval.runners import EvalRunner, Runner
from rl_eval.runners.again import run_again
from rl_eval.supervision.caller import one_thread, survivable

_EVEN: Final = "pad=ceil(iw/2)*2:ceil(ih/2)*2"
"""ffmpeg filter that adds a black row or column to a frame with an odd height or width: players need even sizes."""
_H264: Final = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1", "-movflags", "+faststart")
_PATIENCE_S: Final = 120.0
"""Longest time that ffmpeg may take to encode a frame or to finish a file, in seconds."""


@final
class Encoder:
    """Encoder of frames as H.264, in an ffmpeg process with one thread.

    This class does not use ``imageio_ffmpeg.write_frames``, because that function hides the process: rl_eval could not
    kill it or read its exit code and error messages.

    Args:
        path: The file to write.
        fps: Frames per second.
        patience_s: Longest time that ffmpeg may take to encode a frame or to finish the file, in seconds.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """

    def __init__(self, path: Path, fps: float, *, patience_s: float = _PATIENCE_S) -> None:
        check_encoder()
        self._path = path
        self._fps = fps
        self._patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self.shape: tuple[int, ...] = ()
        """Height, width and channels of a frame; empty before the first frame."""
        self.frames = 0

    def write(self, frame: Any) -> None:
        """Add a frame.

        Args:
            frame: Array of uint8, shape (height, width, 3), of the same size as earlier frames.

        Raises:
            EnvError: The frame has another type, dtype or shape.
            ClusterError: ffmpeg has ended, or took too long.
        """
        pixels = _checked(frame, self.shape)
        if self._process is None:
            self.shape = pixels.shape
            self._process = self._start()
        assert self._process.stdin is not None
        try:
            with _killed_after(self._patience_s, self._process):
                self._process.stdin.write(pixels.data)
        except OSError:
            self.close()
            raise
        self.frames += 1

    def close(self) -> None:
        """Finish the file; later calls do nothing.

        Raises:
            ClusterError: ffmpeg failed, or took too long.
        """
        process, self._process = self._process, None
        if process is None:
            return
        with _killed_after(self._patience_s, process):
            words = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode < 0:
            limit = f"rl_eval kills it if a frame takes longer than {self._patience_s:g} s"
            problem = f"ffmpeg was killed by signal {-process.returncode}; {limit}"
            raise ClusterError(problem, key="ffmpeg", value=process.returncode)
        if process.returncode:
            problem = f"ffmpeg ended with exit code {process.returncode}: {words}"
            raise ClusterError(problem, key="ffmpeg", value=process.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        height, width, _ = self.shape
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self._fps:g}", "-i", "-"]
        command = [*_ffmpeg(), *source, "-vf", _EVEN, *_H264, str(self._path)]
        return subprocess.Popen(  # noqa: S603  # rl_eval built the command.
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )


@contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill ffmpeg if the ``with`` block takes too long, because a write blocks until ffmpeg reads its pipe."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gif(content: bytes, *, fps: float = 10.0) -> bytes:
    """Convert an MP4 video to an animated GIF, and return the GIF.

    The GIF is at most 320 pixels wide. Its palette is computed from the video.

    Args:
        content: The MP4 file.
        fps: Maximum number of frames per second.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
        video, animation = Path(folder, "video.mp4"), Path(folder, "video.gif")
        video.write_bytes(content)
        palette = "split[frames][all];[all]palettegen[palette];[frames][palette]paletteuse"
        scale = f"fps={fps:g},scale='min(320,iw)':-2,{palette}"
        command = [*_ffmpeg(), "-i", str(video), "-filter_complex", scale, str(animation)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S)  # noqa: S603
        return animation.read_bytes()


def _ffmpeg() -> list[str]:
    check_encoder()
    import imageio_ffmpeg

    return [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error"]


def _checked(frame: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        found = f"{frame.dtype} of shape {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
        problem = f"render() returned {found}, not a uint8 array of shape (height, width, 3)"
        raise EnvError(problem, key="render", value=found)
    if shape and frame.shape != shape:
        problem = f"render() returned a frame of shape {frame.shape} after one of shape {shape}"
        raise EnvError(problem, key="render", value=frame.shape)
    return np.ascontiguousarray(frame)


_DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
"""Environment variables. A window can open only if at least one of them is set."""


@contextmanager
def rendering_sibling(runner: Runner, mode: str, timeout_s: float | None, spectator: Spectator) -> Iterator[EvalRunner]:
    """Build a runner with one lane, an environment that renders, and the policy of another runner.

    Args:
        runner: Runner with the policy. It must not run episodes at the same time.
        mode: ``render_mode`` of the environment.
        timeout_s: Longest time between reset and end of an episode, in seconds; None for no limit.
        spectator: Observer of the episodes.

    Raises:
        ConfigError: The runner has no single environments, or the environment does not render in this mode.
    """
    if not isinstance(runner, EvalRunner):
        name = type(runner).__name__
        problem = f"a {name} cannot show episodes: only an rl_eval.EvalRunner has single environments, which can render"
        fix = "Evaluate single environments, with runners.runner: vector."
        raise ConfigError(problem, key="runners.runner", value=name, fix=fix)
    settings = with_values(
        runner.settings,
        runners={"num_envs_per_runner": 1},
        evaluation={"observers": (spectator.watch,)},
        fault_tolerance={"episode_timeout_s": timeout_s},
    )
    kwargs = settings.environment.env_kwargs
    # Some factories do not take render_mode, but render anyway.
    ways = {f"with render_mode={mode!r}": {**kwargs, "render_mode": mode}, "as configured": kwargs}
    problems = []
    for way, given in ways.items():
        try:
            sibling = type(runner)(
                with_values(settings, environment={"env_kwargs": given}), runner.runner_index, runner.policy
            )
        except (ConfigError, EnvError) as error:
            problems.append(f"{way}, it cannot be built: {error}")
            continue
        try:
            if (found := getattr(spectator.env, "render_mode", None)) == mode:
                yield sibling
                return
        finally:
            sibling.stop()
        problems.append(f"{way}, its render_mode is {found!r}")
    built = spectator.env
    name = type(getattr(built, "unwrapped", built)).__name__
    why = f": {'; '.join(problems)}" if built is None else ""
    problem = f"the environment {settings.environment.env!r} does not render {mode}{why}"
    fix = (
        f"Add the parameter render_mode=None to {name}.__init__, set self.render_mode, and add {mode!r} to "
        "metadata['render_modes']. A function that builds the environment must pass render_mode on."
    )
    raise ConfigError(problem, key="environment.env", value=mode, fix=fix)


def replay_in_window(result: EvalResult, indices: Sequence[int], *, trust: bool = False) -> Iterator[Replay]:
    """Run episodes again as :func:`rl_eval.replay` does, one after the other, in an environment with a window.

    Args:
        result: Result of the evaluation.
        indices: Indices of the episodes.
        trust: Whether this process may import and call code that the result names.

    Raises:
        UsageError: An episode has no record, or cannot run alone (see :func:`~rl_eval.recording.replay.lease_of`).
        UntrustedError: The result names code that no evaluation in this process has used, and ``trust`` is false.
        WeightsError: The weights are not those of the run.
        ConfigError: There is no display, the environment does not open a window, or the recorded config cannot be used
            again.
        EnvError: An episode that completed in the run fails in the window.
    """
    if sys.platform == "linux":
        if not any(os.environ.get(name) for name in _DISPLAYS):
            problem, fix = "a window needs a display", f"Set {' or '.join(_DISPLAYS)}, or record videos instead."
            raise ConfigError(problem, key=_DISPLAYS[0], fix=fix)
        os.environ.setdefault("SDL_VIDEODRIVER", "x11,wayland")  # By default, SDL may draw nothing, without an error.
    leases = [lease_of(result, index) for index in indices]
    with (
        rebuilt_runner(result, trust=trust) as runner,
        rendering_sibling(runner, "human", None, Spectator()) as sibling,
        one_thread(),
    ):
        for report in run_again(sibling, leases):
            replayed = compared(result, report)
            if report.faults and replayed.recorded.outcome != "failed":
                index = replayed.again.index
                problem = f"episode {index} completed in the run, but failed when it ran again: {report.faults[0]}"
                raise EnvError(problem, key="render", episode=index)
            yield replayed


_DEFAULT_FPS: Final = 30.0


@final
@dataclass(frozen=True)
class Video:
    """Video of one episode, made while the episode ran again."""

    index: int
    """Index of the episode."""
    seed: int
    attempt: int
    """Attempt that ran again: the last one of the record."""
    completed: bool
    """Whether the episode completed again; the video of a failed episode ends at its fault."""
    episode_return: float
    """Return of the episode; NaN if it failed."""
    length: int
    """Number of steps; 0 if the episode failed."""
    differences: tuple[str, ...]
    """Outcome columns that differ from the record."""
    frames: int
    """Number of frames: one after the reset and one after each step, unless the video was cut."""
    cut: bool
    """Whether the video was cut, because the episode had more frames than ``max_frames``."""
    fps: float
    width: int
    """Width of a rendered frame, in pixels; ``height`` is in pixels too."""
    height: int
    content: bytes = field(repr=False)
    """The MP4 file."""
    path: Path | None = None
    """Path of the saved file; None if not saved."""

    @property
    def identical(self) -> bool:
        """Whether all outcome columns are bitwise equal to the record."""
        return not self.differences

    @property
    def name(self) -> str:
        """File name, with episode, seed and return."""
        return video_name(self.index, self.seed, self.episode_return if self.completed else None)

    def save(self, folder: str | os.PathLike[str]) -> Video:
        """Write the file atomically; return the video with its path."""
        path = Path(folder, self.name)
        write_bytes(path, self.content)
        return replace(self, path=path)


@contextmanager
def _without_devices() -> Iterator[None]:
    """Turn off SDL's sound device and, without a display, its video device: SDL prints errors about absent ones."""
    names = ["SDL_AUDIODRIVER", *(() if any(map(os.environ.get, _DISPLAYS)) else ("SDL_VIDEODRIVER",))]
    added = dict.fromkeys((name for name in names if name not in os.environ), "dummy")
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def record_episode(
    runner: Runner,
    recorded: npt.NDArray[np.void],
    spec: EpisodeSpec,
    *,
    fps: float | None = None,
    max_frames: int = 10_000,
    timeout_s: float = 600.0,
) -> Video:
    """Run one episode again with the policy and weights of a runner, and record a video of it.

    Args:
        runner: Runner with the policy. It must not run episodes at the same time.
        recorded: Record of the episode, an array of dtype ``ROW`` and shape (1,).
        spec: Entry of the plan for the episode.
        fps: Frames per second; by default ``render_fps`` of the environment's metadata, or 30 if it is missing.
        max_frames: Maximum number of frames of the video.
        timeout_s: Longest time between reset and end, in seconds.

    Raises:
        ConfigError: The environment does not render, or imageio-ffmpeg is not installed.
        EnvError: Rendering failed, or frames have different sizes.
        WeightsError: The version of the runner's weights is not the version in the record.
    """
    row = recorded[0]
    if isinstance(runner, EvalRunner) and runner.weights_version != row["weights_version"]:
        raise WeightsError(
            f"the record has weights version {row['weights_version']}, but the runner has version "
            f"{runner.weights_version} now",
            key="weights_version",
            value=runner.weights_version,
            episode=int(row["index"]),
            fix="Record videos before sending other weights.",
        )
    camera = _Camera(max_frames)
    with (
        _without_devices(),
        rendering_sibling(runner, "rgb_array", timeout_s, camera) as sibling,
        tempfile.TemporaryDirectory(prefix="rl_eval-") as folder,
    ):
        file = Path(folder, "video.mp4")
        metadata = getattr(camera.env, "metadata", None) or {}
        rate = fps or float(metadata.get("render_fps") or _DEFAULT_FPS)
        lease = Lease(spec, int(row["attempts"]))
        with camera.writing(Encoder(file, rate)) as encoder:
            again = next(run_again(sibling, [lease])).rows
        outcomes = (outcomes_of(one, np.zeros((1, 0)), ()) for one in (recorded, again))
        return Video(
            index=lease.index,
            seed=lease.seed,
            attempt=lease.attempt,
            completed=bool(again["outcome"][0] == Outcome.COMPLETED),
            episode_return=float(again["episode_return"][0]),
            length=int(again["length"][0]),
            differences=tuple(different_columns(*outcomes)),
            frames=encoder.frames,
            cut=camera.cut,
            fps=rate,
            height=encoder.shape[0],
            width=encoder.shape[1],
            content=file.read_bytes(),
        )


@final
class _Camera(Spectator):
    """Observer that renders its environment after the reset and after each step. An error does not end the episode."""

    def __init__(self, max_frames: int) -> None:
        self.cut = False
        self._encoder: Encoder | None = None
        self._max_frames = max_frames
        self._error: BaseException | None = None

    @contextmanager
    def writing(self, encoder: Encoder) -> Iterator[Encoder]:
        """Encode the frames that are rendered in the ``with`` block.

        Raises:
            EnvError: A frame could not be rendered or encoded, or no frame was rendered.
        """
        self._encoder = encoder
        try:
            yield encoder
        finally:
            try:
                encoder.close()
            except ClusterError as error:
                self._error = self._error or error
        if self._error is not None:
            problem = f"the video failed after {encoder.frames} frames: {summary_of(self._error)}"
            raise EnvError(problem, key="render", value=encoder.frames) from self._error
        if not encoder.frames:
            raise EnvError("the episode failed before its first frame", key="render", value=0)

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Take a frame."""
        self._shoot()

    def on_step(self, *step: Any) -> None:
        """Take a frame."""
        self._shoot()

    def _shoot(self) -> None:
        """Take one frame. After an error the episode continues without video."""
        if self._error is not None or self._encoder is None:
            return
        if self._encoder.frames >= self._max_frames:
            self.cut = True
            return
        try:
            self._encoder.write(self.env.render())
        except survivable() as error:
            self._error = error


_GRACE_S: Final = 60.0
"""Time to build the environment and to encode, in seconds. It is added to the time limit of the episode."""
_LETHAL: Final = ("runner", "timeout")
"""Causes of faults that terminate or block the runner's process."""


def follow_up_videos(settings: VideoSettings, done: Callable[[list[Future[Video]]], object]) -> FollowUp:
    """Return a follow-up for :meth:`EvalRunnerGroup.submit`: after the evaluation, a runner records videos.

    Args:
        settings: Selection of episodes, and video options. The caller saves the videos.
        done: Called once, when all videos are done, with one future per video: the video or its error.
    """
    return FollowUp(partial(_tasks, settings=settings), done, settings.timeout_s + _GRACE_S)


def record_with_group(
    group: EvalRunnerGroup,
    result: EvalResult,
    settings: VideoSettings,
    step: int,
    on_error: Callable[[Exception], object] | None = None,
) -> list[Video]:
    """Record episodes of a group's last evaluation, one after the other, with one runner of the group.

    Call this function before you send other weights. A runner records between evaluations: evaluations that were
    submitted before this call run first. Evaluations that are submitted during a recording wait. An error of a video
    does not affect the evaluation.

    Args:
        group: Group that ran the evaluation.
        result: Result of the evaluation, which used the group's current weights.
        settings: Selection of episodes, video options and folder.
        step: Training step; the files are in the subfolder ``step_<step>``.
        on_error: Called with the error of a video; then the next video starts, except after a :class:`ConfigError`.
            By default, the error is raised.

    Returns:
        Saved videos, in the order of the selection.

    Raises:
        ConfigError: The environment does not render.
        EnvError: Rendering fails. Or the episode killed or blocked its runner in the evaluation, so it does not run
            again.
        WeightsError: The runners have other weights now.
        ClusterError: The runner was lost while it recorded, or took too long.
    """
    limit_s = settings.timeout_s + _GRACE_S
    videos = (partial(group.apply_to_one, task, limit_s) for task in _tasks(result, settings))
    return list(saved(videos, Path(settings.folder, f"step_{step}"), on_error))


def saved(
    videos: Iterable[Callable[[], Video]], folder: Path, on_error: Callable[[Exception], object] | None
) -> Iterator[Video]:
    """Save videos one after the other, and yield each video with its path.

    Args:
        videos: Functions that record a video or wait for a video, and return it.
        folder: Folder of the MP4 files.
        on_error: Called with the error of a video; then the next video follows, except after a :class:`ConfigError`,
            which concerns all videos. If ``on_error`` is None, the error is raised.
    """
    for make in videos:
        try:
            video = make().save(folder)
        except Exception as error:
            if on_error is None:
                raise
            on_error(error)
            if isinstance(error, ConfigError):
                return
            continue
        yield video


def record_videos(
    source: str | os.PathLike[str] | EvalResult,
    select: str | Sequence[str],
    folder: str | os.PathLike[str],
    config: EvalConfig | EvalSettings | None = None,
    policy: Any = None,
    *,
    max_videos: int = 8,
    fps: float | None = None,
    max_frames: int = 10_000,
    timeout_s: float = 600.0,
    trust: bool = False,
) -> list[Video]:
    """Record episodes of a finished evaluation in this process, with the config in its provenance.

    If an environment killed or blocked its runner, it will probably do the same to this process.

    Args:
        source: Folder or URI of an evaluation log, folder of a saved result, or a result.
        select: Selectors of episodes; see :class:`VideoSettings`.
        folder: Folder of the MP4 files.
        config: Config of the run. Pass it if the config contained Python objects. Default: the recorded config.
        policy: Policy object, if the run had one.
        max_videos: Maximum number of videos.
        fps: Frames per second; by default ``render_fps`` of the environment's metadata, or 30 if it is missing.
        max_frames: Maximum number of frames of one video; the rest of the episode is not recorded.
        timeout_s: Longest time that one video may take, in seconds.
        trust: Whether this process may import and call code that the result names; see :func:`rl_eval.replay`.

    Returns:
        Saved videos, in the order of the selection.

    Raises:
        UntrustedError: The result names code that no evaluation in this process has used, and ``trust`` is false.
        UsageError: The result does not exist, no episode is selected, or the config differs from that of the run.
        LogError: The evaluation log is damaged.
        WeightsError: The weights are not those of the run.
        ConfigError: The recorded config cannot be used again, the environment does not render, a selector is unknown,
            an argument is out of range, or imageio-ffmpeg is not installed.
        EnvError: Rendering fails.
    """
    settings = VideoSettings(select, folder, max_videos, fps, max_frames, timeout_s)
    result = source if isinstance(source, EvalResult) else load(source)
    indices = select_episodes(result, settings.select, settings.max_videos)
    if not indices:
        raise UsageError(f"{settings.select!r} selects no episode of the result", key="select", value=settings.select)
    with rebuilt_runner(result, config, policy, trust=trust) as runner, one_thread():
        return [_recording(settings, result, index)(runner).save(settings.folder) for index in indices]


def _tasks(result: EvalResult, settings: VideoSettings) -> list[Callable[[Any], Video]]:
    """Return one function for each video of a result. The function takes a runner, and returns the recorded video."""
    indices = select_episodes(result, settings.select, settings.max_videos)
    lethal = {index for index, faults in result.table.faults.items() if any(one.cause in _LETHAL for one in faults)}
    return [partial(_refuse, index=i) if i in lethal else _recording(settings, result, i) for i in indices]


def _refuse(runner: Runner, index: int) -> Video:
    problem = f"episode {index} crashed or blocked a runner, so the runners do not record it"
    fix = "To record it in a separate process, save the result and use rl-eval replay --video."
    raise EnvError(problem, episode=index, fix=fix)


def _recording(settings: VideoSettings, result: EvalResult, index: int) -> Callable[[Any], Video]:
    return partial(
        record_episode,
        recorded=result.table.rows[index : index + 1],
        spec=result.plan[index],
        fps=settings.fps,
        max_frames=settings.max_frames,
        timeout_s=settings.timeout_s,
    )
