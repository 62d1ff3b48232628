"""Videos of chosen episodes: each runs again in an environment that renders, here or beside a runner of a group."""

from __future__ import annotations

import os
import tempfile
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
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ClusterError, ConfigError, EnvError, UsageError, WeightsError
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.jobs import FollowUp
from rl_eval.recording.replay import Spectator, rebuilt_runner, run_again
from rl_eval.recording.video.encoder import Encoder
from rl_eval.recording.video.rendering import rendering_sibling
from rl_eval.recording.video.selection import VideoSettings, select_episodes
from rl_eval.recording.videos import video_name
from rl_eval.records.episode import EpisodeSpec, Lease, Outcome, different_columns, outcomes_of
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult
from rl_eval.runners import EvalRunner, Runner
from rl_eval.supervision.caller import one_thread

__all__ = ["Video", "follow_up_videos", "record_episode", "record_videos", "record_with_group", "saved"]

_DEFAULT_FPS: Final = 30.0


@final
@dataclass(frozen=True)
class Video:
    """Video of one episode, as it was when it ran again."""

    index: int
    """Index of the episode."""
    seed: int
    attempt: int
    """The attempt that ran again: the last of the record."""
    completed: bool
    """Whether it completed again; the video of a failed episode ends at its fault."""
    episode_return: float
    """Its return; NaN when failed."""
    length: int
    """Its steps; 0 when failed."""
    differences: tuple[str, ...]
    """Outcome columns in which it differs from the record."""
    frames: int
    """Frames of the video: one after the reset and one after each step, unless it was cut."""
    cut: bool
    """Whether the episode had more frames than ``max_frames``."""
    fps: float
    width: int
    """Pixels of a frame as rendered; so is the height."""
    height: int
    content: bytes = field(repr=False)
    """The MP4 file."""
    path: Path | None = None
    """Where it was saved."""

    @property
    def identical(self) -> bool:
        """Whether the episode came out as it was recorded, bit by bit in all outcome columns."""
        return not self.differences

    @property
    def name(self) -> str:
        """File name, with episode, seed and return."""
        return video_name(self.index, self.seed, self.episode_return if self.completed else None)

    def save(self, folder: str | os.PathLike[str]) -> Video:
        """Write the file, whole or not at all; return the video with its path."""
        path = Path(folder, self.name)
        write_bytes(path, self.content)
        return replace(self, path=path)


def record_episode(
    runner: Runner,
    recorded: npt.NDArray[np.void],
    *,
    seating: tuple[str, ...] | None = None,
    fps: float | None = None,
    max_frames: int = 10_000,
    timeout_s: float = 600.0,
) -> Video:
    """Run one episode again beside a runner, with its policy and weights, and record a video of it.

    Args:
        runner: Whose policy acts; between two of its calls.
        recorded: The episode's record, array of ``ROW``, shape (1,).
        seating: Who sits where in it, as in its spec.
        fps: Frames per second; by default those of the environment's metadata, else 30.
        max_frames: Most frames of the video.
        timeout_s: Longest time between reset and end, in seconds.

    Raises:
        ConfigError: The environment does not render, or imageio-ffmpeg is not installed.
        EnvError: It failed to render, or rendered no frames of one size.
        WeightsError: The runner has another version of the weights than the record.
    """
    row = recorded[0]
    if isinstance(runner, EvalRunner) and runner.weights_version != row["weights_version"]:
        raise WeightsError(
            f"episode {row['index']} was run with weights version {row['weights_version']}, and the runner has version "
            f"{runner.weights_version} by now: record videos of an evaluation before the next weights are sent"
        )
    camera = _Camera(max_frames)
    with (
        rendering_sibling(runner, "rgb_array", timeout_s, camera) as sibling,
        tempfile.TemporaryDirectory(prefix="rl_eval-") as folder,
    ):
        file = Path(folder, "video.mp4")
        metadata = getattr(camera.env, "metadata", None) or {}
        rate = fps or float(metadata.get("render_fps") or _DEFAULT_FPS)
        lease = Lease(int(row["index"]), int(row["seed"]), int(row["attempts"]), 0, seating=seating)
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
    """Observer that renders its environment after the reset and after each step, and never raises."""

    def __init__(self, max_frames: int) -> None:
        self.cut = False
        self._encoder: Encoder | None = None
        self._max_frames = max_frames
        self._error: Exception | None = None

    @contextmanager
    def writing(self, encoder: Encoder) -> Iterator[Encoder]:
        """Encode what is rendered.

        Raises:
            EnvError: A frame could not be taken.
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
            raise EnvError(
                f"the episode cannot be recorded: after {encoder.frames} frames, "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error
        if not encoder.frames:
            raise EnvError("the episode cannot be recorded: it failed before its first frame")

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Take a frame."""
        self._shoot()

    def on_step(self, *step: Any) -> None:
        """Take a frame."""
        self._shoot()

    def _shoot(self) -> None:
        """Take one frame; what goes wrong concerns the video alone, and the episode goes on."""
        if self._error is not None or self._encoder is None:
            return
        if self._encoder.frames >= self._max_frames:
            self.cut = True
            return
        try:
            self._encoder.write(self.env.render())
        except Exception as error:
            self._error = error


_GRACE_S: Final = 60.0
"""What building the environment and encoding may take beyond the limit of the episode."""
_LETHAL: Final = ("runner", "timeout")
"""Causes of faults that end or block the runner's process."""


def follow_up_videos(settings: VideoSettings, done: Callable[[list[Future[Video]]], object]) -> FollowUp:
    """Return what has a runner record videos right after an evaluation, for :meth:`EvalRunnerGroup.submit`.

    Args:
        settings: Which episodes, and how; saving the videos is the caller's.
        done: Given every video, or why there is none, when all are done.
    """
    return FollowUp(partial(_tasks, settings=settings), done, settings.timeout_s + _GRACE_S)


def record_with_group(
    group: EvalRunnerGroup,
    result: EvalResult,
    settings: VideoSettings,
    step: int,
    on_error: Callable[[Exception], object] | None = None,
) -> list[Video]:
    """Record episodes of the evaluation that a group has just made, one after the other, with one of its runners.

    Call it before the next weights are sent. A runner records between evaluations: those that were submitted
    already run first, those that come later wait. What goes wrong with a video is never the evaluation's fault.

    Args:
        group: That made the result.
        result: Of its last weights.
        settings: Which episodes, and where the files go.
        step: Training step; the files lie in the folder ``step_<step>``.
        on_error: Called with what went wrong with a video, and the next is made; by default it is raised.

    Returns:
        The videos that were made, saved, in the order of the selection.

    Raises:
        ConfigError: The environment does not render.
        EnvError: It fails to render, or the episode killed or blocked its runner and so is not run again.
        WeightsError: The runners have other weights by now.
        ClusterError: The runner was lost meanwhile.
    """
    limit_s = settings.timeout_s + _GRACE_S
    videos = (partial(group.apply_to_one, task, limit_s) for task in _tasks(result, settings))
    return list(saved(videos, Path(settings.folder, f"step_{step}"), on_error))


def saved(
    videos: Iterable[Callable[[], Video]], folder: Path, on_error: Callable[[Exception], object] | None
) -> Iterator[Video]:
    """Save videos, and go on after one that failed.

    Args:
        videos: What makes each, or waits for it.
        folder: Where the files go.
        on_error: Called with what went wrong with a video; what is wrong with all of them is reported once. Without it,
            that is raised.
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
    """Record episodes of a finished evaluation in this process, from what its provenance says.

    An environment that killed or hung its runner does the same to this process.

    Args:
        source: A result, or the folder or URI of one or of an evaluation log.
        select: Which episodes; see :class:`VideoSettings`, also for the numbers below.
        folder: Where the MP4 files go.
        config: What was evaluated, for a run that was configured with live objects; by default as recorded.
        policy: The live policy, if the run was given one.
        max_videos: Most videos.
        fps: Frames per second.
        max_frames: Most frames of one video.
        timeout_s: Longest time that one video may take, in seconds.
        trust: Whether code that the result names may be imported and called; see
            :func:`rl_eval.replay`.

    Returns:
        The videos, saved, in the order of the selection.

    Raises:
        UntrustedError: The result names code that no evaluation of this process named.
        UsageError: There is no such result, nothing of it is selected, or the config is another one.
        WeightsError: The weights are not those of the run.
        ConfigError: The recorded config cannot be used again, the environment does not render, or an argument is out
            of range.
        EnvError: It fails to render.
    """
    settings = VideoSettings(select, folder, max_videos, fps, max_frames, timeout_s)
    result = source if isinstance(source, EvalResult) else load(source)
    indices = select_episodes(result, settings.select, settings.max_videos)
    if not indices:
        raise UsageError(f"no episode of the result is selected by {settings.select!r}: there is nothing to record")
    with rebuilt_runner(result, config, policy, trust=trust) as runner, one_thread():
        return [_recording(settings, result, index)(runner).save(settings.folder) for index in indices]


def _tasks(result: EvalResult, settings: VideoSettings) -> list[Callable[[Any], Video]]:
    """Return what makes the videos of a result when it is called with a runner."""
    indices = select_episodes(result, settings.select, settings.max_videos)
    lethal = {index for index, faults in result.table.faults.items() if any(one.cause in _LETHAL for one in faults)}
    return [partial(_refuse, index=i) if i in lethal else _recording(settings, result, i) for i in indices]


def _refuse(runner: Runner, index: int) -> Video:
    raise EnvError(
        f"episode {index} ended or blocked a runner, so no runner is asked to record it; to try it in a process of its "
        "own, save the result and use rl-eval replay --video"
    )


def _recording(settings: VideoSettings, result: EvalResult, index: int) -> Callable[[Any], Video]:
    return partial(
        record_episode,
        recorded=result.table.rows[index : index + 1],
        seating=result.plan.seating(index),
        fps=settings.fps,
        max_frames=settings.max_frames,
        timeout_s=settings.timeout_s,
    )
