"""Video of one episode, recorded where its runner lives: it runs again there, in an environment that renders.

Whether it came out again is reported.
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
from rl_eval.errors import ClusterError, ConfigError, EnvError, WeightsError
from rl_eval.records.episode import EpisodeSpec, Lease, Outcome, different_columns, outcomes_of
from rl_eval.results.replay import run_lease
from rl_eval.results.videos import video_name
from rl_eval.runners import EvalRunner, Runner
from rl_eval.video.encoder import Encoder
from rl_eval.video.sibling import Spectator, rendering_sibling

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
    sibling = rendering_sibling(runner, _MODE, timeout_s, camera)
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
        differences=tuple(different_columns(*(outcomes_of(one, np.zeros((1, 0)), ()) for one in (recorded, again)))),
        frames=encoder.frames,
        cut=cut,
        fps=fps,
        height=encoder.shape[0],
        width=encoder.shape[1],
        content=content,
    )


@final
class _Camera(Spectator):
    """Observer that renders its environment after the reset and after each step, and never raises."""

    def __init__(self, max_frames: int) -> None:
        super().__init__()
        self.cut = False
        self._encoder: Encoder | None = None
        self._max_frames = max_frames
        self._error: Exception | None = None

    @property
    def fps(self) -> float:
        """Frames per second that the environment's metadata name."""
        return float(self.metadata.get("render_fps") or _DEFAULT_FPS)

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
