"""Films one episode where its runner lives: it runs again beside the runner, in an environment that renders.

The runner's own environments are not touched. A sibling with one lane has the same policy object, and so the same
weights; since an episode does not depend on its layout, it comes out again, and whether it did is told.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.atomic_write import write_bytes
from rl_eval.episode import Lease, Outcome, different_columns
from rl_eval.errors import ClusterError, ConfigError, EnvError, WeightsError
from rl_eval.replaying import run_lease
from rl_eval.runners import EvalRunner, Runner
from rl_eval.settings import EvalSettings
from rl_eval.video.encoder import Encoder

__all__ = ["Video", "record_episode"]

_MODE: Final = "rgb_array"
_DEFAULT_FPS: Final = 30.0


@final
@dataclass(frozen=True)
class Video:
    """The film of one episode, as it was when it ran again."""

    index: int
    """Index of the episode."""
    seed: int
    attempt: int
    """The attempt that ran again: the last of the record."""
    completed: bool
    """Whether it completed again; a failed episode is filmed up to its fault."""
    episode_return: float
    """Its return; NaN when failed."""
    length: int
    """Its steps; 0 when failed."""
    differences: tuple[str, ...]
    """Outcome columns in which it differs from the record."""
    frames: int
    """Frames of the film: one after the reset and one after each step, unless it was cut."""
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
        value = f"return_{self.episode_return:.6g}" if self.completed else "failed"
        return f"episode_{self.index}_seed_{self.seed}_{value}.mp4"

    def save(self, folder: str | os.PathLike[str]) -> Video:
        """Write the file, whole or not at all; return the video with its path."""
        path = Path(folder, self.name)
        write_bytes(path, self.content)
        return replace(self, path=path)


def record_episode(
    runner: Runner,
    recorded: npt.NDArray[np.void],
    *,
    fps: float | None = None,
    max_frames: int = 10_000,
    timeout_s: float = 600.0,
) -> Video:
    """Run one episode again beside a runner, with its policy and weights, and film it.

    Args:
        runner: Whose policy acts; between two of its calls.
        recorded: The episode's record, array of ``ROW``, shape (1,).
        fps: Frames per second; by default those of the environment's metadata, else 30.
        max_frames: Most frames of the film.
        timeout_s: Longest time between reset and end, in seconds.

    Raises:
        ConfigError: The environment does not render, or imageio-ffmpeg is not installed.
        EnvError: It failed to render, or rendered no frames of one size.
        WeightsError: The runner has another version of the weights than the record.
    """
    row = recorded[0]
    if not isinstance(runner, EvalRunner):
        raise ConfigError(f"episodes of {type(runner).__name__} cannot be filmed: it is no rl_eval.EvalRunner")
    if (version := runner.weights_version) != row["weights_version"]:
        raise WeightsError(
            f"episode {row['index']} was run with weights version {row['weights_version']}, and the runner has version "
            f"{version} by now: film an evaluation before the next weights are sent"
        )
    sibling = _rendering_sibling(runner, int(row["attempts"]), timeout_s)
    try:
        with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
            film = Path(folder, "film.mp4")
            rate = fps or _fps_of(sibling)
            camera = _Camera(sibling, Encoder(film, rate), max_frames)
            with camera.rolling():
                lease = Lease(int(row["index"]), int(row["seed"]), int(row["attempts"]), 0)
                again = run_lease(sibling, lease).rows
            return _video(recorded, again, camera, rate, film.read_bytes())
    finally:
        sibling.stop()


def _video(
    recorded: npt.NDArray[np.void], again: npt.NDArray[np.void], camera: _Camera, fps: float, content: bytes
) -> Video:
    row, encoder = again[0], camera.encoder
    return Video(
        index=int(row["index"]),
        seed=int(row["seed"]),
        attempt=int(row["attempts"]),
        completed=bool(row["outcome"] == Outcome.COMPLETED),
        episode_return=float(row["episode_return"]),
        length=int(row["length"]),
        differences=tuple(different_columns(recorded, again)),
        frames=encoder.frames,
        cut=camera.cut,
        fps=fps,
        height=encoder.shape[0],
        width=encoder.shape[1],
        content=content,
    )


@final
class _Camera:
    """Renders after the reset and after each step of a runner's first lane."""

    def __init__(self, runner: EvalRunner, encoder: Encoder, max_frames: int) -> None:
        self.encoder = encoder
        self.cut = False
        self._runner = runner
        self._max_frames = max_frames
        self._error: Exception | None = None

    @contextmanager
    def rolling(self) -> Iterator[None]:
        """Film what the lane does.

        Raises:
            EnvError: A frame could not be taken.
        """
        lane = self._runner._lanes[0]
        lane.reset, lane.step = self._filmed(lane.reset), self._filmed(lane.step)
        try:
            yield
        finally:
            self._finish()
        if self._error is not None:
            raise EnvError(
                f"the episode cannot be filmed: after {self.encoder.frames} frames, "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error
        if not self.encoder.frames:
            raise EnvError("the episode cannot be filmed: it failed before its first frame")

    def _finish(self) -> None:
        try:
            self.encoder.close()
        except ClusterError as error:
            self._error = self._error or error

    def _filmed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def filmed(*args: Any, **kwargs: Any) -> Any:
            returned = call(*args, **kwargs)
            self._runner._recorder.idle()  # The limits of a reset or a step are not for rendering.
            self._shoot()
            return returned

        return filmed

    def _shoot(self) -> None:
        """Take one frame; what goes wrong is the film's matter, and the episode goes on."""
        if self._error is not None:
            return
        if self.encoder.frames >= self._max_frames:
            self.cut = True
            return
        try:
            env = self._runner._lanes[0].env
            assert env is not None
            self.encoder.write(env.render())
        except Exception as error:
            self._error = error


def _rendering_sibling(runner: EvalRunner, attempts: int, timeout_s: float) -> EvalRunner:
    """Build a runner with one lane whose environment renders, and with the policy of another.

    Raises:
        ConfigError: The environment does not render.
    """
    settings = _one_lane(runner.settings, attempts, timeout_s)
    problems = []
    for way, kwargs in _ways(settings).items():
        section = settings.environment.model_copy(update={"env_kwargs": kwargs})
        rendering = settings.model_copy(update={"environment": section})
        try:
            sibling = type(runner)(rendering, runner.runner_index, runner.policy)
        except (ConfigError, EnvError) as error:
            problems.append(f"{way}, it cannot be built: {error}")
            continue
        env = sibling._lanes[0].env
        if getattr(env, "render_mode", None) == _MODE:
            return sibling
        sibling.stop()
        modes = (getattr(env, "metadata", None) or {}).get("render_modes")
        problems.append(
            f"{way}, its render_mode is {getattr(env, 'render_mode', None)!r}, of {modes} that its metadata names"
        )
    raise ConfigError(
        f"the environment {settings.environment.env!r} cannot be filmed, as it does not render {_MODE}: "
        f"{'; '.join(problems)}. A factory that takes an EnvContext has to pass render_mode on"
    )


def _one_lane(settings: EvalSettings, attempts: int, timeout_s: float) -> EvalSettings:
    return settings.model_copy(
        update={
            "runners": settings.runners.model_copy(update={"num_envs_per_runner": 1}),
            # The attempt of the record, and none that would need another environment.
            "fault_tolerance": settings.fault_tolerance.model_copy(
                update={"max_attempts_per_episode": attempts, "episode_timeout_s": timeout_s}
            ),
        }
    )


def _ways(settings: EvalSettings) -> dict[str, dict[str, Any]]:
    """Return the kwargs to try: not every factory knows the mode, and some render anyway."""
    kwargs = settings.environment.env_kwargs
    return {f"with render_mode={_MODE!r}": {**kwargs, "render_mode": _MODE}, "as configured": dict(kwargs)}


def _fps_of(runner: EvalRunner) -> float:
    metadata = getattr(runner._lanes[0].env, "metadata", None) or {}
    return float(metadata.get("render_fps") or _DEFAULT_FPS)
