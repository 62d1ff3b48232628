"""Videos of the chosen episodes of a result, made by a runner of a warm group or in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, EnvError, UsageError
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.jobs import FollowUp
from rl_eval.results.loading import load
from rl_eval.results.replay import rebuilt_runner
from rl_eval.results.result import EvalResult
from rl_eval.runners import Runner
from rl_eval.runners.one_thread import one_thread
from rl_eval.video.episode import Video, record_episode
from rl_eval.video.selection import VideoSettings, select_episodes

__all__ = ["follow_up_videos", "record_videos", "record_with_group", "saved"]

Task = Callable[[Any], Video]

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
        trust: Whether code that the result names may run although somebody else may have made it; see
            :func:`rl_eval.replay`.

    Returns:
        The videos, saved, in the order of the selection.

    Raises:
        UntrustedError: Somebody else may have made the result.
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


def _tasks(result: EvalResult, settings: VideoSettings) -> list[Task]:
    """Return what makes the videos of a result when it is called with a runner."""
    indices = select_episodes(result, settings.select, settings.max_videos)
    lethal = {index for index, faults in result.table.faults.items() if any(one.cause in _LETHAL for one in faults)}
    return [partial(_refuse, index=i) if i in lethal else _recording(settings, result, i) for i in indices]


def _refuse(runner: Runner, index: int) -> Video:
    raise EnvError(
        f"episode {index} ended or blocked a runner, so no runner is asked to record it; to try it in a process of its "
        "own, save the result and use rl-eval replay --video"
    )


def _recording(settings: VideoSettings, result: EvalResult, index: int) -> Task:
    return partial(
        record_episode,
        recorded=result.table.rows[index : index + 1],
        seating=result.plan.seating(index),
        fps=settings.fps,
        max_frames=settings.max_frames,
        timeout_s=settings.timeout_s,
    )
