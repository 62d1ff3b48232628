"""Video of one episode, recorded where its runner lives: it runs again there, in an environment that renders.

The runner's own environments are not touched. A sibling with one lane has the same policy object, and so the same
weights; since an episode does not depend on its layout, it comes out again, and whether it did is reported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.atomic_write import write_bytes
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ClusterError, ConfigError, EnvError, WeightsError
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec, Lease, Outcome, different_columns
from rl_eval.results.replay import run_lease
from rl_eval.results.videos import video_name
from rl_eval.runners import EvalRunner, Runner
from rl_eval.video.encoder import Encoder

__all__ = ["Video", "record_episode"]

_MODE: Final = "rgb_array"
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
    if not isinstance(runner, EvalRunner):
        raise ConfigError(f"episodes of {type(runner).__name__} cannot be recorded: it is no rl_eval.EvalRunner")
    if (version := runner.weights_version) != row["weights_version"]:
        raise WeightsError(
            f"episode {row['index']} was run with weights version {row['weights_version']}, and the runner has version "
            f"{version} by now: record videos of an evaluation before the next weights are sent"
        )
    camera = _Camera(max_frames)
    sibling = _rendering_sibling(runner, timeout_s, camera)
    try:
        with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
            file = Path(folder, "video.mp4")
            rate = fps or camera.fps
            lease = Lease(int(row["index"]), int(row["seed"]), int(row["attempts"]), 0, seating=seating)
            with camera.writing(Encoder(file, rate)) as encoder:
                again = run_lease(sibling, lease).rows
            return _video(recorded, again, encoder, camera.cut, rate, file.read_bytes())
    finally:
        sibling.stop()


def _video(
    recorded: npt.NDArray[np.void],
    again: npt.NDArray[np.void],
    encoder: Encoder,
    cut: bool,
    fps: float,
    content: bytes,
) -> Video:
    row = again[0]
    return Video(
        index=int(row["index"]),
        seed=int(row["seed"]),
        attempt=int(row["attempts"]),
        completed=bool(row["outcome"] == Outcome.COMPLETED),
        episode_return=float(row["episode_return"]),
        length=int(row["length"]),
        differences=tuple(different_columns(recorded, again)),
        frames=encoder.frames,
        cut=cut,
        fps=fps,
        height=encoder.shape[0],
        width=encoder.shape[1],
        content=content,
    )


@final
class _Camera:
    """Observer that renders its environment after the reset and after each step, and never raises.

    Args:
        max_frames: Most frames.
    """

    def __init__(self, max_frames: int) -> None:
        self.env: Any = None
        """What it renders."""
        self.cut = False
        self._encoder: Encoder | None = None
        self._max_frames = max_frames
        self._error: Exception | None = None

    def watch(self, env: Any) -> _Camera:
        """Render another environment from now on."""
        self.env = env
        return self

    @property
    def fps(self) -> float:
        """Frames per second that the environment's metadata name."""
        return float(self._metadata.get("render_fps") or _DEFAULT_FPS)

    @property
    def problem(self) -> str:
        """Reason why the environment cannot be recorded; empty if it can."""
        mode = getattr(self.env, "render_mode", None)
        modes = self._metadata.get("render_modes")
        return "" if mode == _MODE else f"its render_mode is {mode!r}, of {modes} that its metadata names"

    @property
    def _metadata(self) -> Any:
        return getattr(self.env, "metadata", None) or {}

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
            self._finish(encoder)
        if self._error is not None:
            raise EnvError(
                f"the episode cannot be recorded: after {encoder.frames} frames, "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error
        if not encoder.frames:
            raise EnvError("the episode cannot be recorded: it failed before its first frame")

    def _finish(self, encoder: Encoder) -> None:
        try:
            encoder.close()
        except ClusterError as error:
            self._error = self._error or error

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """See :class:`EpisodeObserver`."""
        self._shoot()

    def on_step(self, *step: Any) -> None:
        """See :class:`EpisodeObserver`."""
        self._shoot()

    def on_episode_end(self, record: EpisodeRecord) -> None:
        """See :class:`EpisodeObserver`."""

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


def _rendering_sibling(runner: EvalRunner, timeout_s: float, camera: _Camera) -> EvalRunner:
    """Build a runner with one lane whose environment renders for a camera, and with the policy of another.

    Raises:
        ConfigError: The environment does not render.
    """
    settings = _one_lane(runner.settings, timeout_s, camera)
    problems = []
    for way, kwargs in _ways(settings).items():
        section = settings.environment.model_copy(update={"env_kwargs": kwargs})
        rendering = settings.model_copy(update={"environment": section})
        try:
            sibling = type(runner)(rendering, runner.runner_index, runner.policy)
        except (ConfigError, EnvError) as error:
            problems.append(f"{way}, it cannot be built: {error}")
            continue
        if not camera.problem:
            return sibling
        sibling.stop()
        problems.append(f"{way}, {camera.problem}")
    raise ConfigError(
        f"the environment {settings.environment.env!r} cannot be recorded, as it does not render {_MODE}: "
        f"{'; '.join(problems)}. A factory that takes an EnvContext has to pass render_mode on"
    )


def _one_lane(settings: EvalSettings, timeout_s: float, camera: _Camera) -> EvalSettings:
    return settings.model_copy(
        update={
            "runners": settings.runners.model_copy(update={"num_envs_per_runner": 1}),
            "evaluation": settings.evaluation.model_copy(update={"observers": (camera.watch,)}),
            "fault_tolerance": settings.fault_tolerance.model_copy(update={"episode_timeout_s": timeout_s}),
        }
    )


def _ways(settings: EvalSettings) -> dict[str, dict[str, Any]]:
    """Return the kwargs to try: not every factory knows the mode, and some render anyway."""
    kwargs = settings.environment.env_kwargs
    return {f"with render_mode={_MODE!r}": {**kwargs, "render_mode": _MODE}, "as configured": dict(kwargs)}
